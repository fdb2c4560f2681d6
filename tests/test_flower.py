"""FedAgg on Flower: the same numbers as the simulator, whatever the nodes do."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

import numpy as np
import torch
from flower_grid import HereGrid

import fedagg
from fedagg import models, partition, seeding
from fedagg.config import Config, make
from fedagg.flower import FedAggStrategy, client_app
from fedagg.flower.server import CUSTOM

NODES = 4
DATA = fedagg.data.load("mnist-mini")
PARTS = partition.partition("dirichlet", DATA.y_train.numpy()[:240], NODES, 3, sigma=0.6)


def model(name: str = "linear") -> torch.nn.Module:
    return models.build(name, DATA.shape, DATA.classes, seed=seeding.derive(0, "model"))


def node(context):
    part = torch.as_tensor(PARTS[context.node_config["partition-id"]])
    return fedagg.Dataset(DATA.x_train[part], DATA.y_train[part], DATA.x_test[:100], DATA.y_test[:100], classes=10)


def settings(**changes) -> Config:
    return make(CUSTOM | {"clients": NODES, "participation": 0.5, "rounds": 3, "epochs": 2, "lr": 0.05} | changes)


def simulated(name="linear", **changes):
    data = fedagg.Dataset(DATA.x_train[:240], DATA.y_train[:240], DATA.x_test[:100], DATA.y_test[:100])
    return fedagg.run(settings(**changes), data=data, model=model(name), parts=PARTS)


def federated(name="linear", tamper=None, out=None, quorum=1, **changes):
    grid = HereGrid(client_app(lambda: model(name), node), NODES, tamper)
    strategy = FedAggStrategy(model(name), settings(**changes), out=out, quorum=quorum)
    strategy.run(grid, wait=0)
    return strategy, grid


@pytest.mark.parametrize("method", ["fedavg", "fedagg", "fedadam", "feddyn", "scaffold", "fedbabu", "fedgh"])
def test_agrees_with_the_simulator(method):
    name = "mnist-cnn" if method in ("fedbabu", "fedgh") else "linear"
    alone = simulated(name, algorithm=method)
    strategy, _ = federated(name, algorithm=method)
    w = strategy.layout.pack(alone.model).w
    assert torch.allclose(strategy.algorithm.reported(strategy.now).w, w, rtol=0, atol=1e-5)
    assert (w - strategy.layout.pack(model(name)).w).norm() > 0.01
    for here, there in zip(strategy.book.history, alone.history, strict=True):
        for key in ("participants", "bytes_up", "bytes_down", "samples", "passes"):
            assert here[key] == there[key], key
        for key in ("train_loss", "drift", "loss", "accuracy"):
            assert here[key] == pytest.approx(there[key], abs=1e-4), key
