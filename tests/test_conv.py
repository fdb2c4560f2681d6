"""The processor's form of convolutions, and clients side by side in threads: the same numbers as the plain engine's."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedagg import engines
from fedagg.config import Config
from fedagg.engines import Sequential, choose, stacked
from fedagg.engines.base import Problem
from fedagg.engines.batched import Batched
from fedagg.engines.conv import Loop, channels_last
from fedagg.engines.threaded import Threaded
from fedagg.flat import Model
from fedagg.memory import ClientMemory
from fedagg.work import Chunk, ClientOptions, Job, Work
from test_engines import assert_same, chain, job_list, joined, make_problem, works


@pytest.mark.parametrize("shape", [(3, 1, 5, 4), (2, 3, 5, 4), (1, 1, 1, 1)])
def test_strides_say_channels_last(shape: tuple[int, ...]) -> None:
    x = torch.rand(2 * shape[0], *shape[1:])[shape[0] :]  # a view that does not begin where its memory does
    y = channels_last(x)
    assert torch.equal(x, y)
    assert y.stride() == (y[0].numel(), 1, shape[3] * shape[1], shape[1])


def test_one_channel_passes_the_order_on() -> None:
    y = Loop(1, padding=1).forward(torch.rand(4, 1, 8, 8), torch.rand(1, 6, 1, 3, 3), None)
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("channels", [1, 2])
def test_loop_agrees_with_autograd(n: int, channels: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.rand(n * 4, channels, 7, 6, generator=g), torch.rand(n, 5, channels, 3, 3, generator=g)
    b, dy = torch.rand(n, 5, generator=g), torch.rand(n * 4, 5, 7, 6, generator=g)
    kernel, dw = Loop(n, padding=1), torch.zeros_like(w)
    kernel.weight_gradient(x, dy, dw, None)
    for i, rows in enumerate(torch.arange(n * 4).split(4)):
        leaf, filters = x[rows].requires_grad_(), w[i].clone().requires_grad_()
        y = functional.conv2d(leaf, filters, b[i], padding=1)
        y.backward(dy[rows])
        assert leaf.grad is not None
        assert filters.grad is not None
        assert torch.allclose(kernel.forward(x, w, b)[rows], y, atol=1e-5)
        assert torch.allclose(kernel.input_gradient(x, dy, w)[rows], leaf.grad, atol=1e-5)
        assert torch.allclose(dw[i], filters.grad, atol=1e-4)


class Viewing(nn.Module):
    """Flattens in the way that many users' modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 4, 3), nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.last(y.view(len(y), -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("module", "ordered"), [(Viewing(), False), (chain(), True), (nn.Flatten(), False)])
@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_images_are_laid_out_where_the_module_takes_it(module: nn.Module, ordered: bool, engine: str) -> None:
    problem = make_problem(module, (2, 8, 8), ClientOptions(epochs=1, batch_size=4))
    before, strides, half = problem.x.clone(), problem.x.stride(), problem.half
    built = engines.build(engine, problem, Config(threads=2))
    assert torch.equal(problem.x, before)  # what it was given is as it was
    assert (problem.x.stride(), problem.half, problem.graph) == (strides, half, None)
    images = choose.ordered(problem)
    assert torch.equal(images, before)
    assert images.is_contiguous(memory_format=torch.channels_last) == ordered
    if problem.layout.d:
        work = Work(rate=torch.full((1,), 0.1, dtype=torch.float64))
        chunks = list(built.run(problem.layout.pack(module), work, job_list(1), None))
        assert len(chunks) == 4


def single(dropout: float = 0.0) -> nn.Sequential:
    """Images of one channel, where the two orders of memory look alike."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 3)
        )


def idle() -> nn.Sequential:
    """A layer that does nothing between two that share memory, and a linear layer whose input needs a gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.0), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
            nn.Identity(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3),
        )  # fmt: skip


def traced(module: nn.Module, shape: tuple[int, ...], local: ClientOptions) -> Problem:
    """As the choice of engines hands it over: threads that trace at the same time get in each other's way."""
    problem = choose.with_graph(make_problem(module, shape, local))
    assert problem.graph is not None
    return problem


@pytest.mark.parametrize("kind", ["plain", "prox", "mixed", "per client", "memory", "mask", "trace"])
@pytest.mark.parametrize(("make", "shape"), [(single, (1, 8, 8)), (chain, (2, 8, 8)), (idle, (2, 8, 8))])
def test_threads_without_autograd_agree_with_the_plain_engine(make: Any, shape: tuple[int, ...], kind: str) -> None:
    problem = traced(make(), shape, ClientOptions(epochs=2, batch_size=4))
    work, model = works(problem.layout.d)[kind], problem.layout.pack(problem.module)
    memory = ClientMemory(problem.layout.d)
    for client in range(4):
        memory.write(client, 0.01 * torch.randn(problem.layout.d, generator=torch.Generator().manual_seed(client)))
    expected = list(Sequential(problem).run(model, work, job_list(), memory))
    ours = list(Threaded(problem, 2, stacked.StackedNetwork).run(model, work, job_list(), memory))
    assert [chunk.jobs[0].client for chunk in ours] == [0, 1, 2, 3]
    assert_same(ours, expected)


def test_dropout_in_threads_repeats_by_seed_and_leaves_torch_alone() -> None:
    problem = traced(single(0.5), (1, 8, 8), ClientOptions(epochs=2, batch_size=4))
    jobs = [Job(client=i, samples=torch.arange(8), epochs=2, seed=seed, position=i) for i, seed in enumerate((5, 6, 5, 7))]
    work, model = Work(rate=torch.full((2,), 0.5, dtype=torch.float64)), problem.layout.pack(problem.module)

    def deltas(threads: int) -> Tensor:
        return joined(list(Threaded(problem, threads, stacked.StackedNetwork).run(model, work, jobs, None)))["delta"]

    before = torch.get_rng_state()
    one, two = deltas(1), deltas(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, two)  # whoever else draws at the same time
    assert torch.equal(one[0], one[2])
    assert not torch.equal(one[0], one[1])


def test_threads_go_with_their_engine() -> None:
    problem = traced(single(), (1, 8, 8), ClientOptions(epochs=2, batch_size=4))
    model, work = problem.layout.pack(problem.module), works(problem.layout.d)["plain"]
    for network in (stacked.StackedNetwork, None):
        engine = Threaded(problem, 2, network)
        list(engine.run(model, work, job_list(), None))
        threads = list(engine.pool._threads)
        assert threads
        del engine
        gc.collect()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)


def test_clients_that_have_not_begun_when_a_round_is_interrupted_do_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = traced(single(), (1, 8, 8), ClientOptions(epochs=1, batch_size=4))
    model, work = problem.layout.pack(problem.module), Work(rate=torch.full((1,), 0.1, dtype=torch.float64))
    jobs = [Job(client=i, samples=torch.arange(8), epochs=1, seed=i, position=i) for i in range(50)]
    train, made, gate = Batched.train, list[int](), threading.Event()

    def waiting(self: Batched, model: Model, work: Work, jobs: list[Job], memory: None) -> Chunk:
        made.append(jobs[0].client)
        assert jobs[0].client == 0 or gate.wait(10)
        return train(self, model, work, jobs, memory)

    monkeypatch.setattr(Batched, "train", waiting)
    engine = Threaded(problem, 2, stacked.StackedNetwork)
    round_of = engine.run(model, work, jobs, None)
    next(round_of)
    round_of.close()  # type: ignore[attr-defined]
    gate.set()
    engine.pool.shutdown()
    assert len(made) <= 4
