"""The text models: their sizes, the LSTM against torch's own, and every form of engine against the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

import fedagg
from fedagg import Dataset, models
from fedagg.engines import Sequential, choose, stacked
from fedagg.engines.base import Problem
from fedagg.engines.batched import Batched
from fedagg.engines.graph import traced
from fedagg.engines.layers import GroupNorm
from fedagg.engines.threaded import Threaded
from fedagg.errors import SettingError
from fedagg.models import text
from fedagg.work import ClientOptions, Work
from test_engines import SIZES, assert_same, forms, job_list, works

NAMES = ("char-lstm", "char-transformer")
LENGTH, VOCABULARY = 7, 11


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"HIDDEN": 12, "WIDTH": 12, "HEADS": 3, "BLOCKS": 2}.items():
        monkeypatch.setattr(text, name, size)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def tokens(rows: int, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def problem(name: str, every: bool = False, **options: Any) -> Problem:
    module = models.build(name, (LENGTH,), VOCABULARY, seed=1, tokens=every)
    x = tokens(sum(SIZES))
    y = tokens(sum(SIZES), seed=4)
    local = ClientOptions(epochs=2, batch_size=4, **options)
    loss: dict[str, Any] = {"loss": token_loss} if every else {}
    return Problem(module, x, y if every else y[:, 0], VOCABULARY, local, torch.device("cpu"), **loss)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)


def test_char_lstm_has_the_size_of_leafs() -> None:
    """With one bias a layer, as in TensorFlow, it would be 820,522 for 90 characters, as papers that use it say."""
    gates, biases = 4 * 256 * (8 + 256) + 4 * 256 * (256 + 256), 2 * 4 * 256
    assert count(models.build("char-lstm", (80,), 90)) == 90 * 8 + gates + 2 * biases + 257 * 90 == 820_522 + biases


def test_char_transformer_is_four_blocks_of_width_128() -> None:
    block = 2 * 2 * 128 + 129 * 3 * 128 + 129 * 128 + 129 * 512 + 513 * 128
    assert count(models.build("char-transformer", (80,), 90)) == (90 + 80) * 128 + 4 * block + 2 * 128 + 129 * 90


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_for_the_last_position_or_for_every_one(name: str, tiny: None) -> None:
    x = tokens(3)
    last, every = (models.build(name, (LENGTH,), VOCABULARY, tokens=which) for which in (False, True))
    every.load_state_dict(last.state_dict())
    assert every(x).shape == (3, LENGTH, VOCABULARY)
    torch.testing.assert_close(last(x), every(x)[:, -1])
    changed = x.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % VOCABULARY
    torch.testing.assert_close(every(changed)[:, :4], every(x)[:, :4])  # nobody looks ahead
    assert not torch.allclose(every(changed)[:, 4:], every(x)[:, 4:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 28, 28), (0,)])
def test_samples_must_be_rows_of_tokens(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(SettingError, match=r"does not fit; it reads rows of token ids, samples of shape \(length,\)"):
        models.build(name, shape, 10)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_run_builds_the_model_for_a_label_a_token(engine: str, tiny: None) -> None:
    x = tokens(30)
    data = Dataset(x[:20], x[:20], x[20:], x[20:], classes=VOCABULARY, task="tokens")
    result = fedagg.run(
        data=data, model="char-lstm", algorithm="fedavg", clients=2, rounds=1, epochs=1, engine=engine, device="cpu"
    )
    assert result.model(x).shape == (30, LENGTH, VOCABULARY)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_lstm_is_torchs(layers: int) -> None:
    """Its output, and the gradients of all weights and of the input, written out and not."""
    torch.manual_seed(0)
    theirs, ours = nn.LSTM(5, 6, layers, batch_first=True), models.LSTM(5, 6, layers)
    assert {name: p.shape for name, p in ours.named_parameters()} == {name: p.shape for name, p in theirs.named_parameters()}
    ours.load_state_dict(theirs.state_dict())
    x, weight = torch.randn(4, 9, 5), torch.randn(4, 9, 6)

    def loss(w: dict[str, Tensor], given: Tensor) -> Tensor:
        return (weight * functional_call(ours, w, (given,))).sum()

    given = x.clone().requires_grad_()
    (weight * theirs(given)[0]).sum().backward()
    assert given.grad is not None
    expected = [p.grad for p in theirs.parameters()] + [given.grad]
    w = dict(ours.named_parameters())
    fused = torch.autograd.grad(loss(w, given), [*w.values(), given])
    written, at = grad(loss, argnums=(0, 1))(w, x)
    for a, b, c in zip(expected, fused, [*written.values(), at], strict=True):
        torch.testing.assert_close(b, a)
        torch.testing.assert_close(c, a)
    torch.testing.assert_close(vmap(ours)(x[None])[0], theirs(x)[0])


@pytest.mark.parametrize("kind", ["mixed", "trace"])
@pytest.mark.parametrize("name", NAMES)
def test_forms_agree_with_the_plain_engine(name: str, kind: str, tiny: None) -> None:
    s = problem(name)
    assert stacked.supported(s)
    work, model, jobs = works(s.layout.d)[kind], s.layout.pack(s.module), job_list()
    expected = list(Sequential(s).run(model, work, jobs, None))
    for engine in forms(s).values():
        assert_same(list(engine.run(model, work, jobs, None)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_forms_agree_on_a_label_a_token(name: str, tiny: None) -> None:
    s = problem(name, every=True, momentum=0.9)
    work, model, jobs = works(s.layout.d)["plain"], s.layout.pack(s.module), job_list()
    expected = list(Sequential(s).run(model, work, jobs, None))
    for engine in forms(s).values():
        assert_same(list(engine.run(model, work, jobs, None)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_near(name: str, tiny: None) -> None:
    """In bfloat16, eight bits of a product are right."""
    s = problem(name)
    work, model, jobs = works(s.layout.d)["plain"], s.layout.pack(s.module), job_list()
    expected = list(Sequential(s).run(model, work, jobs, None))
    s.half = True
    assert_same(list(Batched(s, stacked.StackedNetwork, padding=True).run(model, work, jobs, None)), expected, 0.05)


def test_what_auto_picks_on_a_cpu(tiny: None) -> None:
    options = fedagg.Config(model="char-lstm", threads=2)
    lstm, transformer = (choose.pick(problem(name), options) for name in NAMES)
    assert isinstance(lstm, Threaded)
    assert lstm.note == "2 clients at a time, one thread and core each (recurrent layers can keep one core busy, but not several)"
    assert transformer.note.endswith("(no autograd; attention can keep one core busy, but not several)")
    work = Work(rate=torch.full((2,), 0.1, dtype=torch.float64))
    for s, engine in ((problem(name), choose.pick(problem(name), options)) for name in NAMES):
        model = s.layout.pack(s.module)
        assert_same(list(engine.run(model, work, job_list(), None)), list(Sequential(s).run(model, work, job_list(), None)))


def grouped() -> nn.Sequential:
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.GroupNorm(1, 2), nn.Conv2d(2, 6, 3, bias=False), nn.GroupNorm(2, 6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 3),
    )  # fmt: skip
    for layer in module:
        if isinstance(layer, nn.GroupNorm):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    return module


@pytest.mark.parametrize("kind", ["mixed", "trace"])
def test_group_normalisation_agrees(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.rand(sum(SIZES), 2, 8, 8, generator=generator), torch.randint(0, 3, (sum(SIZES),), generator=generator)
    s = Problem(grouped(), x, y, 3, ClientOptions(epochs=2, batch_size=4), torch.device("cpu"))
    assert any(isinstance(place.layer, GroupNorm) for place in stacked.StackedNetwork(s, 2).places)
    work, model = works(s.layout.d)[kind], s.layout.pack(s.module)
    expected = list(Sequential(s).run(model, work, job_list(), None))
    for engine in forms(s).values():
        assert_same(list(engine.run(model, work, job_list(), None)), expected)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Embedding(VOCABULARY, 4, padding_idx=0),
        nn.Embedding(VOCABULARY, 4, max_norm=1.0),
        nn.Embedding(VOCABULARY, 4, scale_grad_by_freq=True),
    ],
)
def test_embeddings_with_special_options_are_not_written_out(layer: nn.Module) -> None:
    assert traced(nn.Sequential(nn.Embedding(VOCABULARY, 4), models.text.Last(), nn.Linear(4, 3)), 1)
    assert not traced(nn.Sequential(layer, models.text.Last(), nn.Linear(4, 3)), 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_text_model_learns(name: str, tiny: None) -> None:
    """The next character is the last one again: a model that reads the text learns this."""
    x = tokens(140)
    data = Dataset(x[:100], x[:100, -1], x[100:], x[100:, -1], classes=VOCABULARY)
    result = fedagg.run(
        data=data, model=name, algorithm="fedavg", clients=2, participation=1.0, rounds=3, epochs=8, batch_size=10,
        client_optimizer="adam", lr=0.03, engine="batched", device="cpu", eval_every=3,
    )  # fmt: skip
    assert result.accuracy > 0.6
