"""Every method on a small network, and every network with some method: a round or two on a handful of samples, and nothing breaks.
Methods that treat the head apart go to networks of different kinds."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedagg
from fedagg import algorithms, models
from fedagg.errors import SettingError

COLOUR = ("cifar10-cnn", "alexnet", "vgg11", "resnet18", "resnet18-gn", "googlenet", "densenet121")
TEXT = ("char-lstm", "char-transformer")
BIG = (
    "alexnet",
    "vgg11",
    "resnet18",
    "resnet18-gn",
    "googlenet",
    "densenet121",
)  # one client a round: up to 23 million weights each
METHODS: list[tuple[str, dict[str, Any], str]] = [
    (name, {}, "lenet5") for name in sorted(algorithms.REGISTRY.keys() - {"fedagg-paper"})
]
METHODS += [("fedagg", {"variant": "paper"}, "lenet5")]  # the paper's form is chosen by `variant`
NETWORKS = {
    "linear": "fedagg",
    "mnist-cnn": "fedbabu",
    "lenet5": "fedgh",
    "cifar10-cnn": "fedagg",
    "alexnet": "fedbabu",
    "vgg11": "fedavg",
    "resnet18": "fedgh",
    "googlenet": "fedbabu",
    "densenet121": "fedgh",
    "mlp": "fedagg",
    "resnet18-gn": "fedavg",
    "char-lstm": "fedgh",
    "char-transformer": "fedagg",
}


def shape_of(name: str) -> tuple[int, ...]:
    return (6,) if name in TEXT else (3, 32, 32) if name in COLOUR else (1, 28, 28)


@cache
def samples(shape: tuple[int, ...]) -> fedagg.Dataset:
    rng = np.random.default_rng(1)
    x, y = rng.random((8, *shape), dtype=np.float32), np.arange(8) % 3
    if len(shape) == 1:
        x = (3 * x).astype(np.int64)  # tokens
    return fedagg.Dataset(x[:5], y[:5], x[5:], y[5:], classes=3)


@cache
def built(name: str, shape: tuple[int, ...]) -> nn.Module:
    """Built once: the run works on a copy."""
    return models.build(name, shape, 3, seed=3)


def run(algorithm: str, name: str, **settings: Any) -> fedagg.Result:
    shape = shape_of(name)
    return fedagg.run(
        algorithm=algorithm,
        data=samples(shape),
        parts=[[0, 1], [2, 3, 4]],  # two clients of different sizes, one batch each
        model=built(name, shape),
        # What methods carry into a second round is one vector to them, whatever the model; FedAgg has no field before.
        rounds=1 if name in BIG and algorithm != "fedagg" else 2,
        epochs=1,
        batch_size=4,
        lr=0.01,
        participation=0.5 if name in BIG else 1.0,
        eval_every=2,
        engine="sequential",
        device="cpu",
        threads=1,
        **settings,
    )


def test_every_network_is_tested() -> None:
    assert set(NETWORKS) == set(models.names())


def test_a_method_that_needs_a_body_refuses_a_network_without() -> None:
    with pytest.raises(SettingError, match="body"):
        run("fedbabu", "linear")


@pytest.mark.parametrize(
    ("algorithm", "settings", "name"),
    [
        *METHODS,
        *(pytest.param(method, {}, name, marks=[pytest.mark.slow] if name in BIG else []) for name, method in NETWORKS.items()),
    ],
)
def test_trains(algorithm: str, settings: dict[str, Any], name: str) -> None:
    result = run(algorithm, name, **settings)
    module = built(name, shape_of(name))
    before, after = module.state_dict(), result.model.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert all(after[key].dtype == value.dtype for key, value in before.items())
    assert any(not torch.equal(value, before[key]) for key, value in after.items())
    assert np.isfinite(result.loss)
    assert all(row["left_out"] == 0 for row in result.history)
    counters = {int(value) for key, value in after.items() if key.endswith("num_batches_tracked")}
    assert counters <= {len(result.history)}  # one batch a round, whoever took part
    assert bool(counters) == any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
