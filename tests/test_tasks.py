"""Every kind of target: its loss and metric by hand, training on every engine against a plain loop, and what people see of it."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedagg
from fedagg import Dataset, cli, evaluate, partition, runs, seeding, tasks
from fedagg.errors import SettingError
from fedagg.measure import Measure

RNG = np.random.default_rng(7)
X = RNG.normal(size=(96, 5)).astype(np.float32)
MIX = RNG.normal(size=(5, 2))
NUMBERS = (X @ MIX + 0.3 * RNG.normal(size=(96, 2))).astype(np.float32)
MARKS = (NUMBERS > 0.2).astype(np.int64)
TEXT = RNG.integers(0, 7, (96, 6))
NEXT = np.where(np.arange(6) < RNG.integers(1, 7, (96, 1)), (TEXT + 1) % 7, tasks.PADDING)
CUT = 72


def dataset(kind: str) -> Dataset:
    x, y = {"regression": (X, NUMBERS), "multilabel": (X, MARKS), "tokens": (TEXT, NEXT)}[kind]
    return Dataset(x[:CUT], y[:CUT], x[CUT:], y[CUT:])


def network(kind: str, plain: bool = True) -> nn.Module:
    torch.manual_seed(3)
    if kind == "tokens":
        return nn.Sequential(nn.Embedding(7, 8), nn.Tanh(), nn.Linear(8, 7))
    middle: list[nn.Module] = [nn.ReLU()] if plain else [nn.LayerNorm(6), nn.GELU()]  # of which the second is not written out
    return nn.Sequential(nn.Linear(5, 6), *middle, nn.Linear(6, 2))


def total(metric: tasks.Metric, output: Tensor, y: Tensor) -> float:
    return metric.score(metric.tally(output, y).sum(0))


# --- losses and metrics ----------------------------------------------------------------------------------------------


def test_squared_error_r_squared_and_absolute_error_by_hand() -> None:
    """Two outputs: errors 1, 0, -1 on the first, whose targets are 0, 1, 5 (mean 2, squares around it 14); none on the second."""
    y = torch.tensor([[0.0, 1.0], [1.0, 2.0], [5.0, 4.0]])
    output = y + torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])
    assert tasks.squared_error(output, y).tolist() == [0.5, 0.0, 0.5]
    assert total(tasks.R2, output, y) == pytest.approx(((1 - 2 / 14) + 1) / 2)
    assert total(tasks.MAE, output, y) == pytest.approx(1 / 3)
    assert tasks.squared_error(output[:, :1], y[:, 0]).tolist() == [1.0, 0.0, 1.0]  # (B, 1) beside (B,), not (B, B)
    assert total(tasks.R2, output[:, :1], y[:, 0]) == pytest.approx(1 - 2 / 14)


def test_r_squared_of_what_does_not_vary_is_no_number() -> None:
    y = torch.full((5, 1), 0.1)
    assert math.isnan(total(tasks.R2, y + 1, y))
    mixed = torch.cat([y, torch.arange(5.0)[:, None]], 1)
    assert total(tasks.R2, mixed, mixed) == 1.0


def test_binary_cross_entropy_and_f1_by_hand() -> None:
    """Found: 2 rightly, 1 wrongly; 1 missed."""
    y = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    output = torch.tensor([[2.0, 0.5], [-1.0, 3.0]])
    soft = np.log1p(np.exp([[-2.0, 0.5], [1.0, -3.0]])).mean(1)
    np.testing.assert_allclose(tasks.binary_cross_entropy(output, y), soft, rtol=1e-6)
    assert total(tasks.F1, output, y) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert math.isnan(total(tasks.F1, -output.abs(), 0 * y))


def test_token_loss_accuracy_and_perplexity_by_hand() -> None:
    """The first sample has two tokens with the probabilities 1/2 and 1/4 for what is right, the second one with 3/4, the third has
    only padding."""
    right = torch.tensor([[0.5, 0.25], [0.75, 0.6], [0.1, 0.1]])
    output = torch.stack([right, 1 - right], -1).log()
    y = torch.tensor([[0, 0], [0, -100], [-100, -100]])
    expected = [(math.log(2) + math.log(4)) / 2, math.log(4 / 3), 0.0]
    np.testing.assert_allclose(tasks.token_cross_entropy(output, y), expected, rtol=1e-6)
    assert total(tasks.TOKEN_ACCURACY, output, y) == pytest.approx(2 / 3)
    assert total(tasks.PERPLEXITY, output, y) == pytest.approx(math.exp((math.log(8) + math.log(4 / 3)) / 3))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, 4))
def test_padding_changes_neither_loss_nor_metric(seed: int, length: int, more: int) -> None:
    """Whatever a network outputs for padding, and however much padding there is."""
    g = torch.Generator().manual_seed(seed)
    output, y = torch.randn(4, length, 3, generator=g), torch.randint(0, 3, (4, length), generator=g)
    wide = torch.cat([output, 100 * torch.randn(4, more, 3, generator=g)], 1)
    padded = torch.cat([y, torch.full((4, more), tasks.PADDING)], 1)
    torch.testing.assert_close(tasks.token_cross_entropy(wide, padded), tasks.token_cross_entropy(output, y))
    for metric in tasks.TOKENS.metrics:
        assert total(metric, wide, padded) == pytest.approx(total(metric, output, y), rel=1e-6)


@pytest.mark.parametrize("kind", ["regression", "multilabel", "tokens"])
def test_a_score_is_that_of_added_sums(kind: str) -> None:
    """Nodes send sums; their score is that of all their samples together."""
    data, task = dataset(kind), tasks.TASKS[kind]
    with torch.no_grad():
        output = network(kind)(data.x_train)
    for metric in task.metrics:
        parts = [metric.tally(o, y).sum(0) for o, y in zip(output.split(19), data.y_train.split(19), strict=True)]
        assert metric.score(torch.stack(parts).sum(0)) == pytest.approx(total(metric, output, data.y_train), rel=1e-9)


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "task", "classes"),
    [
        (X, NUMBERS[:, 0], "regression", 1),
        (X, NUMBERS[:, :1], "regression", 1),
        (X, NUMBERS, "regression", 2),
        (X, MARKS, "multilabel", 2),
        (X, MARKS.astype(bool), "multilabel", 2),
        (X, MARKS.astype(float), "multilabel", 2),
        (TEXT, NEXT, "tokens", 7),
        (X, TEXT, "tokens", 7),
        (TEXT, TEXT % 2, "tokens", 7),
        (X, TEXT[:, 0], "classification", 7),
        (X, TEXT[:, 0].astype(float), "classification", 7),
        (X, TEXT[:, 0] == 2, "classification", 2),
    ],
)
def test_what_the_targets_are(x: Any, y: Any, task: str, classes: int) -> None:
    made = Dataset(x, y, x, y)
    assert (made.task, made.classes) == (task, classes)
    assert made.y_train.shape == y.shape
    assert made.y_train.is_floating_point() == (task in ("regression", "multilabel"))
    assert (repr(task) in repr(made)) == (task != "classification")
    assert made.held_back(0.5).task == task


@pytest.mark.parametrize(
    ("y", "given", "words"),
    [
        (np.eye(96), {}, "take y.argmax"),
        (NUMBERS.round() + 5, {}, "task='regression'"),
        (MARKS[:, :1], {}, "y.ravel"),
        (NUMBERS, {"task": "classification"}, "one label per sample"),
        (NUMBERS[:, 0], {"task": "classification"}, "classes, not quantities"),
        (NUMBERS, {"task": "multilabel"}, "labels are 1"),
        (np.where(NUMBERS > 1, np.nan, NUMBERS), {}, "must be finite"),
        (NUMBERS, {"classes": 5}, "every sample has 2 targets"),
        (TEXT - 1, {}, "-100 for padding"),
        (NUMBERS, {"task": "regresion"}, "did you mean 'regression'"),
    ],
)
def test_targets_that_are_unclear_or_wrong(y: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        Dataset(X, y, X, y, **given)
    assert "\n" not in str(caught.value)


def test_whole_numbers_are_quantities_if_the_task_says_so() -> None:
    data = Dataset(X[:CUT], TEXT[:CUT, 0], X[CUT:], TEXT[CUT:, 0])
    result = fedagg.run(data=data, model="linear", task="regression", clients=3, rounds=1)
    assert result.metric.key == "r2"
    assert result.history[-1].keys() >= {"r2", "mae"}


# --- training --------------------------------------------------------------------------------------------------------


def by_hand(kind: str, module: nn.Module, data: Dataset, parts: list[Any], rounds: int, local: dict[str, Any]) -> nn.Module:
    """FedAvg as a loop, with torch's own losses."""
    losses = {
        "regression": lambda o, y: nn.functional.mse_loss(o, y),
        "multilabel": lambda o, y: nn.functional.binary_cross_entropy_with_logits(o, y),
        # torch's mean is over all tokens of the batch, ours over samples: one at a time they are the same
        "tokens": lambda o, y: torch.stack(
            [nn.functional.cross_entropy(one, label, ignore_index=-100) for one, label in zip(o, y, strict=True)]
        ).mean(),
    }
    for t in range(rounds):
        start = {k: v.detach().clone() for k, v in module.state_dict().items()}
        total = {k: torch.zeros_like(v) for k, v in start.items()}
        for client, part in enumerate(parts):
            module.load_state_dict(start)
            samples = torch.from_numpy(part)
            order = samples[seeding.batches(seeding.derive(0, "client", t, 0, client), len(part), local["epochs"])]
            for epoch in order:
                for batch in epoch.split(local["batch_size"]):
                    module.zero_grad()
                    losses[kind](module(data.x_train[batch]), data.y_train[batch]).backward()
                    with torch.no_grad():
                        for p in module.parameters():
                            p -= local["lr"] * p.grad
            for k, v in module.state_dict().items():
                total[k] += len(part) / sum(map(len, parts)) * v
        module.load_state_dict(total)
    return module


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize(("kind", "plain"), [("regression", True), ("regression", False), ("multilabel", True), ("tokens", True)])
def test_a_task_trains_as_a_plain_loop_does(kind: str, plain: bool, engine: str) -> None:
    """Stacked layers, vmap and one client at a time; clients of different sizes, so that there is padding in the batches."""
    data, parts = dataset(kind), [np.arange(3), np.arange(3, 30), np.arange(30, CUT)]
    local: dict[str, Any] = {"epochs": 2, "batch_size": 8, "lr": 0.1}
    result = fedagg.run(
        data=data, model=network(kind, plain), parts=parts, participation=1.0, rounds=2, algorithm="fedavg", engine=engine, **local
    )
    expected = by_hand(kind, network(kind, plain), data, parts, 2, local)
    for ours, theirs in zip(result.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        output = expected.eval()(data.x_test)
    assert result.score == pytest.approx(total(tasks.TASKS[kind].metric, output, data.y_test), abs=1e-4)
    assert result.history[-1]["loss"] == pytest.approx(float(tasks.TASKS[kind].loss(output, data.y_test).mean()), rel=1e-4)


def test_a_linear_model_comes_to_least_squares() -> None:
    """Full batches and one step a round are gradient descent on everybody's data: its end is the solution of lstsq."""
    data = dataset("regression")
    result = fedagg.run(
        data=data, model="linear", algorithm="fedavg", clients=4, participation=1.0, rounds=120, epochs=1, batch_size=64, lr=0.5
    )
    wide = np.c_[X[:CUT], np.ones(CUT)].astype(np.float64)
    w = np.linalg.lstsq(wide, NUMBERS[:CUT].astype(np.float64), rcond=None)[0]
    y, guess = NUMBERS[CUT:].astype(np.float64), np.c_[X[CUT:], np.ones(96 - CUT)] @ w
    r2 = (1 - ((y - guess) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)).mean()
    assert result.score == pytest.approx(r2, abs=1e-4)
    assert result.history[-1]["mae"] == pytest.approx(np.abs(y - guess).mean(), abs=1e-4)


def test_rows_of_different_scales_are_learnt_once_each_is_standardised() -> None:
    """The label is in the first feature, and the second, a million times as large, is noise: over everything the first vanishes."""
    labels = (X[:, 0] > 0).astype(int)
    x = X[:, :2] * np.array([1e-3, 1e3], dtype=np.float32)
    data = Dataset(x[:CUT], labels[:CUT], x[CUT:], labels[CUT:])
    shared: dict[str, Any] = {"data": data, "model": "linear", "algorithm": "fedavg", "clients": 3, "rounds": 15, "lr": 0.5}
    assert fedagg.run(**shared, normalize=True).accuracy > 0.9


def test_loss_and_metric_may_be_your_own_functions() -> None:
    def within_a_half(output: Tensor, y: Tensor) -> Tensor:
        return ((output - y).abs() < 0.5).double().mean(1)

    def absolute(output: Tensor, y: Tensor) -> Tensor:
        return (output - y).abs().mean(1)

    data = dataset("regression")
    shared: dict[str, Any] = {"data": data, "model": "linear", "clients": 3, "rounds": 2}
    result = fedagg.run(**shared, loss=absolute, metric=within_a_half)
    with torch.no_grad():
        apart = (result.model(data.x_test) - data.y_test).abs()
    assert result.metric == Measure("within_a_half", "within a half", percent=False)
    assert result.score == pytest.approx(float((apart < 0.5).double().mean()))
    assert result.loss == pytest.approx(float(apart.mean()), rel=1e-5)
    assert result.history[-1].keys() >= {"within_a_half", "r2", "mae"}
    with pytest.raises(AttributeError, match=r"Result\.score"):
        _ = result.accuracy
    with pytest.raises(SettingError, match="one number per sample"):
        fedagg.run(**shared, metric=lambda output, y: (output - y).abs())
    with pytest.raises(SettingError, match="choose one of mae, r2"):
        fedagg.run(**shared, metric="accuracy")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"partition": "shards"},
            "deals samples by class labels, but the task is regression; choose one of iid, quantity, feature",
        ),
        ({"algorithm": "fedgh", "model": "custom"}, "uses class labels"),
        ({"algorithm": "fedbabu", "model": "custom"}, "client_test = 0.0: fedbabu needs class labels"),
        ({"per_client": True}, "client_test = 0.0: --per-client"),
        ({"personal": True}, "client_test = 0.0: --personal"),
        ({"partition": "feature", "column": 5}, "samples have 5 features"),
        ({"model": "lenet5"}, "shape"),
    ],
)
def test_what_needs_labels_says_so(given: dict[str, Any], words: str) -> None:
    model = network("regression") if given.get("model") == "custom" else given.get("model", "linear")
    settings = {name: value for name, value in given.items() if name != "model"}
    with pytest.raises(SettingError, match=words):
        fedagg.run(data=dataset("regression"), model=model, clients=3, rounds=1, **settings)


