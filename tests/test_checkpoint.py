"""Checkpoints: what is kept, what counts as whole, and what a run does when it is stopped at the worst moment."""

from __future__ import annotations

import builtins
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save as save_tensors

import tiny
from fedagg import checkpoint, files, formats, interrupt, record, runs
from fedagg.checkpoint import Checkpoint
from fedagg.cli import main
from fedagg.config import Config
from fedagg.engines.sequential import Sequential
from fedagg.errors import FedaggError, FedaggWarning, SettingError
from fedagg.from_config import keeps_on_disk
from fedagg.memory import ClientMemory, Shelf


def made(done: int) -> Checkpoint:
    tensors = {"w": torch.full((5,), float(done)), "state/known": torch.tensor(done / 3, dtype=torch.float64)}
    return Checkpoint(done, tensors, {"seconds": 1.5, "metrics.jsonl": 10 * done})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the files -------------------------------------------------------------------------------------------------------


def test_the_last_two_are_kept_and_are_read_back_unchanged(tmp_path: Path) -> None:
    for done in (1, 2, 3, 4):
        checkpoint.save(tmp_path, made(done))
    assert names(tmp_path) == [f"round-00000{n}.{kind}" for n in (3, 4) for kind in ("0.safetensors", "json")]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.round == 4
    assert found.facts["seconds"] == 1.5
    assert torch.equal(found.tensors["w"], torch.full((5,), 4.0))
    assert float(found.tensors["state/known"]) == 4 / 3  # double precision is kept


def test_a_finished_run_does_not_keep_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedagg.memory.PART", 100)
    stops = SimpleNamespace(round_done=lambda row: row["round"] == 3)
    for name, kept, more in (("a", False, {}), ("b", True, {"checkpoint_every": 2}), ("c", True, {"callbacks": [stops]})):
        tiny.job(algorithm="scaffold", out=tmp_path / name, **more)
        assert any((tmp_path / name / "checkpoints").glob("*")) == kept
    with pytest.raises(FedaggError, match=r"its checkpoints are gone.*--checkpoint-every"):
        tiny.job(algorithm="scaffold", resume=tmp_path / "a", rounds=8)
    tiny.job(algorithm="fedavg", out=tmp_path / "d")  # nothing is remembered
    assert any((tmp_path / "d" / "checkpoints").glob("*"))


def test_more_than_a_million_rounds_are_in_order(tmp_path: Path) -> None:
    for done in (999_998, 999_999, 1_000_000, 1_000_001):
        checkpoint.save(tmp_path, made(done))
    assert [path.stem for path in checkpoint.list_files(tmp_path)] == ["round-1000000", "round-1000001"]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.round == 1_000_001


def test_a_checkpoint_of_a_newer_version_is_refused_and_kept(tmp_path: Path) -> None:
    for done in (1, 2):
        checkpoint.save(tmp_path, made(done))
    newest = tmp_path / "round-000002.json"
    facts = json.loads(newest.read_text())
    assert facts["format"] == formats.FORMAT == 1
    newest.write_text(json.dumps({**facts, "format": 2, "self": "made in another way"}))
    before = names(tmp_path)
    with pytest.raises(FedaggError, match=r"round-000002.json: has format 2, but this version of fedagg reads up to 1"):
        checkpoint.latest(tmp_path)
    assert names(tmp_path) == before


def test_a_checkpoint_without_a_number_is_of_format_1(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, made(1))
    facts = json.loads((tmp_path / "round-000001.json").read_text())
    old = {name: value for name, value in facts.items() if name not in ("format", "self")}
    (tmp_path / "round-000001.json").write_text(json.dumps({**old, "self": checkpoint.facts_checksum(old)}))
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.round == 1


