"""The GPU kernels, run by Triton's interpreter on the CPU, against the same layers in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from fedagg.engines import stacked
from fedagg.engines.base import Problem
from fedagg.engines.batched import Batched
from fedagg.engines.conv import Loop
from fedagg.engines.fused import (
    AddReLU,
    ConvPool,
    FusedConvolution,
    FusedNorm,
    FusedPool,
    FusedRecurrent,
    FusedStep,
    WindowPool,
    fuse,
    softmax_loss,
    turned,
)
from fedagg.engines.layers import BatchNorm, Concatenate, Conv, Layer, Linear, MaxPool, Place, ReLU
from fedagg.engines.sequential import Sequential
from fedagg.engines.stacked import StackedNetwork, make_convolution
from fedagg.flat import Model, Workspace
from fedagg.memory import ClientMemory
from fedagg.models.text import LSTM, Last
from fedagg.work import ClientOptions, Job, Work
from test_engines import branched


def random(*shape: int, seed: int) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def close(ours: Tensor, theirs: Tensor, within: float = 1e-5) -> bool:
    return float((ours - theirs).norm() / theirs.norm()) < within


@pytest.mark.parametrize(
    ("n", "images", "channels", "outputs", "kernel", "padding", "side"),
    [(3, 2, 1, 32, 5, 2, 8), (2, 3, 32, 64, 5, 2, 4), (2, 2, 16, 32, 5, 0, 7), (2, 2, 3, 20, 3, 1, 7), (2, 2, 32, 130, 3, 1, 3)],
)
def test_convolution(n: int, images: int, channels: int, outputs: int, kernel: int, padding: int, side: int) -> None:
    x, w, b = (
        random(n * images, channels, side, side, seed=1),
        random(n, outputs, channels, kernel, kernel, seed=2),
        random(n, outputs, seed=3),
    )
    fused, plain = FusedConvolution(n, padding), Loop(n, padding)
    expected = plain.forward(x, w, b)
    assert close(fused.forward(x, w, b), expected)
    dy = random(*expected.shape, seed=4)
    assert close(fused.input_gradient(x, dy, w), plain.input_gradient(x, dy, w))
    size = outputs * channels * kernel**2
    for splits, bias in ((1, False), (264, True)):  # the sum over pixels in one piece, or in several
        fused.splits_for = splits
        g = torch.full((n, 7 + size + outputs), torch.nan)  # rows of a larger whole, as in a network
        ours, theirs = g[:, 7 : 7 + size].view_as(w), torch.zeros_like(w)
        ours_b, theirs_b = g[:, 7 + size :] if bias else None, torch.zeros_like(b) if bias else None
        fused.weight_gradient(x, dy, ours, ours_b)
        plain.weight_gradient(x, dy, theirs, theirs_b)
        assert close(ours, theirs)
        assert g[:, :7].isnan().all()
        if ours_b is not None and theirs_b is not None:
            assert close(ours_b, theirs_b)


@pytest.mark.parametrize(
    ("channels", "outputs", "side", "stride"),
    [
        (3, 20, 6, 1),
        (32, 20, 6, 1),
        (64, 20, 6, 1),
        (64, 20, 9, 1),
        (128, 20, 8, 1),
        (64, 20, 16, 2),
        (20, 64, 7, 1),
        (12, 128, 8, 2),
    ],
)
def test_convolution_of_short_numbers(channels: int, outputs: int, side: int, stride: int) -> None:
    """Images and results in 16 bits, sums and weights' gradients in 32: against float32 on the same rounded images. (Triton's
    interpreter knows float16 only; the kernels ask for no kind by name.)"""
    n = 2
    x, w, b = (
        random(n * 2, channels, side, side, seed=1).half(),
        random(n, outputs, channels, 3, 3, seed=2),
        random(n, outputs, seed=3),
    )
    w = w.half().float()
    fused, plain = FusedConvolution(n, 1, stride), Loop(n, 1, stride)
    y = fused.forward(x, w, b)
    expected = plain.forward(x.float(), w, b)
    assert y.dtype == torch.float16
    assert close(y.float(), expected, 2**-10)
    dy = random(*expected.shape, seed=4).half()
    dx = plain.input_gradient(x.float(), dy.float(), w)
    assert close(fused.input_gradient(x, dy, w).float(), dx, 2**-10)
    onto = random(*x.shape, seed=5).half()
    expected = dx + onto.float()
    assert fused.input_gradient(x, dy, w, onto) is onto
    assert close(onto.float(), expected, 2**-10)
    (dw, db), (dw_plain, db_plain) = ((torch.zeros_like(w), torch.zeros_like(b)) for _ in range(2))
    fused.weight_gradient(x, dy, dw, db)
    plain.weight_gradient(x.float(), dy.float(), dw_plain, db_plain)
    assert close(dw, dw_plain)
    assert close(db, db_plain)
    if fused.may_hold(channels):  # held for the step, in the order of `turned`
        for splits in (1, 264):
            fused.splits_for = splits
            g = torch.full((n, 7 + dw[0].numel()), torch.nan)
            held = fused.hold(g[:, 7:].view_as(w), turned(w, x.dtype)[0])
            fused.weight_gradient(x, dy, held, db.zero_())
            assert close(held, dw_plain)
            assert close(db, db_plain)
            assert close(g[:, 7:], dw_plain.permute(0, 1, 3, 4, 2).flatten(1))
            assert g[:, :7].isnan().all()
        assert close(fused.forward(x, 0 * w, b), y)  # filters are those kept
        assert close(fused.input_gradient(x, dy, 0 * w).float(), dx, 2**-10)


@pytest.mark.parametrize("side", [8, 7])
def test_relu_and_pooling_in_one(side: int) -> None:
    x = random(3, 5, side, side, seed=1)
    fused, pool, relu = FusedPool(), MaxPool(nn.MaxPool2d(2)), ReLU()
    expected = relu.forward(pool.forward(x))
    assert torch.equal(fused.forward(x), expected)
    dy = random(*expected.shape, seed=2)
    assert torch.equal(fused.backward(dy, True), pool.backward(relu.backward(dy, True), True))


@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "padding", "stride", "side", "short"),
    [(1, 8, 5, 2, 1, 8, False), (3, 20, 3, 1, 1, 7, False), (16, 32, 3, 0, 2, 11, False), (64, 24, 3, 1, 1, 16, True)],
)
@pytest.mark.parametrize("need", [True, False])
def test_convolution_and_pooling_in_one(
    channels: int, outputs: int, kernel: int, padding: int, stride: int, side: int, short: bool, need: bool
) -> None:
    n, images = 2, 3
    x = random(n * images, channels, side, side, seed=1)
    w, b = random(n, outputs, channels, kernel, kernel, seed=2), random(n, outputs, seed=3)
    x, w = (part.half().float() if short else part for part in (x, w))
    found = []
    for form in (Loop(n, padding, stride), FusedConvolution(n, padding, stride)):
        dw, db = torch.zeros_like(w), torch.zeros_like(b)
        places = [Place(Conv(form, w, b, dw, db), [None], need)]
        for layer in (MaxPool(nn.MaxPool2d(2)), ReLU()):
            places.append(Place(layer, [places[-1]], True))
        if isinstance(form, FusedConvolution):
            fuse(places)
            assert [type(place.layer) for place in places] == [ConvPool]
        y = x.half() if short and len(places) == 1 else x
        for place in places:
            y = place.layer.forward(y)
        dy = random(*y.shape, seed=4).to(y.dtype)
        for place in reversed(places):
            dy = place.layer.backward(dy, place.need)
        found.append((y, dw, db, dy if need else y))
    for plain, ours in zip(*found, strict=True):
        assert close(ours.float(), plain.float(), 2e-2 if short else 1e-5)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "side"), [(3, 1, 1, 6), (3, 2, 1, 7), (3, 2, 0, 8), (2, 2, 0, 5), (2, 3, 1, 7)]
)
def test_pooling_of_windows_that_may_overlap(kernel: int, stride: int, padding: int, side: int) -> None:
    x = random(3, 5, side, side, seed=1)
    x[0, 0, 2, 2] = torch.nan  # which wins every window it lies in, as in torch
    plain, ours = (MaxPool(nn.MaxPool2d(kernel, stride, padding)) for _ in range(2))
    expected, fused = plain.forward(x), WindowPool(ours)
    assert torch.equal(fused.forward(x).nan_to_num(9.0), expected.nan_to_num(9.0))
    dy = random(*expected.shape, seed=2)
    assert torch.allclose(fused.backward(dy, True), plain.backward(dy, True), atol=1e-6)


@pytest.mark.parametrize(
    ("then", "channels", "side", "short"),
    [
        ("", 5, 6, False), ("relu", 70, 3, False), ("relu pool", 5, 6, False),
        ("", 70, 3, True), ("relu", 5, 6, True), ("relu pool", 70, 3, True), ("relu", 5, 48, False),
    ],
)  # fmt: skip
def test_batch_normalisation_and_what_follows(then: str, channels: int, side: int, short: bool) -> None:
    """Three clients, one with padding, one that stands still. Images of 48×48 are summed in more spans than fit in one tile."""
    n, batch = 3, 4
    live = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    x = 3.0 + random(n * batch, channels, side, side, seed=1)
    x = x.half() if short else x
    made = []
    for together in (False, True):
        w, b = 1.0 + 0.1 * random(n, channels, seed=3), random(n, channels, seed=4)
        dw, db, mean, var, seen = (torch.zeros(n, channels), torch.zeros(n, channels), random(n, channels, seed=5),
                                   1.0 + random(n, channels, seed=6).abs(), torch.zeros(n, channels)[:, :1])  # fmt: skip
        norm = BatchNorm(nn.BatchNorm2d(channels), w, b, dw, db, mean, var, seen)
        norm.live, norm.size = live, live.sum(1, keepdim=True)
        layers: list[Layer] = [norm]
        layers += [MaxPool(nn.MaxPool2d(2))] if "pool" in then else []
        layers += [ReLU()] if then else []
        if together:
            places: list[Place] = []
            for layer in layers:
                places.append(Place(layer, places[-1:] or [None], True))
            fuse(places)
            layers = [place.layer for place in places]
            assert len(layers) == 1
            assert isinstance(layers[0], FusedNorm)
        y = x.clone(memory_format=torch.channels_last)
        y = y if together else y.float()
        for layer in layers:
            y = layer.forward(y)
        result = y[: 2 * batch - 1].float()
        dy = random(*y.shape, seed=2) * live.view(-1, 1, 1, 1)
        dy = dy.half().to(y.dtype)
        for layer in reversed(layers):
            dy = layer.backward(dy, True)
        made.append((result, dy.float(), dw, db, mean, var, seen))
    for plain, ours in zip(*made, strict=True):
        assert close(ours, plain, 2**-9 if short else 1e-5)


@pytest.mark.parametrize("terms", ["", "shift", "prox", "memory", "mask", "pull", "shift prox memory mask pull"])
@pytest.mark.parametrize("outputs", [0, 37])
def test_the_whole_step_in_one(terms: str, outputs: int) -> None:
    """The weights from 300 on may be those of a linear layer, whose gradient is a product over three samples."""
    n, d, inputs = 3, 1500, 20
    w, g, memory = (random(n, d + 4, seed=i)[:, :d] for i in range(3))
    shift, start = random(d, seed=4), random(d, seed=5)
    mask = (random(d, seed=6) > 0).float()
    rate, gain, pull = torch.tensor([[0.0], [0.1], [0.7]]), torch.tensor([[0.3], [0.3], [0.2]]), torch.full((n, 1), 0.05)
    prox = torch.tensor(0.2)
    held, given = [], g
    if outputs:
        at = slice(300, 300 + outputs * inputs)
        layer = Linear(w[:, at].unflatten(1, (outputs, inputs)), None, g[:, at].unflatten(1, (outputs, inputs)), None, half=False)
        layer.x, layer.dy = random(n, 3, inputs, seed=7), random(n, 3, outputs, seed=8)
        given = g.clone()
        given[:, at] = (layer.dy.transpose(1, 2) @ layer.x).flatten(1)
        g[:, at] = torch.nan  # nobody reads it
        held.append(layer)
    step = gain * given
    if "pull" in terms:
        step = step + pull * w
    if "shift" in terms:
        step = step + shift
    if "prox" in terms:
        step = step + prox * (w - start)
    if "memory" in terms:
        step = step - memory
    if "mask" in terms:
        step = step * mask
    expected = w - rate * step
    ours = FusedStep(w, g, held)
    assert torch.allclose(ours.norm(), given.norm(dim=1, keepdim=True), rtol=1e-5)
    ours(
        rate, gain, pull if "pull" in terms else None, prox if "prox" in terms else None, start,
        shift if "shift" in terms else None, memory if "memory" in terms else None, mask if "mask" in terms else None,
    )  # fmt: skip
    assert torch.allclose(w, expected, atol=1e-5)


def test_a_recurrent_network_makes_the_same_gradients() -> None:
    n, batch = 2, 3
    x = torch.randint(0, 7, (n * batch, 5), generator=torch.Generator().manual_seed(1))
    y = torch.arange(n * batch) % 7
    module = nn.Sequential(nn.Embedding(7, 4), LSTM(4, 6, layers=2), Last(), nn.Linear(6, 7))
    problem = Problem(module, x, y, 7, ClientOptions(epochs=1, batch_size=batch), torch.device("cpu"))
    made = []
    for form in ("loop", "fused"):
        network = StackedNetwork(problem, n, conv=form)
        assert any(isinstance(place.layer, FusedRecurrent) for place in network.places) == (form == "fused")
        network.w.copy_(random(*network.w.shape, seed=2))
        made.append((network.gradient(x, y, torch.full((n, batch), 1 / batch)), network.g))
    for plain, ours in zip(*made, strict=True):
        assert close(ours, plain)


@pytest.mark.parametrize(("batch", "classes"), [(4, 3), (7, 10), (40, 80), (3, 700)])
def test_the_loss_in_one(batch: int, classes: int) -> None:
    n = 2
    z, y = 5 * random(n, batch, classes, seed=1), torch.arange(n * batch) % classes
    scale = random(n, batch, seed=2).abs()
    scale[1, -1] = 0.0
    loss, dy = softmax_loss(z, y, scale)
    leaf = z.clone().requires_grad_()
    expected = (nn.functional.cross_entropy(leaf.flatten(0, 1), y, reduction="none").view(n, batch) * scale).sum(1)
    expected.sum().backward()
    assert leaf.grad is not None
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert torch.allclose(dy, leaf.grad, atol=1e-6)


@pytest.mark.parametrize("local", [{}, {"clip": 0.5, "weight_decay": 0.1}])
@pytest.mark.parametrize("kind", ["plain", "limited", "all"])
def test_the_engine_on_these_kernels(kind: str, local: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine as on a GPU, with a layer that holds back its gradient, against one client after another."""
    monkeypatch.setattr(stacked, "HELD_FROM", 64)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    problem = Problem(
        module, random(20, 1, 8, 8, seed=1), torch.arange(20) % 3, 3, ClientOptions(epochs=2, batch_size=4, **local),
        torch.device("cpu"),
    )  # fmt: skip
    model, d = problem.layout.pack(module), problem.layout.d
    work = Work(torch.tensor([0.3, 0.2]))
    if kind == "limited":
        work = replace(work, clip=0.7)
    if kind == "all":
        work = replace(work, clip=0.7, own=0.4, field=random(1, d, seed=3), mix=torch.full((2, 1), 0.1), prox=0.3, memory=0.5)
    jobs = [Job(0, torch.arange(9), 2, seed=1), Job(1, torch.arange(9, 20), 2, seed=2, position=1)]
    memory = ClientMemory(d)
    for client in (0, 1):
        memory.write(client, 0.1 * random(d, seed=4 + client))
    engine = Batched(problem, functools.partial(StackedNetwork, conv="fused"), padding=True)
    (ours,) = engine.run(model, work, jobs, memory)
    (stage,) = engine.stages.values()
    assert stage.fused_step is not None
    assert [layer.w.shape[1:] for layer in stage.fused_step.held.values()] == [(8, 36)]
    expected = {chunk.jobs[0].client: chunk for chunk in Sequential(problem).run(model, work, jobs, memory)}
    for row, job in enumerate(ours.jobs):
        theirs = expected[job.client]
        assert close(ours.delta[row], theirs.delta[0], 1e-4)
        assert torch.allclose(ours.loss[row], theirs.loss[0], rtol=1e-4)
        assert torch.allclose(ours.norm[row], theirs.norm[0], rtol=1e-4)


