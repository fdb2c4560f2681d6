"""The models: published sizes, seeded weights, behaviour under vmap, heads, and what is said about a wrong setting."""

from __future__ import annotations

import re
import types
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from fedagg import evaluate, models
from fedagg.errors import SettingError

FLAT = ("linear", "mlp", "mnist-cnn", "cifar10-cnn", "lenet5", "alexnet", "vgg11")
FLAT_LAYERS = {
    nn.Flatten,
    nn.Linear,
    nn.Conv2d,
    nn.ReLU,
    nn.MaxPool2d,
    nn.Dropout,
    nn.AdaptiveAvgPool2d,
    nn.BatchNorm2d,
    nn.GroupNorm,
}


TEXT = ("char-lstm", "char-transformer")
IMAGES = tuple(name for name in models.names() if name not in (*TEXT, "resnet18-gn"))  # the last is resnet18 by another name


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def conv(inputs: int, outputs: int, kernel: int) -> int:
    """Weights and biases of a convolution."""
    return (inputs * kernel**2 + 1) * outputs


def conv_norm(inputs: int, outputs: int, kernel: int) -> int:
    """Weights of a convolution without bias, and the scale and shift of the norm after it."""
    return (inputs * kernel**2 + 2) * outputs


def fc(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def samples(shape: tuple[int, ...], batch: int = 2) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(7))


def test_names_are_the_papers_and_what_others_use() -> None:
    assert models.names() == (*FLAT, "resnet18", "resnet18-gn", "googlenet", "densenet121", *TEXT)


def test_linear_is_784_by_10() -> None:
    assert count(models.build("linear", (1, 28, 28), 10)) == 784 * 10 + 10 == 7850


def test_mlp_has_the_count_published_by_mcmahan_et_al() -> None:
    assert count(models.build("mlp", (1, 28, 28), 10)) == fc(784, 200) + fc(200, 200) + fc(200, 10) == 199_210


def test_mnist_cnn_has_the_count_published_by_mcmahan_et_al() -> None:
    # 28 -> 14 -> 7 pixels a side, so the first fully connected layer reads 7·7·64.
    expected = conv(1, 32, 5) + conv(32, 64, 5) + fc(7 * 7 * 64, 512) + fc(512, 10)
    assert count(models.build("mnist-cnn", (1, 28, 28), 10)) == expected == 1_663_370


def test_cifar10_cnn_reads_4_by_4_by_64() -> None:
    expected = conv(3, 32, 3) + conv(32, 64, 3) + conv(64, 64, 3) + fc(4 * 4 * 64, 512) + fc(512, 10)
    assert count(models.build("cifar10-cnn", (3, 32, 32), 10)) == expected == 586_250


@pytest.mark.parametrize("side", [28, 32])
def test_lenet5_reads_5_by_5_by_32_at_either_size(side: int) -> None:
    # (28 + 2·2 or 32) - 4 = 28 -> 14; 14 - 4 = 10 -> 5.
    expected = conv(1, 16, 5) + conv(16, 32, 5) + fc(5 * 5 * 32, 120) + fc(120, 84) + fc(84, 26)
    assert count(models.build("lenet5", (1, side, side), 26)) == expected == 121_742


def test_alexnet_keeps_its_classifier_of_4096() -> None:
    features = conv(3, 64, 3) + conv(64, 192, 3) + conv(192, 384, 3) + conv(384, 256, 3) + conv(256, 256, 3)
    expected = features + fc(2 * 2 * 256, 4096) + fc(4096, 4096) + fc(4096, 10)
    assert count(models.build("alexnet", (3, 32, 32), 10)) == expected == 23_272_266


def test_vgg11_is_configuration_a_and_one_linear_layer_on_512_features() -> None:
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    features = sum(conv(i, o, 3) for i, o in pairwise(widths))
    assert features == 9_220_480  # the convolutions of the published VGG-11, whose other 123.6 M are its classifier
    assert count(models.build("vgg11", (3, 32, 32), 100)) == features + fc(512, 100) == 9_271_780


def test_resnet18_has_the_usual_cifar_count() -> None:
    def stage(inputs: int, outputs: int) -> int:
        shortcut = conv_norm(inputs, outputs, 1) if inputs != outputs else 0
        return conv_norm(inputs, outputs, 3) + 3 * conv_norm(outputs, outputs, 3) + shortcut

    expected = conv_norm(3, 64, 3) + stage(64, 64) + stage(64, 128) + stage(128, 256) + stage(256, 512) + fc(512, 10)
    assert count(models.build("resnet18", (3, 32, 32), 10)) == expected == 11_173_962


