"""FedAgg's default: the rate it measures, the plan of Theorem 1, its guard, and the average of its path."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedagg
import tiny
from fedagg import engines, meanfield
from fedagg.aggregate import RULES, trusted
from fedagg.algorithms import guard
from fedagg.algorithms.fedagg import FedAgg
from fedagg.clients import Clients, NoClients, Yardstick
from fedagg.config import Config
from fedagg.engines.base import Problem
from fedagg.engines.threaded import Threaded
from fedagg.errors import SettingError
from fedagg.faults import Faults
from fedagg.flat import Model
from fedagg.work import Chunk, ClientOptions, Job, Work

STEPS, EPOCHS, BEND = 2, 3, 3.0


@dataclass
class Quadratic:
    """Client i has the loss ½ h (w - b_i)², b_i = 10, 10.5 or 11, and descends it in full steps."""

    note: str = "quadratic"
    steps: int = STEPS

    def run(self, model: Model, work: Work, jobs: list[Job], memory: Any) -> Any:
        for job in jobs:
            own, w, told, rates = work.of([job.position]), model.w.clone(), list[Tensor](), torch.zeros(1, work.rate.shape[-1])
            goal, norms = 10.0 + 0.5 * (job.client % 3), list[Tensor]()
            for epoch in range(job.epochs):
                rates[0, epoch] = rate = own.rates(epoch, w[None], model.w)[0]
                shift = own.shift(epoch)
                for _ in range(self.steps):
                    told.append(self.loss(w, goal))
                    g = BEND * (w - goal)
                    norms.append(g.abs())
                    g = g.clamp(-work.clip, work.clip) if work.clip else g
                    w = w - rate * (own.own * g + (0.0 if shift is None else shift))
            field = torch.zeros_like(w) if work.field is None else work.field[0]
            yield Chunk(
                jobs=[job],
                start=model.w,
                delta=(w - model.w)[None],
                buffers=model.buffers[None],
                loss=torch.stack(told).mean()[None],
                first=told[0][None],
                behind=self.loss(model.w + work.behind * field, goal)[None],
                norm=torch.stack(norms).mean()[None],
                rates=rates,
                steps=torch.tensor([self.steps * job.epochs]),
            )

    def loss(self, w: Tensor, goal: float) -> Tensor:
        return 0.5 * BEND * (w - goal).square().sum()


def federation_of(count: int, w: Tensor | None = None, **more: Any) -> Clients:
    return Clients(
        engine=more.pop("engine", None) or Quadratic(),
        ids=list(range(count)),
        samples=lambda client: torch.arange(5 * STEPS),
        total=more.pop("total", count),
        local=more.pop("local", ClientOptions(epochs=EPOCHS, batch_size=5)),
        seed=0,
        model=Model(torch.zeros(1) if w is None else w, torch.zeros(0)),
        **{"t": 0, **more},
    )


def started(d: int = 1, **options: Any) -> FedAgg:
    method = FedAgg(**options)
    method.start(Model(torch.zeros(d), torch.zeros(0)), nn.Linear(1, 1), None)  # type: ignore[arg-type]
    return method


# --- the rate that is measured ----------------------------------------------------------------------------------------


def found(method: FedAgg, clients: Clients) -> float:
    method.search(clients)
    return float(method.state["rate"])


@pytest.mark.parametrize(("rounds", "waits"), [(100, 3), (0, 3), (5, 3), (4, 0)])
def test_where_one_of_many_clients_takes_part_four_try_rates(monkeypatch: pytest.MonkeyPatch, rounds: int, waits: int) -> None:
    """The loss of the second is so flat that a rate a hundred times as high is best for it alone. Nothing is trained before the
    fourth, unless the run has no more rounds than that."""
    method, model = started(lr=0.1), Model(torch.zeros(1), torch.zeros(0))
    for t, bend in enumerate((3.0, 0.03, 0.3, 3.0)):
        monkeypatch.setattr(sys.modules[__name__], "BEND", bend)
        clients = federation_of(1, model.w, t=t, total=100, rounds=rounds)
        model = method.round(model, clients)
        assert (float(model.w) == 0.0) == (t < waits)
    assert 0.6 < method.state["rate"] / (1 / 3) < 1.5


@pytest.mark.parametrize(
    ("count", "total", "factor"),
    [
        (5, 100, 5 / 0.95 / 4),
        (8, 16, 4.0),
        (4, 100, 1 / 0.96),
        (20, 21, 105.0),
        (3, 100, math.inf),
        (2, 4, math.inf),
        (6, 6, math.inf),
    ],
)
def test_the_more_clients_take_part_the_further_the_rate_may_be(count: int, total: int, factor: float) -> None:
    """By hand: the variance of a mean of n out of N is as (1 - n/N)/n; four of very many clients are the measure."""
    assert 2 ** started(lr=0.1).reach(federation_of(count, total=total)) == pytest.approx(factor)


def test_clients_of_one_class_do_not_set_a_rate_that_breaks_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of fifty clients, each with one class, which they learn at any rate. If they have all classes, the rate is in reach."""
    job: dict[str, Any] = {"dataset": "mnist-mini", "model": "mlp", "clients": 50, "participation": 0.1, "seed": 6}

    def one_class() -> float:
        return fedagg.run(partition="shards", shards=1, rounds=40, eval_every=40, **job).accuracy or 0.0

    def all_classes() -> float:
        return float(fedagg.run(partition="iid", rounds=1, eval_every=1, **job).history[0]["own_rate"])

    accuracy, rate = one_class(), all_classes()
    monkeypatch.setattr(FedAgg, "reach", lambda self, clients: math.inf)
    assert accuracy > one_class() + 0.3
    assert all_classes() == rate


def test_the_search_goes_on_after_a_round_in_which_nobody_answers() -> None:
    method, model = started(lr=0.1), Model(torch.zeros(1), torch.zeros(0))
    rates = []
    for t, dropout in enumerate((1.0, 0.0, 1.0, 0.0, 0.0, 0.0)):
        clients = federation_of(1, total=100, t=t, rounds=100, faults=Faults(dropout=dropout))
        with suppress(NoClients):
            method.round(model, clients)
        rates.append(method.state["rate"])
    assert rates[0] == 0.1
    assert rates[1] > 0.1
    assert set(rates[1:]) == {rates[1]}
    assert method.state["tried"] == 4


