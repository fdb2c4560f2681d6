"""Images a little different every time a client trains on them: shifted by up to four pixels, mirrored or not.

What happens to a sample is one number, drawn by the client's seed beside its batch order, so that every engine makes the same
image of it, wherever the client runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedagg import seeding

REACH = 4  # pixels
PLACES = 2 * REACH + 1
KINDS = {"none": 0, "crop": PLACES**2, "crop-flip": 2 * PLACES**2}  # how many things can happen to an image


def draw(seed: int, size: int, epochs: int, kind: str) -> Tensor:
    """What happens to each of a client's samples in the order they are used, (epochs, size)."""
    return torch.randint(KINDS[kind], (epochs, size), generator=seeding.torch_generator(seed, "augment"))


def augmented(x: Tensor, drawn: Tensor) -> Tensor:
    """x (B, C, H, W), drawn (B,): a window of each image at its own place, with zeros around the image, mirrored or not."""
    samples, channels, height, width = x.shape
    side = torch.arange(max(samples, channels, height, width), device=x.device)
    rows = (drawn // PLACES % PLACES)[:, None] + side[:height]
    mirrored = (drawn >= PLACES**2)[:, None]
    columns = (drawn % PLACES)[:, None] + torch.where(mirrored, width - 1 - side[:width], side[:width])
    wide = functional.pad(x, (REACH, REACH, REACH, REACH))
    return wide[
        side[:samples, None, None, None], side[None, :channels, None, None], rows[:, None, :, None], columns[:, None, None, :]
    ]
