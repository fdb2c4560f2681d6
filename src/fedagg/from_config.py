"""What the settings of a run name, made: device, data, the clients' samples, network, faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedagg import checks, models, partition, seeding
from fedagg.config import Config
from fedagg.data import Dataset, load
from fedagg.errors import SettingError
from fedagg.faults import Faults
from fedagg.inputs import Inputs


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError("device", name, "choose auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError("device", name, "torch sees no CUDA device here; choose cpu")
    if device.type not in ("cpu", "cuda"):
        raise SettingError("device", name, "choose auto, cpu, cuda or cuda:N")
    if name == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def chosen_data(config: Config, download: bool = True) -> Dataset:
    """The data set that the settings name."""
    return load(config.dataset, config.data_dir, download, config.target, config.user, config.task, config.data_memory)


def with_client_count(config: Config, data: Dataset) -> Config:
    """The configuration with one client per user of the data, if it is split by user and the number of clients was left open."""
    if config.partition != "user" or "clients" in config.model_fields_set:
        return config
    return config.model_copy(update={"clients": 1 if data.users is None else len(np.unique(data.users))})


def seen_data(config: Config, data: Dataset, parts: Sequence[Any] | None) -> Dataset:
    """The data as clients see them: without the part held back, and normalised if asked for."""
    if config.validation and parts is not None:
        raise SettingError("validation", config.validation, "parts name samples of the whole training set; give one of the two")
    data = data.held_back(config.validation, config.seed)
    if config.normalize:
        data = data.normalized()
    else:
        checks.warn_of_ranges(data)
    if config.augment != "none":
        checks.check_images(config.augment, data)
    return data


def deal(config: Config, data: Dataset) -> Sequence[Any]:
    if config.partition == "custom":
        raise SettingError("partition", "custom", "give your own partition from Python as parts=[...]")
    if config.partition == "user":
        if data.users is None:
            words = "the data name no users; name the column with user, or give fedagg.Dataset(..., users=...)"
            raise SettingError("partition", "user", words)
        return partition.by_user(data.users, config.clients)
    if config.partition == "feature" and not isinstance(data.x_train, Tensor):
        raise SettingError(
            "partition", "feature", "sorts all samples, but these stay on the disk; choose another, or raise data_memory"
        )
    if data.task != "classification" and config.partition in partition.BY_LABEL:
        words = f"deals samples by class labels, but the task is {data.task}; choose one of {', '.join(partition.FOR_ALL)}"
        raise SettingError("partition", config.partition, words)
    return partition.partition(
        config.partition,
        data.y_train.numpy(),
        config.clients,
        config.seed,
        sigma=config.sigma,
        per_client=config.shards,
        deviation=config.deviation,
        column=config.column,
        x=data.x_train.numpy() if isinstance(data.x_train, Tensor) else None,
    )


class Samples:
    """A client's sample indices as a tensor, made on request, so that a million clients cost only their arrays."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __call__(self, client: int) -> Tensor:
        return torch.as_tensor(np.asarray(self.parts[client]), dtype=torch.int64)


def build_model(config: Config, data: Dataset | Inputs) -> nn.Module:
    if config.model == "custom":
        raise SettingError("model", "custom", "give your own module from Python as model=...")
    seed = seeding.derive(config.seed, "model")
    every = data.task == "tokens"
    return models.build(config.model, data.shape, data.classes, norm=config.norm, dropout=config.dropout, seed=seed, tokens=every)


def faults_of(config: Config) -> Faults:
    return Faults(
        seed=config.seed,
        dropout=config.dropout_rate,
        straggler=config.straggler_rate,
        corrupt_rate=config.corrupt_rate,
        flip=config.flip_rate,
        scale=config.flip_scale,
    )


def keeps_on_disk(config: Config, d: int, device: torch.device) -> bool:
    """Do per-client vectors live on disk? By default, if they could take more than 1 GiB of memory, or 4 GiB on a GPU."""
    most = (4 if device.type == "cuda" else 1) << 30
    return config.client_memory == "disk" or (config.client_memory == "auto" and config.clients * d * 4 > most)
