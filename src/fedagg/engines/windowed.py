"""An engine whose training samples stay on disk: those of the next clients are read before they train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedagg.data.mapped import WINDOW, Mapped
from fedagg.engines.base import Problem
from fedagg.errors import SettingError
from fedagg.flat import Model
from fedagg.work import Chunk, Engine, Job, Memory, Work


def window(problem: Problem, whole: Mapped) -> Problem:
    """The problem with a part of the samples, as many as may be in memory; engines are built, and networks tried, on these."""
    room = min(len(whole), whole.room(WINDOW))
    rows = np.linspace(0, len(whole) - 1, room).round().astype(np.int64)
    return replace(problem, x=whole[rows], y=problem.y[torch.from_numpy(rows).to(problem.device)])


class Windowed:
    """Fills the window of another engine. Its tensors stay the same objects, so that graphs captured on them stay valid."""

    def __init__(self, engine: Engine, whole: Mapped, targets: torch.Tensor, within: Problem) -> None:
        self.engine, self.whole, self.targets, self.within = engine, whole, targets, within
        self.note = f"{engine.note}; samples are read from the disk"
        self.team: Any = getattr(engine, "team", None)

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]:
        for group in self.groups(jobs):
            asked = {job.client: job for job in group}
            for chunk in self.engine.run(model, work, self.read(group), memory):
                chunk.jobs = [asked[job.client] for job in chunk.jobs]
                yield chunk

    def groups(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Groups of clients, in their order, as large as the window allows."""
        room, group, count = len(self.within.x), list[Job](), 0
        for job in jobs:
            if len(job.samples) > room:
                words = (
                    f"client {job.client} has {len(job.samples)} samples, but {room} fit; raise data_memory, or deal fewer to each"
                )
                raise SettingError("data_memory", f"{self.whole.allowance} bytes", words)
            if group and count + len(job.samples) > room:
                yield group
                group, count = [], 0
            group.append(job)
            count += len(job.samples)
        if group:
            yield group

    def read(self, group: Sequence[Job]) -> list[Job]:
        """The same clients, with their samples in the window."""

        every = torch.cat([job.samples for job in group])
        self.whole.read(every.numpy(), self.within.x)
        self.within.y[: len(every)] = self.targets[every.to(self.targets.device)]
        ends = np.cumsum([len(job.samples) for job in group]).tolist()
        return [replace(job, samples=torch.arange(end - len(job.samples), end)) for job, end in zip(group, ends, strict=True)]
