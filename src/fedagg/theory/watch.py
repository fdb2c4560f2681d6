"""Watches a run between the algorithm and its clients: how far the clients move, in which direction, and at which rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedagg.config import Config
from fedagg.flat import Model
from fedagg.result import Result
from fedagg.work import Chunk, Engine, Job, Memory, Work


@dataclass
class Pass:
    """One piece of work that all participants do from the same model, reduced to the numbers that the analysis needs.

    Attributes:
        start: w̄, (d,), float64 on the CPU like all tensors here.
        rates: η_{i,l}, (n, L).
        steps: the largest number of steps of a client.
        gradient: the largest |ḡ_{i,l} + λ w_{i,l}|, with ḡ the mean gradient of epoch l and λ the weight decay.
        direction: the same for the direction of the clients' steps, which differs where a method mixes something in.
        drift: the largest |w_{i,l} - w̄|.
        size: the largest |w_{i,l}|.
        deviation: U, the largest |w_{i,l} - φ2_k|, k > l, with φ2 from the previous pass; None if there was none.
        secant: the largest change of a client's gradient from one epoch to the next, divided by the distance it moved.
        sharpest: the client with the largest secant.
        moved: Σ θ_i Δ_i.
    """

    work: Work
    start: Tensor
    weight_decay: float
    before: Tensor | None = None
    clients: list[int] = field(default_factory=list)
    rates: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    steps: int = 0
    gradient: float = 0.0
    direction: float = 0.0
    drift: float = 0.0
    size: float = 0.0
    deviation: float | None = None
    secant: float = 0.0
    sharpest: int = -1

    def __post_init__(self) -> None:
        self.samples = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, chunk: Chunk) -> None:
        assert chunk.gradients is not None
        assert chunk.path is not None
        gradients, path = chunk.gradients.double().cpu(), chunk.path.double().cpu()
        places = self.start + path
        felt = gradients + self.weight_decay * places[:, :-1]
        self.gradient = max(self.gradient, float(felt.norm(dim=-1).max()))
        shifts = [self.work.shift(epoch) for epoch in range(gradients.shape[1])]
        extra = torch.stack([torch.zeros_like(self.start) if s is None else s.double().cpu() for s in shifts])
        self.direction = max(self.direction, float((self.work.own * felt + extra).norm(dim=-1).max()))
        self.drift = max(self.drift, float(path.norm(dim=-1).max()))
        self.size = max(self.size, float(places.norm(dim=-1).max()))
        self.sharpen(chunk.jobs, felt, path)
        if self.before is not None:
            ahead = [(path[:, epoch, None] - self.before[None, epoch + 1 :]).norm(dim=-1) for epoch in range(len(shifts))]
            self.deviation = max(self.deviation or 0.0, *(float(each.max()) for each in ahead))
        self.steps = max(self.steps, int(chunk.steps.max()))
        rates = chunk.rates.double().cpu()
        self.rates = torch.cat([self.rates, rates]) if len(self.rates) else rates
        self.clients += [job.client for job in chunk.jobs]
        sizes = torch.tensor([float(len(job.samples)) for job in chunk.jobs], dtype=torch.float64)
        self.samples += int(sizes.sum())
        for name, part in (
            ("moved", sizes @ chunk.delta.double().cpu()),
            ("flow", sizes @ (chunk.delta.double() / chunk.travel.double()[:, None]).cpu()),
            ("phi1", gradients.sum(0)),
            ("phi2", path.sum(0)),
        ):
            self.sums[name] = self.sums[name] + part if name in self.sums else part

    def sharpen(self, jobs: Sequence[Job], felt: Tensor, path: Tensor) -> None:
        if felt.shape[1] < 2:
            return
        length = path[:, :-1].diff(dim=1).norm(dim=-1)
        ratio = (felt.diff(dim=1).norm(dim=-1) / length).nan_to_num(0.0, 0.0, 0.0).amax(1)
        best = int(ratio.argmax())
        if float(ratio[best]) > self.secant:
            self.secant, self.sharpest = float(ratio[best]), jobs[best].client

    @property
    def moved(self) -> Tensor:
        return self.sums["moved"] / self.samples

    @property
    def step(self) -> Tensor:
        """The clients' mean steps, averaged over samples, (d,)."""
        return -self.sums["flow"] / self.samples

    @property
    def phi1(self) -> Tensor:
        """Definition 1: the mean over clients of their gradients, by epoch, (L, d)."""
        return self.sums["phi1"] / len(self.clients)

    @property
    def phi2(self) -> Tensor:
        """The mean over clients of their displacement from w̄, (L+1, d)."""
        return self.sums["phi2"] / len(self.clients)


@dataclass(frozen=True)
class Round:
    """A round: its row in the record, the work that moved the model, and the pass before it, if any (a probe)."""

    row: dict[str, Any]
    work: Pass
    probe: Pass | None

    @property
    def theorem(self) -> bool:
        """Are the rates those of Theorem 1, around the probe's mean field?"""
        w = self.work.work
        return self.probe is not None and w.slope is not None and self.follows(w.field)

    def follows(self, vectors: Tensor | None) -> bool:
        """Are these the aggregated gradients of the probe?"""
        if self.probe is None or vectors is None or not self.probe.clients:
            return False
        phi1, given = self.probe.phi1, vectors.double().cpu()
        return given.shape == phi1.shape and bool((given - phi1).norm() <= 1e-4 * phi1.norm())


class Watch:
    """Both a callback and an engine around the run's own; give it to `fedagg.run` as both. It collects the rounds in `rounds`."""

    note = ""

    def __init__(self, weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.passes: list[Pass] = []
        self.rounds: list[Round] = []
        self.engine: Engine | None = None

    def wrap(self, engine: Engine) -> Engine:
        self.engine, self.note = engine, engine.note
        return self

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]:
        assert self.engine is not None
        before = self.passes[-1] if self.passes and self.passes[-1].clients else None
        seen = Pass(work, model.w.double().cpu(), self.weight_decay, None if before is None else before.phi2)
        for chunk in self.engine.run(model, replace(work, trace=True), jobs, memory):
            seen.add(chunk)
            yield chunk if work.trace else replace(chunk, gradients=None, path=None)
        self.passes = [*self.passes[-1:], seen]

    def started(self, config: Config, done: int) -> None:
        """Nothing to do yet."""

    def round_done(self, row: dict[str, Any]) -> None:
        self.rounds.append(Round(row, self.passes[-1], self.passes[-2] if len(self.passes) > 1 else None))
        self.passes = []

    def finished(self, result: Result) -> None:
        """Nothing left to do: everything is in `rounds`."""
