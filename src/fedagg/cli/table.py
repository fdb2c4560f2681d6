"""`fedagg table`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedagg import scores, sheets
from fedagg.cli.compare import TARGET
from fedagg.cli.report import WHAT
from fedagg.cli.show import show_sheet
from fedagg.report import content


def table(
    what: Annotated[list[Path], typer.Argument(help=WHAT)],
    *,
    form: Annotated[str, typer.Option("--format", help=", ".join(sheets.FORMATS))] = "text",
    target: Annotated[float | None, typer.Option(help=TARGET, show_default=False)] = None,
) -> None:
    """Show the results of runs: means over seeds, differences from the first method, and costs.

    Runs are grouped by data, model, split, clients and method, as in a report.
    """
    sheets.check_format(form)
    scores.check_target(target)
    show_sheet(content.table(content.gather(what), target), form)