def test_resnet18_gn_is_resnet18_with_group_normalisation() -> None:
    ours, usual = models.build("resnet18-gn", (3, 32, 32), 10), models.build("resnet18", (3, 32, 32), 10, norm="group")
    assert str(ours) == str(usual)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), usual.parameters(), strict=True))
    with pytest.raises(SettingError, match="norm = 'batch': model 'resnet18-gn' needs a norm; choose group"):
        models.build("resnet18-gn", (3, 32, 32), 10, norm="batch")


def test_googlenet_is_nine_inceptions_of_table_1() -> None:
    def inception(inputs: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pooled: int) -> int:
        ones = sum(conv_norm(inputs, outputs, 1) for outputs in (one, reduce3, reduce5, pooled))
        return ones + conv_norm(reduce3, three, 3) + conv_norm(reduce5, five, 5)

    # The inputs are the sums of the module before: 256 = 64 + 128 + 32 + 32, and so on to 1024 = 384 + 384 + 128 + 128.
    modules = [
        inception(192, 64, 96, 128, 16, 32, 32),
        inception(256, 128, 128, 192, 32, 96, 64),
        inception(480, 192, 96, 208, 16, 48, 64),
        inception(512, 160, 112, 224, 24, 64, 64),
        inception(512, 128, 128, 256, 24, 64, 64),
        inception(512, 112, 144, 288, 32, 64, 64),
        inception(528, 256, 160, 320, 32, 128, 128),
        inception(832, 256, 160, 320, 32, 128, 128),
        inception(832, 384, 192, 384, 48, 128, 128),
    ]
    expected = conv_norm(3, 192, 3) + sum(modules) + fc(1024, 10)
    assert count(models.build("googlenet", (3, 32, 32), 10)) == expected == 5_871_914


def test_densenet121_has_the_usual_cifar_count() -> None:
    def block(channels: int, depth: int) -> int:
        inputs = range(channels, channels + 32 * depth, 32)
        return sum(2 * i + i * 128 + 2 * 128 + 128 * 9 * 32 for i in inputs)  # norm, 1×1, norm, 3×3

    def transition(channels: int) -> int:
        return 2 * channels + channels * channels // 2  # norm, halving 1×1

    # 64 + 6·32 = 256, halved; 128 + 12·32 = 512, halved; 256 + 24·32 = 1024, halved; 512 + 16·32 = 1024.
    blocks = block(64, 6) + block(128, 12) + block(256, 24) + block(512, 16)
    transitions = transition(256) + transition(512) + transition(1024)
    expected = 3 * 9 * 64 + blocks + transitions + 2 * 1024 + fc(1024, 10)
    assert count(models.build("densenet121", (3, 32, 32), 10)) == expected == 6_956_298


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_norm_has_a_scale_and_shift_per_channel_in_place_of_the_bias(norm: str) -> None:
    channels = 64 + 128 + 256 * 2 + 512 * 4
    assert count(models.build("vgg11", (3, 32, 32), 10, norm=norm)) == 9_225_610 + channels


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "googlenet", "densenet121"])
def test_group_norm_leaves_no_running_statistics(name: str) -> None:
    assert any(True for _ in models.build(name, (1, 28, 28), 2, norm="batch").buffers())
    assert not any(True for _ in models.build(name, (1, 28, 28), 2, norm="group").buffers())


def test_group_norm_divides_channels_into_at_most_32_groups() -> None:
    model = models.build("googlenet", (3, 32, 32), 10, norm="group")
    groups = {m.num_channels: m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)}
    assert groups[192] == 32
    assert groups[16] == 16
    assert groups[208] == 26


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize(("shape", "classes"), [((1, 28, 28), 10), ((2, 32, 32), 100)])
def test_output_has_one_column_per_class(name: str, shape: tuple[int, ...], classes: int) -> None:
    model = models.build(name, shape, classes).eval()
    with torch.no_grad():
        assert model(samples(shape, 1)).shape == (1, classes)


def test_linear_takes_any_shape() -> None:
    assert models.build("linear", (5,), 3)(torch.zeros(4, 5)).shape == (4, 3)


