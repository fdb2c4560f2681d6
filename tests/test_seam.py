"""Your own methods: the worked examples of the documentation, on every engine, against plain loops that share no code."""

from __future__ import annotations

import ast
import copy
import math
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fedagg
import tiny
from fedagg import Algorithm, Dataset, algorithms, seeding
from fedagg.engines import distributed
from fedagg.engines.base import allows_tf32
from fedagg.errors import FedaggError, FedaggWarning, SettingError
from fedagg.flat import Layout

ROOT = Path(__file__).parents[1]
SIZES, ROUNDS, EPOCHS, BATCH, LR = (11, 4, 7), 2, 2, 4, 0.2
Loop = Callable[[nn.Module, Dataset], Tensor]


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The classes of the page, registered for a while."""
    page = (ROOT / "docs" / "adding-an-algorithm.md").read_text(encoding="utf-8")
    blocks = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "@register" in code]
    assert [name for code in blocks for name in re.findall(r'@register\("(.*?)"\)', code)] == [
        "fedavgm-prox",
        "my-mofedsam",
        "my-delta-sgd",
        "moon",
    ]
    assert all(len(code.splitlines()) < 40 for code in blocks)
    module, known = types.ModuleType("examples"), dict(algorithms.REGISTRY)
    monkeypatch.setitem(sys.modules, "examples", module)
    imports = blocks[0][: blocks[0].index("@register")]
    exec("\n".join([imports, *blocks[1:]]), vars(module))
    yield module
    algorithms.REGISTRY.clear()
    algorithms.REGISTRY.update(known)


def vectors() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=generator)
    y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
    return Dataset(x[:22], y[:22], x[22:], y[22:], classes=3)


def images() -> Dataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 1, 6, 6, generator=generator)
    y = (x.flatten(1) @ torch.randn(36, 3, generator=generator)).argmax(1)
    return Dataset(x[:22], y[:22], x[22:], y[22:], classes=3)


def dense(*more: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), *more, nn.ReLU(), nn.Linear(8, 3))


def convolutional() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))


def parts() -> list[list[int]]:
    return [part.tolist() for part in torch.arange(sum(SIZES)).split(SIZES)]


def run(module: nn.Module, data: Dataset, algorithm: str, **more: Any) -> Tensor:
    settings = {
        "participation": 1.0,
        "rounds": ROUNDS,
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "lr": LR,
        "device": "cpu",
        "threads": 1,
    }
    result = fedagg.run(data=data, model=module, parts=parts(), algorithm=algorithm, **{**settings, **more})
    return Layout(module).pack(result.model).w


# --- plain loops ----------------------------------------------------------------------------------------------------


def at(net: nn.Module, w: Tensor) -> nn.Module:
    net = copy.deepcopy(net)
    vector_to_parameters(w.clone(), net.parameters())
    return net


def gradient(net: nn.Module, w: Tensor, loss: Callable[[nn.Module], Tensor]) -> Tensor:
    here = at(net, w)
    return parameters_to_vector(torch.autograd.grad(loss(here), list(here.parameters())))


def batches(t: int, client: int) -> Iterator[Tensor]:
    """The samples of every step, in the run's own order."""
    mine = torch.tensor(parts()[client])
    for epoch in mine[seeding.batches(seeding.derive(0, "client", t, 0, client), len(mine), EPOCHS)]:
        yield from epoch.split(BATCH)


