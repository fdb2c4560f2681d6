"""A table of our measurements and the paper's numbers, as data. Its looks are defined in `formats`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from fedagg.reproduce import paper
from fedagg.reproduce.grid import Row, Spec, every_method
from fedagg.reproduce.results import Store


def span(counts: set[int]) -> str:
    return f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


@dataclass(frozen=True)
class Entry:
    """One method in one setting: accuracies in percent, one per seed, and the paper's number."""

    ours: tuple[float, ...]
    theirs: float | None
    state: Literal["measured", "not run", "does not apply"]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.ours)

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds; None for one seed."""
        return statistics.stdev(self.ours) if len(self.ours) > 1 else None

    @property
    def difference(self) -> float | None:
        return self.mean - self.theirs if self.ours and self.theirs is not None else None


@dataclass(frozen=True)
class Line:
    """One setting of the table."""

    row: Row
    participation: float
    entries: dict[str, Entry]
    variant: str = ""

    @property
    def split(self) -> str:
        """How samples are dealt, and which variant of the specification this is, if there are several."""
        return ", ".join(filter(None, (self.row.distribution, self.variant)))

    @property
    def best(self) -> str | None:
        """The method with the highest mean."""
        measured = {method: entry.mean for method, entry in self.entries.items() if entry.ours}
        return max(measured, key=lambda method: measured[method]) if measured else None

    @property
    def order(self) -> tuple[int, int]:
        """Over the pairs of methods that the paper ranks and we measured: how many we rank alike, and how many there are."""
        both = {m: e for m, e in self.entries.items() if e.ours and e.theirs is not None}
        if "fedagg" in both:
            both.pop("fedagg-paper", None)  # the paper has one FedAgg; use our default form if it was measured
        held = ranked = 0
        for a, b in combinations(both.values(), 2):
            assert a.theirs is not None
            assert b.theirs is not None
            if a.theirs != b.theirs:
                ranked += 1
                held += (a.mean > b.mean) == (a.theirs > b.theirs) and a.mean != b.mean
        return held, ranked

    @property
    def whole(self) -> bool:
        """Whether FedAgg and all other methods here that the paper reports in this setting were measured."""
        reported = {m: e for m, e in self.entries.items() if e.theirs is not None and m != "fedagg-paper"}
        return "fedagg" in reported and len(reported) > 1 and all(entry.ours for entry in reported.values())

    @property
    def paper_best(self) -> str | None:
        reported = {m: e.theirs for m, e in self.entries.items() if e.theirs is not None and m != "fedagg-paper"}
        return max(reported, key=lambda method: reported[method]) if reported else None


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    methods: tuple[str, ...]
    lines: tuple[Line, ...]
    rounds_scale: float

    def notes(self) -> list[str]:
        """What a reader needs to know about the numbers, and whether the paper's ordering holds."""
        counts = {len(e.ours) for line in self.lines for e in line.entries.values() if e.ours}
        if not counts:
            return ["Nothing of this was run yet."]
        seeds = span(counts)
        spread = "mean ± standard deviation over" if max(counts) > 1 else "from"
        text = [f"Test accuracy in percent, {spread} {seeds} seed{'s' if max(counts) > 1 else ''}; bold is our best."]
        if any(e.theirs is not None for line in self.lines for e in line.entries.values()):
            text.append("Below ours: the paper's number, and how far ours is from it.")
        if self.rounds_scale != 1:
            text.append(f"Rounds are {self.rounds_scale:g} of the paper's: not comparable with its numbers.")
        held, ranked = (sum(values) for values in zip(*(line.order for line in self.lines), strict=True))
        if ranked:
            text.append(f"The paper's order holds in {held} of {ranked} pairs of methods.")
        whole = [line for line in self.lines if line.whole]
        if whole:
            ours = sum(line.best == "fedagg" for line in whole)  # only one form of it: other methods have one entry too
            theirs = sum(line.paper_best == "fedagg" for line in whole)
            text.append(f"Of these methods FedAgg is best in {ours} of {len(whole)} settings here, in {theirs} in the paper.")
        if any(e.state == "not run" for line in self.lines for e in line.entries.values()):
            text.append("Cells marked “not run” were not measured here.")
        return text


def build(spec: Spec, store: Store, also: Sequence[str] = ()) -> Table:
    """The table from the results folder; nothing is run. `also` are methods to show if measured."""
    methods = [*spec.methods, *(method for method in also if method not in spec.methods)]
    lines = [
        Line(row, share, {m: entry(spec, store, row, m, share, variant) for m in methods}, variant["name"])
        for row in spec.rows
        for share in spec.participation
        for variant in spec.variants
    ]
    measured = {m for line in lines for m, e in line.entries.items() if e.ours}
    shown = [m for m in methods if m in spec.methods or m in measured]
    shown.sort(key=lambda m: (m.startswith("fedagg"), every_method().index(m) if m.startswith("fedagg") else 0))
    return Table(
        spec.name,
        spec.title,
        tuple(shown),
        tuple(replace(line, entries={m: line.entries[m] for m in shown}) for line in lines),
        spec.rounds_scale,
    )


def entry(spec: Spec, store: Store, row: Row, method: str, participation: float, variant: dict[str, Any]) -> Entry:
    # The paper has one variant: the first one here.
    theirs = paper.accuracy(spec.paper, row.paper, participation, method) if variant is spec.variants[0] else None
    if not spec.applies(row, method):
        return Entry((), theirs, "does not apply")
    found = [store.get(spec.config(row, method, participation, seed, variant)) for seed in range(spec.seeds)]
    ours = tuple(100 * cell.accuracy for cell in found if cell is not None)
    return Entry(ours, theirs, "measured" if ours else "not run")