@pytest.mark.parametrize("base", [1e-4, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize("count", [1, 2, 20])
def test_the_rate_that_is_best_for_a_client_alone(count: int, base: float) -> None:
    """By hand: a step at the rate 1/h ends at the optimum, so that no rate leaves less loss. Beyond it the loss rises faster
    than it fell: the parabola is a little low."""
    rate = found(started(lr=base), federation_of(count))
    assert 0.6 < rate / (1 / BEND) < 1.5
    method = started(lr=base)
    first = federation_of(count)
    method.round(Model(torch.zeros(1), torch.zeros(0)), first)
    assert method.state["rate"] == rate
    assert 6 <= first.passes <= 16
    second = federation_of(count, t=1)
    method.round(Model(torch.zeros(1), torch.zeros(0)), second)
    assert second.passes == 1


@pytest.mark.parametrize("base", [1e-4, 1e-2, 30.0])
def test_clients_that_make_one_step_try_it_together(base: float) -> None:
    """By hand: all start at 0, their mean gradient is -10.5 h, and a step of 1/h along it ends at 10.5, the best for all of them.
    The search tries powers of two only, so that the lowest point of its parabola is near 1/h, not at it."""
    alone = federation_of(3, engine=Quadratic(steps=1), local=ClientOptions(epochs=1, batch_size=10))
    assert 0.6 < found(started(lr=base), alone) / (1 / BEND) < 1.5
    assert alone.outcome is None
    assert alone.downlink.error is None


class OfTheirSize(Quadratic):
    """Clients make a step for every five samples. Remembers how far along the field they were asked for their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.behind = set[float]()

    def run(self, model: Model, work: Work, jobs: list[Job], memory: Any) -> Any:
        self.behind.add(work.behind)
        for job in jobs:
            self.steps = len(job.samples) // 5
            yield from super().run(model, work, [job], memory)


@pytest.mark.parametrize(("several", "together"), [(4, False), (3, True)])
def test_clients_that_make_one_step_have_no_say_if_enough_others_do(several: int, together: bool) -> None:
    """Of ten clients these make two steps. If they are four, the search is the same as if they were alone."""

    def sized(count: int) -> Clients:
        local = ClientOptions(epochs=1, batch_size=5)
        clients = federation_of(count, engine=OfTheirSize(), local=local, total=10)
        return replace(clients, samples=lambda client: torch.arange(10 if client < several else 5))

    everybody, alone = sized(10), sized(several)
    rate = found(started(lr=0.01), everybody)
    assert (everybody.engine.behind != {0.0}) == together  # type: ignore[attr-defined]
    assert (rate == found(started(lr=0.01), alone)) != together


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_one_step_a_round_learns(engine: str) -> None:
    job = {
        "clients": 6,
        "participation": 0.5,
        "rounds": 12,
        "epochs": 1,
        "batch_size": 100,
        "partition": "dirichlet",
        "downlink_bits": 3,
    }
    rates = []
    for base in (1e-4, 10.0):
        run = fedagg.run(data=tiny.dataset(), model="linear", lr=base, engine=engine, **job)
        rates.append(run.history[0]["own_rate"])
        assert run.loss < 0.8 * run.history[0]["loss"]
    assert rates[0] == pytest.approx(rates[1], rel=0.5)


@pytest.mark.parametrize("lost", [math.nan, math.inf, 1e9, 4.0])
@pytest.mark.parametrize(("first", "low", "best"), [(2.0, 1.0, 0.5), (-0.5, -1.0, -2.0)])
def test_a_loss_that_diverged_counts_as_twice_the_first_loss(first: float, low: float, best: float, lost: float) -> None:
    """Means of two clients of 1, 0.5 and 4, so that the best is ½ · (1 - 4)/(1 - 1 + 4) steps further, and the rate 0.65 of a
    step above it. Where the first loss is -0.5, twice that is nothing: -1, -2 and 0."""

    class Given(Quadratic):
        def run(self, model: Model, work: Work, jobs: list[Job], memory: Any) -> Any:
            for chunk in super().run(model, work, jobs, memory):
                each = 0.1 * (-1) ** chunk.jobs[0].client  # of the client's own
                known = {0.0: first, 0.01: low, 0.02: low, 0.04: best}
                chunk.loss = torch.full_like(chunk.loss, known.get(round(float(work.rate[0]), 4), lost - each) + each)
                yield chunk

    high = first + abs(first)
    expected = 0.04 * 2 ** (0.65 + 0.5 * (low - high) / (low - 2 * best + high))
    assert found(started(lr=0.01), federation_of(2, engine=Given())) == pytest.approx(expected)


def test_a_client_without_a_number_does_not_spoil_the_search() -> None:
    class Spoilt(Quadratic):
        def run(self, model: Model, work: Work, jobs: list[Job], memory: Any) -> Any:
            for chunk in super().run(model, work, jobs, memory):
                if chunk.jobs[0].client == 0:
                    chunk.loss, chunk.norm = torch.tensor([math.nan]), torch.tensor([math.inf])
                yield chunk

    method = started(lr=0.01)
    assert 0.6 < found(method, federation_of(10, engine=Spoilt())) / (1 / BEND) < 1.5
    assert method.state["norm"] == pytest.approx(10.5 * BEND, rel=1e-3)


class OneLies(Quadratic):
    """Client 0 reports what it likes in place of its losses."""

    def __init__(self, lie: Callable[[Work], float]) -> None:
        super().__init__()
        self.lie = lie

    def run(self, model: Model, work: Work, jobs: list[Job], memory: Any) -> Any:
        for chunk in super().run(model, work, jobs, memory):
            if chunk.jobs[0].client == 0:
                chunk.loss = chunk.first = chunk.behind = torch.tensor([self.lie(work)])
            yield chunk


@pytest.mark.parametrize(
    ("lie", "base", "fools"),
    [
        (lambda work: 1e9, 0.01, False),
        (lambda work: -1e9, 0.01, True),
        (lambda work: -1e9 if float(work.rate[0]) < 0.003 else 1e3, 0.01, True),  # a low rate is best
        (lambda work: -1e9 if float(work.rate[0]) > 0.02 else 0.0, 30.0, False),
    ],
)
def test_with_a_robust_rule_a_client_that_lies_does_not_set_the_rate(
    lie: Callable[[Work], float], base: float, fools: bool
) -> None:
    """1/h is the best rate for all who tell the truth."""
    for rule in RULES:
        honest, clients = federation_of(10, robust=rule), federation_of(10, engine=OneLies(lie), robust=rule)
        rate, _ = found(started(lr=base), clients), found(started(lr=base), honest)
        assert (0.6 < rate * BEND < 1.5) != (rule == "mean" and fools)
        assert rule == "mean" or clients.passes == honest.passes


def test_with_a_robust_rule_a_client_that_goes_astray_does_not_set_the_agreement() -> None:
    """The others hardly differ: their goals are 10 to 11 away."""

    class OneStrays(Quadratic):
        def run(self, model: Model, work: Work, jobs: list[Job], memory: Any) -> Any:
            for chunk in super().run(model, work, jobs, memory):
                if chunk.jobs[0].client == 0:
                    chunk.delta = -50.0 * chunk.delta
                yield chunk

    agreement = {}
    for rule in RULES:
        method = started(lr=0.01)
        method.round(Model(torch.zeros(1), torch.zeros(0)), federation_of(10, engine=OneStrays(), robust=rule, drop=False))
        agreement[rule] = method.state["agreement"]
    assert agreement.pop("mean") < 0.1
    assert all(value > 0.5 for value in agreement.values()), agreement


@pytest.mark.parametrize("base", [1e-30, 0.01, 100.0])
def test_the_search_gives_up_if_no_rate_changes_anything(base: float) -> None:
    engine, method = OneLies(lambda work: 2.0), started(lr=base)
    clients = federation_of(1, engine=engine)
    assert 0.0 < found(method, clients) < math.inf
    assert clients.passes == 1 + 32


@pytest.mark.parametrize("base", [1e4, 1e7])
def test_the_search_begins_at_rest_even_if_the_base_rate_is_far_too_high(base: float) -> None:
    """At √ε of these rates training still diverges (3.5 and 3,500, with ε = 2⁻²³), and at ε of the second (1.2); 0.0012 is fine."""
    method = started(lr=base)
    assert 0.6 < found(method, federation_of(6)) / (1 / BEND) < 1.5
    assert method.state["norm"] == pytest.approx(10.5 * BEND, rel=0.3)
    assert method.state["start"] == pytest.approx(0.5 * BEND * (10.0**2 + 10.5**2 + 11.0**2) / 3, rel=0.3)


def test_chance_at_the_base_rate_does_not_lead_the_search_down() -> None:
    class Noisy(Quadratic):
        """The higher the rate, the better, up to 0.4; at the base rate two clients of six had odd mini-batches."""

        def run(self, model: Model, work: Work, jobs: list[Job], memory: Any) -> Any:
            for chunk in super().run(model, work, jobs, memory):
                rate = float(work.rate[0])
                odd = rate == 0.01 and chunk.jobs[0].client % 3 == 0
                chunk.loss = torch.tensor(
                    [100.0 * (1 - rate if rate < 0.4 else 2.0) + (12.0 if odd else -3.0 if rate == 0.01 else 0.0)]
                )
                yield chunk

    assert found(started(lr=0.01), federation_of(6, engine=Noisy())) > 0.1


def test_on_a_plateau_the_highest_rate_without_harm_is_taken() -> None:
    class Plateau(Quadratic):
        """No rate does anything but harm, from 0.5 on."""

        def run(self, model: Model, work: Work, jobs: list[Job], memory: Any) -> Any:
            for chunk in super().run(model, work, jobs, memory):
                chunk.loss = torch.tensor([2.0 - 1e-4 * float(work.rate[0]) if float(work.rate[0]) < 0.5 else math.nan])
                yield chunk

    assert found(started(lr=0.01), federation_of(20, engine=Plateau())) == pytest.approx(0.32, rel=1e-3)


@pytest.mark.parametrize(
    ("t", "rounds", "total", "share"),
    [
        *[(0, 30, 5, 1), (22, 30, 5, 1), (26, 30, 5, 0.5), (29, 30, 5, 0.125), (0, 1, 5, 1), (7, 0, 5, 1)],
        *[(25, 30, 2, 1), (28, 30, 2, 0.4), (29, 30, 2, 0.2)],
    ],
)
def test_the_own_rate_falls_at_the_end(t: int, rounds: int, total: int, share: float) -> None:
    """By hand: with two of five clients in a round, it falls in a third of 30 rounds, less a fifth of that. Those from 22 on have
    8/8, 7/8, ... 1/8 of the rate. With all clients, those from 25 on have 5/5, 4/5, ... 1/5. Without an end it does not fall."""
    clients = federation_of(2, t=t, rounds=rounds, total=total)
    for pace, expected in (("measured", 0.4 * share), ("base", 0.4)):
        method = started(pace=pace)
        method.state["rate"] = 0.4
        assert method.own_rate(clients) == pytest.approx(expected)
        method.plan(clients)
        assert method.figures()["own_rate"] == pytest.approx(expected)


def test_the_base_rate_is_used_if_clients_do_not_report_losses() -> None:
    gone = federation_of(4, faults=Faults(dropout=1.0))
    assert found(started(lr=0.2), gone) == 0.2

    class Closed(Clients):
        reports_numbers = False

    closed = Closed(**vars(federation_of(4)))
    assert found(started(lr=0.2), closed) == 0.2
    assert closed.passes == 0
    base = federation_of(4)
    method = started(lr=0.2, pace="base")
    assert found(method, base) == 0.2
    assert base.passes == 0
    assert method.limit() == 0.0


def test_a_rehearsal_leaves_no_trace_but_its_cost() -> None:
    clients = federation_of(4, yardstick=Yardstick(0.25))
    out = clients.train(Work(rate=clients.constant(0.01)))
    clients.left_out[9], length, spent = "dropped out", clients.yardstick.length, (clients.bytes_up, clients.bytes_down)
    told = clients.rehearse(Work(rate=clients.constant(0.3)))
    assert [one.first for one in told.values()] == pytest.approx([1.5 * (10 + 0.5 * (i % 3)) ** 2 for i in range(4)])
    assert all(one.loss < one.first for one in told.values())
    assert (clients.left_out, clients.yardstick.length) == ({9: "dropped out"}, length)
    assert clients.outcome is out
    assert clients.passes == 2
    assert (clients.bytes_up, clients.bytes_down) == (2 * spent[0], 2 * spent[1])
    silent = federation_of(4, faults=Faults(dropout=1.0))
    assert silent.rehearse(Work(rate=silent.constant(0.3))) == {}
    assert silent.left_out == {}
    with pytest.raises(NoClients):
        silent.train(Work(rate=silent.constant(0.3)))


def test_a_trial_brings_numbers_and_no_update() -> None:
    clients, sent = federation_of(3), []
    for trial in (False, True):
        told = clients.rehearse(Work(rate=clients.constant(0.3), trial=trial))
        assert clients.rehearsed is not None
        sent.append((told, clients.rehearsed.velocity, clients.bytes_up))
    (told, velocity, one), (again, nothing, two) = sent
    assert told == again
    assert velocity.any()
    assert not nothing.any()
    assert two - one == one - 3 * 4 * len(clients.model.w)


# --- nothing has a unit -----------------------------------------------------------------------------------------------


def times(k: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: k * functional.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize(("inputs", "loss"), [(4.0, 1.0), (0.25, 1.0), (1.0, 8.0), (1.0, 0.125)])
def test_units_of_inputs_and_losses_make_no_difference(inputs: float, loss: float) -> None:
    data = tiny.dataset()

    def run(inputs: float, loss: float) -> fedagg.Result:
        network = nn.Linear(6, 3, bias=False)
        nn.init.zeros_(network.weight)
        scaled = fedagg.Dataset(data.x_train * inputs, data.y_train, data.x_test * inputs, data.y_test, classes=3)
        settings: dict[str, Any] = {"clients": 6, "participation": 0.5, "rounds": 5, "epochs": 2, "batch_size": 8, "clip": 0.0}
        settings |= {"partition": "dirichlet", "lr": 0.1 / inputs**2 / loss, "engine": "sequential", "device": "cpu"}
        return fedagg.run(data=scaled, model=network, loss=times(loss), **settings)

    plain, other = run(1.0, 1.0), run(inputs, loss)
    assert [row["accuracy"] for row in other.history] == [row["accuracy"] for row in plain.history]
    assert len({row["pace"] for row in plain.history}) > 1  # the run found something to adapt
    for mine, theirs in zip(plain.history, other.history, strict=True):
        assert theirs["pace"] * inputs**2 * loss == pytest.approx(mine["pace"], rel=1e-4)
        assert theirs["own_share"] == pytest.approx(mine["own_share"], rel=1e-4)
    torch.testing.assert_close(other.model.weight * inputs, plain.model.weight, rtol=1e-3, atol=1e-4)


# --- the plan ---------------------------------------------------------------------------------------------------------


def planned(phi1: Tensor, rate: float, **options: Any) -> Work:
    method = started(len(phi1), **options)
    method.state |= {"phi1": phi1, "rate": rate, "known": 9, "agreement": 0.25, "back": 0.7}
    return method.plan(federation_of(3, torch.zeros(len(phi1))))


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 0.9])
def test_rates_are_those_of_theorem_1_along_the_planned_path(alpha: float) -> None:
    """In units of S φ1 the path is a line: φ1[l] = 1 and φ2[k] = -η_ref k. The own share is √0.25, so that η_ref is 0.2."""
    phi1, pace = torch.tensor([3.0, -4.0]), 0.2
    work = planned(phi1, 0.1, theorem=True, alpha=alpha)
    path = -pace * torch.arange(EPOCHS + 1.0)[:, None]
    for epoch in range(EPOCHS):
        for off in (1.0, 0.5):  # a client on its way, and one that has fallen behind
            expected = meanfield.learning_rates(torch.ones(EPOCHS, 1), path, off * path[epoch], alpha, epoch)[0]
            w = off * path[epoch] * STEPS * phi1
            found = float(work.rates(epoch, w[None], torch.zeros(2))[0])
            assert found == pytest.approx(min(pace, max(0.0, float(expected))), rel=1e-5)
            if alpha < 1e-5 and off == 1.0:
                assert found == pytest.approx(pace, rel=1e-3)
    assert (work.own, work.behind) == (0.5, 0.7)
    assert work.mix is not None
    assert work.mix.flatten().tolist() == [0.5] * EPOCHS


def test_alpha_has_no_unit() -> None:
    """A gradient ten times as long, at a tenth of the rate, is the same plan."""
    phi1 = torch.tensor([3.0, -4.0])
    work, scaled = planned(phi1, 0.1, theorem=True), planned(10 * phi1, 0.01, theorem=True)
    assert scaled.own == work.own
    w = torch.tensor([[-0.7, 0.2], [0.3, 1.0]])
    for epoch in range(EPOCHS):
        torch.testing.assert_close(10 * scaled.rates(epoch, w, torch.zeros(2)), work.rates(epoch, w, torch.zeros(2)))


def test_alpha_without_the_theorem_is_refused() -> None:
    with pytest.raises(SettingError, match=r"alpha = 0.5: weighs the rates of Theorem 1; add --theorem"):
        fedagg.run(alpha=0.5, rounds=1)


def test_without_the_theorem_all_rates_are_the_pace() -> None:
    work = planned(torch.tensor([3.0, -4.0]), 0.1)
    far = torch.tensor([[5.0, 5.0]])
    assert [float(work.rates(epoch, far, torch.zeros(2))) for epoch in range(EPOCHS)] == pytest.approx([0.2] * EPOCHS)
    assert (work.own, work.behind, work.slope) == (0.5, 0.7, None)


@pytest.mark.parametrize(
    ("agreement", "shares"),
    [(0.0, [1, 2 / 3, 1 / 2, 2 / 5, 1 / 3]), (0.25, [1, 2 / 3, 1 / 2, 1 / 2, 1 / 2]), (0.81, [1, 0.9, 0.9, 0.9, 0.9])],
)
def test_a_young_field_weighs_less(agreement: float, shares: list[float]) -> None:
    """By hand. Before the first round there is no field, whatever the agreement."""
    method, found = started(), []
    for known in range(len(shares)):
        method.state |= {"known": known, "agreement": agreement}
        found.append(method.own_share())
    assert found == pytest.approx(shares)


def test_no_step_is_much_noisier_than_an_average_of_its_weight() -> None:
    """If clients have nothing in common, a step is an average of independent gradients, one from each round. An average that has
    had its weight λ for long has the variance λ/(2 - λ). In the first rounds a step has at most a third more: weights 1, 2, 3, ...
    have the sum of squares 2(2n + 1)/(3n(n + 1)), where λ = 2/(n + 1)."""
    method, weights = started(), torch.zeros(40, dtype=torch.float64)
    for known in range(40):
        method.state |= {"known": known, "agreement": 0.0}
        share = method.own_share()
        weights *= 1 - share  # the field after the rounds before, and then this round's gradient
        weights[known] = share
        assert float(weights.square().sum()) <= 4 / 3 * share / (2 - share) + 1e-12
    assert share == 0.1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_trained_model_survives_the_first_rounds(seed: int) -> None:
    """There clients agree on nothing, so the pace is many times the own rate, and the field of a single round is mostly noise."""
    made = fedagg.run(algorithm="fedavg", dataset="mnist-mini", rounds=20, lr=0.1, eval_every=20, seed=seed)
    again = fedagg.run(dataset="mnist-mini", model=made.network, partition="shards", clients=30, rounds=3, eval_every=1, seed=seed)
    assert made.accuracy > 0.85
    assert min(row["accuracy"] for row in again.history) > made.accuracy - 0.2


def test_the_agreement_is_the_mean_of_the_first_rounds_and_then_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 0.8; (0.8 + 0.4)/2; ... from the seventh round on a new value weighs 0.15, which is more than 1/7."""
    told = [0.8, 0.4, 0.6, 0.2, 0.5, 0.5, 1.0, 0.0]
    values = iter(told)
    monkeypatch.setattr(meanfield, "agreement", lambda *given: next(values))
    method, model, found = started(lr=0.01, pace="base"), Model(torch.zeros(1), torch.zeros(0)), []
    for t in range(len(told)):
        model = method.round(model, federation_of(6, model.w, t=t))
        found.append(method.state["agreement"])
    assert found == pytest.approx([0.8, 0.6, 0.6, 0.5, 0.5, 0.5, 0.575, 0.85 * 0.575])


# --- clients with unequal amounts of data -----------------------------------------------------------------------------


class Height(nn.Module):
    """One weight, which is also the output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[3.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def heights(sizes: tuple[int, ...], **settings: Any) -> tuple[float, float]:
    """Where a run ends in which all samples of client i have the target i, and the mean target of all samples."""
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    told = (torch.ones(len(owner), 1), owner[:, None].float(), torch.ones(2, 1), torch.zeros(2, 1))
    data = fedagg.Dataset(*told, task="regression")
    parts = [torch.nonzero(owner == client).flatten().tolist() for client in range(len(sizes))]
    result = fedagg.run(
        data=data, parts=parts, model=Height(), batch_size=10, eval_every=settings["rounds"], device="cpu", **settings
    )
    return result.model.w.item(), float(owner.float().mean())


@pytest.mark.parametrize(
    ("sizes", "participation", "rounds", "within"), [((90, 10), 1.0, 120, 0.01), ((90, 10, 10, 10), 0.5, 200, 0.1)]
)
def test_the_model_goes_where_the_mean_over_all_samples_is_best(
    sizes: tuple[int, ...], participation: float, rounds: int, within: float
) -> None:
    """The squared error is lowest at the mean target of all samples, far from the mean of the clients' targets."""
    end, best = heights(sizes, participation=participation, rounds=rounds, epochs=2)
    assert end == pytest.approx(best, abs=within)


def test_the_server_moves_as_far_as_the_mean_client_along_the_mean_step_of_all_samples() -> None:
    """By hand, from a weight of 3 at a rate of 0.01: nine steps of 2w take the client with nine tenths of the data to 3 · 0.98⁹,
    and one step of 2(w - 1) moves the other by -0.04. The mean client makes five steps."""
    end, _ = heights((90, 10), participation=1.0, rounds=1, epochs=1, lr=0.01, pace="base", direction="local", memory="off")
    flow = 0.9 * 3 * (0.98**9 - 1) / 0.09 + 0.1 * -0.04 / 0.01
    assert end == pytest.approx(3 + 0.05 * flow, rel=1e-5)


@pytest.mark.parametrize(
    ("size", "amount"),
    [
        (4, 1.0),  # as many as in the rounds before
        (2, 2 / (44 / 12)),
        (12, 12 / (64 / 12)),  # more than 1/λ = 2: nothing is left of the old field
    ],
)
def test_a_round_with_more_data_counts_for_more(size: int, amount: float) -> None:
    """Ten answers for four samples each are known; now two clients have `size` each. By hand, with λ = 1/2: the clients' mean step
    is 2 = (g + φ1)/2, so g = 3 where φ1 was 1. What they remember has changed by that step over λ."""
    method = started(lr=0.01)
    method.state |= {"samples": 40.0, "answers": 10, "phi1": torch.ones(1), "known": 3, "agreement": 0.25, "heard": True}
    each = torch.ones(2, dtype=torch.float64)
    told = {"size": size * each, "theta": each / 2, "travel": 0.1 * each, "norm2": 0.04 * each, "sent": None, "clients": [0, 1]}
    out: Any = SimpleNamespace(flow=torch.tensor([-2.0]), trusted=lambda values: values, **told)
    method.follow(Work(torch.ones(EPOCHS), own=0.5, memory=0.5), out, federation_of(2, total=4))
    method.learn(Work(torch.ones(EPOCHS)), out)
    assert float(method.state["control"]) == pytest.approx(amount * 0.5 * 2.0 / 0.5)
    assert float(method.state["phi1"]) == pytest.approx(min(1.0 + amount, 3.0))


def test_the_agreement_weighs_clients_by_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, with nine samples and one, and mean steps of 2 and 4: their squares are 5.2 in the mean over samples, and the two
    shares are worth 1/(0.9² + 0.1²) equal clients."""
    asked: list[tuple[float, ...]] = []
    monkeypatch.setattr(meanfield, "agreement", lambda *given: asked.append(given) or 1.0)
    travel = torch.tensor([0.1, 0.3], dtype=torch.float64)
    told = {
        "size": torch.tensor([9.0, 1.0]).double(),
        "theta": torch.tensor([0.9, 0.1]).double(),
        "travel": travel,
        "norm2": (torch.tensor([2.0, 4.0]) * travel) ** 2,
        "sent": None,
    }
    out: Any = SimpleNamespace(flow=torch.tensor([-2.2]), trusted=lambda values: values, clients=[0, 1], **told)
    method = started(lr=0.01)
    method.follow(Work(torch.ones(EPOCHS)), out, federation_of(2))
    method.learn(Work(torch.ones(EPOCHS)), out)
    assert asked[0] == pytest.approx((2.2**2, 5.2, 1 / 0.82))


# --- gradients that are far longer than the others --------------------------------------------------------------------


def test_gradients_are_no_longer_than_at_the_start() -> None:
    """By hand: at w = 0 client i of three stands 10, 10.5 and 11 from its goal, where the gradient is BEND times that; the
    median is the limit."""
    method, clients = started(lr=0.01), federation_of(3)
    assert method.limit() == 0.0
    limits: list[float] = []
    train = clients.train
    clients.train = lambda work: (limits.append(work.clip), train(work))[1]  # type: ignore[method-assign]
    method.round(Model(torch.zeros(1), torch.zeros(0)), clients)
    assert method.state["norm"] == pytest.approx(10.5 * BEND, rel=1e-3)
    assert limits == [math.inf] + [method.limit()] * (len(limits) - 1)


class Bold(FedAgg):
    """Takes the base rate, whatever the search finds."""

    def search(self, clients: Clients) -> bool:
        super().search(clients)
        self.state["rate"] = self.lr
        return True


@pytest.mark.slow
def test_the_limit_saves_a_run_whose_rate_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone: the guard would halve the rate later."""
    monkeypatch.setattr(guard, "rising", lambda *given: False)
    found = []
    for limit in (1.0, 1e9):
        monkeypatch.setattr("fedagg.algorithms.fedagg.CLIP", limit)
        torch.manual_seed(2)
        module = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        job = {"clients": 20, "participation": 0.5, "epochs": 2, "batch_size": 10, "rounds": 12, "eval_every": 12, "seed": 5}
        run = fedagg.run(algorithm=Bold(lr=0.6, memory="off"), dataset="mnist-mini", partition="shards", model=module, **job)
        found.append(run.accuracy)
    assert found[0] > found[1] + 0.2


def test_where_gradients_only_fall_the_limit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for limit in (1.1, 1e9):
        monkeypatch.setattr("fedagg.algorithms.fedagg.CLIP", limit)
        method, model = Bold(lr=0.01), Model(torch.zeros(1), torch.zeros(0))
        method.start(model, nn.Linear(1, 1), None)  # type: ignore[arg-type]
        for t in range(5):
            model = method.round(model, federation_of(1, model.w, t=t))
        ends.append(model.w)
    assert torch.equal(*ends)


# --- weight decay without a unit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("travel", "norm", "pull"),
    [
        ((2.0, 4.0), (1.0, 3.0), 0.003 * (2 + 4 * 1.5) / 2),  # the limit is 1.5
        ((2.0, 4.0), (math.nan, -1.0), 0.0),  # nonsense pulls nobody
        ((2.0, 4.0), (math.inf, 1.0), 0.003 * (2 * 1.5 + 4) / 2),
        ((1e9, 1e9), (1.0, 1.0), 5.0),  # not beyond zero
    ],
)
def test_weights_are_pulled_back_by_a_share_of_distance(travel: tuple[float, ...], norm: tuple[float, ...], pull: float) -> None:
    method = started(2)
    method.state["norm"] = 1.0
    told = SimpleNamespace(travel=torch.tensor(travel).double(), norm=torch.tensor(norm).double())
    model = method.decayed(Model(torch.tensor([3.0, 4.0]), torch.ones(1)), told, None)  # type: ignore[arg-type]
    torch.testing.assert_close(model.w, torch.tensor([3.0, 4.0]) * (1 - pull / 5))
    assert torch.equal(model.buffers, torch.ones(1))
    method.state["norm"] = 0.0  # clients that tell no norms
    assert torch.equal(method.decayed(model, told, None).w, model.w)  # type: ignore[arg-type]


def test_normalised_networks_are_pulled_back_more() -> None:
    told = SimpleNamespace(travel=torch.tensor([2.0]).double(), norm=torch.tensor([1.0]).double())
    for network, share in ((nn.Linear(1, 1), 0.003), (nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), 0.017)):
        method = FedAgg(lr=0.01)
        method.start(Model(torch.zeros(2), torch.zeros(0)), network, None)  # type: ignore[arg-type]
        method.state["norm"] = 1.0
        model = method.decayed(Model(torch.tensor([3.0, 4.0]), torch.zeros(0)), told, None)  # type: ignore[arg-type]
        torch.testing.assert_close(model.w, torch.tensor([3.0, 4.0]) * (1 - 2 * share / 5))


