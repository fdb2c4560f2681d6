"""DenseNet-121 for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedagg.models.layers import he_init, norm_layer

GROWTH = 32
BLOCKS = (6, 12, 24, 16)


def _preactivated(inputs: int, outputs: int, kernel: int, norm: str) -> list[nn.Module]:
    """Normalisation and ReLU before the convolution, not after: each input channel is read by many layers."""
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return [norm_layer(norm, inputs), nn.ReLU(), conv]


class DenseLayer(nn.Module):
    """A 1×1 bottleneck and a 3×3 convolution whose output joins the channels of the input."""

    def __init__(self, inputs: int, norm: str) -> None:
        super().__init__()
        self.new = nn.Sequential(
            *_preactivated(inputs, 4 * GROWTH, 1, norm),
            *_preactivated(4 * GROWTH, GROWTH, 3, norm),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.new(x)], dim=1)


def densenet121(shape: tuple[int, int, int], classes: int, *, norm: str) -> nn.Module:
    """Huang et al., "Densely Connected Convolutional Networks" (CVPR 2017).

    Four dense blocks with bottlenecks, growth rate 32, halved channels between blocks. Adapted: the stem is a 3×3
    convolution of stride 1 without pooling, as in the paper's own CIFAR networks.
    """
    channels = 2 * GROWTH
    layers: list[nn.Module] = [nn.Conv2d(shape[0], channels, 3, padding=1, bias=False)]
    for index, depth in enumerate(BLOCKS):
        if index:
            layers += [*_preactivated(channels, channels // 2, 1, norm), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(depth):
            layers.append(DenseLayer(channels, norm))
            channels += GROWTH
    model = nn.Sequential(
        *layers,
        norm_layer(norm, channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )
    he_init(model)
    return model
