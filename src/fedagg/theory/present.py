"""Writes an analysis as CSV, JSON and a picture."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedagg import files, plots
from fedagg.plots import Panel, Series
from fedagg.theory.bounds import Bound
from fedagg.theory.fixed_point import Pass
from fedagg.theory.from_run import Analysis, Statement

DRAWN = ("drift", "loss", "gradient", "distance")


def write(analysis: Analysis, folder: Path) -> list[Path]:
    """Write bounds.csv (one row per round), bounds.json (the constants, their sources, and which bounds hold) and bounds.png."""
    table, facts, picture = (folder / f"bounds.{ending}" for ending in ("csv", "json", "png"))
    files.write(table, as_csv(header(analysis), rows(analysis)))
    files.write(facts, json.dumps(summary(analysis), indent=2, ensure_ascii=False))
    return [table, facts, draw(analysis, picture)]


def write_passes(passes: Sequence[Pass], path: Path) -> Path:
    """Write Algorithm 1 pass by pass: the norm of the rates, and the share of it that is left: measured, proved, printed."""
    lines = [[i, float(one.rates.norm()), one.rate_factor, one.limit, one.paper] for i, one in enumerate(passes, start=1)]
    files.write(path, as_csv(["pass", "rate_norm", "measured", "proved", "printed"], lines))
    return path


def header(analysis: Analysis) -> list[str]:
    names = ["round"]
    for one in analysis.statements:
        names += [one.name, f"{one.name}_bound", *([f"{one.name}_printed"] if one.printed else [])]
    return names


def rows(analysis: Analysis) -> list[list[Any]]:
    """The measured values and their bounds, round by round; None where a result does not apply."""
    made = []
    for t in range(analysis.rounds):
        row: list[Any] = [t + 1]
        for one in analysis.statements:
            row += [one.measured[t], one.bounds[t].value, *([one.printed[t].value] if one.printed else [])]
        made.append([None if isinstance(value, float) and math.isnan(value) else value for value in row])
    return made


def as_csv(names: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(lines)
    return text.getvalue()


def summary(analysis: Analysis) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "run": analysis.run,
        "rounds": analysis.rounds,
        "constants": asdict(analysis.constants) | {"F*": analysis.best},
        "sources": analysis.sources,
        "results": [
            {
                "name": one.name,
                "result": one.result,
                "what": one.what,
                "applies": one.applies,
                "reason": one.reason or None,
                "broken": one.broken(),
                "printed_broken": one.broken(printed=True) if one.printed else None,
            }
            for one in analysis.statements
        ],
    }


def verdict(one: Statement, printed: bool = False) -> str:
    """How many of the rounds that a bound applies to it holds in."""
    claims = one.printed if printed else one.bounds
    count = sum(bound.applies for bound in claims)
    return f"{count - len(one.broken(printed))} of {count}" if count else "-"


def draw(analysis: Analysis, path: Path) -> Path:
    """Draw the measured values and their bounds over the rounds."""
    grid = [panel(analysis[name]) for name in DRAWN]
    c = analysis.config
    title = f"{c.method}, {c.dataset}, {c.model}: what happened and what is proved"
    return plots.panels([grid[:2], grid[2:]], [path], title)[0]


def panel(one: Statement) -> Panel:
    series = [line("measured", one.measured, 0, strong=True), line("proved bound", values(one.bounds), 1)]
    series.append(line("printed bound", values(one.printed), 2))
    note = "" if one.applies else "\n(the bound does not apply)"
    drawn = [each for each in series if each.x]
    seen = [value for each in drawn for value in each.y]
    wide = bool(seen) and max(seen) > 20.0 * min(seen)
    return Panel(f"{one.what}: {one.result}{note}", "round", one.what, drawn, log=wide)


def line(name: str, numbers: Sequence[float], index: int, strong: bool = False) -> Series:
    known = [(float(t), value) for t, value in enumerate(numbers, start=1) if value > 0.0]
    return Series(name, [t for t, _ in known], [value for _, value in known], None, index, strong)


def values(claims: Sequence[Bound]) -> list[float]:
    return [math.nan if bound.value is None else bound.value for bound in claims]
