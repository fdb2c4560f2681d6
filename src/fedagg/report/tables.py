"""The tables of a report as HTML. A click on a column's head sorts by it; `data-value` is the sort key."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from fedagg.measure import CLIENTS
from fedagg.report.content import Content, Group, Series
from fedagg.reproduce import formats, grid, table
from fedagg.reproduce.results import Store
from fedagg.runs import differing_settings

Cell = tuple[str, float | str | None, bool]  # text, sort key, whether it is bold
MOST_ROWS = 30  # largest number of rows of a table that is shown without a click
MOST_NAMED = 5  # largest number of clients named for one cause of being left out


def results(content: Content) -> str:
    """One table per setting, one row per method: mean ± standard deviation over seeds, and the cost."""
    about = "After the last round: mean ± standard deviation over seeds; bold is the best of a setting."
    if not all(one.finished for group in content.groups for one in group.series.values()):
        about += " Rows with a number of rounds in their name are of unfinished runs, and show what these have so far."
    return f"<p>{about}</p>" + "".join(map(methods, content.groups))


def methods(group: Group) -> str:
    metric = group.metric
    by_client = {name: key for name, key in CLIENTS.items() if any(key in trial.by_client for trial in group.trials)}
    judged = [f"{name}{metric.unit}" for name in (metric.label, "best", *by_client)]
    heads = ["method", *judged, "loss", "samples", "MB sent", "seconds", "seeds"]
    ends = {name: one.mean(t.score for t in one.trials)[0] for name, one in group.series.items() if one.finished}
    top = metric.best(value for value in ends.values() if value is not None)
    scale, digits = metric.scale, 2 if metric.percent else 4
    rows = [
        [
            text_cell(name),
            spread(one, [scale * t.score for t in one.trials], digits, bold=name in ends and ends[name] == top),
            spread(one, [scale * t.best for t in one.trials], digits),
            *(spread(one, [scale * t.by_client.get(key, math.nan) for t in one.trials], digits) for key in by_client.values()),
            spread(one, [t.loss for t in one.trials], digits=4),
            amount(one, "work", "{:,.0f}"),
            amount(one, "bytes", "{:,.1f}", 1e-6),
            amount(one, "seconds", "{:,.1f}"),
            (str(len(one.trials)), len(one.trials), False),
        ]
        for name, one in group.series.items()
    ]
    return html(group.name, heads, rows)


def spread(one: Series, values: Sequence[float], digits: int = 2, bold: bool = False) -> Cell:
    mean, std = one.mean(values)
    if mean is None:
        return ("", None, False)
    text = f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if std is not None else "")
    return (text, mean, bold)


def amount(one: Series, by: str, form: str, scale: float = 1.0) -> Cell:
    mean, _ = one.mean([trial.total(by) for trial in one.trials])
    return ("", None, False) if mean is None else (form.format(scale * mean), mean, False)


def text_cell(text: object) -> Cell:
    return (str(text), str(text), False)


def paper_tables(store: Store) -> Iterator[tuple[str, str, str]]:
    """The paper's tables for which anything was measured: name, title, HTML."""
    for name in grid.names():
        spec = grid.load(name)
        if spec.kind != "table":
            continue
        built = table.build(spec, store, grid.every_method())
        lines = [line for line in built.lines if line.best is not None]
        if not lines:
            continue
        heads = ["setting", "split", "clients", *(formats.name(m) for m in built.methods), "paper's order"]
        rows = []
        for line in lines:
            about = [
                text_cell(line.row.label),
                text_cell(line.split),
                (formats.clients(line), line.participation, False),
            ]
            held, ranked = line.order
            order: Cell = (formats.order(line), held / ranked if ranked else None, False)
            rows.append([*about, *(result_cell(line, method) for method in built.methods), order])
        left = len(built.lines) - len(lines)
        notes = [*built.notes(), *([f"{left} settings of the paper were not run here at all."] if left else [])]
        yield name, spec.title, html(" ".join(notes), heads, rows)


def result_cell(line: table.Line, method: str) -> Cell:
    entry = line.entries[method]
    text = " ".join(filter(None, (formats.ours(entry), f"\n{formats.theirs(entry)}" if formats.theirs(entry) else "")))
    return (text, entry.mean if entry.ours else None, method == line.best)


