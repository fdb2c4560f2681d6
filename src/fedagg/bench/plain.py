"""The reference: a federated loop as most research code has it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fedagg.bench.task import Task


def run(task: Task, tick: Callable[[], None]) -> None:
    device = torch.device(task.device)
    clients = [(x.to(device), y.to(device)) for x, y in map(task.client, range(task.clients))]
    model = task.module().to(device)
    for t in range(task.rounds + 1):
        updates = [train(model, *clients[i], task) for i in task.participants(t)]
        model.load_state_dict({key: torch.stack([u[key].float() for u in updates]).mean(0) for key in updates[0]})
        tick()


def train(model: nn.Module, x: Tensor, y: Tensor, task: Task) -> dict[str, Tensor]:
    """One client: a copy of the model, a loader, an optimiser."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    for _ in range(task.epochs):
        for xs, ys in batches(x, y, task.batch_size):
            optimizer.zero_grad()
            functional.cross_entropy(model(xs), ys).backward()
            optimizer.step()
    return model.state_dict()


def batches(x: Tensor, y: Tensor, size: int) -> Iterable[tuple[Tensor, Tensor]]:
    """On the CPU a DataLoader; on a GPU slices of tensors that are already there, which is the faster of the two common ways."""
    if x.device.type == "cpu":
        return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True)
    order = torch.randperm(len(x), device=x.device).split(size)
    return ((x[batch], y[batch]) for batch in order)
