"""Every method against numbers worked out here, with plain NumPy loops, on ragged clients and partial participation."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import fedagg
import tiny
from fedagg import algorithms, engines, models, seeding
from fedagg.algorithms.fedgh import FedGH
from fedagg.clients import Clients, Outcome, secant_smoothness
from fedagg.config import Config
from fedagg.engines.base import Problem
from fedagg.errors import SettingError
from fedagg.flat import Layout, Model
from fedagg.work import ClientOptions, Job, Work

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Direction = Callable[[Array, Array], Array]

SIZES = (3, 9, 4, 13, 6)  # batches of 4: 1, 3, 1, 4 and 2 steps an epoch, some of them short
FEATURES, CLASSES, SEED, EPOCHS, BATCH, LR = 5, 3, 11, 2, 4, 0.1
SETTINGS: dict[str, Any] = {
    "seed": SEED,
    "participation": 0.6,
    "epochs": EPOCHS,
    "batch_size": BATCH,
    "lr": LR,
    "engine": "sequential",
    "device": "cpu",
}


# --- the problem: softmax regression, each client with labels of mostly one class ------------------------------------


def make_data() -> tuple[fedagg.Dataset, list[Indices]]:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    y = np.where(rng.random(len(owner)) < 0.8, owner % CLASSES, rng.integers(CLASSES, size=len(owner)))
    x = rng.normal(size=(len(owner), FEATURES)).astype(np.float32) + y[:, None]
    x = x.astype(np.float32)
    parts = [np.flatnonzero(owner == client) for client in range(len(SIZES))]
    return fedagg.Dataset(x, y, x, y, classes=CLASSES), parts


DATA, PARTS = make_data()
X, Y = DATA.x_train.double().numpy(), DATA.y_train.numpy()


def make_linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(FEATURES, CLASSES)


def flat(module: nn.Module) -> Array:
    return np.concatenate([p.detach().double().numpy().ravel() for p in module.parameters()])


def run(algorithm: str, rounds: int, module: nn.Module | None = None, /, **settings: Any) -> fedagg.Result:
    module = module if module is not None else make_linear()
    result = fedagg.run(algorithm=algorithm, data=DATA, parts=PARTS, model=module, rounds=rounds, **{**SETTINGS, **settings})
    assert all(row["left_out"] == 0 for row in result.history)
    return result


# --- the reference ----------------------------------------------------------------------------------------------------


def gradient(w: Array, rows: Indices) -> Array:
    """Of the mean cross-entropy of these samples, for weights (C, F) then biases (C,)."""
    x, y = X[rows], Y[rows]
    z = x @ w[: CLASSES * FEATURES].reshape(CLASSES, FEATURES).T + w[CLASSES * FEATURES :]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1.0
    p /= len(y)
    return np.concatenate([(p.T @ x).ravel(), p.sum(0)])


def batches(t: int, client: int) -> list[Indices]:
    """The mini-batches of a client's round: the run's own order, cut by hand."""
    order = seeding.batches(seeding.derive(SEED, "client", t, 0, client), SIZES[client], EPOCHS).numpy()
    return [PARTS[client][epoch[at : at + BATCH]] for epoch in order for at in range(0, len(epoch), BATCH)]


def local(w: Array, t: int, client: int, direction: Direction = lambda g, y: g) -> tuple[Array, int]:
    """Where a client ends, and after how many steps."""
    todo = batches(t, client)
    for rows in todo:
        w = w - LR * direction(gradient(w, rows), w)
    return w, len(todo)


def chosen(t: int) -> list[int]:
    return seeding.participants(SEED, t, len(SIZES), 3)


def by_size(values: list[Array], clients: list[int]) -> Array:
    sizes = np.array([SIZES[i] for i in clients], dtype=float)
    return np.average(np.stack(values), axis=0, weights=sizes)


def mean(values: list[Array]) -> Array:
    return np.mean(values, axis=0)  # type: ignore[no-any-return]


def fedavg(w: Array, rounds: int) -> Array:
    for t in range(rounds):
        w = by_size([local(w, t, i)[0] for i in chosen(t)], chosen(t))
    return w


def fedprox(w: Array, rounds: int, mu: float) -> Array:
    for t in range(rounds):
        pull: Direction = lambda g, y, x=w: g + mu * (y - x)  # type: ignore[misc]  # noqa: E731
        w = by_size([local(w, t, i, pull)[0] for i in chosen(t)], chosen(t))
    return w


def adaptive(w: Array, rounds: int, kind: str, beta1: float, beta2: float, tau: float, rate: float) -> Array:
    m, v = np.zeros_like(w), np.full_like(w, tau**2)
    for t in range(rounds):
        delta = by_size([local(w, t, i)[0] - w for i in chosen(t)], chosen(t))
        m = beta1 * m + (1 - beta1) * delta
        if kind == "fedadam":
            v = beta2 * v + (1 - beta2) * delta**2
        elif kind == "fedyogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = v + delta**2
        w = w + rate * m / (np.sqrt(v) + tau)
    return w


def feddyn(w: Array, rounds: int, alpha: float) -> Array:
    g, h = np.zeros((len(SIZES), len(w))), np.zeros_like(w)
    for t in range(rounds):
        ends = []
        for i in chosen(t):
            step: Direction = lambda grad, y, i=i, x=w: grad - g[i] + alpha * (y - x)  # type: ignore[misc]  # noqa: E731
            ends.append(local(w, t, i, step)[0])
        for i, end in zip(chosen(t), ends, strict=True):
            g[i] -= alpha * (end - w)
            h -= alpha / len(SIZES) * (end - w)
        w = mean(ends) - h / alpha
    return w


def scaffold(w: Array, rounds: int, global_lr: float) -> Array:
    ci, c = np.zeros((len(SIZES), len(w))), np.zeros_like(w)
    for t in range(rounds):
        ends, changes = [], []
        for i in chosen(t):
            end, steps = local(w, t, i, lambda grad, y, i=i, c=c: grad - ci[i] + c)  # type: ignore[misc]
            new = ci[i] - c + (w - end) / (steps * LR)
            ends.append(end)
            changes.append(new - ci[i])
            ci[i] = new
        w = w + global_lr * mean([end - w for end in ends])
        c = c + len(ends) / len(SIZES) * mean(changes)
    return w


def fedcm(w: Array, rounds: int, alpha: float) -> Array:
    momentum = np.zeros_like(w)
    for t in range(rounds):
        ends = [local(w, t, i, lambda g, y, m=momentum: alpha * g + (1 - alpha) * m) for i in chosen(t)]  # type: ignore[misc]
        momentum = mean([(w - end) / (LR * steps) for end, steps in ends])
        w = mean([end for end, _ in ends])
    return w


def fedexp(w: Array, rounds: int, eps: float) -> tuple[Array, Array, list[float]]:
    """The last two iterates, and the server's steps."""
    last, steps = w, []
    for t in range(rounds):
        deltas = [w - local(w, t, i)[0] for i in chosen(t)]
        bar = mean(deltas)
        steps.append(max(1.0, sum(float(d @ d) for d in deltas) / (2 * len(deltas) * (float(bar @ bar) + eps))))
        last, w = w, w - steps[-1] * bar
    return last, w, steps