@pytest.mark.parametrize(
    ("answers", "epochs", "first", "loss", "more"),
    [
        (6, 2, [2.0, 2.0], [1.0, 2.0], 0.75**2 * (1 - 10 / 12)),  # 1.2 passes, three quarters of the loss are kept
        (50, 3, [2.0, 1.0], [1.5, 1.5], 1 - 10 / 150),  # what one client removes the other adds
        (2, 5, [2.0], [2.0], 0.0),  # nobody has seen a sample twice
        (50, 3, [2.0], [0.0], 0.0),  # clients that learn all they have on their own
        (50, 3, [1.0], [9.0], 1 - 10 / 150),  # no more than that
        (50, 3, [math.nan], [math.nan], 1 - 10 / 150),  # no losses are reported
        (50, 3, [0.0], [0.0], 1 - 10 / 150),
    ],
)
def test_networks_without_dropout_are_pulled_back_more_with_every_pass(
    answers: int, epochs: int, first: list[float], loss: list[float], more: float
) -> None:
    """Ten clients: so many answers and epochs make passes over the samples of a client."""
    told, clients = outcome(first, loss), SimpleNamespace(epochs=epochs, total=10)
    for network, share in (
        (nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)), 0.003 + 0.014 * more),
        (nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.0), nn.Linear(2, 1)), 0.003 + 0.014 * more),
        (nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.1), nn.Linear(2, 1)), 0.003),
        (nn.Linear(1, 2), 0.003),
    ):
        method = FedAgg(lr=0.01)
        method.start(Model(torch.zeros(2), torch.zeros(0)), network, None)  # type: ignore[arg-type]
        method.state["answers"] = answers
        assert method.pull(told, clients) == pytest.approx(share)  # type: ignore[arg-type]


