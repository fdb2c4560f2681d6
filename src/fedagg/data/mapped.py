"""Samples that stay on disk: an array that may not be in memory as a whole, of which only the requested rows are read."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedagg.data.arrays import kind_of, tensor_of, whole_of
from fedagg.errors import SettingError

Array = np.ndarray[Any, Any]

# Shares of the allowance: half holds the samples of the clients in training, a quarter the test set; the rest is for reading.
WINDOW, TEST, READING = 2, 4, 8


def memory_limit(memory: float | None) -> int:
    """Bytes that samples may take: this many GiB, or half of the machine's memory."""
    if memory is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return int(memory * (1 << 30))


def on_disk(x: Any) -> Mapped | None:
    """The training samples if they stay on disk; else None."""
    return x if isinstance(x, Mapped) else None


class Mapped:
    """Takes the place of a tensor of training samples: requested rows are read, and returned as a tensor."""

    _version = 0  # it is never written to

    def __init__(self, source: np.memmap[Any, Any], allowance: int) -> None:
        kind_of("x_train", source)
        if source.ndim < 2 or 0 in source.shape:
            raise SettingError("x_train", source.shape, "must have the shape (samples, ...), and no length may be 0")
        self.source, self.allowance = source, allowance
        self.chosen: Array | None = None  # the rows in use; None for all
        self.device = torch.device("cpu")
        self.dtype = torch.int64 if kind_of("x_train", source) == "integers" else torch.float32

    @staticmethod
    def size(source: Array) -> int:
        """Bytes of all samples in the type used for training."""
        return source.size * (8 if source.dtype.kind in "iu" and source.dtype != np.uint8 else 4)

    @property
    def row(self) -> int:
        return self.size(self.source[:1])

    def room(self, share: int) -> int:
        """Rows that fit into that part of the allowance; at least one must."""
        if not (rows := self.allowance // share // self.row):
            words = f"a sample takes {self.row} bytes, and must fit into 1/{share} of data_memory; allow more"
            raise SettingError("data_memory", f"{self.allowance} bytes", words)
        return rows

    def __len__(self) -> int:
        return len(self.source) if self.chosen is None else len(self.chosen)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.source.shape[1:])

    @property
    def ndim(self) -> int:
        return self.source.ndim

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(self, device: torch.device) -> Mapped:
        """The same samples, with rows returned on that device."""
        return self.changed(device=device)

    def rows(self, chosen: Array | Tensor) -> Mapped:
        """A subset of the rows; nothing is read yet."""
        every = np.arange(len(self)) if self.chosen is None else self.chosen
        return self.changed(chosen=every[np.asarray(chosen)])

    def changed(self, **values: Any) -> Mapped:
        other = copy.copy(self)
        other.__dict__.update(values)
        return other

    def __getitem__(self, which: slice | Array | Tensor) -> Tensor:
        at = np.arange(len(self))[which] if isinstance(which, slice) else np.asarray(torch.as_tensor(which).cpu())
        into = torch.empty(len(at), *self.shape[1:], dtype=self.dtype, device=self.device)
        self.read(at, into)
        return into

    def read(self, at: Array, into: Tensor) -> None:
        """Read rows into the first places of a tensor, some at a time and in their order on disk."""
        rows = at if self.chosen is None else self.chosen[at]
        order = np.argsort(rows, kind="stable")
        for places in np.split(order, range(self.room(READING), len(order), self.room(READING))):
            into[torch.from_numpy(places).to(into.device)] = self.block(rows[places]).to(into.device)

    def raw(self, at: Array) -> Array:
        """Rows as they are in the file."""
        return self.file()[at if self.chosen is None else self.chosen[at]]

    def file(self) -> Array:
        """The file. A .npy file is mapped again each time, so that pages already read do not stay in memory."""
        path = str(getattr(self.source, "filename", ""))
        return np.lib.format.open_memmap(path, mode="r") if path.endswith(".npy") else self.source

    def max(self) -> Tensor:
        parts = range(0, len(self), self.room(READING))
        return torch.stack([self[start : start + self.room(READING)].max() for start in parts]).max()

    def block(self, rows: Array) -> Tensor:
        """Rows of the file, converted for training."""
        held = np.asarray(self.file()[rows])
        if self.dtype == torch.int64:
            return whole_of("x_train", held)
        x = tensor_of(held, torch.float32)
        if held.dtype == np.uint8:
            return x.div_(255)
        if len(wrong := (~torch.isfinite(x)).flatten(1).any(1).nonzero()):
            row = int(rows[int(wrong[0])])
            raise SettingError(f"x_train[{row}]", "not finite", "every number must be finite in float32; drop or correct it")
        return x
