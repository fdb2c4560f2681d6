"""AlexNet for small images."""

from __future__ import annotations

from torch import nn

from fedagg.models.layers import conv_block, he_init


def alexnet(shape: tuple[int, int, int], classes: int, *, norm: str, dropout: float) -> nn.Sequential:
    """Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks" (NeurIPS 2012).

    Five convolutions with the single-tower widths of Krizhevsky, "One weird trick" (2014), and the published classifier
    of two dropped-out layers of 4096. For 32×32 images the 11×11 and 5×5 kernels become 3×3, the first stride 2 instead
    of 4, and the overlapping pooling 2×2, which leaves 2·2·256 features. 28×28 images are padded to 32×32 by the first
    convolution. Local response normalisation is left out: `norm` offers its successors.
    """
    channels, side, _ = shape
    model = nn.Sequential(
        *conv_block(channels, 64, 3, norm=norm, stride=2, padding=1 + (32 - side) // 2),
        nn.MaxPool2d(2),
        *conv_block(64, 192, 3, norm=norm, padding=1),
        nn.MaxPool2d(2),
        *conv_block(192, 384, 3, norm=norm, padding=1),
        *conv_block(384, 256, 3, norm=norm, padding=1),
        *conv_block(256, 256, 3, norm=norm, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * 2 * 256, 4096),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, classes),
    )
    he_init(model)
    return model
