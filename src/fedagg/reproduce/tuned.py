"""The tuned table: every method at the best point of its grid. In each setting, points are tried on training data that is held
back; the best is run again with other seeds and scored on the test set. Methods without a grid are run with their defaults.

Tables with a target are made here too: rounds and megabytes until it was reached.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedagg import paired, scores
from fedagg.config import Config
from fedagg.reproduce import formats
from fedagg.reproduce.grid import Cell, Row, Spec
from fedagg.reproduce.results import Measured, Store
from fedagg.reproduce.table import span
from fedagg.scores import Score, Standing
from fedagg.sheets import Sheet
from fedagg.tuning import HALVING, best_first, shortened

OURS = "fedagg"
Point = Mapping[str, Any]
FOLDER = "tuning"  # in the results folder: trials, kept apart from reported results


def trial_store(results: Path) -> Store:
    return Store(results / FOLDER)


def table_settings(spec: Spec) -> Iterator[tuple[Row, float]]:
    """The settings of the table. A row with its own share of clients appears once."""
    for participation in spec.participation:
        for row in spec.rows:
            own = row.settings.get("participation")
            if own is None or participation == spec.participation[0]:
                yield row, participation if own is None else own


def trial(spec: Spec, row: Row, method: str, participation: float, point: Mapping[str, Any], short: bool = False) -> Config:
    """The configuration for a point of the grid. It is scored once, at the end, on the data held back."""
    assert spec.tuning is not None
    config = spec.config(row, method, participation, spec.tuning.seeds[0], {"name": "", **point})
    config = shortened(config) if short else config
    return config.changed(validation=spec.tuning.validation, eval_every=config.rounds)


def with_seed(config: Config, seed: int) -> Config:
    return config.model_copy(update={"seed": seed})


def combinations(spec: Spec) -> list[tuple[Row, float, str]]:
    return [(row, share, method) for row, share in table_settings(spec) for method in spec.methods if spec.applies(row, method)]


def trials(spec: Spec, store: Store, short: bool) -> Iterator[Cell]:
    """The runs needed for the choice: short runs of all points, or full runs of those that are left. Seeds are the outer loop."""
    assert spec.tuning is not None
    cells = [
        Cell(row.name, method, trial(spec, row, method, share, point, short), describe_point(point))
        for row, share, method in combinations(spec)
        for point in points(spec, store, row, method, share, short)
    ]
    for seed in spec.tuning.seeds:
        yield from (replace(cell, config=with_seed(cell.config, seed)) for cell in cells)


def describe_point(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in point.items())


def points(spec: Spec, store: Store, row: Row, method: str, participation: float, short: bool) -> list[Point]:
    """The points of a method's grid to run: all, or the best quarter after short runs; none while one of these is missing."""
    assert spec.tuning is not None
    grid: list[Point] = list(spec.grid(row, method))
    if short or not spec.tuning.halving or not grid:
        return grid
    ranked = ranking(spec, store, row, method, participation, grid, short=True)
    return ranked[: math.ceil(len(grid) / HALVING)]


def ranking(
    spec: Spec, store: Store, row: Row, method: str, participation: float, candidates: Sequence[Point], short: bool = False
) -> list[Point]:
    """The points, best first; empty while one of their runs is missing."""
    assert spec.tuning is not None
    keys: list[tuple[tuple[float, float], Point]] = []
    for point in candidates:
        config = trial(spec, row, method, participation, point, short)
        found = [cell for seed in spec.tuning.seeds if (cell := store.get(with_seed(config, seed)))]
        if len(found) < len(spec.tuning.seeds):
            return []
        score, loss = (statistics.fmean(values) for values in zip(*((cell.score, cell.loss) for cell in found), strict=True))
        keys.append((best_first(found[0].metric.better(score), loss), point))
    return [point for _, point in sorted(keys, key=lambda each: each[0])]


