"""Choose the form of engine: by its name, or from a table of measurements.

A table and not a measurement at every start: the form decides the order of sums, and the same seed must give the same bytes
whatever else the machine is doing. `fedagg bench` measures the forms on your machine.
"""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fedagg.data.mapped import on_disk
from fedagg.engines import stacked
from fedagg.engines.base import Problem
from fedagg.engines.batched import Batched, has_triton
from fedagg.engines.conv import channels_last
from fedagg.engines.distributed import Distributed
from fedagg.engines.sequential import Sequential
from fedagg.engines.threaded import Shared, Threaded
from fedagg.engines.trial import Trial
from fedagg.engines.vmapped import VmappedNetwork
from fedagg.engines.windowed import Windowed, window
from fedagg.errors import SettingError
from fedagg.models import PUBLISHED, has_dropout
from fedagg.models.text import LSTM, CausalAttention
from fedagg.work import Engine, cross_entropy

RECURRENT = "recurrent layers"


class EngineOptions(Protocol):
    """The settings that engines read."""

    @property
    def model(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def threads(self) -> int: ...


def build(name: str, problem: Problem, options: EngineOptions) -> Engine:
    """The engine of that name, on its own copy of the problem, so that the given one is not changed."""
    if (whole := on_disk(problem.x)) is not None:
        some = window(problem, whole)
        some = replace(some, x=ordered(some))
        return Windowed(on(some, name, options), whole, problem.y, some)
    return on(replace(problem, x=ordered(problem)), name, options)


def on(problem: Problem, name: str, options: EngineOptions) -> Engine:
    problem = replace(problem, half=options.precision == "bf16")
    if name == "distributed" or (name == "auto" and int(os.environ.get("WORLD_SIZE", "1")) > 1):
        return Distributed(problem, functools.partial(pick, options=options))
    if name == "sequential":
        return Sequential(problem)
    return batched(problem, options) if name == "batched" else pick(problem, options)


def pick(problem: Problem, options: EngineOptions) -> Engine:
    """The engine for `auto`: the fastest one in the measurements (see the page on engines)."""
    cores, module = options.threads or torch.get_num_threads(), problem.module
    problem = with_graph(problem)
    trial = on_trial(problem, options)
    what = heavy_layers(module)
    if problem.device.type == "cpu" and what:
        if written(problem, trial) and what != RECURRENT:  # torch's own cell is faster than the written-out one
            return noted(
                Threaded(problem, cores, stacked.StackedNetwork), f"no autograd; {what} can keep one core busy, but not several"
            )
        if cores > 1 and not (has_dropout(module) if trial is None else trial.draws or trial.alone):
            return noted(Threaded(problem, cores), f"{what} can keep one core busy, but not several")
        return noted(Sequential(problem), f"{what} on a CPU gain nothing from stacking")
    engine = together(problem, options, trial)
    if engine is None:
        return noted(Sequential(problem), "the network does not train the same in a batch of clients")
    return shared(engine, cores)


def on_trial(problem: Problem, options: EngineOptions) -> Trial | None:
    """A trial of the network and loss; None for the package's own, which need none."""
    return Trial(problem) if options.model not in PUBLISHED or problem.loss is not cross_entropy else None


def batched(problem: Problem, options: EngineOptions) -> Engine:
    """The engine for `batched`, on any device; an error if the model does not allow it."""
    problem = with_graph(problem)
    engine = together(problem, options, on_trial(problem, options))
    if engine is None:
        raise SettingError(
            "engine", "batched", "the model does not train the same in a batch of clients; choose auto or sequential"
        )
    return shared(replace(engine, strict=True), options.threads or torch.get_num_threads())


def shared(engine: Batched, threads: int) -> Engine:
    """On several threads of a CPU, one stack per thread. Written-out layers have their own generators; other networks may draw from
    torch's, which all threads share."""
    own = engine.network is not VmappedNetwork and engine.problem.device.type == "cpu"
    return Shared(engine, threads) if own and threads > 1 else engine


def together(problem: Problem, options: EngineOptions, trial: Trial | None) -> Batched | None:
    """All clients in one batch: with written-out layers if all layers have them, else with vmap; captured on a GPU. None if a
    network fails its trial."""
    cuda = problem.device.type == "cuda"
    words = ", captured as a graph" if cuda else ""
    if written(problem, trial):
        form = "fused" if cuda and has_triton() else "loop"
        make = functools.partial(stacked.StackedNetwork, conv=form)
        words = "stacked layers, no autograd" + (f", {form} convolutions" if form == "fused" else "") + words
        return Batched(problem, make, options.chunk, words, capture=cuda, padding=True)
    if trial is not None and not trial.passed(VmappedNetwork, padded=False):
        return None
    padding = None if trial is None else trial.passed(VmappedNetwork, padded=True)
    return Batched(problem, VmappedNetwork, options.chunk, "vmap over clients" + words, capture=cuda, padding=padding)


def with_graph(problem: Problem) -> Problem:
    """The problem with its network's layers, if they are written out. They are traced here, once: tracing is not thread-safe."""
    return replace(problem, graph=stacked.graph_of(problem))


def written(problem: Problem, trial: Trial | None) -> bool:
    """Does the network consist only of written-out layers?"""
    tried = trial is None or (not trial.random and trial.passed(stacked.StackedNetwork, padded=True))
    return tried and problem.graph is not None


def heavy_layers(module: nn.Module) -> str:
    """The kind of layers in a module for which one small batch keeps a core busy; "" if there are none."""
    kinds = {RECURRENT: nn.RNNBase | LSTM, "convolutions": nn.Conv2d, "attention": CausalAttention}
    return next((name for name, kind in kinds.items() if any(isinstance(part, kind) for part in module.modules())), "")


def convolves(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Conv2d) for m in module.modules())


def ordered(problem: Problem) -> Tensor:
    """The images in the memory order in which a CPU convolves and pools fastest. All engines use it, so that they round alike. They
    stay as they are if the module does not accept that order, e.g. because it flattens with `view`."""
    if problem.device.type == "cpu" and problem.x.dim() == 4 and convolves(problem.module):
        try:
            with torch.no_grad():
                copy.deepcopy(problem.module).eval()(channels_last(problem.x[:2].clone()))
        except RuntimeError:
            return problem.x
        return channels_last(problem.x)
    return problem.x


def noted(engine: Sequential | Threaded, why: str) -> Engine:
    engine.note += f" ({why})"
    return engine
