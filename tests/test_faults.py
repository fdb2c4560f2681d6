"""Simulated faults: seeded, recorded, left out, and no harm to the model or to what algorithms remember."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import fedagg
import tiny
from fedagg import algorithms, checkpoint, federation, progress
from fedagg import clients as clients_module
from fedagg.algorithms.fedagg import FedAgg
from fedagg.algorithms.guard import worse
from fedagg.clients import Clients, NoClients, Yardstick
from fedagg.engines import distributed
from fedagg.faults import KINDS, Faults
from fedagg.flat import Model
from fedagg.memory import ClientMemory
from fedagg.quantize import Downlink
from fedagg.server import Server
from fedagg.work import Chunk, ClientOptions, Job, Work

D = 21


@dataclass
class Scripted:
    """An engine whose clients answer what the test says: client i moves by i+1 everywhere, in two steps an epoch."""

    note: str = "scripted"
    loss: float = 1.0
    length: float = 1.0
    worse: float = 1.0  # what training makes of the loss
    before: float = 1.0  # the loss of the last global model

    def run(self, model: Model, work: Work, jobs: list[Job], memory: Any) -> Any:
        for job in jobs:
            own = memory.read([job.client]) if memory is not None and work.memory else None
            yield Chunk(
                jobs=[job],
                start=model.w,
                delta=torch.full((1, D), self.length * (job.client + 1.0)),
                buffers=torch.full((1, 2), float(job.client)),
                loss=torch.tensor([self.worse * self.loss]),
                first=torch.tensor([self.loss]),
                behind=torch.tensor([self.before]),
                norm=torch.zeros(1),
                rates=torch.full((1, 3), 0.1) * (torch.arange(3) < job.epochs),
                steps=torch.tensor([2 * job.epochs]),
                memory=own,
            )


def federation_of(count: int, faults: Faults, t: int = 0, engine: Any = None, **more: Any) -> Clients:
    return Clients(
        engine=engine or Scripted(),
        t=t,
        ids=list(range(count)),
        samples=lambda client: torch.arange(10 + client),
        total=count,
        local=ClientOptions(epochs=3, batch_size=5),
        seed=0,
        model=Model(torch.zeros(D), torch.zeros(2)),
        faults=faults,
        **more,
    )


def only(kind: str, count: int = 8, corrupt: float = 0.3) -> tuple[Faults, list[int]]:
    """Faults in which some clients, but fewer than half, are corrupt, and all of this kind; and who they are."""
    for seed in range(100_000):
        faults = Faults(seed=seed, corrupt_rate=corrupt)
        kinds = [faults.kind(0, client) for client in range(count)]
        if 0 < sum(k is not None for k in kinds) < count / 2 and set(kinds) == {None, kind}:
            return faults, [client for client, k in enumerate(kinds) if k]
    raise AssertionError(kind)


# --- left out, counted, renormalised --------------------------------------------------------------------------------


@pytest.mark.parametrize("robust", ["mean", "clip", "median", "trimmed"])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [("nan", "not finite"), ("infinity", "not finite"), ("huge", "moved absurdly far"), ("shape", "wrong shape")],
)
def test_corrupt_answers_are_left_out_and_weights_renormalised(kind: str, cause: str, robust: str) -> None:
    faults, who = only(kind)
    clients = federation_of(8, faults, robust=robust)
    out = clients.train(Work(rate=clients.constant(0.1)))
    assert clients.left_out == dict.fromkeys(who, cause)
    valid = [client for client in range(8) if client not in who]
    assert out.clients == valid
    # Only the valid ones, as if the others had never been asked.
    alone = federation_of(8, Faults(), robust=robust)
    alone.ids = valid
    expected = alone.train(Work(rate=clients.constant(0.1)))
    assert torch.allclose(out.mean, expected.mean)
    assert torch.allclose(out.velocity, expected.velocity)
    assert torch.allclose(out.buffers, expected.buffers)
    assert float(out.theta.sum()) == pytest.approx(1.0)
    if robust == "mean":
        weight = sum(10 + client for client in valid)
        assert float(out.mean[0]) == pytest.approx(sum((10 + c) * (c + 1) for c in valid) / weight)
        assert float(out.plain[-1]) == pytest.approx(sum(c + 1 for c in valid) / len(valid))


def test_every_kind_happens_at_its_rate_and_the_seed_decides() -> None:
    faults, other = (Faults(seed=seed, dropout=0.3, straggler=0.5, corrupt_rate=0.2, flip=0.2) for seed in (1, 2))
    where = [(t, client) for t in range(60) for client in range(50)]
    dropped = [faults.drops(*at) for at in where]
    assert sum(dropped) / len(where) == pytest.approx(0.3, abs=0.03)
    assert dropped == [faults.drops(*at) for at in where] != [other.drops(*at) for at in where]
    kinds = [faults.kind(*at) for at in where]
    assert len(where) - kinds.count(None) == pytest.approx(0.2 * len(where), rel=0.15)
    for kind in KINDS:
        assert kinds.count(kind) == pytest.approx(0.05 * len(where), rel=0.35)
    epochs = [faults.epochs(*at, 4) for at in where]
    assert set(epochs) == {1, 2, 3, 4}
    assert sum(e < 4 for e in epochs) / len(where) == pytest.approx(0.5, abs=0.03)
    assert faults.epochs(0, 0, 1) == 1
    assert {faults.hostile(client) for client in range(50)} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("engine", tiny.ENGINES)
def test_faults_are_recorded_and_repeatable(tmp_path: Path, engine: str) -> None:
    settings = {
        "dropout_rate": 0.3, "straggler_rate": 0.4, "corrupt_rate": 0.2, "flip_rate": 0.3,
        "clients": 12, "participation": 1.0, "algorithm": "fedavg", "engine": engine,
    }  # fmt: skip
    faults = Faults(0, 0.3, 0.4, 0.2, 0.3)
    for name in ("one", "two"):
        tiny.job(out=tmp_path / name, **settings)
    assert tiny.same_run(tmp_path / "one", tmp_path / "two")
    told = tiny.rows(tmp_path / "one", "clients.jsonl")
    for t, (row, line) in enumerate(zip(tiny.rows(tmp_path / "one"), told, strict=True)):
        out = {client for client, why in line["left_out"].items() if why == "dropped out"}
        assert out == {str(client) for client in range(12) if faults.drops(t, client)}
        slow = {str(c): e for c in range(12) if (e := faults.epochs(t, c, 2)) < 2 and not faults.drops(t, c)}
        assert line.get("epochs", {}) == slow
        assert row["stragglers"] == len(slow)
        assert line["hostile"] == [client for client in range(12) if faults.hostile(client)]
        assert row["left_out"] == len(line["left_out"])
        assert row["causes"] == sorted(set(line["left_out"].values()))
        assert len(line["clients"]) + row["left_out"] == row["participants"] == 12
    assert sum(row["stragglers"] for row in tiny.rows(tmp_path / "one")) > 0
    assert {"dropped out", "not finite"} <= {why for line in told for why in line["left_out"].values()}


def test_stragglers_do_some_of_their_epochs_and_count_with_the_steps_they_made() -> None:
    faults = next(f for s in range(1000) if sum((f := Faults(s, straggler=0.5)).epochs(0, c, 3) < 3 for c in range(4)) > 0)
    clients = federation_of(4, faults)
    out = clients.train(Work(rate=clients.constant(0.1)))
    done = [faults.epochs(0, client, 3) for client in range(4)]
    assert out.steps.tolist() == [2.0 * epochs for epochs in done]
    assert out.travel.tolist() == pytest.approx([0.1 * 2 * epochs for epochs in done])
    assert clients.stragglers == {client: epochs for client, epochs in enumerate(done) if epochs < 3}
    assert clients.left_out == {}


def test_a_trace_that_is_not_finite_is_left_out_too() -> None:
    class Tracing(Scripted):
        def run(self, *args: Any) -> Any:
            for chunk in super().run(*args):
                bad = float("nan") if chunk.jobs[0].client == 2 else 0.0
                chunk.gradients, chunk.path = torch.full((1, 3, D), bad), torch.zeros(1, 4, D)
                yield chunk

    clients = federation_of(4, Faults(), engine=Tracing())
    out = clients.train(Work(rate=clients.constant(0.1), trace=True))
    assert clients.left_out == {2: "not finite"}
    assert out.field is not None
    assert torch.isfinite(out.field.phi1).all()


# --- nobody left ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "engine"), tiny.STATES)
def test_a_round_with_no_valid_client_changes_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, engine: str
) -> None:
    """Nobody answers in rounds 3 and 5: the model and everything that is remembered stay as they were."""
    monkeypatch.setattr(Faults, "drops", lambda self, t, client: t in (2, 4))
    monkeypatch.setattr(federation.Simulation, "personal", lambda _: 0.5)
    seen: list[dict[str, Tensor]] = []
    freeze = Server.freeze
    monkeypatch.setattr(Server, "freeze", lambda self, done: seen.append(freeze(self, done).tensors) or freeze(self, done))
    result = tiny.job(rounds=6, out=tmp_path / "run", engine=engine, **tiny.STATEFUL[name])
    for t in (2, 4):
        before, after = seen[t], seen[t + 1]
        keep = before.keys() - {"average"}
        assert [key for key in keep if not torch.equal(before[key], after[key])] == []
        assert result.history[t]["unchanged"] is True
        assert result.history[t]["left_out"] == result.history[t]["participants"] == 3
        assert result.history[t]["causes"] == ["dropped out"]
        assert "train_loss" not in result.history[t]
    assert not torch.equal(seen[3]["w"], seen[4]["w"])
    assert ["unchanged" in row for row in result.history] == [False, False, True, False, True, False]


def test_when_nobody_ever_answers_the_model_is_the_first_one(tmp_path: Path) -> None:
    result = tiny.job(algorithm="fedadam", dropout_rate=1.0, rounds=2, out=tmp_path / "run")
    first = tiny.network().state_dict()
    assert all(torch.equal(value, first[key]) for key, value in result.model.state_dict().items())
    tiny.job(algorithm="fedadam", dropout_rate=1.0, rounds=3, resume=tmp_path / "run")


def test_the_display_says_that_the_model_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(progress, "err", Console(file=text, force_terminal=True, width=200))
    live = progress.Live("fedavg")
    tiny.job(algorithm="fedavg", dropout_rate=1.0, rounds=1, callbacks=[live])
    assert "dropped out" in text.getvalue()
    assert "no valid client: model unchanged" in text.getvalue()


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["feddyn", "scaffold"])
@pytest.mark.parametrize("kind", [*KINDS, "dropout"])
def test_a_client_that_was_left_out_keeps_what_it_remembered(name: str, kind: str) -> None:
    """And the server's own term moves as the mean over the valid ones says: worked out here from the definitions."""
    if kind == "dropout":
        faults = next(f for s in range(999) if 0 < sum((f := Faults(s, dropout=0.3)).drops(0, c) for c in range(8)) < 4)
        who = [client for client in range(8) if faults.drops(0, client)]
    else:
        faults, who = only(kind)
    algorithm = algorithms.build(name, {"lr": 0.1, "dyn_alpha": 0.5})
    memory = ClientMemory(D)
    for client in range(8):
        memory.write(client, torch.full((D,), 0.01 * client))
    model = Model(torch.zeros(D), torch.zeros(2))
    algorithm.start(model, torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]
    clients = federation_of(8, faults, memory=memory, remember=algorithm.remember)
    moved = algorithm.round(model, clients)
    memory.commit()
    valid = [client for client in range(8) if client not in who]
    assert sorted(clients.left_out) == who
    step = sum(c + 1 for c in valid) / len(valid)
    for client in range(8):
        held = float(memory.read([client])[0, 0])
        if client in who:
            assert held == pytest.approx(0.01 * client)
        elif name == "feddyn":
            assert held == pytest.approx(0.01 * client - 0.5 * (client + 1))  # g_k - α(θ_k - θ)
        else:
            assert held == pytest.approx(0.01 * client - (client + 1) / 0.6)  # c_i - c - Δ/(Kη), six steps at 0.1
    if name == "feddyn":
        h = -0.5 * len(valid) / 8 * step
        assert float(algorithm.state["h"][0]) == pytest.approx(h)
        assert float(moved.w[0]) == pytest.approx(step - h / 0.5)
    else:
        assert float(algorithm.state["c"][0]) == pytest.approx(-len(valid) / 8 * step / 0.6)
        assert float(moved.w[0]) == pytest.approx(step)


