"""Tasks other than classification on Flower: the simulator's weights and figures, from sums that nodes send."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord
from torch import nn

import fedagg
from fedagg import tasks
from fedagg.errors import SettingError
from fedagg.flower import FedAggStrategy, Privacy, client_app, scores
from fedagg.flower.data import node_data
from fedagg.flower.kinds import kind
from fedagg.flower.monitor import exposition
from fedagg.flower.server import split
from fedagg.report.follow import Watch
from fedagg.tasks import Metric
from flower_grid import HereGrid
from test_flower import settings
from test_flower_monitor import parsed

NODES = 4
TRAIN = np.split(np.arange(96), [12, 36, 60])
TEST = np.split(np.arange(60), [5, 20, 40])  # unlike sizes: a mean of the nodes' own figures is another number


class Words(nn.Module):
    """Predicts a token from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 5), nn.Linear(5, 7)

    def forward(self, x):
        return self.out(self.embed(x))


def made(task: str) -> tuple[torch.Tensor, torch.Tensor]:
    """156 samples, sorted so that every node has targets unlike the others'."""
    draw = torch.Generator().manual_seed(5)
    if task == "tokens":
        x = torch.randint(7, (156, 6), generator=draw).sort(0).values
        y = (x + 1) % 7
        y[torch.rand(y.shape, generator=draw) < 0.3] = tasks.PADDING
        return x, y
    x = torch.randn(156, 5, generator=draw)
    y = x @ torch.randn(5, 3, generator=draw) + 0.3 * torch.randn(156, 3, generator=draw)
    order = y[:, 0].argsort()
    x, y = x[order], y[order]
    return x, y + 2 if task == "regression" else (y > 0).float()


def whole(task: str) -> fedagg.Dataset:
    x, y = made(task)
    train, test = torch.arange(156) % 13 < 8, torch.arange(156) % 13 >= 8
    return fedagg.Dataset(x[train], y[train], x[test], y[test], task=task)


def nodes(task: str):
    data = whole(task)

    def node(context):
        k = context.node_config["partition-id"]
        return data.x_train[TRAIN[k]], data.y_train[TRAIN[k]], data.x_test[TEST[k]], data.y_test[TEST[k]]

    return node


def model(task: str) -> nn.Module:
    torch.manual_seed(3)
    return Words() if task == "tokens" else nn.Linear(5, 3)


def federated(task: str, grid=HereGrid, own=None, app=None, out=None, data=None, **changes):
    given = {name: changes.pop(name) for name in ("secure", "privacy", "test_apart", "callbacks") if name in changes}
    here = grid(app or client_app(lambda: model(task), data or nodes(task), metric=own), NODES)
    config = settings(**{"task": task, "participation": 1.0, "algorithm": "fedavg"} | changes)
    strategy = FedAggStrategy(model(task), config, out=out, metric=own, **given)
    strategy.run(here, wait=0)
    return strategy, here


def simulated(task: str, own=None, **changes):
    config = settings(**{"task": task, "participation": 1.0, "algorithm": "fedavg"} | changes)
    return fedagg.run(config, data=whole(task), model=model(task), parts=TRAIN, metric=own)


