"""`fedagg bench`: every rival does the same job, in a process of its own, and the table shows what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedagg.bench import measure, ours, peak, plain, strong, table, worker
from fedagg.bench.rivals import find
from fedagg.bench.task import Task
from fedagg.cli import main
from fedagg.errors import SettingError

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
LOOP = """'''Mine.

More words.'''
import torch

def run(task, tick):
    model = task.module()
    for t in range(task.rounds + 1):
        for client in task.participants(t):
            model(task.client(client)[0])
        tick()
    return f"done by {__name__}"
"""
TINY = Task(clients=6, participation=0.5, rounds=2, samples=40, epochs=1)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Each rival's process takes as many threads as the tests have, and not all there are: others run beside them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "INHERITED", ())
        yield


@pytest.fixture(scope="module")
def result(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    own = tmp_path_factory.mktemp("rivals") / "my_loop.py"
    own.write_text(LOOP)
    return measure.bench(TINY, ["plain", "batched", str(own)], passes=1)


def test_every_rival_is_timed(result: dict[str, Any]) -> None:
    rows = {row["rival"]: row for row in result["rows"]}
    assert list(rows) == ["plain", "batched", "my_loop"]
    for row in rows.values():
        assert row["failure"] is None
        assert len(row["seconds"]) == TINY.rounds
        assert 0 < row["fastest"] <= row["median"] <= row["slowest"]
        assert row["startup"] > 0
        assert row["ratio"] == pytest.approx(rows["plain"]["median"] / row["median"])
        assert row["share_of_peak"] == pytest.approx(result["operations_per_round"] / row["median"] / result["peak_rate"])
    assert "stacked" in rows["batched"]["note"]
    assert rows["plain"]["ratio"] == 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_is_that_of_the_process_and_its_children(result: dict[str, Any]) -> None:
    assert all(20 << 20 < row["memory"] < 8 << 30 for row in result["rows"])
    child = subprocess.Popen([sys.executable, "-c", "held = b'x' * 90_000_000; print(flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        alone = worker.status(os.getpid())["VmHWM"] * 1024
        assert child.stdout is not None
        child.stdout.readline()
        both = worker.resident()
        assert both is not None
        assert both - alone > 90_000_000
    finally:
        child.communicate(b"\n")


def test_a_network_from_a_plugin_is_timed(tmp_path: Path) -> None:
    """Rivals run in processes of their own, which have to load it, too; and it is tried, as it may do what no form supports."""
    plugin = tmp_path / "my_network.py"
    plugin.write_text(
        "from torch import nn\nfrom fedagg import models\n"
        "@models.register('bench-tiny')\n"
        "def network(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, classes))\n"
    )
    task = replace(TINY, model="bench-tiny", rounds=1, plugin=str(plugin))
    rows = {row["rival"]: row for row in measure.bench(task, ["plain", "auto"], passes=1)["rows"]}
    assert rows["plain"]["median"] > 0
    assert "stacked" in rows["auto"]["note"]


def test_operations_are_counted() -> None:
    # Forward, and backward for the weights alone: two products of samples × 784 × 10, two operations each.
    each = 2 * 2 * 784 * 10
    assert peak.operations(TINY) == each * TINY.samples * TINY.epochs * TINY.per_round


def test_rivals_do_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without shuffling, the yardstick's model is the engine's to rounding: neither skips any of the work."""
    task = Task(clients=3, participation=1.0, rounds=1, samples=40, epochs=2, lr=0.1)
    ends: list[torch.Tensor] = []
    monkeypatch.setattr(plain, "batches", lambda x, y, size: zip(x.split(size), y.split(size), strict=True))
    monkeypatch.setattr("fedagg.seeding.batches", lambda seed, size, epochs: torch.arange(size).expand(epochs, -1))

    class Watched(Task):
        def module(self) -> torch.nn.Module:
            made = super().module()
            self.__dict__["last"] = made
            return made

    watched = Watched(**vars(task))
    plain.run(watched, lambda: None)
    ends.append(torch.cat([p.detach().flatten() for p in watched.__dict__["last"].parameters()]))
    monkeypatch.setattr("fedagg.algorithms.fedavg.FedAvg.update", keeping(ends))
    ours.run("batched", task, lambda: None)
    assert len(ends) == 3
    assert torch.allclose(ends[0], ends[-1], atol=1e-5)


