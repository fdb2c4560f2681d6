"""Models by name: check the request, then build the model from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedagg.errors import SettingError, unknown
from fedagg.models.alexnet import alexnet
from fedagg.models.cifar10_cnn import cifar10_cnn
from fedagg.models.densenet import densenet121
from fedagg.models.googlenet import googlenet
from fedagg.models.layers import NORMS
from fedagg.models.lenet5 import lenet5
from fedagg.models.linear import linear
from fedagg.models.mlp import mlp
from fedagg.models.mnist_cnn import mnist_cnn
from fedagg.models.resnet import resnet18
from fedagg.models.text import char_lstm, char_transformer
from fedagg.models.vgg import vgg11
from fedagg.registry import Registry

SIDES = (28, 32)


@dataclass(frozen=True)
class Architecture:
    """How to make a model, and its options. `norms` starts with the default; empty means that there is no norm."""

    make: Callable[..., nn.Module]
    norms: tuple[str, ...] = ()
    dropout: float | None = None
    any_shape: bool = False
    text: bool = False  # samples are rows of token ids, and classes are the vocabulary


class Networks(Registry[Architecture]):
    """The networks by name. Registered ones are functions of a sample's shape and the number of classes."""

    def add(self, name: str, thing: Architecture | Callable[..., nn.Module]) -> None:
        super().add(name, thing if isinstance(thing, Architecture) else Architecture(thing, any_shape=True))


PUBLISHED = {
    "linear": Architecture(linear, any_shape=True),
    "mlp": Architecture(mlp, any_shape=True),
    "mnist-cnn": Architecture(mnist_cnn),
    "cifar10-cnn": Architecture(cifar10_cnn, dropout=0.5),
    "lenet5": Architecture(lenet5),
    "alexnet": Architecture(alexnet, norms=("none", "batch", "group"), dropout=0.5),
    "vgg11": Architecture(vgg11, norms=("none", "batch", "group")),
    "resnet18": Architecture(resnet18, norms=("batch", "group")),
    "resnet18-gn": Architecture(resnet18, norms=("group",)),
    "googlenet": Architecture(googlenet, norms=("batch", "group")),
    "densenet121": Architecture(densenet121, norms=("batch", "group")),
    "char-lstm": Architecture(char_lstm, text=True),
    "char-transformer": Architecture(char_transformer, text=True),
}

ARCHITECTURES = Networks("model", "fedagg.models", PUBLISHED)
register = ARCHITECTURES.register


def names() -> tuple[str, ...]:
    """The names of the models that `build` knows, small ones first."""
    return tuple(ARCHITECTURES)


def build(
    name: str,
    shape: Sequence[int],
    classes: int,
    *,
    norm: str | None = None,
    dropout: float | None = None,
    seed: int = 0,
    tokens: bool = False,
) -> nn.Module:
    """Build a model on the CPU. Its initial weights depend only on `seed`.

    Args:
        name: one of `names()`.
        shape: of one sample, e.g. `(1, 28, 28)`: any number of channels, 28×28 or 32×32 pixels; `linear` and `mlp` take any shape,
            `char-lstm` and `char-transformer` the length of a row of token ids, `(80,)`.
        classes: number of outputs, and of tokens.
        norm: "batch", "group" or, for alexnet and vgg11, "none". None is the architecture's default. Ignored by architectures
            without normalisation.
        dropout: probability of dropping a unit, for cifar10-cnn and alexnet. None is the architecture's default, 0.5.
        seed: for the initial weights. No random state outside this call is read or changed.
        tokens: models of text predict the next token at every position, (B, T, classes), and not only after the last one.
    """
    architecture = ARCHITECTURES.find(name)
    dims = tuple(shape)
    _check_shape(name, dims, architecture)
    if classes < 1:
        raise SettingError("classes", classes, "a model needs at least 1")
    options: dict[str, object] = {**_norm_option(name, norm, architecture), **_dropout_option(name, dropout, architecture)}
    if architecture.text:
        options["tokens"] = tokens
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed: that would reseed every accelerator too, which the fork does not restore.
        torch.default_generator.manual_seed(seed)
        made = architecture.make(dims, classes, **options)
    if not isinstance(made, nn.Module):
        raise SettingError("model", name, f"its function returned a {type(made).__name__}; return a torch module")
    return made


def _check_shape(name: str, shape: tuple[int, ...], architecture: Architecture) -> None:
    if architecture.any_shape:
        if math.prod(shape) < 1:
            raise SettingError("model", name, f"shape {shape} holds no values; give a sample shape such as (1, 28, 28)")
    elif architecture.text:
        if len(shape) != 1 or shape[0] < 1:
            raise SettingError("model", name, f"shape {shape} does not fit; it reads rows of token ids, samples of shape (length,)")
    elif len(shape) != 3 or shape[0] < 1 or shape[1] != shape[2] or shape[1] not in SIDES:
        fix = "use (channels, 28, 28) or (channels, 32, 32), or model 'linear', which takes any shape"
        if len(shape) == 3 and shape[0] == shape[1] in SIDES:
            fix = "it has the channels last: give x.transpose(0, 3, 1, 2)"
        raise SettingError("model", name, f"shape {shape} does not fit; {fix}")


def _norm_option(name: str, norm: str | None, architecture: Architecture) -> dict[str, str]:
    if norm is not None and norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    if not architecture.norms:
        return {}
    if norm is not None and norm not in architecture.norms:
        raise SettingError("norm", norm, f"model {name!r} needs a norm; choose {' or '.join(architecture.norms)}")
    return {"norm": norm or architecture.norms[0]}


def _dropout_option(name: str, dropout: float | None, architecture: Architecture) -> dict[str, float]:
    if dropout is not None and not 0 <= dropout < 1:
        raise SettingError("dropout", dropout, "give a probability from 0 up to, but not including, 1")
    if architecture.dropout is not None:
        return {"dropout": architecture.dropout if dropout is None else dropout}
    if dropout:
        having = ", ".join(other for other, a in ARCHITECTURES.items() if a.dropout is not None)
        raise SettingError("dropout", dropout, f"model {name!r} has none; leave it out, or choose one of {having}")
    return {}
