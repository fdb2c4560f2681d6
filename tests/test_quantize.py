"""The field in a few bits: right on average, packed tightly, nothing lost for good."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedagg
from fedagg import quantize, wire
from fedagg.flat import Model
from fedagg.quantize import Downlink, Packed
from fedagg.work import Work


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(rows: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, d, generator=generator(seed)) * torch.logspace(-4, 0, d)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_rounds_to_the_two_nearest_levels_and_is_right_on_average(bits):
    """Within a block's reach a number comes out as one of its two neighbours, and the mean of many draws is it."""
    x = torch.linspace(-1, 1, 128)[None] * 0.9
    draws = torch.stack([quantize.quantize(x, bits, generator(k)).tensor() for k in range(400)])
    reach = float(draws.abs().max())
    step = 2 * reach / (2**bits - 1)
    inside = x.abs()[0] <= reach
    assert inside.sum() >= 64
    assert ((draws - x).abs()[:, 0, inside] <= step * 1.001).all()
    levels = (draws + reach) / step
    assert torch.allclose(levels, levels.round(), atol=2e-2 if bits > 8 else 1e-3)
    # The mean of 400 draws is within 5 standard errors; a draw's deviation is at most half a step.
    assert ((draws.mean(0) - x).abs()[0, inside] <= 5 * 0.5 * step / 20 + 1e-7).all()


@pytest.mark.parametrize(("rows", "d"), [(1, 1), (1, 127), (1, 128), (2, 129), (3, 1000)])
@pytest.mark.parametrize("bits", [2, 3, 4, 7])
def test_size_is_that_of_the_bytes(rows, d, bits):
    packed = quantize.quantize(vector(rows, d), bits, generator())
    assert len(packed.codes) + len(packed.scales) == quantize.size(rows, d, bits)
    assert packed.tensor().shape == (rows, d)
    assert len(packed.codes) == -(-rows * d * bits // 8)


def test_the_receiver_needs_nothing_but_the_bytes():
    sent = quantize.quantize(vector(2, 300), 3, generator())
    again = Packed((2, 300), 3, bytes(bytearray(sent.codes)), bytes(bytearray(sent.scales)))
    assert torch.equal(sent.tensor(), again.tensor())


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(1, 300), st.floats(1e-30, 1e30))
def test_keeps_zeros_and_survives_any_scale(bits, d, scale):
    x = vector(1, d, seed=d) * scale
    x[:, : d // 2] = 0.0
    out = quantize.quantize(x, bits, generator()).tensor()
    assert torch.isfinite(out).all()
    assert (out.abs() <= 1.01 * x.abs().max()).all()
    assert torch.equal(quantize.quantize(torch.zeros(1, d), bits, generator()).tensor(), torch.zeros(1, d))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_feedback_loses_nothing(bits):
    """What was sent plus what is kept back is what should have been sent; and what is kept back stays bounded."""
    downlink, wanted, sent = Downlink(bits, seed=1), torch.zeros(1, 500), torch.zeros(1, 500)
    for t in range(60):
        field = vector(1, 500, seed=t)
        work = downlink.send(Work(rate=torch.ones(1), field=field), t, 0)
        wanted += field
        sent += work.field
        assert torch.allclose(sent + downlink.error, wanted, atol=1e-4)
        assert downlink.error.norm() < 2.0 * field.norm()


def test_the_same_seed_sends_the_same_bits_and_another_does_not():
    def send(seed, t):
        return Downlink(2, seed).send(Work(rate=torch.ones(1), field=vector(1, 400)), t, 0).field

    assert torch.equal(send(1, 3), send(1, 3))
    assert not torch.equal(send(1, 3), send(2, 3))
    assert not torch.equal(send(1, 3), send(1, 4))


def test_thirty_two_bits_change_nothing():
    field = vector(1, 50)
    assert Downlink(32).send(Work(rate=torch.ones(1), field=field), 0, 0).field is field


@pytest.mark.parametrize(("bits", "most"), [(2, 1.035), (3, 1.05), (4, 1.066), (32, 1.501)])
def test_what_fedagg_sends_beside_the_weights(bits, most):
    """One field at b bits and an eighth of a bit for scales, beside 32 bits down and 32 up."""
    model, rate = Model(torch.zeros(100_000), torch.zeros(0)), torch.ones(3)
    plain = Work(rate=rate)
    fedagg_ = Work(rate=rate, slope=torch.ones(3, 1), mix=torch.ones(3, 1), field=torch.zeros(1, 100_000))
    fedavg = wire.down(plain, model, bits) + wire.up(plain, model, 3)
    ratio = (wire.down(fedagg_, model, bits) + wire.up(fedagg_, model, 3)) / fedavg
    exact = 1 + (bits + 0.125 * (bits < 32)) / 64
    assert ratio == pytest.approx(exact, abs=5e-4)
    assert ratio <= most


def test_the_simulator_trains_with_what_it_would_send():
    """Rounding changes the run, little; a repetition does not; and a resumed run keeps the rounding error."""
    options = {"dataset": "mnist-mini", "rounds": 4, "clients": 10, "lr": 0.05}
    exact, rounded = (fedagg.run(**options, downlink_bits=bits) for bits in (32, 2))
    assert exact.history[-1]["loss"] != rounded.history[-1]["loss"]
    assert rounded.accuracy == pytest.approx(exact.accuracy, abs=0.05)
    assert rounded.history[-1]["bytes_down"] < 0.6 * exact.history[-1]["bytes_down"]


def test_a_resumed_run_keeps_the_rounding_error(tmp_path):
    options = {"dataset": "mnist-mini", "clients": 10, "downlink_bits": 2}
    whole = fedagg.run(**options, rounds=4)
    fedagg.run(**options, rounds=2, out=tmp_path / "run")
    again = fedagg.run(**options, rounds=4, resume=tmp_path / "run")
    assert again.history[-1]["loss"] == whole.history[-1]["loss"]
