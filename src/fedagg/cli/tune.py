"""`fedagg tune`: choose a method's best settings on training data that is held back; `fedagg sweep`: a grid without a choice."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedagg import files, sheets
from fedagg.cli.compare import hint
from fedagg.cli.reproduce import Jobs, numbers, run_all
from fedagg.cli.show import err, out, show_sheet
from fedagg.comparison import check
from fedagg.config import Config, collect_settings, options_of
from fedagg.errors import FedaggWarning, MissingError, SettingError
from fedagg.from_config import chosen_data
from fedagg.reproduce import running
from fedagg.reproduce.results import Store, in_json
from fedagg.tuning import SEEDS, TASK, VALIDATION, Found, Plan, R, Run, Swept, finite, score

GRID = "a setting or option and the values to try, e.g. lr=0.01,0.1; give --grid once for each axis"
RANDOM = "try only this many points of the grid, drawn at random"
HALVING = "run all points for a quarter of the rounds, and only the best quarter of them for all rounds"
TRIALS = "let Optuna choose this many points between the ends of the axes (needs the extra optuna)"
HELD_BACK = f"share of the training data held back, to score on (default {VALIDATION})"
OUT = "folder of results, picture and best.toml (default runs/<time>-tune-<method>)"
OUT_SWEEP = "folder of results and picture (default runs/<time>-sweep-<method>)"
Method = Annotated[str, typer.Argument(help="the method: see `fedagg list`")]
File = Annotated[Path | None, typer.Argument(help="a TOML file of settings", show_default=False)]
Grid = Annotated[list[str], typer.Option("--grid", help=GRID)]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]


def tune(
    algorithm: Method,
    config: File = None,
    *,
    grid: Grid,
    seeds: Annotated[str, typer.Option(help="seeds to run every point with")] = ",".join(map(str, SEEDS)),
    random: Annotated[int | None, typer.Option(help=RANDOM, show_default=False)] = None,
    halving: Annotated[bool, typer.Option("--halving", help=HALVING)] = False,
    trials: Annotated[int | None, typer.Option("--trials", help=TRIALS, show_default=False)] = None,
    validation: Annotated[float | None, typer.Option(help=HELD_BACK, show_default=False)] = None,
    jobs: Jobs = "1",
    out_dir: Annotated[Path | None, typer.Option("--out", help=OUT)] = None,
    as_json: Json = False,
    **settings: Any,
) -> int:
    """Try a grid of settings on held-back training data, and name the best.

    The test set is not used. To resume, run the same command again: finished runs in its folder are not run again.
    """
    how = {"random": random, "halving": halving, "trials": trials}
    plan = make_plan(algorithm, config, grid, seeds, settings | {"validation": validation}, **how)
    folder = out_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-tune-{plan.trials[0].config.method}"
    check_first(plan)
    found, status = run_plan(plan.try_and_rank, folder, jobs, out_dir)
    if found is None:
        return status
    files.write(folder / "best.toml", found.to_toml())
    picture = draw(found, folder / f"{found.metric.key}.png")
    for name in found.edges:
        words = f"the best {name}, {found.best.settings[name]}, lies on the edge of the grid; try values beyond it"
        err.print(words, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        figures = {
            "best": found.best.settings,
            found.metric.key: finite(found.best.mean),
            "edges": found.edges,
            "trials": found.rows(),
        }
        files_made = {"command": found.command, "toml": str(folder / "best.toml"), "plot": picture and str(picture)}
        sys.stdout.write(json.dumps(figures | files_made) + "\n")
        return status
    show_sheet(found.sheet())
    for words in (f"best: {found.command}", f"settings: {folder / 'best.toml'}", f"plot: {picture}" if picture else ""):
        if words:
            out.print(words, soft_wrap=True, markup=False, highlight=False)
    return status


def sweep(
    algorithm: Method,
    config: File = None,
    *,
    grid: Grid,
    seeds: Annotated[str, typer.Option(help="seeds to run every point with")] = "0",
    jobs: Jobs = "1",
    out_dir: Annotated[Path | None, typer.Option("--out", help=OUT_SWEEP)] = None,
    form: Annotated[str, typer.Option("--format", help=f"format of the table: {', '.join(sheets.FORMATS)}")] = "text",
    as_json: Json = False,
    **settings: Any,
) -> int:
    """Run a method over a grid of any settings, including the task's, and show how the result changes.

    Nothing is chosen: runs are scored on the test set, unless --validation is given. To resume, run the same command again.
    """
    sheets.check_format(form)
    plan = make_plan(algorithm, config, grid, seeds, settings, choosing=False)
    folder = out_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-sweep-{plan.trials[0].config.method}"
    check_first(plan, every=bool(plan.axes.keys() & {*TASK, "model"}))
    found, status = run_plan(plan.try_in_order, folder, jobs, out_dir)
    if found is None:
        return status
    picture = draw(found, folder / f"{found.metric.key}.png")
    if as_json:
        sys.stdout.write(json.dumps({"points": list(map(in_json, found.rows())), "plot": picture and str(picture)}) + "\n")
        return status
    show_sheet(found.sheet(), form)
    if picture and form == "text":
        out.print(f"plot: {picture}", soft_wrap=True, markup=False, highlight=False)
    return status


def make_plan(algorithm: str, file: Path | None, grid: list[str], seeds: str, settings: dict[str, Any], **how: Any) -> Plan:
    preset = settings.pop("preset", None)
    if settings.get("seed") is not None:
        raise SettingError("seed", settings["seed"], "every point is run with several seeds; give --seeds")
    chosen, base = collect_settings({**settings, "algorithm": algorithm}, file, preset)
    held_back = {"validation": chosen.get("validation", VALIDATION)} if how.get("choosing", True) else {}
    points = axes(grid, {**base, **chosen})
    return Plan.make(algorithm, points, {**settings, **held_back}, file=file, preset=preset, seeds=numbers("seeds", seeds), **how)


def check_first(plan: Plan, every: bool = False) -> None:
    """Check the first run for all, or `every` run if their tasks differ."""
    configs = [trial.config for trial in (plan.trials if every else plan.trials[:1])]
    sets = {config.dataset: chosen_data(config) for config in configs}
    for config in configs:
        check(config, sets[config.dataset])


def run_plan(attempt: Callable[[Run, Found], R], folder: Path, jobs: str, out_dir: Path | None) -> tuple[R | None, int]:
    """Run the plan in a folder with a progress display. Returns its result, None if it was stopped, and the exit status."""
    running.processes(jobs, 1)
    store = Store(files.folder(folder))
    status = 0

    def run(cells: list[Any]) -> bool:
        nonlocal status
        ended = run_all(cells, store, jobs, None, True)
        status = max(status, ended)
        return ended != 130

    try:
        return attempt(run, partial(score, store)), status
    except KeyboardInterrupt:
        if out_dir is None:  # otherwise the user knows the folder
            hint(folder, out_dir)
        return None, 130


def axes(grid: list[str], base: dict[str, Any]) -> dict[str, list[Any]]:
    """`lr=0.01,0.1` as a name and its values, in the setting's type."""
    found: dict[str, list[Any]] = {}
    for text in grid:
        name, given, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not given or not name:
            raise SettingError("grid", text, "give a setting and its values, as in lr=0.01,0.1")
        if name in found:
            raise SettingError("grid", text, f"{name} is on the grid already; give all its values at once")
        words = [word.strip() for word in values.split(",") if word.strip()]
        found[name] = [value(word, is_text(name, base)) for word in words]
    return found


def is_text(name: str, base: dict[str, Any]) -> bool:
    if name in Config.model_fields:
        return Config.model_fields[name].annotation is str
    option = options_of(base).get(name)
    return option is not None and option.kind is str


def value(word: str, text: bool) -> Any:
    if text:
        return word
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def draw(found: Swept, path: Path) -> Path | None:
    try:
        return found.plot(path)
    except MissingError as error:
        warnings.warn(str(error), FedaggWarning, stacklevel=2)
        return None