def test_a_run_folder_of_a_newer_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    tiny.job(rounds=1, out=folder)
    assert runs.load(folder).environment["format"] == 1
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**environment, "format": 2}))
    with open(folder / "config.toml", "a", encoding="utf-8") as config:
        config.write("unheard_of = 1\n")  # what a newer version may well have
    with pytest.raises(FedaggError, match="has format 2"):
        runs.load(folder)
    with pytest.raises(FedaggError, match="has format 2"):
        tiny.job(rounds=2, resume=folder)
    with pytest.raises(SystemExit) as stop:
        main(["run", "--resume", str(folder)])
    assert stop.value.code == 2
    assert "has format 2" in capsys.readouterr().err
    del environment["format"]  # as before there were numbers
    (folder / "environment.json").write_text(json.dumps(environment))
    text = (folder / "config.toml").read_text().replace("unheard_of = 1\n", "")
    (folder / "config.toml").write_text(text)
    assert len(tiny.job(rounds=2, resume=folder).history) == 2


def test_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    w = torch.arange(4.0)
    checkpoint.save(tmp_path, Checkpoint(1, {"w": w, "good_w": w, "half": w[:2]}, {}))
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.tensors["half"].tolist() == [0.0, 1.0]


def test_what_a_killed_process_left_is_removed_with_the_next_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, made(1))
    for part in (0, 1):
        (tmp_path / f"round-000002.{part}.safetensors").write_bytes(b"its JSON was never written")
    checkpoint.save(tmp_path, made(3))
    assert not any(name.startswith("round-000002") for name in names(tmp_path))