def expected(algorithm: str, rounds: int, **options: float) -> Array:
    w = flat(make_linear())
    if algorithm == "fedavg":
        return fedavg(w, rounds)
    if algorithm in ("fedadam", "fedyogi", "fedadagrad"):
        given = {"beta1": 0.0 if algorithm == "fedadagrad" else 0.9, "beta2": 0.99, "tau": 1e-3, "server_lr": 0.01}
        given |= options
        return adaptive(w, rounds, algorithm, given["beta1"], given["beta2"], given["tau"], given["server_lr"])
    if algorithm == "fedexp":
        last, now, _ = fedexp(w, rounds, options.get("exp_eps", 1e-3))
        return (last + now) / 2  # as published, the mean of the last two iterates is what is shown
    method = {
        "fedprox": lambda: fedprox(w, rounds, options.get("mu", 0.01)),
        "feddyn": lambda: feddyn(w, rounds, options.get("dyn_alpha", 0.01)),
        "scaffold": lambda: scaffold(w, rounds, options.get("global_lr", 1.0)),
        "fedcm": lambda: fedcm(w, rounds, options.get("cm_alpha", 0.1)),
    }
    return method[algorithm]()


EXACT: list[tuple[str, dict[str, float]]] = [
    ("fedavg", {}),
    ("fedprox", {}),
    ("fedprox", {"mu": 1.5}),
    ("fedadam", {}),
    ("fedadam", {"server_lr": 0.1, "beta1": 0.5, "beta2": 0.8, "tau": 0.02}),
    ("fedyogi", {}),
    ("fedyogi", {"server_lr": 0.1, "beta1": 0.5, "beta2": 0.2, "tau": 0.3}),
    ("fedadagrad", {}),
    ("fedadagrad", {"server_lr": 0.1, "beta1": 0.5, "tau": 0.02}),
    ("feddyn", {}),
    ("feddyn", {"dyn_alpha": 0.8}),
    ("scaffold", {}),
    ("scaffold", {"global_lr": 0.7}),
    ("fedcm", {}),
    ("fedcm", {"cm_alpha": 0.6}),
    ("fedexp", {}),
    ("fedexp", {"exp_eps": 0.5}),
]


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize(("algorithm", "options"), EXACT)
def test_method_is_the_published_one(algorithm: str, options: dict[str, float], rounds: int) -> None:
    ours = flat(run(algorithm, rounds, **options).model)
    np.testing.assert_allclose(ours, expected(algorithm, rounds, **options), rtol=2e-5, atol=5e-6)
    start = flat(make_linear())
    assert np.abs(ours - start).max() > 1e-3


