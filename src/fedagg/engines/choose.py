"""Which form of engine to use: asked for by name, or picked by measuring."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from fedagg.engines import stacked
from fedagg.engines.base import Engine, Setting
from fedagg.engines.batched import Batched
from fedagg.engines.sequential import Sequential
from fedagg.engines.vmapped import VmappedNetwork


class Wishes(Protocol):
    """What the configuration says about engines."""

    @property
    def chunk(self) -> int: ...
    @property
    def precision(self) -> str: ...


def build(name: str, setting: Setting, wishes: Wishes) -> Engine:
    set_precision(wishes.precision)
    cuda = setting.device.type == "cuda"
    if name == "sequential":
        return Sequential(setting)
    if stacked.supported(setting.module):
        form = "fused" if cuda else "loop"
        make = functools.partial(stacked.StackedNetwork, conv=form)
        return Batched(setting, make, wishes.chunk, f"stacked layers, {form} convolutions", capture=cuda)
    return Batched(setting, VmappedNetwork, wishes.chunk, "vmap over clients", capture=cuda)


def set_precision(precision: str) -> None:
    """tf32 or plain float32 for torch's own products; bf16 is the networks' business."""
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
