"""The binary format of CIFAR-10 and CIFAR-100: fixed-length records of label bytes and a 3x32x32 image."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedagg.errors import DataError

_SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


def read_cifar(path: str | os.PathLike[str], coarse: bool) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images (N, 3, 32, 32) and fine labels; `coarse` is for CIFAR-100, whose records begin with a coarse label."""
    path = Path(path)
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or type(error).__name__})") from error
    limits = (20, 100) if coarse else (10,)
    length = len(limits) + PIXELS
    if content.size == 0 or content.size % length:
        raise DataError(f"{path}: {content.size} bytes is not a whole number of records of {length} bytes")
    records = content.reshape(-1, length)
    for column, limit in enumerate(limits):
        wrong = np.flatnonzero(records[:, column] >= limit)
        if wrong.size:
            label = records[wrong[0], column]
            raise DataError(f"{path}: record {wrong[0]} has the label {label}, but labels end at {limit - 1}")
    images = np.ascontiguousarray(records[:, len(limits) :]).reshape(-1, *_SHAPE)
    return images, records[:, len(limits) - 1].astype(np.int64)