def entropy(data: Dataset, batch: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda net: functional.cross_entropy(net(data.x_train[batch]), data.y_train[batch])


def mofedsam(net: nn.Module, data: Dataset) -> Tensor:
    w = parameters_to_vector(net.parameters()).detach()
    direction = torch.zeros_like(w)
    for t in range(ROUNDS):
        ends, velocities = [], []
        for client in range(3):
            v, steps = w.clone(), 0
            for batch in batches(t, client):
                g = gradient(net, v, entropy(data, batch))
                g = gradient(net, v + 0.1 * g / g.norm(), entropy(data, batch))
                v, steps = v - LR * (0.1 * g + 0.9 * direction), steps + 1
            ends.append(v)
            velocities.append((w - v) / (LR * steps))
        w, direction = torch.stack(ends).mean(0), torch.stack(velocities).mean(0)
    return w


def weighted(ends: list[Tensor]) -> Tensor:
    return sum(size / sum(SIZES) * end for size, end in zip(SIZES, ends, strict=True))  # type: ignore[return-value]


def delta_sgd(net: nn.Module, data: Dataset) -> Tensor:
    w = parameters_to_vector(net.parameters()).detach()
    for t in range(ROUNDS):
        ends = []
        for client in range(3):
            v, eta, theta, before = w.clone(), LR, 1.0, None
            for batch in batches(t, client):
                g = gradient(net, v, entropy(data, batch))
                if before is not None:
                    change = float((g - gradient(net, before, entropy(data, batch))).norm())
                    new = min(2.0 * float((v - before).norm()) / (2 * change), (1 + 0.1 * theta) ** 0.5 * eta)
                    eta, theta = new, new / eta
                before, v = v, v - eta * g
            ends.append(v)
        w = weighted(ends)
    return w


def moon(net: nn.Module, data: Dataset) -> Tensor:
    w, last = parameters_to_vector(net.parameters()).detach(), dict[int, Tensor]()
    body = slice(0, len(net) - 1)  # type: ignore[arg-type]
    for t in range(ROUNDS):
        ends = []
        for client in range(3):
            v = w.clone()
            for batch in batches(t, client):
                x, y = data.x_train[batch], data.y_train[batch]
                with torch.no_grad():
                    fixed = [at(net, other)[body](x) for other in (w, last.get(client, w))]  # type: ignore[index]

                def loss(here: nn.Module, x: Tensor = x, y: Tensor = y, fixed: list[Tensor] = fixed) -> Tensor:
                    z = here[body](x)  # type: ignore[index]
                    near, far = (torch.exp(functional.cosine_similarity(z, other) / 0.5) for other in fixed)
                    return functional.cross_entropy(here(x), y) - torch.log(near / (near + far)).mean()

                v = v - LR * gradient(net, v, loss)
            ends.append(v)
        last = dict(enumerate(ends))
        w = weighted(ends)
    return w


LOOPS: dict[str, Loop] = {"my-mofedsam": mofedsam, "my-delta-sgd": delta_sgd, "moon": moon}


def known(name: str, layer: str) -> str:
    """The method; for a network whose head is another layer, one that says so."""
    if name != "moon":
        return name
    kind = dataclass(type("Other", (algorithms.REGISTRY["moon"],), {"layer": layer, "__annotations__": {"layer": str}}))
    fedagg.register("moon-here")(kind)
    return "moon-here"


class Alone:
    """A team of one."""

    rank, size = 0, 1

    def __init__(self, device: torch.device) -> None: ...

    def part(self) -> None: ...

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    most = sum


@pytest.mark.parametrize("engine", ["sequential", "batched", "distributed"])
@pytest.mark.parametrize("name", LOOPS)
def test_the_examples_do_what_their_formulas_say(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "TorchTeam", Alone)
    expected = LOOPS[name](dense(), vectors())
    assert torch.allclose(run(dense(), vectors(), known(name, "3"), engine=engine), expected, atol=2e-5)


@pytest.mark.parametrize("name", LOOPS)
def test_the_examples_run_in_threads(name: str) -> None:
    expected = LOOPS[name](convolutional(), images())
    assert torch.allclose(run(convolutional(), images(), known(name, "3"), engine="auto", threads=2), expected, atol=2e-5)


@pytest.mark.parametrize("name", ["my-mofedsam", "moon"])
def test_batch_statistics_move_once_a_step_on_every_engine(name: str) -> None:
    ways = [run(dense(nn.BatchNorm1d(8)), vectors(), known(name, "4"), engine=engine) for engine in ("sequential", "batched")]
    assert torch.allclose(*ways, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_examples_run_on_flower(name: str) -> None:
    pytest.importorskip("flwr", reason="needs fedagg[flower]")
    from fedagg.flower import FedAggStrategy, client_app
    from flower_grid import HereGrid
    from test_flower import settings

    def node(context: Any) -> Dataset:
        rows, data = parts()[context.node_config["partition-id"]], vectors()
        return Dataset(data.x_train[rows], data.y_train[rows], data.x_test, data.y_test, classes=3)

    method = known(name, "3")
    config = settings(algorithm=method, clients=3, participation=1.0, rounds=ROUNDS, epochs=EPOCHS, batch_size=BATCH, lr=LR)
    strategy = FedAggStrategy(dense(), config)
    strategy.run(HereGrid(client_app(dense, node), 3), wait=0)
    assert torch.allclose(strategy.server.model.w, LOOPS[name](dense(), vectors()), atol=2e-5)
    if name == "moon":
        unknown = FedAggStrategy(dense(), config)
        del algorithms.REGISTRY[method]
        unknown.run(HereGrid(client_app(dense, node), 3), wait=0)
        (why,) = set(unknown.about[0]["left_out"].values())
        assert why.startswith("failed")  # a kind of error leaves the node, never its words


# --- what guards them -----------------------------------------------------------------------------------------------


class Careless(Algorithm):
    """Its steps and losses are right for one client, and mix those of a batch."""

    def step(self, client: Any, w: Tensor, gradient: Any, rate: Tensor, state: Any) -> Any:
        g = gradient(w)
        return w - rate * g / g.norm(), state  # over all clients

    def work(self, clients: Any) -> Any:
        return replace(super().work(clients), step=self.step)


class Branching(Algorithm):
    def loss(self, learner: Any, x: Tensor, y: Tensor) -> Tensor:
        losses: Tensor = learner.criterion(learner.output(x), y)
        return losses if losses.sum() > 0 else 2 * losses  # no branch by value under vmap

    def work(self, clients: Any) -> Any:
        return replace(super().work(clients), loss=self.loss)


@pytest.mark.parametrize("kind", [Careless, Branching])
def test_what_does_not_train_the_same_in_a_batch_is_not_trained_there(kind: type[Algorithm]) -> None:
    fedagg.register("own")(kind)
    plain = run(dense(), vectors(), "own", engine="sequential")
    with pytest.warns(FedaggWarning, match="they train one by one, which is slower"):
        assert torch.equal(run(dense(), vectors(), "own", engine="auto"), plain)
    with pytest.raises(SettingError, match="engine = 'batched': the method's own loss or step does not train the same"):
        run(dense(), vectors(), "own", engine="batched")


def test_a_rate_that_diverges_is_not_the_fault_of_the_batch() -> None:
    """The batched engine, asked for by name, would refuse a step that fails its trial."""

    class Steep(Careless):
        def step(self, client: Any, w: Tensor, gradient: Any, rate: Tensor, state: Any) -> Any:
            return w - rate * torch.exp(200 * rate) * gradient(w), state  # infinite at a rate of 1

    fedagg.register("own")(Steep)
    with pytest.warns(UserWarning, match="no client was valid in any round \\(not finite\\)"):
        run(dense(), vectors(), "own", engine="batched", lr=1.0)


def test_the_trial_of_an_own_step_uses_exact_products() -> None:
    """With tf32 two engines may differ by more than the trial allows, though both are right."""
    seen: list[bool] = []

    class Looking(Careless):
        def step(self, client: Any, w: Tensor, gradient: Any, rate: Tensor, state: Any) -> Any:
            seen.append(allows_tf32())
            return w - rate * gradient(w), state

    fedagg.register("own")(Looking)
    run(dense(), vectors(), "own", engine="batched", precision="tf32")
    trial = seen.index(True)
    assert trial > 0
    assert all(seen[trial:])


@pytest.mark.parametrize("option", [{"momentum": 0.9}, {"client_optimizer": "adam"}])
def test_options_that_a_custom_step_would_ignore_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="takes its own local steps"):
        run(dense(), vectors(), "my-delta-sgd", **option)


def test_a_loss_must_give_a_number_a_sample() -> None:
    class Meaned(Branching):
        def loss(self, learner: Any, x: Tensor, y: Tensor) -> Tensor:
            return learner.criterion(learner.output(x), y).mean()  # type: ignore[no-any-return]

    fedagg.register("own")(Meaned)
    with pytest.raises(SettingError, match=r"loss = .*Meaned.loss.*one number per sample, but gave shape \(\)"):
        run(dense(), vectors(), "own", engine="sequential")


@pytest.mark.parametrize("module", [dense, convolutional])
def test_a_step_may_change_its_state_in_place(module: Callable[[], nn.Module]) -> None:
    class Heavy(Algorithm):
        def work(self, clients: Any) -> Any:
            return replace(super().work(clients), step=self.step)

        def step(self, client: Any, w: Tensor, gradient: Any, rate: Tensor, state: Any) -> Any:
            m = state.setdefault("m", torch.zeros_like(w))
            m.mul_(0.9).add_(gradient(w))
            return w - rate * m, state

    fedagg.register("own")(Heavy)
    data = vectors() if module is dense else images()
    one, many = (run(module(), data, "own", engine=engine, threads=2) for engine in ("sequential", "auto"))
    assert torch.allclose(one, many, atol=1e-5)


def test_a_step_for_one_client_alone_runs_with_convolutions_too() -> None:
    class Alone(Algorithm):
        def work(self, clients: Any) -> Any:
            return replace(super().work(clients), step=self.step)

        def step(self, client: Any, w: Tensor, gradient: Any, rate: Tensor, state: Any) -> Any:
            g = gradient(w)
            return w - rate * g / (1 + torch.dot(g, g)), state  # a product of vectors, not of stacks

    fedagg.register("own")(Alone)
    plain = run(convolutional(), images(), "own", engine="sequential")
    with pytest.warns(FedaggWarning, match="they train one by one"):
        ours = run(convolutional(), images(), "own", engine="auto", threads=2)
    assert torch.allclose(ours, plain, atol=1e-6)  # the two put images in different orders of memory


@pytest.mark.parametrize("engine", tiny.ENGINES)
def test_a_loss_knows_the_number_of_steps(engine: str) -> None:
    class Scaled(Algorithm):
        def work(self, clients: Any) -> Any:
            return replace(super().work(clients), loss=self.loss)

        def loss(self, learner: Any, x: Tensor, y: Tensor) -> Tensor:
            return learner.criterion(learner.output(x), y) * learner.steps

    fedagg.register("own")(Scaled)
    ours = run(dense(), vectors(), "own", engine=engine, rounds=1, lr=0.02)
    net, w, ends = dense(), parameters_to_vector(dense().parameters()).detach(), []
    for client, steps in enumerate((6, 2, 4)):  # two epochs of 11, 4 and 7 samples in batches of 4
        end = w.clone()
        for batch in batches(0, client):
            end = end - 0.02 * steps * gradient(net, end, entropy(vectors(), batch))
        ends.append(end)
    assert torch.allclose(ours, sum(s * end for s, end in zip(SIZES, ends, strict=True)) / sum(SIZES), atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rate": 0.1}, r"Work.rate = 0.1: give a tensor \(2,\) or \(3, 2\); clients.constant\(0.1\) makes one"),
        ({"rate": torch.ones(3)}, r"Work.rate = 'a tensor \(3,\)': give a tensor \(2,\) or \(3, 2\)"),
        ({"field": torch.ones(83)}, r"Work.field = 'a tensor \(83,\)': give a tensor \(83, 83\)"),
        ({"mask": torch.ones(7)}, r"Work.mask = 'a tensor \(7,\)': give a tensor \(83,\)"),
    ],
)
def test_work_of_another_shape_is_refused(given: dict[str, Any], words: str) -> None:
    class Odd(Algorithm):
        def work(self, clients: Any) -> Any:
            return replace(super().work(clients), **given)

    fedagg.register("own")(Odd)
    with pytest.raises(SettingError, match=words):
        run(dense(), vectors(), "own", engine="sequential")