def test_the_problem_tells_the_methods_apart() -> None:
    """The comparisons above mean something only if their tolerance is far under what the methods differ by."""
    ends = [expected(name, 4, **options) for name, options in EXACT]
    gaps = [np.abs(a - b).max() for k, a in enumerate(ends) for b in ends[:k]]
    assert min(gaps) > 1e-4
    assert {len(batches(0, i)) for i in range(len(SIZES))} == {2, 4, 6, 8}


def test_fedexp_extrapolates_here_and_is_plain_averaging_when_clients_agree() -> None:
    w = flat(make_linear())
    assert max(fedexp(w, 4, 1e-3)[2]) > 1.0
    calm = run("fedexp", 1, exp_eps=1e9).model
    plain = mean([local(w, 0, i)[0] for i in chosen(0)])
    np.testing.assert_allclose(flat(calm), (w + plain) / 2, rtol=2e-5, atol=5e-6)


def test_defaults_are_the_papers() -> None:
    def defaults(name: str) -> dict[str, Any]:
        made = vars(algorithms.build(name, {}))
        return {k: v for k, v in made.items() if k not in ("lr", "state", "head")}

    assert defaults("fedadam") == {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    assert defaults("fedyogi") == defaults("fedadam")
    assert defaults("fedadagrad") == {"server_lr": 0.01, "beta1": 0.0, "tau": 1e-3}
    assert defaults("fedprox") == {"mu": 0.01}
    assert defaults("feddyn") == {"dyn_alpha": 0.01}
    assert defaults("scaffold") == {"global_lr": 1.0}
    assert defaults("fedcm") == {"cm_alpha": 0.1}
    assert defaults("fedexp") == {"exp_eps": 1e-3}
    assert algorithms.build("fedadagrad", {"beta1": None, "mu": 3.0}) == algorithms.build("fedadagrad", {})


def test_unknown_algorithm_is_refused_with_a_suggestion() -> None:
    with pytest.raises(SettingError, match="fedprox"):
        algorithms.build("fedproxy", {})


def test_fedprox_reports_the_loss_of_the_data_alone() -> None:
    """One step: the loss is taken before the client has moved, so no penalty could show; two epochs: it would."""
    w, strong = flat(make_linear()), 50.0
    row = run("fedprox", 1, mu=strong, lr=0.01).history[0]
    total, sizes = 0.0, [SIZES[i] for i in chosen(0)]
    for i in chosen(0):
        y, losses = w, []
        for rows in batches(0, i):
            z = X[rows] @ y[: CLASSES * FEATURES].reshape(CLASSES, FEATURES).T + y[CLASSES * FEATURES :]
            losses.append(float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(rows)), Y[rows]])))
            y = y - 0.01 * (gradient(y, rows) + strong * (y - w))
        total += SIZES[i] / sum(sizes) * float(np.mean(losses))
    assert row["train_loss"] == pytest.approx(total, rel=1e-5)


# --- the clients' optimiser, against torch's own ----------------------------------------------------------------------