@pytest.mark.parametrize("name", IMAGES)
def test_every_parameter_gets_a_gradient_and_nothing_works_in_place(name: str) -> None:
    model = models.build(name, (3, 28, 28), 10)
    assert not any(module.inplace for module in model.modules() if isinstance(module, nn.ReLU | nn.Dropout))
    loss = nn.functional.cross_entropy(model(samples((3, 28, 28))), torch.tensor([1, 8]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


def test_the_signal_reaches_the_end_of_vgg11_without_normalisation() -> None:
    model = models.build("vgg11", (3, 32, 32), 100)
    assert isinstance(model, nn.Sequential)
    with torch.no_grad():
        features = model[:-1](samples((3, 32, 32), 4))
    assert 0.05 < float(features.std()) < 5


@pytest.mark.parametrize("name", FLAT)
def test_the_batched_engines_models_are_flat(name: str) -> None:
    for norm in ("none", "batch", "group"):
        model = models.build(name, (3, 32, 32), 10, norm=norm)
        assert type(model) is nn.Sequential
        assert {type(layer) for layer in model} <= FLAT_LAYERS


def assert_vmap_agrees(name: str, norm: str | None) -> None:
    copies = [models.build(name, (3, 28, 28), 4, norm=norm, seed=seed).eval() for seed in (1, 2)]
    parameters, buffers = stack_module_state(copies)
    x = torch.stack([samples((3, 28, 28), 1), -samples((3, 28, 28), 1)])

    def call(p: dict[str, Tensor], b: dict[str, Tensor], inputs: Tensor) -> Tensor:
        output: Tensor = functional_call(copies[0], (p, b), (inputs,))
        return output

    with torch.no_grad():
        together = torch.vmap(call)(parameters, buffers, x)
        apart = torch.stack([model(inputs) for model, inputs in zip(copies, x, strict=True)])
    torch.testing.assert_close(together, apart, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(apart[0], apart[1])


@pytest.mark.parametrize("name", IMAGES)
def test_vmap_over_two_copies_equals_two_forwards(name: str) -> None:
    assert_vmap_agrees(name, None)


@pytest.mark.parametrize(("name", "norm"), [("vgg11", "batch"), ("vgg11", "group"), ("resnet18", "group")])
def test_vmap_agrees_for_the_other_norms(name: str, norm: str) -> None:
    assert_vmap_agrees(name, norm)


def test_vmap_in_training_mode_updates_each_copys_own_statistics() -> None:
    copies = [models.build("resnet18", (1, 28, 28), 4, seed=seed) for seed in (1, 2)]
    parameters, buffers = stack_module_state(copies)
    x = samples((2, 1, 28, 28), 2)

    def call(p: dict[str, Tensor], b: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return functional_call(copies[0], (p, b), (inputs,)), b

    with torch.no_grad():
        together, after = torch.vmap(call)(parameters, buffers, x)
        for index, model in enumerate(copies):
            torch.testing.assert_close(together[index], model(x[index]), rtol=1e-3, atol=1e-4)
            for path, buffer in model.named_buffers():
                torch.testing.assert_close(after[path][index], buffer, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", IMAGES)
def test_weights_are_a_function_of_the_seed(name: str) -> None:
    first, again, other = (models.build(name, (1, 28, 28), 10, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[path], again[path]) for path in first)
    assert any(not torch.equal(first[path], other[path]) for path in first)


def test_building_neither_reads_nor_changes_the_global_random_state() -> None:
    before = torch.get_rng_state()
    first = models.build("lenet5", (1, 28, 28), 10)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    second = models.build("lenet5", (1, 28, 28), 10)
    assert torch.equal(first.state_dict()["0.weight"], second.state_dict()["0.weight"])


def test_models_are_built_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        model = models.build("linear", (4,), 2)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("name", ["cifar10-cnn", "alexnet"])
@pytest.mark.parametrize(("asked", "got"), [(None, 0.5), (0.25, 0.25), (0.0, 0.0)])
def test_dropout_is_a_half_unless_set(name: str, asked: float | None, got: float) -> None:
    model = models.build(name, (3, 32, 32), 10, dropout=asked)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [got, got]


@pytest.mark.parametrize("name", IMAGES)
def test_the_head_is_the_last_linear_layer(name: str) -> None:
    model = models.build(name, (3, 32, 32), 7)
    path = models.head(model)
    layer = model.get_submodule(path)
    assert isinstance(layer, nn.Linear)
    assert layer.out_features == 7
    assert models.head_parameters(model) == [f"{path}.weight", f"{path}.bias"]
    assert models.has_body(model) == (name != "linear")


@pytest.mark.parametrize("name", TEXT)
def test_the_head_of_a_text_model_is_its_last_layer(name: str) -> None:
    model = models.build(name, (6,), 7)
    layer = model.get_submodule(models.head(model))
    assert isinstance(layer, nn.Linear)
    assert layer.out_features == 7


def test_a_head_can_be_named_and_can_be_a_container() -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Linear(2, 3))
    model.add_module("classifier", nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2, bias=False)))
    assert models.head(model) == "classifier.2"
    assert models.head_parameters(model, "classifier") == [
        "classifier.0.weight",
        "classifier.0.bias",
        "classifier.2.weight",
    ]
    assert models.has_body(model, "classifier")
    with pytest.raises(SettingError, match=r"head = 'clasifier': did you mean 'classifier'\? choose one of body, cl"):
        models.head(model, "clasifier")
    with pytest.raises(SettingError, match=r"head = 'classifier\.1'"):  # a ReLU has no parameters
        models.head(model, "classifier.1")


def test_a_bare_layer_is_its_own_head() -> None:
    assert models.head_parameters(nn.Linear(2, 2)) == ["weight", "bias"]
    assert not models.has_body(nn.Linear(2, 2))


def test_a_model_without_parameters_has_no_head() -> None:
    with pytest.raises(SettingError, match="no parameters"):
        models.head(nn.ReLU())


def test_an_unknown_model_is_met_with_the_nearest() -> None:
    with pytest.raises(SettingError, match=r"model = 'resnet-18': did you mean 'resnet18'\?"):
        models.build("resnet-18", (3, 32, 32), 10)


@pytest.mark.parametrize("name", [name for name in IMAGES if name not in ("linear", "mlp")])
@pytest.mark.parametrize("shape", [(3, 64, 64), (3, 28, 32), (784,), (0, 28, 28)])
def test_a_wrong_size_names_model_shape_and_fix(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(SettingError, match=re.escape(f"model = {name!r}: shape {shape} does not fit; use (channels, 28")):
        models.build(name, shape, 10)


def test_linear_refuses_an_empty_sample() -> None:
    with pytest.raises(SettingError, match=r"shape \(0, 28\) holds no values"):
        models.build("linear", (0, 28), 10)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vgg11", {"norm": "bacth"}, "norm = 'bacth': did you mean 'batch'"),
        ("linear", {"norm": "layer"}, "norm = 'layer': choose one of batch, group, none"),
        ("resnet18", {"norm": "none"}, "norm = 'none': model 'resnet18' needs a norm; choose batch or group"),
        ("alexnet", {"dropout": 1.0}, "dropout = 1.0: give a probability"),
        ("lenet5", {"dropout": 0.5}, "dropout = 0.5: model 'lenet5' has none; leave it out, or choose one of cifar10"),
    ],
)
def test_an_impossible_option_is_explained(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        models.build(name, (3, 32, 32), 10, **options)  # type: ignore[arg-type]


def test_a_model_needs_a_class() -> None:
    with pytest.raises(SettingError, match="classes = 0"):
        models.build("linear", (4,), 0)


def test_norm_is_ignored_where_there_is_none() -> None:
    assert count(models.build("lenet5", (1, 28, 28), 26, norm="group", dropout=0)) == 121_742


@pytest.mark.parametrize(("numbers", "batch"), [(60_000, 10_000), (4_000_000, 268), (2**40, 1)])
def test_deep_networks_are_evaluated_in_smaller_batches_on_a_gpu(numbers: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 4 GiB of layers' outputs at a time: the whole test set at once through a deep network is tens."""
    monkeypatch.setattr(evaluate, "activations", lambda setting: numbers)
    setting = types.SimpleNamespace(device=torch.device("cuda"))
    assert evaluate.batch_size(setting) == batch  # type: ignore[arg-type]


@pytest.mark.parametrize(("norm", "normalised"), [("batch", True), ("group", True), ("none", False)])
def test_normalised_networks(norm: str, normalised: bool) -> None:
    assert models.is_normalised(models.build("vgg11", (3, 32, 32), 10, norm=norm)) == normalised


class CallsDropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


def test_deep_networks() -> None:
    assert models.is_deep(models.build("mlp", (1, 28, 28), 10))
    assert not models.is_deep(nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.LayerNorm(4)))
    frozen = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 2))
    assert not models.is_deep(frozen)


