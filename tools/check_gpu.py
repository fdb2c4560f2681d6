"""Check on a GPU what the tests cannot run without one: every Triton kernel, bf16, and captured graphs. It takes about a minute.

    python tools/check_gpu.py                    # exits with status 1 if something is wrong, and 2 where there is no GPU
    python tools/check_gpu.py --allow-missing    # status 0 where there is no GPU, for continuous integration
    python tools/check_gpu.py --interpret        # the kernels alone, in Triton's interpreter on the CPU: slow

Kernels are held against autograd in float64, on new random inputs every time (`--seed` repeats them). Memory that torch hands
out is filled with NaN first, so that what a kernel does not write is seen. Needs Triton and the package with its dependencies.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, repeat
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if "--interpret" in sys.argv[1:]:
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports it

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedagg.engines.base import set_precision

# The largest relative error that rounding explains. Products of tf32 have 11 bits, of bf16 8, of float16 (the interpreter's) 11.
EXACT, TF32, SHORT = 2e-5, 3e-3, 2e-2


class Row(NamedTuple):
    what: str
    precision: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # not so for nan


class Bench:
    """Where to check, in which kinds of number, and with which inputs."""

    def __init__(self, device: torch.device, seed: int, precisions: tuple[str, ...] = ("fp32", "short")) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(seed)
        self.cuda, self.precisions = device.type == "cuda", precisions
        self.short = torch.bfloat16 if self.cuda else torch.float16  # the interpreter has no bfloat16

    def set(self, precision: str) -> tuple[torch.dtype, float]:
        """Torch's switches, the type of images, and the error to expect."""
        set_precision(precision)
        limit = {"fp32": EXACT, "tf32": TF32, "short": SHORT}[precision]
        return (self.short if precision == "short" else torch.float32), limit

    def name(self, precision: str) -> str:
        return str(self.short).removeprefix("torch.") if precision == "short" else precision

    def random(self, *shape: int) -> Tensor:
        x = torch.randn(*shape, generator=self.generator).to(self.device)
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def apart(ours: Tensor, exact: Tensor) -> float:
    """The relative error; nan if something was not written."""
    return float((ours.double() - exact).norm() / exact.norm().clamp_min(1e-30))


# --- single kernels


