"""`fedagg report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedagg.cli.show import out

WHAT = "run folders, folders of runs (of `fedagg compare`), or a results folder (of `fedagg reproduce`)"


def report(
    what: Annotated[list[Path], typer.Argument(help=WHAT)],
    *,
    path: Annotated[Path, typer.Option("--out", "-o", help="the page")] = Path("report.html"),
) -> None:
    """Make a web page of runs or of a grid: curves, learning rates, drift, tables. It opens without a network."""
    from fedagg.report import write

    out.print(str(write(what, path)), soft_wrap=True, highlight=False)
