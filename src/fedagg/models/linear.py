"""Multinomial logistic regression, the paper's MNIST-Linear."""

from __future__ import annotations

import math

from torch import nn


def linear(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """One fully connected layer on the flattened sample: convex, so theory about it can be checked exactly."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))