def by_hand(task: str, module: nn.Module, which) -> dict[str, float]:
    """The figures of some test samples, from their definitions."""
    data = whole(task)
    x, y = data.x_test[which], data.y_test[which].numpy()
    with torch.no_grad():
        output = module(x).double().numpy()
    if task == "regression":
        spread = ((y - y.mean(0)) ** 2).sum(0)
        return {"r2": float((1 - ((y - output) ** 2).sum(0) / spread).mean()), "mae": float(np.abs(y - output).mean())}
    if task == "multilabel":
        found, there = output > 0, y > 0.5
        precision, recall = (found & there).sum() / found.sum(), (found & there).sum() / there.sum()
        return {"f1": float(2 * precision * recall / (precision + recall))}
    counts = y != tasks.PADDING
    chances = np.exp(output - output.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    right = np.take_along_axis(chances, np.where(counts, y, 0)[..., None], -1)[..., 0][counts]
    return {"accuracy": float((output.argmax(-1) == y)[counts].mean()), "perplexity": float(np.exp(-np.log(right).mean()))}


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("task", ["regression", "multilabel", "tokens"])
def test_a_federation_ends_where_the_simulator_does(task, secure, tmp_path):
    method = {} if secure else {"algorithm": "fedagg", "participation": 0.5}
    strategy, _ = federated(task, out=tmp_path, secure=secure, test_apart=True, **method)
    alone = simulated(task, **method)
    w = strategy.layout.pack(alone.model).w
    assert torch.allclose(strategy.server.reported_model.w, w, rtol=1e-5, atol=1e-5 if not secure else 1e-3)
    assert (w - strategy.layout.pack(model(task)).w).norm() > 0.01
    near = 1e-5 if not secure else 0.02  # masked numbers are rounded
    for here, there in zip(strategy.record.history, alone.history, strict=True):
        assert here["tested"] == 4
        for key in ("loss", *(metric.key for metric in tasks.TASKS[task].metrics)):
            wide = 50 if key == "perplexity" else 1  # the exponential of a loss of up to 40
            assert here[key] == pytest.approx(there[key], rel=wide * near), key
    expected = by_hand(task, strategy.result.model, np.arange(60))
    assert {key: strategy.record.history[-1][key] for key in expected} == pytest.approx(expected, rel=1e-5)
    test = strategy.about[-1]["tests"][-1]
    for k in range(NODES):
        mine = by_hand(task, strategy.result.model, TEST[k])
        assert {key: test[key][k] for key in mine} == pytest.approx(mine, rel=1e-4)
    key, each = strategy.task.metric.key, np.array([len(part) for part in TEST])
    assert abs(np.average(test[key], weights=each) - expected[key]) > 0.005 or task == "tokens"


@pytest.mark.parametrize("secure", [False, True])
def test_sums_go_along_with_training(secure):
    """The figures of round t come with the answers of round t + 1, of the model that these train."""
    strategy, grid = federated("regression", secure=secure)
    carried = [record for m, _ in grid.sent if m.metadata.group_id == "3" for record in m.content.array_records.values()]
    w = torch.from_numpy(next(record for record in carried if "weights" in record)["weights"].numpy())
    second = strategy.layout.unpack(fedagg.flat.Model(w, torch.zeros(0)), model("regression"))
    assert strategy.record.history[1]["r2"] == pytest.approx(by_hand("regression", second, np.arange(60))["r2"], rel=1e-5)


def payload(content) -> int:
    told = [value for record in content.metric_records.values() for value in record.values()]
    return 8 * sum(len(value) if isinstance(value, list) else 1 for value in told)


def test_the_record_counts_the_sums():
    strategy, grid = federated("regression", test_apart=True, rounds=1)
    back = [m for m, _ in grid.received if m.metadata.message_type == "evaluate"]
    numbers = 2 + (3 * 3 + 1) + 2  # samples and loss; error, target and its square of three outputs, and a count; MAE
    assert [payload(message.content) for message in back] == [8 * numbers] * NODES
    assert strategy.record.history[0]["bytes_tests"] == NODES * (4 * strategy.layout.d + 8 * numbers)


def test_the_record_and_the_log_use_the_right_names(tmp_path, caplog):
    class Follower:
        def judged(self, metric):
            self.label = metric.label

        def started(self, config, done):
            assert self.label  # is known by then

    follower = Follower()
    with caplog.at_level("INFO", "flwr"):
        strategy, _ = federated("regression", out=tmp_path, callbacks=[follower], rounds=2)
    first, last = strategy.record.history
    assert follower.label == "R²"
    assert f"after round 1: R² {first['r2']:.4f}, MAE {first['mae']:.4f}, loss {first['loss']:.4f}" in caplog.text
    assert "accuracy" not in caplog.text.lower()
    for path in tmp_path.glob("*.*"):
        assert path.suffix == ".safetensors" or "accuracy" not in path.read_text(encoding="utf-8").lower(), path
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["r2"], result["best_r2"]) == (last["r2"], max(first["r2"], last["r2"]))
    assert repr(strategy.result).splitlines()[1].startswith(f"R² {last['r2']:.4f}")
    told = parsed((tmp_path / "metrics.prom").read_text())
    assert (told["fedagg_r2"], told["fedagg_mae"]) == (last["r2"], last["mae"])
    test = strategy.about[-1]["tests"][-1]
    assert [told[f'fedagg_node_mae{{client="{k}"}}'] for k in range(NODES)] == test["mae"]
    page = json.loads(Watch([tmp_path]).changes(since=0))
    assert "R²" in json.dumps(page, ensure_ascii=False)
    again = fedagg.load(tmp_path, model=model("regression"))
    assert (again.metric.label, again.score, again.task.name) == ("R²", last["r2"], "regression")
    assert again.evaluate(whole("regression").x_test, whole("regression").y_test)["r2"] == pytest.approx(last["r2"], rel=1e-5)