# --- FedAgg's guard -------------------------------------------------------------------------------------------------


def started(**more: Any) -> FedAgg:
    algorithm = FedAgg(lr=0.1, pace="base", **more)
    algorithm.start(Model(torch.zeros(D), torch.zeros(2)), torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]
    return algorithm


def test_fedagg_does_not_take_damaged_answers_as_a_sign_of_a_broken_model() -> None:
    """Three of eight answers are damaged on the way: the training losses are as usual, so the round counts."""
    faults = next(f for s in range(9999) if sum((f := Faults(s, corrupt_rate=0.4)).kind(0, c) is not None for c in range(8)) == 3)
    algorithm = started()
    clients = federation_of(8, faults)
    moved = algorithm.round(clients.model, clients)
    assert len(clients.left_out) == 3
    assert algorithm.state["rate"] == 0.1
    assert float(moved.w.abs().sum()) > 0


@pytest.mark.parametrize("times", [1e6, float("nan")])
def test_fedagg_takes_clients_that_diverged_as_a_sign_of_a_broken_model(times: float) -> None:
    """Three of eight clients diverge in training itself: their losses show it, and the last step is undone."""

    class BlowingUp(Scripted):
        def run(self, *args: Any) -> Any:
            for chunk in super().run(*args):
                if chunk.jobs[0].client < 3:
                    chunk.delta *= 1e6
                    chunk.loss *= times
                yield chunk

    algorithm = started()
    algorithm.state["good/w"] = torch.full((D,), 7.0)
    clients = federation_of(8, Faults(), engine=BlowingUp())
    back = algorithm.round(clients.model, clients)
    assert sorted(clients.left_out) == [0, 1, 2]
    assert torch.equal(back.w, torch.full((D,), 7.0))
    assert algorithm.state["rate"] == pytest.approx(0.05)  # half of the rate that did it


