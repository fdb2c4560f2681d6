"""Errors before any long work starts, and modules that do things that no list foresees."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedagg
import tiny
from fedagg import engines
from fedagg.config import Config
from fedagg.engines.base import Problem
from fedagg.engines.batched import Batched
from fedagg.errors import FedaggError, SettingError
from fedagg.work import ClientOptions

RNG = np.random.default_rng(0)
X = RNG.standard_normal((200, 20)).astype(np.float32)
Y = (X @ RNG.standard_normal((20, 3))).argmax(1)
DATA = fedagg.Dataset(X, Y, X[:50], Y[:50])
IMAGES = fedagg.Dataset(X[:, :16].reshape(-1, 1, 4, 4), Y, X[:50, :16].reshape(-1, 1, 4, 4), Y[:50])
PARTS = np.split(np.arange(200), [30, 75, 120])
FEW: dict[str, Any] = {"algorithm": "fedavg", "rounds": 2, "participation": 1.0, "lr": 0.05, "batch_size": 16}


class Refusing(nn.Module):
    """Refuses batches below a certain size, without saying why."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.o, self.least = nn.Linear(20, 3), least

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < self.least:
            raise RuntimeError
        return self.o(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.o(x), x


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))


def test_masks_name_the_samples_they_mark() -> None:
    owner = np.arange(200) % 4
    one, two = (
        fedagg.run(data=DATA, parts=parts, **FEW)
        for parts in ([owner == k for k in range(4)], [np.flatnonzero(owner == k) for k in range(4)])
    )
    assert one.history[0]["samples"] == 600
    assert one.history[-1]["loss"] == two.history[-1]["loss"]


@pytest.mark.parametrize(
    "part", [[0.5, 1.0], [], [[0], [1, 2]], [[0, 1]], [-1], [200], np.ones(199, dtype=bool), np.zeros(200, dtype=bool)], ids=str
)
def test_parts_that_name_no_samples(part: Any) -> None:
    with pytest.raises(SettingError, match="parts = 'client 1': give at least one index from 0 to 199"):
        fedagg.run(data=DATA, parts=[[0, 1], part], **FEW)


def test_settings_change_a_configuration() -> None:
    config = Config(rounds=2, clients=10, algorithm="fedavg")
    assert len(fedagg.run(config, data=DATA, rounds=3).history) == 3
    result = fedagg.run(config, data=DATA, parts=PARTS)
    assert (result.config.clients, result.config.partition, result.config.dataset) == (4, "custom", "custom")
    with pytest.raises(SettingError, match="roundz"):
        fedagg.run(config, roundz=3)
    with pytest.raises(SettingError, match="preset = 'mnist-cnn': a configuration is already complete"):
        fedagg.run(config, preset="mnist-cnn")


@pytest.mark.parametrize("said", [{"clients": 20}, {"clients": 2}, {"partition": "shards"}, {"dataset": "mnist"}])
def test_settings_that_contradict_what_is_given(said: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="given from Python"):
        fedagg.run(data=DATA, parts=PARTS, **FEW, **said)


