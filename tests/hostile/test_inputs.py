"""Data and modules that cannot be meant, or are not what they seem: one line says so, before any work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedagg
from fedagg import evaluate
from fedagg.data import load
from fedagg.engines.base import Problem
from fedagg.errors import SettingError
from fedagg.flat import Layout
from fedagg.work import ClientOptions

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 4)).astype(np.float32)
Y = (X @ RNG.standard_normal((4, 3))).argmax(1)
FEW: dict[str, Any] = {"algorithm": "fedavg", "clients": 3, "participation": 1.0, "rounds": 2, "batch_size": 8, "device": "cpu"}


def data(x: Any = X, y: Any = Y) -> fedagg.Dataset:
    return fedagg.Dataset(x, y, x[:20], y[:20])


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.from_numpy(X).to_sparse(), "sparse_coo tensor.*to_dense"),
        (torch.zeros(60, 4, device="meta"), "meta tensor"),
        (np.ma.masked_array(X, X > 1), "masked array.*filled"),
        (np.full((60, 4), 2**63 + 5, dtype=np.uint64), r"uint64.*2\*\*63"),
        (torch.full((60, 4), 7, dtype=torch.uint64).bitwise_or(torch.tensor(2**63, dtype=torch.uint64)), "uint64"),
    ],
)
def test_samples_that_are_no_numbers(x: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        fedagg.Dataset(x, Y, x, Y)
    assert "\n" not in str(caught.value)


def test_labels_beyond_int64_and_masked_ones() -> None:
    with pytest.raises(SettingError, match=r"y_train = 'uint64'"):
        fedagg.Dataset(X, np.full(60, 2**64 - 1, dtype=np.uint64), X, Y)
    with pytest.raises(SettingError, match="y_train = 'masked array'"):
        fedagg.Dataset(X, np.ma.masked_array(Y, Y == 1), X, Y)


def test_arrays_that_only_could_be_masked_and_small_unsigned_numbers_are_taken() -> None:
    assert torch.equal(data(np.ma.masked_array(X)).x_train, torch.from_numpy(X))
    assert data(np.arange(240, dtype=np.uint64).reshape(60, 4)).x_train.max() == 239


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o, self.lock = nn.Linear(4, 3), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.o(x)


class Cast(nn.Module):
    """Takes float32, and works in another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.o, self.dtype = nn.Linear(4, 5).to(dtype), nn.Linear(5, 3), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.a(x.to(self.dtype)).float())


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(x).squeeze()


class Other(nn.Module):
    """Puts out something else when it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.o(x) if self.training else (self.o(x), x)


def active() -> nn.Module:
    """Holds a tensor of somebody's graph."""
    module = nn.Linear(4, 3)
    module.last = module(torch.from_numpy(X))  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Locked(), "model = 'Locked': cannot be copied"),
        (active(), "model = 'Linear': cannot be copied"),
        (nn.Linear(4, 3, device="meta"), "weight is on the meta device"),
        (Cast(torch.float64), r"a\.weight is float64.*give model.float\(\)"),
        (Cast(torch.bfloat16), r"a\.weight is bfloat16"),
        (Other(), "evaluation mode"),
    ],
)
def test_modules_that_cannot_be_trained(model: nn.Module, words: str, engine: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        fedagg.run(data=data(), model=model, engine=engine, **FEW)
    assert "\n" not in str(caught.value)


def test_a_frozen_layer_may_have_any_type() -> None:
    module = Cast(torch.float64)
    module.a.requires_grad_(False)
    assert len(fedagg.run(data=data(), model=module, **FEW).history) == 2


def test_a_batch_of_one_that_loses_its_axis() -> None:
    """60 samples make clients of 20, and batches of 19 leave one."""
    with pytest.raises(SettingError, match="batch_size = 19: leaves client 0 with a batch of one"):
        fedagg.run(data=data(), model=Squeezed(), **FEW | {"batch_size": 19})
    assert len(fedagg.run(data=data(), model=Squeezed(), **FEW).history) == 2
    with pytest.raises(SettingError, match="evaluation mode"):
        fedagg.run(data=fedagg.Dataset(X, Y, X[:1], Y[:1]), model=Squeezed(), **FEW)


def test_no_test_sample_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evaluate.BATCH, "cpu", 19)
    result = fedagg.run(data=data(), model=Squeezed(), **FEW)  # 20 test samples
    module = nn.Linear(4, 3)
    problem = Problem(module, torch.from_numpy(X), torch.from_numpy(Y), 3, ClientOptions(1, 8), torch.device("cpu"))
    evaluator = evaluate.Evaluator(problem, torch.from_numpy(X[:39]), torch.from_numpy(Y[:39]))
    hits = module(torch.from_numpy(X[:39])).argmax(1) == torch.from_numpy(Y[:39])
    assert torch.equal(evaluator.samples(Layout(module).pack(module))[1][0][0], hits.double())
    assert 0 <= result.accuracy <= 1
    for count in (1, 18, 19, 20, 38, 39, 57, 58):
        parts = evaluate.split_rows(torch.arange(count), 19)
        assert torch.equal(torch.cat(parts), torch.arange(count))
        assert min(map(len, parts)) > 1 or count == 1


def test_a_constant_that_is_no_number_is_nobodys_fault() -> None:
    module = nn.Linear(4, 3)
    module.register_buffer("unknown", torch.tensor([float("nan"), 1.0]))
    for engine in ("sequential", "batched"):
        result = fedagg.run(data=data(), model=module, engine=engine, **FEW)
        assert [row["left_out"] for row in result.history] == [0, 0]
        assert torch.isnan(result.model.unknown[0])


@pytest.mark.parametrize("folder", [5, "", b"runs", Path])
def test_folders_that_are_no_names(folder: Any) -> None:
    for keyword in ("out", "resume"):
        with pytest.raises(SettingError, match=f"{keyword} = .*give the name of a folder"):
            fedagg.run(data=data(), model=nn.Linear(4, 3), **{keyword: folder}, **FEW)


def test_other_defaults_of_torch_are_no_concern_of_a_runs() -> None:
    plain = fedagg.run(data=data(), **FEW).model.state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            ours = fedagg.run(data=data(), **FEW)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, plain[name])
        assert value.dtype == torch.float32


# --- what a run says of its data ---------------------------------------------------------------------------------------


def test_data_that_were_changed_are_not_recorded_as_the_named_set(tmp_path: Path) -> None:
    mini = load("mnist-mini")
    written = load("mnist-mini")
    written.x_train.mul_(2)
    ours = fedagg.Dataset(mini.x_train[:500], mini.y_train[:500], mini.x_test, mini.y_test, name="mnist-mini")
    for given in (mini.normalized(), mini.held_back(0.1), written, ours):
        assert fedagg.run(data=given, **FEW | {"rounds": 1}).config.dataset == "custom"
    assert fedagg.run(data=mini, **FEW | {"rounds": 1}).config.dataset == "mnist-mini"