def test_weights_that_the_step_keeps_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large linear layer reads the weights that the last step stored. A network of the first clients uses the same memory."""
    monkeypatch.setattr(stacked, "SHORT", torch.float16)  # the interpreter has no bfloat16
    monkeypatch.setattr(stacked, "HELD_FROM", 15)
    local = ClientOptions(epochs=1, batch_size=4)
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    problem = Problem(module, random(4, 6, seed=1), torch.arange(4) % 2, 2, local, torch.device("cpu"), half=True)
    network = StackedNetwork(problem, 3, "fused")
    (layer,) = network.hold(4)
    assert isinstance(layer, Linear)
    assert layer.short is not None
    network.w.copy_(random(3, problem.layout.d, seed=2))
    network.refresh()
    assert torch.equal(layer.short, layer.w.half())
    x, dy, ones = random(3, 4, 6, seed=3), random(3, 4, 5, seed=4), torch.ones(3, 1)
    assert layer.b is not None
    expected = torch.bmm(x, layer.w.transpose(1, 2)) + layer.b[:, None]
    assert close(layer.forward(x), expected, 2**-9)
    assert close(layer.backward(dy, True), torch.bmm(dy, layer.w), 2**-9)
    before = layer.w.clone()
    FusedStep(network.w, network.g, [layer])(0.1 * ones, ones, None, None, network.w[0], None, None, None)
    assert close(layer.w, before - 0.1 * torch.bmm(dy.transpose(1, 2), x))
    assert torch.equal(layer.short, layer.w.half())
    part = network.first(2)
    (held,) = part.hold(4)
    assert isinstance(held, Linear)
    assert held.short is not None
    assert held.short.data_ptr() == layer.short.data_ptr()


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_filters_whose_step_keeps_them_in_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of clients that make different numbers of steps, with filters held for the step and without."""
    module = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 5, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip
    local = ClientOptions(epochs=1, batch_size=2, weight_decay=0.1)
    problem = Problem(module, random(15, 1, 4, 4, seed=1), torch.arange(15) % 3, 3, local, torch.device("cpu"), half=True)
    model, d = problem.layout.pack(module), problem.layout.d
    work = Work(torch.tensor([0.3]), clip=0.7)
    if kind == "all":
        work = replace(work, own=0.4, field=random(1, d, seed=3), mix=torch.full((1, 1), 0.1), prox=0.3, memory=0.5)
    jobs = [Job(i, samples, 1, seed=i, position=i) for i, samples in enumerate(torch.arange(15).split([7, 6, 2]))]
    memory = ClientMemory(d)
    for client in range(3):
        memory.write(client, 0.1 * random(d, seed=4 + client))

    def two_rounds() -> tuple[list[Tensor], Batched]:
        engine, at, found = Batched(problem, functools.partial(StackedNetwork, conv="fused"), padding=True), model, []
        for _ in range(2):
            (chunk,) = engine.run(at, work, jobs, memory)
            found += [chunk.delta, chunk.norm, chunk.loss]
            at = Model(at.w + chunk.delta.mean(0), chunk.buffers.mean(0))
        return found, engine

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(stacked, "SHORT", torch.float16)  # the interpreter has no bfloat16
    ours, engine = two_rounds()
    (stage,) = engine.stages.values()
    for part in (stage, *stage.parts.values()):
        assert part.fused_step is not None
        assert [layer.w.shape[1:] for layer in part.fused_step.held.values()] == [(5, 64, 3, 3)]
    assert stage.parts
    monkeypatch.setattr(StackedNetwork, "hold", lambda self, batch: [])
    plain, _ = two_rounds()
    assert all(close(a, b, 1e-4) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    ("kernel", "stride", "bias", "channels", "side"),
    [(1, 1, True, 4, 7), (1, 2, False, 4, 7), (3, 2, True, 4, 7), (3, 2, False, 32, 8), (5, 2, False, 3, 9), (5, 3, True, 32, 10)],
)
def test_strides_and_single_pixels(kernel: int, stride: int, bias: bool, channels: int, side: int) -> None:
    n = 2
    x, w = random(n * 2, channels, side, side, seed=1), random(n, 5, channels, kernel, kernel, seed=2)
    b = random(n, 5, seed=3) if bias else None
    fused, plain = make_convolution("fused", n, kernel, kernel // 2, stride, half=False), Loop(n, kernel // 2, stride)
    expected = plain.forward(x, w, b)
    assert close(fused.forward(x, w, b), expected)
    dy = random(*expected.shape, seed=4)
    (dw, db), (dw_plain, db_plain) = ((torch.zeros_like(w), torch.zeros(n, 5) if bias else None) for _ in range(2))
    fused.weight_gradient(x, dy, dw, db)
    plain.weight_gradient(x, dy, dw_plain, db_plain)
    assert close(dw, dw_plain)
    if db is not None and db_plain is not None:
        assert close(db, db_plain)
    assert close(fused.input_gradient(x, dy, w), plain.input_gradient(x, dy, w))
    onto = random(n * 2, channels + 3, side, side, seed=5)[:, 1 : 1 + channels]  # a part of more channels
    expected = plain.input_gradient(x, dy, w) + onto
    assert close(fused.input_gradient(x, dy, w, onto.clone(memory_format=torch.channels_last)), expected)
    assert close(fused.input_gradient(x, dy, w, onto), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_whole_network_makes_the_same_gradients(dtype: torch.dtype) -> None:
    """The kernels in a chain, as the engine puts them together, against torch's layers; two clients, one with padding."""
    n, batch = 2, 4
    chain = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip
    x, y = random(n * batch, 3, 8, 8, seed=1), torch.arange(n * batch) % 5
    problem = Problem(chain, x, y, 5, ClientOptions(epochs=1, batch_size=batch), torch.device("cpu"))
    scale = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]])
    made = []
    for form in ("loop", "fused"):
        problem.half = form == "fused" and dtype == torch.float16
        network = StackedNetwork(problem, n, conv=form)
        if form == "fused":
            assert [type(layer).__name__ for layer in (place.layer for place in network.places)] == [
                "Conv", "FusedNorm", "Conv", "FusedNorm", "ConvPool", "Flatten", "Linear"
            ]  # fmt: skip
            network.dtype = dtype  # the interpreter has no bfloat16
        network.w.copy_(0.2 * random(*network.w.shape, seed=2))
        network.buffers.fill_(1.0)
        loss = network.gradient(x, y, scale)
        made.append((loss, network.g, network.buffers))
    for plain, ours in zip(*made, strict=True):
        assert close(ours, plain, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("make", [branched, lambda: Dense()])
def test_what_a_layer_is_given_in_evaluation(make: Callable[[], nn.Module]) -> None:
    """By the running statistics, which stay as they are, and not by the batch's own; against torch, client by client."""
    n, batch, module = 2, 3, make().eval()
    channels, side, head = (2, 8, "last.4") if hasattr(module, "last") else (3, 4, "head")
    x = random(n * batch, channels, side, side, seed=1)
    problem = Problem(module, x, torch.arange(n * batch) % 3, 3, ClientOptions(epochs=1, batch_size=batch), torch.device("cpu"))
    network = StackedNetwork(problem, n, conv="fused")
    network.w.copy_(0.3 * random(*network.w.shape, seed=2))
    network.buffers.copy_(random(*network.buffers.shape, seed=3).abs() + 0.1)
    before = network.buffers.clone()
    ours = network.fed(head, x)
    space, seen = Workspace(module, problem.layout, problem.device), []
    space.module.get_submodule(head).register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    for row, images in enumerate(x.chunk(n)):
        space.load(Model(network.w[row], network.buffers[row]))
        space.module.eval()(images)
    assert close(ours, torch.stack(seen))
    assert torch.equal(network.buffers, before)
    network.gradient(x, problem.y, torch.full((n, batch), 1 / batch))
    assert not torch.equal(network.buffers, before)  # training goes on as before


def test_a_network_with_branches_makes_the_same_gradients() -> None:
    n, batch = 2, 3
    x, y = random(n * batch, 2, 8, 8, seed=1), torch.arange(n * batch) % 3
    problem = Problem(branched(), x, y, 3, ClientOptions(epochs=1, batch_size=batch), torch.device("cpu"))
    made = []
    for form in ("loop", "fused"):
        network = StackedNetwork(problem, n, conv=form)
        network.w.copy_(0.3 * random(*network.w.shape, seed=2))
        loss = network.gradient(x, y, torch.full((n, batch), 1 / batch))
        made.append((loss, network.g, network.buffers))
    for plain, ours in zip(*made, strict=True):
        assert close(ours, plain)


class Residual(nn.Module):
    """Sums with ReLU: of a normalisation and an image that is read again before the sum, of two normalisations, of one with a ReLU
    of its own, of one of an image's mean with the image, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.side = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, k, stride, k // 2) for k, stride in ((3, 1), (3, 2), (1, 2), (3, 1)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(5))
        self.relu, self.mean, self.head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norms[0](self.convs[0](x))
        z = self.side(x)
        x = self.relu(self.relu(x + y) + z)
        x = self.relu(self.norms[1](self.convs[1](x)) + self.norms[2](self.convs[2](x)))
        x = self.relu(self.relu(self.norms[3](self.convs[3](x))) + x)
        x = self.relu(self.norms[4](self.mean(x)) + x)
        return self.head(torch.flatten(self.mean(x), 1))  # type: ignore[no-any-return]


def in_both_forms(
    make: Callable[[], nn.Module], side: int, scale: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[StackedNetwork, list[tuple[Tensor, Tensor]]]:
    """Two clients' network on our kernels, in these numbers, and pairs of what torch's kernels and ours make: losses, gradients and
    statistics."""
    n, batch = scale.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = make()
    x, y = random(n * batch, 3, side, side, seed=1), torch.arange(n * batch) % 5
    problem = Problem(module, x, y, 5, ClientOptions(epochs=1, batch_size=batch), torch.device("cpu"))
    networks, losses = [], []
    for form, numbers in (("loop", torch.float32), ("fused", dtype)):
        problem.half = numbers == torch.float16
        network = StackedNetwork(problem, n, conv=form)
        network.dtype = numbers
        network.w.copy_(torch.cat([p.detach().flatten() for p in module.parameters()]).expand(n, -1))
        network.w.add_(random(*network.w.shape, seed=3), alpha=0.05)
        for _ in range(2):  # what is kept from one step must not be seen by the next
            loss = network.gradient(x, y, scale)
        networks.append(network)
        losses.append(loss)
    plain, ours = networks
    return ours, [(losses[0], losses[1]), (plain.g, ours.g), (plain.buffers, ours.buffers)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_of_branches_and_relu_in_one(dtype: torch.dtype) -> None:
    scale = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.3, 0.3, 0.4, 0.0]])
    ours, pairs = in_both_forms(Residual, 6, scale, dtype)
    sums = [place.layer for place in ours.places if isinstance(place.layer, AddReLU)]
    assert [layer.second is not None for layer in sums] == [False, True, False]
    for plain, made in pairs:
        assert close(made, plain, 1e-5 if dtype == torch.float32 else 2e-2)


class Dense(nn.Module):
    """Channels beside channels: two concatenations that grow in one piece of memory, a third whose gradient an addition shares
    with another branch, and one whose parts come straight from normalisations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (16, 24, 32, 32))
        self.convs = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (16, 24, 32))
        self.other = nn.Conv2d(32, 40, 1)
        self.sides = nn.ModuleList(nn.Sequential(nn.Conv2d(40, 6, 1), nn.BatchNorm2d(6), nn.ReLU()) for _ in range(2))
        self.relu, self.pool, self.mean, self.head = nn.ReLU(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.convs[0](self.relu(self.norms[0](x)))], 1)
        x = torch.cat([x, self.convs[1](self.relu(self.norms[1](x)))], 1)
        wide = torch.cat([x, self.convs[2](self.relu(self.norms[2](x)))], 1)
        x = self.pool(wide + self.other(self.norms[3](x)))
        return self.head(torch.flatten(self.mean(torch.cat([side(x) for side in self.sides], 1)), 1))  # type: ignore[no-any-return]


def test_channels_that_grow_in_one_piece_of_memory() -> None:
    scale = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]])
    ours, pairs = in_both_forms(Dense, 4, scale)
    joints = [type(place.layer).__name__ for place in ours.places if isinstance(place.layer, Concatenate)]
    assert joints == ["Grow", "Grow", "Concatenate", "DirectConcatenate"]
    for plain, made in pairs:
        assert close(made, plain)
