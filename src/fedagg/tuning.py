"""Choosing a method's settings: a grid of them is tried on training data that is held back, never on the test set, and ranked."""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import fedagg
from fedagg import checks, paired, plots, runs, seeding
from fedagg.config import NO_BEARING, Config, options_of, resolve
from fedagg.errors import FedaggError, FedaggWarning, SettingError
from fedagg.measure import ACCURACY, Measure
from fedagg.reproduce import running
from fedagg.reproduce.grid import Cell
from fedagg.reproduce.results import Store
from fedagg.reproduce.running import CellResult, Stop
from fedagg.tasks import Metric
from fedagg.work import Loss

Scored = tuple[float, Measure]  # what a run came to, and what that is
VALIDATION = 0.1  # of the training data is held back where nobody says otherwise
SEEDS = (5, 6)  # not those that results are reported with
HALVING = 4  # a first go of so many times fewer rounds, after which so many times fewer settings are left

# What a method is judged on: between two values of these, the better figure says nothing about the method.
TASK = {
    *("algorithm", "dataset", "task", "metric", "partition", "sigma", "shards", "deviation", "column", "clients", "participation"),
    *("validation", "client_test", "per_client", "personal", "seed"),
}


@dataclass(frozen=True)
class Trial:
    """One point of the grid, and the score it came to with each seed: its accuracy, or what else its task is judged by."""

    settings: dict[str, Any]
    config: Config
    scores: tuple[float, ...] = ()
    metric: Measure = ACCURACY

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def deviation(self) -> float:
        """Between the seeds; of one seed there is no telling."""
        return paired.deviation(self.scores)

    def short(self) -> Trial:
        """The same for a part of the rounds."""
        rounds, warmup = self.config.rounds // HALVING, self.config.warmup // HALVING
        return replace(self, config=self.config.changed(rounds=rounds, warmup=warmup))


@dataclass(frozen=True)
class Plan:
    """What is to be tried: made, and every setting checked, before anything runs."""

    axes: dict[str, tuple[Any, ...]]
    trials: tuple[Trial, ...]
    seeds: tuple[int, ...]
    halving: bool
    said: tuple[str, ...]  # the command that runs one of these, up to the settings of the grid

    @classmethod
    def make(
        cls,
        method: str,
        grid: Mapping[str, Iterable[Any]],
        settings: Mapping[str, Any],
        *,
        file: Path | None = None,
        preset: str | None = None,
        seeds: Iterable[int] = SEEDS,
        random: int | None = None,
        halving: bool = False,
    ) -> Plan:
        given = {name: value for name, value in settings.items() if value is not None}
        axes, chosen = axes_of(grid, given), {"validation": VALIDATION, **given, "algorithm": method}
        seeds = tuple(dict.fromkeys(seeds))
        if not seeds:
            raise SettingError("seeds", "", "name at least one, e.g. 5,6")
        if chosen["validation"] == 0:
            words = "settings are chosen on training data that is held back, never on the test set; give a share above 0"
            raise SettingError("validation", 0, words)
        points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        trials = [Trial(point, resolve({**chosen, **point, "seed": seeds[0]}, file, preset)) for point in points]
        for seed in seeds:
            trials[0].config.changed(seed=seed)  # which says what is wrong with it
        if random is not None:
            if random < 1:
                raise SettingError("random", random, "draw at least one point of the grid")
            drawn = seeding.numpy_generator(0, "tune").permutation(len(trials))[:random]  # the same ones every time
            trials = [trials[k] for k in sorted(drawn.tolist())]
        if halving:
            if len(trials) < HALVING or "rounds" in axes or min(trial.config.rounds for trial in trials) < HALVING:
                words = f"needs at least {HALVING} points, {HALVING} rounds, and rounds that are not on the grid; leave it out"
                raise SettingError("halving", True, words)
            for trial in trials:
                trial.short()
        own = [str(file)] if file else []
        own += ["--algorithm", method, *(["--preset", preset] if preset else [])]
        told = (*own, *flags({name: value for name, value in given.items() if name != "validation"}))
        return cls(axes, tuple(trials), seeds, halving, told)

    def cells(self, trials: Iterable[Trial]) -> list[Cell]:
        """The runs. Seeds come outermost, so that a grid cut short is a whole grid of fewer seeds."""
        return [
            Cell(label(trial.settings), trial.config.method, trial.config.changed(seed=seed), f"{trial.config.rounds} rounds")
            for seed in self.seeds
            for trial in trials
        ]

    def carry_out(self, run: Callable[[list[Cell]], bool], found: Callable[[Config], Scored | None]) -> Tuned:
        """`run` makes the runs that there are no results of, and says whether it came to its end; `found` has what they came to."""

        def ranked(trials: Iterable[Trial]) -> list[Trial]:
            trials = list(trials)
            if not run(self.cells(trials)):
                raise KeyboardInterrupt
            scored = [(t, [found(t.config.changed(seed=seed)) for seed in self.seeds]) for t in trials]
            for lost in (t for t, each in scored if None in each):
                words = f"{label(lost.settings)}: came to no result with every seed, and is left out"
                warnings.warn(words, FedaggWarning, stacklevel=3)
            whole = [judged(t, [one for one in each if one is not None]) for t, each in scored if None not in each]
            if not whole:
                raise FedaggError("tuning: no point of the grid came to a result with every seed; the runs' errors say why")
            return sorted(whole, key=lambda t: -t.metric.better(t.mean))

        first = ranked(t.short() for t in self.trials) if self.halving else []
        kept = [trial.settings for trial in first[: math.ceil(len(first) / HALVING)]]
        return Tuned(self, ranked(t for t in self.trials if not self.halving or t.settings in kept), first)


