"""GoogLeNet (Inception v1) for small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedagg.models.layers import conv_block, he_init

# Table 1 of the paper: 1×1, reduction before 3×3, 3×3, reduction before 5×5, 5×5, projection after pooling.
STAGE3 = ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64))
STAGE4 = (
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
)
STAGE5 = ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128))


class Inception(nn.Module):
    """Four views of the same input side by side: 1×1, 3×3, 5×5 and max pooling."""

    def __init__(self, inputs: int, widths: tuple[int, int, int, int, int, int], norm: str) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, pooled = widths
        self.outputs = one + three + five + pooled
        self.one = nn.Sequential(*conv_block(inputs, one, 1, norm=norm, padding=0))
        self.three = nn.Sequential(
            *conv_block(inputs, reduce3, 1, norm=norm, padding=0),
            *conv_block(reduce3, three, 3, norm=norm, padding=1),
        )
        self.five = nn.Sequential(
            *conv_block(inputs, reduce5, 1, norm=norm, padding=0),
            *conv_block(reduce5, five, 5, norm=norm, padding=2),
        )
        self.pooled = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1),
            *conv_block(inputs, pooled, 1, norm=norm, padding=0),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], dim=1)


def googlenet(shape: tuple[int, int, int], classes: int, *, norm: str) -> nn.Module:
    """Szegedy et al., "Going Deeper with Convolutions" (CVPR 2015).

    The nine Inception modules of the paper's Table 1. Adapted: one 3×3 convolution to 192 channels replaces the stem that shrinks
    its image eightfold. Each convolution is normalised, which according to Ioffe & Szegedy, "Batch Normalization" (ICML 2015),
    makes dropout and the auxiliary classifiers unnecessary, so both are left out.
    """
    layers: list[nn.Module] = conv_block(shape[0], 192, 3, norm=norm, padding=1)
    inputs = 192
    for stage in (STAGE3, STAGE4, STAGE5):
        if stage is not STAGE3:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        for widths in stage:
            module = Inception(inputs, widths, norm)
            layers.append(module)
            inputs = module.outputs
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    he_init(model)
    return model
