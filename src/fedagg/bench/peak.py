"""The most the device can do: its rate in a large matrix product. Also the number of operations that the task needs."""

from __future__ import annotations

import time

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fedagg.bench.task import Task
from fedagg.engines.base import set_precision


def rate(task: Task, seconds: float = 2.0) -> float:
    """Operations per second in a large product: the best of many, because other programs slow some of them down."""
    device = torch.device(task.device)
    cuda = device.type == "cuda"
    set_precision(task.precision)
    size = 8192 if cuda else 1536
    kind = torch.bfloat16 if task.precision == "bf16" else torch.float32
    a, b = (torch.rand(size, size, device=device, dtype=kind) for _ in range(2))
    best, end, count = float("inf"), time.perf_counter() + seconds, 0
    while count < 3 or time.perf_counter() < end:
        settle(device)
        start = time.perf_counter()
        torch.mm(a, b)
        settle(device)
        best, count = min(best, time.perf_counter() - start), count + 1
    return 2 * size**3 / best


def operations(task: Task) -> float:
    """The multiplications and additions in the matrix products of one round, forward and backward."""
    module, batch = task.module().train(), 4
    with FlopCounterMode(display=False) as counter:
        y = torch.zeros(batch, dtype=torch.int64)
        functional.cross_entropy(module(torch.rand(batch, *task.shape)), y).backward()
    return float(counter.get_total_flops()) / batch * task.samples * task.epochs * task.per_round


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