def test_for_some_metrics_lower_is_better(tmp_path):
    strategy, grid = federated("regression", out=tmp_path, metric="mae", rounds=3)
    found = [row["mae"] for row in strategy.record.history]
    assert json.loads((tmp_path / "result.json").read_text())["best_mae"] == min(found)
    assert strategy.record.history[-1]["mae"] == pytest.approx(simulated("regression", metric="mae").score, abs=1e-5)
    # The figure that was chosen is the one that travels: sums of targets stay where they are.
    named = {name for m, _ in grid.received for record in m.content.metric_records.values() for name in record}
    assert not any("r2" in name for name in named)
    with pytest.raises(SettingError, match="metric = 'f1'"):
        federated("regression", metric="f1")


def within_one(output, target):
    return ((output - target).abs() < 1).double().mean(1)


def squares(output, target):
    return torch.stack([(output - target).double().square().mean(1), torch.ones(len(target), dtype=torch.float64)], 1)


RMSE = Metric("rmse", "RMSE", percent=False, higher=False, tally=squares, score=lambda sums: float((sums[0] / sums[1]).sqrt()))


@pytest.mark.parametrize("own", [within_one, RMSE])
def test_a_metric_of_your_own(own, tmp_path):
    strategy, _ = federated("regression", own=own, out=tmp_path)
    alone, key = simulated("regression", own=own), "rmse" if own is RMSE else "within_one"
    assert strategy.result.score == pytest.approx(alone.score, abs=1e-5)
    assert json.loads((tmp_path / "result.json").read_text())[key] == strategy.result.score
    if own is RMSE:
        assert alone.score == pytest.approx(alone.loss**0.5)
    with pytest.raises(SettingError, match="metric is not what the run began with"):
        FedAggStrategy(model("regression"), strategy.config, out=tmp_path)


def test_a_node_without_the_metric_does_not_join():
    strategy = FedAggStrategy(model("regression"), settings(task="regression"), metric=RMSE)
    strategy.members.refresh(HereGrid(client_app(lambda: model("regression"), nodes("regression")), NODES))
    assert set(strategy.members.failed.values()) == {"setting metric"}
    with pytest.raises(SettingError, match=r"metric = 'rmse': .*client_app\(metric=\.\.\.\)"):
        scores.message_task({"task": "regression", "metrics": ["rmse"]}, within_one)


def failing(sums):
    raise ZeroDivisionError


@pytest.mark.parametrize("score", [failing, lambda sums: float(sums[5])])
def test_a_score_that_fails_does_not_end_the_run(score):
    own = Metric("odd", "odd", tally=squares, score=score)
    strategy, _ = federated("regression", own=own)
    assert strategy.done == 3
    assert all(np.isnan(row["odd"]) for row in strategy.record.history)
    assert strategy.about[-1]["tests"][-1]["odd"] == [None] * NODES


# Hostile sums.

R2 = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 9.0, 9.0, 9.0, 20.0]  # of 20 samples, for three outputs: possible
LIES = {
    "regression": [
        {"r2": [float("nan"), *R2[1:]]},
        {"r2": [*R2[:-2], float("inf"), 20.0]},
        {"r2": [-1.0, *R2[1:]]},
        {"r2": [*R2[:-1], -20.0]},
        {"r2": [*R2[:-1], 19.0]},
        {"r2": [*R2[:3], 99.0, *R2[4:]]},  # a sum of targets that their squares do not allow
        {"r2": R2[1:]},
        {"r2": []},
        {"r2": 0.5},
        {"mae": [-1.0, 20.0]},
        {"mae": [1.0, 21.0]},
        {"mae": [1.0]},
    ],
    "multilabel": [
        {"f1": [-1.0, 2.0, 3.0]},
        {"f1": [1.5, 2.0, 3.0]},
        {"f1": [1.0, 2.0]},
        {"f1": [1.0, 2.0, float("inf")]},
    ],
    "tokens": [
        {"accuracy": [9.0, 8.0]},
        {"accuracy": [-1.0, 8.0]},
        {"perplexity": [-1.0, 8.0]},
        {"perplexity": [1.0, 8.5]},
        {"perplexity": [1.0, -8.0]},
        {"perplexity": [float("nan"), 8.0]},
    ],
}