# --- weights, state, callbacks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", tiny.ENGINES)
def test_a_method_says_how_much_a_client_counts(engine: str) -> None:
    class Latest(Algorithm):
        def weigh(self, chunk: Any) -> Tensor:
            return torch.tensor([1.0 if job.client == 2 else 0.0 for job in chunk.jobs])

    fedagg.register("own")(Latest)
    ours = run(dense(), vectors(), "own", engine=engine, rounds=1)
    net, w = dense(), parameters_to_vector(dense().parameters()).detach()
    for batch in batches(0, 2):
        w = w - LR * gradient(net, w, entropy(vectors(), batch))
    assert torch.allclose(ours, w, atol=1e-5)


@pytest.mark.parametrize("weights", [[1.0, -1.0, 1.0], [1.0]])
def test_weights_that_cannot_be_are_refused(weights: list[float]) -> None:
    class Odd(Algorithm):
        def weigh(self, chunk: Any) -> Tensor:
            return torch.tensor(weights)

    fedagg.register("own")(Odd)
    with pytest.raises(FedaggError, match="weigh: the method must give one number per client"):
        run(dense(), vectors(), "own", engine="batched")


def test_weights_of_clients_that_are_left_out_do_not_matter() -> None:
    class Calm(Algorithm):
        def weigh(self, chunk: Any) -> list[float]:
            return (1.0 / torch.linalg.vector_norm(chunk.delta, dim=1)).tolist()  # 0 or not a number for a corrupt answer

    fedagg.register("own")(Calm)
    result = tiny.job(algorithm="own", corrupt_rate=0.4)
    assert result.left_out
    assert math.isfinite(result.history[-1]["loss"])


