"""`fedagg compare`: several methods on the same partition, participants and initial weights."""

from __future__ import annotations

import json
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedagg import comparison, plots, scores
from fedagg.algorithms import REGISTRY
from fedagg.callbacks import Callback
from fedagg.cli.process import leads
from fedagg.cli.reproduce import Board, Jobs
from fedagg.cli.show import err, out, show_sheet
from fedagg.cli.train import TRACK
from fedagg.cli.watch import Watch, watched
from fedagg.comparison import Comparison
from fedagg.errors import FedaggWarning, MissingError, SettingError
from fedagg.progress import Live
from fedagg.reproduce import running
from fedagg.reproduce.grid import Cell
from fedagg.reproduce.running import CellResult

TARGET = "also show the rounds and megabytes until this accuracy (or other metric) was reached, e.g. 0.8"


def compare(
    algorithms: Annotated[str, typer.Argument(help="methods, separated by commas, e.g. fedagg,fedavg,fedadam")],
    config: Annotated[Path | None, typer.Argument(help="a TOML file of settings", show_default=False)] = None,
    *,
    seeds: Annotated[int, typer.Option(help="number of seeds to run every method with, from --seed on", min=1)] = 1,
    target: Annotated[float | None, typer.Option(help=TARGET, show_default=False)] = None,
    jobs: Jobs = "1",
    track: Annotated[str | None, typer.Option("--track", help=TRACK, show_default=False)] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="folder of the comparison (default runs/<time>-compare)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress")] = False,
    watch: Watch = False,
    **settings: Any,
) -> int:
    """Run several methods side by side: one table, one plot, and a run folder each.

    With several seeds: mean and deviation, a band in the plot, and the differences from the first method, seed by seed, with a 95 %
    interval. To resume, run the same command again: finished runs in its folder are not run again.
    """
    preset = settings.pop("preset", None)
    names = algorithms.split(",")
    if config is not None and str(config) in REGISTRY and not config.exists():
        raise SettingError("config", str(config), f"is a method; separate methods by commas: {algorithms},{config}")
    configs, given = comparison.plan_runs(names, settings, config, preset, seeds)
    scores.check_target(target, comparison.judge(configs[0], given))
    side_by_side = running.processes(jobs, len(configs))
    folder = out_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare"
    shown = comparison.Watch() if quiet else comparison.Watch(live, board)
    try:
        with watched(folder, watch):
            found = comparison.carry_out(configs, folder, given, side_by_side, track or "", target, shown)
    except KeyboardInterrupt:
        hint(folder, out_dir)
        raise
    if found.interrupted:
        hint(folder, out_dir)
    if leads() and found.results:
        tell(found, folder / f"{found.metric.key}.png", as_json)
    return 130 if found.interrupted else 0


@contextmanager
def live(name: str) -> Iterator[Sequence[Callback]]:
    shown = Live(name)
    try:
        yield [shown]
    finally:
        shown.stop()


@contextmanager
def board(todo: list[Cell], jobs: int) -> Iterator[Callable[[CellResult], None]]:
    """A bar over all runs, if several run side by side."""
    seen: list[CellResult] = []
    with Board(len(todo), jobs) as shown:

        def ended(outcome: CellResult) -> None:
            seen.append(outcome)
            over = {one.cell for one in seen}
            shown.ended(outcome, [cell for cell in todo if cell not in over], seen)

        yield ended


def tell(found: Comparison, path: Path, as_json: bool) -> None:
    picture: Path | None = path
    try:
        plots.save(found.figure(), path)
    except MissingError as error:
        picture = None
        warnings.warn(str(error), FedaggWarning, stacklevel=2)
    if as_json:
        sys.stdout.write(json.dumps(found.json() | {"plot": picture and str(picture)}) + "\n")
        return
    show_sheet(found.sheet())
    if picture is not None:
        out.print(f"plot: {picture}", soft_wrap=True)


def hint(folder: Path, out_dir: Path | None) -> None:
    more = "" if out_dir is not None else f" with --out {shlex.quote(str(folder))}"
    err.print(f"stopped; the same command{more} resumes from here", style="yellow", markup=False, soft_wrap=True)