def after_training(classes: int, wrong: float, decay: float, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> float:
    """The accuracy of a small network on classes in ten dimensions; that share of the samples to train on has any label."""
    monkeypatch.setattr("fedagg.algorithms.fedagg.BARE_DECAY", decay)
    generator = torch.Generator().manual_seed(0)
    x, directions = torch.randn(6000, 10, generator=generator), torch.randn(10, classes, generator=generator)
    y = (x @ directions).argmax(1)
    told = torch.where(
        torch.rand(4000, generator=generator) < wrong, torch.randint(0, classes, (4000,), generator=generator), y[:4000]
    )
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, classes))
    given = fedagg.Dataset(x[:4000], told, x[4000:], y[4000:])
    shared: dict[str, Any] = {"batch_size": 20, "eval_every": settings["rounds"], "seed": 5}
    return fedagg.run(data=given, model=network, **shared, **settings).accuracy


def test_the_pull_keeps_a_network_from_learning_wrong_labels_by_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    iid = {"partition": "iid", "clients": 10, "participation": 0.5, "rounds": 20}
    before, now = (after_training(4, 0.5, decay, monkeypatch, **iid) for decay in (0.003, 0.017))
    assert now > before + 0.03


def test_the_pull_spares_what_clients_with_few_classes_do_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull of the same strength for all would cost 1.5 points here."""
    skewed = {"partition": "shards", "shards": 1, "clients": 20, "participation": 0.2, "rounds": 25}
    before, now = (after_training(20, 0.0, decay, monkeypatch, **skewed) for decay in (0.003, 0.017))
    assert now > before - 0.005


# --- what clients remember --------------------------------------------------------------------------------------------


@dataclass
class Watched(FedAgg):
    """Checks the properties that the correction rests on, in every round of a run."""

    def plan(self, clients: Clients) -> Work:
        assert clients.memory is not None
        everyone = clients.memory.read(range(clients.total))
        torch.testing.assert_close(self.state["control"], everyone.mean(0), rtol=1e-3, atol=1e-5)
        work = super().plan(clients)
        if work.field is not None:
            own = self.own_share()
            torch.testing.assert_close(work.field[0], own * everyone.mean(0) + (1 - own) * self.state["phi1"], rtol=1e-3, atol=1e-5)
        return replace(work, trace=True)

    def remember(self, chunk: Chunk, work: Work) -> Tensor:
        found, gradients = super().remember(chunk, work), chunk.gradients
        assert gradients is not None
        assert chunk.memory is not None
        before, share = chunk.memory / work.memory, 1.0 if self.linear else work.own
        torch.testing.assert_close(found, (1 - share) * before + share * gradients.mean(1), rtol=1e-3, atol=1e-4)
        return found


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("model", ["linear", "mlp"])
@pytest.mark.parametrize("discarded", [(), (0, 2)])
def test_clients_remember_their_gradients_and_the_server_the_mean(
    monkeypatch: pytest.MonkeyPatch, engine: str, model: str, discarded: tuple[int, ...]
) -> None:
    """The last gradient if the model is linear, else an average. The mean is over all clients, those that have not taken part yet
    count as zero. It is right also after rounds whose result is not used: clients do not hear of that. The engine measures the
    gradients independently."""
    played = itertools.count()
    monkeypatch.setattr(guard, "unruly", lambda out, start: next(played) in discarded)
    monkeypatch.setattr("fedagg.algorithms.fedagg.CLIP", 100.0)  # the measured gradients are not shortened
    more: dict[str, Any] = {"partition": "shards", "shards": 2, "clients": 10, "participation": 0.5, "rounds": 6}
    method = Watched(theorem=False)
    fedagg.run(algorithm=method, dataset="mnist-mini", model=model, engine=engine, batch_size=100, device="cpu", **more)
    assert next(played) == 6


@pytest.mark.parametrize(
    ("memory", "network", "remember"),
    [
        ("auto", nn.Linear(2, 1), True),
        ("auto", nn.Conv1d(1, 1, 1), True),
        ("auto", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), False),
        ("on", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), True),
        ("off", nn.Linear(2, 1), False),
    ],
)
def test_networks_for_which_clients_remember(memory: Any, network: nn.Module, remember: bool) -> None:
    method = FedAgg(memory=memory)
    method.start(Model(torch.zeros(3), torch.zeros(0)), network, None)  # type: ignore[arg-type]
    assert ("control" in method.state) == remember


@pytest.mark.parametrize(
    ("memory", "rounds", "total", "remember"),
    [
        ("auto", 11, 10, True),  # every client is expected to take part 2.2 times
        ("auto", 10, 10, False),
        ("auto", 0, 10, True),  # no end is set
        ("auto", 0, (1 << 30) // 3 + 1, False),  # 4 GiB
        ("auto", 1 << 30, (1 << 30) // 3 + 1, False),
        ("on", 2, 1 << 30, True),
    ],
)
def test_too_few_visits_or_too_many_clients_to_remember(memory: Any, rounds: int, total: int, remember: bool) -> None:
    method = FedAgg(memory=memory)
    method.start(Model(torch.zeros(3), torch.zeros(0)), nn.Linear(2, 1), None)  # type: ignore[arg-type]
    method.state["heard"] = True
    seen = SimpleNamespace(rounds=rounds, ids=[1, 2], total=total, steps=2, epochs=1, robust="mean")
    assert method.recalls(seen) == remember  # type: ignore[arg-type]


class Whispering(Quadratic):
    """One of the clients reports no norm, unless `heard` is set."""

    def __init__(self, heard: bool) -> None:
        super().__init__()
        self.heard = heard

    def run(self, *given: Any) -> Any:
        for chunk in super().run(*given):
            silent = chunk.jobs[0].client == 0 and not self.heard
            yield replace(chunk, norm=torch.zeros(1)) if silent else chunk


@pytest.mark.parametrize(
    ("steps", "heard", "robust", "remember"),
    [(2, True, "mean", True), (1, True, "mean", False), (2, False, "mean", False), (2, True, "median", False)],
)
def test_when_nothing_is_remembered(steps: int, heard: bool, robust: str, remember: bool) -> None:
    """After a single step, if a client reports nothing, and if updates are not averaged."""
    method = started()
    clients = federation_of(3, local=ClientOptions(epochs=1, batch_size=10 // steps), robust=robust, engine=Whispering(heard))
    method.search(clients)
    assert method.state["norm"] > 0
    assert method.plan(clients).memory == (1.0 if remember else 0.0)


# --- the guard --------------------------------------------------------------------------------------------------------


def trained(method: FedAgg, rounds: int, engine: Any = None) -> float:
    """How far from the joint optimum a run of the toy problem ends."""
    model = Model(torch.zeros(1), torch.zeros(0))
    for t in range(rounds):
        clients = federation_of(6, model.w, t=t, engine=engine)
        model = method.round(model, clients)
    return abs(float(model.w) - 10.5)


@pytest.mark.parametrize(("count", "total", "judged"), [(3, 100, False), (4, 100, True), (3, 6, True), (2, 4, True)])
def test_few_of_many_clients_do_not_tell_that_a_rate_is_too_high(count: int, total: int, judged: bool) -> None:
    method = started(lr=1.0, pace="base")
    method.round(Model(torch.zeros(1), torch.zeros(0)), federation_of(count, total=total))
    assert method.state["rate"] == (0.5 if judged else 1.0)


def test_a_rate_at_which_clients_diverge_is_halved_until_they_do_not() -> None:
    """At a rate of 1, a step makes of the error -2 times itself; at ½, -½ times."""
    method = started(lr=1.0, pace="base")
    assert trained(method, 1) == 10.5  # the round is not used
    assert trained(method, 12) < 0.5
    assert 0.1 < method.state["rate"] <= 0.5


def test_the_guard_goes_back_to_the_model_it_kept() -> None:
    """With the field that led to it, its usual length of a step, and half the rate; what the guard does not keep stays."""
    state: dict[str, Any] = {"phi1": torch.ones(1), "known": 3, "agreement": 0.5, "back": 0.1, "rate": 0.4, "trend": 7.0}
    clients = federation_of(2)
    guard.keep(state, Model(torch.tensor([2.0]), torch.tensor([5.0])), usual=0.3)
    state |= {"phi1": -torch.ones(1), "known": 4, "agreement": 0.9, "back": 0.2, "trend": 8.0}
    clients.yardstick.length = 60.0
    back = guard.undo(state, clients)
    assert (back.w.tolist(), back.buffers.tolist(), clients.yardstick.length) == ([2.0], [5.0], 0.3)
    assert [state[name] for name in ("phi1", "known", "agreement", "back", "rate", "trend")] == [
        torch.ones(1),
        3,
        0.5,
        0.1,
        0.2,
        8.0,
    ]
    guard.slow_down(state, clients, usual=0.7)
    assert (state["rate"], clients.yardstick.length) == (0.1, 0.7)


def outcome(first: list[float], loss: list[float] | None = None, behind: list[float] | None = None, robust: str = "mean") -> Any:
    numbers = {"first": first, "loss": loss or first, "behind": behind or first}
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    return SimpleNamespace(**tensors, clients=range(len(first)), trusted=partial(trusted, rule=robust))


@pytest.mark.parametrize(
    ("first", "loss", "unruly"),
    [
        ([2.0] * 4, [2.6] * 4, True),
        ([2.0] * 4, [2.4] * 4, False),  # skewed data: a little more is no harm
        ([1.0, 3.0, 1.0, 3.0], [2.6] * 4, False),  # first mini-batches that differ so much say little
        ([-2.0] * 4, [-1.6] * 4, False),
        ([-2.0] * 4, [-1.4] * 4, True),
        ([2.0] * 5, [2.0] * 4 + [1e9], False),  # one of five that lies counts as 4: the mean is 2.4
        ([2.0] * 3, [2.0] * 2 + [1e9], True),  # one of three is many: 2.67
    ],
)
def test_training_that_makes_the_loss_worse(first: list[float], loss: list[float], unruly: bool) -> None:
    """The errors by hand: values 1, 3, 1, 3 have a standard error of √(4/3)/2, and 2 + 3 · 0.577 is 3.73."""
    assert guard.unruly(outcome(first, loss)) == unruly


@pytest.mark.parametrize(
    ("first", "behind", "broken"),
    [
        ([2.6] * 4, [2.0] * 4, True),
        ([2.4] * 4, [2.0] * 4, False),  # data that differ: the average may be worse for a while
        ([1.6, 3.6, 1.6, 3.6], [1.0, 3.0, 1.0, 3.0], True),  # client by client there is no doubt
        ([1.6, 3.6, 1.6, 3.6], [3.0, 1.0, 3.0, 1.0], False),  # the same losses in another order say little
        ([-1.6] * 4, [-2.0] * 4, False),
        ([-1.4] * 4, [-2.0] * 4, True),
    ],
)
def test_a_step_that_breaks_the_model(first: list[float], behind: list[float], broken: bool) -> None:
    assert guard.broken(outcome(first, behind=behind)) == broken


HONEST = [1.9, 2.0, 2.0, 2.1]


@pytest.mark.parametrize("lie", [1e9, -1e9])
def test_with_a_robust_rule_a_client_that_lies_does_not_move_the_guard(lie: float) -> None:
    """Four tell the truth, one lies. The quartiles of the five are values of the four."""
    higher, everybody = [value + 0.7 for value in HONEST], federation_of(5)
    for rule in ("clip", "median", "trimmed"):
        for change, harm in ((0.0, False), (0.7, True)):
            rise = [value + change for value in HONEST]
            assert guard.unruly(outcome([*HONEST, lie], [*rise, lie], robust=rule)) == harm
            assert guard.broken(outcome([*rise, lie], behind=[*HONEST, -lie], robust=rule)) == harm
        assert guard.rising(0.1, outcome([*HONEST, lie], robust=rule), everybody)
        method = started()
        method.look_back(outcome([*higher, lie], behind=[*HONEST, -lie], robust=rule))
        assert method.state["trend"] == pytest.approx(0.15 * 0.7)
    assert not guard.broken(outcome([*higher, lie], behind=[*HONEST, -lie]))  # as it is without a rule


@pytest.mark.parametrize(("loss", "harm"), [(1.4, False), (1.5, True)])
def test_a_loss_near_zero_may_grow(loss: float, harm: bool) -> None:
    """From 5 the run came down to 0.2. By hand, a quarter of 5 is 1.25, so what is below 1.45 is no harm, though seven times the
    loss before."""
    for low, high in (([0.2] * 4, [loss] * 4), ([0.15, 0.25] * 2, [loss - 0.05, loss + 0.05] * 2)):
        assert guard.broken(outcome(high, behind=low), start=5.0) == harm
    assert guard.unruly(outcome([0.2] * 4, [loss] * 4), start=5.0) == harm
    assert guard.unruly(outcome([0.2] * 4, [loss] * 4))  # where the start is not known


def test_a_run_near_zero_loss_goes_on_at_its_rate() -> None:
    """Clients whose first mini-batch has by chance a third of the usual loss: a quarter of the loss at the start is far more."""

    class Lucky(Quadratic):
        def run(self, *args: Any) -> Any:
            for chunk in super().run(*args):
                chunk.loss, chunk.first = torch.full_like(chunk.loss, 0.3), torch.full_like(chunk.first, 0.1)
                yield chunk

    for start, halved in ((5.0, False), (0.5, True)):
        method = started(lr=0.05, pace="base")
        method.state["start"] = start
        method.round(Model(torch.zeros(1), torch.zeros(0)), federation_of(6, engine=Lucky()))
        assert method.state["rate"] == (0.025 if halved else 0.05)


def test_one_client_breaks_nothing() -> None:
    """Its loss is pure noise."""
    assert not guard.broken(outcome([9.0], behind=[1.0]))
    assert not guard.unruly(outcome([1.0], [9.0]))


def test_a_broken_model_is_undone() -> None:
    class Broken(Quadratic):
        def run(self, *args: Any) -> Any:
            for chunk in super().run(*args):
                chunk.behind = chunk.first / 4
                yield chunk

    method = started(lr=0.05, pace="base")
    before = Model(torch.zeros(1), torch.zeros(0))
    after = method.round(before, federation_of(6))
    assert float(after.w) > 0
    back = method.round(after, federation_of(6, after.w, t=1, engine=Broken()))
    assert torch.equal(back.w, before.w)
    assert method.state["rate"] == 0.025
    assert not method.state["known"]  # with the field


class Creeping(Quadratic):
    """Clients' own training goes well, and yet a round makes the model grow, by a hundredth at a rate of ½, or shrink, below ¼."""

    def run(self, model: Model, work: Work, jobs: list[Job], memory: Any) -> Any:
        for chunk in super().run(model, work, jobs, memory):
            field = torch.zeros_like(model.w) if work.field is None else work.field[0]
            chunk.delta = (0.04 * (float(work.rate[0]) - 0.25) * model.w)[None]
            chunk.first, chunk.behind = model.w.square(), (model.w + work.behind * field).square()
            chunk.loss = chunk.first / 2
            yield chunk


