"""Adapters: the start is the network's own, only adapters are trained, sent and kept, and merged they are the network again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import fedagg
from fedagg import Dataset, Layout
from fedagg.adapters import Adapted, LowRank
from fedagg.errors import SettingError

WIDTH, VOCABULARY, LENGTH = 8, 11, 6


class Conv1D(nn.Module):
    """The linear layer of GPT-2 in `transformers`: its weight is (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.c_attn, self.c_proj = nn.LayerNorm(WIDTH), Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.register_buffer("bias", torch.ones(LENGTH, LENGTH).tril().bool(), persistent=False)
        self.bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.norm(x)).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(~self.bias, -torch.inf).softmax(-1)
        return x + self.c_proj(scores @ v)  # type: ignore[no-any-return]


class TinyGPT(nn.Module):
    """Built like GPT-2 in `transformers`: its own linear layers, a mask as a buffer, embeddings shared with the head, and an output
    that holds its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.h = nn.ModuleList([Block(), Block()])
        self.score = nn.Linear(WIDTH, 3)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Output:
        x = self.wte(input_ids) + self.wpe
        for block in self.h:
            x = block(x)
        return Output(self.score(x[:, -1] + self.lm_head(x).mean()))


def network() -> TinyGPT:
    torch.manual_seed(2)
    return TinyGPT()


def data() -> Dataset:
    x = torch.randint(0, VOCABULARY, (150, LENGTH), generator=torch.Generator().manual_seed(1))
    y = x[:, -1] % 3
    return Dataset(x[:120], y[:120], x[120:], y[120:], classes=3)


def run(model: nn.Module, **settings: Any) -> fedagg.Result:
    given = {"algorithm": "fedavg", "clients": 4, "participation": 0.5, "rounds": 2, "epochs": 2, "batch_size": 8, "lr": 0.2}
    return fedagg.run(data=data(), model=model, device="cpu", **{**given, **settings})


def learnt(adapted: Adapted) -> Adapted:
    """Adapters as they may be after training."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for part in adapted.modules():
            if isinstance(part, LowRank):
                part.b.normal_(generator=generator)
    return adapted


def test_the_start_is_the_networks_own() -> None:
    base, x = network(), data().x_test
    adapted = fedagg.lora(base, rank=2)
    assert torch.equal(adapted(x), base(x).logits)
    assert all(p.requires_grad for p in base.parameters())  # which is left as it is
    assert {id(p) for p in base.parameters()}.isdisjoint(map(id, adapted.parameters()))


def test_only_adapters_are_sent() -> None:
    adapted = fedagg.lora(network(), rank=2)
    layout = Layout(adapted)
    layers = [f"network.h.{block}.{layer}" for block in (0, 1) for layer in ("c_attn", "c_proj")] + ["network.score"]
    assert [name for name, _ in layout.parameters] == [f"{layer}.{part}" for layer in layers for part in ("a", "b")]
    assert layout.d == 2 * (2 * (WIDTH + 3 * WIDTH) + 2 * (WIDTH + WIDTH)) + 2 * (WIDTH + 3)
    assert layout.b == 0
    assert set(adapted.state_dict()) == {name for name, _ in layout.parameters}


def test_an_adapter_adds_a_product_of_two_small_matrices() -> None:
    torch.manual_seed(0)
    base, x = nn.Linear(5, 4), torch.randn(7, 5)
    adapted = learnt(fedagg.lora(base, rank=2, alpha=6.0))
    layer = adapted.network
    assert isinstance(layer, LowRank)
    expected = x @ base.weight.T + base.bias + 3.0 * (x @ layer.a.T @ layer.b.T)
    torch.testing.assert_close(adapted(x), expected)
    torch.testing.assert_close(functional.linear(x, layer.weight, layer.bias), expected)


def test_merged_it_is_a_plain_network_that_does_the_same() -> None:
    x, base = data().x_test, network()
    adapted = learnt(fedagg.lora(base, rank=2)).eval()
    merged = fedagg.merge_lora(adapted)
    assert type(merged) is TinyGPT
    assert merged.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(merged(x).logits, adapted(x))
    assert not torch.allclose(merged(x).logits, base(x).logits)
    assert merged.lm_head.weight is merged.wte.weight
    assert any(isinstance(part, LowRank) for part in adapted.modules())  # which is left as it is
    assert not merged.training
    with pytest.raises(SettingError, match=r"module = 'TinyGPT': give what fedagg\.lora made"):
        fedagg.merge_lora(merged)


@pytest.mark.parametrize("algorithm", ["fedagg", "scaffold"])
def test_engines_agree(algorithm: str) -> None:
    adapted = fedagg.lora(network(), rank=2)
    one, other = (run(adapted, engine=engine, algorithm=algorithm) for engine in ("sequential", "batched"))
    before, weights = adapted.state_dict(), [result.model.state_dict() for result in (one, other)]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-5)
    assert any(not torch.equal(value, before[name]) for name, value in weights[0].items())


