"""Estimates of β, μ, ψ against exact values, and the softmax solve against its own certificate."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedagg.errors import DataError, SettingError
from fedagg.theory import constants as tc
from fedagg.theory.fixed_point import QuadraticClients


def quadratic(seed: int, dimension: int = 6) -> Tensor:
    noise = torch.randn(dimension, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise + noise.T


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30))
def test_smoothness_rises_to_the_largest_eigenvalue_and_never_passes_it(seed: int, iterations: int) -> None:
    hessian = quadratic(seed)
    exact = float(torch.linalg.eigvalsh(hessian).abs().max())
    w = torch.zeros(6, dtype=torch.float64)
    first, more = (
        tc.smoothness(lambda v: 0.5 * v @ hessian @ v, w, n, torch.Generator().manual_seed(1)) for n in (iterations, iterations + 5)
    )
    assert first <= more * (1 + 1e-9)
    assert more <= exact * (1 + 1e-9)


def test_smoothness_converges() -> None:
    hessian = torch.diag(torch.tensor([1.0, -5.0, 2.0], dtype=torch.float64))
    found = tc.smoothness(lambda v: 0.5 * v @ hessian @ v, torch.ones(3, dtype=torch.float64), 60)
    assert found == pytest.approx(5.0)
    assert tc.smoothness(lambda v: v.sum(), torch.ones(3)) == 0.0
    assert tc.smoothness(lambda v: v.pow(4).sum(), torch.zeros(3)) == 0.0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_secants_stay_below_the_largest_eigenvalue(seed: int) -> None:
    hessian = quadratic(seed)
    ws = torch.randn(9, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = tc.secant_smoothness(ws, ws @ hessian)
    assert 0.0 < found <= float(torch.linalg.eigvalsh(hessian).abs().max()) * (1 + 1e-9)


def test_secants_by_hand() -> None:
    ws = torch.tensor([[0.0], [1.0], [1.0], [3.0]])
    assert tc.secant_smoothness(ws, torch.tensor([[0.0], [2.0], [7.0], [8.0]])) == pytest.approx(2.0)
    with pytest.raises(DataError):
        tc.secant_smoothness(torch.zeros(3, 2), torch.zeros(3, 2))
    with pytest.raises(SettingError, match="gs"):
        tc.secant_smoothness(torch.zeros(3, 2), torch.zeros(2, 2))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_domination_and_growth_of_a_quadratic(seed: int) -> None:
    # Both are the smallest eigenvalue, seen exactly along its eigenvector and from above elsewhere
    generator = torch.Generator().manual_seed(seed)
    clients = QuadraticClients.random(3, 4, generator)
    best = clients.loss(clients.minimiser)
    away = torch.cat([torch.randn(5, 4, generator=generator, dtype=torch.float64), torch.linalg.eigh(clients.hessian)[1].T])
    points = [clients.minimiser + move for move in away]
    losses = [clients.loss(w) for w in points]
    mu = tc.gradient_domination([float(clients.gradient(w).norm()) for w in points], losses, best)
    psi = tc.quadratic_growth(losses, best, [float(move @ move) for move in away])
    assert mu.value == pytest.approx(clients.psi)
    assert psi.value == pytest.approx(clients.psi)


def test_nothing_to_divide_by() -> None:
    assert not tc.gradient_domination([1.0], [2.0], 2.0).applies
    assert not tc.quadratic_growth([2.0], 2.0, [0.0]).applies
    assert not tc.quadratic_growth([1.0], 2.0, [1.0]).applies
    assert tc.gradient_domination([1.0, 2.0], [2.0, 3.0], 2.0).value == pytest.approx(2.0)


# --- Softmax regression ---


def data(seed: int = 0, samples: int = 200, features: int = 3, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (samples,), generator=generator)


def objective(w: Tensor, x: Tensor, y: Tensor, l2: float) -> Tensor:
    one = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    return torch.nn.functional.cross_entropy(one @ w.T, y) + 0.5 * l2 * w.square().sum()


@pytest.mark.parametrize("l2", [0.0, 0.01])
def test_the_solution_is_certified_and_stationary(l2: float) -> None:
    x, y = data()
    found = tc.solve_softmax(x, y, 3, l2=l2)
    w = found.weights.clone().requires_grad_(True)
    loss = objective(w, x, y, l2)
    (gradient,) = torch.autograd.grad(loss, w)
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
    assert float(gradient.norm()) < 1e-12
    assert found.reason == ""
    assert found.radius is not None
    assert found.radius < 1e-12


def test_the_minimiser_is_a_minimum() -> None:
    x, y = data(1)
    found = tc.solve_softmax(x, y, 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        move = 0.1 * torch.randn(found.weights.shape, generator=generator, dtype=torch.float64)
        assert float(objective(found.weights + move, x, y, 0.0)) >= found.loss


def test_curvature_is_that_of_the_identifiable_subspace() -> None:
    x, y = data(2)
    x = torch.cat([x, x[:, :1]], dim=1)  # a feature twice: 3 shifts (4 with it) and 1 × 2 contrasts are not identifiable
    found = tc.solve_softmax(x, y, 3)
    hessian = torch.autograd.functional.hessian(lambda v: objective(v.reshape(3, 5), x, y, 0.0), found.weights.flatten())
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert int((eigenvalues > 1e-10).sum()) == 2 * 4
    assert found.curvature == pytest.approx(float(eigenvalues[-8]))


def test_nearest_keeps_what_the_loss_does_not_see() -> None:
    x, y = data(3)
    found = tc.solve_softmax(x, y, 3)
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nearest = found.nearest(start)
    assert float(objective(nearest, x, y, 0.0)) == pytest.approx(found.loss, rel=1e-12)
    w = start.clone()
    for _ in range(4000):
        at = w.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(objective(at, x, y, 0.0), at)
        w = w - 1.0 * gradient
    assert float((w - nearest).norm()) < 1e-9
    assert torch.equal(tc.solve_softmax(x, y, 3, l2=0.1).nearest(start), tc.solve_softmax(x, y, 3, l2=0.1).weights)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.01, 3.0), st.sampled_from([0.0, 0.05]))
def test_growth_and_convexity_hold_around_the_minimum(seed: int, distance: float, l2: float) -> None:
    x, y = data(4, samples=60)
    found = tc.solve_softmax(x, y, 3, l2=l2)
    move = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    move = move - move.mean(0)
    move = distance * move / move.norm()
    growth, convexity = found.quadratic_growth(distance).value, found.strong_convexity(distance).value
    assert growth is not None
    assert convexity is not None
    assert convexity <= growth * (1 + 1e-9)
    value = float(objective(found.weights + move, x, y, l2))
    assert value - found.loss >= 0.5 * growth * distance**2 * (1 - 1e-9) - 1e-13
    hessian = torch.autograd.functional.hessian(lambda v: objective(v.reshape(3, 4), x, y, l2), (found.weights + move).flatten())
    assert float(torch.linalg.eigvalsh(hessian)[4]) >= convexity * (1 - 1e-9)  # past the four shifts


def test_separable_classes_have_no_minimiser() -> None:
    x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
    y = torch.tensor([0, 0, 1, 1])
    found = tc.solve_softmax(x, y, 2)
    assert found.radius is None
    assert "separated" in found.reason
    assert not found.quadratic_growth(1.0).applies
    assert "separated" in found.strong_convexity(1.0).reason
    mended = tc.solve_softmax(x, y, 2, l2=0.1)
    assert mended.radius is not None
    assert mended.strong_convexity(100.0).value == pytest.approx(0.1)


def test_a_feature_of_one_sample_has_no_best_weight() -> None:
    # The classes overlap, but the weight of a feature that one sample alone has can grow for ever
    x, y = data(5, samples=80, features=2, classes=2)
    x = torch.cat([x, torch.eye(80, 1, dtype=torch.float64)], dim=1)
    found = tc.solve_softmax(x, y, 2)
    assert found.radius is None
    assert "not certified" in found.reason


def test_a_hessian_too_large_is_said() -> None:
    x, y = data(6)
    found = tc.solve_softmax(x, y, 3, dense_limit=1)
    assert found.curvature is None
    assert "dense_limit" in found.reason
    bounded = tc.solve_softmax(x, y, 3, l2=0.1, dense_limit=1)
    assert bounded.radius is not None
    assert bounded.quadratic_growth(1.0).value == pytest.approx(0.1)


def test_no_bias() -> None:
    x, y = data(7)
    found = tc.solve_softmax(x, y, 3, bias=False)
    assert found.weights.shape == (3, 3)
    assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(x @ found.weights.T, y)))
    assert found.self_concordance == pytest.approx(math.sqrt(2.0) * float(x.norm(dim=1).max()))


@pytest.mark.parametrize(
    ("x", "y", "classes", "l2", "error"),
    [
        (torch.ones(3, 2), torch.tensor([0, 1]), 2, 0.0, DataError),
        (torch.ones(2, 2), torch.tensor([0, 2]), 2, 0.0, DataError),
        (torch.ones(0, 2), torch.tensor([], dtype=torch.long), 2, 0.0, DataError),
        (torch.ones(2, 2), torch.tensor([0, 0]), 1, 0.0, SettingError),
        (torch.ones(2, 2), torch.tensor([0, 1]), 2, -1.0, SettingError),
    ],
)
def test_bad_data_is_refused(x: Tensor, y: Tensor, classes: int, l2: float, error: type[Exception]) -> None:
    with pytest.raises(error):
        tc.solve_softmax(x, y, classes, l2)


def test_zero_features_are_refused() -> None:
    with pytest.raises(DataError, match="zero"):
        tc.solve_softmax(torch.zeros(2, 2), torch.tensor([0, 1]), 2, bias=False)