def test_a_mask_of_numbers_is_not_taken_for_indices() -> None:
    with pytest.raises(SettingError, match="parts = 'client 0': looks like a mask of numbers"):
        fedagg.run(data=DATA, parts=[(np.arange(200) % 4 == k).astype(np.uint8) for k in range(4)], **FEW)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": nn.Sequential(nn.Linear(20, 2))}, "returns 2 numbers per sample; labels from 0 to 2 need 3"),
        ({"model": nn.Linear(9, 3)}, r"does not take samples of shape \(20,\) in float32: mat1 and mat2"),
        ({"model": small().double()}, r"0\.weight is float64, but weights are trained in float32; give model.float"),
        ({"model": nn.LazyLinear(3)}, "has layers without sizes"),
        ({"model": nn.Linear}, "model = 'Linear': give a torch module"),
        ({"data": (X, Y, X)}, r"data = 'tuple of 3': give \(x, y\)"),
        ({"loss": nn.CrossEntropyLoss()}, r"loss = 'CrossEntropyLoss': must give one number per sample.*reduction='none'"),
        ({"loss": lambda output, target: 1.0}, "does not take the model's output: 'float'"),
        ({"loss": lambda output, target: functional.cross_entropy(output.detach(), target, reduction="none")}, "has no gradient"),
        ({"model": Refusing(9)}, "does not take samples of shape .* in float32: RuntimeError"),
        ({"model": Refusing(2), "parts": [np.arange(20), np.arange(17)]}, "batch_size = 16: leaves client 1 with a batch of one"),
        ({"model": Pair()}, r"must return a row of numbers per sample, .*, but returned a tuple for 2 samples"),
        ({"model": nn.Sequential(small(), nn.Unflatten(1, (3, 1)))}, r"returned \(2, 3, 1\) for 2 samples"),
        ({"parts": (part for part in PARTS)}, "parts = 'generator': give a list"),
        ({"parts": []}, "parts = 'list': give a list or dictionary with the samples of every client, at least one"),
        ({"config": {"rounds": 3}}, "config = 'dict': give a fedagg.Config"),
        ({"norm": "batch"}, "norm = 'batch': is for named networks"),
        ({"loss": functional.mse_loss}, "loss = 'mse_loss': does not take the model's output"),
        ({"loss": "mse"}, "loss = 'mse': give a function of output and target"),
        ({"data": fedagg.Dataset(X, Y + 1, X, Y + 1)}, r"labels from 0 to 3 need 4; no label is 0: count from 0, with y - 1"),
        ({"callbacks": print}, "callbacks = 'builtin_function_or_method': give a list"),
        ({"callbacks": [print]}, "callbacks = 'print': give an object with some of the methods started"),
        ({"data": fedagg.Dataset((X * 9).astype(np.int64), Y, (X * 9).astype(np.int64), Y)}, "in int64"),
    ],
)
def test_arguments_that_do_not_fit_together_are_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        fedagg.run(**{"data": DATA, "model": small()} | given, **FEW)
    assert "\n" not in str(caught.value)


def test_batch_normalisation_and_a_batch_of_one() -> None:
    normed = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    parts = [np.arange(33), np.arange(33, 70)]
    with pytest.raises(SettingError, match="batch_size = 16: leaves client 0 with a batch of one"):
        fedagg.run(data=DATA, model=normed, parts=parts, **FEW)
    assert len(fedagg.run(data=DATA, model=normed, parts=parts, **FEW | {"batch_size": 15}).history) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(SettingError, match="is scripted"):
        fedagg.run(data=DATA, model=torch.jit.script(small()), parts=PARTS, **FEW)


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    fedagg.run(data=DATA, **FEW, threads=before + 1)
    assert torch.get_num_threads() == before


def test_resuming_wants_the_same_parts_module_and_loss(tmp_path: Any) -> None:
    def train(parts: Any = PARTS, model: nn.Module | None = None, **more: Any) -> fedagg.Result:
        return fedagg.run(data=DATA, parts=parts, model=model or small(), **FEW, **more)

    train(out=tmp_path / "run")
    moved = np.split(np.arange(200), [40, 75, 120])
    tanh = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3))
    half = lambda output, target: functional.cross_entropy(output, target, reduction="none") / 2  # noqa: E731
    for other in ({"parts": moved}, {"model": tanh}, {"loss": half}, {"model": frozen()}):
        with pytest.raises(FedaggError):
            train(resume=tmp_path / "run", **other)
    assert len(train(resume=tmp_path / "run").history) == 2
    train(out=tmp_path / "body", model=frozen())
    with pytest.raises(FedaggError, match="model is not what the run began with"):
        train(resume=tmp_path / "body", model=frozen(1.0))


def frozen(shift: float = 0.0) -> nn.Module:
    module = small()
    nn.init.constant_(module[0].weight.requires_grad_(False), 0.1 + shift)
    return module