@pytest.mark.parametrize(("worse", "used"), [(1.24, True), (1.26, False)])
def test_fedagg_slows_down_when_training_makes_the_loss_worse(worse: float, used: bool) -> None:
    algorithm = started()
    clients = federation_of(8, Faults(), engine=Scripted(worse=worse))
    moved = algorithm.round(clients.model, clients)
    assert (float(moved.w.abs().sum()) > 0) == used
    assert algorithm.state["rate"] == pytest.approx(0.1 if used else 0.05)
    if not used:
        calm = federation_of(8, Faults(), t=1)
        algorithm.round(calm.model, calm)
        assert algorithm.figures()["own_rate"] == pytest.approx(0.05)


def below_zero(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, target, reduction="none") - 5.0


def test_fedagg_does_not_take_a_loss_under_zero_for_one_that_got_worse() -> None:
    """A constant has no gradient: the runs are the same, up to the rounding of losses."""
    settings: dict[str, Any] = {"clients": 10, "participation": 1.0, "rounds": 4, "epochs": 1, "engine": "batched"}
    plain, shifted = (fedagg.run(**settings, **more) for more in ({}, {"loss": below_zero}))
    assert shifted.loss == pytest.approx(plain.loss - 5.0, abs=1e-5)
    assert shifted.accuracy == pytest.approx(plain.accuracy, abs=1e-3)


