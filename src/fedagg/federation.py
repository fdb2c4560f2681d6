"""The life of a run from start to finish: configuration, data, clients, rounds, record."""

from __future__ import annotations

import functools
import math
import shlex
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

import fedagg
from fedagg import algorithms, checkpoint, checks, engines, evaluate, identity, interrupt, record, stopping, tasks
from fedagg import progress as bar
from fedagg.aggregate import FAR
from fedagg.callbacks import Callback, tell
from fedagg.checkpoint import Checkpoint
from fedagg.clients import Clients
from fedagg.config import Config
from fedagg.data import Dataset
from fedagg.engines.base import Problem, set_precision
from fedagg.errors import FedaggError, FedaggWarning, SettingError
from fedagg.evaluate import ByClient, Evaluator
from fedagg.flat import Model, copy_module
from fedagg.from_config import (
    Samples,
    build_model,
    chosen_data,
    deal,
    faults_of,
    keeps_on_disk,
    pick_device,
    seen_data,
    with_client_count,
)
from fedagg.inputs import Inputs
from fedagg.measure import CLIENTS, Measure
from fedagg.memory import ClientMemory
from fedagg.result import Result, scores
from fedagg.server import Server
from fedagg.surroundings import isolated_torch_state
from fedagg.tasks import Metric
from fedagg.team import TorchTeam
from fedagg.work import Loss, Work

CHECKPOINT_SECONDS = 45.0
CHECKPOINT_SHARE = 0.05  # share of a run's time for checkpoints, unless `checkpoint_every` is set

P = ParamSpec("P")
R = TypeVar("R")


class Timing(dict[str, float]):
    """Seconds by activity."""

    def __init__(self) -> None:
        self.clock = time.perf_counter()

    def lap(self, what: str) -> None:
        """Add the time since the last call to this activity."""
        now = time.perf_counter()
        self[what] = self.get(what, 0.0) + now - self.clock
        self.clock = now