@dataclass(frozen=True)
class Tuned:
    """A grid that has been tried: its points, best first. With halving, `first` has what all came to after fewer rounds."""

    plan: Plan
    trials: list[Trial]
    first: list[Trial]

    @property
    def best(self) -> Trial:
        return self.trials[0]

    @property
    def metric(self) -> Measure:
        """What the points are ranked by."""
        return self.best.metric

    @property
    def edges(self) -> list[str]:
        """The axes at whose end the best point lies, where values beyond it are possible."""
        found = []
        for name, values in self.plan.axes.items():
            best = self.best.settings[name]
            if len(values) > 1 and plots.is_numeric(values) and best in (min(values), max(values)):
                beyond = "le" if best == max(values) else "ge"
                if limits(name, self.best.config).get(beyond) != best:
                    found.append(name)
        return found

    @property
    def config(self) -> Config:
        """The best settings for a run on all training data, reported on the test set."""
        return self.best.config.changed(validation=0.0, seed=0)

    @property
    def command(self) -> str:
        return shlex.join(["fedagg", "run", *self.plan.said, *flags(self.best.settings)])

    def to_toml(self) -> str:
        """All settings of `config`, as a file that `fedagg run` takes."""
        return self.config.toml()

    def rows(self) -> list[dict[str, Any]]:
        """A row a point, best first: its settings, mean score by its key, deviation between seeds, rounds."""
        kept = [trial.settings for trial in self.trials]
        shown = [*self.trials, *(trial for trial in self.first if trial.settings not in kept)]
        key = self.metric.key
        return [{**t.settings, key: finite(t.mean), "deviation": finite(t.deviation), "rounds": t.config.rounds} for t in shown]

    def table(self) -> str:
        """The rows as Markdown."""
        names = [*self.plan.axes, self.metric.label, "deviation", "rounds"]
        lines = [[*(str(row[name]) for name in self.plan.axes), *figures(row, self.metric)] for row in self.rows()]
        return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *lines])

    def plot(self, path: str | Path) -> Path:
        """The score over the grid: a line over one axis, a heat map over two. Of more, over the first two, at the best of all."""
        names = [name for name, values in self.plan.axes.items() if len(values) > 1][:2] or list(self.plan.axes)[:1]
        axes = {name: self.plan.axes[name] for name in names}
        at: dict[tuple[Any, ...], tuple[float, float]] = {}
        for trial in self.trials:  # the best comes first
            at.setdefault(tuple(trial.settings[name] for name in names), (trial.mean, trial.deviation))
        best, c = tuple(self.best.settings[name] for name in names), self.best.config
        title = f"{c.method} on {c.dataset}, {c.model}, {c.partition}: best {label(self.best.settings)}"
        return plots.over_grid(axes, at, best, Path(path), title, runs.measured(self.metric.label, [c]), self.metric)


