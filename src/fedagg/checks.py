"""What can be said before any long work starts: does what was given fit together? If not, one line says what, and what to do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedagg import data as sets
from fedagg import seeding
from fedagg.config import Config, resolve
from fedagg.data import Dataset
from fedagg.engines.base import Loss, cross_entropy
from fedagg.errors import SettingError


def given(data: Dataset | None, model: nn.Module | None, parts: Sequence[Any] | None) -> dict[str, Any]:
    """What the configuration has to say about things that are no settings."""
    known: dict[str, Any] = {}
    if data is not None:
        if not isinstance(data, Dataset):
            raise SettingError("data", type(data).__name__, "give fedagg.Dataset(x_train, y_train, x_test, y_test)")
        known["dataset"] = data.name if data.name in sets.names() else "custom"
    if model is not None:
        if not isinstance(model, nn.Module):
            raise SettingError(
                "model", getattr(model, "__name__", type(model).__name__), "give a torch module, made, or a network's name"
            )
        known["model"] = "custom"
    if parts is not None:
        known |= {"partition": "custom", "clients": len(parts)}
    return known


def agreed(config: Config | None, given: dict[str, Any], preset: str | None, settings: dict[str, Any]) -> Config:
    """The configuration of all that was said. Settings that contradict what is there are a mistake."""
    for name, value in given.items():
        if settings.get(name) not in (None, value):
            raise SettingError(name, settings[name], f"what was given from Python is {value!r}; leave the setting out")
    if config is None:
        return resolve({**given, **settings}, preset=preset)
    if preset is not None:
        raise SettingError("preset", preset, "a configuration is complete as it is: give one of the two")
    changes = {**given, **{name: value for name, value in settings.items() if value is not None}}
    return config.changed(**changes) if changes else config


def indices(parts: Sequence[Any], data: Dataset) -> Sequence[Any]:
    """Indices of every client's samples; masks are taken for what they mark."""
    checked = []
    for client, part in enumerate(parts):
        rows = np.asarray(part)
        if rows.dtype == bool and rows.shape == (len(data),):
            rows = np.flatnonzero(rows)
        whole = np.issubdtype(rows.dtype, np.integer) and rows.ndim == 1 and len(rows) > 0
        if not whole or rows.min() < 0 or rows.max() >= len(data):
            words = f"give at least one index from 0 to {len(data) - 1}, whole numbers, or a mask of {len(data)}"
            raise SettingError("parts", f"client {client}", words)
        checked.append(rows)
    return checked


def try_out(config: Config, module: nn.Module, loss: Loss, data: Dataset, parts: Sequence[Any]) -> None:
    """The first mini-batch of all: what does not fit together is said here, in one line, and not by whoever meets it first."""
    if any(isinstance(p, UninitializedParameter | UninitializedBuffer) for p in (*module.parameters(), *module.buffers())):
        raise SettingError("model", config.model, "has layers that do not know their sizes yet: run a batch through it first")
    x, y = data.x_train[:2], data.y_train[:2]
    probe = copy.deepcopy(module).train()
    with seeding.seeded_global(0, torch.device("cpu")):
        try:
            output = probe(x)
        except Exception as error:  # whatever layers say to what they cannot take
            words = (
                f"does not take samples of shape {tuple(data.shape)} in {str(x.dtype)[6:]}: {str(error).strip().splitlines()[0]}"
            )
            raise SettingError("model", config.model, words) from None
        if loss is cross_entropy and output.dim() == 2 and output.shape[1] < data.classes:
            words = f"puts out {output.shape[1]} numbers a sample; labels from 0 to {data.classes - 1} need {data.classes}"
            raise SettingError("model", config.model, words)
        try:
            losses = loss(output, y)
        except Exception as error:  # likewise
            raise SettingError(
                "loss", name_of(loss), f"does not take the model's output: {str(error).strip().splitlines()[0]}"
            ) from None
        if losses.shape != y.shape[:1]:
            words = f"must give one number a sample, and gave shape {tuple(losses.shape)} for {len(y)} (in torch: reduction='none')"
            raise SettingError("loss", name_of(loss), words)
        try:
            probe(x[:1])
        except ValueError:  # batch normalisation has nothing to take the deviation of
            for client, part in enumerate(parts):
                if len(part) % config.batch_size == 1 or config.batch_size == 1:
                    words = (
                        f"leaves client {client} with a batch of one, and the model's batch normalisation needs two; choose another"
                    )
                    raise SettingError("batch_size", config.batch_size, words) from None


def name_of(loss: Loss) -> str:
    return getattr(loss, "__qualname__", type(loss).__qualname__)
