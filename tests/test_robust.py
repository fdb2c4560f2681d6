"""How updates are combined and whom the server leaves out: against plain NumPy, and against hostile clients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedagg
from fedagg.aggregate import RULES, Octaves, Robust, combiner, judge, octave, trusted
from fedagg.errors import SettingError

RNG = np.random.default_rng(0)


def combined(rule: str, rows: np.ndarray, weights: np.ndarray, trim: float = 0.2, chunks: int = 3) -> np.ndarray:
    """Given to the combiner in several chunks, as engines do."""
    made = combiner(rule, trim)
    for part in np.array_split(np.arange(len(rows)), chunks):
        if len(part):
            made.add(torch.tensor(rows[part]), torch.tensor(weights[:, part]), [1.0] * len(part))
    return made.total([True] * len(rows)).numpy()


@pytest.mark.parametrize("count", [1, 2, 5, 8, 20])
def test_rules_against_numpy(count: int) -> None:
    rows, weights = RNG.normal(size=(count, 7)), RNG.uniform(0.5, 3, size=(2, count))
    share = weights.sum(1, keepdims=True)
    np.testing.assert_allclose(combined("mean", rows, weights), weights @ rows)
    np.testing.assert_allclose(combined("median", rows, weights), share * np.median(rows, 0))
    cut = math.floor(0.3 * count)
    middle = np.sort(rows, 0)[cut : count - cut]
    np.testing.assert_allclose(combined("trimmed", rows, weights, 0.3), share * middle.mean(0))
    norms = np.linalg.norm(rows, axis=1)
    bound = np.sort(norms)[(count - 1) // 2]
    clipped = rows * np.minimum(1, bound / norms)[:, None]
    np.testing.assert_allclose(combined("clip", rows, weights), weights @ clipped)


@pytest.mark.parametrize("rule", RULES)
def test_if_all_agree_every_rule_gives_their_update(rule: str) -> None:
    """Whatever their sizes: a client's weight must not stretch its update."""
    rows, weights = np.tile(RNG.normal(size=(1, 5)), (9, 1)), np.array([[1, 1, 1, 1, 1, 2, 5, 50, 300.0]])
    np.testing.assert_allclose(combined(rule, rows, weights)[0] / weights.sum(), rows[0])


FLOATS = st.floats(-1e30, 1e30)


