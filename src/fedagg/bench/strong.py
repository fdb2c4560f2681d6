"""The strongest plain loop: what a good engineer writes for one client after the other, with nothing stacked, captured or compiled.

Samples are tensors on the device, shuffled by one permutation an epoch. The model is not copied but reset. There is no optimiser
object: one foreach call updates all weights. On a CPU, images for a convolutional network are in channels-last memory. On a GPU,
cuDNN looks for the fastest kernels and matrix products are tf32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedagg.bench.task import Task
from fedagg.engines.base import set_precision


def run(task: Task, tick: Callable[[], None]) -> None:
    device, (x, y) = torch.device(task.device), task.data()
    model = task.module().to(device).train()
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        set_precision(task.precision)
    elif any(isinstance(layer, nn.Conv2d) for layer in model.modules()):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # which torch's stubs leave out
        x = x.contiguous(memory_format=torch.channels_last)
    x, y = x.to(device), y.to(device)
    for t in range(task.rounds + 1):
        chosen = task.participants(t)
        start = [state.detach().clone() for state in model.state_dict().values()]
        total = [torch.zeros_like(state, dtype=torch.float32) for state in start]
        for client in chosen:
            mine = slice(client * task.samples, (client + 1) * task.samples)
            train(model, x[mine], y[mine], task)
            now = [state.float() for state in model.state_dict().values()]
            torch._foreach_add_(total, now)
            put(model, start)
        put(model, [each / len(chosen) for each in total])
        tick()


def train(model: nn.Module, x: Tensor, y: Tensor, task: Task) -> None:
    """Train one client, in place."""
    weights: list[Tensor] = list(model.parameters())
    for _ in range(task.epochs):
        for xs, ys in shuffled(x, y, task.batch_size):
            gradients = torch.autograd.grad(functional.cross_entropy(model(xs), ys), weights)
            with torch.no_grad():
                torch._foreach_add_(weights, gradients, alpha=-task.lr)


def shuffled(x: Tensor, y: Tensor, size: int) -> zip[tuple[Tensor, Tensor]]:
    """The batches of an epoch: all samples are gathered once and then sliced."""
    order = torch.randperm(len(x), device=x.device)
    return zip(x[order].split(size), y[order].split(size), strict=True)


@torch.no_grad()
def put(model: nn.Module, values: list[Tensor]) -> None:
    for state, value in zip(model.state_dict().values(), values, strict=True):
        state.copy_(value)