def test_what_clients_remember_has_their_shape() -> None:
    class Short(Algorithm):
        def work(self, clients: Any) -> Any:
            return replace(super().work(clients), memory=1.0)

        def remember(self, chunk: Any, work: Any) -> Tensor:
            return chunk.delta[:, :4]

    fedagg.register("own")(Short)
    with pytest.raises(FedaggError, match=r"remember: the method must give a row for each client, \(1, 83\), and gave \(1, 4\)"):
        run(dense(), vectors(), "own", engine="sequential")


def test_a_round_ends_in_a_model_and_figures_are_numbers_of_their_own() -> None:
    class Nothing(Algorithm):
        def update(self, model: Any, out: Any, clients: Any) -> Any:
            return None

    class Figures(Algorithm):
        own: ClassVar[dict[str, Any]] = {"size": torch.tensor(0.5)}

        def figures(self) -> dict[str, float]:
            return self.own

    with pytest.raises(FedaggError, match="algorithm Nothing: a round must end in a Model, and gave NoneType"):
        tiny.job(algorithm=Nothing())
    assert tiny.job(algorithm=Figures(), rounds=1).history[0]["size"] == 0.5
    Figures.own = {"round": 9.0}
    with pytest.raises(FedaggError, match="figures\\(\\) names round, which every record has"):
        tiny.job(algorithm=Figures(), rounds=1)


