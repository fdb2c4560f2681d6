"""Theorem 1 against direct minimisation, the paper's own expressions, and the properties it must have."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from fedagg import meanfield
from fedagg.errors import SettingError
from fedagg.meanfield import (
    MeanField,
    affine_rates,
    agreement,
    best_power,
    bound_rates,
    gains,
    learning_rates,
    next_power,
    weight_ratio,
)

Array = NDArray[np.float64]
patient = settings(deadline=None)  # the first call of a torch kernel may take long


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, float]:
    """phi1 (L, d), phi2 (L+1, d), w (d,) and α: random, of all scales, sometimes with repeated or zero directions."""
    epochs, d = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    phi1 = rng.normal(size=(epochs, d)) * 10.0 ** draw(st.integers(-2, 0))
    if draw(st.booleans()):
        phi1[-1] = phi1[0] * draw(st.sampled_from([0.0, 1.0, -2.0]))
    phi2 = rng.normal(size=(epochs + 1, d))
    return torch.tensor(phi1), torch.tensor(phi2), torch.tensor(rng.normal(size=d)), draw(st.floats(0.05, 0.95))


def objective(rates: Array, phi1: Array, phi2: Array, w: Array, alpha: float) -> float:
    """Eqs. 13 and 14 word by word: walk the epochs, pay for the rate and for the deviation, and for where one ends."""
    total = 0.0
    for rate, direction, centre in zip(rates, phi1, phi2, strict=False):
        total += alpha * rate**2 + (1 - alpha) * float((w - centre) @ (w - centre))
        w = w - rate * direction
    return total + (1 - alpha) * float((w - phi2[-1]) @ (w - phi2[-1]))


@settings(patient, max_examples=60)
@given(problems())
def test_rates_minimise_the_objective(problem: tuple[Tensor, Tensor, Tensor, float]) -> None:
    phi1, phi2, w, alpha = problem
    args = (phi1.numpy(), phi2.numpy(), w.numpy(), alpha)
    found = minimize(objective, np.zeros(len(phi1)), args=args, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000}).x
    rates = learning_rates(phi1, phi2, w, alpha).numpy()
    np.testing.assert_allclose(rates, found, rtol=1e-4, atol=1e-5)
    assert objective(rates, *args) <= objective(found, *args) * (1 + 1e-12)


@patient
@given(problems())
def test_last_epoch_is_the_expression_of_appendix_a(problem: tuple[Tensor, Tensor, Tensor, float]) -> None:
    phi1, phi2, w, alpha = problem
    c, last = (1 - alpha) / alpha, phi1[-1]
    expected = c * (last @ (w - phi2[-1])) / (1 + c * (last @ last))
    [rate] = learning_rates(phi1, phi2, w, alpha, epoch=len(phi1) - 1)
    assert float(rate) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)


@patient
@given(problems())
def test_rates_satisfy_equation_15(problem: tuple[Tensor, Tensor, Tensor, float]) -> None:
    """The theorem as printed: each rate in terms of the later ones, 0 at epoch L."""
    phi1, phi2, w, alpha = problem
    epochs, here = len(phi1), w
    plan = learning_rates(phi1, phi2, w, alpha)
    for p in range(epochs):
        bracket = (epochs - p) * here
        for r in range(p, epochs):
            bracket = bracket - (epochs - r) * plan[r] * phi1[r]
        for k in range(p + 1, epochs + 1):
            bracket = bracket - phi2[k]
        expected = (1 - alpha) / alpha * (phi1[p] @ bracket)
        assert float(plan[p]) == pytest.approx(float(expected), rel=1e-7, abs=1e-9)
        here = here - plan[p] * phi1[p]


@patient
@given(problems())
def test_a_plan_made_again_on_the_way_is_the_rest_of_the_plan(problem: tuple[Tensor, Tensor, Tensor, float]) -> None:
    phi1, phi2, w, alpha = problem
    plan = learning_rates(phi1, phi2, w, alpha)
    for epoch in range(1, len(phi1)):
        w = w - plan[0] * phi1[epoch - 1]
        again = learning_rates(phi1, phi2, w, alpha, epoch)
        torch.testing.assert_close(again, plan[1:], rtol=1e-7, atol=1e-9)
        plan = again


@patient
@given(problems())
def test_only_distances_matter(problem: tuple[Tensor, Tensor, Tensor, float]) -> None:
    phi1, phi2, w, alpha = problem
    shift = 100.0 * torch.ones_like(w)
    moved = learning_rates(phi1, phi2 + shift, w + shift, alpha)
    torch.testing.assert_close(moved, learning_rates(phi1, phi2, w, alpha), rtol=1e-6, atol=1e-8)


def test_a_stack_of_clients_is_each_of_them() -> None:
    generator = torch.Generator().manual_seed(1)
    phi1, phi2 = torch.randn(4, 7, generator=generator), torch.randn(5, 7, generator=generator)
    w = torch.randn(3, 7, generator=generator)
    together = learning_rates(phi1, phi2, w, 0.3, epoch=1)
    assert together.shape == (3, 3)
    assert together.dtype == torch.float64
    for row, client in zip(together, w, strict=True):
        torch.testing.assert_close(row, learning_rates(phi1, phi2, client, 0.3, epoch=1))


@patient
@given(problems())
def test_alpha_towards_one_stops_and_towards_zero_fits(problem: tuple[Tensor, Tensor, Tensor, float]) -> None:
    phi1, phi2, w, _ = problem
    assert float(learning_rates(phi1, phi2, w, 1 - 1e-9).abs().max()) < 1e-5
    # With rates for nothing, only the deviation counts: ordinary least squares, one block of rows per k.
    epochs, d = phi1.shape
    design = np.zeros((epochs * d, epochs))
    target = np.zeros(epochs * d)
    for k in range(1, epochs + 1):
        rows = slice((k - 1) * d, k * d)
        design[rows, :k] = phi1[:k].numpy().T
        target[rows] = (w - phi2[k]).numpy()
    fit = np.linalg.lstsq(design, target, rcond=None)[0]
    best = float(np.sum((target - design @ fit) ** 2))
    misses = []
    for alpha in (1e-1, 1e-3, 1e-5, 1e-7):
        miss = float(np.sum((target - design @ learning_rates(phi1, phi2, w, alpha).numpy()) ** 2))
        # The plan is the best trade, so it misses by no more than the price of the perfect fit's rates.
        assert best - 1e-9 <= miss <= best + alpha / (1 - alpha) * float(fit @ fit) + 1e-9
        misses.append(miss)
    assert all(bolder <= tamer + 1e-9 for tamer, bolder in pairwise(misses))


@patient
@given(problems(), st.integers(0, 2**32 - 1))
def test_affine_form_agrees_for_displaced_clients(problem: tuple[Tensor, Tensor, Tensor, float], seed: int) -> None:
    """What the server solves once is what every client would solve for itself, wherever it went, at every epoch."""
    phi1, phi2, start, alpha = problem
    rate, slope = MeanField(phi1, phi2 - start).rates(alpha)
    assert torch.equal(slope, slope.triu())
    moved = torch.tensor(np.random.default_rng(seed).normal(size=start.shape))
    for epoch in range(len(phi1)):
        expected = learning_rates(phi1, phi2, start + moved, alpha, epoch)[0]
        ours = rate[epoch] + slope[epoch] @ (phi1 @ moved)
        assert float(ours) == pytest.approx(float(expected), rel=1e-7, abs=1e-9)


def test_affine_rates_of_one_epoch_by_hand() -> None:
    # φ1·φ1 = 4, φ1·(φ2[1] - w̄) = -2, α = 0.2 so c = 4: rate = 4·2/(1+16), slope = 4/(1+16).
    rate, slope = affine_rates(torch.tensor([[4.0]]), torch.tensor([-2.0]), 0.2)
    assert float(rate) == pytest.approx(8 / 17)
    assert float(slope) == pytest.approx(4 / 17)


def test_gap_is_a_norm() -> None:
    one = MeanField(torch.zeros(2, 2), torch.zeros(3, 2))
    other = MeanField(torch.tensor([[3.0, 0.0], [0.0, -4.0]]), torch.tensor([[1.0, -1.0], [1.0, -1.0], [0.0, 0.0]]))
    assert one.gap(other) == (5.0, 2.0)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5, 2.0, math.nan])
def test_alpha_outside_its_range_is_refused(alpha: float) -> None:
    with pytest.raises(SettingError, match="alpha"):
        weight_ratio(alpha)


def test_shapes_and_epochs_that_cannot_be_are_refused() -> None:
    with pytest.raises(SettingError, match="phi2"):
        learning_rates(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3), 0.1)
    with pytest.raises(SettingError, match="epoch"):
        learning_rates(torch.ones(2, 3), torch.ones(3, 3), torch.ones(3), 0.1, epoch=2)


def test_bounds_hold_for_every_client() -> None:
    rates = torch.tensor([-1.0, 0.05, 0.3, 7.0])
    assert bound_rates(rates, 0.1, 0.5).tolist() == pytest.approx([0.1, 0.1, 0.3, 0.5])
    assert bound_rates(rates, 0.0, math.inf).tolist() == pytest.approx([0.0, 0.05, 0.3, 7.0])
    own = torch.tensor([0.2, 0.01, 0.2, 0.4])  # a bound per client wins over the lower bound
    assert bound_rates(rates, 0.1, own).tolist() == pytest.approx([0.1, 0.01, 0.2, 0.4])


@pytest.mark.parametrize("count", [2, 5, 20])
@pytest.mark.parametrize("common", [0.0, 0.5, 2.0])
def test_agreement_is_unbiased(count: int, common: float) -> None:
    """g_i = m + noise of unit variance: the share of the common part is |m|²/(|m|² + 1), however few clients there are.

    With 20 000 coordinates the ratio of one draw is within a few per cent of that of the expectations.
    """
    gradients = np.random.default_rng(3).normal(size=(count, 20_000)) + common
    mean2 = float((gradients.mean(0) ** 2).sum())
    expected = common**2 / (common**2 + 1)
    assert agreement(mean2, float((gradients**2).sum(1).mean()), count) == pytest.approx(expected, abs=0.03)


def test_agreement_at_its_ends() -> None:
    assert agreement(4.0, 4.0, 10) == 1.0  # all alike
    assert agreement(0.0, 4.0, 10) == 0.0  # they cancel: never negative
    assert agreement(9.0, 4.0, 10) == 1.0  # rounding: never over one
    assert agreement(1.0, 2.0, 1) == 1.0  # a single client agrees with itself
    assert agreement(0.0, 0.0, 5) == 1.0  # nobody moves
    assert agreement(3.0, 4.0, 3) == pytest.approx((3 * 0.75 - 1) / 2)


def test_departure_is_the_distance_from_the_models_end() -> None:
    phi1 = rand(3, 7, seed=1)
    model, ends = rand(4, 3, seed=2), rand(4, 7, seed=3)
    expected = ((ends + model @ phi1).norm(dim=1) / ends.norm(dim=1)).mean()
    ours = meanfield.departure(ends.square().sum(1), ends @ phi1.T, phi1 @ phi1.T, model)
    assert ours == pytest.approx(float(expected))
    assert meanfield.departure((model @ phi1).square().sum(1), -model @ phi1 @ phi1.T, phi1 @ phi1.T, model) == pytest.approx(
        0, abs=1e-6
    )


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def log_losses(at: float, powers: list[int]) -> dict[int, float]:
    """Losses that are a parabola of the power of two, lowest at `at`."""
    return {k: 1.0 + 0.1 * (k - at) ** 2 for k in powers}


@given(at=st.floats(-9, 9))
def test_the_search_finds_the_lowest_point_of_a_parabola(at: float) -> None:
    losses, tried = dict[int, float](), 0
    power: int | None = 0
    while power is not None:
        assert power not in losses
        losses |= log_losses(at, [power])
        power, tried = next_power(losses, 20.0), tried + 1
    assert best_power(losses, 20.0) == pytest.approx(at, abs=1e-6)
    assert tried <= 6 + abs(at) / 2


def test_the_best_rate_is_looked_for_beyond_the_end_that_is_best() -> None:
    low, high = log_losses(-9, [0, 2, 4]), log_losses(9, [0, 2, 4])
    assert (best_power(low, 9.0), next_power(low, 9.0)) == (0, -2)
    assert (best_power(high, 9.0), next_power(high, 9.0)) == (4, 6)
    between = log_losses(2, [0, 2, 4])
    assert next_power(between, 9.0) == 1
    assert next_power(between | log_losses(2, [1]), 9.0) == 3
    assert next_power(between | log_losses(2, [1, 3]), 9.0) is None


def test_on_a_plateau_higher_rates_are_tried_until_one_does_harm() -> None:
    """A hundredth of the first loss, 2, is what counts: 0.02."""
    for gain, clear in ((0.019, False), (0.021, True)):
        losses = {0: 2.0, 1: 2.0, 2: 2.0 - gain, 3: 2.0, 4: 2.0}
        assert gains(losses, 2.0) == clear
        assert next_power(losses, 2.0) == (None if clear else 6)
        assert next_power(losses | {6: 2.019}, 2.0) == (None if clear else 8)
        assert next_power(losses | {6: 2.021}, 2.0) is None
    # All harm: down it goes. Losses may be negative.
    assert next_power({0: 3.0, 2: 4.0}, 2.0) == -2
    assert next_power({0: 2.01}, 2.0) == 2  # a hundredth may be chance
    assert next_power({0: 2.01, 2: 2.03}, 2.0) == -2
    assert next_power({0: -1.0, 2: 0.0}, -2.0) == -2


def test_a_rate_above_one_that_does_harm_is_right_by_chance_alone() -> None:
    """Losses of a regression whose clients have from 20 to 313 samples: at 3 training is unstable, at 4 it happened to be lucky."""
    seen = {0: 103.0, 2: 95.0, 3: 277.0, 4: 84.0, 5: 401.0, 6: 436.0}
    assert next_power(seen, 218.0) == 1
    assert next_power(seen | {1: 79.0}, 218.0) is None
    assert best_power({0: 103.0, 1: 79.0, **seen}, 218.0) == pytest.approx(1 + 0.5 * (24 - 16) / (24 + 16))
    # A low rate that does harm, with no gain below it, says nothing of higher ones.
    assert next_power({-2: 230.0, 0: 200.0, 2: 190.0}, 218.0) == 4


def test_a_rate_far_above_one_that_gains_nearly_as_much_is_out_of_reach() -> None:
    """By hand: the best gain is 1, at 0, so a rate that gains 0.93 gains nearly as much. Between 0.8 at -3 and 0.95 at -2 that is
    at -3 + 13/15."""
    flat = {1: 1.02, 0: 1.0, -1: 1.02}
    assert next_power(flat, 2.0) is None
    assert next_power(flat, 2.0, reach=1.0) == -2
    flat |= {-2: 1.05, -3: 1.2}
    assert next_power(flat, 2.0, reach=1.0) is None
    assert best_power(flat, 2.0, reach=1.0) == pytest.approx(-3 + 13 / 15 + 1)
    assert best_power(flat, 2.0, reach=0.0) == pytest.approx(-3 + 13 / 15)
    assert best_power(flat, 2.0, reach=3.0) == best_power(flat, 2.0) == 0
    # What lies between is only tried if it matters.
    wide = {1: 1.02, 0: 1.0, -1: 1.02, -3: 1.2}
    assert next_power(wide, 2.0, reach=1.0) == -2
    assert next_power(wide, 2.0, reach=3.0) is None
    # On a plateau there is no gain to be had nearly as well.
    assert next_power({0: 2.0, 1: 2.0, 2: 1.99, 3: 2.0, 4: 2.1}, 2.0, reach=0.0) is None
    assert best_power({0: 2.0, 1: 2.0, 2: 1.99, 3: 2.0, 4: 2.1}, 2.0, reach=0.0) == 3


@given(at=st.floats(-9, 9), bend=st.floats(0.02, 0.4), reach=st.floats(0.0, 4.0))
def test_the_search_ends_within_reach_of_the_lowest_rate_that_gains_nearly_as_much(at: float, bend: float, reach: float) -> None:
    """The gain is 2 less a parabola; 93 % of it are left at √(0.14/bend) below its highest point."""
    losses, power = dict[int, float](), 0
    while power is not None:
        assert power not in losses
        losses[power] = 1.0 + bend * (power - at) ** 2
        power = next_power(losses, 3.0, reach=reach)
    found, lowest = best_power(losses, 3.0, reach), min(at, at - math.sqrt(0.14 / bend) + reach)
    assert lowest - 0.2 <= found <= at + 1e-6  # on a line between two rates, and not on the parabola
    assert found == pytest.approx(lowest, abs=0.2 + 2 * bend)


def test_harm_at_the_lowest_rate_may_be_chance() -> None:
    assert next_power({0: 2.3}, 2.0) == -2
    assert next_power({0: 2.3}, 2.0, doubt=0.31) == 2
    assert next_power({0: 2.3}, 2.0, doubt=0.29) == -2
    assert next_power({0: 2.3}, 2.0, doubt=math.inf) == 2  # a single client
    assert next_power({0: 4.0, 2: 4.0}, 2.0, doubt=math.inf) == -2  # but where the higher rate is no better, down it goes


def test_on_a_plateau_the_highest_rate_that_does_no_harm_is_taken() -> None:
    """By hand: the loss is 2 again a quarter of the way from 1.99 at 2 to 2.03 at 4. With a clear gain it is the parabola's lowest
    point instead, and where all do harm the least one."""
    assert best_power({0: 1.985, 1: 1.99, 2: 1.99, 4: 2.03}, 2.0) == pytest.approx(2.5)
    assert best_power({0: 1.9, 1: 1.8, 2: 1.9, 4: 2.03}, 2.0) == 1
    assert best_power({-2: 2.1, 0: 2.2, 2: 2.3}, 2.0) == -2
    assert best_power({-2: 2.005, 0: 2.005, 2: 2.03}, 2.0) == -2
    assert best_power(dict.fromkeys(range(0, 28, 2), 2.0), 2.0) == 0  # losses that tell nothing
