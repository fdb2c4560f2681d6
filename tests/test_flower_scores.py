"""Test results of a federation: which node tests what, where it is recorded, and who is told."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

import numpy as np
import torch

import fedagg
from fedagg.errors import SettingError
from fedagg.flower import FedAggStrategy, Privacy, client_app
from fedagg.flower.server import split
from flower_grid import HereGrid, PowerCut
from test_flower import DATA, NODES, PARTS, federated, model, settings, simulated

FEDAVG = {"algorithm": "fedavg", "participation": 1.0}


def own_tests(context):
    """Every node has test samples of its own, 10, 20, 30 and 40 of them; the last has none."""
    k = context.node_config["partition-id"]
    part, tests = torch.as_tensor(PARTS[k]), slice(100 * k, 100 * k + 10 * (k + 1))
    given = (DATA.x_train[part], DATA.y_train[part], DATA.x_test[tests], DATA.y_test[tests])
    return given if k < 3 else given[:2]


def scored(weights: np.ndarray, k: int) -> tuple[float, float]:
    """Loss and accuracy of the linear model on a node's test samples, by hand."""
    matrix, bias = weights[:7840].reshape(10, 784).astype(np.float64), weights[7840:].astype(np.float64)
    tests = slice(100 * k, 100 * k + 10 * (k + 1))
    x, y = DATA.x_test[tests].flatten(1).double().numpy(), DATA.y_test[tests].numpy()
    logits = x @ matrix.T + bias
    logs = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - logits[np.arange(len(y)), y]
    return float(logs.mean()), float((logits.argmax(1) == y).mean())


def ran(out=None, app=None, callbacks=(), **options):
    grid = HereGrid(app or client_app(model, own_tests), NODES)
    given = {key: options.pop(key) for key in ("secure", "privacy", "test_apart", "close_at") if key in options}
    strategy = FedAggStrategy(model(), settings(**FEDAVG | options), out=out, callbacks=callbacks, **given)
    strategy.run(grid, wait=0)
    return strategy, grid


@pytest.mark.parametrize("secure", [False, True])
def test_nodes_test_the_model_they_are_sent_to_train(secure, tmp_path):
    """The numbers of round t come with the answers of round t + 1; the last model has a message of its own."""
    strategy, grid = ran(out=tmp_path, secure=secure)
    kinds = [message.metadata.message_type for message, _ in grid.sent]
    assert kinds.count("evaluate") == NODES
    models = [strategy.server.model.w.numpy()]  # made by round 3, 2, 1
    for number in ("3", "2"):
        asked = [m for m, _ in grid.sent if m.metadata.group_id == number and "weights" in next(iter(arrays(m)), {})]
        models.append(next(iter(arrays(asked[0])))["weights"].numpy())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == strategy.record.history
    tests = [test for line in (tmp_path / "clients.jsonl").read_text().splitlines() for test in json.loads(line).get("tests", [])]
    assert [test["round"] for test in tests] == [1, 2, 3]
    for row, test, w in zip(rows, tests, models[::-1], strict=True):
        each = [scored(w, k) for k in range(3)]
        assert test["clients"] == [0, 1, 2]
        assert test["samples"] == [10, 20, 30]
        assert test["loss"] == pytest.approx([loss for loss, _ in each], rel=1e-4)
        assert test["accuracy"] == pytest.approx([accuracy for _, accuracy in each])
        assert row["accuracy"] == pytest.approx(sum((k + 1) * each[k][1] for k in range(3)) / 6)
        assert row["loss"] == pytest.approx(sum((k + 1) * each[k][0] for k in range(3)) / 6, rel=1e-4)
        assert row["tested"] == 3


def arrays(message):
    return message.content.array_records.values()


def test_apart_all_nodes_test_the_model_that_would_be_kept():
    """FedExP keeps the mean of the last two models. With training, the one trained is tested, and at the end the one kept."""
    options = {"algorithm": "fedexp", "participation": 0.5, "rounds": 4}
    apart, grid = federated(test_apart=True, **options)
    along, _ = federated(**options)
    alone = simulated(**options)
    assert sum(message.metadata.message_type == "evaluate" for message, _ in grid.sent) == 4 * NODES
    assert [row["tested"] for row in apart.record.history] == [4] * 4
    assert [row["tested"] for row in along.record.history] == [2, 2, 2, 4]
    assert [row["loss"] for row in apart.record.history] == pytest.approx([row["loss"] for row in alone.history], abs=1e-4)
    assert along.record.history[-1]["loss"] == apart.record.history[-1]["loss"]
    assert along.record.history[1]["loss"] != pytest.approx(apart.record.history[1]["loss"], rel=1e-3)


def test_only_rounds_that_are_due_are_tested():
    strategy, grid = ran(rounds=5, eval_every=2)
    assert [row["round"] for row in strategy.record.history if "accuracy" in row] == [2, 4, 5]
    asked = [m.metadata.group_id for m, _ in grid.sent if m.content.config_records.get("config", {}).get("test")]
    assert asked == ["3"] * NODES + ["5"] * NODES


