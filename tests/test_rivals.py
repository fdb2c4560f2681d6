"""The later methods against plain NumPy loops written from their formulas: ragged clients, three of five taking part, both engines
and Flower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import fedagg
import tiny
from fedagg import algorithms, seeding

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Loop = Callable[..., Array]

SIZES = (3, 9, 4, 13, 6)  # batches of 4: 1, 3, 1, 4 and 2 steps an epoch, some of them short
FEATURES, CLASSES, SEED, EPOCHS, BATCH, LR, ROUNDS = 5, 3, 11, 2, 4, 0.1, 5
SETTINGS: dict[str, Any] = {
    "seed": SEED,
    "participation": 0.6,
    "epochs": EPOCHS,
    "batch_size": BATCH,
    "lr": LR,
    "rounds": ROUNDS,
}

# --- the problem: softmax regression, each client with labels of mostly one class ------------------------------------

OWNER = np.repeat(np.arange(len(SIZES)), SIZES)
PARTS = [np.flatnonzero(client == OWNER) for client in range(len(SIZES))]


def make_data() -> fedagg.Dataset:
    rng = np.random.default_rng(0)
    y = np.where(rng.random(len(OWNER)) < 0.8, OWNER % CLASSES, rng.integers(CLASSES, size=len(OWNER)))
    x = (rng.normal(size=(len(OWNER), FEATURES)) + y[:, None]).astype(np.float32)
    return fedagg.Dataset(x, y, x, y, classes=CLASSES)


DATA = make_data()
X, Y = DATA.x_train.double().numpy(), DATA.y_train.numpy()


def linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(FEATURES, CLASSES)


def flat(module: nn.Module) -> Array:
    return np.concatenate([p.detach().double().numpy().ravel() for p in module.parameters()])


def run(name: str, **settings: Any) -> fedagg.Result:
    given = {**SETTINGS, "engine": "sequential", "device": "cpu", **settings}
    result = fedagg.run(algorithm=name, data=DATA, parts=PARTS, model=linear(), **given)
    assert all(row["left_out"] == 0 for row in result.history)
    return result


def value_and_gradient(w: Array, rows: Indices) -> tuple[float, Array]:
    """Of the mean cross-entropy of these samples, for weights (C, F) then biases (C,)."""
    x, y = X[rows], Y[rows]
    z = x @ w[: CLASSES * FEATURES].reshape(CLASSES, FEATURES).T + w[CLASSES * FEATURES :]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -float(np.log(p[np.arange(len(y)), y]).mean())
    p[np.arange(len(y)), y] -= 1.0
    p /= len(y)
    return loss, np.concatenate([(p.T @ x).ravel(), p.sum(0)])


def gradient(w: Array, rows: Indices) -> Array:
    return value_and_gradient(w, rows)[1]


def batches(t: int, client: int) -> list[Indices]:
    """The mini-batches of a client's round: the run's own order, cut by hand."""
    order = seeding.batches(seeding.derive(SEED, "client", t, 0, client), SIZES[client], EPOCHS).numpy()
    return [PARTS[client][epoch[at : at + BATCH]] for epoch in order for at in range(0, len(epoch), BATCH)]


def chosen(t: int) -> list[int]:
    return seeding.participants(SEED, t, len(SIZES), 3)


def by_size(values: list[Array], clients: list[int]) -> Array:
    return np.average(np.stack(values), axis=0, weights=[SIZES[i] for i in clients])  # type: ignore[no-any-return]


# --- the methods ------------------------------------------------------------------------------------------------------


def descend(w: Array, t: int, client: int) -> Array:
    for rows in batches(t, client):
        w = w - LR * gradient(w, rows)
    return w


def fedavgm(w: Array, beta1: float = 0.9, server_lr: float = 1.0) -> Array:
    v = np.zeros_like(w)
    for t in range(ROUNDS):
        v = beta1 * v + by_size([descend(w, t, i) - w for i in chosen(t)], chosen(t))
        w = w + server_lr * v
    return w


def fednova(w: Array, momentum: float = 0.0) -> Array:
    for t in range(ROUNDS):
        share = np.array([SIZES[i] for i in chosen(t)]) / sum(SIZES[i] for i in chosen(t))
        directions, taus = [], []
        for i in chosen(t):
            y, velocity, counter, tau = w, np.zeros_like(w), 0.0, 0.0
            for rows in batches(t, i):
                velocity = momentum * velocity + gradient(y, rows)
                y = y - LR * velocity
                counter = momentum * counter + 1  # as the authors' code counts
                tau += counter
            directions.append((w - y) / (LR * tau))
            taus.append(tau)
        w = w - LR * float(share @ taus) * (share @ np.stack(directions))
    return w


def ghbm(w: Array, ghb_beta: float = 0.9, ghb_tau: int = 2) -> Array:
    """N/n is 5/3: about two."""
    models = [w]
    for t in range(ROUNDS):
        w = models[-1]
        m = (models[t - ghb_tau] - w) / ghb_tau if t >= ghb_tau else np.zeros_like(w)
        ends = []
        for i in chosen(t):
            y = w
            for rows in batches(t, i):
                y = y - LR * gradient(y, rows) - ghb_beta / len(batches(t, i)) * m
            ends.append(y)
        models.append(by_size(ends, chosen(t)))
    return models[-1]


def delta_sgd(w: Array, gamma: float = 2.0, growth: float = 0.02, eta0: float = 0.2) -> Array:
    for t in range(ROUNDS):
        ends = []
        for i in chosen(t):
            first, *rest = batches(t, i)
            eta, theta, last, y = eta0, 1.0, w, w - eta0 * gradient(w, first)
            for rows in rest:
                smoothness = np.linalg.norm(gradient(y, rows) - gradient(last, rows)) / np.linalg.norm(y - last)
                new = min(gamma / (2 * float(smoothness)), np.sqrt(1 + growth * theta) * eta)
                eta, theta = new, new / eta
                last, y = y, y - eta * gradient(y, rows)
            ends.append(y)
        w = by_size(ends, chosen(t))
    return w


def sharp(w: Array, rows: Indices, rho: float) -> Array:
    g = gradient(w, rows)
    return gradient(w + rho * g / np.linalg.norm(g), rows)


def fedsam(w: Array, rho: float = 0.1) -> Array:
    for t in range(ROUNDS):
        ends = []
        for i in chosen(t):
            y = w
            for rows in batches(t, i):
                y = y - LR * sharp(y, rows, rho)
            ends.append(y)
        w = np.mean(ends, axis=0)
    return w


def mofedsam(w: Array, cm_alpha: float = 0.1, rho: float = 0.1) -> Array:
    direction = np.zeros_like(w)
    for t in range(ROUNDS):
        ends, directions = [], []
        for i in chosen(t):
            y = w
            for rows in batches(t, i):
                y = y - LR * (cm_alpha * sharp(y, rows, rho) + (1 - cm_alpha) * direction)
            ends.append(y)
            directions.append((w - y) / (LR * len(batches(t, i))))
        w, direction = np.mean(ends, axis=0), np.mean(directions, axis=0)
    return w


def fedsps(w: Array, sps_c: float = 0.5, sps_bound: float = 1.0) -> Array:
    for t in range(ROUNDS):
        ends = []
        for i in chosen(t):
            y = w
            for rows in batches(t, i):
                loss, g = value_and_gradient(y, rows)
                y = y - min(loss / (sps_c * float(g @ g)), sps_bound) * g
            ends.append(y)
        w = np.mean(ends, axis=0)
    return w


def fedspeed(w: Array, dyn_alpha: float = 0.1, rho: float = 0.1, speed_alpha: float = 1.0) -> Array:
    """As the authors' code has it: h_i sums a client's updates, and w becomes mean_S w_i + mean h over all clients."""
    h = np.zeros((len(SIZES), len(w)))
    for t in range(ROUNDS):
        ends = []
        for i in chosen(t):
            y = w
            for rows in batches(t, i):
                g = (1 - speed_alpha) * gradient(y, rows) + speed_alpha * sharp(y, rows, rho)
                y = y - LR * (g + dyn_alpha * (y + h[i] - w))
            ends.append(y)
        for i, end in zip(chosen(t), ends, strict=True):
            h[i] += end - w
        w = np.mean(ends, axis=0) + h.mean(0)
    return w


LOOPS: dict[str, Loop] = {
    "fedavgm": fedavgm,
    "fednova": fednova,
    "ghbm": ghbm,
    "delta-sgd": delta_sgd,
    "fedsam": fedsam,
    "mofedsam": mofedsam,
    "fedsps": fedsps,
    "fedspeed": fedspeed,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fedavgm", {}),
    ("fedavgm", {"beta1": 0.4, "server_lr": 0.7}),
    ("fednova", {}),
    ("fednova", {"momentum": 0.5}),
    ("ghbm", {}),
    ("ghbm", {"ghb_beta": 0.5, "ghb_tau": 3}),
    ("delta-sgd", {}),
    ("delta-sgd", {"gamma": 0.6, "growth": 0.5, "eta0": 0.05}),
    ("fedsam", {}),
    ("fedsam", {"rho": 0.5}),
    ("mofedsam", {}),
    ("mofedsam", {"cm_alpha": 0.6, "rho": 0.5}),
    ("fedsps", {}),
    ("fedsps", {"sps_c": 2.0, "sps_bound": 0.3}),
    ("fedspeed", {}),
    ("fedspeed", {"dyn_alpha": 0.8, "rho": 0.5, "speed_alpha": 0.4}),
]


@pytest.mark.parametrize("engine", tiny.ENGINES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_method_is_the_published_one(name: str, options: dict[str, Any], engine: str) -> None:
    ours = flat(run(name, engine=engine, **options).model)
    np.testing.assert_allclose(ours, LOOPS[name](flat(linear()), **options), rtol=2e-5, atol=1e-5)


def test_the_problem_tells_the_methods_apart() -> None:
    w = flat(linear())
    ends = [LOOPS[name](w, **options) for name, options in CASES]
    assert min(np.abs(a - b).max() for k, a in enumerate(ends) for b in ends[:k]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_method_is_the_published_one_on_flower(name: str) -> None:
    pytest.importorskip("flwr", reason="needs fedagg[flower]")
    from fedagg.flower import FedAggStrategy, client_app
    from flower_grid import HereGrid
    from test_flower import settings

    def node(context: Any) -> fedagg.Dataset:
        rows = PARTS[context.node_config["partition-id"]]
        return fedagg.Dataset(DATA.x_train[rows], DATA.y_train[rows], DATA.x_test, DATA.y_test, classes=CLASSES)

    strategy = FedAggStrategy(linear(), settings(algorithm=name, clients=len(SIZES), **SETTINGS))
    strategy.run(HereGrid(client_app(linear, node), len(SIZES)), wait=0)
    np.testing.assert_allclose(strategy.server.model.w.numpy(), LOOPS[name](flat(linear())), rtol=2e-5, atol=1e-5)


def test_fednova_is_fedavg_where_all_make_the_same_steps() -> None:
    """Whole batches: one step each."""
    ours = [flat(run(name, rounds=2, batch_size=16, epochs=1).model) for name in ("fednova", "fedavg")]
    np.testing.assert_allclose(*ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "vectors"), [(name, 3 if name in ("ghbm", "mofedsam") else 2) for name in LOOPS])
def test_bytes_are_those_of_the_page(name: str, vectors: int) -> None:
    """A model each way, and what the method sends beside it; a few numbers come on top."""
    row = run(name, rounds=1).history[0]
    d = len(flat(linear()))
    asked = 3 * 4 * d * vectors
    assert 0 < row["bytes_up"] + row["bytes_down"] - asked < 3 * 400


def test_defaults_are_the_papers() -> None:
    def defaults(name: str) -> dict[str, Any]:
        return {k: v for k, v in vars(algorithms.build(name, {})).items() if k not in ("lr", "state")}

    assert defaults("fedavgm") == {"beta1": 0.9, "server_lr": 1.0}
    assert defaults("fednova") == {}
    assert defaults("delta-sgd") == {"gamma": 2.0, "growth": 0.02, "eta0": 0.2}
    assert defaults("fedsam") == {"rho": 0.1}
    assert defaults("mofedsam") == {"cm_alpha": 0.1, "rho": 0.1}
    assert defaults("fedsps") == {"sps_c": 0.5, "sps_bound": 1.0}
    assert defaults("fedspeed") == {"dyn_alpha": 0.1, "rho": 0.1, "speed_alpha": 1.0}
    assert defaults("ghbm") == {"ghb_beta": 0.9, "ghb_tau": None}


@pytest.mark.parametrize("name", ["fedavgm", "ghbm", "mofedsam", "fedspeed"])
def test_a_run_that_was_interrupted_continues_the_same(name: str, tmp_path: Path) -> None:
    tiny.job(algorithm=name, rounds=5, out=tmp_path / "whole")
    tiny.job(algorithm=name, rounds=3, out=tmp_path / "part")
    tiny.job(algorithm=name, rounds=5, resume=tmp_path / "part")
    assert tiny.same_run(tmp_path / "whole", tmp_path / "part")