def convolutions(bench: Bench) -> Iterator[Row]:
    from fedagg.engines.fused import FusedConvolution

    # clients, images, channels, outputs, filter, padding, stride, side; with 64 channels and 16 bits images need no unrolling
    shapes = [(3, 2, 1, 32, 5, 2, 1, 12), (2, 3, 32, 64, 5, 2, 1, 6), (2, 2, 3, 20, 3, 1, 1, 7), (2, 2, 64, 70, 3, 1, 1, 8)]
    shapes += [(2, 2, 32, 8, 3, 1, 2, 8), (2, 2, 128, 40, 3, 1, 2, 16), (2, 2, 4, 5, 5, 2, 3, 10), (2, 2, 24, 128, 3, 1, 2, 9)]
    shapes = shapes if bench.cuda else [shapes[2], shapes[3], shapes[6], shapes[7]]
    for precision in bench.precisions:
        dtype, limit = bench.set(precision)
        for n, images, channels, outputs, k, padding, stride, side in shapes:
            x, w, b = (
                bench.random(n * images, channels, side, side),
                bench.random(n, outputs, channels, k, k),
                bench.random(n, outputs),
            )
            x, w = x.to(dtype), w.to(dtype).float()
            leaves = [t.double().requires_grad_() for t in (x, w, b)]
            pieces = zip(leaves[0].chunk(n), leaves[1], leaves[2], strict=True)
            exact = torch.cat([functional.conv2d(xi, wi, bi, stride, padding) for xi, wi, bi in pieces])
            dy, onto = bench.random(*exact.shape).to(dtype), bench.random(*x.shape).to(dtype)
            dx, dw, db = torch.autograd.grad(exact, leaves, dy.double())
            wanted, worst = (exact.detach(), dx, dx + onto.double(), dw, db), 0.0
            for splits in (1, 264):  # the sum over pixels in one piece, or in several
                fused = FusedConvolution(n, padding, stride)
                fused.splits_for = splits
                size = dw[0].numel()
                g = torch.full((n, 7 + size + outputs), torch.nan, device=bench.device)  # rows of a larger whole, as in a network
                made = [fused.forward(x, w, b), fused.input_gradient(x, dy, w), fused.input_gradient(x, dy, w, onto.clone())]
                fused.weight_gradient(x, dy, g[:, 7 : 7 + size].view_as(w), g[:, 7 + size :])
                made += [g[:, 7 : 7 + size].view_as(w), g[:, 7 + size :]]
                if dtype == bench.short and fused.may_hold(channels):  # held for the step, and with filters that it keeps
                    own = torch.full((n, 7 + size), torch.nan, device=bench.device)
                    filters = w.permute(0, 1, 3, 4, 2).to(dtype).contiguous()
                    view = fused.hold(own[:, 7:].view_as(w), filters)
                    fused.weight_gradient(x, dy, view, None)
                    held = [view, fused.forward(x, 0 * w, b), fused.input_gradient(x, dy, 0 * w)]
                    beside = 0.0 if own[:, :7].isnan().all() else torch.inf
                    worst = float(np.max([worst, beside, *map(apart, held, (dw, wanted[0], dx))]))
                errors = [apart(ours, wanted) for ours, wanted in zip(made, wanted, strict=True)]
                outside = 0.0 if g[:, :7].isnan().all() else torch.inf  # what lies beside must stay as it is
                worst = float(np.max([worst, outside, *errors]))
            yield Row(
                f"convolution {channels} to {outputs}, {k}×{k}, stride {stride}, {side}×{side}", bench.name(precision), worst, limit
            )


def pools(bench: Bench) -> Iterator[Row]:
    from fedagg.engines.fused import FusedPool, WindowPool
    from fedagg.engines.layers import MaxPool

    def check(layer: Any, what: str, exactly: Callable[[Tensor], Tensor], side: int, precision: str) -> Row:
        dtype, _ = bench.set(precision)
        x = bench.random(6, 21, side, side).to(dtype)
        leaf = x.double().requires_grad_()
        exact = exactly(leaf)
        dy = bench.random(*exact.shape).to(dtype)
        (dx,) = torch.autograd.grad(exact, leaf, dy.double())
        errors = apart(layer.forward(x), exact.detach()), apart(layer.backward(dy, True), dx)
        # Numbers are chosen, not made; but several windows' gradients add up.
        return Row(f"{what}, {side}×{side}", bench.name(precision), float(np.max(errors)), 1e-6 if dtype == torch.float32 else 5e-3)

    for precision in ("fp32", "short"):
        for side in (8, 7):
            yield check(FusedPool(), "ReLU and 2×2 pooling", lambda x: functional.max_pool2d(x, 2).relu(), side, precision)
        for k, stride, padding, side in ((3, 1, 1, 6), (3, 2, 1, 7), (2, 3, 1, 7)):
            layer = WindowPool(MaxPool(nn.MaxPool2d(k, stride, padding)))
            window = (k, stride, padding)
            what = f"pooling {k}×{k}, stride {stride}"
            yield check(layer, what, lambda x, window=window: functional.max_pool2d(x, *window), side, precision)


