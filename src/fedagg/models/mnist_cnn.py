"""The CNN of FedAvg's MNIST experiments."""

from __future__ import annotations

from torch import nn


def mnist_cnn(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017).

    Two 5×5 convolutions (32 and 64 channels), each with 2×2 max pooling, then 512 hidden units. Padding keeps the
    convolutions from shrinking the image, which gives the published 1,663,370 parameters.
    """
    channels, side, _ = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (side // 4) ** 2, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )
