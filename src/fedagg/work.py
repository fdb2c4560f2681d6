"""The interface between algorithms and engines.

An algorithm describes a round's local work as data, a `Work`; an engine carries it out for a list of `Job`s and returns `Chunk`s of
results. No engine knows an algorithm by name, and no algorithm knows how many clients train at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedagg import augment, seeding
from fedagg.errors import SettingError
from fedagg.flat import Layout, Model
from fedagg.meanfield import bound_rates

Loss = Callable[[Tensor, Tensor], Tensor]
State = dict[str, Tensor]
Gradient = Callable[[Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The loss of every sample, (B,)."""
    return functional.cross_entropy(output, target, reduction="none")


@dataclass
class Client:
    """What a client knows while it trains. For a stack of n clients, what differs between them has a leading axis, (n, d)."""

    start: Tensor  # w̄, the global weights, (d,)
    memory: Tensor | None = None  # the vector it remembers, (d,) or (n, d)
    shift: Tensor | None = None  # mix · field for this epoch, (d,)
    steps: Tensor | None = None  # its mini-batches in the round, () or (n, 1)
    loss: Tensor | None = None  # of the mini-batch at its latest gradient, () or (n, 1)


@dataclass
class Learner(Client):
    """A client with its network as a function of flat weights, for a method's own loss. It is always one client: engines that train
    many at once map over them."""

    module: nn.Module = field(kw_only=True)
    layout: Layout = field(kw_only=True)
    w: Tensor = field(kw_only=True)  # its own weights, (d,); the loss is differentiated by them
    buffers: dict[str, Tensor] = field(kw_only=True)
    criterion: Loss = field(kw_only=True)  # the run's own loss of (output, y), (B,)
    looked: bool = field(default=False, init=False)

    def output(self, x: Tensor, at: Tensor | None = None) -> Tensor:
        """The network's output at the client's own weights, or at others, such as `start` or `memory`."""
        # As in training, the first call at the client's own weights updates batch statistics. Later calls do not.
        moves = at is None and not self.looked
        self.looked |= moves
        buffers = self.buffers if moves else {name: value.clone() for name, value in self.buffers.items()}
        weights = dict(self.layout.shaped(self.w if at is None else at))
        output: Tensor = functional_call(self.module, (weights, buffers), (x,))
        return output

    def features(self, x: Tensor, layer: str, at: Tensor | None = None) -> Tensor:
        """The input of the named layer, flattened: (B, features)."""
        seen: list[Tensor] = []
        hook = self.module.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            self.output(x, at)
        finally:
            hook.remove()
        return seen[0].flatten(1)

    def losses(self, loss: ClientLoss, x: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample, (B,), with its shape checked."""
        losses = loss(self, x, y)
        if losses.shape != (len(x),):
            words = f"must give one number per sample, but gave shape {tuple(losses.shape)} for {len(x)}"
            raise SettingError("loss", getattr(loss, "__qualname__", type(loss).__qualname__), words)
        return losses


ClientLoss = Callable[[Learner, Tensor, Tensor], Tensor]
LocalStep = Callable[[Client, Tensor, Gradient, Tensor, State], tuple[Tensor, State]]


@dataclass(frozen=True)
class Work:
    r"""What a round asks of every client: at epoch l, for every mini-batch gradient g,

    $$w \leftarrow w - \eta_l\,\bigl(\mathtt{own}\,g + \mathtt{mix}_l\,\mathtt{field}
    + \mathtt{prox}\,(w-\bar w) - \mathtt{memory}\,m_i\bigr), \qquad
    \eta_l = \mathtt{rate}_l + \mathtt{slope}_l\,\mathtt{field}\,(w_{i,l}-\bar w)\ \text{within}\ [\mathtt{low}, \mathtt{high}].$$

    This covers every method of the package: FedAvg is `rate` alone, FedProx adds `prox`, FedDyn `prox` and `memory`, SCAFFOLD
    `field` (its c) and `memory` (its c_i), FedCM and FedAgg `own` and `field`, and Theorem 1 is `rate` and `slope`.

    A method that does not fit this sum replaces a part of it by its own function: g is the gradient of `loss`, and `step` makes the
    whole step. With either, the client's memory is not subtracted: the function uses it as it likes.
    """

    rate: Tensor  # (L,), or (n, L) with a row for each participant
    slope: Tensor | None = None  # (L, m)
    low: float = 0.0
    high: float | Tensor = float("inf")  # one bound, or one per client
    own: float = 1.0
    field: Tensor | None = None  # (m, d)
    mix: Tensor | None = None  # (L, m)
    prox: float = 0.0
    memory: float = 0.0  # weight of the client's own remembered vector, which is subtracted; if not 0, the client remembers
    renew: float = 1.0  # share of this round in what the client remembers, if the method averages over rounds
    mask: Tensor | None = None  # (d,): 0 where a weight must not move
    behind: float = 0.0  # how far back along the field, w̄ + behind · field, the first mini-batch's loss is taken, too
    clip: float = 0.0  # largest norm of a mini-batch gradient, and norms are measured; 0: neither
    trace: bool = False  # keep every epoch's mean gradient and starting point
    trial: bool = False  # only the client's report is wanted: a real client does not send its update
    represent: str | None = None  # the head whose input is averaged per class after training (FedGH)
    loss: ClientLoss | None = None  # loss(learner, x, y): the loss of every sample, (B,)
    step: LocalStep | None = None  # step(client, w, gradient, rate, state): the next weights and state
    pure: bool = False  # during a run, nothing that the step reads changes except its arguments: a GPU may record and replay it

    @property
    def custom(self) -> bool:
        return self.loss is not None or self.step is not None

    @property
    def subtracts(self) -> bool:
        """Is the client's memory subtracted from its direction?"""
        return self.memory != 0.0 and not self.custom

    def check(self, n: int, epochs: int, d: int) -> None:
        """Check the shapes of what a method asks n clients to do."""
        m = len(self.field) if isinstance(self.field, Tensor) else 0
        shapes: dict[str, list[tuple[int, ...]]] = {"rate": [(epochs,), (n, epochs)], "slope": [(epochs, m)], "field": [(m, d)]}
        shapes |= {"mix": [(epochs, m)], "mask": [(d,)]}
        for name, allowed in shapes.items():
            given = getattr(self, name)
            if given is None and name != "rate":
                continue
            if not isinstance(given, Tensor) or tuple(given.shape) not in allowed:
                found = f"a tensor {tuple(given.shape)}" if isinstance(given, Tensor) else given
                hint = "; clients.constant(0.1) makes one" if name == "rate" else ""
                raise SettingError(f"Work.{name}", found, f"give a tensor {' or '.join(map(str, allowed))}{hint}")

    def of(self, positions: Sequence[int]) -> Work:
        """The work for these participants: if each has its own rate or bound, only theirs."""
        at = list(positions)
        rate = self.rate if self.rate.dim() == 1 else self.rate[at]
        return replace(self, rate=rate, high=self.high[at] if isinstance(self.high, Tensor) else self.high)

    def rates(self, epoch: int, w: Tensor, start: Tensor) -> Tensor:
        """η_{i,l} of clients that are at `w` (n, d) and began the round at `start` (d,): (n,)."""
        rate = self.rate[..., epoch].to(w).expand(len(w))
        if self.slope is not None and self.field is not None:
            direction = self.slope[epoch].to(w) @ self.field
            rate = bound_rates(rate + (w - start) @ direction, self.low, self.high)
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
        """Mini-batches per epoch of a client with `size` samples."""
        return -(-size // self.batch_size)

    def gains(self, steps: Tensor) -> Tensor:
        """The gain by momentum: how far a step goes, as a multiple of its direction, for clients with `steps` (n,) steps per epoch.
        The mean over each epoch, (n, L). With momentum m it is (1 - m^k)/(1 - m) at step k of the round, else 1; for Adam, 1."""

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
    position: int = 0  # index in the round's list of participants, for per-client bounds

    def order(self) -> Tensor:
        """Indices into the training set in the order they are used, (epochs, D_i)."""
        return self.samples[seeding.batches(self.seed, len(self.samples), self.epochs)]

    def drawn(self, kind: str) -> Tensor:
        """The augmentation of each sample, in the same order, (epochs, D_i)."""
        return augment.draw(self.seed, len(self.samples), self.epochs, kind)


@dataclass(kw_only=True)
class Report:
    """The numbers that n clients report about their training; the first axis is the client. To add one, add a line here and one in
    each engine."""

    loss: Tensor  # mean over the steps made, (n,)
    first: Tensor  # of the first mini-batch, at the global model, (n,)
    behind: Tensor  # of the same mini-batch, a step back along the field, (n,), if the work asks for it; else 0
    norm: Tensor  # mean norm of the mini-batch gradients, (n,), if the work limits it; else 0
    steps: Tensor  # total number of mini-batches, (n,)
    rates: Tensor  # η_{i,l}, (n, L); 0 in epochs not made


@dataclass(kw_only=True)
class Chunk(Report):
    """The results of n clients. Tensors stay on the engine's device."""

    jobs: Sequence[Job]
    start: Tensor  # w̄, (d,)
    delta: Tensor  # w_i - w̄, (n, d)
    buffers: Tensor  # (n, b)
    memory: Tensor | None = None  # the remembered vectors that the clients trained with, times their weight, (n, d)
    gradients: Tensor | None = None  # mean mini-batch gradient of each epoch, (n, L, d)
    path: Tensor | None = None  # w_{i,l} - w̄, (n, L+1, d)
    classes: Tensor | None = None  # per-class mean representations, (n, classes, features)
    counts: Tensor | None = None  # samples per class, (n, classes)
    local: ClientOptions | None = None  # how they took their steps; plain SGD by default
    travel: Tensor = field(init=False)  # Σ over steps of the rate, times the gain by momentum, (n,)
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


class Engine(Protocol):
    """Trains clients. `note` says which form was chosen and why, for the record."""

    note: str

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]: ...


class Team(Protocol):
    """The processes of a distributed run."""

    def sum(self, tensor: Tensor) -> Tensor: ...

    def most(self, tensor: Tensor) -> Tensor: ...