def test_a_model_with_the_wrong_outputs() -> None:
    for kind, model, words in (
        ("regression", nn.Linear(5, 3), "2 numbers per sample, one for each target"),
        ("tokens", nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(24, 7)), "for every token"),
        ("tokens", nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6)), "returns 6 numbers per token; labels from 0 to 6 need 7"),
    ):
        with pytest.raises(SettingError, match=words):
            fedagg.run(data=dataset(kind), model=model, clients=3, rounds=1)


# --- partitions ------------------------------------------------------------------------------------------------------


def test_sizes_are_log_normal() -> None:
    parts = partition.quantity(NUMBERS.repeat(1000, 0), 400, deviation=0.8, seed=3)
    sizes = np.array(list(map(len, parts)))
    assert sizes.sum() == 96_000
    assert len(np.unique(np.concatenate(parts))) == 96_000
    assert np.log(sizes).std() == pytest.approx(0.8, rel=0.1)
    assert {len(part) for part in partition.quantity(X, 8, deviation=0.0)} == {12}
    assert min(map(len, partition.quantity(X, 60, deviation=5.0))) == 1
    assert sum(map(len, partition.quantity(X, 96, deviation=5.0))) == 96


def test_clients_hold_stretches_of_a_feature() -> None:
    parts = partition.feature(X, 4, column=2, seed=1)
    stretches = sorted((X[part, 2].min(), X[part, 2].max()) for part in parts)
    assert all(below[1] <= above[0] for below, above in pairwise(stretches))
    assert sorted(np.concatenate(parts)) == list(range(96))
    assert partition.feature(X, 4, column=2, seed=2)[0].tolist() != parts[0].tolist()