def alone(optimizer: Callable[[nn.Module], torch.optim.Optimizer], clip: float = 0.0) -> Array:
    """Two rounds of one client that holds everything, by torch.optim; its state starts afresh every round."""
    module = make_linear()
    for t in range(2):
        opt = optimizer(module)
        order = seeding.batches(seeding.derive(SEED, "client", t, 0, 0), len(X), EPOCHS)
        for epoch in order:
            for rows in epoch.split(BATCH):
                opt.zero_grad()
                functional.cross_entropy(module(DATA.x_train[rows]), DATA.y_train[rows]).backward()
                if clip:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                opt.step()
    return flat(module)


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({"momentum": 0.9}, lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9)),
        ({"weight_decay": 0.3}, lambda m: torch.optim.SGD(m.parameters(), lr=LR, weight_decay=0.3)),
        (
            {"momentum": 0.5, "weight_decay": 0.3},
            lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=0.5, weight_decay=0.3),
        ),
        ({"client_optimizer": "adam"}, lambda m: torch.optim.Adam(m.parameters(), lr=LR)),
        (
            {"client_optimizer": "adam", "weight_decay": 0.3},
            lambda m: torch.optim.Adam(m.parameters(), lr=LR, weight_decay=0.3),
        ),
        ({"clip": 0.2}, lambda m: torch.optim.SGD(m.parameters(), lr=LR)),
        (
            {"clip": 0.2, "momentum": 0.5, "weight_decay": 0.3},
            lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=0.5, weight_decay=0.3),
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_client_optimiser_is_torchs(settings: dict[str, Any], optimizer: Callable[[nn.Module], Any]) -> None:
    shared = {**SETTINGS, **settings, "participation": 1.0}
    ours = fedagg.run(algorithm="fedavg", data=DATA, parts=[np.arange(len(X))], model=make_linear(), rounds=2, **shared)
    wanted = alone(optimizer, settings.get("clip", 0.0))
    np.testing.assert_allclose(flat(ours.model), wanted, rtol=1e-4, atol=1e-5)
    assert np.abs(wanted - alone(lambda m: torch.optim.SGD(m.parameters(), lr=LR))).max() > 1e-2


# --- body and head ----------------------------------------------------------------------------------------------------


def make_mlp() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"client_optimizer": "adam"}, {"robust": "median"}])
def test_fedbabu_never_moves_the_head_by_a_bit(settings: dict[str, Any]) -> None:
    before, after = make_mlp(), run("fedbabu", 4, make_mlp(), weight_decay=0.5, **settings).model
    assert isinstance(after, nn.Sequential)
    for name in ("2.weight", "2.bias"):
        assert after.state_dict()[name].numpy().tobytes() == before.state_dict()[name].numpy().tobytes()
    assert not torch.equal(after.state_dict()["0.weight"], before.state_dict()["0.weight"])


def test_fedbabu_trains_the_body_as_if_the_head_were_not_there() -> None:
    """The body alone in torch's optimiser, on a client that holds everything."""
    module = make_mlp()
    opt = torch.optim.SGD(module[0].parameters(), lr=LR, momentum=0.5, weight_decay=0.1)
    for rows in seeding.batches(seeding.derive(SEED, "client", 0, 0, 0), len(X), 1)[0].split(BATCH):
        opt.zero_grad()
        functional.cross_entropy(module(DATA.x_train[rows]), DATA.y_train[rows]).backward()
        opt.step()
    shared = {**SETTINGS, "participation": 1.0, "epochs": 1, "momentum": 0.5, "weight_decay": 0.1}
    ours = fedagg.run(algorithm="fedbabu", data=DATA, parts=[np.arange(len(X))], model=make_mlp(), rounds=1, **shared)
    np.testing.assert_allclose(flat(ours.model), flat(module), rtol=1e-4, atol=1e-6)


def test_fedbabu_records_its_two_figures(tmp_path: Path) -> None:
    """`accuracy` under the untouched head; `personal_accuracy` after fine-tuning all of it, done again with torch."""
    rounds = 2
    result = fedagg.run(
        algorithm="fedbabu", data=DATA, parts=PARTS, model=make_mlp(), rounds=rounds, out=tmp_path / "run", **SETTINGS
    )
    hits = result.model(DATA.x_test).argmax(1) == DATA.y_test
    assert result.accuracy == pytest.approx(float(hits.double().mean()))
    scores = []
    for i in chosen(rounds):
        module = copy.deepcopy(result.model)
        for rows in batches(rounds, i):
            module.zero_grad()
            functional.cross_entropy(module(DATA.x_train[rows]), DATA.y_train[rows]).backward()
            with torch.no_grad():
                for p in module.parameters():
                    assert p.grad is not None
                    p -= LR * p.grad
        hits = (module(DATA.x_test).argmax(1) == DATA.y_test).numpy()
        own = Y[PARTS[i]]
        scores.append(sum(float(np.mean(own == c)) * float(hits[c == Y].mean()) for c in range(CLASSES)))
    assert result.figures["personal_accuracy"] == pytest.approx(float(np.mean(scores)), abs=1e-6)
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["personal_accuracy"] == result.figures["personal_accuracy"]
    assert written["accuracy"] == result.accuracy


