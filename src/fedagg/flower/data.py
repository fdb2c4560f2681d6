"""A node's own data, in whatever form a training script has it, as the tensors that the engines work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

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
