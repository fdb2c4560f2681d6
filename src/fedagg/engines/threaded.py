"""Several clients at a time, a thread and a core each: one by one, or a stack of them a thread.

Convolutions of one small batch do not keep several cores busy, but one client a core does. Products of small stacked layers do when
torch cuts each of them up among its threads, but these then meet at a barrier after every product, thousands of times a round. On
cores that another process wants too, every barrier waits for a thread that is not running, and waits busily: two runs side by side
took up to 28 times as long as one alone. A stack a thread meets once a round. Python's lock does not matter where the threads spend
their time in kernels; where these are short it does, and one thread is as good as two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedagg.engines.base import Setting
from fedagg.engines.batched import Batched, Network
from fedagg.engines.sequential import Sequential
from fedagg.flat import Model
from fedagg.work import Chunk, Job, Memory, Work

GRAIN = 8 << 20  # weights times samples of a step that are worth a thread of their own: a linear model's 20 clients are not


class Threaded:
    """`network` is a form of the network that trains without autograd, one copy a thread; without it, the plain engine does."""

    def __init__(self, setting: Setting, threads: int, network: Callable[[Setting, int], Network] | None = None) -> None:
        self.own, self.setting = threading.local(), setting
        # A pool keeps the arguments of its initializer: with the engine among them, neither would ever be freed.
        self.pool = ThreadPoolExecutor(threads, initializer=prepare, initargs=(self.own, setting, network))
        self.note = f"{threads} clients at a time, a thread and a core each"

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]:
        if work.loss is not None:  # it may draw random numbers, and torch's generator is shared by all threads
            yield from Sequential(self.setting).run(model, work, jobs, memory)
            return
        remembered = memory.read([job.client for job in jobs]) if memory is not None and work.memory else [None] * len(jobs)

        def client(index: int) -> Chunk:
            chunk: Chunk = self.own.train(model, work, jobs[index], remembered[index])
            return chunk

        # The longest first, so that no core waits long for another's last client; handed back in the order asked for.
        order = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].samples) * jobs[i].epochs)
        yield from in_turn(self.pool, client, order)


class Shared:
    """Cuts the batches of an engine into a stack a thread, of like work: sorted by size, clients are dealt in turns. What cannot be
    cut up, as a loss of the method's own, is left to the engine."""

    def __init__(self, whole: Batched, threads: int) -> None:
        self.own, self.whole, self.threads = threading.local(), whole, threads
        self.pool = ThreadPoolExecutor(threads, initializer=prepare_stack, initargs=(self.own, whole))
        self.note = f"{whole.note}, a stack a thread on up to {threads} threads"

    def stacks(self, group: list[Job]) -> list[list[Job]]:
        """As many as there is work for. By shapes alone: who trains with whom decides how numbers are rounded."""
        setting = self.whole.setting
        longest = max(len(job.samples) for job in group)
        work = len(group) * min(setting.local.batch_size, longest) * setting.layout.d
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
    """What the threads make, begun in that order and handed back by number."""
    threads = torch.get_num_threads()
    # Who sums up must not take the clients' cores: torch's own threads wait busily. Said before anyone begins, for MKL has one
    # number of threads for the whole process.
    torch.set_num_threads(1)
    futures = {index: pool.submit(make, index) for index in order}
    try:
        for index in range(len(order)):
            yield futures.pop(index).result()
    finally:
        torch.set_num_threads(threads)
        for future in futures.values():  # after Ctrl-C or an error nobody waits for those that have not begun
            future.cancel()


def prepare_stack(own: threading.local, whole: Batched) -> None:
    torch.set_num_threads(1)
    own.engine = replace(whole, stages={}, trusted={})


def prepare(own: threading.local, setting: Setting, network: Callable[[Setting, int], Network] | None) -> None:
    torch.set_num_threads(1)
    own.train = trainer(setting, network)


def trainer(
    setting: Setting, network: Callable[[Setting, int], Network] | None
) -> Callable[[Model, Work, Job, Tensor | None], Chunk]:
    """Trains one client. Neither of the two touches torch's own generator here, which all threads share."""
    if network is None:
        return Sequential(setting).client
    engine = Batched(setting, network, chunk=1, padding=True)
    return lambda model, work, job, own: engine.train(model, work, [job], None if own is None else Remembered(own[None]))


@dataclass(frozen=True)
class Remembered:
    """What some clients remember, read beforehand: a store has one reader at a time."""

    vectors: Tensor

    def read(self, clients: Sequence[int]) -> Tensor:
        return self.vectors


def draws(module: nn.Module) -> bool:
    """Does a network of ours draw random numbers while it trains? Torch's generator is shared by all threads."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())
