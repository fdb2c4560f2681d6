"""Parts that several architectures share: normalisation and He initialisation."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from torch import nn

NORMS = ("batch", "group", "none")
NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm)


def norm_layer(norm: str, channels: int) -> nn.Module:
    """One normalisation layer, "batch" or "group".

    Group normalisation (Wu & He, "Group Normalization", ECCV 2018) keeps no running statistics, so there is nothing
    for clients with different data to disagree about. It uses the paper's 32 groups, or the nearest smaller number
    that divides the channels.
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    groups = next(g for g in range(min(32, channels), 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


def conv_block(inputs: int, outputs: int, kernel: int, *, norm: str, stride: int = 1, padding: int) -> list[nn.Module]:
    """Convolution, normalisation if any, ReLU. The norm's shift makes a bias redundant, so only "none" has one."""
    plain = norm == "none"
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=plain)
    return [conv, nn.ReLU()] if plain else [conv, norm_layer(norm, outputs), nn.ReLU()]


def he_init(model: nn.Module, mode: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """Initialise a deep ReLU network so that its signal neither fades nor explodes with depth.

    He et al., "Delving Deep into Rectifiers" (ICCV 2015): normal weights of variance 2 / fan, biases zero. The last linear layer
    feeds no ReLU and starts at N(0, 0.01²), so that the first predictions are nearly uniform. With PyTorch's default, the
    difference between two images shrinks several hundredfold on its way through VGG-11.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    nn.init.normal_(layers[-1].weight, std=0.01)


def is_normalised(model: nn.Module) -> bool:
    """Does batch or group normalisation follow at least half of the layers with a weight matrix? The scale of such a layer has no
    effect on what the network computes. Layers count in the order in which the module lists them."""
    parts = [part for part in model.modules() if isinstance(part, NORM_LAYERS) or trained_matrices(part)]
    followed = sum(trained_matrices(one) for one, after in pairwise(parts) if isinstance(after, NORM_LAYERS))
    return 2 * followed >= sum(map(trained_matrices, parts)) > 0


def is_linear(model: nn.Module) -> bool:
    """Is a single linear layer all that is trained? Then the usual losses are convex in the weights."""
    trained = [part for part in model.modules() if any(p.requires_grad for p in part.parameters(recurse=False))]
    return len(trained) == 1 and isinstance(trained[0], nn.Linear)


def is_deep(model: nn.Module) -> bool:
    """Is more than one weight matrix trained?"""
    return sum(map(trained_matrices, model.modules())) > 1


def has_dropout(model: nn.Module) -> bool:
    """Does it have a layer that drops values in training, or call a function of such a name?"""
    return any(part.p > 0 if isinstance(part, nn.modules.dropout._DropoutNd) else calls_dropout(part) for part in model.modules())


def calls_dropout(part: nn.Module) -> bool:
    """Is dropout among the functions that its own code names?"""
    code = getattr(type(part).forward, "__code__", None)
    named = [name for name in getattr(code, "co_names", ()) if "dropout" in name and not hasattr(part, name)]
    return bool(named) and not type(part).__module__.startswith("torch.")


def trained_matrices(part: nn.Module) -> int:
    return sum(parameter.requires_grad and parameter.dim() > 1 for parameter in part.parameters(recurse=False))