@pytest.mark.parametrize(("loss", "limit"), [(2.0, 2.5), (-3.0, -2.25), (0.0, 0.0), (float("inf"), float("inf"))])
def test_a_worse_loss_is_a_greater_one(loss: float, limit: float) -> None:
    assert worse(loss) == limit


def test_fedagg_undoes_a_step_after_which_all_diverge_but_not_one_after_which_nobody_answers() -> None:
    algorithm = started()
    algorithm.state["good/w"] = torch.full((D,), 7.0)
    blown = federation_of(8, Faults(), engine=Scripted(loss=float("inf")))
    assert torch.equal(algorithm.round(blown.model, blown).w, torch.full((D,), 7.0))
    for faults in (
        Faults(dropout=1.0),
        next(f for s in range(9999) if all((f := Faults(s, corrupt_rate=1.0)).kind(0, c) in ("nan", "shape") for c in range(3))),
    ):
        silent = federation_of(3, faults)
        before = dict(algorithm.state)
        with pytest.raises(NoClients):
            algorithm.round(silent.model, silent)
        assert all(value is before[name] for name, value in algorithm.state.items())


def test_lengths_of_a_round_that_fedagg_undoes_are_not_used_as_usual_lengths() -> None:
    """Otherwise one round in which all clients go too far would let absurd clients pass for ever."""
    algorithm, yardstick = started(), Yardstick()

    def usual_after(t: int, **script: float) -> float:
        clients = federation_of(8, Faults(), t=t, engine=Scripted(**script), yardstick=yardstick)
        algorithm.round(clients.model, clients)
        return yardstick.length

    usual = usual_after(0)
    assert usual > 0
    assert usual_after(1, length=1e3, worse=2.0) == usual  # not used, because the clients' own loss got worse
    assert usual_after(2, length=1e3) == pytest.approx(1e3 * usual)  # used, and it breaks the model:
    assert usual_after(3, length=1e5, loss=10.0) == usual


