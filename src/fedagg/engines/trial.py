"""Does a form of network do what the module does? A stranger's module may share weights, keep what it has seen, look at the whole
batch or draw random numbers, and no list of such things is complete. So it is tried, on a few samples, against plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fedagg import seeding
from fedagg.engines.base import Setting
from fedagg.engines.batched import Network, seeded
from fedagg.errors import SettingError, first_line
from fedagg.flat import Model, Workspace

MOST = 8  # samples
WITHIN = 1e-2  # relative: rounding is below, and what a module does differently is above
NUDGE = 1e-6  # in a deep network it is not: what so small a change of the weights does is rounding as well


class Trial:
    """One step of two clients, of which the second may have fewer samples than the first."""

    def __init__(self, setting: Setting) -> None:
        self.setting = replace(setting, module=copy.deepcopy(setting.module), half=False)
        self.size = min(MOST, len(setting.x))
        self.model = setting.layout.pack(setting.module).to(setting.device)
        zero = torch.zeros((), device=setting.device)
        self.begin = [zero, zero, self.model.buffers]  # gradient and loss are judged by their size, buffers by how they changed
        nudged = replace(self.model, w=(1 + NUDGE) * self.model.w)
        with seeding.seeded_global(0, setting.device), exact():
            before = self.drawn()
            self.expected = {count: self.first(count) for count in (self.size, self.fewer)}
            self.draws = not torch.equal(before, self.drawn())
            again = {count: self.plain(count, nudged) for count in self.expected}
        self.noise = {count: [apart(a, b) for a, b in zip(again[count], self.expected[count], strict=True)] for count in again}

    @property
    def fewer(self) -> int:
        return self.size // 2 + 1 if self.size > 2 else self.size

    def drawn(self) -> Tensor:
        """Where torch's generator stands."""
        device = self.setting.device
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def first(self, count: int) -> list[Tensor]:
        try:
            return self.plain(count, self.model)
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
                raise
            words = f"does not get through its first step: {first_line(error)}"
        raise SettingError("model", type(self.setting.module).__name__, words)

    def plain(self, count: int, model: Model) -> list[Tensor]:
        """Gradient, loss and buffers of a step on so many samples."""
        s = self.setting
        space = Workspace(s.module, s.layout, s.device)
        space.load(model)
        space.module.train()
        loss = s.loss(space.module(s.x[:count]), s.y[:count]).mean()
        loss.backward()
        return [space.g, loss.detach(), space.statistics()]

    def passed(self, make: Callable[[Setting, int], Network], padded: bool) -> bool:
        """Is the form's step the module's own? With `padded`, the second client has fewer samples, and padding in their place."""
        counts = (self.size, self.fewer if padded else self.size)
        try:
            made = self.step(make, counts, self.size - 1)
            other = self.step(make, counts, 0) if self.draws else made
        except Exception:  # whatever a stranger's forward makes of several clients at once
            return False
        if self.draws:  # every form draws its own numbers; but what lies in the padding must make no difference
            sizes = [float(part.nan_to_num(posinf=0.0, neginf=0.0).norm()) for part in made]
            return all(apart(a, b) <= 1e-4 * size + 1e-6 for a, b, size in zip(made, other, sizes, strict=True))
        for row, count in enumerate(counts):
            for ours, expected, noise, begin in zip(made, self.expected[count], self.noise[count], self.begin, strict=True):
                if not apart(ours[row], expected) <= WITHIN * apart(expected, begin) + 10 * noise + 1e-6:
                    return False
        return True

    def step(self, make: Callable[[Setting, int], Network], counts: tuple[int, int], filler: int) -> list[Tensor]:
        """Gradients, losses and buffers of both clients; in place of samples that the second does not have, one of its own."""
        s, size = self.setting, self.size
        scale = torch.zeros(2, size, device=s.device)
        for row, count in zip(scale, counts, strict=True):
            row[:count] = 1 / count
        order = torch.arange(size).repeat(2)
        order[size + counts[1] :] = filler
        network = make(s, 2)
        network.w.copy_(self.model.w.expand(2, -1))
        network.buffers.copy_(self.model.buffers.expand(2, -1))
        with seeded(network, 0, s.device), exact():
            loss = network.gradient(s.x[order], s.y[order], scale)
        return [network.g, loss, network.buffers]


@contextmanager
def exact() -> Iterator[None]:
    """Products in float32, whatever the run itself is to have."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def apart(a: Tensor, b: Tensor) -> float:
    """The distance; none where both are the same infinity."""
    return float(torch.where(a == b, 0.0, a - b).norm())
