"""Output for users: consoles and tables."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedagg import runs
from fedagg.config import Config
from fedagg.measure import ACCURACY, CLIENTS
from fedagg.progress import err as err  # for the commands, like `out`

if TYPE_CHECKING:  # slow to import, and methods can be listed without it
    from fedagg.result import Result
    from fedagg.sheets import Sheet

out = Console(emoji=False)


def task(c: Config) -> str:
    """One line that says what a run's figures refer to."""
    words = f"{c.dataset}, {c.model}, {c.partition}, {c.clients} clients, {100 * c.participation:g} % a round, seed {c.seed}"
    return f"{words}, scored on {runs.held_back(c)}" if c.validation else words


def waiting() -> Progress:
    """A bar on standard error for work without rounds. It disappears at the end, and is not written to files."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    return Progress(*columns, console=err, transient=True, disable=not err.is_interactive)


WIDE = 1000  # wider than any table


def results_table(results: list[Result], title: str) -> Table:
    """One row per run: metric, local work, bytes, time, and scores per client if asked for; the best in bold."""
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
    """The table at its full width: a terminal can wrap lines, but a figure that is cut off is lost."""
    whole = out.measure(table, options=out.options.update(max_width=WIDE)).maximum
    table.width = whole if whole > out.width else None
    return table


def show_sheet(sheet: Sheet, form: str = "text") -> None:
    """Print a table on standard output, in one of its formats."""
    if form != "text" or not out.is_terminal:  # a pipe has no width
        sys.stdout.write(sheet.render(form))
        return
    out.print(whole_width(sheet.rich()), crop=False)
    for note in sheet.notes:
        out.print(note, markup=False, highlight=False, style="dim")


def percent(share: float) -> str:
    """A share as a percentage; "-" before the first round."""
    return f"{100 * share:.2f} %" if math.isfinite(share) else "-"
