"""Data augmentation: images are shifted by up to four pixels and perhaps mirrored, in a new way each time a client trains on them.

Each sample's change is one number, drawn from the client's seed together with its batch order. So every engine makes the same
image, wherever the client runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedagg import seeding

REACH = 4  # pixels
PLACES = 2 * REACH + 1
KINDS = {"none": 0, "crop": PLACES**2, "crop-flip": 2 * PLACES**2}  # number of possible changes to an image


def draw(seed: int, size: int, epochs: int, kind: str) -> Tensor:
    """The change to each of a client's samples, in the order of use, (epochs, size)."""
    return torch.randint(KINDS[kind], (epochs, size), generator=seeding.torch_generator(seed, "augment"))


def augmented(x: Tensor, drawn: Tensor) -> Tensor:
    """The changed images: x is (B, C, H, W), drawn is (B,). Each image is shifted, padded with zeros, and perhaps mirrored."""
    samples, channels, height, width = x.shape
    side = torch.arange(max(samples, channels, height, width), device=x.device)
    rows = (drawn // PLACES % PLACES)[:, None] + side[:height]
    mirrored = (drawn >= PLACES**2)[:, None]
    columns = (drawn % PLACES)[:, None] + torch.where(mirrored, width - 1 - side[:width], side[:width])
    wide = functional.pad(x, (REACH, REACH, REACH, REACH))
    return wide[
        side[:samples, None, None, None], side[None, :channels, None, None], rows[:, None, :, None], columns[:, None, None, :]
    ]
