"""The job that is timed: FedAvg on clients of equal size, with random samples. Every rival gets the same one."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedagg import models, plugins, seeding

CLASSES = 10
SMALL = ("linear", "mlp", "mnist-cnn", "lenet5")  # timed on 1×28×28, the others on 3×32×32
TEXT = ("char-lstm", "char-transformer")  # timed on rows of 80 characters, like those of Shakespeare's plays
VOCABULARY = 80


@dataclass(frozen=True)
class Task:
    """A plain description, so that it can be sent to another process as JSON."""

    model: str = "linear"
    clients: int = 100
    participation: float = 0.2
    rounds: int = 5  # that are timed, after one to warm up
    samples: int = 600  # of every client
    epochs: int = 3
    batch_size: int = 32
    lr: float = 0.01
    device: str = "cpu"
    precision: str = "tf32"
    seed: int = 0
    plugin: str = ""  # files or modules that bring the network, if it is the user's own

    @property
    def shape(self) -> tuple[int, ...]:
        if self.model in TEXT:
            return (80,)
        return (1, 28, 28) if self.model in SMALL else (3, 32, 32)

    @property
    def classes(self) -> int:
        return VOCABULARY if self.model in TEXT else CLASSES

    @property
    def per_round(self) -> int:
        return max(1, round(self.participation * self.clients))

    def module(self) -> nn.Module:
        plugins.load(plugins.parse_names(self.plugin))
        return models.build(self.model, self.shape, self.classes, seed=seeding.derive(self.seed, "model"))

    def client(self, client: int) -> tuple[Tensor, Tensor]:
        """One client's samples, the same in every call: rivals that run clients in other processes make them there."""
        generator = seeding.torch_generator(self.seed, "bench", client)
        size = (self.samples, *self.shape)
        tokens = self.model in TEXT
        x = torch.randint(0, VOCABULARY, size, generator=generator) if tokens else torch.rand(size, generator=generator)
        return x, torch.randint(0, self.classes, (self.samples,), generator=generator)

    @functools.lru_cache(maxsize=1)  # noqa: B019  a task lives as long as its process
    def data(self) -> tuple[Tensor, Tensor]:
        """The samples of all clients in a row; those of client i start at i·samples."""
        x, y = zip(*map(self.client, range(self.clients)), strict=True)
        return torch.cat(x), torch.cat(y)

    def participants(self, t: int) -> list[int]:
        return seeding.participants(self.seed, t, self.clients, self.per_round)
