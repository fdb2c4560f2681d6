"""The content of a report: runs and grid cells in one form, grouped by setting, with means over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedagg import checkpoint, runs
from fedagg.checks import name_of
from fedagg.config import Config, make
from fedagg.errors import SettingError
from fedagg.measure import ACCURACY, CLIENTS, Measure
from fedagg.reproduce.formats import name as method_name
from fedagg.reproduce.results import Measured, Store
from fedagg.runs import Run
from fedagg.scores import Score, sheet, standings
from fedagg.sheets import Sheet
from fedagg.work import cross_entropy

Column = list[float | None]
# The figures of a round that have a chart, with their names; `labels` has the names of the first two.
FIGURES = {
    "accuracy": "",
    "loss": "",
    "train_loss": "training loss",
    "rate": "mean learning rate",
    "pace": "pace of the federation",
    "own_share": "λ, the own gradient's share",
    "drift": "mean distance a client moved",
    "epsilon": "privacy spent (ε)",
}
# Measures of progress to choose from, and the columns of the record that add up to them.
PROGRESS = {
    "rounds": ("round", ()),
    "work": ("samples computed on, all clients", ("samples",)),
    "bytes": ("bytes sent", ("bytes_up", "bytes_down")),
    "seconds": ("seconds", ("seconds",)),
}
SPENT = [column for _, columns in PROGRESS.values() for column in columns]


@dataclass(frozen=True)
class Entry:
    """One run or one grid cell."""

    config: Config
    rounds: int
    columns: dict[str, Column]
    score: float
    best: float
    loss: float
    environment: dict[str, Any]
    run: Run | None = None
    metric: Measure = ACCURACY  # what the run is judged by; its figures are stored under the name of accuracy
    by_client: dict[str, float] = field(default_factory=dict)  # final scores per client, if asked for

    @property
    def name(self) -> str:
        return self.run.name if self.run else f"{self.config.method} seed {self.config.seed} of the results folder"

    @property
    def finished(self) -> bool:
        """Is the run finished? Cells always are: a results folder has no others."""
        return self.run is None or self.rounds >= self.config.rounds

    def progress(self, by: str) -> Column | None:
        """The amount spent after each round; None if the record does not tell."""
        needed = [self.columns.get(name, []) for name in PROGRESS[by][1]]
        if any(len(column) != self.rounds or None in column for column in needed):
            return None
        if not needed:
            return [float(number) for number in range(1, self.rounds + 1)]
        return list(accumulate(sum(v for v in values if v is not None) for values in zip(*needed, strict=True)))

    def total(self, by: str) -> float | None:
        spent = self.progress(by)
        return spent[-1] if spent else None


@dataclass
class Series:
    """One method in one setting, over its seeds. `repeats` repeat a seed that is among the trials, and do not count."""

    name: str
    settings: str  # the name without the progress of the runs
    trials: list[Entry] = field(default_factory=list)
    repeats: list[Entry] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(trial.finished for trial in self.trials)

    def mean(self, values: Iterable[float | None]) -> tuple[float | None, float | None]:
        """Mean and standard deviation over seeds; (None, None) if a seed has no value."""
        known = [value for value in values if value is not None and math.isfinite(value)]
        if not known or len(known) < len(self.trials):
            return None, None
        return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None

    def curve(self, figure: str) -> tuple[Column, Column]:
        pairs = [self.mean(values) for values in zip(*(t.columns[figure] for t in self.trials), strict=False)]
        return [mean for mean, _ in pairs], [spread for _, spread in pairs]

    def progress(self, by: str) -> Column | None:
        spent = [trial.progress(by) for trial in self.trials]
        if any(one is None for one in spent):
            return None
        return [self.mean(values)[0] for values in zip(*(one for one in spent if one is not None), strict=False)]

    def scores(self) -> list[Score]:
        seconds = [trial.total("seconds") for trial in self.trials]
        spent = [math.nan if value is None else value for value in seconds]
        return [
            Score.of(t, t.config.seed, t.columns["accuracy"], t.columns, took) for t, took in zip(self.trials, spent, strict=True)
        ]


@dataclass
class Group:
    """One setting: data, model, split and clients, with the methods that ran in it."""

    name: str
    series: dict[str, Series] = field(default_factory=dict)

    @property
    def trials(self) -> list[Entry]:
        return [trial for one in self.series.values() for trial in one.trials]

    @property
    def metric(self) -> Measure:
        """The metric, which is the same for all runs of a setting."""
        return self.trials[0].metric


def labels(group: Group) -> dict[str, str]:
    """The names of figures in a setting's charts: the first two depend on the data that its runs are scored on."""
    configs, metric = [trial.config for trial in group.trials], group.metric
    score = f"{runs.metric_name(metric.label, configs)}{metric.unit}"
    return FIGURES | {"accuracy": score, "loss": runs.metric_name("loss", configs)}