# --- by client -------------------------------------------------------------------------------------------------------


def test_mean_worst_and_spread_by_hand() -> None:
    scores = [float(k) for k in range(20)] + [math.nan]
    found = evaluate.spread(scores, Measure("r2", "R²"))
    assert found == pytest.approx({"client_mean": 9.5, "client_worst": 0.5, "client_spread": math.sqrt(399 / 12)})
    assert evaluate.spread(scores, Measure("mae", "MAE", higher=False))["client_worst"] == 18.5
    assert evaluate.spread([math.nan], Measure("r2", "R²")) == {}


def test_a_clients_own_samples_are_held_out_and_scored(tmp_path: Path) -> None:
    data, parts = dataset("regression"), [np.arange(30), np.arange(30, 71), np.arange(71, 72)]
    train, held = evaluate.held_out(parts, 0.25, seed=0)
    assert [len(part) for part in held] == [8, 10, 0]
    assert all(sorted([*a, *b]) == list(p) for a, b, p in zip(train, held, parts, strict=True))
    result = fedagg.run(data=data, model="linear", parts=parts, rounds=2, client_test=0.25, personal=True, out=tmp_path / "run")
    alone = fedagg.run(data=data, model="linear", parts=train, rounds=2)
    torch.testing.assert_close(list(result.model.parameters()), list(alone.model.parameters()))
    with torch.no_grad():
        scores = [total(tasks.R2, result.model(data.x_train[part]), data.y_train[part]) for part in held[:2]]
    row = result.history[-1]
    assert [row["client_mean"], row["client_worst"]] == pytest.approx([np.mean(scores), min(scores)], rel=1e-5)
    assert row["client_spread"] == pytest.approx(np.std(scores), rel=1e-4)
    told = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert told["client_worst"] == pytest.approx(min(scores), rel=1e-5)
    assert told.keys() >= {"r2", "best_r2", "personal_r2"}


