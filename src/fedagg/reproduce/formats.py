"""A table as text for the terminal, Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from itertools import groupby

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from fedagg.reproduce.table import Entry, Line, Table

NAMES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "feddyn": "FedDyn",
    "fedadam": "FedAdam",
    "fedadagrad": "FedAdagrad",
    "fedyogi": "FedYogi",
    "fedbabu": "FedBABU",
    "fedgh": "FedGH",
    "scaffold": "SCAFFOLD",
    "fedcm": "FedCM",
    "fedexp": "FedExP",
    "fedavgm": "FedAvgM",
    "fednova": "FedNova",
    "ghbm": "GHBM",
    "delta-sgd": "Δ-SGD",
    "fedsam": "FedSAM",
    "mofedsam": "MoFedSAM",
    "fedsps": "FedSPS",
    "fedspeed": "FedSpeed",
    "fedagg-paper": "FedAgg (paper)",
    "fedagg": "FedAgg",
}
WIDE = 200
CSV_COLUMNS = (
    *("table", "row", "setting", "split", "participation", "method", "state"),
    *("seeds", "mean", "std", "paper", "difference", "best", "pairs_in_paper_order", "pairs"),
)
FORMATS = ("text", "markdown", "latex", "csv")


def name(method: str) -> str:
    return NAMES.get(method, method)


def ours(entry: Entry) -> str:
    if entry.state != "measured":
        return "-" if entry.state == "does not apply" else "not run"
    return f"{entry.mean:.2f}" + (f" ±{entry.std:.2f}" if entry.std is not None else "")


def theirs(entry: Entry) -> str:
    """The paper's number, and how far ours is from it."""
    if entry.theirs is None:
        return ""
    return f"{entry.theirs:.2f}" + (f" {entry.difference:+.2f}" if entry.difference is not None else "")


def order(line: Line) -> str:
    held, ranked = line.order
    return "" if not ranked else "holds" if held == ranked else f"{held}/{ranked}"


def has_order(table: Table) -> bool:
    """Whether there is anything to compare the paper's order with."""
    return any(line.order[1] for line in table.lines)


def clients(line: Line) -> str:
    return f"{100 * line.participation:g} %"


def render(table: Table, form: str, console: Console | None = None) -> str:
    if form == "text":
        console = console or Console()
        if not console.is_terminal:  # a pipe has no width
            console = Console(width=WIDE, file=io.StringIO())
        with console.capture() as captured:
            console.print(text(table, console.width))
        return captured.get()
    return {"markdown": markdown, "latex": latex, "csv": as_csv}[form](table)


def text(table: Table, width: int = 120) -> RenderableType:
    """A table for the terminal: methods that do not fit side by side go into further blocks below."""
    ranked = has_order(table)
    room = max(1, (width - 52) // 15)
    blocks = [table.methods[i : i + room] for i in range(0, len(table.methods), room)]
    parts: list[RenderableType] = []
    for number, block in enumerate(blocks):
        grid = Grid(title=table.title if number == 0 else None, title_justify="left", box=box.SIMPLE_HEAD)
        for head in ("setting", "split", "clients"):
            grid.add_column(head, no_wrap=True)
        for method in block:
            grid.add_column(name(method), justify="right", no_wrap=True)
        if ranked:
            grid.add_column("order", no_wrap=True)
        for label, lines in groupby(table.lines, key=lambda line: line.row.label):
            for line in lines:
                cells = [two_lines(line, method) for method in block]
                grid.add_row(label, line.split, clients(line), *cells, *([order(line)] if ranked else []))
            grid.add_section()
        parts.append(grid)
    return Group(*parts, *(Text(note, style="dim") for note in table.notes()))


def two_lines(line: Line, method: str) -> Text:
    entry = line.entries[method]
    style = "bold green" if method == line.best else "" if entry.ours else "dim"
    cell = Text(ours(entry), style=style)
    return cell.append(f"\n{theirs(entry)}", style="not bold dim default") if theirs(entry) else cell


def markdown(table: Table) -> str:
    ranked = has_order(table)
    head = ["setting", "split", "clients", *(name(m) for m in table.methods), *(["paper's order"] if ranked else [])]
    rows = [f"| {' | '.join(head)} |", f"|---|---|---|{'---:|' * len(table.methods)}{'---|' if ranked else ''}"]
    for line in table.lines:
        cells = []
        for method in table.methods:
            entry = line.entries[method]
            value = f"**{ours(entry)}**" if method == line.best else ours(entry)
            cells.append(f"{value}<br><sub>{theirs(entry)}</sub>" if theirs(entry) else value)
        about = [line.row.label, line.split, clients(line)]
        rows.append(f"| {' | '.join([*about, *cells, *([order(line)] if ranked else [])])} |")
    return "\n".join([*rows, "", " ".join(table.notes())]) + "\n"


def latex(table: Table) -> str:
    """A table in LaTeX; needs the package booktabs. Two lines per setting, ours above the paper's."""
    ranked = has_order(table)
    heads = ["Setting", "Split", "Clients", *(name(m) for m in table.methods), *(["Order"] if ranked else [])]
    columns = "lll" + "r" * len(table.methods) + ("l" if ranked else "")
    rows = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", tex_row(tex(head) for head in heads), r"\midrule"]
    for number, (label, lines) in enumerate(groupby(table.lines, key=lambda line: line.row.label)):
        if number:
            rows.append(r"\midrule")
        for line in lines:
            entries = [(m, line.entries[m]) for m in table.methods]
            own = [rf"\textbf{{{tex(ours(e))}}}" if m == line.best else tex(ours(e)) for m, e in entries]
            about = [tex(x) for x in (label, line.split, clients(line))]
            rows.append(tex_row([*about, *own, *([order(line)] if ranked else [])]))
            if any(theirs(e) for _, e in entries):
                below = [rf"{{\footnotesize {tex(theirs(e))}}}" if theirs(e) else "" for _, e in entries]
                rows.append(tex_row(["", r"{\footnotesize paper}", "", *below, *([""] if ranked else [])]))
    return "\n".join([*rows, r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in table.notes())]) + "\n"


def tex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def tex(value: str) -> str:
    for plain, escaped in (("%", r"\%"), ("&", r"\&"), ("_", r"\_"), ("#", r"\#"), ("±", r"$\pm$"), ("α", r"$\alpha$")):
        value = value.replace(plain, escaped)
    return value


def as_csv(table: Table) -> str:
    """One line for every method in every setting."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    write.writerow(CSV_COLUMNS)
    for line in table.lines:
        held, ranked = line.order
        about = (table.name, line.row.name, line.row.label, line.split, line.participation)
        for method in table.methods:
            e = line.entries[method]
            figures = [e.mean if e.ours else None, e.std, e.theirs, e.difference]
            shown = ["" if value is None else f"{value:.4f}".rstrip("0").rstrip(".") for value in figures]
            write.writerow([*about, method, e.state, len(e.ours), *shown, int(method == line.best), held, ranked])
    return out.getvalue()