def left_out(content: Content) -> str:
    """Which clients were left out of rounds, by run and cause; the most frequent first."""
    rows: list[tuple[int, list[Cell]]] = []
    for run in content.runs:
        causes: dict[str, Counter[str]] = {}
        last: dict[str, int] = {}
        nodes: dict[str, str] = {}
        for row in run.clients:
            nodes |= row.get("nodes", {})  # in a real federation
            for client, cause in row.get("left_out", {}).items():
                causes.setdefault(cause, Counter())[client] += 1
                last[cause] = row["round"]
        for cause, who in causes.items():
            named = (f"{c}{f' (node {nodes[c]})' if c in nodes else ''} in {often}" for c, often in who.most_common(MOST_NAMED))
            some = "; ".join(named) + (f"; {len(who) - MOST_NAMED} more" if len(who) > MOST_NAMED else "")
            counts: list[Cell] = [(str(n), n, False) for n in (len(who), who.total(), last[cause])]
            rows.append((who.total(), [text_cell(run.name), text_cell(cause), *counts, text_cell(some)]))
    heads = ["run", "cause", "clients", "times", "last in round", "who, in how many rounds"]
    rows.sort(key=lambda row: -row[0])
    more = f" The {MOST_ROWS} most frequent of {len(rows)} causes." if len(rows) > MOST_ROWS else ""
    return html(f"Clients whose work did not count in a round.{more}", heads, [row for _, row in rows[:MOST_ROWS]])


def configuration(content: Content) -> str:
    """The settings that all runs share, and those that differ."""
    every = [trial.config.flat() for trial in content.trials]
    shared = {k: v for k, v in every[0].items() if v not in (None, ()) and all(one.get(k) == v for one in every)}
    differ = differing_settings(every)
    text = html("All runs share these.", ["setting", "value"], [[text_cell(k), text_cell(v)] for k, v in shared.items()])
    text = f"<details><summary>{len(shared)} settings that all runs share</summary>{text}</details>"
    if differ:
        heads = ["algorithm", *(k for k in differ if k != "algorithm")]
        distinct = list(dict.fromkeys(tuple(str(one.get(k, "")) for k in heads) for one in every))
        rows = [[text_cell(value) for value in row] for row in distinct]
        listed = html("Settings that differ.", heads, rows)
        if len(rows) > MOST_ROWS:
            listed = f"<details><summary>{len(rows)} combinations of settings that differ</summary>{listed}</details>"
        text = listed + text
    return text


def environment(content: Content) -> str:
    """The environment of the runs; values that differ between runs are listed together."""
    values: dict[str, list[Any]] = {}
    for trial in content.trials:
        for k, v in trial.environment.items():
            seen = values.setdefault(k, [])
            if v is not None and v not in seen:
                seen.append(v)
    rows = [[text_cell(k), text_cell(", ".join(map(str, seen)))] for k, seen in values.items() if seen]
    return html("Versions, machine and commit of the runs.", ["what", "value"], rows)


def html(caption: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A sortable table; a column is text if all of its cells sort as words, else numbers."""
    numbers = [not all(isinstance(row[i][1], str) for row in rows) for i in range(len(heads))]
    labels = [escape(head, quote=True) for head in heads]
    top = "".join(
        f'<th scope="col"{" class=number" if numbers[i] else ""}><button type="button">{escape(head)}</button></th>'
        for i, head in enumerate(heads)
    )
    cells = ("".join(cell(*one) for one in zip(row, numbers, labels, strict=True)) for row in rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in cells)
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}">'
        f"<table{' class=pairs' if len(heads) == 2 else ''}><caption><span>{escape(caption)}</span></caption>"
        f"<thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def cell(one: Cell, number: bool, label: str) -> str:
    """A cell. On a narrow screen the label is shown before the value."""

    text, value, bold = one
    shown = "<br>".join(escape(part.strip()) for part in text.split("\n"))
    if bold:
        head, *rest = shown.split("<br>")
        shown = "<br>".join([f"<strong>{head}</strong>", *rest])
    finite = value is not None and (isinstance(value, str) or math.isfinite(value))
    key = f' data-value="{escape(str(value), quote=True)}"' if finite else ""
    return f'<td{" class=number" if number else ""}{key} data-label="{label}">{shown}</td>'