def test_clients_are_scored_on_test_samples_like_their_own() -> None:
    """One client has labels 0 alone, the other twice as many 1 as 2: the accuracies of these classes, weighted so."""
    y = np.array([0, 0, 0, 1, 1, 2] * 16)
    data = Dataset(X[:CUT], y[:CUT], X[CUT:], y[CUT:])
    parts = [np.flatnonzero(y[:CUT] == 0), np.flatnonzero(y[:CUT] > 0)]
    result = fedagg.run(data=data, model="linear", parts=parts, rounds=3, lr=0.3, per_client=True, participation=1.0)
    with torch.no_grad():
        right = (result.model(data.x_test).argmax(1) == data.y_test).double()
    by_class = [float(right[data.y_test == label].mean()) for label in range(3)]
    scores = [by_class[0], (2 * by_class[1] + by_class[2]) / 3]
    assert result.figures["client_mean"] == pytest.approx(np.mean(scores))
    assert result.figures["client_worst"] == pytest.approx(min(scores))


def test_every_method_can_be_fitted_to_clients() -> None:
    """FedAvg's model, one more plain epoch on each client, scored on its own held-out samples."""
    data, parts = dataset("regression"), [np.arange(40), np.arange(40, CUT)]
    train, held = evaluate.held_out(parts, 0.2, seed=0)
    shared: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch_size": 64, "lr": 0.1, "participation": 1.0}
    result = fedagg.run(
        data=data, model="linear", parts=parts, algorithm="fedavg", client_test=0.2, personal=True, engine="sequential", **shared
    )
    scores = []
    for own, test in zip(train, held, strict=True):
        module = nn.Sequential(nn.Flatten(), nn.Linear(5, 2))
        module.load_state_dict(dict(zip(module.state_dict(), result.model.state_dict().values(), strict=True)))
        nn.functional.mse_loss(module(data.x_train[own]), data.y_train[own]).backward()
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.1 * p.grad
            scores.append(total(tasks.R2, module(data.x_train[test]), data.y_train[test]))
    assert result.figures["personal_r2"] == pytest.approx(np.mean(scores), rel=1e-4)


