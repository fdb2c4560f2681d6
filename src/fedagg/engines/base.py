"""What all engines share: the object they work on, and the client's optimiser."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedagg.engines.graph import Node
from fedagg.errors import SettingError
from fedagg.flat import Layout, Workspace
from fedagg.work import ClientOptions, Loss, cross_entropy


@dataclass
class Problem:
    """What an engine works on: the network, the training data on its device, and the local options."""

    module: nn.Module
    x: Tensor
    y: Tensor
    classes: int
    local: ClientOptions
    device: torch.device
    loss: Loss = cross_entropy
    half: bool = False  # products in bfloat16; weights, gradients and sums stay in float32
    graph: list[Node] | None = None  # the network's layers, if all are written out and have been traced
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = Layout(self.module)
        self.x, self.y = self.x.to(self.device), self.y.to(self.device)

    def rounding(self) -> torch.autocast:
        """The context for the arithmetic of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)


def precision_switches() -> tuple[list[tuple[Any, str]], list[tuple[Any, str]]]:
    """Torch's switches for the precision of its own products, on a GPU and on a CPU, as objects and attributes. The newer ones
    refuse to be used together with the older ones."""
    cuda, cudnn, cpu = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn), torch.backends.mkldnn
    if not hasattr(cuda, "fp32_precision"):
        return [(part, "allow_tf32") for part in (cuda, cudnn)], []
    gpu, name = (cuda, cudnn.conv, cudnn.rnn), "fp32_precision"
    return [(part, name) for part in gpu], [(getattr(cpu, part), name) for part in ("matmul", "conv", "rnn")]


def set_precision(precision: str) -> None:
    """Use tf32 or plain float32 for torch's own products on a GPU, in the whole process; bf16 is set per network. On a CPU they are
    in float32."""
    gpu, cpu = precision_switches()
    exact = precision == "fp32"
    values = {"allow_tf32": not exact, "fp32_precision": "ieee" if exact else "tf32"}
    for part, name in gpu:
        setattr(part, name, values[name])
    for part, name in cpu:
        setattr(part, name, "ieee")


def allows_tf32() -> bool:
    """May torch's own products on a GPU use tf32?"""
    part, name = precision_switches()[0][0]
    return getattr(part, name) in (True, "tf32")


@contextmanager
def switches_restored() -> Iterator[None]:
    """Restore torch's number of threads and precision of products afterwards."""
    threads = torch.get_num_threads()
    before = [(part, name, getattr(part, name)) for parts in precision_switches() for part, name in parts]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for part, name, value in before:
            setattr(part, name, value)


@contextmanager
def exact_products() -> Iterator[None]:
    """Use float32 products for a while, whatever the run uses: two ways to train are compared, and tf32 would hide what differs."""
    with switches_restored():
        set_precision("fp32")
        yield


TINY = 1e-12  # replaces a norm of zero


def within(limit: float | Tensor, norm: Tensor) -> Tensor:
    """The factor that brings a vector of this norm down to the limit."""
    return (limit / norm.clamp_min(TINY)).clamp(max=1.0)


class Stepper:
    """The client's optimiser on flat vectors: turns a direction into a step. Works on (d,) and on stacks (n, d)."""

    def __init__(self, local: ClientOptions, like: Tensor, limit: float = 0.0) -> None:
        self.local = local
        self.limit = torch.full((), limit, device=like.device) if limit else None  # the work's limit for a gradient's norm
        self.norm = torch.zeros(*like.shape[:-1], 1, device=like.device)  # Σ over steps of the gradients' norms
        self.m = torch.zeros_like(like) if local.momentum or local.optimizer == "adam" else None
        self.v = torch.zeros_like(like) if local.optimizer == "adam" else None
        self.count = torch.zeros(*like.shape[:-1], 1, device=like.device)

    def first(self, n: int) -> Stepper:
        """The same for the first n clients of the stack, on the same memory."""
        part = copy.copy(self)
        part.norm, part.count = self.norm[:n], self.count[:n]
        part.m, part.v = (None if rows is None else rows[:n] for rows in (self.m, self.v))
        return part

    @property
    def limits(self) -> bool:
        """Is there a limit for the norm of a mini-batch gradient?"""
        return self.limit is not None or self.local.clip > 0

    def factor(self, norm: Tensor) -> Tensor:
        """By how much a mini-batch gradient of this norm is shortened: to the length that the work allows, then to the client's own
        limit. The norm is recorded."""
        factor = torch.ones_like(norm)
        if self.limit is not None:
            self.norm += norm
            factor = within(self.limit, norm)
        return factor * within(self.local.clip, factor * norm) if self.local.clip else factor

    def gradient(self, g: Tensor, w: Tensor) -> Tensor:
        """The client's own gradient with limits and weight decay, before the algorithm adds to it; g is shortened in place."""
        if self.limits:
            g *= self.factor(torch.linalg.vector_norm(g, dim=-1, keepdim=True))
        return g + self.local.weight_decay * w if self.local.weight_decay else g

    def direction(self, d: Tensor, active: Tensor | None = None) -> Tensor:
        """The step's direction. `active` (n, 1) marks the clients that make this step: the state of the others must not change."""
        if self.m is None:
            return d
        keep = torch.ones_like(self.count) if active is None else active
        if self.v is None:
            self.m.copy_(torch.where(keep > 0, self.local.momentum * self.m + d, self.m))
            return self.m
        b1, b2 = self.local.betas
        self.count += keep
        self.m.copy_(torch.where(keep > 0, b1 * self.m + (1 - b1) * d, self.m))
        self.v.copy_(torch.where(keep > 0, b2 * self.v + (1 - b2) * d * d, self.v))
        count = self.count.clamp_min(1)
        return (self.m / (1 - b1**count)) / ((self.v / (1 - b2**count)).sqrt() + self.local.eps)


def class_sums(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Sums of features (..., B, features) by class, (..., classes, features), and counts by class, (..., classes), in float64. A
    label of -1 belongs to no class."""
    chosen = (labels[..., None] == torch.arange(classes, device=labels.device)).double()
    return chosen.mT @ features.double(), chosen.sum(-2)  # a product, because a scatter on a GPU adds in no fixed order


@torch.no_grad()
def class_means(space: Workspace, problem: Problem, head: str, samples: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Per-class means of the input of the head of the model in `space`, (classes, features), and samples per class, (classes,)."""
    seen: list[Tensor] = []
    hook = space.module.get_submodule(head).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    space.module.eval()
    for part in samples.split(batch):
        space.module(problem.x[part])
    hook.remove()
    features = torch.cat(seen)
    if features.dim() != 2:
        words = f"is given {tuple(features.shape[1:])} for a sample, not a row of numbers: name a layer after the flattening"
        raise SettingError("head", head, words)
    sums, counts = (part.to(features.dtype) for part in class_sums(features, problem.y[samples], problem.classes))
    return sums / counts.clamp_min(1)[:, None], counts