def choice(spec: Spec, store: Store, row: Row, method: str, participation: float) -> Point | None:
    """The best point of a method's grid in this setting; None while one of its runs is missing, an empty one without a grid."""
    assert spec.tuning is not None
    if method not in spec.tuning.grids:
        return {}
    left = points(spec, store, row, method, participation, short=False)
    return next(iter(ranking(spec, store, row, method, participation, left)), None)


@dataclass(frozen=True)
class TableSetting:
    """One setting of the table: the results of every method, and the settings chosen for it (None: not yet)."""

    row: Row
    participation: float
    found: dict[str, list[Score]]
    chosen: dict[str, Point | None]
    variant: str = ""

    @property
    def split(self) -> str:
        return ", ".join(filter(None, (self.row.distribution, self.variant)))

    @property
    def about(self) -> list[str]:
        return [self.row.label, self.split, f"{100 * self.participation:g} %"]

    def values(self, method: str) -> dict[int, float]:
        return {one.seed: one.value for one in self.found.get(method, ())}

    @property
    def rival(self) -> str | None:
        """The best of the tuned methods."""
        means = {m: scores.mean([one.value for one in found]) for m, found in self.found.items() if found and self.chosen[m]}
        return max(means, key=lambda method: means[method]) if means else None

    def ahead(self, method: str | None) -> tuple[float, float]:
        """FedAgg's lead, seed by seed, with half of the 95 % interval."""
        return paired.difference(self.values(OURS), self.values(method)) if method else (math.nan, math.nan)


def finals(spec: Spec, store: Store) -> Iterator[Cell]:
    """The runs at the chosen settings, to be reported."""
    chosen = [(*each, choice(spec, store, each[0], each[2], each[1])) for each in combinations(spec)]
    for seed in range(spec.seeds):
        for row, participation, method, point in chosen:
            if point is not None:
                yield Cell(row.name, method, final(spec, row, method, participation, seed, point), describe_point(point))


def final(spec: Spec, row: Row, method: str, participation: float, seed: int, point: Mapping[str, Any]) -> Config:
    return spec.config(row, method, participation, seed, {"name": "", **point})


def gather(spec: Spec, store: Store, tries: Store) -> list[TableSetting]:
    """The table from the results folder; nothing is run."""
    made = []
    for (row, participation), variant in itertools.product(table_settings(spec), spec.variants):
        found: dict[str, list[Score]] = {}
        chosen: dict[str, Point | None] = {}
        for method in spec.methods:
            if spec.applies(row, method):
                point = chosen[method] = {} if spec.tuning is None else choice(spec, tries, row, method, participation)
                own = None if point is None else {**variant, **point}
                configs = [] if own is None else [final(spec, row, method, participation, s, own) for s in range(spec.seeds)]
                found[method] = [of_cell(seed, cell) for seed, config in enumerate(configs) if (cell := store.get(config))]
        made.append(TableSetting(row, participation, found, chosen, variant["name"]))
    return made


def of_cell(seed: int, cell: Measured) -> Score:
    columns = {name: cell.column(name) for name in ("loss", "bytes_up", "bytes_down", "passes")}
    return Score.of(cell, seed, cell.column(cell.metric.key), columns, cell.seconds)


def sheet(spec: Spec, found: list[TableSetting]) -> Sheet:
    """One row per setting, one column per method, and FedAgg's lead over the best rival."""
    ours = OURS in spec.methods and len(spec.methods) > 1
    heads = ["setting", "split", "clients", *map(formats.name, spec.methods), *(["FedAgg ahead of the best rival"] if ours else [])]
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for at, setting in enumerate(found):
        means = {m: scores.mean([one.value for one in group]) for m, group in setting.found.items() if group}
        best = max(means.values(), default=math.nan)
        cells = []
        for column, method in enumerate(spec.methods):
            cells.append(score_text(setting, method))
            if means.get(method) == best:
                bold.add((at, 3 + column))
        gap = scores.points(*setting.ahead(setting.rival))
        rows.append(
            [*setting.about, *cells, *([gap if gap == "-" else f"{gap} ({formats.name(str(setting.rival))})"] if ours else [])]
        )
    return Sheet(spec.title, heads, rows, records(spec, found, None), words=3, bold=frozenset(bold), notes=notes(spec, found))


