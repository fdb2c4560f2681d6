"""Does a form of network do what the module does? A stranger's module may share weights, keep what it has seen, look at the whole
batch or draw random numbers, and no list of such things is complete. So it is tried, on a few samples, against plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedagg import seeding
from fedagg.engines.base import Setting
from fedagg.engines.batched import Network, seeded
from fedagg.flat import Workspace

MOST = 8  # samples
WITHIN = 1e-2  # relative: rounding, tf32 included, is below, and what a module does differently is above


class Trial:
    """One step of two clients, of which the second may have fewer samples than the first."""

    def __init__(self, setting: Setting) -> None:
        self.setting = replace(setting, module=copy.deepcopy(setting.module), half=False)
        self.size = min(MOST, len(setting.x))
        self.model = setting.layout.pack(setting.module).to(setting.device)
        with seeding.seeded_global(0, setting.device):
            before = self.drawn()
            self.expected = {count: self.plain(count) for count in (self.size, self.fewer)}
            self.draws = not torch.equal(before, self.drawn())

    @property
    def fewer(self) -> int:
        return self.size // 2 + 1 if self.size > 2 else self.size

    def drawn(self) -> Tensor:
        """Where torch's generator stands."""
        device = self.setting.device
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def plain(self, count: int) -> list[Tensor]:
        """Gradient, loss and buffers of a step on so many samples."""
        s = self.setting
        space = Workspace(s.module, s.layout, s.device)
        space.load(self.model)
        space.module.train()
        loss = s.loss(space.module(s.x[:count]), s.y[:count]).mean()
        loss.backward()
        return [space.g, loss.detach(), space.statistics()]

    def passed(self, make: Callable[[Setting, int], Network], padded: bool) -> bool:
        """Is the form's step the module's own? With `padded`, the second client has fewer samples, and padding in their place."""
        s, counts = self.setting, (self.size, self.fewer if padded else self.size)
        scale = torch.zeros(2, self.size, device=s.device)
        for row, count in zip(scale, counts, strict=True):
            row[:count] = 1 / count
        try:
            network = make(s, 2)
            network.w.copy_(self.model.w.expand(2, -1))
            network.buffers.copy_(self.model.buffers.expand(2, -1))
            with seeded(network, 0, s.device):
                loss = network.gradient(torch.cat([s.x[: self.size]] * 2), torch.cat([s.y[: self.size]] * 2), scale)
        except Exception:  # whatever a stranger's forward makes of several clients at once
            return False
        if self.draws:  # every form draws its own numbers, and there is nothing to compare
            return bool(torch.isfinite(loss).all())
        made = zip(network.g, loss, network.buffers, strict=True)
        return all(
            alike(a, b) for count, ours in zip(counts, made, strict=True) for a, b in zip(ours, self.expected[count], strict=True)
        )


def alike(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding; where both are the same infinity, too."""
    apart = torch.where(a == b, torch.zeros_like(a), a - b).norm()
    finite = torch.where(torch.isfinite(b), b, torch.zeros_like(b))
    return bool(apart <= WITHIN * finite.norm() + 1e-6)
