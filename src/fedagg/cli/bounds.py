"""`fedagg bounds`: compare a run with the paper's analysis."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedagg import files, plots, plugins, runs
from fedagg.cli import from_python
from fedagg.cli.show import out

if TYPE_CHECKING:
    from fedagg.theory.fixed_point import Pass
    from fedagg.theory.from_run import Analysis, Statement

SHOWN = 8  # rounds in the table
ALPHA = 0.1  # of Algorithm 1, for methods that have none


def bounds(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    *,
    out_dir: Annotated[Path | None, typer.Option("--out", help="where the files go (default the run folder)")] = None,
    rounds: Annotated[int | None, typer.Option(help="only this many rounds, from the first", min=1, show_default=False)] = None,
    fixed_point: Annotated[
        bool, typer.Option("--fixed-point", help="also run Algorithm 1 on the run's clients, and show each of its passes")
    ] = False,
    passes: Annotated[int, typer.Option(help="number of passes of Algorithm 1, with --fixed-point", min=1)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")] = False,
    data_dir: Annotated[str | None, typer.Option(help="where data sets are", show_default=False)] = None,
) -> int:
    """Repeat a run and compare it with the paper's bounds: constants, a table, CSV, JSON and PNG.

    The exit status is 1 if a bound that applies does not hold.
    """
    plots.require_matplotlib()
    from fedagg.theory import from_run, present  # loads scipy

    config = runs.load(run).config
    plugins.load(config.plugin)
    from_python.refuse(config, "run", run, "fedagg.theory.from_run.analyse(Path({folder!r}), {given})")
    analysis = from_run.analyse(run, rounds, data_dir=data_dir)
    folder = files.folder(out_dir or run)
    written = present.write(analysis, folder)
    record: list[Pass] = []
    if fixed_point:
        record = iterate(analysis, passes)
        written.append(present.write_passes(record, folder / "fixed_point.csv"))
    if as_json:
        sys.stdout.write(json.dumps(present.summary(analysis) | {"files": [str(path) for path in written]}) + "\n")
    else:
        tell(analysis, record)
        for path in written:
            out.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return int(any(one.broken() for one in analysis.statements))


def iterate(analysis: Analysis, passes: int) -> list[Pass]:
    """Algorithm 1 from the run's initial model and base rate, with full gradients."""
    from fedagg.theory.fixed_point import algorithm_one

    c = analysis.config
    return algorithm_one(analysis.objective, analysis.start, c.options.get("alpha", ALPHA), c.epochs, c.lr, passes)


def pair(one: Statement, t: int) -> str:
    value = one.bounds[t].value
    return f"{one.measured[t]:.3g} ≤ {value:.3g}" if value is not None else "-"


def tell(analysis: Analysis, record: list[Pass]) -> None:
    from fedagg.theory import present

    c = analysis.config
    table = Table(title=f"{c.method}, {c.dataset}, {c.model}, {c.partition}: constants", title_justify="left")
    for name in ("constant", "value", "from"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for name, source in analysis.sources.items():
        value = analysis.best if name == "F*" else getattr(analysis.constants, name)
        table.add_row(name, "-" if value is None else f"{value:.4g}", source)
    out.print(table)

    table = Table(title=f"{analysis.rounds} rounds: where a bound applies, and holds", title_justify="left")
    for name in ("result", "of", "holds", "as printed"):
        table.add_column(name, justify="left" if name in ("result", "of") else "right")
    for one in analysis.statements:
        table.add_row(one.result, one.what, present.verdict(one), present.verdict(one, printed=True))
    out.print(table)
    for one in analysis.statements:
        if one.reason:
            words = f"{one.result} ({one.what}) does not apply: {one.reason}"
            out.print(words, markup=False, highlight=False, soft_wrap=True)

    shown = [analysis[name] for name in present.DRAWN if analysis[name].applies]
    if shown:
        table = Table(title="what happened ≤ what is proved", title_justify="left")
        table.add_column("round", justify="right")
        for one in shown:
            table.add_column(one.what, justify="right", no_wrap=True)
        for t in sorted({round(k * (analysis.rounds - 1) / (SHOWN - 1)) for k in range(SHOWN)}):
            table.add_row(str(t + 1), *(pair(one, t) for one in shown))
        out.print(table)

    if record:
        table = Table(title="Algorithm 1: what a pass leaves of the rates", title_justify="left")
        for name in ("pass", "|η|", "measured", "proved", "printed"):
            table.add_column(name, justify="right")
        for number, made in enumerate(record, start=1):
            numbers = (float(made.rates.norm()), made.rate_factor, made.limit, made.paper)
            table.add_row(str(number), *(f"{value:.4g}" for value in numbers))
        out.print(table)