def score_text(setting: TableSetting, method: str) -> str:
    if method not in setting.found:
        return "-"
    values = [one.value for one in setting.found[method]]
    return scores.points(scores.mean(values), paired.deviation(values), sign="") if values else "not run"


def details(spec: Spec, found: list[TableSetting], target: float | None) -> Sheet:
    """A row for every method in every setting, best first: rounds and megabytes to the target, FedAgg's lead, settings."""
    heads = ["setting", "split", "clients", "method", "accuracy"]
    heads += [f"{what} to {100 * target:g} %" for what in ("rounds", "MB")] if target is not None else []
    heads += ["FedAgg ahead by (95 %)", *(["settings"] if spec.tuning is not None else [])]
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    for setting in found:
        ranked = sorted(standings(setting, target), key=lambda one: -one.score)
        for number, one in enumerate(ranked):
            if number == 0:
                bold.add((len(rows), 4))
            gap = scores.points(*setting.ahead(one.method)) if one.method != OURS else "-"
            row = [*setting.about, formats.name(one.method), scores.points(one.score, one.deviation, sign="")]
            row += [*(one.to_target() if target is not None else ()), gap]
            rows.append(
                [*row, *([describe_point(setting.chosen[one.method] or {}) or "untuned"] if spec.tuning is not None else [])]
            )
    return Sheet(spec.title, heads, rows, records(spec, found, target), 4, frozenset(bold), notes(spec, found))


def standings(setting: TableSetting, target: float | None) -> list[Standing]:
    return scores.standings({method: group for method, group in setting.found.items() if group}, target)


def records(spec: Spec, found: list[TableSetting], target: float | None) -> list[dict[str, Any]]:
    """The numbers, one line for every method in every setting; `ahead` is relative to FedAgg."""

    made = []
    for setting in found:
        about = {"table": spec.name, "row": setting.row.name, "setting": setting.row.label, "split": setting.split}
        for one in standings(setting, target):
            ahead, within = (math.nan, math.nan) if one.method == OURS else setting.ahead(one.method)
            own = replace(one, ahead=-ahead, within=within).record()
            more = {} if spec.tuning is None else {"settings": describe_point(setting.chosen[one.method] or {})}
            made.append({**about, "participation": setting.participation, **own, **more})
    return made


def notes(spec: Spec, found: list[TableSetting]) -> list[str]:
    counts = {len(group) for setting in found for group in setting.found.values() if group}
    if not counts:
        return ["Nothing of this was run yet."]
    text = [f"Test accuracy in percent, mean ± standard deviation over {span(counts)} seeds; bold is the best."]
    if spec.tuning is not None and spec.tuning.grids:
        who = [m for m in spec.methods if m not in spec.tuning.grids]
        sizes = {len(points) for setting in found for m in spec.methods if (points := spec.grid(setting.row, m))}
        seeds = f"seed{'s' * (len(spec.tuning.seeds) > 1)} {' and '.join(map(str, spec.tuning.seeds))}"
        how = f"{seeds} on {100 * spec.tuning.validation:g} % of the training data"
        as_they_are = f" {' and '.join(map(formats.name, who))}: not tuned." if who else ""
        text.append(
            f"Every method has the best of {span(sizes)} settings, chosen for each row with {how} that were held back.{as_they_are}"
        )
        if spec.tuning.halving:
            text.append("All of these were run for a quarter of the rounds, and the best quarter of them for all.")
    if OURS in spec.methods:
        text.append("FedAgg's lead is the mean difference over seeds, with its 95 % interval.")
    if spec.rounds_scale != 1:
        text.append(f"Rounds are {spec.rounds_scale:g} of the usual number.")
    if any(not group for setting in found for group in setting.found.values()):
        text.append("Cells marked “not run” were not measured here.")
    return text