def test_parts_are_written_and_read_one_after_the_other(tmp_path: Path) -> None:
    """What clients remember may be more than fits: of all parts before it, one at most is still there when a part is made."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def parts() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(3):
            assert sum(ref() is not None for ref in alive) <= 1
            rows = torch.full((2, 4), float(number))
            alive.append(weakref.ref(rows))
            yield {"rows": rows}
            del rows

    checkpoint.save(tmp_path, Checkpoint(7, {"w": torch.ones(1)}, {}, parts()))
    assert names(tmp_path) == [f"round-000007.{part}.safetensors" for part in range(4)] + ["round-000007.json"]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert set(found.tensors) == {"w"}
    assert [int(part["rows"][0, 0]) for part in found.parts] == [0, 1, 2]


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_part_is_noticed(tmp_path: Path, part: int, how: str) -> None:
    checkpoint.save(tmp_path, made(1))
    checkpoint.save(tmp_path, replace(made(2), parts=[{"rows": torch.ones(9)}, {"rows": torch.ones(9)}]))
    damage(tmp_path / f"round-000002.{part}.safetensors", how)
    with pytest.warns(FedaggWarning, match=r"round-000002.json is damaged"):
        found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.round == 1
    assert names(tmp_path) == ["round-000001.0.safetensors", "round-000001.json"]


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    altered = {
        "cut": content[:middle],
        "empty": b"",
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "longer": content + b"\n{}",
        "noise": random.Random(0).randbytes(len(content)),
    }
    path.unlink() if how == "gone" else path.write_bytes(altered[how])


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "longer", "noise", "gone"])
@pytest.mark.parametrize("suffix", [".json", ".0.safetensors"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_used(tmp_path: Path, suffix: str, how: str) -> None:
    for done in (1, 2):
        checkpoint.save(tmp_path, made(done))
    damage(tmp_path / f"round-000002{suffix}", how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.round == 1
    said = [str(w.message) for w in caught]
    assert said == [] if (suffix, how) == (".json", "gone") else "round-000002.json is damaged" in said[0]
    assert all("\n" not in text for text in said)
    assert names(tmp_path) == ["round-000001.0.safetensors", "round-000001.json"]  # so that the run can write its own again


def test_every_single_altered_byte_is_noticed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, made(1))
    (path,) = checkpoint.list_files(tmp_path)
    for file in (path, path.with_suffix(".0.safetensors")):
        whole = file.read_bytes()
        for at in range(len(whole)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            with pytest.raises(Exception, match=r"."):
                checkpoint.load(path)
        file.write_bytes(whole)
    assert checkpoint.load(path).round == 1


# --- a run that goes back to them -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    tiny.job(out=folder, algorithm="scaffold", checkpoint_every=2)
    return folder


def begun(folder: Path, rounds: int = 5) -> Path:
    tiny.job(out=folder, algorithm="scaffold", checkpoint_every=2, rounds=rounds)
    return folder


def test_a_run_with_a_damaged_checkpoint_goes_back_and_ends_the_same(tmp_path: Path, whole: Path) -> None:
    run = begun(tmp_path / "run")
    damage(run / "checkpoints" / "round-000005.0.safetensors", "flipped")
    with pytest.warns(FedaggWarning, match="round-000005.json is damaged"):
        tiny.job(resume=run, algorithm="scaffold", checkpoint_every=2)
    assert tiny.same_run(run, whole)


def test_a_run_without_an_intact_checkpoint_starts_again_and_ends_the_same(tmp_path: Path, whole: Path) -> None:
    run = begun(tmp_path / "run")
    for path in checkpoint.list_files(run / "checkpoints"):
        damage(path, "cut")
    with pytest.warns(FedaggWarning) as caught:
        tiny.job(resume=run, algorithm="scaffold", checkpoint_every=2)
    assert "starts from its first round" in str(caught[-1].message)
    assert tiny.same_run(run, whole)


def reseal(path: Path, tensors: dict[str, Any] | None = None, part: int = 0, **facts: Any) -> None:
    """Alter a checkpoint and make its checksums right again: damage that only its meaning gives away."""
    found = checkpoint.load(path)
    old = [found.tensors, *found.parts][part]
    packed = save_tensors({name: t for name, t in {**old, **(tensors or {})}.items() if t is not None})
    path.with_suffix(f".{part}.safetensors").write_bytes(packed)
    sums = found.facts["sha256"]
    sums[part] = checkpoint.hashlib.sha256(packed).hexdigest()
    known = {**found.facts, **facts}
    path.write_text(json.dumps({**known, "self": checkpoint.facts_checksum(known)}))


@pytest.mark.parametrize(
    ("tensors", "facts", "words"),
    [
        ({"w": torch.zeros(3)}, {}, "w is"),
        ({"w": None}, {}, "w is missing"),
        ({"state/c": torch.zeros(3)}, {}, "state/c"),
        ({"buffers": torch.zeros(17, dtype=torch.float64)}, {}, "buffers"),
        ({"ids": torch.tensor([77])}, {"part": 1}, "remember"),
        ({"ids": None}, {"part": 1}, "remember"),
        ({"rows": torch.zeros(1, 1)}, {"part": 1}, "remember"),
        ({}, {"metrics.jsonl": 10**9}, "shorter than its checkpoint says"),
        ({}, {"metrics.jsonl": 7}, "damaged"),
        ({}, {"identity": {"data": "another"}}, "data is not what the run began with"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_clear_line(
    tmp_path: Path, tensors: dict[str, Any], facts: dict[str, Any], words: str
) -> None:
    run = begun(tmp_path / "run", rounds=2)
    reseal(checkpoint.list_files(run / "checkpoints")[-1], tensors, **facts)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(FedaggError, match=words) as caught:
        tiny.job(resume=run, algorithm="scaffold", checkpoint_every=2)
    assert "\n" not in str(caught.value)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("line", ["", "[]", '{"round": 7}', "no JSON", "[" * 100_000, "\xff"])
def test_a_damaged_record_is_one_clear_line(tmp_path: Path, line: str) -> None:
    run = begun(tmp_path / "run", rounds=2)
    size = (run / "metrics.jsonl").stat().st_size
    (run / "metrics.jsonl").write_bytes((line.encode("latin-1") + b"\n") * size)
    with pytest.raises(FedaggError, match=r"metrics.jsonl: damaged"):
        tiny.job(resume=run, algorithm="scaffold", checkpoint_every=2)


# --- stopped at the worst moment ------------------------------------------------------------------------------------


class Killed(BaseException):
    """Not an Exception, so nothing tidies up on its way: the nearest thing to SIGKILL within a process."""


@contextmanager
def killed_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The process ends at its n-th operation on files."""
    count = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "r" in args[1:2] or (args and "/run" not in str(args[0]) and not isinstance(args[0], int)):
                return real(*args, **kwargs)
            count[0] += 1
            if count[0] == number:
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", counted(open))
        for name in ("replace", "fsync", "truncate"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        yield count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*starts from its first round")
def test_killed_at_every_single_operation_on_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin, kill at operation n, resume, kill that at its n-th operation as well, resume: the end is always the
    same."""
    settings = {"algorithm": "feddyn", "checkpoint_every": 1, "rounds": 3, "epochs": 1}
    tiny.job(out=tmp_path / "whole", **settings)
    number, kills = 0, 0
    while True:
        number += 1
        run = tmp_path / f"run{number}"
        ended = 0
        with killed_at(number, monkeypatch):
            try:
                tiny.job(out=run, **settings)
                ended += 1
            except Killed:
                kills += 1
        if not (run / "config.toml").exists():
            tiny.job(out=run, **settings)  # killed before it had begun
        else:
            with killed_at(number, monkeypatch):
                try:
                    tiny.job(resume=run, **settings)
                    ended += 1
                except Killed:
                    kills += 1
            tiny.job(resume=run, **settings)
        assert tiny.same_run(run, tmp_path / "whole"), number
        assert [p for p in run.rglob("*") if p.suffix == ".part"] == []
        assert len(checkpoint.list_files(run / "checkpoints")) <= 2
        if ended == 2:
            break
    assert kills > 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedagg-rounded", "fedagg-paper", "scaffold", "feddyn-disk", "fedexp", "average"])
def test_an_interrupt_in_the_middle_of_a_round_drops_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Ctrl-C while a client trains, and between a round's end and its record (here: in the evaluation)."""
    settings = tiny.STATEFUL[name]
    calls = [0]

    def counting(*args: Any, real: Any = Sequential.client) -> Any:
        calls[0] += 1
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Sequential, "client", counting)
        tiny.job(out=tmp_path / "whole", **settings)
    for at, (kind, method) in enumerate([(Sequential, "client"), (tiny.fedagg.federation.Evaluator, "__call__")]):
        run, count, real = tmp_path / f"run{at}", [0], getattr(kind, method)

        when = 5 if method == "__call__" else calls[0] * 2 // 3

        def interrupting(*args: Any, real: Any = real, count: list[int] = count, when: int = when) -> Any:
            count[0] += 1
            if count[0] == when:
                raise KeyboardInterrupt
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(kind, method, interrupting)
            result = tiny.job(out=run, **settings)
        assert result.interrupted
        assert 0 < len(result.history) < 6
        resumed = tiny.job(resume=run, **settings)
        assert not resumed.interrupted
        assert tiny.same_run(run, tmp_path / "whole")