# --- what people see -------------------------------------------------------------------------------------------------


PLUGIN = """
import numpy as np, fedagg
from fedagg import data

@data.register("wires")
def wires():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3)); y = x @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=80)
    return fedagg.Dataset(x[:60], y[:60], x[60:], y[60:])
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "wires_plugin.py"
    path.write_text(PLUGIN, encoding="utf-8")
    return str(path)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.slow
def test_a_regression_is_shown_as_one(plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    few = ("--plugin", plugin, "--dataset", "wires", "--clients", "4", "--rounds", "3", "--lr", "0.1")
    assert call("run", *few, "--client-test", "0.2", "--personal", "--out", str(run)) == 0
    printed = capsys.readouterr()
    assert "R²" in printed.out
    assert "worst 10 %" in printed.out
    assert "personal R²" in printed.out
    assert "R²" in printed.err
    assert call("plot", str(run), "--out", str(tmp_path / "figures"), "--format", "svg") == 0
    assert call("report", str(run), "--out", str(tmp_path / "report.html")) == 0
    shown = capsys.readouterr()
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    drawn = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert drawn["groups"][0]["names"]["accuracy"] == "test R²"
    assert drawn["partitions"] == []
    assert ">R²</button>" in html
    assert ">worst 10 %</button>" in html
    for text in (printed.out, printed.err, shown.out, *(p.read_text(encoding="utf-8") for p in run.glob("*.json*"))):
        assert "accuracy" not in text.lower()
    assert runs.load(run).metric == Measure("r2", "R²", percent=False)


@pytest.mark.slow
def test_the_lowest_error_is_the_best(plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--plugin", plugin, "--dataset", "wires", "--clients", "4", "--rounds", "3", "--metric", "mae")
    assert call("tune", "fedavg", *few, "--grid", "lr=0.0001,0.2", "--seeds", "5", "--json", "--out", str(tmp_path / "t")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best"] == {"lr": 0.2}
    assert [row["mae"] for row in told["trials"]] == sorted(row["mae"] for row in told["trials"])
    assert told["plot"].endswith("mae.png")
    data = dataset("regression")
    tuned = fedagg.tune("fedavg", {"lr": [0.2, 0.0001]}, data=data, metric="mae", seeds=[5], clients=3, rounds=2)
    assert tuned.best.settings == {"lr": 0.2}
    assert "| MAE |" in tuned.table()
