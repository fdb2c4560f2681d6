"""Who is left out for having moved too far, and who must not be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedagg
from fedagg.aggregate import FAR, judge
from fedagg.clients import Clients
from fedagg.errors import FedaggWarning
from fedagg.flat import Model
from fedagg.work import Chunk, ClientOptions, Job, Work

RNG = np.random.default_rng(0)
TRUE = RNG.standard_normal((4, 2))


def samples(count: int, scale: float = 1.0) -> tuple[Any, Any]:
    x = RNG.standard_normal((count, 4)).astype(np.float32)
    return scale * x, (x @ TRUE).argmax(1)


FEW: dict[str, Any] = {
    "algorithm": "fedavg",
    "participation": 1.0,
    "rounds": 6,
    "batch_size": 10,
    "lr": 0.5,
    "epochs": 1,
    "device": "cpu",
    "engine": "sequential",
}


def test_judging_those_that_stand_still() -> None:
    assert judge([0.0] * 7 + [1.0, 1.1, 0.9], [True] * 10) == [None] * 10
    assert judge([0.0] * 7 + [1.0, 1.1, 1e6], [True] * 10) == [None] * 9 + [FAR]
    assert judge([1.0, 1.0, 1e6], [True] * 3, drop=False) == [None] * 3
    assert judge([1.0, 1.0, float("nan")], [True] * 3, drop=False) == [None, None, "not finite"]


def fitted(value: float) -> tuple[fedagg.Dataset, nn.Module, list[Any]]:
    """Of ten clients seven know one class alone, which the model is sure of: their gradients are 0, or next to it."""
    x = np.concatenate([np.full((140, 4), value, np.float32), samples(60)[0]])
    y = np.concatenate([np.zeros(140, np.int64), (x[140:] @ TRUE).argmax(1)])
    module = nn.Linear(4, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 4))
        module.bias.zero_()
    test = x[140:], y[140:]
    return fedagg.Dataset(x, y, *test), module, list(np.split(np.arange(200), 10))


@pytest.mark.parametrize(("value", "lr"), [(20.0, 0.5), (3.0, 0.1)])
def test_clients_that_have_something_to_learn_are_heard_among_those_that_have_not(value: float, lr: float) -> None:
    data, module, parts = fitted(value)
    result = fedagg.run(data=data, model=module, parts=parts, **FEW | {"rounds": 40, "lr": lr})
    assert result.left_out == {}
    assert result.accuracy > max(0.65, result.history[0]["accuracy"])


def odd_one() -> tuple[fedagg.Dataset, nn.Module, list[Any]]:
    """One client's features are thirty times the others'."""
    (x, y), (wide, labels), test = samples(90), samples(10, 30.0), samples(50)
    data = fedagg.Dataset(np.concatenate([x, wide]), np.concatenate([y, labels]), *test)
    module = nn.Linear(4, 2)
    with torch.no_grad():
        module.weight.mul_(0.01)
    return data, module, list(np.split(np.arange(100), 10))


def test_a_run_says_who_was_left_out_and_how_often(tmp_path: Path) -> None:
    data, module, parts = odd_one()
    with pytest.warns(FedaggWarning, match=r"left out \(moved absurdly far\) of 6 rounds: client 9 in \d; outliers = keep"):
        dropped = fedagg.run(data=data, model=module, parts=parts, out=tmp_path / "run", **FEW)
    told = json.loads((tmp_path / "run" / "result.json").read_text())["left_out"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert told == {FAR: {"9": sum("9" in row["left_out"] for row in rows)}} == dropped.left_out
    kept = fedagg.run(data=data, model=module, parts=parts, outliers="keep", **FEW)
    assert kept.left_out == {}
    assert not torch.equal(kept.model.weight, dropped.model.weight)
    # A resumed run tells of the whole of it.
    with pytest.warns(FedaggWarning, match="of 8 rounds: client 9"):
        more = fedagg.run(data=data, model=module, parts=parts, resume=tmp_path / "run", **FEW | {"rounds": 8})
    assert more.left_out[FAR]["9"] >= dropped.left_out[FAR]["9"]


def test_asked_for_faults_are_no_news() -> None:
    result = fedagg.run(clients=10, participation=1.0, rounds=2, corrupt_rate=0.5, algorithm="fedavg", device="cpu")
    assert result.left_out


class Given:
    """An engine whose clients bring home what they were told to."""

    note = ""

    def __init__(self, updates: list[float]) -> None:
        self.updates = updates

    def run(self, model: Model, work: Work, jobs: list[Job], memory: None) -> Any:
        n = len(jobs)
        delta = torch.tensor(self.updates)[:, None].expand(n, 3).contiguous()
        one = torch.ones(n)
        yield Chunk(
            start=model.w,
            jobs=jobs,
            delta=delta,
            buffers=torch.zeros(n, 0),
            loss=one,
            first=one,
            behind=torch.zeros(n),
            norm=torch.zeros(n),
            rates=one[:, None],
            steps=one.long(),
        )


@pytest.mark.parametrize(("robust", "expected"), [("trimmed", 1.5), ("median", 1.5)])
def test_a_robust_rule_sees_all(robust: str, expected: float) -> None:
    """The numbers of Flower's own test of a trimmed mean."""
    config = fedagg.Config(robust=robust)
    assert not config.drops_outliers
    assert fedagg.Config(robust=robust, outliers="drop").drops_outliers
    assert fedagg.Config().drops_outliers
    assert not fedagg.Config(outliers="keep").drops_outliers
    clients = Clients(
        engine=Given([0.5, 1.0, 2.0, 100.0]), t=0, ids=[0, 1, 2, 3], samples=lambda i: torch.arange(5), total=4, seed=0,
        local=ClientOptions(epochs=1, batch_size=5), model=Model(torch.zeros(3), torch.zeros(0)),
        robust=robust, trim=0.25, drop=config.drops_outliers,
    )  # fmt: skip
    outcome = clients.train(Work(rate=torch.ones(1)))
    assert outcome.mean.tolist() == pytest.approx([expected] * 3)


def test_the_servers_clients_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    train = Clients.train
    monkeypatch.setattr(Clients, "train", lambda self, work: (seen.append(self.drop), train(self, work))[1])
    quick: dict[str, Any] = {"clients": 4, "participation": 0.5, "rounds": 1, "algorithm": "fedavg", "device": "cpu"}
    for robust in ("mean", "median"):
        fedagg.run(robust=robust, **quick)
    assert seen == [True, False]
