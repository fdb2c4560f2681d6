"""Command lines and files of settings that cannot be meant: one line, exit status 2, and nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedagg
from fedagg.cli import main
from fedagg.config import make, read
from fedagg.errors import SettingError

QUICK = ["--rounds", "1", "--clients", "4", "--participation", "0.5", "--quiet"]


def command(*words: str, **given: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "fedagg", *words]
    return subprocess.run(line, text=True, timeout=300, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["run", *QUICK, "--json", "--out", "run"], ["list"]])
def test_an_output_that_takes_nothing(tmp_path: Path, words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = command(*words, stdout=full, cwd=tmp_path)
    assert done.stderr == "fedagg: standard output: cannot be read or written (No space left on device)\n"
    assert done.returncode == 2


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main([*words])
    said = capsys.readouterr().err
    assert left.value.code == 2, said
    assert said.count("\n") == 1, said
    assert said.startswith("fedagg: ")
    return said


@pytest.mark.parametrize("words", [["--out", ""], ["--out="], ["--resume", ""], ["--data-dir", ""], ["--engine", ""], [""]])
def test_an_empty_word_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = complaint(capsys, "run", *QUICK, *words)
    name = words[0].strip("-=") or "argument"
    assert f"{name} = '': is empty" in said or (name == "argument" and "quiet = '': is empty" in said)
    assert not list(tmp_path.iterdir())


def test_a_file_that_begins_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(b"\xef\xbb\xbfrounds = 7\n")
    assert read(path) == {"rounds": 7}


def test_memory_that_runs_out_in_a_run_that_has_begun_names_what_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"algorithm": "feddyn", "clients": 4, "rounds": 1, "engine": "sequential"}
    fedagg.run(out=tmp_path / "run", **settings)

    def full(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("fedagg.engines.sequential.Sequential.client", full)
        with pytest.raises(fedagg.errors.FedaggError, match=r"lower --chunk, or give --client-memory disk, then continue with"):
            fedagg.run(resume=tmp_path / "run", **settings | {"rounds": 2})
        with pytest.raises(fedagg.errors.FedaggError, match=r"lower --chunk, --batch-size or --participation, or the model$"):
            fedagg.run(out=tmp_path / "other", **settings)
    fedagg.run(resume=tmp_path / "run", **settings | {"rounds": 2, "client_memory": "disk", "chunk": 1})


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, -float("inf"), 1e39])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("weight_decay", "fedavg"), ("clip", "fedavg"), ("lr", "fedavg"), ("mu", "fedprox"), ("dyn_alpha", "feddyn")),
        *(("server_lr", "fedadam"), ("tau", "fedadam"), ("global_lr", "scaffold"), ("exp_eps", "fedexp"), ("head_lr", "fedgh")),
    ],
)
def test_numbers_beyond_all_bounds(name: str, method: str, value: float) -> None:
    with pytest.raises(SettingError, match=f"^{name} = "):
        make({"algorithm": method, name: value})


def test_infinity_where_it_means_something() -> None:
    assert make({"partition": "dirichlet", "sigma": float("inf")}).sigma == float("inf")


@pytest.mark.parametrize(("name", "method"), [("rounds", "fedavg"), ("lr", "fedavg"), ("dropout", "fedavg"), ("mu", "fedprox")])
def test_yes_is_no_number(tmp_path: Path, name: str, method: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f"{name} = true\nalgorithm = '{method}'\n")
    with pytest.raises(SettingError, match=f"{name} = True: (give a number|true and false)"):
        make(read(path))
    assert make({"normalize": True}).normalize


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_large_number_is_one_line_or_a_run(engine: str) -> None:
    quick: dict[str, Any] = {"clients": 4, "participation": 0.5, "rounds": 1, "device": "cpu", "engine": engine}
    with pytest.warns(UserWarning, match="no client was valid"):
        fedagg.run(algorithm="fedprox", mu=1e38, **quick)


def test_more_epochs_than_anybody_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "epochs = 1000000000000" in complaint(capsys, "run", "--epochs", "1000000000000")
