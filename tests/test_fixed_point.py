"""Algorithm 1 on quadratic clients: it contracts as proved, not as printed, and its fixed point is η = 0."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedagg.errors import SettingError
from fedagg.meanfield import learning_rates
from fedagg.theory import fixed_point as fp
from fedagg.theory.bounds import Constants, mean_field_contraction


def federation(seed: int, clients: int = 5, dimension: int = 4, spread: float = 2.0) -> fp.QuadraticClients:
    return fp.QuadraticClients.random(clients, dimension, torch.Generator().manual_seed(seed), spread)


def start(dimension: int = 4) -> torch.Tensor:
    return torch.ones(dimension, dtype=torch.float64)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.floats(0.02, 0.98),
    st.sampled_from(["aggregated", "local"]),
    st.floats(0.01, 2),
)
def test_every_pass_contracts(seed: int, epochs: int, alpha: float, direction: fp.Direction, rate: float) -> None:
    clients = federation(seed)
    record = fp.algorithm_one(clients, start(), alpha, epochs, rate, passes=8, direction=direction)
    assert len(record) == 8
    for one in record:
        assert one.rate_factor <= one.limit * (1 + 1e-9)
        assert one.limit < 1.0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.floats(0.05, 0.95))
def test_the_limit_of_a_pass_is_below_the_bound_from_constants(seed: int, epochs: int, alpha: float) -> None:
    clients = federation(seed)
    path = fp.local_round(clients, start(), torch.full((5, epochs), 0.2, dtype=torch.float64))
    phi1, _ = fp.mean_field(path)
    top = float(path.gradients.norm(dim=-1).max())
    constants = Constants(L=epochs, N=5, delta_l=0.2, delta_h=0.2, P=top, alpha=alpha)
    bound = mean_field_contraction(constants).value
    assert bound is not None
    assert fp.pass_limit(phi1, alpha) <= bound * (1 + 1e-12)


def test_one_epoch_contracts_by_the_closed_form() -> None:
    # η ← c|g|²/(1 + c|g|²) η exactly, in every pass
    clients, alpha = federation(3), 0.1
    gradient = clients.gradients(start()).mean(0)
    gain = 9.0 * float(gradient @ gradient)
    for one in fp.algorithm_one(clients, start(), alpha, epochs=1, passes=5):
        assert one.rate_factor == pytest.approx(gain / (1.0 + gain))
        assert one.limit == pytest.approx(gain / (1.0 + gain))


@pytest.mark.parametrize("direction", ["aggregated", "local"])
def test_the_limit_is_zero(direction: fp.Direction) -> None:
    clients = federation(1, spread=0.5)
    record = fp.algorithm_one(clients, start(), 0.5, epochs=3, rate=0.3, passes=400, direction=direction)
    assert float(record[-1].rates.norm()) < 1e-6
    assert record[-1].rate_factor == pytest.approx(fp.asymptotic_factor(clients, start(), 0.5, 3), rel=1e-3)
    assert record[-1].step_factor == pytest.approx(record[-1].rate_factor, rel=1e-3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.floats(0.02, 0.98))
def test_the_exact_fixed_point(seed: int, epochs: int, alpha: float) -> None:
    clients, w = federation(seed), start()
    phi1, phi2 = fp.exact_fixed_point(clients, w, epochs)
    rates = learning_rates(phi1, phi2, w, alpha)
    assert rates.tolist() == [0.0] * epochs
    again1, again2 = fp.mean_field(fp.local_round(clients, w, rates.expand(5, -1)))
    assert torch.equal(again2, phi2)
    assert torch.allclose(again1, phi1, rtol=1e-14, atol=0)


def test_the_printed_constant_is_not_the_contraction() -> None:
    # The paper's factor says 0.37 a pass; a pass leaves 99 % of the rates
    clients = federation(0)
    record = fp.algorithm_one(clients, start(), 0.1, epochs=3, rate=0.3, passes=20)
    assert all(one.paper < 0.4 for one in record)
    assert all(one.rate_factor > 0.97 for one in record)
    assert all(one.step_factor > 0.9 for one in record[1:])


def test_more_clients_do_not_speed_it_up() -> None:
    # Copies of the same clients: nothing changes but N, by which the printed factor falls to a tenth
    few = federation(2)
    many = fp.QuadraticClients(*(x.repeat(100, *[1] * (x.dim() - 1)) for x in (few.hessians, few.centres, few.theta / 100)))
    first, second = (fp.algorithm_one(c, start(), 0.1, 3, passes=5)[-1] for c in (few, many))
    assert second.rate_factor == pytest.approx(first.rate_factor)
    assert second.paper == pytest.approx(first.paper / 10.0)


def test_smaller_rates_do_not_speed_it_up() -> None:
    clients = federation(2)
    bold, timid = (fp.algorithm_one(clients, start(), 0.1, 1, rate=rate, passes=3)[-1] for rate in (0.4, 0.004))
    assert timid.rate_factor == pytest.approx(bold.rate_factor)
    assert timid.paper == pytest.approx(bold.paper / 10.0)


def test_tolerance_stops_early() -> None:
    clients = federation(1, spread=0.5)
    stopped = fp.algorithm_one(clients, start(), 0.5, 2, passes=500, tolerance=1e-3)
    assert len(stopped) < 500
    assert stopped[-1].step < 1e-3 * math.sqrt(2)
    assert float(stopped[-1].rates.max()) > 0.0  # what makes Algorithm 1 useful: it stops before the limit


def test_quadratic_clients_know_their_constants() -> None:
    clients = federation(4)
    assert float(clients.gradient(clients.minimiser).norm()) == pytest.approx(0.0, abs=1e-12)
    assert 0.1 <= clients.psi <= clients.beta
    assert clients.imbalance == 0.0
    uneven = fp.QuadraticClients.random(3, 2, torch.Generator().manual_seed(0), equal_sizes=False)
    assert uneven.imbalance > 0.0
    assert float(uneven.theta.sum()) == pytest.approx(1.0)
    w = start().requires_grad_(True)
    loss = clients.theta @ clients.losses(w)
    (gradient,) = torch.autograd.grad(loss, w)
    assert torch.allclose(gradient, clients.gradient(w.detach()))
    assert clients.loss(start()) == pytest.approx(loss.item())


def test_unknown_direction() -> None:
    with pytest.raises(SettingError, match="aggregated"):
        fp.algorithm_one(federation(0), start(), 0.1, 2, direction="agregated")  # type: ignore[arg-type]