def tune(
    method: str,
    grid: Mapping[str, Iterable[Any]],
    *,
    data: Any = None,
    model: nn.Module | str | None = None,
    loss: Loss | None = None,
    metric: Metric | str | Callable[[Tensor, Tensor], Tensor] | None = None,
    preset: str | None = None,
    seeds: Iterable[int] = SEEDS,
    random: int | None = None,
    halving: bool = False,
    jobs: int = 1,
    out: str | Path | None = None,
    **settings: Any,
) -> Tuned:
    """Try a grid of settings on training data that is held back, and rank them.

    Args:
        method: a method's name.
        grid: the values of each setting, or option of the method, that is tried.
        data: your own data in place of a named set, in any form that `fedagg.run` takes.
        model: a name, or your own module.
        loss: per-sample loss of (output, target), (B,); the task's by default.
        metric: what points are ranked by, as `fedagg.run` takes it; the task's by default.
        preset: the settings to start from.
        seeds: every point is run once with each.
        random: try so many points of the grid, drawn at random.
        halving: run all points for a quarter of the rounds, and only the best quarter of them for all rounds.
        jobs: runs at once, each in a process of its own.
        out: a folder that keeps the results; the same call goes on from there. Without one nothing is kept.
        settings: those of all runs, as `fedagg.run` takes them; `validation` is the share held back, 0.1 by default.
    """
    data = checks.samples(data, None, None, settings)
    mine = [name for name, thing in (("data", data), ("model", model)) if thing is not None and not isinstance(thing, str)]
    settings |= {"model": model} if isinstance(model, str) else {}
    settings |= {"dataset": "custom"} if data is not None else {}
    settings |= {"model": "custom"} if "model" in mine else {}
    settings |= {"metric": metric} if isinstance(metric, str) else {}
    own = None if isinstance(metric, str) else metric
    mine += [name for name, thing in (("loss", loss), ("metric", own)) if thing is not None]
    plan = Plan.make(method, grid, settings, preset=preset, seeds=seeds, random=random, halving=halving)
    if mine:
        for setting, value, usual in (("jobs", jobs, 1), ("out", out, None)):
            if value != usual:
                raise SettingError(setting, value, f"{', '.join(mine)} from Python cannot be handed to it; leave it out")
        known: dict[Config, Scored] = {}
        module = model if isinstance(model, nn.Module) else None

        def run_mine(cells: list[Cell]) -> bool:
            for cell in cells:
                if cell.config not in known:
                    result = fedagg.run(cell.config, data=data, model=module, loss=loss, metric=own, progress=False)
                    if result.interrupted:
                        return False
                    known[cell.config] = result.score, result.metric
            return True

        return plan.carry_out(run_mine, known.get)
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(Path(out) if out is not None else Path(scratch))
        stop = Stop()

        def run(cells: list[Cell]) -> bool:
            with running.interruptible(stop):
                ended = list(running.run(running.unfinished(cells, store), store, stop=stop, jobs=jobs))
            refuse_failures(ended)
            return not stop.now()

        return plan.carry_out(run, lambda config: score(store, config))


def refuse_failures(ended: Sequence[CellResult]) -> None:
    """Where not one run went well, the first one's error is that of the whole."""
    if ended and all(one.status in ("failed", "no data") for one in ended):
        raise FedaggError(f"tuning: {ended[0].message}")


def score(store: Store, config: Config) -> Scored | None:
    found = store.get(config)
    return None if found is None else (found.score, found.measure)


def judged(trial: Trial, found: Sequence[Scored]) -> Trial:
    return replace(trial, scores=tuple(value for value, _ in found), metric=found[0][1])


def axes_of(grid: Mapping[str, Iterable[Any]], given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The grid, with every value once; or an error that says what cannot be an axis."""
    axes: dict[str, tuple[Any, ...]] = {}
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise SettingError("grid", {name: values}, "give a list of values")
        plain = [value.item() if hasattr(value, "item") else value for value in values]  # NumPy's numbers are Python's
        if not all(isinstance(value, bool | int | float | str) for value in plain):
            raise SettingError("grid", {name: plain}, "give numbers or words as values")
        axes[name] = tuple(dict.fromkeys(plain))
        if not axes[name]:
            raise SettingError("grid", f"{name}=", f"has no values; give some, as in {name}=0.01,0.1")
        if name in TASK | NO_BEARING:
            instead = {"seed": "give --seeds", "validation": "give --validation"}.get(name, "compare it with `fedagg compare`")
            raise SettingError("grid", name, f"is no setting by which one method is better than itself; {instead}")
        if name in given:
            raise SettingError(
                name, given[name], f"is on the grid, with {', '.join(map(str, axes[name]))}; leave one of the two out"
            )
    if not axes:
        raise SettingError("grid", "", "name at least one setting and its values, as in lr=0.01,0.1")
    return axes


def limits(name: str, config: Config) -> Mapping[str, float]:
    """The ends of a setting's range that are values of it."""
    if name in Config.model_fields:
        ends = Config.model_fields[name].metadata
        return {kind: getattr(end, kind) for end in ends for kind in ("ge", "le") if hasattr(end, kind)}
    option = options_of(config.flat()).get(name)
    return {} if option is None else option.limits


def label(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as options of the command line."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        several = value if isinstance(value, tuple | list) else [value]
        words += (
            [f"--{'' if value else 'no-'}{flag}"]
            if isinstance(value, bool)
            else [w for v in several for w in (f"--{flag}", str(v))]
        )
    return words


def figures(row: Mapping[str, Any], metric: Measure) -> list[str]:
    """Score and deviation as the metric is shown, and the rounds."""
    mean, deviation = row[metric.key], row["deviation"]
    shown = "-" if mean is None else metric.shown(mean)
    return [shown, "-" if deviation is None else metric.points(deviation), str(row["rounds"])]


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