class Liar(HereGrid):
    """Node 1002, with 20 test samples, reports something else about the model each round."""

    lies: list[dict]

    def send_and_receive(self, messages, *, timeout=None):
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if (reply.metadata.message_type, reply.metadata.src_node_id) == ("evaluate", 1002):
                lie = self.lies[int(reply.metadata.group_id) - 1]
                reply.content["metrics"] = MetricRecord(dict(reply.content["metrics"]) | lie)
        return replies


def liar(lies):
    return type("ThisLiar", (Liar,), {"lies": lies})


@pytest.mark.parametrize("task", LIES)
def test_impossible_sums_are_left_out(task):
    lies = LIES[task]
    strategy, _ = federated(task, grid=liar(lies), rounds=len(lies), epochs=1, test_apart=True)
    others = np.concatenate([TEST[k] for k in (0, 1, 3)])
    for lie, row, about in zip(lies, strategy.record.history, strategy.about, strict=True):
        what = "an incomplete answer" if isinstance(next(iter(lie.values())), float) else "impossible test results"
        assert about["remarks"] == {"2": f"sent {what}; not used"}, lie
        assert row["tested"] == 3
        assert about["clients"] == [0, 1, 2, 3]  # its update is as good as before
    expected = by_hand(task, strategy.result.model, others)
    assert {key: strategy.record.history[-1][key] for key in expected} == pytest.approx(expected, rel=1e-5)


def test_sums_of_another_length_are_left_out():
    """Possible for a model of two outputs, and this one has three."""
    two = [*R2[:2], *R2[3:5], *R2[6:8], 20.0]
    strategy, _ = federated("regression", grid=liar([{"r2": two}]), rounds=1, test_apart=True)
    assert strategy.about[0]["remarks"] == {"2": "sent test results of another length than most; not used"}
    others = np.concatenate([TEST[k] for k in (0, 1, 3)])
    expected = by_hand("regression", strategy.result.model, others)
    assert strategy.record.history[0]["r2"] == pytest.approx(expected["r2"], rel=1e-5)


def test_under_secure_aggregation_impossible_sums_are_left_out():
    def mod(message, context, call_next):
        reply = call_next(message, context)
        told = reply.content.config_records.get("fitres.metrics", ConfigRecord())
        if context.node_config["partition-id"] == 2 and "test-r2" in told:
            told["test-r2"] = "[1.0, NaN]" if message.content["config"]["round"] == 1 else 100_000 * "["
        return reply

    app = client_app(lambda: model("regression"), nodes("regression"), mods=[mod])
    strategy, _ = federated("regression", app=app, secure=True)
    remarks = [about.get("remarks", {}).get("2") for about in strategy.about]
    assert remarks == [None, "sent impossible test results; not used", "sent an incomplete answer; not used"]
    assert [row["tested"] for row in strategy.record.history] == [3, 3, 4]


@pytest.mark.parametrize("metric", [tasks.R2, tasks.MAE, tasks.F1, tasks.ACCURACY, tasks.TOKEN_ACCURACY, tasks.PERPLEXITY])
def test_honest_sums_are_possible(metric):
    """Of one sample, of targets that do not vary, of none that count, and far from zero."""
    far = torch.full((7, 3), 1e4) + torch.arange(3.0)
    cases = {
        "regression": [(far + 1, far), (far[:1], far[:1]), (torch.zeros(4, 3), torch.zeros(4, 3)), (1e-3 * far, -1e3 * far)],
        "multilabel": [(-far, torch.zeros(7, 3)), (far, torch.ones(7, 3))],
        "classification": [(torch.eye(3), torch.arange(3)), (torch.eye(3)[:1], torch.tensor([2]))],
        "tokens": [
            (1e4 * torch.eye(3)[None], torch.tensor([[0, 1, 2]])),
            (torch.eye(3)[None], torch.full((1, 3), tasks.PADDING)),
        ],
    }
    (task,) = (name for name, found in tasks.TASKS.items() if metric in found.metrics)
    for output, target in cases[task]:
        sums = metric.tally(output, target).double().sum(0)
        assert scores.possible(metric, sums.tolist(), len(target))


# What a node says of its data, and what it is told.


