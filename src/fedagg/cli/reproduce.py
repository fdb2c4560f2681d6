"""`fedagg reproduce`: the paper's tables and figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fedagg import files, plots, plugins, scores
from fedagg.callbacks import Callback
from fedagg.cli.catalogue import Plugin
from fedagg.cli.show import err, out, show_sheet
from fedagg.config import Config
from fedagg.errors import SettingError, unknown
from fedagg.reproduce import figures, formats, grid, running, table, tuned
from fedagg.reproduce.grid import Cell, Spec
from fedagg.reproduce.results import Store
from fedagg.reproduce.running import CellResult, Stop
from fedagg.result import Result

ABOUT = "a table or figure of the paper, `all`, `table-tuned`, `table-letters`, `quick`, or your own TOML file"
ROWS = "rows, by name or by the beginning of the name, e.g. mnist-linear,cifar10-cnn-iid"
SEEDS = "seeds 0, 1, ... of every cell (default 3; 5 for table-tuned)"
TUNING_SEEDS = "for table-tuned: the seeds with which settings are chosen (default 5,6)"
HALVING = "for table-tuned: run all settings for a quarter of the rounds, and only the best quarter of them for all rounds"
TARGET = "for tables: a row for every method, with the rounds and megabytes until this accuracy was reached, e.g. 0.8"
RESULTS = "the results folder; finished cells in it are not run again"
SHOW = "run nothing; show what is in the results folder"
LIMIT = "stop cleanly after this many seconds; the same command resumes"
JOBS = "runs at once, each in its own process with a share of the cores; auto for one per core"
Jobs = Annotated[str, typer.Option("--jobs", help=JOBS, metavar="N|auto")]
DATA = "where data sets are (default FEDAGG_DATA, else the user's cache)"


def reproduce(
    what: Annotated[str, typer.Argument(help=ABOUT)],
    *,
    rows: Annotated[str | None, typer.Option(help=ROWS)] = None,
    algorithms: Annotated[str | None, typer.Option(help="methods in place of the paper's, or `all`")] = None,
    participation: Annotated[str | None, typer.Option(help="shares of clients in a round, e.g. 0.2,1.0")] = None,
    seeds: Annotated[int | None, typer.Option(help=SEEDS, min=1, show_default=False)] = None,
    tuning_seeds: Annotated[str | None, typer.Option(help=TUNING_SEEDS, show_default=False)] = None,
    halving: Annotated[bool, typer.Option("--halving", help=HALVING)] = False,
    target: Annotated[float | None, typer.Option(help=TARGET, show_default=False)] = None,
    rounds_scale: Annotated[float, typer.Option(help="share of the paper's rounds to run, for a quick trial")] = 1.0,
    results: Annotated[Path, typer.Option(help=RESULTS)] = Path("results"),
    show: Annotated[bool, typer.Option("--show", "--no-run", help=SHOW)] = False,
    form: Annotated[str, typer.Option("--format", help=f"format of tables: {', '.join(formats.FORMATS)}")] = "text",
    jobs: Jobs = "1",
    time_limit: Annotated[float | None, typer.Option(help=LIMIT, min=0)] = None,
    plugin: Plugin = None,
    fetch: Annotated[bool, typer.Option(help="download data that is missing")] = True,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:0, ...")] = None,
    engine: Annotated[str | None, typer.Option(help="where clients run: auto, sequential, batched")] = None,
    chunk: Annotated[int | None, typer.Option(help="clients trained together; 0 chooses from the free memory")] = None,
    threads: Annotated[int | None, typer.Option(help="processor threads of a cell")] = None,
    eval_every: Annotated[int | None, typer.Option(help="rounds from one evaluation to the next")] = None,
    data_dir: Annotated[Path | None, typer.Option(help=DATA)] = None,
    drawn: Annotated[Path | None, typer.Option("--figures", help="where figures go (default RESULTS/figures)")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="only fill the results folder: no table, no figure")] = False,
) -> int:
    """Run what a table or figure of the paper needs, and show it beside the paper's numbers.

    Cells that are already in the results folder are not run again. Ctrl-C stops after the current round, and the
    same command resumes from there.
    """
    if form not in formats.FORMATS:
        raise unknown("format", form, formats.FORMATS)
    where: dict[str, Any] = {"device": device, "engine": engine, "chunk": chunk, "threads": threads}
    where |= {
        "eval_every": eval_every,
        "data_dir": str(data_dir) if data_dir else None,
        "plugin": plugins.parse_names(plugin) or None,
    }
    plugins.load(plugins.parse_names(plugin))
    specs = [
        grid.narrow(
            spec,
            rows=patterns,
            methods=words(algorithms),
            participation=shares(participation),
            seeds=seeds,
            rounds_scale=rounds_scale,
            overrides={k: v for k, v in where.items() if v is not None},
            tuning_seeds=numbers("tuning-seeds", tuning_seeds) if tuning_seeds is not None else None,
            halving=halving,
        )
        for spec, patterns in choose_specs(what, words(rows))
    ]
    scores.check_target(target)
    if not quiet and any(spec.kind not in ("table", "tuned") for spec in specs):
        plots.require_matplotlib()
    store = Store(results)
    status = 0
    if not show:
        files.folder(results / ".partial", "results")
        until = time.time() + time_limit if time_limit is not None else None
        plain = [cell for spec in specs if spec.tuning is None for cell in grid.cells(spec)]
        status = run_all(plain, store, jobs, until, fetch)
        for spec in specs if status != 130 else []:
            if spec.tuning is not None:
                status = max(status, run_tuned(spec, store, jobs, until, fetch))
    for spec in [] if quiet else specs:
        if spec.tuning is not None or (spec.kind == "table" and target is not None):
            found = tuned.gather(spec, store, tuned.trial_store(results))
            wide = target is None and form != "csv"
            show_sheet(tuned.sheet(spec, found) if wide else tuned.details(spec, found, target), form)
        elif spec.kind == "table":
            also = grid.every_method() if algorithms is None else ()
            sys.stdout.write(formats.render(table.build(spec, store, also), form, out))
        else:
            draw(spec, store, drawn or results / "figures")
    return status


def choose_specs(what: str, rows: list[str] | None) -> list[tuple[Spec, list[str] | None]]:
    """The specifications with their rows; for `all`, those that have any of the given rows."""
    if what != "all":
        return [(grid.load(what), rows)]
    specs = [grid.load(name) for name in grid.names()]
    if rows is None:
        return [(spec, None) for spec in specs]
    known = [row.name for spec in specs for row in spec.rows]
    for pattern in rows:
        if not any(grid.matches(name, pattern) for name in known):
            raise unknown("rows", pattern, known)
    own = [(spec, [p for p in rows if any(grid.matches(row.name, p) for row in spec.rows)]) for spec in specs]
    return [(spec, patterns) for spec, patterns in own if patterns]


def run_tuned(spec: Spec, store: Store, jobs: int | str, until: float | None, fetch: bool) -> int:
    """Run the points of every grid on the data held back, then the best ones on the test set."""
    assert spec.tuning is not None
    tries, status = tuned.trial_store(store.folder), 0
    phases = {"short runs": True, "choosing settings": False} if spec.tuning.halving else {"choosing settings": False}
    last = len(phases) + 1
    for number, (what, short) in enumerate(phases.items(), start=1):
        cells = list(tuned.trials(spec, tries, short))
        status = max(status, run_all(cells, tries, jobs, until, fetch, f"{number} of {last}, {what}"))
        if status == 130:
            return status
    return max(status, run_all(list(tuned.finals(spec, tries)), store, jobs, until, fetch, f"{last} of {last}, test set"))


def draw(spec: Spec, store: Store, folder: Path) -> None:
    paths = figures.draw(spec, store, files.folder(folder, "figures"), plots.FORMATS)
    for path in paths:
        out.print(str(path), soft_wrap=True, highlight=False)
    if not paths:
        err.print(f"[yellow]{spec.name}: nothing to draw yet[/]", highlight=False)


def run_all(cells: list[Cell], store: Store, jobs: int | str, until: float | None, fetch: bool, what: str = "cells") -> int:
    """Run what is missing, with a progress display; 1 if a cell failed, 130 after Ctrl-C."""
    todo = running.unfinished(cells, store)
    jobs = running.processes(jobs, len(todo))
    if not todo:
        return 0
    stop = Stop(until)
    seen: list[CellResult] = []
    with Board(len(todo), jobs, what) as board, running.interruptible(stop):
        for outcome in running.run(todo, store, stop=stop, jobs=jobs, fetch=fetch, watch=board.watch):
            seen.append(outcome)
            ended = {o.cell for o in seen}
            board.ended(outcome, [cell for cell in todo if cell not in ended], seen)
    return tell(seen, len(todo), stop)


def tell(seen: list[CellResult], total: int, stop: Stop) -> int:
    count = {status: sum(o.status == status for o in seen) for status in ("done", "failed", "no data")}
    for why in dict.fromkeys(o.message for o in seen if o.status == "no data"):
        err.print(f"[yellow]not run[/]: {why}", highlight=False, soft_wrap=True)
    left = total - sum(count.values())
    if left or count["failed"]:
        text = f"{count['done']} of {total} cells done, {count['failed']} failed, {left} left"
        why = "stopped" if stop.flag.is_set() else "time is up" if stop.now() else "finished"
        err.print(f"{why}: {text}; the same command resumes from here", highlight=False)
    return 130 if stop.flag.is_set() else 1 if count["failed"] else 0


class Board:
    """Progress over the grid, on standard error: a bar that stays, and a line for every cell that ends."""

    def __init__(self, total: int, jobs: int, what: str = "runs") -> None:
        self.jobs, self.total, self.number = jobs, total, 0
        self.progress = Progress(
            TextColumn(f"[bold]{what}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("[dim]{task.fields[now]}"),
            console=err,
        )
        self.task = self.progress.add_task("", total=total, left="", now="")

    def __enter__(self) -> Board:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def watch(self, cell: Cell) -> list[Callback]:
        return [Rounds(cell, lambda text: self.progress.update(self.task, now=text))]

    def ended(self, outcome: CellResult, todo: list[Cell], seen: list[CellResult]) -> None:
        self.number += 1
        seconds = running.time_left(todo, seen, self.jobs)
        left = "" if seconds is None else f"{clock(seconds)} left"
        self.progress.update(self.task, completed=len(seen), left=left)
        colour = {"done": "green", "failed": "red"}.get(outcome.status, "yellow")
        figure = f" {outcome.figure if outcome.figure is not None else outcome.message}"
        if outcome.status != "no data":
            text = f"{self.number}/{self.total} {outcome.cell.label}: [{colour}]{outcome.status}[/]"
            self.progress.console.print(text, end="", highlight=False)
            self.progress.console.print(figure, f"in {outcome.seconds:.1f} s", left, markup=False, highlight=False)


class Rounds:
    """Reports the progress of the current cell to the board."""

    def __init__(self, cell: Cell, tell: Callable[[str], None]) -> None:
        self.cell, self.tell = cell, tell

    def started(self, config: Config, done: int) -> None:
        self.tell(f"{self.cell.label}: {done}/{config.rounds}")

    def round_done(self, row: dict[str, Any]) -> None:
        self.tell(f"{self.cell.label}: {row['round']}/{self.cell.config.rounds}")

    def finished(self, result: Result) -> None:
        self.tell("")


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def words(given: str | None) -> list[str] | None:
    return [word.strip() for word in given.split(",") if word.strip()] if given is not None else None


def numbers(setting: str, given: str) -> list[int]:
    found = [word.strip() for word in given.split(",") if word.strip()]
    if not all(word.isdecimal() for word in found):
        raise SettingError(setting, given, "give whole numbers, separated by commas, e.g. 5,6")
    return [int(word) for word in found]


def shares(given: str | None) -> list[float] | None:
    try:
        values = [float(word) for word in words(given) or []]
    except ValueError:
        raise SettingError("participation", given, "give shares in (0, 1], separated by commas, e.g. 0.2,1.0") from None
    if not all(0 < value <= 1 for value in values):
        raise SettingError("participation", given, "give shares in (0, 1], separated by commas, e.g. 0.2,1.0")
    return values or None