class Counting(Algorithm):
    """Numbers of every kind in its state, and a step that depends on them."""

    def start(self, model: Any, module: Any, layout: Any) -> None:
        self.state |= {"rounds": 0, "scale": 1.0, "odd": False, "m": torch.zeros_like(model.w)}

    def update(self, model: Any, out: Any, clients: Any) -> Any:
        s = self.state
        s["rounds"], s["scale"], s["odd"] = s["rounds"] + 1, s["scale"] / 3, not s["odd"]
        s["m"] = s["m"] + s["scale"] * out.mean
        return model.moved(s["m"] * (s["rounds"] if s["odd"] else 1), out.buffers)


def test_numbers_in_the_state_come_back(tmp_path: Path) -> None:
    fedagg.register("own")(Counting)
    tiny.job(algorithm="own", rounds=5, out=tmp_path / "whole")
    tiny.job(algorithm="own", rounds=2, out=tmp_path / "part")
    tiny.job(algorithm="own", rounds=5, resume=tmp_path / "part")
    assert tiny.same_run(tmp_path / "whole", tmp_path / "part")
    kinds = (int, float, bool)
    held = fedagg.federation.checkpoint.latest(tmp_path / "part" / "checkpoints")
    assert held is not None
    assert tuple(type(held.facts["numbers"][name]) for name in ("rounds", "scale", "odd")) == kinds


@pytest.mark.parametrize("what", ["state", "model"])
def test_changes_in_place_are_found(what: str) -> None:
    class Careless(Counting):
        def update(self, model: Any, out: Any, clients: Any) -> Any:
            (self.state["m"] if what == "state" else model.w).add_(out.mean)
            return model.moved(out.mean, out.buffers)

    fedagg.register("own")(Careless)
    words = {"state": r"algorithm own: state\['m'\] was changed in place", "model": "the model's w was changed in place"}[what]
    with pytest.raises(FedaggError, match=words):
        tiny.job(algorithm="own")


