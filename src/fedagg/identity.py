"""Is a run resumed with what it began with? Checksums of what its configuration does not say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedagg import checks, tasks
from fedagg.config import Config
from fedagg.data import Dataset, is_path
from fedagg.data.mapped import READING
from fedagg.flat import Layout
from fedagg.tasks import Task
from fedagg.work import Loss

LOOKED_AT = 2000  # number of samples by which a named data set is recognised


def fingerprint(config: Config, data: Dataset, parts: Sequence[Any], module: nn.Module, loss: Loss, task: Task) -> dict[str, str]:
    """Checksums of what the configuration does not say: the model's form, and what was given from Python."""

    def digest(pieces: Iterable[Any]) -> str:
        total = hashlib.blake2b(digest_size=16)
        for piece in pieces:
            total.update(np.ascontiguousarray(piece).data if isinstance(piece, np.ndarray) else repr(piece).encode())
        return total.hexdigest()

    layout = Layout(module)
    form: list[Any] = [layout.parameters, [(name, shape) for name, shape, _ in layout.buffers]]
    travels = {name for name, *_ in (*layout.parameters, *layout.buffers)}
    rest = [each for name, each in (*module.named_parameters(), *module.named_buffers()) if name not in travels]
    form += [each.detach().cpu().reshape(-1).view(torch.uint8).numpy() for each in rest]  # a checkpoint does not hold these
    known = {"model": digest(form if config.model != "custom" else [*form, repr(module)]), "loss": checks.name_of(loss)}
    known |= {} if task is tasks.CLASSIFICATION else {"metric": task.metric.key}
    # For named sets and data on disk: all labels but only some samples, to avoid reading everything at every start.
    own = config.dataset == "custom" or is_path(config.dataset)

    def looked_at(x: Any) -> int:
        return (len(x) if own else LOOKED_AT) if isinstance(x, Tensor) else int(min(LOOKED_AT, x.room(READING)))

    samples = [x[:: -(-len(x) // looked_at(x))].numpy() for x in (data.x_train, data.x_test)]
    known["data"] = digest([data.shape, *samples, data.y_train.numpy(), data.y_test.numpy()])
    if config.partition == "custom":
        known["parts"] = digest(piece for part in parts for piece in (len(part), np.asarray(part, dtype=np.int64)))
    return known
