"""How a figure is shown: its key in the record, its name and unit, and which way is better. Tables use this without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measure:
    """A figure as users see it: its key in the record, its name, and which way is better."""

    key: str
    label: str
    percent: bool = True  # shown as a percentage
    higher: bool = True  # is a higher value better?

    @property
    def scale(self) -> float:
        """The factor by which a value is multiplied when shown."""
        return 100.0 if self.percent else 1.0

    @property
    def unit(self) -> str:
        """The unit after the label of an axis or a column."""
        return " (%)" if self.percent else ""

    def shown(self, value: float, width: int = 0) -> str:
        """The value as text; before the first round there is none."""
        if not math.isfinite(value):
            return "-"
        return f"{100 * value:{width}.2f} %" if self.percent else f"{value:{width}.4f}"

    def points(self, value: float, sign: str = "") -> str:
        """A difference or a deviation as text, without the unit."""
        return f"{self.scale * value:{sign}.{2 if self.percent else 4}f}"

    def best(self, values: Iterable[float]) -> float:
        """The best of the values that are numbers; NaN if there is none."""
        known = [value for value in values if math.isfinite(value)]
        return (max if self.higher else min)(known, default=math.nan)

    def better(self, value: float) -> float:
        """A sort key that is larger for better values; NaN counts as worst."""
        return -math.inf if math.isnan(value) else value if self.higher else -value

    def facts(self) -> dict[str, Any]:
        """The fields as a run folder stores them."""
        return {"key": self.key, "label": self.label, "percent": self.percent, "higher": self.higher}


ACCURACY = Measure("accuracy", "accuracy")

# Scores per client: names of columns, and their keys in the record.
CLIENTS = {"clients' mean": "client_mean", "worst 10 %": "client_worst", "spread": "client_spread"}


def read_measure(facts: object) -> Measure:
    """The measure that `Measure.facts` stored; accuracy if a run folder says nothing, as for classification."""
    if isinstance(facts, Mapping) and isinstance(facts.get("key"), str):
        percent, higher = facts.get("percent") is True, facts.get("higher") is not False
        return Measure(facts["key"], str(facts.get("label", facts["key"])), percent, higher)
    return ACCURACY
