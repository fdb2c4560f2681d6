"""VGG-11 with average pooling before a single classifier."""

from __future__ import annotations

from torch import nn

from fedagg.models.layers import conv_block, he_init

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def vgg11(shape: tuple[int, int, int], classes: int, *, norm: str) -> nn.Sequential:
    """Simonyan & Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (ICLR 2015).

    Configuration A: eight 3×3 convolutions in five stages, each ending in 2×2 max pooling, without normalisation unless `norm` asks
    for it. The published classifier, two layers of 4096 units sized for 224×224 images, is replaced: average pooling, which the
    FedAgg paper adds, gives 512 features to one linear layer. 28×28 images are padded to 32×32 by the first convolution, because
    five poolings would leave nothing of them.
    """
    inputs, side, _ = shape
    padding = 1 + (32 - side) // 2
    layers: list[nn.Module] = []
    for stage in STAGES:
        for outputs in stage:
            layers += conv_block(inputs, outputs, 3, norm=norm, padding=padding)
            inputs, padding = outputs, 1
        layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    he_init(model, "fan_in")  # at the paper's rate of 0.01, fan-out makes no progress for hundreds of steps
    return model
