"""One run on several processes, on one machine or many: `torchrun --nproc-per-node=2 -m fedagg run --engine distributed ...`.

Every process holds the data and the global model, and trains its share of the round's clients with its own engine. Numbers per
client and sums of vectors are all-reduced, so that every process takes the same step; the first one keeps the record.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import torch
from torch import Tensor, distributed

from fedagg.engines.base import Problem
from fedagg.errors import SettingError
from fedagg.flat import Model
from fedagg.work import Chunk, Engine, Job, Memory, Work


class PeerGone(KeyboardInterrupt):
    """Another process has died: the run stops as after Ctrl-C, and all completed work is kept."""


class Team:
    """The processes of a run."""

    def __init__(self, device: torch.device) -> None:
        if "RANK" not in os.environ:
            raise SettingError("engine", "distributed", "start it with: torchrun --nproc-per-node=2 -m fedagg run ...")
        if not distributed.is_initialized():
            signal.signal(signal.SIGTERM, end_cleanly)
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(distributed.destroy_process_group)
        self.device, self.rank, self.size = device, distributed.get_rank(), distributed.get_world_size()

    def part(self) -> None:
        """Wait for each other at the end: a process that left early would look like one that died."""
        self.sum(torch.zeros(1))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to save

    def sum(self, tensor: Tensor) -> Tensor:
        return self.reduce(tensor, distributed.ReduceOp.SUM)

    def most(self, tensor: Tensor) -> Tensor:
        return self.reduce(tensor, distributed.ReduceOp.MAX)

    def reduce(self, tensor: Tensor, how: distributed.ReduceOp.RedOpType) -> Tensor:
        """All-reduce a tensor; the result is on the tensor's own device."""
        there = tensor.to(self.device, copy=True)
        try:
            distributed.all_reduce(there, how)
        except RuntimeError as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun is about to send it, while completed work is being saved
            raise PeerGone("another process of the run is gone; start all of them again with --resume") from error
        return there.to(tensor.device)


def end_cleanly(number: int, frame: FrameType | None) -> None:
    """Stop at torchrun's first signal, which it sends when one process dies. Ignore later ones: completed work is being saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise PeerGone("asked to stop, most likely because another process of the run is gone; start again with --resume")


class Distributed:
    """Trains this process's share of the clients, dealt by work: the longest job goes to the process with the least to do."""

    def __init__(self, problem: Problem, inner: Callable[[Problem], Engine]) -> None:
        self.team = Team(problem.device)
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
