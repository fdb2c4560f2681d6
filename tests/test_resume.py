"""Exact resume: a run killed at any moment ends like one that never was, and what may not change is refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedagg
import tiny
from fedagg import Dataset, files
from fedagg.cli import main
from fedagg.data import sources
from fedagg.data.idx import write_idx
from fedagg.engines.sequential import Sequential
from fedagg.errors import DataError, FedaggError, SettingError

HERE = Path(__file__).parent
SMALL = ["--rounds", "6", "--clients", "20", "--epochs", "1", "--checkpoint-every", "1", "--engine", "sequential"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", "COLUMNS": "80"}


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str, str]:
    """`fedagg` in this process: its status, and what it says. Warnings are words here, not errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.raises(SystemExit) as left:
            main([*map(str, arguments)])
    return left.value.code, *capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says that ends in one line and status 2, in this process."""
    status, _, said = command(capsys, *arguments)
    assert (status, said.count("\n")) == (2, 1), said
    return said


# --- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_random_moments_every_method_with_state_ends_the_same(tmp_path: Path) -> None:
    line = [sys.executable, str(HERE / "killing.py"), str(tmp_path), "2", "0"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    told = [json.loads(row) for row in done.stdout.splitlines()]
    assert [(row["name"], row["engine"]) for row in told] == tiny.STATES
    assert [row["name"] for row in told if not row["same"]] == []
    assert sum(row["kills"] for row in told) >= 20


def test_the_command_killed_and_resumed_ends_the_same_and_warns_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "[run]"
    fedagg.run(rounds=6, clients=20, epochs=1, checkpoint_every=1, engine="sequential", out=whole)  # as SMALL says
    process = subprocess.Popen(
        [sys.executable, "-m", "fedagg", "run", *SMALL, "--out", str(run), "--quiet"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while len(list((run / "checkpoints").glob("*.json"))) < 2 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    newest = sorted((run / "checkpoints").glob("*.json"))[-1]
    newest.write_bytes(newest.read_bytes()[:-5])
    status, out, said = command(capsys, "run", "--resume", run, "--json", "--quiet")
    assert status == 0, said
    assert json.loads(out)["rounds"] == 6
    assert said.count("\n") == 1
    assert said.startswith(f"warning: checkpoint {newest.name} is damaged")
    assert tiny.same_run(run, whole)


def test_ctrl_c_stops_with_a_checkpoint_and_the_way_on(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedagg", "run", *SMALL, "--rounds", "5000", "--out", str(run), "--quiet"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (run / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert f"--resume '{run}'" in said.replace("\n", " ")
    rounds = len(tiny.rows(run))
    assert json.loads((run / "result.json").read_text())["interrupted"] is True
    assert fedagg.checkpoint.latest(run / "checkpoints").round == rounds  # type: ignore[union-attr]


def test_a_run_killed_before_it_had_begun_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for at in (0, 1):  # before environment.json is in place, and before config.toml is

        def replace(*args: Any, real: Any = os.replace, left: list[int] = [at]) -> None:  # noqa: B006  counts down
            if left[0] == 0:
                raise SystemExit  # past every handler, as a kill is
            left[0] -= 1
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            with pytest.raises(SystemExit):
                tiny.job(out=run, rounds=1)
        (left,) = run.glob(".*.part")
        left.rename(run / left.name.replace(str(os.getpid()), "1"))  # the next try is another process
        tiny.job(out=run, rounds=1)
        assert list(run.glob(".*")) == []
        shutil.rmtree(run)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "engine"), tiny.STATES)
def test_more_rounds_later_are_the_same_as_all_at_once(tmp_path: Path, name: str, engine: str) -> None:
    settings = {**tiny.STATEFUL[name], "engine": engine}
    tiny.job(out=tmp_path / "whole", rounds=4, **settings)
    tiny.job(out=tmp_path / "run", rounds=2, **settings)
    tiny.job(resume=tmp_path / "run", rounds=3, **settings)
    result = tiny.job(resume=tmp_path / "run", rounds=4, **settings)
    assert tiny.same_run(tmp_path / "run", tmp_path / "whole")
    assert [row["round"] for row in result.history] == [1, 2, 3, 4]
    again = tiny.job(resume=tmp_path / "run", rounds=4, **settings)  # a run that has ended stays as it is
    assert tiny.same_run(tmp_path / "run", tmp_path / "whole")
    assert again.accuracy == result.accuracy


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("ended") / "run"
    tiny.job(out=run, rounds=2)
    return run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.2}, ["lr was 0.1, now 0.2"]),
        ({"algorithm": "fedavg"}, ["algorithm was 'fedagg', now 'fedavg'"]),
        ({"seed": 1, "batch_size": 4}, ["seed was 0, now 1", "batch_size was 8, now 4"]),
        ({"theorem": True}, ["theorem was False, now True"]),
        ({"corrupt_rate": 0.5}, ["corrupt_rate was 0.0, now 0.5"]),
        ({"rounds": 1}, ["rounds = 1", "has done 2 already"]),
    ],
)
def test_a_changed_setting_is_refused_by_name(ended: Path, change: dict[str, Any], words: list[str]) -> None:
    before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
    with pytest.raises(FedaggError) as caught:
        tiny.job(resume=ended, **{"rounds": 2, **change})
    for word in words:
        assert word in str(caught.value)
    assert {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()} == before


def test_the_command_refuses_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fedagg.run(out=tmp_path / "run", rounds=1, clients=20)
    assert "lr was 0.01, now 0.3" in refused(capsys, "run", "--resume", tmp_path / "run", "--lr", "0.3")


def test_only_a_run_with_a_folder_reads_all_its_data_for_their_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(fedagg.identity, "fingerprint", lambda *_: asked.append("data") or {"data": "a checksum"})
    tiny.job(rounds=1)
    assert asked == []
    tiny.job(rounds=1, out=tmp_path / "run")
    assert asked == ["data"]
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["given"] == {"data": "a checksum"}


def test_other_data_another_model_or_other_parts_are_refused(tmp_path: Path, ended: Path) -> None:
    data = tiny.dataset()
    other = Dataset(data.x_train + 1, data.y_train, data.x_test, data.y_test, classes=3)
    settings: dict[str, Any] = {"participation": 0.5, "epochs": 2, "batch_size": 8, "lr": 0.1, "device": "cpu"}
    with pytest.raises(FedaggError, match="data is not what the run began with"):
        fedagg.run(data=other, model=tiny.network(), resume=ended, rounds=2, clients=6, **settings)
    with pytest.raises(FedaggError, match="model is not what the run began with"):
        fedagg.run(data=data, model=nn.Linear(6, 3), resume=ended, rounds=2, clients=6, **settings)
    parts = [np.arange(at, 120, 6) for at in range(6)]
    fedagg.run(data=data, model=tiny.network(), parts=parts, out=tmp_path / "run", rounds=1, **settings)
    with pytest.raises(FedaggError, match="parts is not what the run began with"):
        fedagg.run(data=data, model=tiny.network(), parts=parts[::-1], resume=tmp_path / "run", rounds=2, **settings)
    fedagg.run(data=data, model=tiny.network(), parts=parts, resume=tmp_path / "run", rounds=2, **settings)


def test_a_folder_that_is_no_run_and_a_run_that_is_there_are_refused(
    tmp_path: Path, ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingError, match=r"no config\.toml"):
        tiny.job(resume=tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(SettingError, match="already contains a run"):
        tiny.job(out=ended)
    assert "nothing" in refused(capsys, "run", "--resume", tmp_path / "nothing")


# --- disk and memory ------------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_for_the_model_is_one_line_and_the_run_goes_on_when_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files: the operating system refuses the write half way, as a full disk does."""
    run = tmp_path / "run"
    with files_of_at_most(60_000):
        said = refused(capsys, "run", *SMALL, "--out", run, "--quiet")
    assert "cannot be written (File too large)" in said
    assert [p.name for p in run.rglob("*") if p.suffix in (".part", ".safetensors")] == []
    status, out, _ = command(capsys, "run", "--resume", run, "--json", "--quiet")
    assert (status, json.loads(out)["rounds"]) == (0, 6)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_while_recording_is_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tiny.job(out=tmp_path / "whole", rounds=4)
    tiny.job(out=run, rounds=2)
    good = (run / "metrics.jsonl").read_bytes()

    class Fill:
        """The disk fills up while the run runs."""

        def started(self, *_: Any) -> None:
            (run / "metrics.jsonl").rename(run / "kept")
            (run / "metrics.jsonl").symlink_to("/dev/full")

        def round_done(self, *_: Any) -> None: ...

        def finished(self, *_: Any) -> None: ...

    with pytest.raises(FedaggError, match=r"metrics.jsonl: cannot be written \(No space left on device\).*--resume"):
        tiny.job(resume=run, rounds=4, callbacks=[Fill()])
    (run / "kept").rename(run / "metrics.jsonl")
    assert (run / "metrics.jsonl").read_bytes() == good
    tiny.job(resume=run, rounds=4)
    assert tiny.same_run(run, tmp_path / "whole")


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    files.append(tmp_path / "rows", "whole")

    class Half:
        """Writes half of what it is given, then the disk is full."""

        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def write(self, content: bytes) -> int:
            self.handle.write(content[: len(content) // 2])
            self.handle.flush()
            raise OSError(28, "No space left on device")

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *_: Any) -> None:
            self.handle.close()

        def tell(self) -> int:
            return int(self.handle.tell())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", lambda *a, real=open, **k: Half(real(*a, **k)))
        with pytest.raises(FedaggError, match="No space left"):
            files.append(tmp_path / "rows", "another line")
    assert (tmp_path / "rows").read_text() == "whole\n"


@pytest.mark.filterwarnings("ignore:.*starts from its first round")
def test_every_file_that_cannot_be_written_is_one_line_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write in turn fails: no permission, no space, read-only file system."""
    tiny.job(out=tmp_path / "whole", rounds=3, checkpoint_every=1)
    told: list[str] = []
    for at in range(1, 100):
        run, count, number = tmp_path / f"run{at}", [0], (13, 28, 30)[at % 3]

        def replace(*args: Any, real: Any = os.replace, count: list[int] = count, at: int = at, number: int = number) -> None:
            count[0] += 1
            if count[0] == at:
                raise OSError(number, os.strerror(number))
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            try:
                tiny.job(out=run, rounds=3, checkpoint_every=1)
                break
            except FedaggError as error:
                told.append(str(error))
                assert os.strerror(number) in told[-1]
        assert list(run.rglob(".*.part")) == []
        where = {"resume": run} if (run / "config.toml").exists() else {"out": run}
        tiny.job(**where, rounds=3, checkpoint_every=1)
        assert tiny.same_run(run, tmp_path / "whole")
    assert not any("\n" in text for text in told)
    assert len(told) >= 8  # environment, configuration, two for each of three checkpoints, model, result


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path, ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert "choose a folder you can write to" in refused(capsys, "run", *SMALL, "--out", tmp_path / "file" / "run")
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(30, os.strerror(30))

        patch.setattr(Path, "touch", refuse)
        with pytest.raises(FedaggError, match="Read-only file system"):
            tiny.job(resume=ended, rounds=3)


def test_a_removed_data_file_is_one_line_and_the_run_goes_on_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    shapes = {"train-images": (40, 4, 4), "train-labels": (40,), "t10k-images": (20, 4, 4), "t10k-labels": (20,)}
    described = []
    (tmp_path / "mnist").mkdir()
    for name, shape in shapes.items():
        path = tmp_path / "mnist" / f"{name}-ubyte.gz"
        write_idx(path, rng.integers(0, 10, shape).astype(np.uint8))
        described.append(sources.File(path.name, shape))
    monkeypatch.setitem(sources.SOURCES, "mnist", sources.Source("mnist", 10, tuple(described)))
    settings: dict[str, Any] = {"dataset": "mnist", "data_dir": str(tmp_path), "clients": 4, "participation": 1.0}
    fedagg.run(out=tmp_path / "whole", rounds=6, **settings)
    fedagg.run(out=tmp_path / "run", rounds=3, **settings)
    (tmp_path / "mnist" / "t10k-labels-ubyte.gz").rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"t10k-labels-ubyte\.gz is missing") as caught:
        fedagg.run(resume=tmp_path / "run", rounds=6, **settings)
    assert "\n" not in str(caught.value)
    (tmp_path / "away").rename(tmp_path / "mnist" / "t10k-labels-ubyte.gz")
    fedagg.run(resume=tmp_path / "run", rounds=6, **settings)
    assert tiny.same_run(tmp_path / "run", tmp_path / "whole")


def allocate(*_: Any) -> Any:
    return torch.empty(1 << 60)


def fill(*_: Any) -> Any:
    raise MemoryError


def cuda(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ...")


@pytest.mark.parametrize("kind", [allocate, fill, cuda])
def test_out_of_memory_is_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[..., Any]
) -> None:
    run = tmp_path / "run"
    tiny.job(out=tmp_path / "whole", rounds=4)
    tiny.job(out=run, rounds=2)
    with monkeypatch.context() as patch:
        patch.setattr(Sequential, "client", kind)
        with pytest.raises(FedaggError, match=r"^out of memory; .*--resume .*run$") as caught:
            tiny.job(resume=run, rounds=4)
    assert "\n" not in str(caught.value)
    tiny.job(resume=run, rounds=4)
    assert tiny.same_run(run, tmp_path / "whole")


def test_another_error_is_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Sequential, "client", wrong)
    with pytest.raises(RuntimeError, match="mat1"):
        tiny.job(engine="sequential")


@pytest.mark.filterwarnings("ignore:the loss of the model is not finite", "ignore:no client was", "ignore:left out")
def test_a_loss_that_is_not_finite_is_null_in_the_record_and_comes_back_as_what_it_was(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": "fedadam", "server_lr": 1e38, "clients": 10, "epochs": 1, "engine": "sequential"}
    first = fedagg.run(out=tmp_path / "run", rounds=2, **settings)
    assert np.isnan(first.loss)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert [json.loads(line, parse_constant=no_constant)["loss"] for line in lines] == [None, None]
    again = fedagg.run(resume=tmp_path / "run", rounds=2, **settings)
    assert np.isnan(again.loss)
    assert len(fedagg.run(resume=tmp_path / "run", rounds=3, **settings).history) == 3


def test_a_run_whose_first_round_fails_leaves_its_folder_free(tmp_path: Path) -> None:
    calls = []

    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(len(target))
        if len(calls) > 3:
            raise ZeroDivisionError("a mistake in the loss")
        return nn.functional.cross_entropy(output, target, reduction="none")

    settings: dict[str, Any] = {"out": tmp_path / "run", "rounds": 2, "clients": 10, "engine": "sequential"}
    with pytest.raises(ZeroDivisionError):
        fedagg.run(loss=broken, **settings)
    assert not (tmp_path / "run").exists()
    assert len(fedagg.run(**settings).history) == 2
