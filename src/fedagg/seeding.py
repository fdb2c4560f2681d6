"""Reproducible randomness: every draw comes from a generator made from the run's seed and a purpose.

No global state is read. So the participants of round 7 are the same whatever the algorithm, the engine or the number of earlier
draws, and a resumed run needs to remember only its round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def derive(seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive(seed, "client", t, passes, client)``."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def torch_generator(seed: int, *purpose: object) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, *purpose))


def numpy_generator(seed: int, *purpose: object) -> np.random.Generator:
    return np.random.default_rng(derive(seed, *purpose))


@contextmanager
def seeded_global(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator for a while, then restore it: modules such as ``nn.Dropout`` draw from it."""
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # Not torch.manual_seed: it formats a stack trace for every missing kind of accelerator, milliseconds per client.
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


def participants(seed: int, t: int, clients: int, count: int) -> list[int]:
    """The clients of round t, uniform without replacement, in ascending order."""
    return sorted(numpy_generator(seed, "participants", t).choice(clients, count, replace=False).tolist())


def batches(seed: int, size: int, epochs: int) -> Tensor:
    """A client's sample order in one round: (epochs, size), a new permutation for each epoch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(size, generator=generator) for _ in range(epochs)])
