"""How a figure is shown: its key in the record, its name and unit, and which way is better. No torch: tables need none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measure:
    """A figure as people see it: its key in the record, what it is called, and which way is better."""

    key: str
    label: str
    percent: bool = True  # shown as a percentage
    higher: bool = True  # is more better?

    @property
    def scale(self) -> float:
        """What a value is multiplied by where it is shown."""
        return 100.0 if self.percent else 1.0

    @property
    def unit(self) -> str:
        """What stands behind the label of an axis or a column."""
        return " (%)" if self.percent else ""

    def shown(self, value: float, width: int = 0) -> str:
        """The value in words; before the first round there is none."""
        if not math.isfinite(value):
            return "-"
        return f"{100 * value:{width}.2f} %" if self.percent else f"{value:{width}.4f}"

    def points(self, value: float, sign: str = "") -> str:
        """A difference or a deviation, without the unit."""
        return f"{self.scale * value:{sign}.{2 if self.percent else 4}f}"

    def best(self, values: Iterable[float]) -> float:
        """The best of those that are numbers; not a number where there is none."""
        known = [value for value in values if math.isfinite(value)]
        return (max if self.higher else min)(known, default=math.nan)

    def better(self, value: float) -> float:
        """A number that is larger, the better the value is: what rankings sort by. What is no number is the worst."""
        return -math.inf if math.isnan(value) else value if self.higher else -value

    def facts(self) -> dict[str, Any]:
        """As a run folder keeps it."""
        return {"key": self.key, "label": self.label, "percent": self.percent, "higher": self.higher}


ACCURACY = Measure("accuracy", "accuracy")

# How clients fare: names of columns, and where the record has them.
CLIENTS = {"clients' mean": "client_mean", "worst 10 %": "client_worst", "spread": "client_spread"}


def told(facts: object) -> Measure:
    """Back from `Measure.facts`; accuracy where a run folder says nothing, as those of classification do."""
    if isinstance(facts, Mapping) and isinstance(facts.get("key"), str):
        percent, higher = facts.get("percent") is True, facts.get("higher") is not False
        return Measure(facts["key"], str(facts.get("label", facts["key"])), percent, higher)
    return ACCURACY
