"""Grids of settings. `tune` tries them on training data that is held back, never on the test set, and ranks them; `sweep` shows how
the result changes over a grid."""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

import fedagg
from fedagg import checks, paired, plots, runs, seeding, sheets
from fedagg.config import NO_EFFECT, OF_PARTITIONS, Config, options_of, resolve
from fedagg.data import Dataset
from fedagg.errors import FedaggError, FedaggWarning, SettingError, need
from fedagg.measure import ACCURACY, Measure
from fedagg.reproduce import running
from fedagg.reproduce.grid import Cell
from fedagg.reproduce.results import Store
from fedagg.reproduce.running import CellResult, Stop
from fedagg.sheets import Sheet
from fedagg.tasks import Metric
from fedagg.work import Loss

if TYPE_CHECKING:
    import pandas

VALIDATION = 0.1  # default share of the training data that is held back
SEEDS = (5, 6)  # not those that results are reported with
HALVING = 4  # the first phase has a quarter of the rounds, and leaves a quarter of the settings

# The task. A better figure for another value of these says nothing about the method.
TASK = {
    *("algorithm", "dataset", "task", "metric", "partition", "sigma", "shards", "deviation", "column", "clients", "participation"),
    *("validation", "client_test", "per_client", "personal", "seed"),
}

Run = Callable[[list[Cell]], bool]  # trains the runs that have no results yet, and says whether it finished
Scored = tuple[float, float, Measure]  # the score of a run, its loss, and the measure of the score
Found = Callable[[Config], Scored | None]
R = TypeVar("R")
Judge = Metric | str | Callable[[Tensor, Tensor], Tensor] | None


@dataclass(frozen=True)
class Point:
    """One point of the grid, and its score with each seed: accuracy, or the metric of its task. `loss` is the mean over seeds."""

    settings: dict[str, Any]
    config: Config
    scores: tuple[float, ...] = ()
    loss: float = math.nan
    metric: Measure = ACCURACY

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def rank(self) -> float:
        """Larger for better points."""
        return self.metric.better(self.mean)

    @property
    def deviation(self) -> float:
        """Standard deviation between the seeds; NaN for one seed."""
        return paired.deviation(self.scores)

    def short(self) -> Point:
        """The same point with a part of the rounds."""
        return replace(self, config=shortened(self.config))