def test_a_quiet_node_tells_no_test_results():
    strategy, grid = ran(app=client_app(model, own_tests, quiet=True))
    assert not any("accuracy" in row for row in strategy.record.history)
    assert not any("tests" in row for row in strategy.about)
    told = [dict(record) for m, _ in grid.received for record in m.content.metric_records.values()]
    assert not any(name.startswith("test-") for record in told for name in record)


@pytest.mark.parametrize("secure", [False, True])
def test_with_privacy_the_record_holds_no_nodes_own_results(secure):
    strategy, _ = ran(secure=secure, privacy=Privacy(clipping_norm=1.0, noise_multiplier=0.1))
    assert [row["tested"] for row in strategy.record.history] == [3] * 3
    assert not any("tests" in row for row in strategy.about)


def test_a_run_that_ends_early_tests_its_last_model():
    most = 1.001 * 2 * privacy_of_two_rounds()
    strategy, grid = ran(rounds=5, privacy=Privacy(clipping_norm=1.0, noise_multiplier=5.0, epsilon_max=most))
    assert [row["tested"] for row in strategy.record.history] == [3] * strategy.done
    assert 1 <= strategy.done < 5
    assert sum(message.metadata.message_type == "evaluate" for message, _ in grid.sent) == NODES


def privacy_of_two_rounds() -> float:
    from fedagg.flower.privacy import epsilon

    return epsilon(2, 5.0, 1e-5)


def test_a_server_that_dies_after_results_were_recorded_continues(tmp_path, monkeypatch):
    """Round 3's answers have come, and with them the results of round 2, whose line has grown since its checkpoint."""
    whole, _ = ran(out=tmp_path / "whole", rounds=4)
    real = fedagg.record.Record.round

    def dark(self, row, clients):
        if row["round"] == 3:
            raise PowerCut
        real(self, row, clients)

    monkeypatch.setattr(fedagg.record.Record, "round", dark)
    with pytest.raises(PowerCut):
        ran(out=tmp_path / "cut", rounds=4)
    monkeypatch.undo()
    rows = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("tested") for row in rows] == [3, 3]
    again, _ = ran(out=tmp_path / "cut", rounds=4)
    told = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("cut", "whole")
    }
    for row in (row for rows in told.values() for row in rows):
        del row["seconds"]
    assert told["cut"] == told["whole"]
    assert torch.equal(again.server.model.w, whole.server.model.w)


class Follower:
    def __init__(self, stop_at=None):
        self.told, self.stop_at = [], stop_at

    def started(self, config, done):
        self.told.append(("started", done))

    def round_done(self, row):
        self.told.append((row["round"], row["accuracy"]))
        return row["round"] == self.stop_at

    def finished(self, result):
        self.told.append(("finished", result.accuracy))


def test_callbacks_are_told_of_a_round_once_it_has_been_tested(tmp_path):
    follower = Follower()
    strategy, _ = ran(out=tmp_path, callbacks=[follower])
    accuracy = [row["accuracy"] for row in strategy.record.history]
    assert follower.told == [("started", 0), *enumerate(accuracy, start=1), ("finished", accuracy[-1])]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["rounds"], result["accuracy"], result["best_accuracy"]) == (3, accuracy[-1], max(accuracy))
    with pytest.raises(SettingError, match="callbacks"):
        FedAggStrategy(model(), settings(), callbacks=[7])


def test_a_callback_stops_the_run_and_another_goes_on(tmp_path):
    """It hears of round 2 when round 3 is under way."""
    follower = Follower(stop_at=2)
    stopped, _ = ran(out=tmp_path, callbacks=[follower], rounds=5)
    assert [what for what, _ in follower.told] == ["started", 1, 2, 3, "finished"]
    assert stopped.done == 3
    later = Follower()
    ran(out=tmp_path, callbacks=[later], rounds=5)
    assert [what for what, _ in later.told] == ["started", 4, 5, "finished"]
    assert later.told[0] == ("started", 3)


def test_trackers_are_named_in_the_settings(tmp_path):
    assert fedagg.trackers.split_names(" tensorboard, mlflow,") == ["tensorboard", "mlflow"]
    _, own = split({"clients": 2, "track": "tensorboard", "out": str(tmp_path)})
    assert own["track"] == "tensorboard"
    for given, words in (({"track": "tensorbord", "out": "/x"}, "tensorbord"), ({"track": "mlflow"}, "give `out`")):
        with pytest.raises(SettingError, match=words):
            split({"clients": 2, **given})


def test_tensorboard_follows_a_federation(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    strategy, _ = ran(out=tmp_path, callbacks=[fedagg.trackers.make("tensorboard", tmp_path)])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("accuracy")]
    assert found == [(row["round"], pytest.approx(row["accuracy"])) for row in strategy.record.history]


def test_a_federations_folder_reads_like_a_simulated_runs(tmp_path):
    strategy, _ = ran(out=tmp_path / "real")
    simulated(out=tmp_path / "alone", **FEDAVG)
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("real", "alone")]
    assert names[0] - names[1] == {"metrics.prom"}
    assert names[1] <= names[0]
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("real", "alone")]
    assert results[1].keys() - results[0].keys() == {"timing"}  # of the simulation
    assert results[0].keys() <= results[1].keys()
    found = fedagg.runs.load(tmp_path / "real")
    assert found.curve("accuracy")[1] == [row["accuracy"] for row in strategy.record.history]
