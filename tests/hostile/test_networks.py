"""Networks that do what a written-out form, or a batch of clients, would not: every engine trains them as plain autograd does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedagg
from fedagg.engines.base import Problem
from fedagg.engines.graph import traced
from fedagg.engines.trial import Trial
from fedagg.engines.vmapped import VmappedNetwork
from fedagg.errors import SettingError
from fedagg.work import ClientOptions

RNG = np.random.default_rng(0)
X = RNG.standard_normal((200, 20)).astype(np.float32)
Y = (X @ RNG.standard_normal((20, 3))).argmax(1)
PARTS = np.split(np.arange(200), [30, 75, 120])
FEW: dict[str, Any] = {"algorithm": "fedavg", "rounds": 2, "participation": 1.0, "lr": 0.2, "batch_size": 16, "device": "cpu"}
NEVER = 1e-12  # dropout that draws, and never drops: engines draw differently, and here must agree all the same


def data() -> fedagg.Dataset:
    return fedagg.Dataset(X.copy(), Y, X[:50].copy(), Y[:50])


def images() -> fedagg.Dataset:
    x = X[:, :16].reshape(-1, 1, 4, 4)
    return fedagg.Dataset(x.copy(), Y, x[:50].copy(), Y[:50])


def dropping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Dropout(NEVER), nn.Linear(8, 3))


class Unmoved(nn.Module):
    """Its body is not trained, whatever its parameters say."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(20, 8), nn.Dropout(NEVER), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.body(x)
        return self.head(self.drop(torch.relu(h)))


class Settled(nn.Module):
    """Batch normalisation that keeps its statistics, in training too."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.n, self.drop, self.o = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(NEVER), nn.Linear(16, 3)

    def train(self, mode: bool = True) -> Settled:
        super().train(mode)
        self.n.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.drop(torch.relu(self.n(self.c(x))).flatten(1)))


class SettledLate(nn.Module):
    """The same, said in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.n, self.drop, self.o = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(NEVER), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.n.eval()
        return self.o(self.drop(torch.relu(self.n(self.c(x))).flatten(1)))


