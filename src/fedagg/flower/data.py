"""A node's own data, in any form a training script has it, as tensors for the engines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context

from fedagg import files
from fedagg.data import Dataset, readers


@dataclass(frozen=True)
class NodeData:
    data: Dataset
    tests: bool  # does the node hold test samples?


def node_data(given: Any, task: str | None = None) -> NodeData:
    """The result of the user's `data(context)`, checked, with targets for the task. Labels are taken as they are: to number words,
    a node would have to know those of all other nodes."""
    if isinstance(given, Dataset):
        return NodeData(given.of_task(task), True)
    train, test = readers.read(given)
    tested = test or train
    return NodeData(Dataset(train.x, train.y, tested.x, tested.y, task=task), test is not None)


def cached(context: Context, make: Callable[[], Sequence[Any]], name: str = "data") -> tuple[np.ndarray, ...]:
    """The arrays that `make` returns: made once, kept in the node's `state-dir`, and mapped from disk from then on.

    Flower starts a process for every message, so nothing stays in memory between messages. Choose another `name` when the data have
    changed. A node without a `state-dir` makes the arrays again every time.
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
    # Copy on write: changes stay in this process.
    return tuple(np.lib.format.open_memmap(path, mode="c") for path in sorted(folder.glob("*.npy")))
