"""Compare methods over several seeds, each with the same partition, participants and initial weights. Both the command and
`fedagg.compare` use this."""

from __future__ import annotations

import io
import math
import operator
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

import fedagg
from fedagg import checks, files, plots, plugins, record, runs, scores, sheets, tasks, trackers
from fedagg.callbacks import Callback
from fedagg.config import Config, make, read, resolve_each
from fedagg.data import Dataset
from fedagg.errors import FedaggError, MissingError, SettingError, first_line
from fedagg.formats import check_run
from fedagg.from_config import build_model, chosen_data, with_client_count
from fedagg.measure import ACCURACY, Measure
from fedagg.reproduce import running
from fedagg.reproduce.grid import Cell
from fedagg.reproduce.results import Store
from fedagg.reproduce.running import CellResult, Stop
from fedagg.result import Result
from fedagg.scores import Score, Standing
from fedagg.sheets import Sheet
from fedagg.tasks import Metric
from fedagg.work import Loss

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


def numbers(metric: Measure) -> tuple[str, ...]:
    """The names of the numbers in the result of a finished run."""
    return metric.key, f"best_{metric.key}", "loss", "seconds"


@dataclass(frozen=True)
class Comparison:
    """The results of several methods. A notebook shows it as a table and a plot."""

    results: Sequence[Result]
    target: float | None = None
    interrupted: bool = False

    @property
    def groups(self) -> dict[str, list[Result]]:
        """The results by method, in the order in which the methods were named."""
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.config.method, []).append(result)
        return found

    @property
    def standings(self) -> list[Standing]:
        """One row per method: mean and deviation over its seeds, and the difference from the first method, seed by seed.
        Interrupted runs do not count."""
        complete = {method: [score(r) for r in group if not r.interrupted] for method, group in self.groups.items()}
        return scores.standings(complete, self.target)

    @property
    def metric(self) -> Measure:
        """The metric by which the methods are judged."""
        return self.results[0].metric if self.results else ACCURACY

    @property
    def title(self) -> str:
        return task(self.results[0].config, [result.config.seed for result in self.results])

    def sheet(self) -> Sheet:
        return scores.sheet({"": self.standings}, self.title)

    def table(self, form: str = "markdown") -> str:
        """The table as markdown, text, latex or csv."""
        return self.sheet().render(form)

    def figure(self) -> Figure:
        # An interrupted run would shorten the mean curve of its method.
        complete = {m: [r.history for r in group if not r.interrupted] or [group[0].history] for m, group in self.groups.items()}
        what = runs.metric_name(self.metric.label, [r.config for r in self.results])
        return plots.score_figure(complete, self.title, what, self.metric)

    def plot(self, path: str | Path | None = None) -> Path | Figure:
        """The curves, one line per method with a band of one deviation: as a file, or without a path as a matplotlib figure."""
        return self.figure() if path is None else plots.save(self.figure(), Path(path))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per run: method, seed, final figures, cost."""
        return sheets.frame([self.record(result) for result in self.results])

    def record(self, result: Result) -> dict[str, Any]:
        one = score(result)
        row: dict[str, Any] = {"method": result.config.method, "seed": one.seed, self.metric.key: one.value, "best": one.best}
        row |= {"loss": one.loss, "trainings": one.trainings, "megabytes": (one.sent[-1] if one.sent else math.nan) / 1e6}
        row |= {"seconds": one.seconds, "interrupted": result.interrupted}
        if self.target is not None:
            rounds, sent = one.reached(self.target) or (math.nan, math.nan)
            row |= {"rounds_to_target": rounds, "megabytes_to_target": sent / 1e6}
        return row

    def json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        found: dict[str, Any] = {"runs": [result.summary() for result in self.results]}
        several = any(len(group) > 1 for group in self.groups.values())
        if several or self.target is not None:
            found["methods"] = [one.record() for one in self.standings]
        return found

    def _repr_html_(self) -> str:
        made, image = self.sheet().html(), io.BytesIO()
        with suppress(MissingError):
            self.figure().savefig(image, format="png", dpi=100)
            made += (
                f'<img alt="{self.metric.label} over rounds" src="data:image/png;base64,{b64encode(image.getvalue()).decode()}">'
            )
        return made


def score(result: Result) -> Score:
    curve = [row.get(result.metric.key) for row in result.history]
    columns = {name: [row.get(name) for row in result.history] for name in ("loss", "bytes_up", "bytes_down", "passes")}
    return Score.of(result, result.config.seed, curve, columns, result.seconds)


def task(c: Config, seeds: Sequence[int]) -> str:
    """One line that says what the figures refer to."""
    known = sorted(set(seeds))
    first, last = known[0], known[-1]
    listed = f"{first} to {last}" if known == list(range(first, last + 1)) else ", ".join(map(str, known))
    which = f"seed {first}" if first == last else f"seeds {listed}"
    words = f"{c.dataset}, {c.model}, {c.partition}, {c.clients} clients, {100 * c.participation:g} % a round, {which}"
    return f"{words}, scored on {runs.held_back(c)}" if c.validation else words


@dataclass
class Watch:
    """What is shown while the runs train; by default nothing."""

    one: Callable[[str], AbstractContextManager[Sequence[Callback]]] = lambda name: nullcontext(())
    many: Callable[[list[Cell], int], AbstractContextManager[Callable[[CellResult], None]]] = lambda todo, jobs: nullcontext(
        lambda ended: None
    )


def compare(
    methods: str | Iterable[str],
    *,
    data: Any = None,
    model: nn.Module | str | None = None,
    loss: Loss | None = None,
    metric: Metric | str | Callable[[Tensor, Tensor], Tensor] | None = None,
    preset: str | None = None,
    seeds: int | Iterable[int] = 1,
    jobs: int | str = 1,
    target: float | None = None,
    track: str = "",
    out: str | Path | None = None,
    **settings: Any,
) -> Comparison:
    """Run several methods side by side, with the same partition, participants and initial weights.

    Args:
        methods: names of methods, separated by commas or as a list; the others are compared with the first.
        data: your own data in place of a named set, in any form that `fedagg.run` takes.
        model: a name, or your own module.
        loss: per-sample loss of (output, target), (B,); the task's by default.
        metric: what methods are judged by, as `fedagg.run` takes it; the task's by default.
        preset: the settings to start from.
        seeds: how many seeds to run every method with, starting at `seed`; or a list of the seeds.
        jobs: runs at once, each in its own process with its share of the cores; `auto` for one per core.
        target: count the rounds and bytes until the metric was this good; an accuracy as a share.
        track: follow the runs live, as `--track` does; needs `out`.
        out: a folder, which gets a run folder for each run; the same call continues from there. Without one nothing is kept.
        settings: settings for all runs, as `fedagg.run` takes them. An option of a method goes to the methods that have it.
    """
    folder = checks.path("out", out)
    if isinstance(model, str):
        settings["model"], model = model, None
    if isinstance(metric, str):
        settings["metric"], metric = metric, None
    data = checks.samples(data, None, None, settings)
    settings |= checks.describe_arguments(data, model, None)
    configs, given = plan_runs(names_of(methods), settings, None, preset, seeds, data)
    scores.check_target(target, judge(configs[0], given, metric))
    mine = [word for word, thing in (("data", data), ("model", model)) if thing is not None]
    mine += [word for word, thing in (("loss", loss), ("metric", metric)) if thing is not None]
    jobs = running.processes(jobs, len(configs))
    if jobs > 1 and mine:
        raise SettingError("jobs", jobs, f"{', '.join(mine)} from Python cannot be handed to other processes; leave it out")
    if track and folder is None:
        raise SettingError("track", track, "needs a folder for the runs; give out=...")
    given_too: dict[str, Any] = {"model": model, "loss": loss, "metric": metric}
    if folder is None and jobs == 1:
        for config in first_seeds(configs):
            check(config, given, **given_too)
        return in_turn(configs, lambda config: fedagg.run(config, data=given, **given_too, progress=False), target)
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as place:
        found = carry_out(configs, Path(place), given, jobs, track, target, Watch(), **given_too)
        return found if folder is not None else replace(found, results=[replace(one, run=None) for one in found.results])


def names_of(methods: str | Iterable[str]) -> list[str]:
    """The names of the methods, given as text or as a list. A dictionary would lose its values, so it is refused."""
    if isinstance(methods, Mapping):
        words = "give a list of names; settings are keywords, and hold for all methods (mu=0.1 for those that have a mu)"
        raise SettingError("methods", dict(methods), f"{words}; for others, fedagg.run each, or fedagg.tune one")
    return methods.split(",") if isinstance(methods, str) else list(methods)


def judge(config: Config, given: Dataset, metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None) -> Measure:
    """What the runs will be judged by: `metric` from Python, else the one that the settings name, else the task's."""
    return tasks.find(given.task).judged_by(config.metric if metric is None else metric).metric


