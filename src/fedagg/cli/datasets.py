"""`fedagg data fetch|verify|where`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedagg import data
from fedagg.cli.show import err, out

app = typer.Typer(help="Download and verify data sets, or show where they are.", no_args_is_help=True)
Dir = Annotated[Path | None, typer.Option("--data-dir", help="where data sets are (default FEDAGG_DATA, else the user's cache)")]


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="data set, see `fedagg list`")], data_dir: Dir = None) -> None:
    """Download a data set from its publisher and check it; files that are already there and correct are kept."""
    out.print(str(data.fetch(name, data_dir)), soft_wrap=True)


@app.command()
def verify(name: Annotated[str, typer.Argument(help="data set, see `fedagg list`")], data_dir: Dir = None) -> int:
    """Check every file of a data set against its published checksum."""
    checked = data.verify(name, data_dir)
    for path, good in checked:
        (out if good else err).print(f"{'ok ' if good else 'BAD'} {path}", soft_wrap=True)
    return 0 if all(good for _, good in checked) else 2


@app.command()
def where(data_dir: Dir = None) -> None:
    """Print the folder in which data sets are expected."""
    out.print(str(data.where(data_dir)), soft_wrap=True)