def test_the_strong_loop_does_the_same_job_as_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without shuffling, both end at the same model, with statistics of a batch and without."""

    class Watched(Task):
        def module(self) -> torch.nn.Module:
            self.__dict__["last"] = made = super().module()
            return made

    def in_order(x: torch.Tensor, y: torch.Tensor, size: int) -> Any:
        return zip(x.split(size), y.split(size), strict=True)

    monkeypatch.setattr(plain, "batches", in_order)
    monkeypatch.setattr(strong, "shuffled", in_order)
    for model in ("linear", "lenet5"):
        ends = []
        for loop in (plain, strong):
            task = Watched(model=model, clients=3, participation=0.67, rounds=1, samples=40, epochs=2, lr=0.1)
            loop.run(task, lambda: None)
            ends.append(torch.cat([p.detach().flatten() for p in task.__dict__["last"].parameters()]))
        assert torch.allclose(*ends, atol=1e-5)


def test_ratios_are_given_for_both_loops() -> None:
    timings = [measure.Timing(name, "", "torch", None, seconds=[s]) for name, s in (("plain", 6.0), ("strong", 3.0), ("auto", 1.5))]
    rows = {row["rival"]: row for row in measure.rows(timings, 0.0, 0.0)}
    assert (rows["auto"]["ratio"], rows["auto"]["ratio_strong"]) == (4.0, 2.0)
    assert rows["strong"]["ratio_strong"] == 1.0
    assert measure.rows(timings[2:], 0.0, 0.0)[0]["ratio_strong"] is None


@pytest.mark.slow
def test_neighbours_are_timed_alone_and_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--neighbours", "2", "--seconds", "0.05", "--passes", "1", "--clients", "4", "--samples", "40", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["runs"] == 2
    assert told["ratio"] == pytest.approx(told["beside"] / told["alone"])
    assert min(told["alone"], told["beside"]) > 0
    assert "stacked" in told["note"]
    assert "times as long" in table.neighbours(told)


def keeping(ends: list[torch.Tensor]) -> Any:
    def update(self: Any, model: Any, out: Any, clients: Any) -> Any:
        moved = model.moved(out.mean, out.buffers)
        ends.append(moved.w)
        return moved

    return update


def test_the_page_and_the_numbers_are_kept(result: dict[str, Any], tmp_path: Path) -> None:
    page = table.keep(result, tmp_path)
    text = page.read_text()
    assert page.name.endswith(f"-linear-{result['task']['samples']}.md")
    assert page.name.startswith(result["machine"]["date"])
    assert json.loads(page.with_suffix(".json").read_text()) == result
    assert sum(line.startswith("| ") for line in text.splitlines()) == 1 + len(result["rows"])
    assert result["machine"]["torch"] in text
    assert f"{result['rows'][2]['ratio']:.2f}" in text


def test_a_loop_of_your_own_is_timed(result: dict[str, Any]) -> None:
    row = result["rows"][2]
    assert (row["rival"], row["about"], row["note"]) == ("my_loop", "Mine.", "done by my_loop")


@pytest.mark.parametrize(
    ("text", "said"), [(None, "no such file"), ("x = 1", "no attribute 'run'"), ("import nonesuch", "No module")]
)
def test_a_file_that_is_not_a_rival_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    rival = tmp_path / "my_loop.py"
    if text is not None:
        rival.write_text(text)
    with pytest.raises(SettingError, match=said):
        measure.bench(TINY, [str(rival)], passes=1)


@pytest.mark.parametrize("name", ["flower_simulation", "pfl_research"])
def test_the_rivals_of_the_published_tables_are_found(name: str) -> None:
    found = find(str(BENCHMARKS / f"{name}.py"))
    assert found.needs[0] == found.package


def test_a_rival_that_cannot_run_is_named_and_the_others_continue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launch(rival: str, task: Task) -> dict[str, Any]:
        if rival in ("batched", "peak"):
            raise measure.Failed("it broke")
        return {"seconds": [2.0, 4.0, 3.0], "first": 10.0, "memory": 5, "device_memory": None, "note": None}

    monkeypatch.setattr(measure, "launch", launch)
    rival = tmp_path / "elsewhere.py"
    rival.write_text("NEEDS = ('nonesuch',)\ndef run(task, tick): ...\n")
    found = measure.bench(TINY, ["plain", "batched", str(rival)], passes=2)
    assert [row["failure"] for row in found["rows"]] == [None, "it broke", "not installed"]
    assert (found["rows"][0]["median"], found["rows"][0]["startup"]) == (3.0, 7.0)
    assert len(found["rows"][0]["seconds"]) == 6
    assert found["rows"][0]["share_of_peak"] is None
    assert "it broke" in table.page(found)


def test_a_worker_that_dies_says_why() -> None:
    with pytest.raises(measure.Failed, match="model"):
        measure.launch("plain", Task(model="nonesuch"))


def test_names_are_checked() -> None:
    with pytest.raises(SettingError, match="did you mean 'batched'"):
        measure.bench(TINY, ["batch"])


def test_the_command_prints_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:

    seen = {"seconds": [1.0], "first": 2.0, "memory": 5, "device_memory": 7, "note": "so", "rate": 1.0, "operations": 1.0}
    monkeypatch.setattr(measure, "launch", lambda rival, task: seen)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--model", "mnist-cnn", "--rivals", "plain,auto", "--device", "cpu", "--json", "--rounds", "1"])
    assert stop.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["task"]["model"] == "mnist-cnn"
    assert [row["rival"] for row in printed["rows"]] == ["plain", "auto"]
