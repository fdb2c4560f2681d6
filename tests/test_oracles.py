"""Heterogeneous quadratics f_k = a_k/2 (θ - b_k)²: where each method must end is known in closed form.

The minimiser of the average is Σ a_k b_k / Σ a_k. FedAvg's clients run towards their own b_k, so its limit is another
point; FedDyn and SCAFFOLD must reach the joint one. All of it passes through `fedagg.run`, in float32.

Near the optimum most clients stand still while one may still have a way to go: none of them may be taken for a broken one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedagg
from fedagg import seeding

Array = NDArray[np.float64]

N, D, SEED = 6, 1, 2
_rng = np.random.default_rng(7)
A, B = _rng.uniform(0.5, 2.0, size=(N, D)), _rng.normal(scale=2.0, size=(N, D))
OPTIMUM: Array = (A * B).sum(0) / A.sum(0)


class Quadratics(nn.Module):
    """A sample is (a_k, b_k), the output its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full((D,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, 0] / 2 * (self.theta - x[:, 1]) ** 2).sum(1, keepdim=True)


def run(algorithm: str, rounds: int, epochs: int, lr: float, participation: float = 1.0, **options: Any) -> Array:
    x, y = np.stack([A, B], 1).astype(np.float32), np.zeros(N, dtype=np.int64)
    result = fedagg.run(
        algorithm=algorithm,
        data=fedagg.Dataset(x, y, x, y, classes=1),
        model=Quadratics(),
        parts=[[k] for k in range(N)],
        loss=lambda output, target: output[:, 0],
        rounds=rounds,
        epochs=epochs,
        lr=lr,
        participation=participation,
        seed=SEED,
        eval_every=rounds,
        engine="sequential",
        device="cpu",
        **options,
    )
    assert all(row["left_out"] == 0 for row in result.history)
    theta: Array = result.model.state_dict()["theta"].double().numpy()
    assert result.loss == pytest.approx(float((A / 2 * (theta - B) ** 2).sum(1).mean()), rel=1e-5)
    return theta


def feddyn(rounds: int, count: int, alpha: float) -> Array:
    """FedDyn in float64 with exact local minimisation: θ_k = (a_k b_k + g_k + α θ) / (a_k + α)."""
    theta, g, h = np.full(D, 3.0), np.zeros((N, D)), np.zeros(D)
    for t in range(rounds):
        some = seeding.participants(SEED, t, N, count)
        ends = (A[some] * B[some] + g[some] + alpha * theta) / (A[some] + alpha)
        g[some] -= alpha * (ends - theta)
        h -= alpha / N * (ends - theta).sum(0)
        theta = ends.mean(0) - h / alpha
    return theta


def far(one: Array, other: Array) -> float:
    return float(np.abs(one - other).max())


def weighted(share: Array) -> Array:
    """The fixed point of averaging clients that each go the share of the way from θ to b_k."""
    return (share * B).sum(0) / share.sum(0)  # type: ignore[no-any-return]


ALPHA = 1.0
EXACT: dict[str, Any] = {
    "epochs": 16,
    "lr": 2 / (0.5 + 2.0 + 2 * ALPHA),
}  # the local error shrinks to 2e-8


@pytest.mark.slow
@pytest.mark.parametrize(("participation", "rounds"), [(1.0, 40), (0.5, 100)])
def test_feddyn_reaches_the_minimiser_of_the_average(participation: float, rounds: int) -> None:
    ours = run("feddyn", rounds, participation=participation, dyn_alpha=ALPHA, **EXACT)
    assert far(ours, OPTIMUM) < 1e-5


@pytest.mark.parametrize(("participation", "count"), [(1.0, N), (0.5, N // 2)])
@pytest.mark.parametrize("rounds", [1, 2, 6])
def test_feddyn_takes_the_exact_path(participation: float, count: int, rounds: int) -> None:
    """Not only the limit: the way there is that of the published iteration in closed form."""
    ours = run("feddyn", rounds, participation=participation, dyn_alpha=ALPHA, **EXACT)
    assert far(ours, feddyn(rounds, count, ALPHA)) < 1e-5


def test_fedavg_with_exact_minimisation_ends_elsewhere() -> None:
    ours = run("fedavg", 5, epochs=30, lr=2 / (0.5 + 2.0))
    assert far(ours, B.mean(0)) < 1e-4  # everybody reaches its own b_k
    assert far(ours, OPTIMUM) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("participation", "rounds"), [(1.0, 60), (0.5, 160)])
def test_scaffold_reaches_the_joint_optimum(participation: float, rounds: int) -> None:
    assert far(run("scaffold", rounds, epochs=5, lr=0.1, participation=participation), OPTIMUM) < 1e-5


@pytest.mark.slow
def test_fedavg_with_the_same_steps_does_not() -> None:
    ours = run("fedavg", 60, epochs=5, lr=0.1)
    assert far(ours, weighted(1 - (1 - 0.1 * A) ** 5)) < 1e-5
    assert far(ours, OPTIMUM) > 0.03


@pytest.mark.slow
def test_fedagg_reaches_it_if_clients_remember() -> None:
    """Its pull on the weights is what is left."""
    assert far(run("fedagg", 120, epochs=5, lr=0.1, memory="on"), OPTIMUM) < 0.015
    assert far(run("fedagg", 240, epochs=5, lr=0.1, memory="on"), OPTIMUM) < 0.006
    assert far(run("fedagg", 240, epochs=5, lr=0.1, memory="off"), OPTIMUM) > 0.02


@pytest.mark.slow
def test_fedprox_gets_closer_but_not_there() -> None:
    """An exact proximal step goes the share a/(a + μ) of the way."""
    ours = run("fedprox", 40, mu=ALPHA, **EXACT)
    assert far(ours, weighted(A / (A + ALPHA))) < 1e-5
    assert 0.05 < far(ours, OPTIMUM) < far(B.mean(0), OPTIMUM)
