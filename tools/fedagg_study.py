"""Compare versions of FedAgg's default on held-out training data: as in the tables of docs/fedagg-choices.md.

    python tools/fedagg_study.py [CELL,...] [SEED,...]

A tenth of the training set, or more, is kept from the clients and takes the place of the test set, which is never looked at. The
data sets must be there (`fedagg data`). Convolutional networks want a GPU: on an H200 a candidate takes 3 seconds on MNIST and 7 on
CIFAR-10.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import fedagg
from fedagg import data
from fedagg.algorithms import fedagg as default

MINI: dict[str, Any] = {"dataset": "mnist-mini", "model": "mlp", "rounds": 40}
CIFAR: dict[str, Any] = {"preset": "cifar10-cnn", "validation": 0.168}  # clients of an IID split then have full batches
HAPT: dict[str, Any] = {"dataset": "hapt", "model": "mlp", "partition": "user", "clients": 21, "batch_size": 32, "rounds": 30}
SMALL: dict[str, Any] = {"clients": 10, "participation": 1.0}
CELLS: dict[str, dict[str, Any]] = {
    "mnist-cnn-iid": {"preset": "mnist-cnn", "partition": "iid"},
    "mnist-cnn-shards": {"preset": "mnist-cnn", "partition": "shards"},
    "cifar10-cnn-iid": {**CIFAR, "partition": "iid"},
    "cifar10-cnn-dir06": {**CIFAR, "partition": "dirichlet", "sigma": 0.6},
    "cifar10-cnn-dir01": {**CIFAR, "partition": "dirichlet", "sigma": 0.1},
    "cifar10-cnn-500": {
        "preset": "cifar10-cnn",
        "partition": "dirichlet",
        "sigma": 0.6,
        "clients": 500,
        "participation": 0.02,
        "rounds": 200,
    },
    "emnist-iid": {"preset": "emnist-union-lenet5", "partition": "iid"},
    "emnist-dir06": {"preset": "emnist-union-lenet5", "partition": "dirichlet", "sigma": 0.6},
    "emnist-shards": {"preset": "emnist-union-lenet5", "partition": "shards"},
    "hapt": {**HAPT, "participation": 0.2},
    "hapt-all": {**HAPT, "participation": 1.0},
    "mnist-linear-iid": {"preset": "mnist-linear", "partition": "iid"},
    "mnist-linear-shards": {"preset": "mnist-linear", "partition": "shards"},
    "mnist-linear-one-shard": {"preset": "mnist-linear", "partition": "shards", "shards": 1},
    "mnist-linear-shards-10-epochs": {"preset": "mnist-linear", "partition": "shards", "epochs": 10},
    "mnist-linear-shards-batches-of-8": {"preset": "mnist-linear", "partition": "shards", "batch_size": 8},
    "mini-linear-iid": {**MINI, "model": "linear", "partition": "iid", "rounds": 30},
    "mini-linear-shards": {**MINI, "model": "linear", "partition": "shards", "rounds": 30},
    "mini-linear-shards-all": {**MINI, "model": "linear", "partition": "shards", "rounds": 30, "participation": 1.0},
    "mini-linear-one-shard": {**MINI, "model": "linear", "partition": "shards", "shards": 1, "rounds": 30},
    "mini-mlp-iid": {**MINI, "partition": "iid", "rounds": 30},
    "mini-mlp-shards": {**MINI, "partition": "shards"},
    "mini-mlp-dir01-5-of-100": {**MINI, "partition": "dirichlet", "sigma": 0.1, "participation": 0.05, "rounds": 60},
    "mini-mlp-shards-10-of-10": {**MINI, **SMALL, "partition": "shards"},
    "mini-mlp-dir03-10-of-10": {**MINI, **SMALL, "partition": "dirichlet", "sigma": 0.3},
    "mini-mlp-one-shard": {**MINI, "partition": "shards", "shards": 1, "rounds": 60},
    "mini-mlp-one-shard-5-of-50": {**MINI, "partition": "shards", "shards": 1, "clients": 50, "participation": 0.1, "rounds": 60},
    "mini-mlp-one-shard-5-of-10": {**MINI, **SMALL, "participation": 0.5, "partition": "shards", "shards": 1},
    "mini-mlp-one-shard-10-of-10": {**MINI, **SMALL, "partition": "shards", "shards": 1},
}
# Constants of the algorithm in capitals, settings of a run in small letters.
CANDIDATES: dict[str, dict[str, Any]] = {
    "the default": {},
    "base rate 0.001": {"lr": 0.001},
    "base rate 1": {"lr": 1.0},
    "CLIP 3": {"CLIP": 3.0},
    "DECAY 0.006": {"DECAY": 0.006},
    "MEMORY 0.7": {"MEMORY": 0.7},
    "BARE_DECAY 0.012": {"BARE_DECAY": 0.012},
    "the same pull for all networks": {"BARE_DECAY": 0.003},
    "rates by Theorem 1": {"theorem": True},
    "rates by Theorem 1, alpha 0.5": {"theorem": True, "alpha": 0.5},
    "no memory": {"memory": "off"},
    "own gradient alone": {"direction": "local"},
}


def main(cells: list[str], seeds: list[int]) -> None:
    for cell in cells:
        settings = dict(CELLS[cell])
        samples = data.load(settings.pop("dataset", None) or fedagg.config.PRESETS[settings["preset"]]["dataset"])
        for name, candidate in CANDIDATES.items():
            constants = {key: value for key, value in candidate.items() if key.isupper()}
            more = {key: value for key, value in candidate.items() if key not in constants}
            with patch.multiple(default, **constants) if constants else nullcontext():
                found = [
                    100 * fedagg.run(data=samples, seed=seed, **{"validation": 0.1, "eval_every": 5, **settings, **more}).accuracy
                    for seed in seeds
                ]
            print(
                f"{cell:34s} {name:34s} {sum(found) / len(found):6.2f}  {' '.join(f'{value:.2f}' for value in found)}", flush=True
            )


if __name__ == "__main__":
    chosen = sys.argv[1].split(",") if len(sys.argv) > 1 else list(CELLS)
    main(chosen, [int(seed) for seed in sys.argv[2].split(",")] if len(sys.argv) > 2 else [5])