def guarded(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a run: running out of memory becomes a one-line error, because the user can fix it, and torch's number of threads and
    precision are restored afterwards."""

    @functools.wraps(function)
    def careful(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with isolated_torch_state():
                return function(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            # torch has an error class for this on a GPU, but only a message on the CPU
            if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
                raise
            folder = kwargs.get("resume") or kwargs.get("out")
            begun = folder is not None and (Path(str(folder)) / "config.toml").exists()
            again = f", then continue with --resume {shlex.quote(str(folder))}" if begun else ""
        # Of a run that has begun, name only settings that may still change.
        less = "--chunk, or give --client-memory disk" if begun else "--chunk, --batch-size or --participation, or the model"
        raise FedaggError(f"out of memory; lower {less}{again}")

    return careful


@guarded
def run(
    config: Config | None = None,
    *,
    algorithm: algorithms.Algorithm | str | None = None,
    data: Any = None,
    model: nn.Module | str | None = None,
    parts: Any = None,
    loss: Loss | None = None,
    metric: Metric | str | Callable[[Tensor, Tensor], Tensor] | None = None,
    preset: str | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    wrap: Callable[[engines.Engine], engines.Engine] | None = None,
    **settings: Any,
) -> Result:
    """Train one federated model.

    Args:
        config: a complete configuration, which `settings` change. Without one, `settings` and `preset` make it. Keyword names are
            the options of the command line, including those of the method.
        algorithm: a method's name, or your own object.
        data: your own data in place of a named set: a Dataset, or anything that `Dataset.of` takes.
        model: a name, or your own module.
        parts: your own partition: indices (or a mask) per client, in a list or a dictionary, or the user of every training sample.
        loss: per-sample loss of (output, target), (B,); by default the task's, e.g. cross-entropy for class labels.
        metric: what the run is judged by: one of the task's by name, a `fedagg.tasks.Metric`, or a function of (output, target)
            that gives a score per sample, (B,), of which the mean is reported.
        out: the run folder; without one nothing is written.
        resume: a run folder to continue. Its settings are used; settings given here may change what `--resume` may change.
        callbacks: watch the run; one whose `round_done` returns True stops it.
        progress: show a bar; by default in a notebook or a terminal, but not if standard error is redirected.
        wrap: put your own engine around the run's, to see (or change) what every client does.
    """
    if resume is not None and out is not None:
        raise SettingError("out", str(out), f"a resumed run continues in its own folder, {resume}; leave out `out`")
    out, resume = checks.path("out", out), checks.path("resume", resume)
    if isinstance(model, str):
        settings["model"], model = model, None
    if isinstance(metric, str):
        settings["metric"], metric = metric, None
    checks.check_callbacks(callbacks)
    data = checks.samples(data, parts, config, settings)
    method = checks.method(algorithm, settings)
    given = checks.describe_arguments(data, model, parts)
    if resume is not None and config is None and preset is None:
        config = checks.recorded_config(resume, given, method)
    config = checks.merge_config(config, given, preset, settings, method)
    rules = stopping.rules(config)
    recorded = out is not None or resume is not None
    simulation = Simulation(config, method, data, model, parts, loss, wrap, metric, recorded)
    config, server, timing = simulation.config, simulation.server, simulation.timing
    with simulation.record(out, resume) as run_record, bar.show_bar(progress, config.method) as bars:
        watching = () if simulation.is_follower else (*rules, *callbacks, *bars)
        keeper = Keeper(simulation, run_record)
        try:
            tell(watching, "judged", simulation.task.metric)
            tell(watching, "started", config, keeper.done)
            keeper.stopped = tell(watching, "resumed", run_record.history) if keeper.done else None
        except BaseException:
            run_record.withdraw()
            raise
        timing.lap("record")
        try:
            for t in range(keeper.done, config.rounds):
                if simulation.agree_to_stop(keeper.stopped is not None):
                    break
                clock = time.perf_counter()
                clients = server.clients(t)
                changed = server.play(clients)
                server.update_average(t)
                timing.lap("rounds" if "first round" in timing else "first round")
                row = record.describe(t, clients, server.algorithm, unchanged=not changed)
                if server.evaluates_after(t) and not simulation.is_follower:
                    row |= simulation.evaluate(server.reported_model)
                    timing.lap("evaluation")
                row["seconds"] = round(time.perf_counter() - clock, 6)
                keeper.record_round(row, clients)
                keeper.stopped = tell(watching, "round_done", row)
                keeper.save_if_due()
                timing.lap("record")
        except KeyboardInterrupt as stop:
            keeper.interrupt(str(stop))
        except BaseException:
            if not run_record.history:  # there is nothing to resume
                run_record.withdraw()
            raise
        result = keeper.finish()
    if simulation.team is not None and not result.interrupted:
        simulation.team.part()
    tell(watching, "finished", result)
    return result


class Simulation:
    """The parts of a run, built from the arguments and checked against each other: data, clients, network, engine and server."""

    def __init__(
        self,
        config: Config,
        method: algorithms.Algorithm | None,
        data: Dataset | None,
        model: nn.Module | None,
        parts: Sequence[Any] | None,
        loss: Loss | None,
        wrap: Callable[[engines.Engine], engines.Engine] | None,
        metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
        recorded: bool = False,
    ) -> None:
        self.timing = Timing()
        self.device = pick_device(config.device)
        set_precision(config.precision)
        if config.threads:
            torch.set_num_threads(config.threads)
        given = (data or chosen_data(config)).of_task(config.task)
        self.task = tasks.find(given.task).judged_by(config.metric if metric is None else metric)
        self.loss = loss = self.task.loss if loss is None else loss
        self.data = seen_data(config, given, parts)
        self.inputs = Inputs.of(self.data)
        self.config = config = with_client_count(config, self.data)
        parts = checks.indices(parts, self.data) if parts is not None else deal(config, self.data)
        parts, held = evaluate.held_out(parts, config.client_test, config.seed) if config.client_test else (parts, None)
        self.timing.lap("data")
        self.module = checks.copy_model(model) if model is not None else build_model(config, self.data)
        checks.try_out(config, self.module, loss, self.task, self.data, parts, self.device)
        self.finished = copy_module(self.module)  # the trained weights go into this one
        algorithm = algorithms.build(config.method if method is None else method, config.flat())
        checks.check_task(config, algorithm, self.task)
        self.server = Server(config, algorithm, self.module, self.device)
        problem = Problem(
            self.module, self.data.x_train, self.data.y_train, self.data.classes, self.server.options, self.device, loss
        )
        engine = engines.build(config.engine, problem, config)
        self.team: TorchTeam | None = getattr(engine, "team", None)
        self.engine = engine if wrap is None else wrap(engine)
        self.evaluator = Evaluator(problem, self.data.x_test, self.data.y_test, self.task)
        self.by_client: ByClient = (
            evaluate.LabelWeightedTest(self.evaluator, parts) if held is None else evaluate.HeldOutTest(problem, held, self.task)
        )
        self.memory: ClientMemory | None = None
        if self.server.algorithm.remembers:
            d = self.server.layout.d
            self.memory = ClientMemory(d, keeps_on_disk(config, d, self.device), self.device)
        who = functools.partial(range, config.clients)
        faults = faults_of(config)
        self.server.connect(
            who,
            functools.partial(
                Clients, engine=self.engine, samples=Samples(parts), memory=self.memory, faults=faults, team=self.team
            ),
        )
        self.timing.lap("network and engine")
        # Only a run with a folder can be resumed, and large data take a second or more.
        self.given, self.identity = given.name, dict[str, str]()
        if recorded:
            self.identity = identity.fingerprint(config, given, parts, self.module, loss, self.task)
        self.timing.lap("checksum")

    @property
    def is_follower(self) -> bool:
        """Is this not the first process of a distributed run? The first one evaluates and keeps the record."""
        return self.team is not None and self.team.rank > 0

    def agree_to_stop(self, stop: bool) -> bool:
        """Does the run stop? In a distributed run the first process decides for all."""
        return stop if self.team is None else bool(self.team.most(torch.tensor([float(stop)])))

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss and metrics on the test set, and per-client scores if asked for."""
        figures = self.evaluator(model)
        if self.config.per_client or self.config.client_test:
            figures |= evaluate.spread(self.by_client.scores(model), self.task.metric)
        return figures

    def record(self, out: str | Path | None, resume: str | Path | None) -> record.Record:
        """The run folder: a new one, one to resume, or none."""
        environment = record.environment(self.device, self.engine.note, fedagg.__version__)
        environment |= {"data": self.given, "given": self.identity, "inputs": self.inputs.facts()}
        if self.task is not tasks.CLASSIFICATION:
            environment["metric"] = self.task.metric.facts()
        if resume is not None and not self.is_follower:
            return record.Record.resume(Path(resume), self.config, self.identity, environment)
        run_record = record.Record(Path(out) if out is not None and not self.is_follower else None, self.config, environment)
        if resume is not None:
            run_record.resumed = checkpoint.latest(Path(resume) / "checkpoints")
        return run_record

    def personal(self) -> float | None:
        """The personalised score, if asked for or if the method is judged by it: the mean over some clients, after fitting the
        model to each, on its own test samples or on a test set weighted by its labels. Clients with neither are left out."""
        server, clients = self.server, self.server.clients(self.config.rounds)
        work = server.algorithm.personalised(clients)
        if work is None and self.config.personal:
            work = Work(rate=clients.constant(self.config.lr))
        if work is None:
            return None
        scores = torch.zeros(2, dtype=torch.float64)  # sum and count
        for chunk in self.engine.run(server.model, work, clients.jobs(), None):
            for job, delta, buffers in zip(chunk.jobs, chunk.delta, chunk.buffers, strict=True):
                score = self.by_client.score(Model(server.model.w + delta, buffers), job.client)
                if not math.isnan(score):
                    scores += torch.tensor([score, 1.0])
        total, count = (scores if self.team is None else self.team.sum(scores)).tolist()
        return float(total / count) if count else None


class Keeper:
    """Keeps the record of a run: adds rounds, saves checkpoints, goes back to the last recorded round, and sums up at the end."""

    def __init__(self, simulation: Simulation, run_record: record.Record) -> None:
        self.simulation, self.record, self.server, self.memory = simulation, run_record, simulation.server, simulation.memory
        self.last_state, self.done, self.before, self.interrupted = self.server.freeze(0), 0, 0.0, False
        self.stopped: str | None = None  # the reason, if a callback ended the run before its last round
        if run_record.resumed is not None:
            self.server.resume(run_record.resumed)
            if self.memory is not None:
                self.memory.restore(run_record.resumed.parts, simulation.config.clients)
            self.last_state, self.done = run_record.resumed, run_record.resumed.round
            self.before = float(run_record.resumed.facts.get("seconds", 0.0))
        self.started = self.saved = time.perf_counter()
        self.took = 0.0

    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started

    def record_round(self, row: dict[str, Any], clients: Clients) -> None:
        with interrupt.delay_interrupts():  # a round is recorded completely or not at all
            self.record.round(row, record.describe_clients(clients.t, clients))
            if self.memory is not None:
                self.memory.commit()
            self.done = clients.t + 1
            self.last_state = self.server.freeze(self.done)

    def save(self) -> None:
        numbers = self.last_state.facts.get("numbers", {})
        facts = {"seconds": self.seconds(), "identity": self.simulation.identity, "numbers": numbers}
        remembered = () if self.memory is None else self.memory.parts()
        self.record.checkpoint(Checkpoint(self.done, self.last_state.tensors, facts, remembered))

    def save_if_due(self) -> None:
        """Save a checkpoint after as many rounds as the settings say; by default about once a minute, if it costs little."""
        config, clock = self.simulation.config, time.perf_counter()
        if config.checkpoint_every:
            due = self.done % config.checkpoint_every == 0
        else:
            due = clock - self.saved > max(CHECKPOINT_SECONDS, self.took / CHECKPOINT_SHARE)
        if due and self.stopped is None and self.done < config.rounds:
            self.save()
            self.saved = time.perf_counter()
            self.took = self.saved - clock

    def interrupt(self, why: str) -> None:
        """Discard the round in progress."""
        self.interrupted = True
        if why:
            warnings.warn(why, stacklevel=3)
        self.server.revive(self.last_state)

    def finish(self) -> Result:
        simulation, server, history, seconds = self.simulation, self.server, self.record.history, self.seconds()
        keep = self.keeps_last()
        if self.done and keep:
            self.save()
        module = server.layout.unpack(server.reported_model.to(torch.device("cpu")), simulation.finished)
        self.record.model(module, simulation.inputs.scale())
        metric = simulation.task.metric
        scored = [row for row in history if metric.key in row]
        warn_about(history, scored)
        left_out = self.record.left_out_clients()
        asked = simulation.config.corrupt_rate or simulation.config.flip_rate
        if not asked and not all(row.get("unchanged") for row in history):
            warn_left_out(left_out, len(history))
        personal = None if self.interrupted else simulation.personal()
        simulation.timing.lap("record")
        figures = {key: scored[-1][key] for key in CLIENTS.values() if scored and key in scored[-1]}
        result = Result(
            simulation.config,
            history,
            module,
            *scores(history, metric),
            seconds=seconds,
            timing=dict(simulation.timing),
            run=self.record.folder,
            interrupted=self.interrupted,
            stopped=None if self.interrupted or self.done == simulation.config.rounds else self.stopped,
            left_out=left_out,
            figures=figures if personal is None else figures | {f"personal_{metric.key}": personal},
            metric=Measure(**metric.facts()),
            inputs=simulation.inputs,
            criterion=simulation.loss,
            task=simulation.task,
        )
        self.record.result(result.summary())
        if not keep:
            self.record.remove_checkpoints()
        return result

    def keeps_last(self) -> bool:
        """Does the run leave a checkpoint behind? A finished run may be given more rounds, but what its clients remember may take
        more room than all the rest."""
        config, memory = self.simulation.config, self.memory
        ended = self.done == config.rounds and not self.interrupted
        return not (ended and memory is not None and memory.is_large) or config.checkpoint_every > 0


def warn_about(history: list[dict[str, Any]], scored: list[dict[str, Any]]) -> None:
    """Warn if a run achieved nothing."""
    causes = {cause for row in history for cause in row["causes"]} - {"dropped out"}
    if causes and all(row.get("unchanged") for row in history):
        words = f"no client was valid in any round ({', '.join(sorted(causes))}): the model is unchanged"
        warnings.warn(words, stacklevel=4)
    if scored and not math.isfinite(scored[-1]["loss"]):
        warnings.warn("the loss of the model is not finite: lower lr, or server_lr where the method has one", stacklevel=4)


def warn_left_out(left_out: dict[str, dict[str, int]], rounds: int) -> None:
    """Warn about clients that were left out: they may be honest, only unlike the others."""
    for why, who in left_out.items():
        named = ", ".join(f"{client} in {count}" for client, count in list(who.items())[:5])
        more = f" and {len(who) - 5} more" if len(who) > 5 else ""
        fix = "; outliers = keep lets them count" if why == FAR else ""
        warnings.warn(f"left out ({why}) of {rounds} rounds: client {named}{more}{fix}", FedaggWarning, stacklevel=4)