@given(honest=st.lists(FLOATS, min_size=3, max_size=30), lies=st.lists(FLOATS, max_size=9))
def test_fewer_than_a_quarter_who_lie_do_not_take_a_mean_out_of_the_range_of_the_others(
    honest: list[float], lies: list[float]
) -> None:
    lies = lies[: (len(honest) - 1) // 3]
    told = torch.tensor([*lies, *honest], dtype=torch.float64)
    for rule in RULES:
        found = trusted(told, rule)
        if rule == "mean":
            assert torch.equal(found, told)
        else:
            assert min(honest) <= float(found.min()) <= float(found.max()) <= max(honest)
    assert len(trusted(told[:0], "median")) == 0


class Alone:
    """One process of a team: notes what it would send to the others, or hears what all of them have sent together."""

    def __init__(self, heard: Sequence[torch.Tensor] = ()) -> None:
        self.heard, self.brought = list(heard), list[torch.Tensor]()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.brought.append(tensor)
        return self.heard.pop(0) if self.heard else tensor


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("first", [[], [3], [0, 2, 5], [0, 1, 2, 3, 4, 5]])
def test_processes_combine_the_updates_of_all(rule: str, first: list[int]) -> None:
    """As one process that has had all clients; one of them may have had none. The client at place 4 is left out."""
    rows, weights = torch.tensor(RNG.normal(size=(6, 5))), torch.tensor(RNG.uniform(0.5, 3, size=(2, 6)))
    valid, empty = [True, True, True, True, False, True], torch.zeros(2, 5, dtype=torch.float64)
    alone = combiner(rule, 0.3)
    alone.add(rows, weights, [1.0] * 4 + [100.0, 1.0])
    second = [at for at in range(6) if at not in first]
    brought: list[list[torch.Tensor]] = []
    for mine in (first, second):
        team, own = Alone(), combiner(rule, 0.3)
        if mine:
            own.add(rows[mine], weights[:, mine], [100.0 if at == 4 else 1.0 for at in mine])
        own.together(team, mine, valid, empty)
        brought.append(team.brought)
    both = Alone([a + b for a, b in zip(*brought, strict=True)])
    torch.testing.assert_close(combiner(rule, 0.3).together(both, [], valid, empty), alone.total(valid))


@pytest.mark.parametrize("rule", RULES)
def test_a_scale_is_not_a_weight(rule: str) -> None:
    rows, scale = RNG.normal(size=(6, 4)), RNG.uniform(1, 9, size=6)
    made, plain = combiner(rule, 0.2), combiner(rule, 0.2)
    one = torch.ones(1, 6, dtype=torch.float64)
    made.add(torch.tensor(rows), one, [1.0] * 6, scale=torch.tensor(scale))
    plain.add(torch.tensor(rows * scale[:, None]), one, [1.0] * 6)
    np.testing.assert_allclose(made.total([True] * 6), plain.total([True] * 6))


def test_hostile_votes_cannot_move_the_median_past_honest_ones() -> None:
    honest = RNG.normal(size=(11, 6))
    hostile = np.full((10, 6), 1e9)
    got = combined("median", np.concatenate([honest, hostile]), np.ones((1, 21)))[0] / 21
    assert (got <= honest.max(0) + 1e-9).all()
    trimmed = combined("trimmed", np.concatenate([honest, hostile[:5]]), np.ones((1, 16)), 0.4)[0] / 16
    assert (trimmed <= honest.max(0) + 1e-9).all()
    clipped = combined("clip", np.concatenate([honest, hostile]), np.ones((1, 21)))[0] / 21
    assert np.linalg.norm(clipped) <= np.linalg.norm(honest, axis=1).max()


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(SettingError, match="did you mean 'median'"):
        combiner("medain", 0.2)


# --- whom the server leaves out -------------------------------------------------------------------------------------


def test_judging() -> None:
    lengths = [1.0, 1.2, 0.9, 1e6, math.nan, math.inf, 0.0, 15.9, 16.1, 1.0]
    fits = [True] * 9 + [False]
    far, bad = "moved absurdly far", "not finite"
    # The median of the sound ones, 1.2 (of 0, 0.9, 1, 1.2, 15.9, 16.1, 1e6), is in the octave [1, 2); three more end
    # at 16.
    assert judge(lengths, fits) == [None, None, None, far, bad, bad, None, None, far, "wrong shape"]
    assert judge([], []) == []
    assert judge([math.nan], [True]) == [bad]
    # Of two, the shorter one is the yardstick: accepting the absurd one would cost the model.
    assert judge([1e6, 1.0], [True, True]) == [far, None]
    # Neither those of the wrong shape nor those that are not finite shift the yardstick.
    assert judge([1e9, 1e9, 1.0, 1.0], [False, False, True, True]) == ["wrong shape", "wrong shape", None, None]


@given(st.floats(1e-9, 1e300))
def test_an_octave_is_the_power_of_two_below(length: float) -> None:
    assert 2.0 ** octave(length) <= length < 2.0 ** (octave(length) + 1)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.5, 3.0, 40.0, 1e5, math.inf, math.nan]), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_sums_by_octave_are_the_sums_over_those_that_count(lengths: list[float], chunks: int) -> None:
    rows = np.random.default_rng(len(lengths)).normal(size=(len(lengths), 3))
    rows[[not math.isfinite(v) for v in lengths]] = math.nan
    weights = np.arange(1.0, 1 + len(lengths))[None]
    made = Octaves()
    for part in np.array_split(np.arange(len(lengths)), chunks):
        made.add(torch.tensor(rows[part]), torch.tensor(weights[:, part]), [lengths[i] for i in part])
    valid = [why is None for why in judge(lengths, [True] * len(lengths))]
    if any(valid):
        np.testing.assert_allclose(made.total(valid)[0], weights[0, valid] @ rows[valid], atol=1e-12)


def test_held_rows_are_copies() -> None:
    rows = torch.ones(3, 2)
    held = Robust("median")
    held.add(rows, torch.ones(1, 3), [1.0] * 3)
    rows.fill_(9.0)  # engines reuse their buffers
    assert held.total([True] * 3).tolist() == [[3.0, 3.0]]


# --- hostile clients ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "fedagg"])
def test_a_fifth_of_the_clients_hostile(algorithm: str) -> None:
    """They send their update reversed and five times over: the mean is reversed, and every robust rule holds."""

    def accuracy(robust: str) -> float:
        attack = {"flip_rate": 0.2, "flip_scale": 5.0, "robust": robust, "trim": 0.3}
        return fedagg.run(algorithm=algorithm, lr=0.1, rounds=12, **attack).accuracy

    assert accuracy("mean") < 0.5
    for rule in ("clip", "median", "trimmed"):
        assert accuracy(rule) > 0.75, rule