@dataclass
class Content:
    title: str
    groups: list[Group]
    trials: list[Entry]
    store: Store | None = None
    notes: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)  # including those without a finished round


class Reader:
    """Reads run folders and results folders, once."""

    def run(self, folder: Path) -> Run:
        return runs.load(folder)

    def store(self, path: Path) -> Store:
        return Store(path)

    def unfinished(self, path: Path) -> list[Path]:
        """The runs of a results folder's unfinished cells that are to be shown."""
        return []


def gather(paths: Sequence[Path]) -> Content:
    """The content from run folders, folders of runs, or one results folder."""
    for path in paths:
        if not Store(path).files() and not runs.find(path):
            raise SettingError("what", str(path), "contains no runs and no results; give a run folder or a results folder")
    found = look(paths, Reader())
    if not found.trials:
        raise runs.no_round(paths)
    return found


def look(paths: Sequence[Path], reader: Reader) -> Content:
    """The content at present."""
    trials: list[Entry] = []
    folders: list[Path] = []
    store: Store | None = None
    for path in paths:
        if (found := reader.store(path)).files():
            if store is not None:
                raise SettingError("what", str(path), "a report takes one results folder; make a separate report for each")
            store = found
            trials += [from_cell(cell) for cell in store.all()]
        else:
            folders += runs.find(path)
        folders += reader.unfinished(path)
    known = runs.load_all(folders, reader.run)
    trials += [from_run(run) for run in known]
    begun = [trial for trial in trials if trial.rounds]
    title, groups = ", ".join(path.name or str(path.resolve()) for path in paths), group_entries(begun)
    return Content(title, groups, begun, store, left_out(trials, groups), known)


def table(content: Content, target: float | None = None) -> Sheet:
    """The results of the runs, one row for every method in every setting."""
    lines = {group.name: standings({n: one.scores() for n, one in group.series.items()}, target) for group in content.groups}
    return sheet(lines, content.groups[0].name if len(lines) == 1 else content.title, content.notes, "method")


def left_out(trials: Sequence[Entry], groups: Sequence[Group]) -> list[str]:
    """Which runs are in no mean, and why."""
    empty = [trial.name for trial in trials if not trial.rounds]
    again = [trial.name for group in groups for series in group.series.values() for trial in series.repeats]
    notes = {
        "Not shown, because they have no finished round": empty,
        "Left out of means and curves, as repeats of runs with the same settings and seed": again,
    }
    return [f"{why}: {', '.join(names)}." for why, names in notes.items() if names]


