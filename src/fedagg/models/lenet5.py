"""LeNet-5 with the widths of the FedAgg paper."""

from __future__ import annotations

from torch import nn


def lenet5(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (Proc. IEEE, 1998).

    As in the FedAgg paper: ReLU and max pooling, and 5·5·32 features (twice LeCun's 5·5·16, so the first convolution has 16
    channels and not 6). LeCun padded 28×28 digits to 32×32; here the first convolution pads them, and 32×32 images are not padded.
    """
    channels, side, _ = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=(32 - side) // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(5 * 5 * 32, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )
