"""A node's own data, in whatever form a training script has it, as the tensors that the engines work on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fedagg import files
from fedagg.data import Dataset
from fedagg.errors import SettingError

FORMS = (
    "return (x, y), (x, y, x_test, y_test), a torch Dataset or DataLoader, a pair of those (training, test), or a fedagg.Dataset"
)


@dataclass(frozen=True)
class NodeData:
    data: Dataset
    tests: bool  # does the node hold test samples?


def node_data(given: Any) -> NodeData:
    """What the user's `data(context)` returned, checked."""
    if isinstance(given, Dataset):
        return NodeData(given, True)
    if isinstance(given, TorchDataset | DataLoader):
        given = stacked(given)
    elif isinstance(given, tuple | list) and given and isinstance(given[0], TorchDataset | DataLoader):
        given = tuple(tensor for part in given for tensor in stacked(part))
    if not isinstance(given, tuple | list) or len(given) not in (2, 4):
        raise SettingError("data(context)", type(given).__name__, FORMS)
    tests = len(given) == 4
    return NodeData(Dataset(*given) if tests else Dataset(*given, *given), tests)


def stacked(samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Every sample of a map-style dataset in one tensor. Transforms run once, here."""
    source: Any = samples.dataset if isinstance(samples, DataLoader) else samples
    pairs = [source[i] for i in range(len(source))]
    return torch.stack([torch.as_tensor(x) for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs])


def cached(context: Context, make: Callable[[], Sequence[Any]], name: str = "data") -> tuple[np.ndarray, ...]:
    """The arrays that `make` returns: made once, kept in the node's `state-dir`, and mapped from the disk from then on.

    Flower starts a process for every message, so what a process keeps in memory is gone with the next one. Choose
    another `name` when the data have changed. A node without a `state-dir` makes them anew every time.
    """
    where = context.node_config.get("state-dir")
    if where is None:
        return tuple(np.asarray(part) for part in make())
    folder = Path(str(where)) / f"{name}-{context.node_config.get('partition-id', 0)}"
    if not folder.exists():
        aside = files.folder(folder.with_name(f".{folder.name}.{os.getpid()}.part"), "state-dir")
        for number, part in enumerate(make()):
            np.save(aside / f"{number}.npy", np.asarray(part), allow_pickle=False)
        with suppress(OSError):  # another process of the node was faster: its arrays are the same
            aside.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)
    # Copied on write: a page that is changed is this process's own.
    return tuple(np.lib.format.open_memmap(path, mode="c") for path in sorted(folder.glob("*.npy")))
