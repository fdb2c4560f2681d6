"""`fedagg plot`: the paper's figures from a results folder, and pictures of runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedagg import files, plots, runs
from fedagg.cli.reproduce import shares, words
from fedagg.cli.show import err, out
from fedagg.errors import SettingError, unknown
from fedagg.report import content
from fedagg.reproduce import figures, grid
from fedagg.reproduce.results import Store
from fedagg.runs import Run

WHAT = "figures of the paper (fig-curves, ..., or `all`), run folders, or folders of runs (of `fedagg compare`)"


def plot(
    what: Annotated[list[str], typer.Argument(help=WHAT)],
    *,
    folder: Annotated[Path, typer.Option("--out", "-o", help="where the pictures go")] = Path("figures"),
    form: Annotated[str, typer.Option("--format", help="png, svg, pdf, or several separated by commas")] = "png,svg,pdf",
    results: Annotated[Path, typer.Option(help="the results folder to draw from")] = Path("results"),
    rows: Annotated[str | None, typer.Option(help="rows of the figure, by name or by the beginning of the name")] = None,
    algorithms: Annotated[str | None, typer.Option(help="methods in place of the paper's, or `all`")] = None,
    participation: Annotated[str | None, typer.Option(help="shares of clients in a round, e.g. 0.2,1.0")] = None,
    seeds: Annotated[int, typer.Option(help="seeds 0, 1, ... to draw", min=1)] = 3,
    rounds_scale: Annotated[float, typer.Option(help="the share of the paper's rounds that was run")] = 1.0,
    data_dir: Annotated[Path | None, typer.Option(help="where data sets are, for fig-partition")] = None,
    each: Annotated[bool, typer.Option("--each", help="for runs: a line for every run, instead of the mean over seeds")] = False,
) -> int:
    """Draw figures of the paper from a results folder, or the curves of runs, as PNG, SVG and PDF."""
    plots.require_matplotlib()
    endings = words(form) or []
    for ending in endings or [""]:
        if ending not in plots.FORMATS:
            raise unknown("format", ending, plots.FORMATS)
    all_figures = [name for name in grid.names() if name.startswith("fig-")]
    given = list(dict.fromkeys(name for word in what for name in (all_figures if word == "all" else [word])))
    found = {name: folders(name) for name in given}
    specs = {
        name: grid.narrow(
            grid.load(name),
            rows=words(rows),
            methods=words(algorithms),
            participation=shares(participation),
            seeds=seeds,
            rounds_scale=rounds_scale,
            overrides={"data_dir": str(data_dir)} if data_dir else {},
        )
        for name in given
        if not found[name]
    }
    for name, spec in specs.items():
        if spec.kind in ("table", "tuned"):
            raise SettingError("what", name, "is a table: see it with `fedagg reproduce NAME --show`")
    chosen = runs.load_all(path for paths in found.values() for path in paths)
    begun = [run for run in chosen if run.history]
    if chosen and not begun:
        raise runs.no_round(name for name in given if found[name])
    files.folder(folder)
    for run in chosen:
        if not run.history:
            note = f"[yellow]{escape(run.name)}: nothing to draw yet[/]; it has no finished round"
            err.print(note, highlight=False, soft_wrap=True)
    paths = [folder / f"runs.{ending}" for ending in endings]
    drawn = (draw_runs if each else draw_means)(begun, paths) if begun else []
    for name, spec in specs.items():
        made = figures.draw(spec, Store(results), folder, endings)
        if not made:
            err.print(f"[yellow]{name}: nothing to draw yet[/]; run `fedagg reproduce {name}` first", highlight=False)
        drawn += made
    for path in drawn:
        out.print(str(path), soft_wrap=True, highlight=False)
    return 0 if drawn else 1


def folders(name: str) -> list[Path]:
    """The run folders that a word stands for; none if it is a figure's name."""
    if name in (*grid.names(), *grid.OURS) or name.endswith(".toml"):
        return []
    if found := runs.find(Path(name)):
        return found
    if Path(name).exists():
        raise SettingError("what", name, "contains no run; give a run folder, a folder of runs, or a figure's name")
    known = [figure for figure in grid.names() if figure.startswith("fig-")]
    raise SettingError("what", name, f"is not a folder of runs; {unknown('what', name, [*known, 'all']).fix}")


Lines = Callable[[str, float], list[plots.Series]]  # for a column of the record, times a factor


def draw_panels(found: list[Run], lines: Lines, paths: list[Path]) -> list[Path]:
    """The metric, loss, mean learning rate and drift over rounds. Each metric has its own panel."""
    configs, metrics = [run.config for run in found], dict.fromkeys(run.metric for run in found)
    columns = (
        *((metric.key, f"{runs.metric_name(metric.label, configs)}{metric.unit}", metric.scale) for metric in metrics),
        ("loss", runs.metric_name("loss", configs), 1.0),
        ("rate_mean", "learning rate, mean over clients and epochs", 1.0),
        ("drift", "mean distance a client moved", 1.0),
    )
    grid_of = [plots.Panel("", "round", label, lines(column, scale)) for column, label, scale in columns]
    return plots.panels([grid_of[:-2], grid_of[-2:]], paths, "Runs")


def draw_runs(found: list[Run], paths: list[Path]) -> list[Path]:
    """One line per run."""

    def lines(column: str, scale: float) -> list[plots.Series]:
        curves = [(run.name, *run.curve(column)) for run in found]
        every = enumerate(curves)
        return [plots.Series(name, x, [scale * v for v in y], index=index) for index, (name, x, y) in every if y]

    return draw_panels(found, lines, paths)


def draw_means(found: list[Run], paths: list[Path]) -> list[Path]:
    """A line for every method of every setting: the mean over its seeds, with a band of one standard deviation."""
    entries = [content.from_run(run) for run in found]
    groups = content.group_entries(entries)
    for note in content.left_out(entries, groups):
        err.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
    series = [one for group in groups for one in group.series.values()]
    tasks = [runs.task(one.trials[0].config) for one in series]
    differ = runs.differing_settings(tasks)
    names = [", ".join(filter(None, (one.name, *(said[key] for key in differ)))) for one, said in zip(series, tasks, strict=True)]
    if len(set(names)) < len(names):  # settings given from Python all have the same name
        names = [f"{one.name}, {group.name}" for group in groups for one in group.series.values()]
    seeds = [f" ({len(one.trials)} seeds)" if len(one.trials) > 1 else "" for one in series]

    keys = {run.metric.key for run in found}

    def lines(column: str, scale: float) -> list[plots.Series]:
        made = []
        for index, (name, one) in enumerate(zip(names, series, strict=True)):
            own = one.trials[0].metric.key
            if column in keys and column != own:
                continue
            mean, spread = one.curve("rate" if column == "rate_mean" else "accuracy" if column == own else column)
            known = [
                (float(t), scale * m, scale * (s or 0))
                for t, (m, s) in enumerate(zip(mean, spread, strict=True), 1)
                if m is not None
            ]
            x, y, band = ([row[k] for row in known] for k in range(3))
            made.append(plots.Series(name + seeds[index], x, y, band if len(one.trials) > 1 else None, index))
        return made

    return draw_panels(found, lines, paths)