class Rounded(nn.Module):
    """In another arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(20, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.o(torch.relu(self.a(x)))


def forward_hook() -> nn.Module:
    module = dropping()
    module[0].register_forward_hook(lambda _module, _given, output: 0.1 * output)
    return module


def pre_forward_hook() -> nn.Module:
    module = dropping()
    module[3].register_forward_pre_hook(lambda _module, given: (0.1 * given[0],))
    return module


def outer_hook() -> nn.Module:
    """On the network itself, which tracing never calls."""
    module = dropping()
    module.register_forward_hook(lambda _module, _given, output: 0.1 * output)
    return module


def backward_hook() -> nn.Module:
    module = dropping()
    module[3].register_full_backward_hook(lambda _module, given, _output: (0.1 * given[0],))
    return module


def pre_backward_hook() -> nn.Module:
    module = dropping()
    module[3].register_full_backward_pre_hook(lambda _module, output: (0.1 * output[0],))
    return module


def late_hook() -> nn.Module:
    """Does nothing to begin with: no comparison at the start can see it."""
    module = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    module[2].register_forward_hook(lambda _module, _given, output: output.clamp(-1.0, 1.0))
    return module


def parameter_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    module[0].weight.register_hook(lambda gradient: 0.1 * gradient)
    return module


def late_parameter_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(20, 8), nn.GELU(), nn.Linear(8, 3))
    module[0].weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    return module


def other_forward() -> nn.Module:
    """One layer has a forward of its own, and is a plain layer by its class."""
    module = dropping()
    plain = nn.Linear.forward
    module[3].forward = lambda x: 0.1 * plain(module[3], x)
    return module


class Counting(nn.Module):
    """Changes after some steps, by a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.calls = nn.Linear(20, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.o(x) * (1.0 if self.calls < 5 else 0.1)


HOSTILE = [
    *(Unmoved, Settled, SettledLate, forward_hook, pre_forward_hook, outer_hook, backward_hook, pre_backward_hook),
    *(late_hook, parameter_hook, late_parameter_hook, Counting),
]


def trained(**given: Any) -> dict[str, Tensor]:
    """The weights; none where all clients together are refused in a line."""
    refused = pytest.RaisesExc(SettingError, match="does not train the same in a batch of clients")
    try:
        return fedagg.run(**given).model.state_dict()
    except SettingError as error:
        if given["engine"] != "batched" or not refused.matches(error):
            raise
        return {}


def agree(plain: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, ours in other.items():
        assert torch.allclose(ours.double(), plain[name].double(), atol=1e-5), name


@pytest.mark.parametrize("make", HOSTILE)
def test_every_network_trains_as_it_does_client_by_client(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    given = images() if make in (Settled, SettledLate) else data()
    plain = trained(data=given, model=module, parts=PARTS, engine="sequential", **FEW)
    for engine in ("auto", "batched"):
        agree(plain, trained(data=given, model=module, parts=PARTS, engine=engine, **FEW))


@pytest.mark.parametrize("make", HOSTILE)
def test_no_network_of_these_is_written_out(make: Callable[[], nn.Module]) -> None:
    assert traced(make(), 3 if make in (Settled, SettledLate) else 1) is None


def test_what_is_written_out_still_is() -> None:
    assert traced(dropping(), 1) is not None


def test_another_arithmetic_is_not_written_out() -> None:
    assert traced(Rounded(), 1) is None


def test_a_forward_of_a_layers_own_is_not_written_out() -> None:
    assert traced(other_forward(), 1) is None


def test_hooks_for_all_modules_are_seen() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda _module, _given, _output: None)
    try:
        assert traced(dropping(), 1) is None
    finally:
        handle.remove()
    assert traced(dropping(), 1) is not None


def frozen_by_hook() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    module[0].weight.register_hook(torch.zeros_like)
    return module


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_a_weight_frozen_by_its_hook_stays(engine: str) -> None:
    module = frozen_by_hook()
    trained = fedagg.run(data=data(), model=module, parts=PARTS, engine=engine, **FEW).model
    assert torch.equal(trained[0].weight, module[0].weight)
    assert not torch.equal(trained[2].weight, module[2].weight)


class Masking(nn.Module):
    """Its hook is a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)
        self.seen = 0
        self.o.weight.register_hook(self.mask)

    def mask(self, gradient: Tensor) -> Tensor:
        self.seen += 1
        return 0.0 * gradient

    def forward(self, x: Tensor) -> Tensor:
        return self.o(x)


def test_a_hook_that_is_a_method_of_the_module_belongs_to_the_copy() -> None:
    module = Masking()
    trained = fedagg.run(data=data(), model=module, parts=PARTS, **FEW).model
    assert torch.equal(trained.o.weight, module.o.weight)
    assert module.seen == 0


def test_a_hook_behind_the_gradient_is_refused() -> None:
    module = frozen_by_hook()
    module[2].weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
    with pytest.raises(SettingError, match=r"2\.weight has a post-accumulate hook"):
        fedagg.run(data=data(), model=module, parts=PARTS, **FEW)


# --- weights that change in forward ------------------------------------------------------------------------------------


class Bounded(nn.Module):
    """Rows of its embedding are shortened when they are looked up."""

    def __init__(self, norm: float) -> None:
        super().__init__()
        self.e, self.o = nn.Embedding(50, 8, max_norm=norm), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.e(x).mean(1))


class Shrinking(nn.Module):
    """Changes a weight where no gradient sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.o.weight.mul_(0.9)
        return self.o(x)


@pytest.mark.parametrize("norm", [1.0, 5.0])  # at once, and only later
def test_an_embedding_with_a_largest_norm(norm: float) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (200, 4), generator=torch.Generator().manual_seed(0))
    given = fedagg.Dataset(tokens, tokens.sum(1) % 3, tokens[:50], tokens[:50].sum(1) % 3)
    module = Bounded(norm)
    settings = FEW | {"lr": 1.0}
    plain, auto = (fedagg.run(data=given, model=module, parts=PARTS, engine=e, **settings).model for e in ("sequential", "auto"))
    assert torch.allclose(plain.e.weight, auto.e.weight, atol=1e-5)
    with pytest.raises(SettingError, match="does not train the same in a batch of clients"):
        fedagg.run(data=given, model=module, parts=PARTS, engine="batched", **settings)


def test_weights_that_a_forward_changes() -> None:
    torch.manual_seed(0)
    module = Shrinking()
    plain, auto = (fedagg.run(data=data(), model=module, parts=PARTS, engine=e, **FEW).model for e in ("sequential", "auto"))
    assert torch.allclose(plain.o.weight, auto.o.weight, atol=1e-5)


# --- networks that write to their input --------------------------------------------------------------------------------


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(3.0)
        return self.o(x)


class WritingLate(nn.Module):
    """Writes to some inputs, and not to the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 16 or not self.training:
            x.sub_(3.0)
        return self.o(x)


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize(
    "make", [Writing, WritingLate, lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(20, 8), nn.GELU(), nn.Linear(8, 3))]
)
def test_nobodys_samples_are_written_to(make: Callable[[], nn.Module], engine: str) -> None:
    torch.manual_seed(0)
    x, y = X.copy(), Y.copy()
    test = x[:50].copy()
    given = fedagg.Dataset(x, y, test, y[:50])
    result = fedagg.run(data=given, model=make(), parts=PARTS, engine=engine, **FEW | {"rounds": 3})
    assert np.array_equal(x, X)
    assert np.array_equal(test, X[:50])
    # What is reported is what the trained module says to the samples as they are.
    module = result.model.eval()
    with torch.no_grad():
        accuracy = float((module(torch.from_numpy(X[:50].copy())).argmax(1) == torch.from_numpy(Y[:50])).double().mean())
    assert result.accuracy == pytest.approx(accuracy)


def test_images_in_any_order_of_memory_are_not_written_to() -> None:
    torch.manual_seed(0)
    x = X[:, :16].reshape(-1, 1, 4, 4).copy()
    given = fedagg.Dataset(x, Y, x[:50].copy(), Y[:50])
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    fedagg.run(data=given, model=module, parts=PARTS, **FEW)
    assert np.array_equal(x, X[:, :16].reshape(-1, 1, 4, 4))


def relabelling(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target.zero_(), reduction="none")


def test_a_loss_that_writes_to_the_labels() -> None:
    y = Y.copy()
    given = fedagg.Dataset(X, y, X[:50], y[:50])
    fedagg.run(data=given, model=nn.Linear(20, 3), parts=PARTS, loss=relabelling, **FEW)
    assert np.array_equal(y, Y)


# --- losses that look at the whole batch -------------------------------------------------------------------------------


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """Every class of the batch counts the same."""
    counts = functional.one_hot(target, 10).sum(0).clamp_min(1)
    return functional.cross_entropy(output, target, weight=1.0 / counts, reduction="none")


def relative(output: Tensor, target: Tensor) -> Tensor:
    """By the batch's mean."""
    losses = functional.cross_entropy(output, target, reduction="none")
    return losses / losses.detach().mean()


@pytest.mark.parametrize("loss", [balanced, relative])
@pytest.mark.parametrize("engine", ["auto", "batched"])
def test_a_loss_sees_one_client_at_a_time(engine: str, loss: Any) -> None:
    settings = FEW | {"model": "linear", "clients": 10, "partition": "shards", "rounds": 1, "lr": 0.01}
    agree(trained(loss=loss, engine="sequential", **settings), trained(loss=loss, engine=engine, **settings))


# --- the trial itself ---------------------------------------------------------------------------------------------------


def problem(module: nn.Module) -> Problem:
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    return Problem(module, x, y, 3, ClientOptions(epochs=1, batch_size=16), torch.device("cpu"))


def test_dropout_is_tried_at_zero_and_still_known() -> None:
    module = nn.Sequential(nn.Linear(20, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    trial = Trial(problem(module))
    assert trial.draws
    assert module[1].p == 0.5
    assert trial.passed(VmappedNetwork, padded=True)
    broken = Trial(problem(module))
    broken.model.w.mul_(1.5)  # as a form that starts from other weights would
    assert not broken.passed(VmappedNetwork, padded=True)