def group_entries(trials: Sequence[Entry]) -> list[Group]:
    """Group entries by setting and method. Other differences between runs of a method become part of its name. So does their
    progress, because a mean of a finished run and one in its second round would describe neither."""
    groups: dict[str, Group] = {}
    alike: dict[tuple[str, str], list[Entry]] = {}
    for trial, where in zip(trials, settings(trials), strict=True):
        groups.setdefault(where, Group(where))
        alike.setdefault((where, trial.config.method), []).append(trial)
    for (where, method), same in alike.items():
        details = [runs.details(trial.config) for trial in same]
        differ = runs.differing_settings(details)
        for trial, own in zip(same, details, strict=True):
            so_far = [] if trial.finished else [f"({trial.rounds} of {trial.config.rounds} rounds)"]
            words = " ".join([method_name(method), *(f"{k} {own[k]}" for k in differ)])
            name = " ".join([words, *so_far])
            series = groups[where].series.setdefault(name, Series(name, words))
            repeat = any(other.config.seed == trial.config.seed for other in series.trials)
            (series.repeats if repeat else series.trials).append(trial)
    for group in groups.values():  # FedAgg first, so that it has the same colour everywhere
        group.series = dict(sorted(group.series.items(), key=lambda item: not item[0].startswith("FedAgg")))
    return list(groups.values())


def settings(trials: Sequence[Entry]) -> list[str]:
    """Each trial's setting. If runs with equal descriptions were given different objects from Python, the folder of the first such
    run tells them apart."""
    kinds = [(setting(trial), python_inputs(trial)) for trial in trials]
    first: dict[tuple[str, str], Entry] = {}
    for kind, trial in zip(kinds, trials, strict=True):
        first.setdefault(kind, trial)
    often = Counter(where for where, _ in first)
    shared = {kind: t.run.folder for kind, t in first.items() if often[kind[0]] > 1 and kind[1] and t.run}
    tail = dict(zip(shared, runs.tails(list(shared.values())), strict=True))
    return [f"{kind[0]}, as in {tail[kind]}" if kind in tail else kind[0] for kind in kinds]


def setting(trial: Entry) -> str:
    """A description of a trial's setting; runs that are judged by different figures never have the same."""
    judged = "" if trial.metric.key == ACCURACY.key or trial.config.metric else f"judged by {trial.metric.label}"
    return ", ".join(filter(None, (*runs.task(trial.config).values(), judged)))


def python_inputs(trial: Entry) -> str:
    """Fingerprints of what came from Python and is not in the configuration; the folder if no checkpoint has them yet. Empty for
    all other runs."""
    if trial.run is None:
        return ""
    c, known = trial.config, checkpoint.identity(trial.run.folder / "checkpoints")
    if "custom" in (c.dataset, c.model, c.partition):
        return json.dumps(known, sort_keys=True) if known else str(trial.run.folder)
    loss = known.get("loss", name_of(cross_entropy))
    return "" if loss == name_of(cross_entropy) else loss


def from_cell(cell: Measured) -> Entry:
    columns = {name: cell.column(name) for name in (*FIGURES, *SPENT, "passes")} | {"accuracy": cell.column(cell.metric.key)}
    known = make(cell.config, recorded=True)
    figures = (cell.score, cell.best, cell.loss)
    return Entry(known, cell.rounds, columns, *figures, cell.environment, None, cell.metric, client_scores(cell.figures))


def from_run(run: Run) -> Entry:
    columns: dict[str, Column] = {name: [row.get(name) for row in run.history] for name in (*FIGURES, *SPENT, "passes")}
    columns["accuracy"] = [row.get(run.metric.key) for row in run.history]
    columns["rate"] = [mean(row.get("rate_mean")) for row in run.history]
    scored = [value for value in columns["accuracy"] if value is not None]
    losses = [value for value in columns["loss"] if value is not None]
    return Entry(
        run.config,
        len(run.history),
        columns,
        scored[-1] if scored else math.nan,
        run.metric.best(scored),
        losses[-1] if losses else math.nan,
        run.environment,
        run,
        run.metric,
        client_scores(next((row for row in reversed(run.history) if "client_mean" in row), {})),
    )


def client_scores(figures: Mapping[str, Any]) -> dict[str, float]:
    return {key: figures[key] for key in CLIENTS.values() if figures.get(key) is not None}


def mean(values: list[float] | None) -> float | None:
    return statistics.fmean(values) if values else None
