"""`fedagg tune`: the best settings of a method, chosen on training data that is held back."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedagg import data, files
from fedagg.cli.compare import hint
from fedagg.cli.reproduce import Jobs, numbers, run_all
from fedagg.cli.show import err, out, task
from fedagg.comparison import check
from fedagg.config import Config, options_of, said
from fedagg.errors import FedaggWarning, MissingError, SettingError
from fedagg.reproduce.results import Store
from fedagg.tuning import SEEDS, VALIDATION, Plan, Tuned, accuracy, figures

GRID = "a setting or option and the values to try, e.g. lr=0.01,0.1; once for each axis of the grid"
RANDOM = "try only so many points of the grid, drawn at random"
HALVING = "run all points for a quarter of the rounds, and only the best quarter of them for all rounds"
OUT = "folder of results, picture and best.toml (default runs/<time>-tune-<method>)"


def tune(
    algorithm: Annotated[str, typer.Argument(help="the method: see `fedagg list`")],
    config: Annotated[Path | None, typer.Argument(help="a TOML file of settings", show_default=False)] = None,
    *,
    grid: Annotated[list[str], typer.Option("--grid", help=GRID)],
    seeds: Annotated[str, typer.Option(help="seeds that every point is run with")] = ",".join(map(str, SEEDS)),
    random: Annotated[int | None, typer.Option(help=RANDOM, show_default=False)] = None,
    halving: Annotated[bool, typer.Option("--halving", help=HALVING)] = False,
    jobs: Jobs = "1",
    out_dir: Annotated[Path | None, typer.Option("--out", help=OUT)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")] = False,
    **settings: Any,
) -> int:
    """Try a grid of settings on training data that is held back, and say which are best.

    The test set is not looked at. --validation is the share that is held back, 0.1 by default. Stopped, the same command goes on:
    what is finished in its folder is not run again.
    """
    preset = settings.pop("preset", None)
    if settings.get("seed") is not None:
        raise SettingError("seed", settings["seed"], "every point is run with several; give --seeds")
    chosen, base = said({**settings, "algorithm": algorithm}, config, preset)
    plan = Plan.make(
        algorithm,
        axes(grid, {**base, **chosen}),
        {**settings, "validation": chosen.get("validation", VALIDATION)},
        file=config,
        preset=preset,
        seeds=numbers("seeds", seeds),
        random=random,
        halving=halving,
    )
    first = plan.trials[0].config
    check(first, data.load(first.dataset, first.data_dir))
    folder = out_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-tune-{first.method}"
    store = Store(files.folder(folder))
    status = 0

    def run(cells: list[Any]) -> bool:
        nonlocal status
        ended = run_all(cells, store, jobs, None, True)
        status = max(status, ended)
        return ended != 130

    try:
        tuned = plan.carry_out(run, lambda each: accuracy(store, each))
    except KeyboardInterrupt:
        if out_dir is None:  # otherwise it has been said
            hint(folder, out_dir)
        return 130
    files.write(folder / "best.toml", tuned.to_toml())
    picture = draw(tuned, folder / "accuracy.png")
    for name in tuned.edges:
        words = f"the best {name}, {tuned.best.settings[name]}, lies on the edge of the grid; try values beyond it"
        err.print(words, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        told = {"best": tuned.best.settings, "accuracy": tuned.best.mean, "edges": tuned.edges, "trials": tuned.rows()}
        files_made = {"command": tuned.command, "toml": str(folder / "best.toml"), "plot": picture and str(picture)}
        sys.stdout.write(json.dumps(told | files_made) + "\n")
        return status
    out.print(table(tuned), crop=False)
    for words in (f"best: {tuned.command}", f"settings: {folder / 'best.toml'}", f"plot: {picture}" if picture else ""):
        if words:
            out.print(words, soft_wrap=True, markup=False, highlight=False)
    return status


def axes(grid: list[str], base: dict[str, Any]) -> dict[str, list[Any]]:
    """`lr=0.01,0.1` as a name and its values, of the type that the setting has."""
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


def draw(tuned: Tuned, path: Path) -> Path | None:
    try:
        return tuned.plot(path)
    except MissingError as error:
        warnings.warn(str(error), FedaggWarning, stacklevel=2)
        return None


def table(tuned: Tuned) -> Table:
    """One row a point, best first; those that halving left out, after fewer rounds, are dim."""
    seeds = ", ".join(map(str, tuned.plan.seeds))
    about = task(tuned.best.config).replace(f"seed {tuned.best.config.seed}", f"seeds {seeds}")
    made = Table(title=f"{tuned.best.config.method} on {about}", title_justify="left")
    for name in (*tuned.plan.axes, "accuracy", "deviation", "rounds"):
        made.add_column(name, justify="right", no_wrap=True)
    for place, row in enumerate(tuned.rows()):
        style = "bold green" if place == 0 else "dim" if place >= len(tuned.trials) else None
        made.add_row(*(str(row[name]) for name in tuned.plan.axes), *figures(row), style=style)
    return made
