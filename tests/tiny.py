"""A job that takes a tenth of a second: little data, few clients, a model with buffers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedagg
from fedagg import Dataset, Result

ENGINES = ["sequential", "batched"]

# Every method that carries something from round to round, and what is special about its state.
STATEFUL: dict[str, dict[str, Any]] = {
    "fedagg": {"algorithm": "fedagg"},
    "fedagg-rounded": {"algorithm": "fedagg", "downlink_bits": 3},
    "fedagg-paper": {"algorithm": "fedagg", "variant": "paper", "estimator": "history"},
    "fedagg-pretrain": {"algorithm": "fedagg", "variant": "paper", "estimator": "pretrain"},
    "feddyn": {"algorithm": "feddyn"},
    "feddyn-disk": {"algorithm": "feddyn", "client_memory": "disk"},
    "scaffold": {"algorithm": "scaffold"},
    "fedadam": {"algorithm": "fedadam"},
    "fedyogi": {"algorithm": "fedyogi"},
    "fedadagrad": {"algorithm": "fedadagrad"},
    "fedcm": {"algorithm": "fedcm"},
    "fedexp": {"algorithm": "fedexp"},
    "fedbabu": {"algorithm": "fedbabu"},
    "average": {"algorithm": "fedavg", "average": True},
}
# Each of them on the plain engine. What the server keeps does not know the engine: of the other, one of each kind.
STATES = [
    *((name, "sequential") for name in STATEFUL),
    *((name, "batched") for name in ("fedagg-rounded", "fedagg-pretrain", "feddyn-disk", "fedadam")),
]


def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(180, 6, generator=generator)
    y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
    return Dataset(x[:120], y[:120], x[120:], y[120:], classes=3)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def job(**settings: Any) -> Result:
    given = {
        "clients": 6,
        "participation": 0.5,
        "rounds": 6,
        "epochs": 2,
        "batch_size": 8,
        "lr": 0.1,
        "device": "cpu",
        "engine": "sequential",
    }
    return fedagg.run(data=dataset(), model=network(), **{**given, **settings})


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """A record without its timings."""
    lines = [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in lines]


def same_run(one: Path, other: Path) -> bool:
    """Did two runs end with the same bytes, and with the same record?"""
    model = "model.safetensors"
    return (
        (one / model).read_bytes() == (other / model).read_bytes()
        and rows(one) == rows(other)
        and rows(one, "clients.jsonl") == rows(other, "clients.jsonl")
    )
