"""Slow nodes: fewer epochs, by how long their last answers took."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

import torch

from fedagg.errors import SettingError
from fedagg.faults import Faults
from fedagg.flower import FedAggStrategy, client_app
from fedagg.flower.pace import Pace
from flower_grid import HereGrid
from test_flower import NODES, model, node, settings, simulated


class Clock:
    """A clock that advances only when something sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in ("pace", "closing"):
        monkeypatch.setattr(f"fedagg.flower.{module}.time", clock)
    return clock


class TimedGrid(HereGrid):
    """Node 1000 + k takes `fixed` seconds, and `each[k]` for every epoch."""

    def __init__(self, clock, each, fixed=0.0):
        super().__init__(client_app(model, node), len(each))
        self.clock, self.each, self.fixed, self.ready, self.epochs = clock, each, fixed, {}, []

    def push_messages(self, messages):
        messages = list(messages)
        given = list(super().push_messages(messages))
        for question, message in zip(given, messages, strict=True):
            if message.metadata.message_type == "train":
                epochs, k = message.content["config"]["epochs"], message.metadata.dst_node_id - 1000
                self.ready[question] = self.clock.now + self.fixed + epochs * self.each[k]
                self.epochs.append((int(message.metadata.group_id), k, epochs))
        return given

    def pull_messages(self, message_ids):
        done = [question for question in message_ids if self.ready.get(question, 0.0) <= self.clock.now]
        return super().pull_messages(done)


def given(grid: TimedGrid) -> list[list[int]]:
    """Epochs of each node, round by round."""
    rounds = max(t for t, _, _ in grid.epochs)
    return [[epochs for at, _, epochs in sorted(grid.epochs) if at == t] for t in range(1, rounds + 1)]


def run(grid, **options):
    own = {name: options.pop(name) for name in ("close_at", "timeout", "out") if name in options}
    config = settings(**{"algorithm": "fedavg", "participation": 1.0, "epochs": 5, "rounds": 4} | options)
    strategy = FedAggStrategy(model(), config, fewer_epochs=True, **own)
    strategy.run(grid, wait=0)
    return strategy


def test_a_node_that_misses_the_close_does_as_many_epochs_as_it_has_time_for(clock):
    """Three nodes take 50 seconds for five epochs, the fourth 110: it can do two in that time. Its late answer says so."""
    grid = TimedGrid(clock, [10.0, 10.0, 10.0, 22.0])
    strategy = run(grid, close_at=0.75, timeout=3600.0, rounds=6)
    assert given(grid)[0] == [5, 5, 5, 5]
    assert given(grid)[-1] == [5, 5, 5, 2]
    assert strategy.about[0]["left_out"] == {"3": "no answer in time"}
    assert strategy.about[-1]["epochs"] == {"3": 2}
    # The three that set the time are not given less because the fourth needs less now.
    assert all(row[:3] == [5, 5, 5] for row in given(grid))


def test_rounds_do_not_get_shorter_and_shorter(clock):
    """Where half of the answers end a round, the slower half is given less, and the quicker half stays as it is."""
    grid = TimedGrid(clock, [1.0, 2.0, 4.0, 8.0])
    run(grid, close_at=0.5, rounds=12)
    assert all(row[:2] == [5, 5] for row in given(grid))
    assert given(grid)[-1] == [5, 5, 2, 1]


def test_a_node_that_never_answers_in_time_is_given_half_and_then_what_fits(clock):
    """Without `close_at` there is `timeout`: 100 seconds, of which 80 are to be used."""
    grid = TimedGrid(clock, [1.0, 1.0, 1.0, 30.0])
    strategy = run(grid, timeout=100.0, rounds=5)
    assert given(grid)[0] == [5, 5, 5, 5]
    assert strategy.about[0]["left_out"] == {"3": "no answer in time"}
    assert [row[3] for row in given(grid)[1:]] == [2, 2, 2, 2]
    assert [row["left_out"] for row in strategy.about[1:]] == [{}] * 4


def test_a_node_that_gets_quicker_is_given_more(clock):
    pace = Pace(5, 100.0, 1.0, {1003: 3}.get, {3: 40.0})
    pace.pending["q"] = (3, 2, clock.now - 2.0)
    pace.note_answer("q", failed=False)
    assert pace.allot([3]) == {3: 3}  # 20.5 seconds an epoch, of 80
    pace.pending["q"] = (3, 3, clock.now - 3.0)
    pace.note_answer("q", failed=False)
    assert pace.allot([3]) == {3: 5}


def test_the_time_of_an_error_counts_only_if_it_was_a_timeout(clock):
    pace = Pace(4, 100.0, 1.0, {1003: 3}.get)
    pace.pending["q"] = (3, 4, clock.now - 1.0)
    pace.note_answer("q", failed=True)
    assert pace.allot([3]) == {}
    pace.pending["q"] = (3, 4, clock.now - 100.0)
    pace.note_answer("q", failed=True)
    assert pace.allot([3]) == {3: 1}  # 50 seconds an epoch, of 80


def test_what_is_known_of_nodes_outlives_the_server(clock, tmp_path):
    grid = TimedGrid(clock, [1.0, 1.0, 1.0, 30.0])
    first = run(grid, timeout=100.0, rounds=2, out=tmp_path)
    again = FedAggStrategy(model(), first.config.model_copy(update={"rounds": 3}), out=tmp_path, timeout=100.0, fewer_epochs=True)
    assert again.pace.each == first.pace.each != {}
    again.record.close()


METHODS = [({"algorithm": name}, False) for name in ("fedavg", "fedagg", "scaffold")]
METHODS += [({"variant": "paper"}, False), ({"algorithm": "fedavg"}, True)]


@pytest.mark.parametrize(("changes", "quiet"), METHODS)
def test_fewer_epochs_are_a_stragglers(changes, quiet, monkeypatch):
    """A node does with fewer epochs what a simulated straggler does, and what it tells is taken for what it is."""
    allotted = {0: 1, 2: 2}
    changes = {"participation": 1.0, "epochs": 3, **changes}
    strategy = FedAggStrategy(model(), settings(**changes), fewer_epochs=True)
    monkeypatch.setattr(strategy.pace, "allot", lambda clients: allotted)
    strategy.run(HereGrid(client_app(model, node, quiet=quiet), NODES), wait=0)
    monkeypatch.setattr(Faults, "epochs", lambda self, t, client, epochs: allotted.get(client, epochs))
    alone = simulated(**changes)
    assert [row["left_out"] for row in strategy.about] == [{}] * 3
    shown = strategy.server.algorithm.reported(strategy.server.model).w
    assert torch.allclose(shown, strategy.layout.pack(alone.model).w, rtol=0, atol=1e-5)
    assert [row["stragglers"] for row in strategy.record.history] == [2] * 3
    assert [row["samples"] for row in strategy.record.history] == [row["samples"] for row in alone.history]


def test_it_is_refused_where_nodes_must_be_alike():
    with pytest.raises(SettingError, match="fewer-epochs"):
        FedAggStrategy(model(), settings(), fewer_epochs=True, secure=True)