def plan_runs(
    names: Sequence[str],
    settings: Mapping[str, Any],
    file: Path | None,
    preset: str | None,
    seeds: int | Iterable[int],
    data: Dataset | None = None,
) -> tuple[list[Config], Dataset]:
    """The runs and their data. Seeds are the outer loop, so that a comparison cut short is a complete one with fewer seeds."""
    names = [name.strip() for name in names if name.strip()]
    if not names:
        raise SettingError("algorithms", "", "name at least one method, e.g. fedagg,fedavg")
    if isinstance(seeds, Iterable) and settings.get("seed") is not None:
        raise SettingError("seed", settings["seed"], "all seeds are listed in seeds; leave one of the two out")
    named = resolve_each(names, settings, file, preset)
    chosen = list_seeds(seeds, named[0].seed)
    given = data or chosen_data(named[0])
    first = list({config.method: with_client_count(config, given) for config in named}.values())
    return [config if seed == config.seed else config.changed(seed=seed) for seed in chosen for config in first], given


def list_seeds(seeds: int | Iterable[int], first: int) -> list[int]:
    """A number of seeds from the first on, or those that are listed, each once."""
    if isinstance(seeds, Iterable):
        given = list(seeds)
        listed = [] if any(not hasattr(seed, "__index__") for seed in given) else list(dict.fromkeys(map(operator.index, given)))
    else:
        listed = list(range(first, first + seeds)) if hasattr(seeds, "__index__") else []
    if not listed:
        raise SettingError("seeds", seeds, "run every method with at least one; give their number, or a list of them")
    return listed


