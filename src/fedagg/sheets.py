"""Tables as text for a terminal, Markdown, LaTeX (booktabs), CSV, and HTML for notebooks."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedagg.errors import need, unknown

if TYPE_CHECKING:
    import pandas

FORMATS = ("text", "markdown", "latex", "csv")
WIDE = 1000  # wider than any table


@dataclass(frozen=True)
class Sheet:
    """A table: cells as text, and numbers in `records`. The first `words` columns are names, the others are numbers; `bold` has the
    row and column of each best value."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    records: Sequence[Mapping[str, Any]]
    words: int = 1
    bold: frozenset[tuple[int, int]] = frozenset()
    notes: Sequence[str] = field(default_factory=tuple)

    def render(self, form: str) -> str:
        check_format(form)
        return {"text": self.text, "markdown": self.markdown, "latex": self.latex, "csv": self.csv}[form]()

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for column, head in enumerate(self.heads):
            table.add_column(head, justify="left" if column < self.words else "right", no_wrap=True)
        for at, row in enumerate(self.rows):
            table.add_row(*(Text(cell, "bold green" if (at, column) in self.bold else "") for column, cell in enumerate(row)))
        return table

    def text(self) -> str:
        console = Console(width=WIDE, file=io.StringIO())
        with console.capture() as captured:
            console.print(self.rich())
            for note in self.notes:
                console.print(note, markup=False, highlight=False)
        return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"

    def markdown(self) -> str:
        marks = ["---" if column < self.words else "---:" for column in range(len(self.heads))]
        rows = [[cell.replace("|", r"\|") for cell in row] for row in (self.heads, *self.rows)]
        for at, column in self.bold:
            rows[at + 1][column] = f"**{rows[at + 1][column]}**"
        lines = [f"| {' | '.join(row)} |" for row in (rows[0], marks, *rows[1:])]
        return "\n".join([*lines, *(["", " ".join(self.notes)] if self.notes else [])]) + "\n"

    def latex(self) -> str:
        """The table in LaTeX; needs the package booktabs."""
        columns = "l" * self.words + "r" * (len(self.heads) - self.words)
        rows = [[tex(cell) for cell in row] for row in self.rows]
        for at, column in self.bold:
            rows[at][column] = rf"\textbf{{{rows[at][column]}}}"
        heads = " & ".join(map(tex, self.heads))
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", heads + r" \\", r"\midrule"]
        lines += [" & ".join(row) + r" \\" for row in rows]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in self.notes)]) + "\n"

    def csv(self) -> str:
        """The numbers; missing ones are empty."""
        out = io.StringIO()
        names = list(dict.fromkeys(name for record in self.records for name in record))
        write = csv.DictWriter(out, names, lineterminator="\n")
        write.writeheader()
        write.writerows(self.records)
        return out.getvalue()

    def html(self) -> str:
        heads = "".join(f"<th>{escape(head)}</th>" for head in self.heads)
        rows = [[escape(cell) for cell in row] for row in self.rows]
        for at, column in self.bold:
            rows[at][column] = f"<strong>{rows[at][column]}</strong>"
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{notes}"


def check_format(form: str) -> str:
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    return form


def frame(records: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """The records as a pandas frame. Pandas is imported here because nothing else needs it."""
    need("to_pandas()", "pandas", "analysis")
    import pandas

    return pandas.DataFrame.from_records([dict(record) for record in records])


def tex(value: str) -> str:
    special = {"%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "±": r"$\pm$", "α": r"$\alpha$", "Δ": r"$\Delta$", "σ": r"$\sigma$"}
    return "".join(special.get(letter, letter) for letter in value)