def test_a_client_that_cannot_be_scored_leaves_the_others_their_personal_accuracy() -> None:
    """The test set has no sample of the second client's class; the first's own class is half of it."""
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 4
    data = fedagg.Dataset(x, y, x[y < 2], y[y < 2], classes=4)
    parts = [torch.nonzero(y == k).flatten().tolist() for k in (0, 3)]
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    settings: dict[str, Any] = {"rounds": 1, "epochs": 2, "lr": 0.5, "participation": 1.0, "engine": "sequential", "device": "cpu"}
    result = fedagg.run(algorithm="fedbabu", data=data, model=module, parts=parts, **settings)
    assert 0.0 <= result.figures["personal_accuracy"] <= 1.0


def test_fedbabu_needs_a_body() -> None:
    with pytest.raises(SettingError, match=r"algorithm = 'fedbabu': needs a model with a body.*choose --model"):
        fedagg.run(algorithm="fedbabu", model="linear", rounds=1)
    with pytest.raises(SettingError, match="body"):
        run("fedbabu", 1)


def test_head_can_be_named() -> None:
    """Naming the first layer as the head keeps that one still, and the other one moves."""
    before, after = make_mlp().state_dict(), run("fedbabu", 2, make_mlp(), head="0").model.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["2.weight"], before["2.weight"])
    for algorithm in ("fedbabu", "fedgh"):
        with pytest.raises(SettingError, match="head"):
            run(algorithm, 1, make_mlp(), head="7")


def header_loss(w: Array, b: Array, features: Array, labels: Array, weights: Array) -> tuple[float, Array, Array]:
    """Weighted cross-entropy of a linear header, and its gradients."""
    z = features @ w.T + b
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = float(-(weights * np.log(p[np.arange(len(labels)), labels])).sum())
    p[np.arange(len(labels)), labels] -= 1.0
    p *= weights[:, None]
    return loss, p.T @ features, p.sum(0)


def test_fedgh_trains_the_header_on_the_uploads_and_broadcasts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[tuple[Model, Outcome, Model]] = []
    given: list[Tensor] = []
    update, train = FedGH.update, Clients.train

    def spied_update(self: FedGH, model: Model, out: Outcome, clients: Clients) -> Model:
        after = update(self, model, out, clients)
        updates.append((model, out, after))
        return after

    def spied_train(self: Clients, work: Work) -> Outcome:
        given.append(self.model.w.clone())
        return train(self, work)

    monkeypatch.setattr(FedGH, "update", spied_update)
    monkeypatch.setattr(Clients, "train", spied_train)
    result = run("fedgh", 3, make_mlp(), head_lr=0.2, head_steps=30)
    body = FEATURES * 4 + 4

    for t, (before, out, after) in enumerate(updates):
        assert out.classes is not None
        assert out.counts is not None
        start, end = before.w.double().numpy(), after.w.double().numpy()
        # Gradient descent on the uploaded means, from the header that was broadcast, each weighted by its samples.
        features, labels, weights = [], [], []
        for means, counts in zip(out.classes.double().numpy(), out.counts.double().numpy(), strict=True):
            for label in range(CLASSES):
                if counts[label]:
                    features.append(means[label])
                    labels.append(label)
                    weights.append(counts[label])
        upload = np.array(features), np.array(labels), np.array(weights) / sum(weights)
        w, b = start[body:-CLASSES].reshape(CLASSES, 4), start[-CLASSES:]
        first = header_loss(w, b, *upload)[0]
        for _ in range(30):
            _, dw, db = header_loss(w, b, *upload)
            w, b = w - 0.2 * dw, b - 0.2 * db
        last = header_loss(w, b, *upload)[0]
        np.testing.assert_allclose(end[body:], np.concatenate([w.ravel(), b]), rtol=1e-4, atol=1e-5)
        assert np.abs(end[body:] - start[body:]).max() > 1e-2
        assert last < first
        assert result.history[t]["header_loss_before"] == pytest.approx(first, rel=1e-4)
        assert result.history[t]["header_loss_after"] == pytest.approx(last, rel=1e-4)
        np.testing.assert_allclose(end[:body], (before.w + out.mean).double().numpy()[:body], rtol=1e-6)

    for t in range(2):  # what the next round's clients start from is what the server made
        assert torch.equal(given[t + 1], updates[t][2].w)
    np.testing.assert_array_equal(flat(result.model), updates[-1][2].w.double().numpy())


