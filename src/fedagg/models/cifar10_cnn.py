"""The paper's CIFAR-10-CNN."""

from __future__ import annotations

from torch import nn


def cifar10_cnn(shape: tuple[int, int, int], classes: int, *, dropout: float) -> nn.Sequential:
    """Three 3×3 convolutions with 2×2 max pooling, then dropout before each of two fully connected layers.

    The FedAgg paper gives the 4·4·64 and 512 inputs of the two fully connected layers but not the channels of the
    first two convolutions; 32 and 64 are the usual choice and ours. The dropout layers stay in place at probability
    zero, so that a parameter has the same name whatever the probability.
    """
    channels, side, _ = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(64 * (side // 8) ** 2, 512),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(512, classes),
    )
