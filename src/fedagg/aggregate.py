"""How the server combines the clients' updates, and which clients it leaves out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedagg.errors import unknown
from fedagg.work import Team

OUTLIER_OCTAVES = 3  # a client is left out if it moved more than 8 to 16 times the median per step
FAR = "moved absurdly far"
STILL = 1e-9  # a step this short counts as none: the client did not move


def judge(lengths: Sequence[float], fits: Sequence[bool], yardstick: float = 0.0, drop: bool = True) -> list[str | None]:
    """Why each client is left out; None for those that count. Judged by the distance moved per step and by the reply's size.

    A reply of the wrong size or a length that is not finite is always left out. If outliers are to be dropped, the yardstick is
    the median of the clients that moved at all (the lower of two middle values, because outliers are long). It is measured in
    whole octaves, so that sums kept by octave (`Octaves`) can be judged afterwards. Near convergence this median goes to zero
    while an honest client may still have far to go, so lengths that were usual before, `yardstick`, are never outliers."""
    sound = sorted(octave(v) for v, fit in zip(lengths, fits, strict=True) if fit and STILL < v < math.inf)
    middle = max(sound[(len(sound) - 1) // 2] if sound else 0, octave(yardstick))
    causes: list[str | None] = []
    for length, fit in zip(lengths, fits, strict=True):
        if not fit:
            causes.append("wrong shape")
        elif not math.isfinite(length):
            causes.append("not finite")
        else:
            far = drop and octave(length) > middle + OUTLIER_OCTAVES
            causes.append(FAR if far else None)
    return causes


def usual_length(lengths: Sequence[float], valid: Sequence[bool]) -> float:
    """The median length of the valid clients."""
    sound = sorted(length for length, ok in zip(lengths, valid, strict=True) if ok)
    return sound[(len(sound) - 1) // 2] if sound else 0.0


def octave(length: float) -> int:
    """floor(log2(length)); clients that did not move share the lowest one."""
    return math.frexp(max(length, STILL))[1] - 1


class Combiner(Protocol):
    """Takes rows (n, d) as they come; afterwards gives the weighted sum for each set of weights.

    `weights` (k, n) say how much a row counts, `scale` (n,) what it is multiplied by: for a mean this is the same, for a median
    it is not. A row whose length is not finite is ignored. `together` gives the sum over the clients of all processes, of which
    this one has had those at the places `mine`; `empty` is the sum over no client."""

    def add(self, rows: Tensor, weights: Tensor, lengths: Sequence[float], scale: Tensor | None = None) -> None: ...

    def total(self, valid: Sequence[bool]) -> Tensor: ...

    def together(self, team: Team, mine: Sequence[int], valid: Sequence[bool], empty: Tensor) -> Tensor: ...


@dataclass
class Octaves:
    """Weighted sums (k, d), kept apart by octave of the client's length.

    Outliers are known only when all clients have answered. Keeping every update until then would cost one model per client. This
    costs one model per octave, and honest clients share two or three octaves."""

    sums: dict[int, Tensor] = field(default_factory=dict)
    octaves: list[int | None] = field(default_factory=list)

    def add(self, rows: Tensor, weights: Tensor, lengths: Sequence[float], scale: Tensor | None = None) -> None:
        weights = weights if scale is None else weights * scale
        here = [octave(v) if math.isfinite(v) else None for v in lengths]
        self.octaves += here
        for o in sorted({o for o in here if o is not None}):
            pick = [i for i, other in enumerate(here) if other == o]
            some = rows if len(pick) == len(here) else rows[pick]
            votes = weights[:, pick].to(some)
            if o in self.sums:
                self.sums[o].addmm_(votes, some)
            else:
                self.sums[o] = votes @ some

    def total(self, valid: Sequence[bool]) -> Tensor:
        kept = sorted({o for o, ok in zip(self.octaves, valid, strict=True) if ok and o is not None})
        return torch.stack([self.sums[o] for o in kept]).sum(0)

    def together(self, team: Team, mine: Sequence[int], valid: Sequence[bool], empty: Tensor) -> Tensor:
        own = [valid[at] for at in mine]
        return team.sum(self.total(own) if any(own) else empty)


@dataclass
class Robust:
    """Robust rules look at all clients together, so every update of the round is held in memory, by every process of the run.

    Where all clients agree, every rule returns their common update. The median and the trimmed mean give each client one vote;
    clipping keeps the weights."""

    rule: str
    trim: float = 0.2
    rows: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def add(self, rows: Tensor, weights: Tensor, lengths: Sequence[float], scale: Tensor | None = None) -> None:
        self.rows.append(rows.clone() if scale is None else rows * scale.to(rows)[:, None])
        self.weights.append(weights)

    def total(self, valid: Sequence[bool]) -> Tensor:
        keep = torch.tensor(valid)
        rows = torch.cat(self.rows)[keep.to(self.rows[0].device)]
        weights = torch.cat(self.weights, 1)[:, keep].to(rows)  # (k, n)
        return torch.stack([self.combine(rows, row) for row in weights])

    def together(self, team: Team, mine: Sequence[int], valid: Sequence[bool], empty: Tensor) -> Tensor:
        rows = empty.new_zeros(len(valid), empty.shape[1])
        weights = torch.zeros(len(empty), len(valid), dtype=torch.float64)
        if mine:
            rows[list(mine)] = torch.cat(self.rows).to(rows)
            weights[:, list(mine)] = torch.cat(self.weights, 1).to(weights)
        return Robust(self.rule, self.trim, [team.sum(rows)], [team.sum(weights)]).total(valid)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        if self.rule == "clip":
            norms = rows.norm(dim=1)
            short: Tensor = (norms.median() / norms.clamp_min(1e-12)).clamp(max=1.0)
            return (weights * short) @ rows
        most = (len(rows) - 1) // 2  # the median is the mean trimmed to its one or two middle values
        cut = most if self.rule == "median" else min(int(self.trim * len(rows)), most)
        return weights.sum() * rows.sort(0).values[cut : len(rows) - cut].mean(0)


RULES = ("mean", "clip", "median", "trimmed")


def trusted(values: Tensor, rule: str) -> Tensor:
    """Numbers that clients report of themselves, (n,), to be averaged. If a robust rule combines updates, some clients may lie in
    numbers too: those beyond the quartiles count as the nearer quartile."""
    if rule == "mean" or not len(values):
        return values
    low, high = values.quantile(torch.tensor([0.25, 0.75], dtype=values.dtype), interpolation="nearest")
    return values.clamp(low, high)


def combiner(rule: str, trim: float) -> Combiner:
    if rule not in RULES:
        raise unknown("robust", rule, RULES)
    return Octaves() if rule == "mean" else Robust(rule, trim)