def test_fedgh_uploads_class_means_of_the_trained_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Done again with NumPy: train the two layers as the client does, then average tanh(W x + b) by class."""
    seen: list[Outcome] = []
    update = FedGH.update

    def spied(self: FedGH, model: Model, out: Outcome, clients: Clients) -> Model:
        seen.append(out)
        return update(self, model, out, clients)

    monkeypatch.setattr(FedGH, "update", spied)
    run("fedgh", 1, make_mlp())
    [out] = seen
    assert out.classes is not None
    assert out.counts is not None
    assert out.clients == chosen(0)
    for client, means, counts in zip(out.clients, out.classes.numpy(), out.counts.numpy(), strict=True):
        w1, b1, w2, b2 = (p.detach().double().numpy() for p in make_mlp().parameters())
        for rows in batches(0, client):
            x, y = X[rows], Y[rows]
            hidden = np.tanh(x @ w1.T + b1)
            z = hidden @ w2.T + b2
            p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            p[np.arange(len(y)), y] -= 1.0
            p /= len(y)
            back = (p @ w2) * (1 - hidden**2)
            w1, b1 = w1 - LR * back.T @ x, b1 - LR * back.sum(0)
            w2, b2 = w2 - LR * p.T @ hidden, b2 - LR * p.sum(0)
        own = PARTS[client]
        for label in range(CLASSES):
            mine = own[Y[own] == label]
            assert counts[label] == len(mine)
            if len(mine):
                np.testing.assert_allclose(means[label], np.tanh(X[mine] @ w1.T + b1).mean(0), rtol=1e-4, atol=1e-5)


def test_fedgh_never_raises_its_loss_however_bold_the_rate() -> None:
    for row in run("fedgh", 3, make_mlp(), head_lr=1e4).history:
        assert row["header_loss_after"] < row["header_loss_before"]


def test_fedgh_needs_a_head_with_a_name() -> None:
    with pytest.raises(SettingError, match=r"nn\.Sequential"):
        run("fedgh", 1, make_linear())
    assert run("fedgh", 1, nn.Sequential(make_linear())).history[0]["header_loss_after"] > 0


# --- buffers ----------------------------------------------------------------------------------------------------------


def make_normed() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, CLASSES))


@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam", "fedyogi", "fedadagrad", "fedexp", "scaffold", "feddyn"])
def test_buffers_are_averaged_by_size_and_seen_by_no_optimiser(algorithm: str) -> None:
    """Full batches, one epoch: statistics after a round follow from the initial weights, whatever the server does."""
    first = make_normed()[0]
    weight, bias = (p.detach().double().numpy() for p in first.parameters())
    settings = {"batch_size": 64, "epochs": 1, "participation": 1.0}
    after = run(algorithm, 1, make_normed(), **settings).model.state_dict()
    means, variances = [], []
    for part in PARTS:
        z = X[part] @ weight.T + bias
        means.append(0.1 * z.mean(0))
        variances.append(0.9 + 0.1 * z.var(0, ddof=1))
    everyone = list(range(len(SIZES)))
    np.testing.assert_allclose(after["1.running_mean"].numpy(), by_size(means, everyone), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(after["1.running_var"].numpy(), by_size(variances, everyone), rtol=1e-4)
    assert after["1.num_batches_tracked"].dtype == torch.int64
    assert int(after["1.num_batches_tracked"]) == 1


def test_batch_counters_are_averaged_and_stay_whole() -> None:
    parts = [np.arange(8), np.arange(8, 32)]  # 2 and 6 batches of 4: by size (8·2 + 24·6)/32 = 5
    result = fedagg.run(
        algorithm="fedadam",
        data=DATA,
        parts=parts,
        model=make_normed(),
        rounds=2,
        **{**SETTINGS, "participation": 1.0, "epochs": 1},
    )
    assert int(result.model.state_dict()["1.num_batches_tracked"]) == 10


# --- the same for everybody -------------------------------------------------------------------------------------------

METHODS = sorted(algorithms.REGISTRY.keys() - {"fedagg-paper"})


def watched(monkeypatch: pytest.MonkeyPatch, algorithm: str, **settings: Any) -> list[tuple[bytes, list[int], bytes]]:
    """Of every round: the weights the clients got, who took part, and their samples in the order of use, in its first pass."""
    seen: dict[int, tuple[bytes, list[int], bytes]] = {}
    train = Clients.train

    def spied(self: Clients, work: Work) -> Outcome:
        order = b"".join(job.order().numpy().tobytes() for job in self.jobs())
        seen.setdefault(self.t, (self.model.w.numpy().tobytes(), self.ids, order))
        return train(self, work)

    with monkeypatch.context() as patch:
        patch.setattr(Clients, "train", spied)
        fedagg.run(
            algorithm=algorithm,
            dataset="mnist-mini",
            model="lenet5",
            partition="dirichlet",
            clients=100,
            participation=0.02,
            rounds=2,
            epochs=1,
            eval_every=2,
            engine="sequential",
            device="cpu",
            **settings,
        )
    return list(seen.values())


@pytest.mark.slow
def test_methods_in_a_comparison_share_weights_participants_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = watched(monkeypatch, "fedavg", seed=4)
    assert reference[0][1] != reference[1][1]
    for algorithm in METHODS:
        rounds = watched(monkeypatch, algorithm, seed=4)
        assert rounds[0] == reference[0], algorithm
        assert rounds[1][1:] == reference[1][1:], algorithm
    other = watched(monkeypatch, "fedavg", seed=5)
    assert all(mine != theirs for mine, theirs in zip(other[0], reference[0], strict=True))


@pytest.mark.parametrize("algorithm", METHODS)
def test_same_seed_same_bytes(algorithm: str) -> None:
    """The global generators of torch and NumPy are left in different states before the two runs."""

    def dropped() -> nn.Sequential:
        torch.manual_seed(6)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))

    def once(noise: int, **settings: Any) -> tuple[bytes, list[dict[str, Any]]]:
        module = dropped()
        torch.manual_seed(noise)
        np.random.seed(noise)  # noqa: NPY002
        result = run(algorithm, 3, module, **({"pace": "base"} if algorithm == "fedagg" else {}), **settings)
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]
        return b"".join(p.detach().numpy().tobytes() for p in result.model.parameters()), rows

    one = once(1)
    assert one == once(2)
    assert one[0] != once(1, seed=SEED + 1)[0]


def test_masks_and_heads_of_the_papers_models_are_their_last_layer() -> None:
    for name in ("mnist-cnn", "lenet5", "cifar10-cnn"):
        module = models.build(name, (1, 28, 28), 10)
        mask = Layout(module).mask(set(models.head_parameters(module)))
        last = [m for m in module.modules() if isinstance(m, nn.Linear)][-1]
        assert int(mask.sum()) == last.weight.numel() + last.bias.numel()
        assert mask[-int(mask.sum()) :].all()


def test_fedagg_stands_still_where_there_is_nothing_to_learn() -> None:
    """One class: every gradient is zero, nobody moves, no rate is better than another, and the base rate stands."""
    x, y = torch.ones(40, 3), torch.zeros(40, dtype=torch.int64)
    network = nn.Sequential(nn.Linear(3, 1))
    result = fedagg.run(data=fedagg.Dataset(x, y, x, y), model=network, clients=4, participation=1.0, rounds=3)
    assert [row["pace"] for row in result.history] == [0.01, 0.01, 0.01]
    assert all(torch.equal(a, b) for a, b in zip(result.model.parameters(), network.parameters(), strict=True))


def test_what_a_rehearsal_costs_is_in_the_record_and_its_gaps_are_those_of_the_round(tmp_path: Path) -> None:
    given: dict[str, Any] = {"variant": "paper", "passes": 3, "tolerance": 1e-9}
    probe = tiny.job(estimator="probe", rounds=1, **given).history[0]
    whole = tiny.job(estimator="pretrain", rounds=3, out=tmp_path / "whole", **given)
    for name in ("passes", "samples", "bytes_up", "bytes_down"):
        assert whole.history[0][name] == probe[name], name
    assert whole.history[0]["epsilon1"] == probe["epsilon1"]
    assert len({row["epsilon1"] for row in whole.history}) == 3
    tiny.job(estimator="pretrain", rounds=3, out=tmp_path / "run", callbacks=[StopAfter(2)], **given)
    tiny.job(estimator="pretrain", rounds=3, resume=tmp_path / "run", **given)
    assert tiny.same_run(tmp_path / "run", tmp_path / "whole")


class StopAfter:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def started(self, *_: Any) -> None: ...

    def round_done(self, row: dict[str, Any]) -> None:
        if row["round"] == self.rounds:
            raise KeyboardInterrupt

    def finished(self, *_: Any) -> None: ...


def test_a_figure_of_an_earlier_round_is_not_repeated() -> None:
    """Undone or empty rounds have none of their own."""
    result = tiny.job(algorithm="fedgh", dropout_rate=0.8, rounds=8, participation=0.34)
    empty = [row for row in result.history if row.get("unchanged")]
    assert empty
    assert not any("header_loss_after" in row for row in empty)


def test_an_epoch_in_which_a_client_stood_still_says_nothing_of_its_smoothness() -> None:
    gradients = torch.tensor([[[1.0], [3.0], [3.5]], [[1.0], [3.0], [3.5]], [[1.0], [1.0], [1.0]], [[1.0], [2.0], [3.0]]])
    path = torch.tensor([[[0.0], [1.0], [1.0], [2.0]], [[0.0], [1.0], [1.1], [2.0]], [[0.0], [1.0], [1.0], [1.0]], [[0.0]] * 4])
    assert secant_smoothness(gradients, path).tolist() == pytest.approx([2.0, 5.0, 0.0, 0.0])


@pytest.mark.parametrize("given", [{"estimator": "history"}, {"passes": 2}, {"estimator": "pretrain", "passes": 2}])
def test_the_paper_version_goes_on_after_epochs_at_a_rate_of_zero(given: dict[str, Any]) -> None:
    result = fedagg.run(dataset="mnist-mini", variant="paper", rounds=5, clients=20, epochs=3, lr=0.01, device="cpu", **given)
    assert any(0.0 in row["rate_min"] for row in result.history)
    assert all(row["rate_max"][0] > 1e-3 for row in result.history)
    assert result.accuracy > 0.6


def test_who_stops_after_one_epoch_is_as_bounded_as_the_others(tmp_path: Path) -> None:
    """Between two gradients nobody saw it move: its own smoothness is not known, and the largest is taken."""
    given: dict[str, Any] = {"variant": "paper", "straggler_rate": 0.5, "epochs": 3, "participation": 1.0, "rounds": 3}
    tiny.job(out=tmp_path / "run", **given)
    row = tiny.rows(tmp_path / "run", "clients.jsonl")[2]
    assert row["epochs"]["4"] == 1
    rates = {client: own[0] for client, own in zip(row["clients"], row["rates"], strict=True)}
    assert rates[4] == min(rates.values()) < max(rates.values())


@pytest.mark.slow
def test_how_long_a_rehearsal_is_makes_no_difference_to_the_rounds_before_its_end(tmp_path: Path) -> None:
    """So that a run can be given more rounds later."""
    given: dict[str, Any] = {"variant": "paper", "estimator": "pretrain", "passes": 3, "tolerance": 1e-9, "downlink_bits": 3}
    tiny.job(rounds=6, out=tmp_path / "whole", **given)
    tiny.job(rounds=3, out=tmp_path / "run", **given)
    tiny.job(rounds=6, resume=tmp_path / "run", **given)
    assert tiny.same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("bits", [2, 32])
def test_clients_that_follow_the_field_they_were_sent_do_not_depart_from_it(bits: int) -> None:
    result = tiny.job(variant="paper", direction="aggregated", batch_size=100, downlink_bits=bits, lr=0.01, rounds=2)
    assert all(row["departure"] < 1e-2 for row in result.history)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("engine", tiny.ENGINES)
def test_momentum_is_not_taken_for_gradient(momentum: float, engine: str) -> None:
    """Where the gradient is the same everywhere, a displacement over its travel is it, for every number of steps and epochs."""

    def linear(output: Tensor, target: Tensor) -> Tensor:
        return (output * torch.tensor([1.0, -2.0, 3.0])).sum(-1)

    x, y = torch.ones(30, 2), torch.arange(30) % 3
    local = ClientOptions(epochs=3, batch_size=4, momentum=momentum)
    problem = Problem(nn.Linear(2, 3, bias=False), x, y, 3, local, torch.device("cpu"), linear)
    jobs = [Job(0, torch.arange(9), 3, 1), Job(1, torch.arange(9, 27), 2, 2, 1), Job(2, torch.arange(27, 28), 1, 3, 2)]
    work = Work(rate=torch.tensor([0.1, 0.03, 0.2]))
    gradient = torch.tensor([1.0, 1.0, -2.0, -2.0, 3.0, 3.0])
    model = problem.layout.pack(problem.module)
    for chunk in engines.build(engine, problem, Config(model="custom")).run(model, work, jobs, None):
        torch.testing.assert_close(-chunk.delta / chunk.travel[:, None], gradient.expand_as(chunk.delta), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["scaffold", "fedcm", "fedagg"])
def test_methods_that_read_gradients_off_displacements_train_with_momentum(algorithm: str) -> None:
    """A direction that came back ten times as long in every round would run away."""
    settings: dict[str, Any] = {"clients": 10, "participation": 1.0, "partition": "shards", "rounds": 8, "epochs": 2}
    result = fedagg.run(algorithm=algorithm, momentum=0.9, engine="batched", device="cpu", **settings)
    assert result.accuracy > 0.8
    assert result.loss < 3.5