@pytest.mark.parametrize(("task", "words"), [("regression", "those of regression"), ("tokens", "those of tokens")])
def test_a_run_that_names_no_task_learns_class_labels(task, words, caplog):
    strategy = FedAggStrategy(model(task), settings())
    strategy.members.refresh(HereGrid(client_app(lambda: model(task), nodes(task)), NODES))
    assert not strategy.members.nodes
    assert all(words in why and "classification; set `task`" in why for why in strategy.members.refused.values())
    assert len(strategy.members.refused) == NODES


def test_targets_are_read_as_the_task_says():
    x, ages = torch.rand(6, 2), torch.tensor([20, 30, 40, 50, 60, 70])
    assert node_data((x, ages)).data.task == "classification"
    for given in ((x, ages), fedagg.Dataset(x, ages, x, ages)):
        found = node_data(given, "regression").data
        assert (found.task, found.y_train.dtype) == ("regression", torch.float32)
    with pytest.raises(SettingError, match="quantities") as wrong:
        node_data((x, ages + 0.5), "classification")
    assert kind(wrong.value) == "setting y_train"  # and not which sample


def test_a_model_that_does_not_fit_the_targets_does_not_join():
    """Three outputs and one target would be compared without an error."""

    def one(context):
        x, y, *_ = nodes("regression")(context)
        return x, y[:, 0]

    strategy = FedAggStrategy(model("regression"), settings(task="regression"))
    strategy.members.refresh(HereGrid(client_app(lambda: model("regression"), one), NODES))
    assert set(strategy.members.failed.values()) == {"setting model()"}


def test_methods_that_look_at_labels_are_refused():
    with pytest.raises(SettingError, match="algorithm = 'fedgh': uses class labels"):
        FedAggStrategy(model("regression"), settings(task="regression", algorithm="fedgh"))


def test_task_and_metric_are_settings_and_empty_ones_are_none():
    config, _ = split({"clients": 2, "task": "regression", "metric": "mae"})
    assert (config.task, config.metric) == ("regression", "mae")
    config, _ = split({"clients": 2, "task": "", "metric": ""})
    assert (config.task, config.metric) == (None, None)
    with pytest.raises(SettingError, match="task = 'regresion'"):
        split({"clients": 2, "task": "regresion"})


def test_a_loss_of_ones_own_and_quiet_nodes():
    app = client_app(lambda: model("regression"), nodes("regression"), loss=lambda o, y: (o - y).abs().mean(1))
    strategy, _ = federated("regression", app=app)
    assert strategy.record.history[-1]["loss"] == pytest.approx(strategy.record.history[-1]["mae"], rel=1e-5)
    silent, grid = federated("regression", app=client_app(lambda: model("regression"), nodes("regression"), quiet=True))
    assert not any("r2" in row for row in silent.record.history)
    assert not any("r2" in name for m, _ in grid.received for record in m.content.metric_records.values() for name in record)


def test_with_privacy_only_the_figures_of_all_are_recorded():
    strategy, _ = federated("regression", privacy=Privacy(clipping_norm=1.0, noise_multiplier=0.1))
    assert all("r2" in row for row in strategy.record.history)
    assert not any("tests" in row for row in strategy.about)


def test_prometheus_takes_any_name():
    own = fedagg.measure.Measure("größe", "Größe\n\\x", percent=False)
    told = exposition([{"round": 1, "größe": 2.0, "loss": 1.0}], {}, 1, [own])
    assert "fedagg_gr__e 2.0" in told
    assert "Größe \\\\x on all" in told
    assert all(line.startswith(("#", "fedagg_")) for line in told.splitlines())


def test_a_figure_that_a_nodes_samples_do_not_determine_is_none(tmp_path):
    """One test sample does not vary, and has no R²; together with the others' it counts."""
    data = whole("regression")

    def node(context):
        k = context.node_config["partition-id"]
        return data.x_train[TRAIN[k]], data.y_train[TRAIN[k]], data.x_test[k : k + 1], data.y_test[k : k + 1]

    strategy, _ = federated("regression", data=node, out=tmp_path)
    assert strategy.about[-1]["tests"][-1]["r2"] == [None] * NODES
    expected = by_hand("regression", strategy.result.model, np.arange(NODES))["r2"]
    assert strategy.record.history[-1]["r2"] == pytest.approx(expected, rel=1e-4)
    json.loads((tmp_path / "clients.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)
    assert 'fedagg_node_r2{client="0"}' not in (tmp_path / "metrics.prom").read_text()
