"""What people see: consoles and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedagg import paired, runs
from fedagg.config import Config
from fedagg.measure import ACCURACY, CLIENTS
from fedagg.progress import err as err  # for the commands, beside `out`

if TYPE_CHECKING:  # it takes seconds to import, and the names of methods can be shown without
    from fedagg.result import Result

out = Console()


def task(c: Config) -> str:
    """What a run's figures are about, in a line."""
    words = f"{c.dataset}, {c.model}, {c.partition}, {c.clients} clients, {100 * c.participation:g} % a round, seed {c.seed}"
    return f"{words}, scored on {runs.held_back(c)}" if c.validation else words


def waiting() -> Progress:
    """A bar for work without rounds, on standard error too. It is for whoever waits: it goes at the end, and no file gets it."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    return Progress(*columns, console=err, transient=True, disable=not err.is_interactive)


WIDE = 1000  # more than any table is


def results_table(results: list[Result], title: str) -> Table:
    """One row a run: the metric, local work, bytes, time; the best in bold. How clients fare, where that was asked for."""
    table = Table(title=title, title_justify="left")
    table.add_column("algorithm", no_wrap=True)
    metric = results[0].metric if results else ACCURACY
    by_client = {name: key for name, key in CLIENTS.items() if any(key in r.figures for r in results)}
    for name in (metric.label, "best", *by_client, "loss", "trainings", "MB sent", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    best = metric.best(r.score for r in results)
    for r in results:
        score = metric.shown(r.score)
        table.add_row(
            r.config.method,
            f"[bold green]{score}[/]" if r.score == best else score,
            metric.shown(r.best),
            *(metric.shown(r.figures.get(key, math.nan)) for key in by_client.values()),
            f"{r.loss:.4f}" if r.history else "-",
            str(sum(row["passes"] for row in r.history)),
            f"{sum(row['bytes_up'] + row['bytes_down'] for row in r.history) / 1e6:.1f}",
            f"{r.seconds:.1f}",
        )
    return whole_width(table)


def whole_width(table: Table) -> Table:
    """A terminal breaks lines; a figure cut short would be gone."""
    whole = out.measure(table, options=out.options.update(max_width=WIDE)).maximum
    table.width = whole if whole > out.width else None
    return table


@dataclass(frozen=True)
class Seeds:
    """What a method came to over several seeds, and how far it is ahead of the first one, with half of the 95 % interval."""

    method: str
    seeds: int
    accuracy: float
    deviation: float
    megabytes: float
    seconds: float
    ahead: float
    within: float

    def json(self) -> dict[str, Any]:
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


def summed(groups: Mapping[str, Sequence[Result]]) -> list[Seeds]:
    """A line a method. A run that was interrupted is not counted."""
    scores = {method: {r.config.seed: r.accuracy for r in group if not r.interrupted} for method, group in groups.items()}
    first = next(iter(scores.values()))
    made = []
    for method, own in scores.items():
        whole = [r for r in groups[method] if not r.interrupted]
        count = max(1, len(whole))
        sent = sum(row["bytes_up"] + row["bytes_down"] for r in whole for row in r.history) / 1e6 / count
        accuracy = sum(own.values()) / len(own) if own else math.nan
        spent = sum(r.seconds for r in whole) / count
        gap = (math.nan, math.nan) if own is first else paired.difference(own, first)
        made.append(Seeds(method, len(own), accuracy, paired.deviation(list(own.values())), sent, spent, *gap))
    return made


def seeds_table(found: Sequence[Seeds], title: str) -> Table:
    """One row a method: means over seeds, the best in bold, and the difference from the first method in points."""
    table = Table(title=title, title_justify="left")
    table.add_column("algorithm", no_wrap=True)
    for name in ("seeds", "accuracy", f"against {found[0].method} (95 %)", "MB sent", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    best = max((one.accuracy for one in found if math.isfinite(one.accuracy)), default=math.nan)
    for one in found:
        accuracy = f"{ACCURACY.shown(one.accuracy)}{f' ± {100 * one.deviation:.2f}' if math.isfinite(one.deviation) else ''}"
        ahead = f"{100 * one.ahead:+.2f}{f' ± {100 * one.within:.2f}' if math.isfinite(one.within) else ''}"
        table.add_row(
            one.method,
            str(one.seeds),
            f"[bold green]{accuracy}[/]" if one.accuracy == best else accuracy,
            ahead if math.isfinite(one.ahead) else "-",
            f"{one.megabytes:.1f}",
            f"{one.seconds:.1f}",
        )
    return whole_width(table)
