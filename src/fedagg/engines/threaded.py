"""Several clients at a time, a thread and a core each.

Convolutions of one small batch do not keep several cores busy, but one client a core does. Python's lock does not matter: the
threads spend their time in kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedagg.engines.base import Setting
from fedagg.engines.batched import Batched, Network
from fedagg.engines.sequential import Sequential
from fedagg.flat import Model
from fedagg.work import Chunk, Job, Memory, Work


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
        futures = {index: self.pool.submit(client, index) for index in order}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # who sums up must not take the clients' cores: torch's own threads wait busily
        try:
            for index in range(len(jobs)):
                yield futures.pop(index).result()
        finally:
            torch.set_num_threads(threads)
            for future in futures.values():  # after Ctrl-C or an error nobody waits for those that have not begun
                future.cancel()


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
    return lambda model, work, job, own: engine.train(model, work, [job], None if own is None else OneMemory(own))


@dataclass(frozen=True)
class OneMemory:
    """What one client remembers, read beforehand: a store has one reader at a time."""

    vector: Tensor

    def read(self, clients: Sequence[int]) -> Tensor:
        return self.vector[None]


def draws(module: nn.Module) -> bool:
    """Does a network of ours draw random numbers while it trains? Torch's generator is shared by all threads."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())