def test_a_run_keeps_and_counts_adapters_alone(tmp_path: Path) -> None:
    base, folder = network(), tmp_path / "run"
    adapted = fedagg.lora(base, rank=2)
    d = Layout(adapted).d
    result = run(adapted, out=folder, engine="sequential")
    beside = [row["bytes_up"] - 2 * 4 * d for row in result.history]  # two clients, four bytes a weight
    assert all(0 <= extra <= 2 * 100 for extra in beside)  # and a few figures
    kept = load_file(folder / "model.safetensors")
    assert sum(value.numel() for value in kept.values()) == d
    held = load_file(next((folder / "checkpoints").glob("round-000002.0.safetensors")))
    assert max(value.numel() for value in held.values()) == d
    again = fedagg.lora(base, rank=2, seed=9)
    again.load_state_dict(kept)  # strict: what is frozen is not missed
    x = data().x_test
    torch.testing.assert_close(again(x), result.model(x))
    trained, frozen = dict(result.model.named_parameters()), dict(adapted.named_parameters())
    assert all(torch.equal(trained[name], p) for name, p in frozen.items() if not p.requires_grad)
    longer = run(adapted, resume=folder, engine="sequential", rounds=3)
    assert len(longer.history) == 3
    other = network()
    with torch.no_grad():
        other.wpe += 1
    with pytest.raises(fedagg.errors.FedaggError, match="model"):
        run(fedagg.lora(other, rank=2), resume=folder, engine="sequential", rounds=4)


def test_targets_and_modules_that_are_trained_whole() -> None:
    adapted = fedagg.lora(network(), rank=2, targets=["c_attn", "h.1.c_proj"], train="score")
    assert [name for name, _ in Layout(adapted).parameters] == [
        *("network.h.0.c_attn.a", "network.h.0.c_attn.b", "network.h.1.c_attn.a", "network.h.1.c_attn.b"),
        *("network.h.1.c_proj.a", "network.h.1.c_proj.b", "network.score.weight", "network.score.bias"),
    ]


def test_running_statistics_stay_as_they_are() -> None:
    torch.manual_seed(1)
    base = nn.Sequential(nn.Linear(LENGTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(90, LENGTH, generator=torch.Generator().manual_seed(1))
    rows = Dataset(x[:60], x[:60].argmax(1) % 3, x[60:], x[60:].argmax(1) % 3, classes=3)
    adapted = fedagg.lora(base, rank=2)
    models = [
        fedagg.run(pace="base", data=rows, model=adapted, clients=3, rounds=2, epochs=1, lr=0.1, engine=engine, device="cpu").model
        for engine in ("sequential", "batched")
    ]
    for model in models:
        norm = model.network[1]  # type: ignore[union-attr,operator,index]
        assert torch.equal(norm.running_mean, torch.zeros(8))
        assert int(norm.num_batches_tracked) == 0
        for name, value in models[0].state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-5)


def test_a_frozen_network_may_be_in_half_precision() -> None:
    torch.manual_seed(1)
    base = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Flatten(), nn.Linear(4 * LENGTH, 3)).bfloat16()

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.shift = fedagg.lora(base, rank=2), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).float() + self.shift  # type: ignore[no-any-return]

    model = Wide()
    assert Layout(model).d == 2 * (4 * LENGTH + 3) + 3
    result = run(model, engine="sequential")
    assert any(not torch.equal(value, model.state_dict()[name]) for name, value in result.model.state_dict().items())
    state = result.model.state_dict()
    assert set(state) == {"shift", "inner.network.2.a", "inner.network.2.b"}
    model.load_state_dict(state)
    for name in list(state):  # what is frozen is not missed, all else is
        with pytest.raises(RuntimeError, match=name):
            model.load_state_dict({key: value for key, value in state.items() if key != name})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank = 0: give a whole number from 1 up"),
        ({"alpha": 0.0}, "alpha = 0.0: give a number above 0"),
        ({"targets": ["c_atn"]}, "targets = 'c_atn': did you mean 'c_attn'?"),
        ({"targets": "lm_head"}, "targets = 'lm_head': shares its weight with another layer"),
        ({"train": "scores"}, "train = 'scores': did you mean 'score'?"),
    ],
)
def test_impossible_arguments_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as error:
        fedagg.lora(network(), **options)
    assert message in str(error.value)


def test_a_network_must_have_something_to_adapt_and_no_adapters() -> None:
    with pytest.raises(SettingError, match="Conv2d has no linear layers of its own to adapt"):
        fedagg.lora(nn.Conv2d(3, 3, 3))
    with pytest.raises(SettingError, match="has adapters already; merge them first"):
        fedagg.lora(fedagg.lora(network()))


def test_initial_adapters_are_a_function_of_the_seed() -> None:
    before = torch.get_rng_state()
    one, same, other = (fedagg.lora(network(), seed=seed).state_dict() for seed in (1, 1, 2))
    torch.set_rng_state(before)
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not torch.equal(one["network.score.a"], other["network.score.a"])


def test_a_model_of_transformers_works() -> None:
    """Built from a configuration: nothing is downloaded."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "num_labels": 3}
    base = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**size, pad_token_id=0))
    adapted = fedagg.lora(base, rank=2, targets=("c_attn", "c_proj"), train="score")
    x = data().x_test
    base.eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted.eval()(x), base(x).logits)
    result = run(adapted, engine="auto")
    names = set(result.model.state_dict())
    assert names == set(adapted.state_dict())
    assert all(name.endswith((".a", ".b", "score.weight")) for name in names)
    merged = fedagg.merge_lora(result.model.eval())
    assert type(merged) is type(base)
    with torch.no_grad():
        torch.testing.assert_close(merged(x).logits, result.model(x), rtol=1e-4, atol=1e-5)