def norms(bench: Bench) -> Iterator[Row]:
    """Batch normalisation and ReLU, of so many pixels that their sums are in more spans than fit in one tile."""
    from fedagg.engines.fused import FusedNorm
    from fedagg.engines.layers import BatchNorm

    n, images, side = 2, 4, 64 if bench.cuda else 48
    for precision in ("fp32", "short"):
        dtype, limit = bench.set(precision)
        for channels in (5, 70) if bench.cuda else (5,):
            x, w, b = 3.0 + bench.random(n * images, channels, side, side), bench.random(n, channels), bench.random(n, channels)
            x, dy = x.to(dtype), bench.random(*x.shape).to(dtype)
            leaves = [t.double().requires_grad_() for t in (x, w, b)]
            pieces = zip(leaves[0].chunk(n), leaves[1], leaves[2], strict=True)
            exact = torch.cat([functional.batch_norm(xi, None, None, wi, bi, training=True).relu() for xi, wi, bi in pieces])
            wanted = [exact.detach(), *torch.autograd.grad(exact, leaves, dy.double())]
            dw, db, mean, var = (torch.zeros(n, channels, device=bench.device) for _ in range(4))
            norm = FusedNorm(BatchNorm(nn.BatchNorm2d(channels), w, b, dw, db, mean, var, torch.zeros_like(mean[:, :1])), then=1)
            norm.live = torch.ones(n, images, device=bench.device)
            norm.size = norm.live.sum(1, keepdim=True)
            made = [norm.forward(x), norm.backward(dy, True), dw, db]
            errors = [apart(ours, theirs) for ours, theirs in zip(made, wanted, strict=True)]
            yield Row(f"normalisation of {channels} channels, {side}×{side}", bench.name(precision), float(np.max(errors)), limit)


def steps(bench: Bench) -> Iterator[Row]:
    from fedagg.engines.fused import FusedConvolution, FusedStep
    from fedagg.engines.layers import Conv, Linear

    bench.set("fp32")
    n, d, batch, outputs, inputs = 3, 30000, 24, 100, 200
    for terms in ("", "shift", "prox", "memory", "mask", "pull", "shift prox memory mask pull"):
        for name in ("step", "step along a product", "step of filters"):
            w, g, memory = (bench.random(n, d + 4)[:, :d] for _ in range(3))
            shift, start, mask = bench.random(d), bench.random(d), (bench.random(d) > 0).float()
            numbers = ([0.0, 0.1, 0.7], [0.3, 0.2, 0.3], [0.1] * 3)
            rate, gain, pull = (torch.tensor(values, device=bench.device)[:, None] for values in numbers)
            prox, held, full = torch.tensor(0.2, device=bench.device), [], g.double()
            part = slice(4000, 4000 + outputs * inputs)
            if name == "step of filters":
                part, kernel = slice(4000, 4000 + 20 * 64 * 9), FusedConvolution(n, 1)
                filters = torch.empty(n, 20, 3, 3, 64, dtype=bench.short, device=bench.device)
                weights, dw = (rows[:, part].unflatten(1, (20, 64, 3, 3)) for rows in (w, g))
                full = full.clone()
                full[:, part] = g[:, part].double().view(filters.shape).permute(0, 1, 4, 2, 3).flatten(1)
                held.append(Conv(kernel, weights, None, kernel.hold(dw, filters), None))
            if name == "step along a product":
                dw = g[:, part].unflatten(1, (outputs, inputs))
                layer = Linear(w[:, part].unflatten(1, (outputs, inputs)), None, dw, None, half=False)
                layer.x, layer.dy = bench.random(n, batch, inputs), bench.random(n, batch, outputs)
                layer.short = short = torch.empty(n, outputs, inputs, dtype=bench.short, device=bench.device)
                full = full.clone()
                full[:, part] = (layer.dy.double().transpose(1, 2) @ layer.x.double()).flatten(1)
                held.append(layer)
            move = gain.double() * full
            move = move + pull.double() * w.double() if "pull" in terms else move
            move = move + shift.double() if "shift" in terms else move
            move = move + prox.double() * (w.double() - start.double()) if "prox" in terms else move
            move = move - memory.double() if "memory" in terms else move
            move = move * mask.double() if "mask" in terms else move
            exact = w.double() - rate.double() * move
            given = {"pull": pull, "prox": prox, "start": start, "shift": shift, "memory": memory, "mask": mask}
            step = FusedStep(w, g, held)
            yield Row(f"{name}, norm", "fp32", apart(step.norm(), full.norm(dim=1, keepdim=True)), 1e-5)
            step(rate, gain, *(value if key in terms or key == "start" else None for key, value in given.items()))
            yield Row(f"{name}: {terms or 'gradient alone'}", "fp32", apart(w, exact), 1e-6)
            if name == "step along a product":
                yield Row(
                    "step along a product: in 16 bits", bench.name("short"), apart(short, exact[:, part].view_as(short)), 5e-3
                )
            if name == "step of filters":
                wanted = exact[:, part].unflatten(1, (20, 64, 3, 3)).permute(0, 1, 3, 4, 2)
                yield Row("step of filters: as the convolution reads them", bench.name("short"), apart(filters, wanted), 5e-3)


