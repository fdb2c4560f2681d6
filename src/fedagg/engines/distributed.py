"""One run on several processes, on one machine or many: `torchrun --nproc-per-node=2 -m fedagg run --engine distributed ...`.

Every process holds the data and the global model, and trains its share of the round's clients with its own engine. Numbers per
client and sums of vectors are all-reduced, so that every process takes the same step; the first one keeps the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fedagg.engines.base import Problem
from fedagg.flat import Model
from fedagg.team import TorchTeam
from fedagg.work import Chunk, Engine, Job, Memory, Work


class Distributed:
    """Trains this process's share of the clients, dealt by work: the longest job goes to the process with the least to do."""

    def __init__(self, problem: Problem, inner: Callable[[Problem], Engine]) -> None:
        self.team = TorchTeam(problem.device)
        self.inner = inner(problem)
        self.note = f"{self.team.size} processes, each: {self.inner.note}"

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]:
        mine = deal(jobs, self.team.size)[self.team.rank]
        return self.inner.run(model, work, mine, memory) if mine else iter(())


def deal(jobs: Sequence[Job], hands: int) -> list[list[Job]]:
    """The jobs of each process, with the work as even as possible; the result is the same on every process."""
    dealt: list[list[Job]] = [[] for _ in range(hands)]
    load = [0] * hands
    for job in sorted(jobs, key=lambda job: (-len(job.samples) * job.epochs, job.position)):
        least = load.index(min(load))
        dealt[least].append(job)
        load[least] += len(job.samples) * job.epochs
    return [sorted(hand, key=lambda job: job.position) for hand in dealt]
