"""How runs are judged: by their final figure and by the cost of reaching a target. Methods are judged by means over their seeds.
Every table of runs uses this."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Protocol

from fedagg import paired
from fedagg.errors import SettingError
from fedagg.measure import ACCURACY, Measure
from fedagg.sheets import Sheet


class Judged(Protocol):
    """A result, a cell of a results folder, or an entry of a report."""

    @property
    def score(self) -> float: ...

    @property
    def metric(self) -> Measure: ...


def points(value: float, half: float, sign: str = "+", metric: Measure = ACCURACY) -> str:
    """A difference with half of its interval, or a mean with its deviation, in points."""
    if not math.isfinite(value):
        return "-"
    return metric.points(value, sign) + (f" ± {metric.points(half)}" if math.isfinite(half) else "")


def check_target(target: float | None, metric: Measure = ACCURACY) -> None:
    """Refuse an impossible target: a percentage must be a share, other figures may be any number."""
    if target is not None and metric.percent and not 0 < target <= 1:
        words = f"give the {metric.label} to reach as a share, above 0 and at most 1, e.g. 0.8"
        raise SettingError("target", target, words)
    if target is not None and not math.isfinite(target):
        raise SettingError("target", target, f"give the {metric.label} to reach, a finite number")


@dataclass(frozen=True)
class Score:
    """One run: its figure and loss, the figure after each round (None if it was not measured), the bytes sent until then, and the
    number of client trainings."""

    seed: int
    value: float
    loss: float
    curve: Sequence[float | None]
    sent: Sequence[float]
    trainings: float
    seconds: float
    metric: Measure = ACCURACY

    @classmethod
    def of(
        cls, run: Judged, seed: int, curve: Sequence[float | None], columns: Mapping[str, Sequence[Any]], seconds: float
    ) -> Score:
        """A score from the columns of a record, one value per round; `curve` is the column of the run's metric."""
        counted = [*columns["bytes_up"], *columns["bytes_down"], *columns["passes"]]
        if None in counted:  # a record of an early version
            sent, trainings = [math.nan] * len(curve), math.nan
        else:
            sent = list(accumulate(map(sum, zip(columns["bytes_up"], columns["bytes_down"], strict=True))))
            trainings = sum(columns["passes"])
        losses = [value for value in columns["loss"] if value is not None]
        last = losses[-1] if losses else math.nan
        return cls(seed, run.score, last, curve, sent, trainings, seconds, run.metric)

    @property
    def best(self) -> float:
        return self.metric.best(value for value in self.curve if value is not None)

    def reached(self, target: float) -> tuple[int, float] | None:
        """The first round after which the figure reached the target, and the bytes sent until then."""
        better = self.metric.better
        rounds = (t for t, value in enumerate(self.curve) if value is not None and better(value) >= better(target))
        first = next(rounds, None)
        return None if first is None else (first + 1, self.sent[first])


@dataclass(frozen=True)
class Standing:
    """The result of a method over its seeds, and its lead over the first method, with half of the 95 % interval. `reached` is the
    number of seeds that reached the target; rounds and megabytes to it are means over those."""

    method: str
    seeds: int
    score: float
    deviation: float
    best: float
    loss: float
    trainings: float
    megabytes: float
    seconds: float
    ahead: float
    within: float
    target: float | None = None
    reached: int = 0
    rounds_to_target: float = math.nan
    megabytes_to_target: float = math.nan
    metric: Measure = ACCURACY

    def record(self) -> dict[str, Any]:
        """The fields for JSON, CSV and pandas: non-finite numbers are None, and without a target its fields are omitted."""
        leave = () if self.target is not None else ("target", "reached", "rounds_to_target", "megabytes_to_target")
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*leave, "metric")}
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in named.items()}
        return {self.metric.key if name == "score" else name: value for name, value in known.items()}

    def to_target(self) -> tuple[str, str]:
        """Rounds and megabytes to the target; if some seeds never reached it, also how many did."""
        if not self.reached:
            return "-", "-"
        some = f" ({self.reached} of {self.seeds})" if self.reached < self.seeds else ""
        return f"{self.rounds_to_target:.1f}".removesuffix(".0") + some, number(self.megabytes_to_target, ".1f")


def standings(groups: Mapping[str, Sequence[Score]], target: float | None = None) -> list[Standing]:
    """One row per method, each compared with the first."""
    values = {method: {one.seed: one.value for one in group} for method, group in groups.items()}
    first = next(iter(values.values()), {})
    made = []
    for method, group in groups.items():
        own = values[method]
        gap = (math.nan, math.nan) if own is first else paired.difference(own, first)
        until = [found for one in group if target is not None and (found := one.reached(target)) is not None]
        made.append(
            Standing(
                method,
                len(own),
                mean(list(own.values())),
                paired.deviation(list(own.values())),
                mean([one.best for one in group]),
                mean([one.loss for one in group]),
                mean([one.trainings for one in group]),
                mean([one.sent[-1] for one in group if one.sent]) / 1e6,
                mean([one.seconds for one in group]),
                *gap,
                target,
                len(until),
                mean([rounds for rounds, _ in until]),
                mean([sent for _, sent in until]) / 1e6,
                group[0].metric if group else ACCURACY,
            )
        )
    return made


def sheet(groups: Mapping[str, Sequence[Standing]], title: str, notes: Sequence[str] = (), head: str = "algorithm") -> Sheet:
    """One row per method, the best of its setting in bold; with several seeds also their number, the deviation and the difference
    from the first. The names of the settings are shown if there are several."""
    every = [one for found in groups.values() for one in found]
    several, settings = any(one.seeds > 1 for one in every), len(groups) > 1
    targets = {one.target for one in every if one.target is not None}
    paired_with = "the first" if settings else every[0].method if every else ""
    against = [f"against {paired_with} (95 %)"] if several and len(every) > len(groups) else []
    metrics = list(dict.fromkeys(one.metric for one in every))
    judged = metrics[0].label if len(metrics) == 1 else "score"
    heads = [
        *(["setting"] if settings else []),
        head,
        *(["seeds"] if several else []),
        judged,
        *against,
        "best",
        "loss",
        "trainings",
    ]
    ends = [f"{100 * t:g} %" if metrics[0].percent else f"{t:g}" for t in targets]
    heads += [f"{what} to {end}" for end in ends for what in ("rounds", "MB")]
    heads += ["MB sent", "seconds"]
    rows: list[list[str]] = []
    bold: set[tuple[int, int]] = set()
    records: list[dict[str, Any]] = []
    for setting, found in groups.items():
        best = found[0].metric.best(one.score for one in found) if found else math.nan
        for one in found:
            metric = one.metric
            if one.score == best:
                bold.add((len(rows), heads.index(judged)))
            row = [*([setting] if settings else []), one.method, *([str(one.seeds)] if several else [])]
            row += [metric.shown(one.score) + (f" ± {metric.points(one.deviation)}" if math.isfinite(one.deviation) else "")]
            row += [points(one.ahead, one.within, metric=metric)] if against else []
            row += [metric.shown(one.best), number(one.loss, ".4f"), number(one.trainings, "g")]
            row += one.to_target() if targets else []
            rows.append([*row, number(one.megabytes, ".1f"), number(one.seconds, ".1f")])
            records.append({**({"setting": setting} if settings else {}), **one.record()})
    return Sheet(title, heads, rows, records, words=1 + settings, bold=frozenset(bold), notes=notes)


def number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