def test_networks_with_dropout() -> None:
    assert models.has_dropout(models.build("cifar10-cnn", (3, 32, 32), 10))
    assert not models.has_dropout(models.build("cifar10-cnn", (3, 32, 32), 10, dropout=0.0))
    assert not models.has_dropout(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)))
    assert models.has_dropout(nn.Sequential(nn.Sequential(nn.Dropout1d(0.1)), nn.Linear(4, 4)))
    assert models.has_dropout(nn.Sequential(CallsDropout(), nn.Linear(4, 4)))
    assert not models.has_dropout(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0))


def test_half_of_the_layers_must_be_normalised() -> None:
    def mlp(*norms: bool) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), *([nn.BatchNorm1d(4)] if norm else [])) for norm in norms))

    assert models.is_normalised(mlp(True, False))
    assert not models.is_normalised(mlp(True, False, False))
    assert not models.is_normalised(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))  # inputs, not a layer
    assert not models.is_normalised(mlp(True, True).requires_grad_(False))


def test_the_scale_of_a_normalised_layer_has_no_effect() -> None:
    """That is why weights may be drawn back: halved, they compute the same."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
    assert models.is_normalised(network)
    x = torch.randn(16, 3, 8, 8)
    before = network(x)
    with torch.no_grad():
        for layer in (network[0], network[3]):
            for parameter in layer.parameters():
                parameter /= 2
    torch.testing.assert_close(network(x), before, rtol=0, atol=2e-3)  # but for the norms' small ε
