"""Run folders that somebody else had their hands on, and runs that go on elsewhere."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedagg
import tiny
from fedagg.config import read
from fedagg.data import load
from fedagg.engines import batched, stacked
from fedagg.engines.base import Problem
from fedagg.engines.batched import Batched
from fedagg.errors import FedaggError, FedaggWarning, SettingError
from fedagg.work import ClientOptions, Job

FEW: dict[str, Any] = {"algorithm": "fedavg", "clients": 4, "participation": 0.5, "rounds": 1, "device": "cpu"}


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(tmp_path: Path) -> None:
    tiny.job(out=tmp_path / "run", rounds=2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = tiny.rows(tmp_path / "run")
    with pytest.raises(FedaggError, match="its checkpoints are gone"):
        tiny.job(resume=tmp_path / "run", rounds=4)
    assert tiny.rows(tmp_path / "run") == before
    (tmp_path / "run" / "checkpoints").mkdir()  # emptied, and not removed
    with pytest.raises(FedaggError, match="its checkpoints are gone"):
        tiny.job(resume=tmp_path / "run", rounds=4)


def test_a_run_killed_before_its_first_checkpoint_says_that_it_starts_from_the_first_round(tmp_path: Path) -> None:
    tiny.job(out=tmp_path / "whole", rounds=3)
    tiny.job(out=tmp_path / "run", rounds=2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    for name in ("result.json", "model.safetensors"):  # a killed run has neither
        (tmp_path / "run" / name).unlink()
    with pytest.warns(FedaggWarning, match="starts from its first round"):
        tiny.job(resume=tmp_path / "run", rounds=3)
    assert tiny.same_run(tmp_path / "run", tmp_path / "whole")


def test_other_threads_are_told_and_kept(tmp_path: Path) -> None:
    here = torch.get_num_threads()
    tiny.job(out=tmp_path / "run", rounds=2, threads=here)
    with pytest.warns(FedaggWarning, match=f"threads was {here}, now {here + 1}: the last digits may differ"):
        tiny.job(resume=tmp_path / "run", rounds=3, threads=here + 1)
    kept = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert kept["threads"] == here
    assert kept["resumed"] == [{"round": 2, "threads": here + 1}]


def test_another_engine_or_version_is_told(tmp_path: Path) -> None:
    tiny.job(out=tmp_path / "run", rounds=2)
    path = tmp_path / "run" / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))
    with pytest.warns(FedaggWarning, match=r"torch was '1.0', now .* engine was 'one client at a time', now 'vmap"):
        tiny.job(resume=tmp_path / "run", rounds=3, engine="batched")
    path.write_text("[]")
    tiny.job(resume=tmp_path / "run", rounds=4)  # what cannot be read is no reason to stop


def test_where_clients_vectors_live_and_how_often_is_looked_may_change(tmp_path: Path) -> None:
    tiny.job(out=tmp_path / "whole", rounds=4, algorithm="feddyn")
    tiny.job(out=tmp_path / "run", rounds=2, algorithm="feddyn")
    tiny.job(resume=tmp_path / "run", rounds=4, algorithm="feddyn", client_memory="disk", eval_every=2)
    model = "model.safetensors"
    assert (tmp_path / "run" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()


def test_who_trains_together_does_not_depend_on_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(6, 3)
    data = tiny.dataset()
    problem = Problem(module, data.x_train, data.y_train, 3, ClientOptions(epochs=1, batch_size=4), torch.device("cpu"))
    jobs = [Job(client, torch.arange(8), 1, client) for client in range(8)]
    monkeypatch.setattr(batched, "activations", lambda problem: 1 << 24)  # a handful of such clients is 4 GiB
    sizes = set()
    for pages in (1 << 10, 1 << 16, 1 << 30):
        real = batched.os.sysconf
        monkeypatch.setattr(
            batched.os, "sysconf", lambda name, pages=pages, real=real: pages if name == "SC_AVPHYS_PAGES" else real(name)
        )
        groups = Batched(problem, stacked.StackedNetwork).groups(jobs)
        sizes.add(tuple(len(group) for group in groups))
    assert len(sizes) == 1


def test_a_batch_size_beyond_the_data_takes_no_more_room() -> None:
    data = tiny.dataset()
    rooms = {
        Batched(
            Problem(nn.Linear(6, 3), data.x_train, data.y_train, 3, ClientOptions(1, size), torch.device("cpu")),
            stacked.StackedNetwork,
        ).room()
        for size in (120, 10**12)
    }
    assert len(rooms) == 1


# --- what a run says of its data ---------------------------------------------------------------------------------------


def test_data_are_recorded_as_what_they_are(tmp_path: Path) -> None:
    given = load("mnist-mini").normalized()
    fedagg.run(data=given, out=tmp_path / "run", **FEW)
    assert read(tmp_path / "run" / "config.toml")["dataset"] == "custom"
    kept = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert kept["data"] == "mnist-mini"
    assert len(kept["given"]["data"]) == 32
    again = FEW | {"rounds": 2}
    plain = load("mnist-mini")
    named = fedagg.Dataset(plain.x_train, plain.y_train, plain.x_test, plain.y_test, name="mnist-mini")
    with pytest.raises(FedaggError, match="data is not what the run began with"):
        fedagg.run(data=named, resume=tmp_path / "run", **again)
    with pytest.raises(FedaggError, match="dataset was 'custom', now 'mnist-mini'"):
        fedagg.run(data=plain, resume=tmp_path / "run", **again)
    assert len(fedagg.run(data=given, resume=tmp_path / "run", **again).history) == 2


def test_other_data_under_a_sets_name_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fedagg.run(out=tmp_path / "run", **FEW)
    other = load("mnist-mini")
    other.y_train[3] = (other.y_train[3] + 1) % 10
    monkeypatch.setattr("fedagg.from_config.load", lambda *asked: other)
    with pytest.raises(FedaggError, match="data is not what the run began with"):
        fedagg.run(resume=tmp_path / "run", **FEW | {"rounds": 2})


# --- several runs in one process ---------------------------------------------------------------------------------------


class Starting:
    """Starts another run in the middle of one."""

    def __init__(self, start: Any) -> None:
        self.start = start

    def round_done(self, row: dict[str, Any]) -> None:
        self.start()


def test_a_run_in_another_thread_is_refused_and_changes_nothing() -> None:
    plain = tiny.job(rounds=3).model.state_dict()
    said: list[str] = []

    def other() -> None:
        try:
            tiny.job(rounds=1)
        except SettingError as error:
            said.append(str(error))

    def start() -> None:
        thread = threading.Thread(target=other, name="second")
        thread.start()
        thread.join()

    ours = tiny.job(rounds=3, callbacks=[Starting(start)]).model.state_dict()
    assert said
    assert all("another run is in progress in this process" in words for words in said)
    assert all(torch.equal(value, plain[name]) for name, value in ours.items())


def test_a_run_within_a_run_is_one_after_the_other() -> None:
    plain = tiny.job(rounds=3).model.state_dict()
    ours = tiny.job(rounds=3, callbacks=[Starting(lambda: tiny.job(rounds=1, seed=5))]).model.state_dict()
    assert all(torch.equal(value, plain[name]) for name, value in ours.items())