def test_the_rounding_error_of_a_broken_field_is_not_sent_later() -> None:
    """It is as long as that field was: added to the good one that takes its place, it would break the model again."""
    algorithm, downlink = started(), Downlink(bits=2, error=torch.full((1, D), 1e3))
    calm = federation_of(8, Faults(), downlink=downlink)
    algorithm.round(calm.model, calm)
    assert downlink.error is not None
    blown = federation_of(8, Faults(), t=1, engine=Scripted(loss=float("inf")), downlink=downlink)
    algorithm.round(blown.model, blown)
    assert downlink.error is None


@pytest.mark.slow
def test_fedagg_recovers_from_an_absurd_base_rate_even_among_corrupt_clients() -> None:
    for settings in ({"lr": 300.0}, {"lr": 300.0, "corrupt_rate": 0.1, "dropout_rate": 0.3}):
        result = fedagg.run(rounds=15, clients=20, participation=0.5, engine="batched", clip=0.0, **settings)
        assert result.accuracy > 0.8, settings


# --- accuracy -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "fedagg"])
def test_accuracy_with_dropouts_and_corrupt_clients_is_within_two_points(algorithm: str) -> None:
    """30 % dropouts and 10 % corrupt clients on mnist-mini, mean of two seeds."""

    def accuracy(**faults: float) -> float:
        settings = {"algorithm": algorithm, "rounds": 30, "lr": 0.1, "partition": "dirichlet"}
        return sum(fedagg.run(**settings, seed=seed, **faults).accuracy for seed in range(2)) / 2

    clean = accuracy()
    assert clean > 0.85
    assert accuracy(dropout_rate=0.3, corrupt_rate=0.1) > clean - 0.02


# --- what the record says about them --------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", tiny.ENGINES)
def test_rates_are_those_of_the_epochs_that_were_made(engine: str) -> None:
    result = tiny.job(algorithm="fedavg", epochs=3, rounds=4, straggler_rate=0.6, lr=0.1, engine=engine)
    assert sum(row["stragglers"] for row in result.history) > 2
    for row in result.history:
        for name in ("rate_mean", "rate_min", "rate_max"):
            assert all(rate == pytest.approx(0.1) or rate == 0.0 for rate in row[name])
        assert row["rate_min"][0] == pytest.approx(0.1)
    assert any(row["rate_min"][1] == pytest.approx(0.1) and row["stragglers"] for row in result.history)


