"""Several clients at a time on a CPU, with one core per thread: each thread trains one client, or a stack of them.

Convolutions of one small batch do not keep several cores busy, but one client per core does. For products of small stacked layers,
torch can split each product among its threads, but these then meet at a barrier after every product, thousands of times per round.
If another process wants the cores too, every barrier waits, busily, for a thread that is not running: two runs side by side took up
to 28 times as long as one alone. With one stack per thread, threads meet once per round. Python's lock does not matter while
threads are in kernels; if these are short it does, and one thread is as good as two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedagg.engines.base import Problem
from fedagg.engines.batched import Batched, Network
from fedagg.engines.sequential import Sequential
from fedagg.flat import Model
from fedagg.work import Chunk, Job, Memory, Work

GRAIN = 8 << 20  # weights times samples of a step that justify another thread: a linear model's 20 clients do not


class Threaded:
    """`network` is a form of the network that trains without autograd, one copy per thread; without it, autograd is used."""

    def __init__(self, problem: Problem, threads: int, network: Callable[[Problem, int], Network] | None = None) -> None:
        self.own, self.plain = threading.local(), Sequential(problem)
        self.stacked = None if network is None else Batched(problem, network, chunk=1, padding=True)
        # A pool keeps the arguments of its initializer: if the engine were one of them, neither would ever be freed.
        self.pool = ThreadPoolExecutor(threads, initializer=prepare, initargs=(self.own, problem, network))
        self.note = f"{threads} clients at a time, one thread and core each"

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]:
        # A method's own loss may draw random numbers, and all threads share torch's generator.
        alone = work.loss is not None
        if work.step is not None and self.stacked is not None:
            alone |= not self.stacked.trusts(model, work, jobs, memory)
        if alone:
            yield from self.plain.run(model, work, jobs, memory)
            return
        remembered = memory.read([job.client for job in jobs]) if memory is not None and work.memory else [None] * len(jobs)

        def client(index: int) -> Chunk:
            chunk: Chunk = self.own.train(model, work, jobs[index], remembered[index])
            return chunk

        # The longest first, so that no core waits long for another's last client; returned in the order of the jobs.
        order = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].samples) * jobs[i].epochs)
        yield from in_turn(self.pool, client, order)


class Shared:
    """Splits the batches of an engine into one stack per thread, with similar work: clients are sorted by size and dealt in turns.
    What cannot be split, such as a method's own loss, is left to the engine."""

    def __init__(self, whole: Batched, threads: int) -> None:
        self.own, self.whole, self.threads = threading.local(), whole, threads
        self.pool = ThreadPoolExecutor(threads, initializer=prepare_stack, initargs=(self.own, whole))
        self.note = f"{whole.note}, one stack per thread on up to {threads} threads"

    def stacks(self, group: list[Job]) -> list[list[Job]]:
        """As many stacks as there is work for. Only shapes count, because the grouping of clients decides the rounding."""
        problem = self.whole.problem
        longest = max(len(job.samples) for job in group)
        work = len(group) * min(problem.local.batch_size, longest) * problem.layout.d
        count = max(1, min(self.threads, len(group), work // GRAIN))
        return [group[at::count] for at in range(count)]

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]:
        if work.custom:
            yield from self.whole.run(model, work, jobs, memory)
            return
        for group in self.whole.groups(jobs):
            yield from self.train(model, work, self.stacks(group), memory if work.memory else None)

    def train(self, model: Model, work: Work, stacks: list[list[Job]], memory: Memory | None) -> Iterator[Chunk]:
        read = [None if memory is None else Remembered(memory.read([job.client for job in stack])) for stack in stacks]

        def train(at: int) -> Chunk:
            chunk: Chunk = self.own.engine.train(model, work, stacks[at], read[at])
            return chunk

        yield from in_turn(self.pool, train, range(len(stacks)))


def in_turn(pool: ThreadPoolExecutor, make: Callable[[int], Chunk], order: Sequence[int]) -> Iterator[Chunk]:
    """The threads' results, started in `order` and returned by number."""
    threads = torch.get_num_threads()
    # The thread that sums must not take the clients' cores, because torch's own threads wait busily. This is set before any starts,
    # because MKL has one number of threads for the whole process.
    torch.set_num_threads(1)
    futures = {index: pool.submit(make, index) for index in order}
    try:
        for index in range(len(order)):
            yield futures.pop(index).result()
    finally:
        torch.set_num_threads(threads)
        for future in futures.values():  # after Ctrl-C or an error, do not wait for those that have not begun
            future.cancel()


def prepare_stack(own: threading.local, whole: Batched) -> None:
    torch.set_num_threads(1)
    own.engine = replace(whole, stages={}, trusted={})


def prepare(own: threading.local, problem: Problem, network: Callable[[Problem, int], Network] | None) -> None:
    torch.set_num_threads(1)
    own.train = trainer(problem, network)


def trainer(
    problem: Problem, network: Callable[[Problem, int], Network] | None
) -> Callable[[Model, Work, Job, Tensor | None], Chunk]:
    """A function that trains one client. Neither form uses torch's own generator here, which all threads share."""
    if network is None:
        return Sequential(problem).client
    engine = Batched(problem, network, chunk=1, padding=True)
    return lambda model, work, job, own: engine.train(model, work, [job], None if own is None else Remembered(own[None]))


@dataclass(frozen=True)
class Remembered:
    """What some clients remember, read in advance: a store has one reader at a time."""

    vectors: Tensor

    def read(self, clients: Sequence[int]) -> Tensor:
        return self.vectors
