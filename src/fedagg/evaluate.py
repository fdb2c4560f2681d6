"""Loss and accuracy of the global model on the whole test set."""

from __future__ import annotations

import torch
from torch import Tensor

from fedagg.engines.base import Setting
from fedagg.engines.batched import activations
from fedagg.errors import FedaggError
from fedagg.flat import Model, Workspace

BATCH = {"cpu": 500, "cuda": 10_000}
ROOM = 4 << 30  # bytes that the layers' outputs of one batch may take on a GPU


def batch_size(setting: Setting) -> int:
    """Test samples at a time: on a GPU as many as keep it busy, of deep networks as many as fit beside the training. By the network
    alone, not by the memory that happens to be free: sums are to be the same every time."""
    most = BATCH[setting.device.type]
    return most if setting.device.type == "cpu" else max(1, min(most, ROOM // (4 * max(1, activations(setting)))))


def parted(rows: Tensor, size: int) -> list[Tensor]:
    """Rows in parts of a size, and never one alone behind others: some modules do not take that."""
    parts = list(rows.split(size))
    return [*parts[:-2], rows[len(rows) - 1 - size :]] if len(parts) > 1 and len(parts[-1]) == 1 else parts


class Evaluator:
    def __init__(self, setting: Setting, x: Tensor, y: Tensor) -> None:
        self.setting = setting
        self.space = Workspace(setting.module, setting.layout, setting.device)
        self.x, self.y = x.to(setting.device), y.to(setting.device)
        self.batch = batch_size(setting)
        self.careful = True  # give the module copies: until it is known that it leaves what it is given alone

    @torch.no_grad()
    def samples(self, model: Model) -> tuple[Tensor, Tensor]:
        """Loss and hit of every test sample."""
        self.space.load(model)
        self.space.module.eval()
        losses, hits, wrote = [], [], False
        for x, y in zip(parted(self.x, self.batch), parted(self.y, self.batch), strict=True):
            given = (x.clone(), y.clone()) if self.careful else (x, y)
            before = [part._version for part in given]
            output = self.space.module(given[0])
            losses.append(self.setting.loss(output, given[1]))
            hits.append(output.argmax(-1) == y)
            wrote |= before != [part._version for part in given]
        if wrote and not self.careful:
            raise FedaggError("model: it wrote to the test samples, and did not when it first saw them; give it x.clone()")
        self.careful = wrote
        return torch.cat(losses), torch.cat(hits)

    def __call__(self, model: Model) -> tuple[float, float]:
        """Mean loss and accuracy; one transfer from the device."""
        losses, hits = self.samples(model)
        loss, accuracy = torch.stack([losses.double().mean(), hits.double().mean()]).tolist()
        return loss, accuracy

    def personal(self, model: Model, own: Tensor) -> float:
        """Accuracy on the test set re-weighted to the label distribution of a client's own samples; not a number where the test set
        has none of its labels."""
        _, hits = self.samples(model)
        classes = self.setting.classes
        wanted = torch.bincount(self.setting.y[own.to(self.y.device)], minlength=classes).double()
        present = torch.bincount(self.y, minlength=classes).double()
        weights = (wanted / present.clamp_min(1))[self.y]
        return float((weights * hits).sum() / weights.sum())