def shortened(config: Config) -> Config:
    """The same run with a part of the rounds, at least one."""
    return config.changed(rounds=max(1, config.rounds // HALVING), warmup=config.warmup // HALVING)


@dataclass(frozen=True)
class Plan:
    """What is to be tried. All settings are checked before anything runs. With `draws`, points are searched for between the ends of
    the axes, and `trials` has the corners."""

    axes: dict[str, tuple[Any, ...]]
    trials: tuple[Point, ...]
    seeds: tuple[int, ...]
    base_command: tuple[str, ...]  # the command that runs one of these, without the settings of the grid
    make_point: Callable[[dict[str, Any]], Point]
    halving: bool = False
    draws: int | None = None

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
        trials: int | None = None,
        choosing: bool = True,
    ) -> Plan:
        """The plan of `tune`, or of `sweep` (without `choosing`)."""
        given = {name: value for name, value in settings.items() if value is not None}
        axes = axes_of(grid, given, TASK if choosing else {"algorithm", "seed"})
        chosen = {**({"validation": VALIDATION} if choosing else {}), **given, "algorithm": method}
        if not isinstance(seeds, Iterable) or not (seeds := tuple(dict.fromkeys(seeds))):
            raise SettingError("seeds", seeds, "list at least one, e.g. [5, 6], or --seeds 5,6")
        if choosing and chosen["validation"] == 0:
            words = "settings are chosen on training data that is held back, never on the test set; give a share above 0"
            raise SettingError("validation", 0, words)

        def make_point(point: dict[str, Any]) -> Point:
            split = point.get("partition")  # if partitions are on the grid, each takes only the settings it knows
            unused = [name for name, users in OF_PARTITIONS.items() if split is not None and split not in users]
            mine = {name: value for name, value in chosen.items() if name not in unused}
            return Point(point, resolve({**mine, **point, "seed": seeds[0]}, file, preset))

        wanted = [
            (name, on) for name, on in (("random", random), ("halving", halving or None), ("trials", trials)) if on is not None
        ]
        if len(wanted) > 1 and trials is not None:
            raise SettingError("trials", trials, f"and {wanted[0][0]} are two ways to save runs; give one of them")
        ends = {name: ends_of(values) if trials is not None else values for name, values in axes.items()}
        points = [make_point(dict(zip(ends, values, strict=True))) for values in itertools.product(*ends.values())]
        for seed in seeds:
            points[0].config.changed(seed=seed)  # raises an error for a bad seed
        for name, count in (("random", random), ("trials", trials)):
            if count is not None and count < 1:
                raise SettingError(name, count, "draw at least one point of the grid")
        if trials is not None:
            need("tune --trials", "optuna", "optuna")
        if random is not None:
            drawn = seeding.numpy_generator(0, "tune").permutation(len(points))[:random]  # the same points every time
            points = [points[k] for k in sorted(drawn.tolist())]
        if halving:
            if len(points) < HALVING or "rounds" in axes or min(trial.config.rounds for trial in points) < HALVING:
                words = f"needs at least {HALVING} points, {HALVING} rounds, and rounds that are not on the grid; leave it out"
                raise SettingError("halving", True, words)
            for trial in points:
                trial.short()
        own = [str(file)] if file else []
        own += ["--algorithm", method, *(["--preset", preset] if preset else [])]
        base_command = (*own, *flags({name: value for name, value in given.items() if name != "validation"}))
        return cls(axes, tuple(points), seeds, base_command, make_point, halving, trials)

    def cells(self, trials: Iterable[Point]) -> list[Cell]:
        """The runs. Seeds are the outer loop, so that a grid cut short is a complete grid with fewer seeds."""
        return [
            Cell(label(trial.settings), trial.config.method, trial.config.changed(seed=seed), f"{trial.config.rounds} rounds")
            for seed in self.seeds
            for trial in trials
        ]

    def score_points(self, trials: Sequence[Point], run: Run, found: Found) -> list[Point]:
        """The points with their scores. Points without a result are left out, and named in a warning."""
        if not run(self.cells(trials)):
            raise KeyboardInterrupt
        known = [(t, [found(t.config.changed(seed=seed)) for seed in self.seeds]) for t in trials]
        for lost in (t for t, each in known if None in each):
            words = f"{label(lost.settings)}: has no result for every seed, and is left out"
            warnings.warn(words, FedaggWarning, stacklevel=3)
        return [with_scores(t, [one for one in each if one is not None]) for t, each in known if None not in each]

    def try_and_rank(self, run: Run, found: Found) -> Tuned:
        """Try the points and rank them."""
        if self.draws is not None:
            return Tuned(self, rank_points(self.search(run, found)), [])
        first = rank_points(self.score_points([t.short() for t in self.trials], run, found)) if self.halving else []
        kept = [trial.settings for trial in first[: math.ceil(len(first) / HALVING)]]
        left = [t for t in self.trials if not self.halving or t.settings in kept]
        return Tuned(self, rank_points(self.score_points(left, run, found)), first)

    def try_in_order(self, run: Run, found: Found) -> Swept:
        """Try the points and leave them in the order of the axes."""
        whole = self.score_points(self.trials, run, found)
        if not whole:
            raise no_result_error()
        order = {name: list(plots.in_order(values)) for name, values in self.axes.items()}
        return Swept(self, sorted(whole, key=lambda t: [order[name].index(value) for name, value in t.settings.items()]))

    def search(self, run: Run, found: Found) -> list[Point]:
        """Points that Optuna chooses one after another: the same ones every time, as long as their scores are the same."""
        import optuna

        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
            tried: dict[tuple[Any, ...], Point] = {}
            for _ in range(self.draws or 0):
                asked = study.ask({name: space(values) for name, values in self.axes.items()})
                point = {name: tidy(value) for name, value in asked.params.items()}
                if tuple(point.values()) not in tried:
                    for trial in self.score_points([self.make_point(point)], run, found):
                        tried[tuple(point.values())] = trial
                known = tried.get(tuple(point.values()))
                if known is None or not math.isfinite(known.rank):
                    study.tell(asked, state=optuna.trial.TrialState.FAIL)
                else:
                    study.tell(asked, known.rank)
        finally:
            optuna.logging.set_verbosity(before)
        return list(tried.values())


def rank_points(trials: Sequence[Point]) -> list[Point]:
    if not trials:
        raise no_result_error()
    return sorted(trials, key=lambda t: best_first(t.rank, t.loss))


def best_first(rank: float, loss: float) -> tuple[float, float]:
    """The order of points. Loss decides between equal scores: early in a run, many points predict one class alone."""
    return math.inf if math.isnan(rank) else -rank, math.inf if math.isnan(loss) else loss


def no_result_error() -> FedaggError:
    return FedaggError("grid: no point has a result for every seed; the errors of the runs say why")


def ends_of(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return (min(values), max(values)) if plots.is_numeric(values) and len(values) > 1 else values


def space(values: tuple[Any, ...]) -> Any:
    """Optuna's range for an axis: from the smallest to the largest number, logarithmic if these differ tenfold; or any word."""
    from optuna import distributions as kinds

    if not plots.is_numeric(values) or len(values) == 1:
        return kinds.CategoricalDistribution(values)
    low, high = min(values), max(values)
    wide = low > 0 and high >= 10 * low
    if all(isinstance(value, int) for value in values):
        return kinds.IntDistribution(low, high, log=wide)
    return kinds.FloatDistribution(low, high, log=wide)


def tidy(value: Any) -> Any:
    """A number rounded to three digits: enough to tell points apart, and easy to read."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Swept:
    """The results over a grid, with points in the order of the axes. A notebook shows it as a table."""

    plan: Plan
    trials: list[Point]

    @property
    def shown(self) -> list[Point]:
        return self.trials

    @property
    def best(self) -> Point | None:
        """The point that was chosen: none, because a sweep does not choose."""
        return None

    @property
    def metric(self) -> Measure:
        """The metric by which the points are judged."""
        return self.trials[0].metric

    @property
    def names(self) -> list[str]:
        return [*self.plan.axes, self.metric.label, "deviation", *(["rounds"] if "rounds" not in self.plan.axes else [])]

    def rows(self) -> list[dict[str, Any]]:
        """One row per point: its settings, mean score by its key, deviation between seeds, rounds."""
        return [
            {**t.settings, t.metric.key: finite(t.mean), "deviation": finite(t.deviation), "rounds": t.config.rounds}
            for t in self.shown
        ]

    def sheet(self) -> Sheet:
        best, config = max(self.trials, key=lambda trial: trial.rank), self.trials[0].config
        rows = [
            [*(str(row[name]) for name in self.plan.axes), *figures(row, trial.metric)[: len(self.names) - len(self.plan.axes)]]
            for row, trial in zip(self.rows(), self.shown, strict=True)
        ]
        bold = frozenset((at, len(self.plan.axes)) for at, trial in enumerate(self.shown) if trial.settings == best.settings)
        about = f"{config.method} on {task(config, self.plan)}"
        return Sheet(about, self.names, rows, self.rows(), words=0, bold=bold)

    def table(self, form: str = "markdown") -> str:
        """The rows as markdown, text, latex or csv."""
        return self.sheet().render(form)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per point."""
        return sheets.frame(self.rows())

    def _repr_html_(self) -> str:
        return self.sheet().html()

    def plot(self, path: str | Path) -> Path:
        """Plot the score: a line over one axis, a heat map over two. With more axes, over the first two, the best of the others."""
        names = [name for name, values in self.plan.axes.items() if len(values) > 1][:2] or list(self.plan.axes)[:1]
        ordered = sorted(self.trials, key=lambda trial: -trial.rank)
        at: dict[tuple[Any, ...], tuple[float, float]] = {}
        for trial in ordered:  # best first, and the first of each place is kept
            at.setdefault(tuple(trial.settings[name] for name in names), (trial.mean, trial.deviation))
        tried = {name: tuple(dict.fromkeys(trial.settings[name] for trial in self.trials)) for name in names}
        searched = self.plan.draws is not None
        axes = tried if searched else {name: self.plan.axes[name] for name in names}
        best = None if self.best is None else tuple(self.best.settings[name] for name in names)
        what = runs.metric_name(self.metric.label, [ordered[0].config])
        return plots.over_grid(axes, at, best, Path(path), self.title(names), what, self.metric, searched)

    def title(self, drawn: Sequence[str]) -> str:
        """The title of the plot, without what is on its axes."""
        others = [name for name, values in self.plan.axes.items() if name not in drawn and len(values) > 1]
        about = f"{self.trials[0].config.method} on {task(self.trials[0].config, self.plan)}"
        return f"{about}, each at its best {' and '.join(others)}" if others else about


@dataclass(frozen=True)
class Tuned(Swept):
    """The ranked results over a grid, best first. With halving, `first` has the results of all points after fewer rounds."""

    first: list[Point]

    @property
    def shown(self) -> list[Point]:
        kept = [trial.settings for trial in self.trials]
        return [*self.trials, *(trial for trial in self.first if trial.settings not in kept)]

    @property
    def best(self) -> Point:
        return self.trials[0]

    def title(self, drawn: Sequence[str]) -> str:
        c = self.best.config
        return f"{c.method} on {c.dataset}, {c.model}, {c.partition}: best {label(self.best.settings)}"

    @property
    def edges(self) -> list[str]:
        """The axes where the best point lies at an end and values beyond it are possible."""
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
        """The best settings, for a run on all training data with results on the test set."""
        return self.best.config.changed(validation=0.0, seed=0)

    @property
    def command(self) -> str:
        return shlex.join(["fedagg", "run", *self.plan.base_command, *flags(self.best.settings)])

    def to_toml(self) -> str:
        """All settings of `config`, as a file that `fedagg run` takes."""
        return self.config.toml()


def tune(
    method: str,
    grid: Mapping[str, Iterable[Any]],
    *,
    data: Any = None,
    model: nn.Module | str | None = None,
    loss: Loss | None = None,
    metric: Judge = None,
    preset: str | None = None,
    seeds: Iterable[int] = SEEDS,
    random: int | None = None,
    halving: bool = False,
    trials: int | None = None,
    jobs: int | str = 1,
    out: str | Path | None = None,
    **settings: Any,
) -> Tuned:
    """Try a grid of settings on training data that is held back, and rank them.

    Args:
        method: a method's name.
        grid: the values to try for each setting or option of the method.
        data: your own data in place of a named set, in any form that `fedagg.run` takes.
        model: a name, or your own module.
        loss: per-sample loss of (output, target), (B,); the task's by default.
        metric: what points are judged by, as `fedagg.run` takes it; the task's by default.
        preset: the settings to start from.
        seeds: every point is run once with each seed.
        random: try this many points of the grid, drawn at random.
        halving: run all points for a quarter of the rounds, and only the best quarter of them for all rounds.
        trials: let Optuna choose this many points between the ends of the axes.
        jobs: runs at once, each in its own process; `auto` for one per core.
        out: a folder that keeps the results; the same call continues from there. Without one nothing is kept.
        settings: settings for all runs, as `fedagg.run` takes them; `validation` is the share held back, 0.1 by default.
    """
    own = PythonObjects(checks.samples(data, None, None, settings), model, loss, metric)
    plan = Plan.make(
        method, grid, settings | own.settings, preset=preset, seeds=seeds, random=random, halving=halving, trials=trials
    )
    return own.run_plan(plan.try_and_rank, jobs, out)


def sweep(
    method: str,
    grid: Mapping[str, Iterable[Any]],
    *,
    data: Any = None,
    model: nn.Module | str | None = None,
    loss: Loss | None = None,
    metric: Judge = None,
    preset: str | None = None,
    seeds: Iterable[int] = (0,),
    jobs: int | str = 1,
    out: str | Path | None = None,
    **settings: Any,
) -> Swept:
    """Run a method over a grid of any settings, including those of the task, and show how the result changes. Nothing is chosen,
    and runs are scored on the test set unless `validation` is given. Arguments are those of `fedagg.tune`.
    """
    own = PythonObjects(checks.samples(data, None, None, settings), model, loss, metric)
    plan = Plan.make(method, grid, settings | own.settings, preset=preset, seeds=seeds, choosing=False)
    return own.run_plan(plan.try_in_order, jobs, out)


class PythonObjects:
    """The Python objects for the runs of a grid."""

    def __init__(self, data: Dataset | None, model: nn.Module | str | None, loss: Loss | None, metric: Judge) -> None:
        self.data, self.loss = data, loss
        self.module = model if isinstance(model, nn.Module) else None
        self.settings: dict[str, Any] = {"model": model} if isinstance(model, str) else {}
        self.settings |= {"dataset": "custom"} if data is not None else {}
        self.settings |= {"model": "custom"} if self.module is not None else {}
        self.mine = [name for name, thing in (("data", data), ("model", self.module)) if thing is not None]
        self.settings |= {"metric": metric} if isinstance(metric, str) else {}
        self.metric = None if isinstance(metric, str) else metric
        self.mine += [name for name, thing in (("loss", loss), ("metric", self.metric)) if thing is not None]

    def run_plan(self, attempt: Callable[[Run, Found], R], jobs: int | str, out: str | Path | None) -> R:
        """Run the plan: in this process if objects came from Python, else as the command does."""
        if not self.mine:
            with tempfile.TemporaryDirectory() as scratch:
                store = Store(Path(out) if out is not None else Path(scratch))
                return attempt(partial(run_cells, store=store, jobs=jobs), partial(score, store))
        for setting, value, usual in (("jobs", jobs, 1), ("out", out, None)):
            if value != usual:
                words = f"cannot be used with {', '.join(self.mine)} from Python; leave it out"
                raise SettingError(setting, value, words)
        known: dict[Config, Scored] = {}

        def run(cells: list[Cell]) -> bool:
            for cell in cells:
                if cell.config not in known:
                    given: dict[str, Any] = {"data": self.data, "model": self.module, "loss": self.loss, "metric": self.metric}
                    result = fedagg.run(cell.config, **given, progress=False)
                    if result.interrupted:
                        return False
                    known[cell.config] = result.score, result.loss, result.metric
            return True

        return attempt(run, known.get)


def run_cells(cells: list[Cell], store: Store, jobs: int | str) -> bool:
    stop, todo = Stop(), running.unfinished(cells, store)
    with running.interruptible(stop):
        ended = list(running.run(todo, store, stop=stop, jobs=running.processes(jobs, len(todo))))
    refuse_failures(ended)
    return not stop.now()


def refuse_failures(ended: Sequence[CellResult]) -> None:
    """If all runs failed, raise the error of the first."""
    if ended and all(one.status in ("failed", "no data") for one in ended):
        raise FedaggError(f"grid: {ended[0].message}")


def score(store: Store, config: Config) -> Scored | None:
    found = store.get(config)
    return None if found is None else (found.score, found.loss, found.metric)


def with_scores(trial: Point, found: Sequence[Scored]) -> Point:
    values, losses, measures = zip(*found, strict=True)
    return replace(trial, scores=values, loss=statistics.fmean(losses), metric=measures[0])


def axes_of(grid: Mapping[str, Iterable[Any]], given: Mapping[str, Any], no_axes: set[str]) -> dict[str, tuple[Any, ...]]:
    """The grid with every value once, or an error for what cannot be an axis."""
    axes: dict[str, tuple[Any, ...]] = {}
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise SettingError("grid", {name: values}, "give a list of values")
        plain = [value.item() if hasattr(value, "item") else value for value in values]  # turn NumPy's numbers into Python's
        if not all(isinstance(value, bool | int | float | str) for value in plain):
            raise SettingError("grid", {name: plain}, "give numbers or words as values")
        axes[name] = tuple(dict.fromkeys(plain))
        if not axes[name]:
            raise SettingError("grid", f"{name}=", f"has no values; give some, as in {name}=0.01,0.1")
        if name in NO_EFFECT:
            raise SettingError("grid", name, "says where or how fast a run goes, but does not change its result; leave it out")
        if name in no_axes:
            instead = {"seed": "give --seeds", "validation": "give --validation", "algorithm": "use `fedagg compare`"}
            words = "cannot be on this grid"
            raise SettingError("grid", name, f"{words}; {instead.get(name, 'use `fedagg sweep`')}")
        if name in given:
            raise SettingError(
                name, given[name], f"is on the grid, with {', '.join(map(str, axes[name]))}; leave one of the two out"
            )
    if not axes:
        raise SettingError("grid", "", "name at least one setting and its values, as in lr=0.01,0.1")
    return axes


def limits(name: str, config: Config) -> Mapping[str, float]:
    """The limits of a setting's range that are allowed values themselves."""
    if name in Config.model_fields:
        ends = Config.model_fields[name].metadata
        return {kind: getattr(end, kind) for end in ends for kind in ("ge", "le") if hasattr(end, kind)}
    option = options_of(config.flat()).get(name)
    return {} if option is None else option.limits


def task(c: Config, plan: Plan) -> str:
    """One line that says what the figures refer to; settings on the grid are left out."""
    split = c.partition if OF_PARTITIONS.keys() & plan.axes.keys() else runs.split(c)
    about = {"dataset": c.dataset, "model": c.model, "partition": split, "clients": f"{c.clients} clients"}
    about["participation"] = f"{100 * c.participation:g} % a round"
    words = [word for name, word in about.items() if name not in plan.axes]
    seeds = f"seed{'s' if len(plan.seeds) > 1 else ''} {', '.join(map(str, plan.seeds))}"
    return ", ".join(filter(None, [*words, seeds, f"scored on {runs.held_back(c)}" if c.validation else ""]))


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
    """Score and deviation in the form of the metric, and the rounds."""
    mean, deviation = row[metric.key], row["deviation"]
    shown = "-" if mean is None else metric.shown(mean)
    return [shown, "-" if deviation is None else metric.points(deviation), str(row["rounds"])]


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
