"""The seam between what an algorithm is and where its clients run.

An algorithm describes a round's local work as data, a `Work`; an engine carries it out for a list of `Job`s and hands back
`Chunk`s of results. No engine knows an algorithm by name, and no algorithm knows how many clients train at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedagg import augment, seeding
from fedagg.meanfield import bound_rates

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The loss of every sample, (B,)."""
    return functional.cross_entropy(output, target, reduction="none")


@dataclass(frozen=True)
class Work:
    r"""What a round asks of every client: at epoch l, for every mini-batch gradient g,

    $$w \leftarrow w - \eta_l\,\bigl(\mathtt{own}\,g + \mathtt{mix}_l\,\mathtt{field}
    + \mathtt{prox}\,(w-\bar w) - \mathtt{memory}_i\bigr), \qquad
    \eta_l = \mathtt{rate}_l + \mathtt{slope}_l\,\mathtt{field}\,(w_{i,l}-\bar w)\ \text{within}\ [\mathtt{low}, \mathtt{high}].$$

    This covers every method of the package: FedAvg is `rate` alone, FedProx adds `prox`, FedDyn `prox` and `memory`, SCAFFOLD
    `field` (its c) and `memory` (its c_i), FedCM and FedAgg `own` and `field`, and Theorem 1 is `rate` and `slope`.
    """

    rate: Tensor  # (L,)
    slope: Tensor | None = None  # (L, m)
    low: float = 0.0
    high: float | Tensor = float("inf")  # one bound, or one per client
    own: float = 1.0
    field: Tensor | None = None  # (m, d)
    mix: Tensor | None = None  # (L, m)
    prox: float = 0.0
    memory: bool = False  # subtract the client's own remembered vector, and let it remember
    mask: Tensor | None = None  # (d,): 0 where a weight must not move
    trace: bool = False  # keep every epoch's mean gradient and starting point
    represent: str | None = None  # the head whose input is averaged per class after training (FedGH)

    def rates(self, epoch: int, w: Tensor, start: Tensor, high: float | Tensor) -> Tensor:
        """η_{i,l} of clients that stand at `w` (n, d) and began the round at `start` (d,): (n,)."""
        rate = self.rate[epoch].to(w).expand(len(w))
        if self.slope is not None and self.field is not None:
            direction = self.slope[epoch].to(w) @ self.field
            rate = bound_rates(rate + (w - start) @ direction, self.low, high)
        return rate

    def shift(self, epoch: int) -> Tensor | None:
        """The part of the step that is the same for all clients, (d,)."""
        if self.mix is None or self.field is None:
            return None
        return self.mix[epoch].to(self.field) @ self.field


@dataclass(frozen=True)
class ClientOptions:
    """How a client takes a step, whatever the algorithm: the options of its optimiser."""

    epochs: int
    batch_size: int
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # largest norm of a mini-batch gradient; 0 for none
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    augment: str = "none"  # what is done to images before a client trains on them

    def steps(self, size: int) -> int:
        """Mini-batches an epoch of a client with `size` samples."""
        return -(-size // self.batch_size)

    def gains(self, steps: Tensor) -> Tensor:
        """How many times a step's direction a client with so many steps an epoch, (n,), goes with a step: the mean over each epoch,
        (n, L). Once, but with momentum, (1 - m^k)/(1 - m) with the k-th step of the round. Of Adam's steps there is no telling."""
        m, each = self.momentum if self.optimizer == "sgd" else 0.0, steps[:, None]
        before = each * torch.arange(self.epochs, device=steps.device)
        return (1 - m ** (before + 1) * (1 - m**each) / ((1 - m) * each)) / (1 - m)


@dataclass(frozen=True)
class Job:
    """One client's share of a round."""

    client: int
    samples: Tensor  # its indices into the training set, (D_i,)
    epochs: int  # fewer than L for a straggler
    seed: int  # of its batch order and its dropout
    position: int = 0  # in the round's list of participants: where per-client bounds are looked up

    def order(self) -> Tensor:
        """Indices into the training set in the order they are used, (epochs, D_i)."""
        return self.samples[seeding.batches(self.seed, len(self.samples), self.epochs)]

    def drawn(self, kind: str) -> Tensor:
        """What happens to each of them before it is used, (epochs, D_i)."""
        return augment.draw(self.seed, len(self.samples), self.epochs, kind)


@dataclass(kw_only=True)
class Report:
    """The numbers that n clients tell of their own training; the first axis is the client. A number more is a line here, and one in
    each engine."""

    loss: Tensor  # mean over the steps made, (n,)
    first: Tensor  # of the first mini-batch, taken on the global model itself, (n,)
    steps: Tensor  # mini-batches in all, (n,)
    rates: Tensor  # η_{i,l}, (n, L); 0 in epochs not made


@dataclass(kw_only=True)
class Chunk(Report):
    """What n clients bring home. Tensors stay on the engine's device."""

    jobs: Sequence[Job]
    delta: Tensor  # w_i - w̄, (n, d)
    buffers: Tensor  # (n, b)
    memory: Tensor | None = None  # the remembered vectors the clients trained with, (n, d)
    gradients: Tensor | None = None  # mean mini-batch gradient of each epoch, (n, L, d)
    path: Tensor | None = None  # w_{i,l} - w̄, (n, L+1, d)
    classes: Tensor | None = None  # per-class mean representations, (n, classes, features)
    counts: Tensor | None = None  # samples per class, (n, classes)
    local: ClientOptions | None = None  # how they took their steps; plain ones if nobody says
    travel: Tensor = field(init=False)  # Σ over steps of the rate, times what momentum makes of it, (n,)
    received: list[int] = field(init=False)  # numbers of each update that reach the server: d, unless some are lost on the way

    def __post_init__(self) -> None:
        epochs = torch.tensor([max(job.epochs, 1) for job in self.jobs], device=self.steps.device)
        each = (self.steps / epochs).to(self.rates.dtype)
        rates = self.rates if self.local is None else self.rates * self.local.gains(each)
        self.travel = rates.sum(1) * each
        self.received = [self.delta.shape[1]] * len(self.jobs)


class Memory(Protocol):
    """Per-client vectors that outlive a round (FedDyn's g_k, SCAFFOLD's c_i)."""

    def read(self, clients: Sequence[int]) -> Tensor: ...