def first_seeds(configs: Sequence[Config]) -> list[Config]:
    """Every method with its first seed only."""
    found: dict[str, Config] = {}
    for config in configs:
        found.setdefault(config.method, config)
    return list(found.values())


def in_turn(configs: Iterable[Config], run: Callable[[Config], Result], target: float | None) -> Comparison:
    """Run one after another, until one is interrupted."""
    results: list[Result] = []
    for config in configs:
        results.append(run(config))
        if results[-1].interrupted:
            break
    return Comparison(results, target, results[-1].interrupted)


def carry_out(
    configs: Sequence[Config],
    folder: Path,
    given: Dataset,
    jobs: int,
    track: str,
    target: float | None,
    watch: Watch,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Comparison:
    """Train the runs, each in its own folder. Runs that are already finished there are not repeated."""
    if (folder / "config.toml").exists():
        raise SettingError("out", str(folder), "is the folder of a single run; choose another folder, for all methods")
    several = len(configs) > len(first_seeds(configs))
    places = {config: folder / folder_name(config, several) for config in configs}
    for config, own in places.items():
        check_folder(own, config, folder)
    done = {config: finished_result(own, given, model) for config, own in places.items()}
    for config in first_seeds(configs):
        if done[config] is None:
            check(config, given, model, loss, metric)
    for name in trackers.split_names(track):
        trackers.TRACKERS.find(name)
    files.folder(folder)
    # Checked before anything runs: of several processes under torchrun, the first soon writes these folders.
    begun = {config for config, own in places.items() if (own / "config.toml").exists()}

    def run(config: Config) -> Result:
        if (before := done[config]) is not None:
            return before
        own = places[config]
        new, old = (None, own) if config in begun else (own, None)
        follow = [trackers.make(name, own) for name in trackers.split_names(track)]
        with watch.one(own.name) as callbacks:
            own_too: dict[str, Any] = {"model": model, "loss": loss, "metric": metric}
            return fedagg.run(config, data=given, out=new, resume=old, callbacks=[*follow, *callbacks], **own_too, progress=False)

    if jobs == 1:
        return in_turn(configs, run, target)
    todo = [Cell(config.dataset, config.method, config) for config in configs if done[config] is None]
    stop, runs_one = Stop(), partial(in_folder, several=several, track=track)
    side_by_side = running.at_once(todo, Store(folder), stop, jobs, runs_one)
    with watch.many(todo, jobs) as tell, running.interruptible(stop), closing(side_by_side):
        for ended in side_by_side:
            tell(ended)
            if ended.status == "failed":
                raise FedaggError(ended.message)
    results = [
        result for config, own in places.items() if (result := done[config] or finished_result(own, given, model)) is not None
    ]
    return Comparison(results, target, interrupted=len(results) < len(configs))


def folder_name(config: Config, several: bool) -> str:
    return f"{config.method}-seed{config.seed}" if several else config.method


def in_folder(cell: Cell, store: Store, stop: Stop, several: bool, track: str) -> CellResult:
    """Make one of the runs, in its own process."""
    config, folder = cell.config, store.folder / folder_name(cell.config, several)
    try:
        plugins.load(config.plugin)
        begun = (folder / "config.toml").exists()
        follow = [*(trackers.make(name, folder) for name in trackers.split_names(track)), stop]
        given = running.data_of(config)
        new, old = (None, folder) if begun else (folder, None)
        result = fedagg.run(config, data=given, out=new, resume=old, callbacks=follow, progress=False)
    except FedaggError as error:
        return CellResult(cell, "failed", message=str(error))
    except Exception as error:  # passed to the other process, where not every error can be rebuilt
        why = f"{config.method} seed {config.seed}: {type(error).__name__}: {first_line(error)}"
        return CellResult(cell, "failed", message=why)
    return CellResult(cell, "stopped" if result.interrupted else "done", result.seconds, result.metric.shown(result.score))


def check_folder(place: Path, config: Config, folder: Path) -> None:
    """Refuse a folder that holds another run of the method. As with `--resume`, where it runs may change; its rounds may not."""
    if not (place / "config.toml").exists():
        return
    check_run(place)
    before, now = make(read(place / "config.toml"), recorded=True).flat(), config.flat()
    free = record.MAY_CHANGE - {"rounds", "stop_at", "patience"}
    differs = ", ".join(f"{k} {before.get(k)!r}" for k in before | now if before.get(k) != now.get(k) and k not in free)
    if differs:
        raise SettingError("out", str(folder), f"already contains a run of {config.method}, with {differs}; choose another folder")


class Ready(Exception):
    """Raised when a run would begin."""


class Stopper:
    """Ends a run before its first round."""

    def started(self, config: Config, done: int) -> None:
        raise Ready

    def round_done(self, row: dict[str, Any]) -> None: ...

    def finished(self, result: Result) -> None: ...


def check(
    config: Config,
    given: Dataset,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Do all checks of a run, up to its first round and without a folder, so that the last method is not refused after hours of
    training the first. One process does this alone, whatever the run's engine."""
    with suppress(Ready):
        alone = config.changed(engine="sequential")
        fedagg.run(alone, data=given, model=model, loss=loss, metric=metric, callbacks=[Stopper()], progress=False)


def finished_result(folder: Path, given: Dataset, model: nn.Module | None = None) -> Result | None:
    """The result in a run folder, if that run is finished."""
    facts = runs.read_json(folder / "result.json")
    if facts.get("interrupted") or not facts:
        return None
    run = runs.load(folder)
    if not facts.keys() >= set(numbers(run.metric)):
        return None
    rounds = facts.get("rounds") if facts.get("stopped") else run.config.rounds
    if not facts.get("rounds") == len(run.history) == rounds:  # it was resumed afterwards for more rounds
        return None
    module = build_model(run.config, given) if model is None else checks.copy_model(model)
    trained = runs.load_weights(module, folder / "model.safetensors")
    score, best, loss, seconds = (math.nan if facts[key] is None else facts[key] for key in numbers(run.metric))
    about: dict[str, Any] = {"run": folder, "metric": run.metric, "timing": facts.get("timing") or {}}
    result = Result(run.config, run.history, trained, score, best, loss, seconds, **about)
    return replace(result, figures={key: value for key, value in facts.items() if key not in result.summary()})
