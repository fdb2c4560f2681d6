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
from fedagg.config import read

QUICK = ["--rounds", "1", "--clients", "4", "--participation", "0.5", "--quiet"]


def command(*words: str, **given: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "fedagg", *words]
    return subprocess.run(line, text=True, timeout=120, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given})


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
        with pytest.raises(fedagg.errors.FedaggError, match=r"lower --chunk, or give --client-memory disk, then go on with"):
            fedagg.run(resume=tmp_path / "run", **settings | {"rounds": 2})
        with pytest.raises(fedagg.errors.FedaggError, match=r"lower --chunk, --batch-size or --participation, or the model$"):
            fedagg.run(out=tmp_path / "other", **settings)
    fedagg.run(resume=tmp_path / "run", **settings | {"rounds": 2, "client_memory": "disk", "chunk": 1})
