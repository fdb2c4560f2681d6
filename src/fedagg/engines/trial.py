"""Does a form of network compute the same as the module? A user's module may share weights, keep what it has seen, look at the
whole batch or draw random numbers, and no list of such things is complete. So it is compared with autograd on a few samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedagg import seeding
from fedagg.engines.base import Problem, exact_products
from fedagg.engines.batched import NUDGE, WITHIN, Network, seeded, without_dropout
from fedagg.engines.graph import hooked, traced
from fedagg.errors import SettingError, first_line
from fedagg.flat import Model, Workspace, copy_module
from fedagg.work import Loss, cross_entropy

MOST = 8  # samples per client


class Trial:
    """One step of two clients, of which the second may have fewer samples than the first. Dropout draws different numbers in every
    form, so the step is tried without it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = replace(problem, module=copy_module(problem.module), half=False)
        module = self.problem.module
        self.size = min(MOST, len(problem.x))
        # From all over the data, which may be sorted: a module that looks at other clients' samples must find different ones there.
        self.samples = torch.linspace(0, len(problem.x) - 1, 2 * self.size).round().long().view(2, -1)
        self.model = problem.layout.pack(problem.module).to(problem.device)
        zero = torch.zeros((), device=problem.device)
        self.begin = [zero, zero, self.model.buffers]  # gradient and loss are judged by their size, buffers by their change
        nudged = replace(self.model, w=(1 + NUDGE) * self.model.w)
        # Some modules do more in a step than gradient and buffers show: these train only one client at a time.
        self.alone = hooked(module) or any(getattr(part, "max_norm", None) is not None for part in module.modules())
        with seeding.seeded_global(0, problem.device), exact_products():
            before, elsewhere = self.drawn(), drawn_elsewhere()
            self.first(0, self.size)
            self.draws = not torch.equal(before, self.drawn())
            module = self.problem.module = without_dropout(module)
            self.problem.graph = traced(module, problem.x.dim() - 1)
            before = self.drawn()
            self.expected = {at: self.first(*at) for at in ((0, self.size), (1, self.size), (1, self.fewer))}
            self.random = not torch.equal(before, self.drawn())  # random numbers outside dropout layers
            self.alone |= elsewhere != drawn_elsewhere()
            again = {at: self.plain(*at, nudged) for at in self.expected}
        self.separate = problem.loss is cross_entropy or separate(
            problem.loss, self.output.detach(), problem.y[self.samples[1, : self.fewer]]
        )
        self.noise = {at: [apart(a, b) for a, b in zip(again[at], self.expected[at], strict=True)] for at in again}

    @property
    def fewer(self) -> int:
        return self.size // 2 + 1 if self.size > 2 else self.size

    def drawn(self) -> Tensor:
        """The state of torch's generator."""
        device = self.problem.device
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def first(self, client: int, count: int) -> list[Tensor]:
        try:
            return self.plain(client, count, self.model)
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
                raise
            words = f"fails in its first step: {first_line(error)}"
        raise SettingError("model", type(self.problem.module).__name__, words)

    def plain(self, client: int, count: int, model: Model) -> list[Tensor]:
        """Gradient, loss and buffers of a client's step on this many samples."""
        s, samples = self.problem, self.samples[client, :count]
        space = Workspace(s.module, s.layout, s.device)
        space.load(model)
        space.module.train()
        before = numbers(space.module)
        self.output = space.module(s.x[samples])
        loss = s.loss(self.output, s.y[samples]).mean()
        loss.backward()
        self.alone |= not torch.equal(space.w, model.w) or before != numbers(space.module)
        return [space.g, loss.detach(), space.statistics()]

    def passed(self, make: Callable[[Problem, int], Network], padded: bool) -> bool:
        """Does the form make the same step as the module? With `padded`, the second client has fewer samples, and padding."""
        if self.alone or (padded and not self.separate):
            return False
        counts = (self.size, self.fewer if padded else self.size)
        try:
            made = self.step(make, counts, self.size - 1)
            other = self.step(make, counts, 0) if self.random else made
        except Exception:  # a user's forward may raise anything for several clients at once
            return False
        if self.random:  # every form draws its own numbers, but the content of the padding must make no difference
            sizes = [float(part.nan_to_num(posinf=0.0, neginf=0.0).norm()) for part in made]
            return all(apart(a, b) <= 1e-4 * size + 1e-6 for a, b, size in zip(made, other, sizes, strict=True))
        for at in enumerate(counts):
            for ours, expected, noise, begin in zip(made, self.expected[at], self.noise[at], self.begin, strict=True):
                if not apart(ours[at[0]], expected) <= WITHIN * apart(expected, begin) + 10 * noise + 1e-6:
                    return False
        return True

    def step(self, make: Callable[[Problem, int], Network], counts: tuple[int, int], filler: int) -> list[Tensor]:
        """Gradients, losses and buffers of both clients. Samples that the second does not have are replaced by one of its own."""
        s, size = self.problem, self.size
        scale = torch.zeros(2, size, device=s.device)
        for row, count in zip(scale, counts, strict=True):
            row[:count] = 1 / count
        order = self.samples.clone()
        order[1, counts[1] :] = self.samples[1, filler]
        order = order.view(-1)
        network = make(s, 2)
        network.w.copy_(self.model.w.expand(2, -1))
        network.buffers.copy_(self.model.buffers.expand(2, -1))
        with seeded(network, 0, s.device), exact_products():
            loss = network.gradient(s.x[order], s.y[order], scale)
        return [network.g, loss, network.buffers]


def separate(loss: Loss, output: Tensor, y: Tensor) -> bool:
    """Is the loss of a sample independent of the other samples? Only then is padding allowed. Also tried on outputs of many sizes,
    because those of an untrained network are all alike."""
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    for given in (output, noise, 10 * noise):
        try:
            whole = loss(given.clone(), y.clone())
            parts = [loss(one.clone(), labels.clone()) for one, labels in zip(given.split(2), y.split(2), strict=True)]
        except Exception:  # outputs that it does not accept, such as numbers that are not probabilities
            continue
        if not torch.allclose(whole, torch.cat(parts), rtol=1e-4, atol=1e-6, equal_nan=True):
            return False
    return True


def numbers(module: nn.Module) -> dict[tuple[str, str], Any]:
    """The plain attributes of a module's parts."""
    plain = (bool, int, float, str)
    return {(name, key): v for name, part in module.named_modules() for key, v in vars(part).items() if isinstance(v, plain)}


def drawn_elsewhere() -> list[Any]:
    """The state of Python's and NumPy's generators."""
    return [random.getstate(), repr(np.random.get_state())]  # noqa: NPY002


def apart(a: Tensor, b: Tensor) -> float:
    """The distance between two tensors; entries that are the same infinity, or both NaN, count as equal."""
    return float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).norm())