class InPlace(nn.Module):
    """Overwrites a value that it uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.o = nn.Linear(20, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.o(self.r(h) + h)


def hooked() -> nn.Module:
    module = small()
    module[0].register_forward_hook(lambda _module, _given, output: 0.1 * output)
    return module


class Reassigning(nn.Module):
    """Keeps a buffer without changing it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)
        self.register_buffer("m", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.m = 0.9 * self.m + 0.1
        return self.o(x) * (1 + self.m)


class Centred(nn.Module):
    """Looks at the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(20, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.o(torch.tanh(h - h.mean(0)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.relu(self.b(torch.relu(self.a(x)))))


class Choosing(nn.Module):
    """Takes another branch for other data."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(x) if x.mean() > 0 else self.o(2 * x)


class Keeping(nn.Module):
    """Keeps an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(20, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.a(x))
        return self.o(self.last)


class Masked(nn.Module):
    """Constants that do not fit into a float, that are not finite, and that are not numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("big", torch.tensor([2**24 + 1, 2**40 + 1]))
        self.register_buffer("third", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("live", torch.arange(20) > 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(x * self.live) + 0.0 * torch.softmax(self.mask, 1).sum()


class Counting(nn.Module):
    """Counts its steps; paused clients make none."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n += 1
        return self.o(x) / (1 + 0.1 * self.n)


class Slow(nn.Module):
    """Remembers a little of every batch, padding included if there were any."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)
        self.register_buffer("m", torch.full((20,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.m.mul_(0.99).add_(0.01 * x.detach().mean(0))
        return self.o(x - self.m)


class Noisy(nn.Module):
    """Draws random numbers without a visible effect, and looks at the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(x - x.mean(0) + 0.0 * torch.randn_like(x))


def twice() -> nn.Module:
    same = nn.Linear(20, 20)
    return nn.Sequential(same, nn.ReLU(), same, nn.GELU(), nn.Linear(20, 3))


def unkept() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(20, 8)), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "make", [InPlace, hooked, Reassigning, Centred, Tied, Choosing, Keeping, Masked, Counting, Slow, Noisy, twice, unkept, normed]
)
def test_any_module_trains_as_it_does_client_by_client(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    plain, auto = (fedagg.run(data=DATA, model=module, parts=PARTS, engine=engine, **FEW) for engine in ("sequential", "auto"))
    assert not any(row.get("unchanged") for row in auto.history)
    for (name, ours), theirs in zip(auto.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=1e-5), name
    copy.deepcopy(auto.model)
    if isinstance(auto.model, Masked):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(auto.model.buffers(), module.buffers(), strict=True))


def test_a_module_that_cannot_be_batched_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match=r"engine = 'batched'.*choose auto or sequential"):
        fedagg.run(data=DATA, model=Choosing(), parts=PARTS, engine="batched", **FEW)


class Dropping(nn.Module):
    """Draws from torch's own generator, in no layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.o = nn.Conv2d(1, 4, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(functional.dropout(torch.relu(self.c(x)), 0.5, self.training).flatten(1))


def test_what_a_module_draws_comes_from_the_seed() -> None:
    torch.manual_seed(0)
    module = Dropping()
    before = torch.get_rng_state()
    one, two = (fedagg.run(data=IMAGES, model=module, parts=PARTS, **FEW).history[-1]["loss"] for _ in range(2))
    assert one == two
    assert torch.equal(before, torch.get_rng_state())


def test_a_run_in_which_nobody_was_valid_says_so() -> None:
    with pytest.warns(UserWarning, match=r"no client was valid in any round \(not finite\)"):
        fedagg.run(data=DATA, model=small(), parts=PARTS, **FEW | {"lr": 1e5, "epochs": 20})


def test_nobody_to_personalise_for(tmp_path: Any) -> None:
    body = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    result = fedagg.run(
        data=DATA, model=body, parts=PARTS, **FEW | {"algorithm": "fedbabu", "dropout_rate": 1.0}, out=tmp_path / "run"
    )
    assert result.figures == {}
    assert (tmp_path / "run" / "result.json").exists()


def test_padding_stays_out_of_batch_statistics_where_a_module_draws() -> None:
    """The trial has nothing to compare there, so the layers must tell."""
    module = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 3))
    options = ClientOptions(epochs=1, batch_size=16)
    problem = Problem(module, torch.from_numpy(X), torch.from_numpy(Y), 3, options, torch.device("cpu"))
    engine = engines.build("batched", problem, Config(model="custom"))
    assert isinstance(engine, Batched)
    assert engine.whole


# --- what cannot be meant ---------------------------------------------------------------------------------------------


def test_images_with_their_channels_last_are_not_shifted() -> None:
    x, y = np.random.default_rng(0).random((12, 8, 8, 3), dtype=np.float32), np.arange(12) % 2
    with pytest.raises(SettingError, match=r"channels, height, width.*transpose"):
        fedagg.run(data=fedagg.Dataset(x, y, x, y), model="linear", clients=2, rounds=1, augment="crop")
    turned = x.transpose(0, 3, 1, 2)
    fedagg.run(data=fedagg.Dataset(turned, y, turned, y), model="linear", clients=2, rounds=1, augment="crop")


def test_a_frozen_module_is_named_as_the_cause() -> None:
    with pytest.raises(SettingError, match="has no trainable parameters"):
        fedagg.run(data=tiny.dataset(), model=tiny.network().requires_grad_(False), clients=2, rounds=1)


def test_labels_of_another_kind_are_not_taken_for_classes() -> None:
    x, y = np.zeros((3, 2), dtype=np.float32), np.array([0, 1, 2_000_000_000])
    with pytest.raises(SettingError, match=r"2000000000.*np.unique"):
        fedagg.Dataset(x, y, x, y)


def test_a_run_continues_in_its_own_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="leave out `out`"):
        tiny.job(resume=tmp_path / "one", out=tmp_path / "two")


def test_a_result_without_figures_is_still_json(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the loss of the model is not finite"):
        blown = tiny.job(algorithm="fedadam", server_lr=1e38, rounds=1, out=tmp_path / "run")
    assert blown.summary()["loss"] is None
    json.dumps(blown.summary(), allow_nan=False)
    assert "NaN" not in (tmp_path / "run" / "result.json").read_text(encoding="utf-8")


def test_tokens_beyond_an_embedding_are_found_before_anything_is_written(tmp_path: Path) -> None:
    x, y = torch.zeros(60, 4, dtype=torch.int64), torch.arange(60) % 2
    x[40:] = 30
    model = nn.Sequential(nn.Embedding(20, 3), nn.Flatten(), nn.Linear(12, 2))
    for data in (fedagg.Dataset(x, y, x[:9], y[:9]), fedagg.Dataset(x[:9], y[:9], x, y)):
        with pytest.raises(SettingError, match=r"^model = 'custom': .* tokens from 0 to 30 .*out of range"):
            fedagg.run(data=data, model=model, clients=3, rounds=1, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_the_error_guesses_why_a_model_does_not_take_the_samples() -> None:
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    with pytest.raises(SettingError, match=r"give model.float\(\)"):
        fedagg.run(data=fedagg.Dataset(x, y, x, y), model=nn.Linear(4, 2).double(), clients=3, rounds=1)
    with pytest.raises(SettingError, match=r"features go in as x.astype\('float32'\)"):
        fedagg.run(data=fedagg.Dataset(x.long(), y, x.long(), y), model="linear", clients=3, rounds=1)


def test_no_batch_size_helps_a_client_with_one_sample() -> None:
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(SettingError, match=r"^partition = 'custom': gives client 1 one sample"):
        fedagg.run(data=fedagg.Dataset(x, y, x, y), model=model, parts=[[0, 1, 2], [3]], rounds=1)


def test_features_of_very_different_ranges_are_worth_a_warning() -> None:
    x = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0.5).long()

    def trained(scale: list[float], **more: Any) -> list[str]:
        data = fedagg.Dataset(x * torch.tensor(scale), y, x * torch.tensor(scale), y)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fedagg.run(data=data, rounds=1, clients=3, lr=1e-9, algorithm="fedavg", progress=False, **more)
        return [str(one.message) for one in caught]

    (words,) = trained([1.0, 5000.0, 0.0])
    assert re.fullmatch(r"the ranges of features differ by a factor of [45],\d{3} \(columns 1 and 0\); --normalize .*", words)
    assert trained([1.0, 5000.0, 0.0], normalize=True) == []
    assert trained([500.0, 1.0, 0.0]) == []  # a constant is no matter
