"""What a report shows: runs and grid cells in one form, gathered by setting, with means over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedagg import runs
from fedagg.config import Config, make
from fedagg.errors import SettingError
from fedagg.reproduce.formats import name as method_name
from fedagg.reproduce.results import Measured, Store
from fedagg.runs import Run

Column = list[float | None]
FIGURES = ("accuracy", "loss", "train_loss", "drift", "drift_max", "rate")
# What a reader can count progress by, and the columns of the record that add up to it.
PROGRESS = {
    "rounds": ("round", ()),
    "work": ("samples computed on, all clients", ("samples",)),
    "bytes": ("bytes sent", ("bytes_up", "bytes_down")),
    "seconds": ("seconds", ("seconds",)),
}


@dataclass(frozen=True)
class Trial:
    """One run or one grid cell."""

    config: Config
    rounds: int
    columns: dict[str, Column]
    accuracy: float
    best: float
    loss: float
    environment: dict[str, Any]
    run: Run | None = None

    def progress(self, by: str) -> Column | None:
        """How much had been spent after each round; None where the record does not tell."""
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
    """One method in one setting, over its seeds."""

    name: str
    trials: list[Trial] = field(default_factory=list)

    def mean(self, values: Iterable[float | None]) -> tuple[float | None, float | None]:
        """Mean and standard deviation over seeds; (None, None) where a seed has no value."""
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


@dataclass
class Group:
    """One setting: data, model, split and clients, with the methods that ran in it."""

    name: str
    series: dict[str, Series] = field(default_factory=dict)


@dataclass
class Content:
    title: str
    groups: list[Group]
    trials: list[Trial]
    store: Store | None = None


def gather(paths: Sequence[Path]) -> Content:
    """From run folders, folders of runs, or one results folder."""
    trials: list[Trial] = []
    store: Store | None = None
    for path in paths:
        if (path / "cells").is_dir():
            if store is not None:
                raise SettingError("what", str(path), "one results folder a report; give the others a report of their own")
            store = Store(path)
            trials += [from_cell(cell) for cell in store.all()]
        elif found := runs.find(path):
            trials += [from_run(runs.load(folder)) for folder in found]
        else:
            raise SettingError("what", str(path), "holds no run and no results; give a run folder or a results folder")
    trials = [trial for trial in trials if trial.rounds]
    if not trials:
        raise SettingError("what", ", ".join(map(str, paths)), "has no finished round yet")
    return Content(", ".join(path.name or str(path.resolve()) for path in paths), grouped(trials), trials, store)


def grouped(trials: Sequence[Trial]) -> list[Group]:
    """By setting and method; what else differs between runs of a method becomes part of its name."""
    groups: dict[str, Group] = {}
    alike: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        where = setting(trial.config)
        groups.setdefault(where, Group(where))
        alike.setdefault((where, trial.config.method), []).append(trial)
    for (where, method), same in alike.items():
        settings = [trial.config.model_dump(exclude=TOLD | UNTOLD) for trial in same]
        differ = [k for k in settings[0] if any(one[k] != settings[0][k] for one in settings)]
        for trial, own in zip(same, settings, strict=True):
            name = " ".join([method_name(method), *(f"{k} {own[k]}" for k in differ)])
            series = groups[where].series.setdefault(name, Series(name))
            if all(other.config.seed != trial.config.seed for other in series.trials):
                series.trials.append(trial)
    for group in groups.values():  # FedAgg first, so that it has the same colour everywhere
        group.series = dict(sorted(group.series.items(), key=lambda item: not item[0].startswith("FedAgg")))
    return list(groups.values())


def setting(config: Config) -> str:
    split = f"{config.partition} {config.sigma:g}" if config.partition.startswith("dirichlet") else config.partition
    share = f"{100 * config.participation:g} % of {config.clients} clients"
    return f"{config.dataset}, {config.model}, {split}, {share}, {config.rounds} rounds"


# What tells settings apart or has a column of its own, and what has no bearing on the outcome.
TOLD = {"dataset", "model", "partition", "sigma", "participation", "clients", "rounds", "seed", "algorithm", "variant"}
UNTOLD = {"device", "engine", "threads", "chunk", "data_dir", "checkpoint_every", "client_memory", "eval_every"}


def from_cell(cell: Measured) -> Trial:
    names = ("accuracy", "loss", "train_loss", "drift", "rate", "samples", "bytes_up", "bytes_down", "seconds")
    columns = {name: cell.column(name) for name in names}
    columns["drift_max"] = [None] * cell.rounds
    known = {k: v for k, v in cell.config.items() if k in Config.model_fields}
    return Trial(make(known), cell.rounds, columns, cell.accuracy, cell.best_accuracy, cell.loss, cell.environment)


def from_run(run: Run) -> Trial:
    names = ("accuracy", "loss", "train_loss", "drift", "drift_max", "samples", "bytes_up", "bytes_down", "seconds")
    columns: dict[str, Column] = {name: [row.get(name) for row in run.history] for name in names}
    columns["rate"] = [mean(row.get("rate_mean")) for row in run.history]
    scored = [value for value in columns["accuracy"] if value is not None]
    losses = [value for value in columns["loss"] if value is not None]
    return Trial(
        run.config,
        len(run.history),
        columns,
        scored[-1] if scored else math.nan,
        max(scored, default=math.nan),
        losses[-1] if losses else math.nan,
        run.environment,
        run,
    )


def mean(values: list[float] | None) -> float | None:
    return statistics.fmean(values) if values else None