def crept(rate: float, total: int = 6) -> tuple[float, float]:
    """The model's loss after forty rounds from 1, and the rate."""
    method, model = started(lr=rate, pace="base"), Model(torch.ones(1), torch.zeros(0))
    for t in range(40):
        model = method.round(model, federation_of(6, model.w, t=t, total=total, engine=Creeping()))
    return float(model.w.square()), method.state["rate"]


def test_a_loss_that_creeps_up_halves_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: at a rate of 1 a round multiplies the loss by 1.03² = 1.061, so that after a few its mean rise is a hundredth; at ½
    by 1.02; at ¼ it stays. No single round is bad enough for the other cases of the guard."""
    loss, rate = crept(1.0)
    assert (loss < 2.0, rate) == (True, 0.25)
    with monkeypatch.context() as without:
        without.setattr(guard, "rising", lambda *given: False)
        assert crept(1.0) == (pytest.approx(1.03**80, rel=1e-4), 1.0)


@pytest.mark.parametrize(("rate", "total"), [(0.125, 6), (1.0, 13)])
def test_the_rate_stays_if_the_loss_falls_or_other_clients_were_asked_before(rate: float, total: int) -> None:
    assert crept(rate, total)[1] == rate


# --- the average ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calm", "known", "share"),
    [
        (1.0, 82, 1.0),  # every round lowers the loss
        (0.6, 82, 0.36),
        (0.0, 7, 0.4),  # rounds undo each other: 4/(7 + 3)
        (0.0, 97, 0.04),
        (0.0, 1, 1.0),
    ],
)
def test_the_model_that_is_reported(calm: float, known: int, share: float) -> None:
    method = started(1)
    method.state |= {"trend": -0.1 * calm, "swing": 0.1, "known": known, "shown": torch.tensor([2.0])}
    model = Model(torch.tensor([4.0]), torch.zeros(0))
    method.average(model)
    assert float(method.reported(model).w) == pytest.approx(2.0 + share * 2.0)


def test_statistics_are_averaged_with_the_weights() -> None:
    """Those of the last round do not belong to averaged weights. An infinity, as in a mask, stays one."""
    method = started(1)
    method.state |= {"swing": 0.1, "known": 13, "shown/buffers": torch.tensor([2.0, -math.inf, 7.0])}
    model = Model(torch.zeros(1), torch.tensor([4.0, -math.inf, 7.0]))
    method.average(model)  # a share of 4/(13 + 3)
    assert method.reported(model).buffers.tolist() == [2.5, -math.inf, 7.0]


def test_while_nothing_is_known_the_last_model_is_reported() -> None:
    method = started(1)
    method.state["known"] = 50
    method.average(Model(torch.tensor([4.0]), torch.zeros(0)))
    assert float(method.state["shown"]) == 4.0


def test_losses_that_alternate_have_no_trend() -> None:
    """By hand: 0.15 · 0.1 = 0.015, then 0.85 · 0.015 ∓ 0.015."""
    for second, trend in ((0.1, -0.00225), (-0.1, 0.02775)):
        method = started(1)
        for fall in (-0.1, second):
            rise = torch.full((4,), -fall).double()
            method.look_back(outcome((2.0 + rise).tolist(), behind=[2.0] * 4))
        assert method.state["trend"] == pytest.approx(trend)
        assert method.state["swing"] == pytest.approx(0.02775)


# --- what engines say of the last step --------------------------------------------------------------------------------


def built(kind: str, problem: Problem) -> Any:
    return Threaded(problem, 2) if kind == "threaded" else engines.build(kind, problem, Config(model="custom"))


TOLD = ("first", "behind", "loss", "delta")


def told(kind: str, dropout: float, behind: float) -> Any:
    """What the clients report, in their order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
    data = tiny.dataset()
    local = ClientOptions(epochs=2, batch_size=8)
    problem = Problem(network, data.x_train, data.y_train, 3, local, torch.device("cpu"))
    model = problem.layout.pack(network)
    field = torch.randn(1, len(model.w), generator=torch.Generator().manual_seed(4))
    work = Work(rate=torch.tensor([0.1, 0.1]), own=0.4, field=field, mix=torch.full((2, 1), 0.6), behind=behind)
    sizes = (13, 8, 5, 30)
    jobs = [Job(i, torch.arange(30 * i, 30 * i + size), 2, 50 + i, i) for i, size in enumerate(sizes)]
    chunks = list(built(kind, problem).run(model, work, jobs, None))
    order = torch.tensor([job.client for chunk in chunks for job in chunk.jobs]).argsort()
    return SimpleNamespace(**{name: torch.cat([getattr(chunk, name) for chunk in chunks])[order] for name in TOLD})


def test_engines_agree_on_the_last_step() -> None:
    reference = told("sequential", 0.0, 0.3)
    for kind in ("batched", "threaded"):
        other = told(kind, 0.0, 0.3)
        for name in TOLD:
            torch.testing.assert_close(getattr(other, name), getattr(reference, name), rtol=1e-3, atol=1e-4, msg=f"{kind} {name}")
    assert (reference.behind - reference.first).abs().min() > 1e-3


@pytest.mark.parametrize("kind", tiny.ENGINES)  # threads get no network that draws
def test_the_loss_at_the_last_model_uses_the_same_samples_and_dropout(kind: str) -> None:
    """A step back of almost no length has almost the same loss."""
    near = told(kind, 0.5, 1e-6)
    torch.testing.assert_close(near.behind, near.first, rtol=0, atol=1e-4)
    without = told(kind, 0.5, 0.0)
    assert not math.isclose(float(told(kind, 0.0, 0.0).first[0]), float(without.first[0]), rel_tol=1e-6)  # there is dropout
    assert torch.equal(without.delta, near.delta)  # and looking back changes nothing of the training