def test_keys_of_the_state_are_texts() -> None:
    class Numbered(Algorithm):
        def start(self, model: Any, module: Any, layout: Any) -> None:
            self.state[3] = 0.0  # type: ignore[index]

    with pytest.raises(FedaggError, match=r"algorithm Numbered: state\[3\]: a key must be a text"):
        tiny.job(algorithm=Numbered())


def test_other_things_in_the_state_are_refused() -> None:
    class Listing(Counting):
        def update(self, model: Any, out: Any, clients: Any) -> Any:
            self.state["seen"] = out.clients
            return model

    fedagg.register("own")(Listing)
    with pytest.raises(FedaggError, match=r"algorithm own: state\['seen'\] is a list; keep tensors and numbers there"):
        tiny.job(algorithm="own")


def test_a_callback_stops_the_run_and_need_not_have_every_method(tmp_path: Path) -> None:
    class Enough:
        def round_done(self, row: dict[str, Any]) -> Any:
            return np.array(row["round"]) == 2  # NumPy's own kind of truth

    ended: list[int] = []
    last = types.SimpleNamespace(finished=lambda result: ended.append(len(result.history)))
    result = tiny.job(callbacks=[Enough(), last], out=tmp_path / "run")
    assert (len(result.history), ended, result.interrupted) == (2, [2], False)
    assert len(tiny.job(resume=tmp_path / "run").history) == 6
    with pytest.raises(SettingError, match="callbacks = 'object': give an object with some of the methods"):
        tiny.job(callbacks=[object()])


# --- the package ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_restores_torchs_switches() -> None:
    """Whatever the user has set, which may be visible in one of torch's ways to ask, and an error in another."""
    code = """
import torch, tiny
parts = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.mkldnn.matmul
def asked(question):
    try:
        return question()
    except RuntimeError as error:
        return str(error)
def switches():
    questions = torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32
    return [*(part.fp32_precision for part in parts), *map(asked, questions), torch.get_num_threads()]
def generic(value):
    torch.backends.fp32_precision = value
for user in (lambda: None, lambda: torch.set_float32_matmul_precision("medium"), lambda: generic("tf32")):
    user()
    before = switches()
    for precision in ("fp32", "tf32"):
        tiny.job(rounds=1, precision=precision, threads=before[-1] + 1)
        assert switches() == before, (before, switches())
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})


def test_the_names_for_authors_are_in_the_package_and_cost_nothing_until_used() -> None:
    code = "import sys, fedagg; assert 'torch' not in sys.modules; fedagg.data.load; [getattr(fedagg, n) for n in fedagg.__all__]"
    subprocess.run([sys.executable, "-c", code], check=True)
    wanted = "Algorithm Work Model Outcome Clients Chunk register Dataset Config Result run SettingError"
    assert set(wanted.split()) <= set(fedagg.__all__) <= set(dir(fedagg))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedagg.nothing


def imports() -> dict[str, set[str]]:
    """What every module of the package imports from it, anywhere in its code."""
    source = ROOT / "src"
    paths = {
        ".".join(p.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): p for p in source.rglob("fedagg/**/*.py")
    }
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (inner & paths.keys()) | ({node.module} if inner - paths.keys() else set())
        found[name] = names & paths.keys() - {name}
    found["fedagg"] = set()  # the names it offers are imported when they are used
    return found


def test_no_imports_in_a_circle_and_no_method_imports_an_engine() -> None:
    graph = imports()
    reached, new = set[str](), {name for name in graph if name.startswith("fedagg.algorithms")}
    while new := new - reached:
        reached |= new
        new = set().union(*(graph[name] for name in new))
    assert not [name for name in reached if name.startswith("fedagg.engines")]  # directly or through another module
    while leaves := {name for name, needs in graph.items() if not needs}:
        graph = {name: needs - leaves for name, needs in graph.items() if name not in leaves}
    assert graph == {}