@pytest.mark.parametrize("engine", tiny.ENGINES)
def test_where_a_straggler_stops_its_gradient_stays(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Epochs that were not made are no gradients of zero, in the mean field or in the smoothness."""
    seen: list[Chunk] = []
    add = clients_module.Gathered.add
    monkeypatch.setattr(clients_module.Gathered, "add", lambda self, chunk, *rest: (seen.append(chunk), add(self, chunk, *rest))[1])
    tiny.job(variant="paper", estimator="history", epochs=3, rounds=2, straggler_rate=0.7, engine=engine)
    short = [(chunk, row, job.epochs) for chunk in seen for row, job in enumerate(chunk.jobs) if job.epochs < 3]
    assert len(short) > 1
    for chunk, row, epochs in short:
        assert chunk.gradients is not None
        own = chunk.gradients[row]
        assert own[epochs - 1].norm() > 0
        assert all(torch.equal(own[later], own[epochs - 1]) for later in range(epochs, 3))


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_what_a_hostile_client_remembers_is_its_own(tmp_path: Path, name: str) -> None:
    """It sends a false update, but keeps its true one."""

    def remembered(folder: Path, **faults: Any) -> Tensor:
        tiny.job(algorithm=name, rounds=1, participation=1.0, out=folder, **faults)
        found = checkpoint.latest(folder / "checkpoints")
        assert found is not None
        return torch.cat([part["rows"] for part in found.parts])

    honest, forged = remembered(tmp_path / "one"), remembered(tmp_path / "two", flip_rate=0.5, flip_scale=3.0)
    assert torch.equal(honest, forged)
    one, other = ((tmp_path / run / "model.safetensors").read_bytes() for run in ("one", "two"))
    assert one != other


def test_a_few_long_updates_do_not_rule_fedexp_under_a_robust_rule() -> None:
    """Seven clients move by 1 everywhere and one by 6: the quartiles of |Δ|² are those of the seven, so η_g is 1/2, then 1."""

    class Even(Scripted):
        def run(self, *args: Any) -> Any:
            for chunk in super().run(*args):
                chunk.delta = torch.full((1, D), 6.0 if chunk.jobs[0].client == 7 else 1.0)
                yield chunk

    def moved(robust: str) -> float:
        clients = federation_of(8, Faults(), engine=Even(), robust=robust)
        algorithm = algorithms.build("fedexp", {})
        return float(algorithm.round(clients.model, clients).w[0])

    assert moved("median") == pytest.approx(1.0)
    mean, length2 = 13 / 8, (7 + 36) / 8 * D
    assert moved("mean") == pytest.approx(max(1.0, length2 / (2 * (D * mean**2 + 1e-3))) * mean, rel=1e-5)


def test_fedagg_also_reports_a_round_without_a_valid_client() -> None:
    data = tiny.dataset()
    wild = fedagg.Dataset(data.x_train * 1e30, data.y_train, data.x_test, data.y_test, classes=3)
    with pytest.warns(UserWarning, match="no client was valid"):
        result = fedagg.run(data=wild, model=tiny.network(), rounds=3, clients=6, participation=0.5, batch_size=8, device="cpu")
    assert all(row["unchanged"] for row in result.history)


class Alone:
    """A team of one process."""

    rank, size = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    most = sum


def test_processes_of_a_run_survive_a_round_in_which_all_clients_drop_out() -> None:
    clients = federation_of(4, Faults(dropout=1.0), team=Alone())
    with pytest.raises(NoClients):
        clients.train(Work(rate=clients.constant(0.1)))
    assert clients.left_out == dict.fromkeys(range(4), "dropped out")
    assert clients.reported == {}


def test_an_engine_around_a_distributed_one_need_not_know_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sums(Alone):
        """Counts what is summed up over all processes."""

        count = 0

        def sum(self, tensor: Tensor) -> Tensor:
            self.count += 1
            return tensor.clone()

        def part(self) -> None: ...

    team = Sums()
    monkeypatch.setattr(distributed, "TorchTeam", lambda device: team)
    counts = []
    for wrap in (None, lambda engine: SimpleNamespace(note=engine.note, run=engine.run)):
        team.count = 0
        tiny.job(algorithm="fedbabu", engine="distributed", rounds=1, wrap=wrap)
        counts.append(team.count)
    assert counts[0] == counts[1] > 0
