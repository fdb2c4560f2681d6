"""ResNet-18 for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedagg.models.layers import conv_block, he_init, norm_layer


class BasicBlock(nn.Module):
    """Two 3×3 convolutions whose output is added to their input, projected by a 1×1 where the shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *conv_block(inputs, outputs, 3, norm=norm, stride=stride, padding=1),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            norm_layer(norm, outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            self.shortcut.append(norm_layer(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


def resnet18(shape: tuple[int, int, int], classes: int, *, norm: str) -> nn.Module:
    """He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016).

    The 18-layer network with that paper's CIFAR stem: a 3×3 convolution of stride 1 and no pooling, in place of the
    7×7 of stride 2 that would leave a small image with almost no pixels.
    """
    blocks: list[nn.Module] = []
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [BasicBlock(inputs, outputs, stride, norm), BasicBlock(outputs, outputs, 1, norm)]
        inputs = outputs
    model = nn.Sequential(
        *conv_block(shape[0], 64, 3, norm=norm, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )
    he_init(model)
    return model
