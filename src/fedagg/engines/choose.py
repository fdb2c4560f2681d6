"""Which form of engine to use: asked for by name, or from a table of measurements.

A table rather than a stop-watch at every start: the form decides the order of sums, and the same seed must give the same bytes
whatever else the machine was doing. `fedagg bench` measures the forms on your machine.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from fedagg.engines import stacked
from fedagg.engines.base import Engine, Setting
from fedagg.engines.batched import Batched
from fedagg.engines.conv import channels_last
from fedagg.engines.distributed import Distributed
from fedagg.engines.sequential import Sequential
from fedagg.engines.threaded import Threaded, draws
from fedagg.engines.vmapped import VmappedNetwork


class Wishes(Protocol):
    """What the configuration says about engines."""

    @property
    def chunk(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def threads(self) -> int: ...


def build(name: str, setting: Setting, wishes: Wishes) -> Engine:
    set_precision(wishes.precision)
    setting.half = wishes.precision == "bf16"
    lay_out(setting)
    if name == "distributed" or (name == "auto" and int(os.environ.get("WORLD_SIZE", "1")) > 1):
        return Distributed(setting, functools.partial(pick, wishes=wishes))
    if name == "sequential":
        return Sequential(setting)
    return batched(setting, wishes) if name == "batched" else pick(setting, wishes)


def pick(setting: Setting, wishes: Wishes) -> Engine:
    """`auto`: what was fastest where it was measured (see the page on engines)."""
    cores = wishes.threads or os.cpu_count() or 1
    if setting.device.type == "cpu" and convolves(setting.module):
        if stacked.supported(setting):
            return noted(Threaded(setting, cores, stacked.StackedNetwork), "no autograd; convolutions fill a core, not several")
        if cores > 1 and not draws(setting.module):
            return noted(Threaded(setting, cores), "convolutions fill a core, not several")
        return noted(Sequential(setting), "convolutions on a CPU gain nothing from stacking")
    return batched(setting, wishes)


def batched(setting: Setting, wishes: Wishes) -> Engine:
    """All clients in one batch: written-out layers where there are all, vmap for everything else; captured on a GPU."""
    cuda = setting.device.type == "cuda"
    make: Callable[[Setting, int], stacked.StackedNetwork | VmappedNetwork] = VmappedNetwork
    words = "vmap over clients"
    written = stacked.supported(setting)
    if written:
        form = "fused" if cuda and has_triton() else "loop"
        make = functools.partial(stacked.StackedNetwork, conv=form)
        words = "stacked layers, no autograd" + (f", {form} convolutions" if form == "fused" else "")
    return Batched(setting, make, wishes.chunk, words + (", captured as a graph" if cuda else ""), capture=cuda, padding=written)


def convolves(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Conv2d) for m in module.modules())


def lay_out(setting: Setting) -> None:
    """Images in the order of memory in which a CPU convolves and pools fastest, for every engine alike, so that they round alike.
    A module that flattens with `view` does not take it."""
    if setting.device.type == "cpu" and setting.x.dim() == 4 and convolves(setting.module):
        try:
            with torch.no_grad():
                copy.deepcopy(setting.module).eval()(channels_last(setting.x[:2]))
        except RuntimeError:
            return
        setting.x = channels_last(setting.x)


def noted(engine: Sequential | Threaded, why: str) -> Engine:
    engine.note += f" ({why})"
    return engine


def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def set_precision(precision: str) -> None:
    """tf32 or plain float32 for torch's own products; bf16 is the networks' business."""
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
