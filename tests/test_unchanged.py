"""Small runs of every method on every engine give the numbers stored in `unchanged.json`.

Where results are meant to change, the numbers are written again with

    python tests/test_unchanged.py

and `python tests/test_unchanged.py hashes FILE` writes exact checksums instead, to compare two versions on one machine: to the
byte, runs are the same only there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedagg
from fedagg import Dataset, Result
from fedagg.flat import Layout

STORED = Path(__file__).with_suffix("").with_name("unchanged.json")
WITHIN = 1e-4

PAPER = {"algorithm": "fedagg", "variant": "paper"}
METHODS: dict[str, dict[str, Any]] = {
    **{
        name: {"algorithm": name}
        for name in (
            "fedavg", "fedprox", "fedadam", "fedyogi", "fedadagrad", "fedcm", "feddyn", "scaffold", "fedexp", "fedgh", "fedbabu",
            "fedagg", "fedavgm", "fednova", "ghbm", "delta-sgd", "fedsam", "mofedsam", "fedsps", "fedspeed",
        )
    },
    "fedagg-paper": PAPER,
    "fedagg-history": PAPER | {"estimator": "history", "direction": "mixed"},
    "fedagg-pretrain": PAPER | {"estimator": "pretrain"},
}  # fmt: skip
FAULTS = {"dropout_rate": 0.2, "straggler_rate": 0.3, "corrupt_rate": 0.2}
MORE: dict[str, dict[str, Any]] = {
    "faults": FAULTS,
    "faults-fedagg": {"algorithm": "fedagg", **FAULTS},
    "faults-feddyn": {"algorithm": "feddyn", **FAULTS},
    "nobody": {"algorithm": "fedagg", "dropout_rate": 0.85, "rounds": 5},
    "broken": {"algorithm": "fedagg", "lr": 30.0, "rounds": 8, "downlink_bits": 4},
    "momentum": {"momentum": 0.9},
    "adam": {"client_optimizer": "adam", "lr": 0.01, "weight_decay": 0.01, "clip": 1.0},
    "average": {"average": True},
    "rounded": {"algorithm": "fedagg", "downlink_bits": 4},
    "rounded-scaffold": {"algorithm": "scaffold", "downlink_bits": 4},
    "rounded-pretrain": PAPER | {"estimator": "pretrain", "downlink_bits": 4},
    "median": {"robust": "median", "flip_rate": 0.2},
    "clip": {"algorithm": "fedexp", "robust": "clip", "flip_rate": 0.2, "flip_scale": 3.0},
    "trimmed": {"algorithm": "fedagg", "robust": "trimmed"},
}


def vectors() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(110, 6, generator=generator)
    y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
    return Dataset(x[:80], y[:80], x[80:], y[80:], classes=3)


def images() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(100, 1, 6, 6, generator=generator)
    y = (x.flatten(1) @ torch.randn(36, 3, generator=generator)).argmax(1)
    return Dataset(x[:70], y[:70], x[70:], y[70:], classes=3)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def convolutional() -> nn.Module:
    body = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*body, nn.Dropout(0.2), nn.Linear(36, 3))


KINDS = {
    "sequential": (vectors, dense, "sequential"),
    "stacked": (vectors, plain, "batched"),
    "vmapped": (vectors, dense, "batched"),
    "threaded": (images, convolutional, "auto"),
}
CASES = {f"{name}-{kind}": (kind, given) for name, given in METHODS.items() for kind in KINDS}
CASES |= {f"{name}-{kind}": (kind, given) for name, given in MORE.items() for kind in ("sequential", "stacked")}
# Of the slower kinds the test runs those methods alone whose clients do something of their own.
SPECIAL = ("fedavg", "scaffold", "fedgh", "fedagg", "fedagg-paper", "faults-feddyn", "momentum")
TESTED = [case for case, (kind, _) in CASES.items() if kind == "stacked" or case.removesuffix(f"-{kind}") in SPECIAL]


def trained(case: str) -> Result:
    kind, given = CASES[case]
    data, network, engine = KINDS[kind]
    torch.manual_seed(2)
    # Clients of different sizes, one of them smaller than a batch.
    cuts = torch.tensor([0.03, 0.15, 0.4, 0.6, 0.75, 1.0]) * len(data())
    parts = torch.arange(len(data())).tensor_split(cuts.long()[:-1])
    shared = {"participation": 0.67, "rounds": 3, "epochs": 2, "batch_size": 8, "lr": 0.1, "device": "cpu", "threads": 1}
    return fedagg.run(data=data(), model=network(), parts=[part.numpy() for part in parts], engine=engine, **{**shared, **given})


def numbers(result: Result) -> list[float]:
    """A few projections of the weights and buffers, the loss, and what the record says of the last round."""
    model = Layout(result.model).pack(result.model)
    whole = torch.cat([model.w, model.buffers]).double()
    waves = torch.sin(torch.outer(torch.tensor([1.0, 2.3, 3.7], dtype=torch.float64), torch.arange(1.0, len(whole) + 1)))
    last = result.history[-1]
    return [*(waves @ whole).tolist(), float(whole.norm()), result.loss, last.get("train_loss", 0.0), last.get("drift", 0.0)]


def checksum(result: Result) -> dict[str, str]:
    model = Layout(result.model).pack(result.model)
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in result.history]
    weights = hashlib.sha256(torch.cat([model.w, model.buffers]).numpy().tobytes()).hexdigest()
    return {"weights": weights, "record": hashlib.sha256(json.dumps([rows, result.figures]).encode()).hexdigest()}


@pytest.mark.filterwarnings("ignore:no client was valid", "ignore:left out")
@pytest.mark.parametrize("case", TESTED)
def test_results_are_unchanged(case: str) -> None:
    assert numbers(trained(case)) == pytest.approx(json.loads(STORED.read_text(encoding="utf-8"))[case], rel=WITHIN, abs=1e-5)


if __name__ == "__main__":
    exact = sys.argv[1:2] == ["hashes"]
    found = {case: checksum(trained(case)) for case in CASES} if exact else {case: numbers(trained(case)) for case in TESTED}
    text = "{\n" + ",\n".join(f"{json.dumps(case)}: {json.dumps(value)}" for case, value in found.items()) + "\n}\n"
    (Path(sys.argv[2]) if exact else STORED).write_text(text, encoding="utf-8")