def test_an_interrupt_while_a_round_is_recorded_waits() -> None:
    done = []

    def booked() -> None:
        with interrupt.delay_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        booked()
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    thread = threading.Thread(target=lambda: done.append(interrupt.delay_interrupts().__enter__()))
    thread.start()
    thread.join()
    assert len(done) == 2


# --- two at once ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_record_knows_code_that_is_not_committed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x", *words], check=True, capture_output=True
        )

    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text("1\n")
    git("init")
    git("add", "-A")
    git("commit", "-m", "one")
    clean = record.commit(code)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "notes.txt").write_text("beside the code\n")
    assert record.commit(code) == clean
    (code / "a.py").write_text("2\n")
    assert record.commit(code) == clean + " with changes"


def test_a_folder_in_use_is_refused_and_given_free_at_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"

    class Resuming:
        """Resumes the run while it runs."""

        def started(self, *_: Any) -> None: ...

        def round_done(self, row: dict[str, Any]) -> None:
            with pytest.raises(SettingError, match="in use by another process"):
                tiny.job(resume=run)

        def finished(self, *_: Any) -> None: ...

    tiny.job(out=run, rounds=1, callbacks=[Resuming()])
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    tiny.job(resume=run, rounds=2)
    tiny.job(resume=run, rounds=3)
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.slow
def test_large_checkpoints_are_written_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round takes 20 s here and a checkpoint 10: the first comes after 60 s, the next when 200 more have passed."""
    now, written = 0.0, []

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return now

    def save(folder: Path, what: Checkpoint) -> None:
        nonlocal now
        now += 10
        written.append(what.round)

    class Slow:
        def started(self, *_: Any) -> None: ...

        def round_done(self, _: Any) -> None:
            nonlocal now
            now += 20

        def finished(self, *_: Any) -> None: ...

    monkeypatch.setattr("fedagg.federation.time", Clock)
    monkeypatch.setattr(checkpoint, "save", save)
    tiny.job(out=tmp_path / "run", rounds=27, epochs=1, callbacks=[Slow()])
    assert written == [3, 14, 25, 27]


# --- per-client memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [False, True])
def test_client_memory_forgets_what_was_not_valid_or_not_recorded(disk: bool) -> None:
    memory = ClientMemory(3, disk)
    memory.stage([1, 2], torch.tensor([[1.0, 1, 1], [2, 2, 2]]))
    memory.keep([2])
    assert memory.read([2]).sum() == 0  # not yet recorded
    memory.commit()
    assert memory.read([0, 1, 2]).tolist() == [[0, 0, 0], [0, 0, 0], [2, 2, 2]]
    memory.stage([2], torch.full((1, 3), 9.0))
    memory.keep([])
    memory.commit()
    assert memory.read([2]).tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("client_memory", ["ram", "disk"])
def test_what_clients_remember_comes_back_from_many_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client_memory: str
) -> None:
    settings = {"algorithm": "scaffold", "client_memory": client_memory, "checkpoint_every": 2}
    tiny.job(out=tmp_path / "whole", rounds=4, **settings)
    monkeypatch.setattr("fedagg.memory.PART", 1)  # a client each
    tiny.job(out=tmp_path / "run", rounds=2, **settings)
    assert len(list((tmp_path / "run" / "checkpoints").glob("*.safetensors"))) > 3
    tiny.job(resume=tmp_path / "run", rounds=4, **settings)
    assert tiny.same_run(tmp_path / "run", tmp_path / "whole")


def test_client_memory_on_disk_leaves_no_file_and_says_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = ClientMemory(1000, disk=True)
    memory.write(999, torch.ones(1000))
    assert memory.read([999]).sum() == 1000
    assert list(tmp_path.iterdir()) == []

    def full(vector: Any) -> None:
        raise OSError(28, "No space left on device")

    assert isinstance(memory.rows, Shelf)
    monkeypatch.setattr(memory.rows, "file", Mock(wraps=memory.rows.file, write=full))
    with pytest.raises(FedaggError, match=r"client_memory = 'disk': .*No space left on device"):
        memory.write(1, torch.ones(1000))
    assert list(memory.rows) == [999]


def test_on_disk_a_client_keeps_its_place_and_the_file_no_more_than_was_brought() -> None:
    memory = ClientMemory(1000, disk=True)
    for value in (1.0, 2.0, 3.0):
        for client in (999_999, 5, 70_000):
            memory.write(client, torch.full((1000,), value * client))
    assert torch.equal(memory.read([5, 6, 999_999])[:, 7], torch.tensor([15.0, 0.0, 3.0 * 999_999]))
    assert sorted(memory.rows) == [5, 70_000, 999_999]
    assert isinstance(memory.rows, Shelf)
    assert os.fstat(memory.rows.file.fileno()).st_size == 3 * 4000


def test_what_clients_remember_spills_by_what_all_of_them_would_take() -> None:
    cpu, gpu, many = torch.device("cpu"), torch.device("cuda"), Config(clients=1_000_000, participation=1e-4)
    assert not keeps_on_disk(many, 210, cpu)  # 840 MB
    assert keeps_on_disk(many, 300, cpu)
    assert not keeps_on_disk(many, 300, gpu)
    assert keeps_on_disk(many, 7850, gpu)
    assert not keeps_on_disk(many.model_copy(update={"client_memory": "ram"}), 7850, cpu)


def test_flushing_reaches_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    files.flush(tmp_path / "file")
    files.flush(tmp_path)