def losses(bench: Bench) -> Iterator[Row]:
    from fedagg.engines.fused import softmax_loss

    n = 3
    for batch, classes in ((32, 10), (70, 80), (5, 700)):
        z, y = 5 * bench.random(n, batch, classes), torch.arange(n * batch, device=bench.device) % classes
        scale = bench.random(n, batch).abs()
        loss, dy = softmax_loss(z, y, scale)
        leaf = z.double().requires_grad_()
        exact = (functional.cross_entropy(leaf.flatten(0, 1), y, reduction="none").view(n, batch) * scale).sum(1)
        exact.sum().backward()
        assert leaf.grad is not None
        yield Row(f"loss of {classes} classes", "fp32", apart(loss, exact.detach()), 1e-5)
        yield Row(f"gradient of the loss of {classes} classes", "fp32", apart(dy, leaf.grad), 1e-5)


# --- whole networks


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(16, 20, 3, padding=1), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(3, 1, 1), nn.Flatten(),
        nn.Linear(20 * 4, 5),
    )  # fmt: skip


class Branches(nn.Module):
    """Sums of branches and of normalisations, a stride, channels that grow, and normalisations that nothing follows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (16, 24, 32))
        self.convs = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (16, 24))
        self.down, self.side = nn.Conv2d(32, 24, 3, stride=2, padding=1), nn.Conv2d(32, 24, 1, stride=2)
        self.twice = nn.ModuleList(nn.Sequential(nn.Conv2d(24, 24, k, padding=k // 2), nn.BatchNorm2d(24)) for k in (3, 3, 1))
        self.ends = nn.ModuleList(nn.Sequential(nn.Conv2d(24, 6, 1), nn.BatchNorm2d(6), nn.ReLU()) for _ in range(2))
        self.relu, self.mean, self.head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.convs[0](self.relu(self.norms[0](x)))], 1)
        x = torch.cat([x, self.convs[1](self.relu(self.norms[1](x)))], 1)
        x = self.norms[2](x)
        x = self.relu(self.down(x) + self.side(x))
        x = self.relu(self.twice[0](x) + x)
        x = self.relu(self.twice[1](x) + self.twice[2](x))
        return self.head(torch.flatten(self.mean(torch.cat([end(x) for end in self.ends], 1)), 1))  # type: ignore[no-any-return]


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.GroupNorm(3, 12),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


def lstm() -> nn.Module:
    from fedagg.models.text import LSTM, Last

    return nn.Sequential(nn.Embedding(9, 8), LSTM(8, 16, 2), Last(), nn.Linear(16, 5))


def transformer() -> nn.Module:
    from fedagg.models.text import Block, Last

    return nn.Sequential(nn.Embedding(9, 16), Block(16, 2), Block(16, 2), nn.LayerNorm(16), Last(), nn.Linear(16, 5))


TEXT = (lstm, transformer)


def networks(bench: Bench) -> Iterator[Row]:
    """Gradient, loss and running statistics of two clients, one of which has padding in its batch."""
    from fedagg.engines.base import Problem
    from fedagg.engines.stacked import StackedNetwork
    from fedagg.flat import Model
    from fedagg.work import ClientOptions

    n, batch = 2, 16 if bench.cuda else 4
    live = (batch, batch - batch // 4 - 1)
    for make in (plain, Branches, grouped, *TEXT):
        for precision in bench.precisions:
            _, limit = bench.set(precision)
            torch.manual_seed(int(torch.randint(1 << 30, (), generator=bench.generator)))
            module = make()
            x, y = bench.random(n * batch, 3, 8, 8), torch.arange(n * batch, device=bench.device) % 5
            if make in TEXT:
                x = torch.randint(9, (n * batch, 7), generator=bench.generator).to(bench.device)
            scale = torch.zeros(n, batch, device=bench.device)
            for row, count in zip(scale, live, strict=True):
                row[:count] = 1 / count
            problem = Problem(module, x, y, 5, ClientOptions(epochs=1, batch_size=batch), bench.device, half=precision == "short")
            network = StackedNetwork(problem, n, conv="fused")
            if precision == "short":
                network.dtype = bench.short
            network.w.copy_(problem.layout.pack(module).w.to(bench.device).expand(n, -1))
            network.w.add_(bench.random(*network.w.shape), alpha=0.02)
            network.buffers.fill_(1.0)
            begin = network.buffers.clone()
            wanted, rounded = [], []
            for i, count in enumerate(live):
                model, at = Model(network.w[i].double(), begin[i]), slice(i * batch, i * batch + count)
                wanted.append(autograd(module, problem.layout, model, x[at], y[at], torch.float64))
                if bench.cuda:
                    rounded.append(autograd(module, problem.layout, model, x[at], y[at], torch.float32, precision == "short"))
            made = []
            for _ in range(2):
                network.g.fill_(torch.nan)
                network.buffers.copy_(begin)
                loss = network.gradient(x, y, scale)
                made.append([network.g.clone(), loss.clone(), network.buffers.clone()])
            wanted = [torch.stack(part) for part in zip(*wanted, strict=True)]
            errors = [apart(ours, exact) for ours, exact in zip(made[0], wanted, strict=True)]
            if (
                precision != "fp32" and rounded
            ):  # what rounding does to a whole network is its own affair: as torch's rounding does, or little
                theirs = [torch.stack(part) for part in zip(*rounded, strict=True)]
                limit = max([0.03, *(1.5 * apart(part, exact) for part, exact in zip(theirs, wanted, strict=True))])
            what, again = make.__name__.lower(), all(torch.equal(a, b) for a, b in zip(*made, strict=True))
            yield Row(f"network '{what}': gradient, loss, statistics", bench.name(precision), float(np.max(errors)), 2 * limit)
            yield Row(f"network '{what}': the same bits twice", bench.name(precision), 0.0 if again else torch.inf, 0.0)


def autograd(
    module: nn.Module, layout: Any, model: Any, x: Tensor, y: Tensor, dtype: torch.dtype, short: bool = False
) -> list[Tensor]:
    """Gradient, loss and statistics of one client as torch makes them."""
    own = layout.unpack(model, copy.deepcopy(module).to(x.device, dtype).train())
    with torch.autocast(x.device.type, torch.bfloat16, enabled=short):
        loss = functional.cross_entropy(own(x.to(dtype) if x.is_floating_point() else x), y)
    loss.backward()
    return [
        torch.cat([p.grad.flatten() for p in own.parameters()]),
        loss.detach(),
        torch.cat([b.double().flatten() for b in own.buffers()] or [loss.new_zeros(0)]),
    ]


# --- whole runs on a GPU


def runs(bench: Bench) -> Iterator[Row]:
    """Captured graphs against the same steps without, bit for bit; and against one client after another."""
    if not bench.cuda:
        return
    torch.use_deterministic_algorithms(False)  # as users have it; some deterministic ones cannot be captured
    import fedagg
    from fedagg.engines import batched

    x, y = bench.random(480, 1, 28, 28).cpu(), torch.randint(0, 10, (480,), generator=bench.generator)
    data = fedagg.Dataset(x[:384], y[:384], x[384:], y[384:], classes=10)
    replays = 0
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal replays
        replays += 1
        replay(graph)

    def run(engine: str, precision: str, method: str, **more: Any) -> Tensor:
        settings = {
            "model": "mnist-cnn", "clients": 6, "participation": 1.0, "partition": "iid", "rounds": 2, "epochs": 2,
            "batch_size": 16, "lr": 0.01, "algorithm": method, "engine": engine, "precision": precision,
            "device": str(bench.device),
        }  # fmt: skip
        result = fedagg.run(data=data, **{**settings, **more})
        return torch.cat([p.detach().double().flatten().cpu() for p in result.model.parameters()])

    first = fedagg.run(data=data, model="mnist-cnn", algorithm="fedavg", clients=6, rounds=1, epochs=1, lr=1e-12, device="cpu")
    start = torch.cat([p.detach().double().flatten() for p in first.model.parameters()])
    for method in ("fedavg", "fedprox", "scaffold", "fedagg", "fedsam", "fedspeed", "delta-sgd"):
        own = {"fedagg": {"pace": "base"}, "delta-sgd": {"eta0": 0.01}}.get(method, {})  # high rates magnify rounding
        with mock.patch.object(torch.cuda.CUDAGraph, "replay", counted):
            captured = run("batched", "fp32", method, **own)
        yield Row(f"run, {method}: graphs were replayed", "fp32", 0.0 if replays else torch.inf, 0.0)
        replays = 0
        with mock.patch.object(batched.Stage, "capture", return_value=None):
            eager = run("batched", "fp32", method, **own)
        yield Row(f"run, {method}: graph against no graph", "fp32", apart(captured - start, eager - start), 1e-5)
        alone = run("sequential", "fp32", method, **own)
        # Not to rounding: in random images two pixels of a pool may be as good as equal.
        yield Row(f"run, {method}: against one client after another", "fp32", apart(captured - start, alone - start), 5e-2)
    for method in ("fedavg", "delta-sgd"):  # clients of unequal sizes; without pools, rounding stays rounding
        alone, ours, none = (
            run(engine, "fp32", method, model="mlp", partition="quantity", **own)
            for engine, own in (
                ("sequential", {}),
                ("batched", {}),
                ("sequential", {"rounds": 1, "lr": 1e-12, "algorithm": "fedavg"}),
            )
        )
        yield Row(f"run, {method}: clients of unequal sizes", "fp32", apart(ours - none, alone - none), 1e-4)
    for precision, limit in (("tf32", 1e-1), ("bf16", 2e-1)):
        found = run("batched", precision, "fedavg")
        yield Row("run, fedavg: against fp32", precision, apart(found - start, run("sequential", "fp32", "fedavg") - start), limit)


def texts(bench: Bench) -> Iterator[Row]:
    """The text models on a GPU: captured graphs against one client after another."""
    if not bench.cuda:
        return
    import fedagg

    x = torch.randint(30, (240, 20), generator=bench.generator)
    data = fedagg.Dataset(x[:200], x[:200, 0], x[200:], x[200:, 0], classes=30)
    for model in ("char-lstm", "char-transformer"):
        weights = []
        for engine, rate in (("batched", 0.05), ("sequential", 0.05), ("sequential", 1e-12)):
            result = fedagg.run(
                data=data, model=model, algorithm="fedavg", engine=engine, precision="fp32", device=str(bench.device), clients=5,
                participation=1.0, partition="quantity", rounds=2, epochs=2, batch_size=16, lr=rate,
            )  # fmt: skip
            weights.append(torch.cat([p.detach().double().flatten().cpu() for p in result.model.parameters()]))
        ours, alone, start = weights
        yield Row(f"run, {model}: against one client after another", "fp32", apart(ours - start, alone - start), 1e-2)


# --- all of it


class Launched(NamedTuple):
    known: set[str]
    seen: set[str]


class Launches:
    """Stands in for the module of kernels, and notes which are launched."""

    INNER = ("totals", "incoming_gradient", "moved", "tanh")  # called by other kernels

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.known = {name for name, value in vars(kernels).items() if hasattr(value, "fn") and name not in self.INNER}
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.seen.add(name)
        return getattr(self.kernels, name)


PARTS = (convolutions, pools, norms, steps, losses, networks, runs, texts)
BY_PRECISION = (convolutions, networks)  # take long, for the compiler makes every kernel anew


def interpreted(seed: int) -> Iterator[Row]:
    """The kernels alone."""
    yield from told(watched(PARTS, Bench(torch.device("cpu"), seed)))


def on_gpu(seed: int) -> Iterator[Row]:
    """In processes side by side: the GPU waits for the compiler, which works on one core in each."""
    jobs = [
        (part, precisions)
        for part in PARTS
        for precisions in ((("fp32",), ("tf32",), ("short",)) if part in BY_PRECISION else ((),))
    ]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from told(chain.from_iterable(pool.map(one_job, *zip(*jobs, strict=True), repeat(seed))))


def one_job(part: Callable[[Bench], Iterator[Row]], precisions: tuple[str, ...], seed: int) -> list[Row | Launched]:
    poison()
    return list(watched([part], Bench(torch.device("cuda"), seed, precisions)))


def watched(parts: Iterable[Callable[[Bench], Iterator[Row]]], bench: Bench) -> Iterator[Row | Launched]:
    """What the parts find, and in the end which kernels they launched."""
    from fedagg.engines import fused, kernels

    launches = Launches(kernels)
    with mock.patch.object(fused, "kernels", launches):
        for part in parts:
            yield from part(bench)
    yield Launched(launches.known, launches.seen)


def told(found: Iterable[Row | Launched]) -> Iterator[Row]:
    """The rows, and one on the kernels that nobody launched."""
    known, seen = set[str](), set[str]()
    for each in found:
        if isinstance(each, Row):
            yield each
        else:
            known, seen = known | each.known, seen | each.seen
    missed = sorted(known - seen)
    what = f"kernels launched: {len(known) - len(missed)} of {len(known)}"
    yield Row(", not ".join([what, *missed]), "", float(len(missed)), 0.0)


def poison() -> None:
    """New memory is NaN. (Torch's switch for it comes with deterministic algorithms; those that it has none for only warn.)"""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    warnings.filterwarnings("ignore", message=".*deterministic")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--allow-missing", action="store_true", help="exit with status 0 where there is no GPU")
    parser.add_argument("--interpret", action="store_true", help="kernels alone, in Triton's interpreter on the CPU")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of the inputs; a new one every time")
    given = parser.parse_args(arguments)
    if not given.interpret and not torch.cuda.is_available():
        print("GPU check: NOT RUN, for there is no CUDA device here")
        return 0 if given.allow_missing else 2
    try:
        import triton
    except ImportError:
        print("GPU check: NOT RUN, for Triton is not installed: pip install triton")
        return 2
    where = "Triton's interpreter" if given.interpret else torch.cuda.get_device_name()
    print(f"GPU check on {where}, torch {torch.__version__}, Triton {triton.__version__}, seed {given.seed}")
    poison()
    begun, failed, count = time.perf_counter(), 0, 0
    print(f"{'what':<62} {'precision':<10} {'error':>9} {'limit':>9}")
    for row in interpreted(given.seed) if given.interpret else on_gpu(given.seed):
        count, failed = count + 1, failed + (not row.passed)
        words = "" if row.passed else "  FAILED"
        print(f"{row.what:<62} {row.precision:<10} {row.error:>9.2g} {row.limit:>9.2g}{words}", flush=True)
    print(f"{count - failed} of {count} passed in {time.perf_counter() - begun:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
