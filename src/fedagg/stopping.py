"""Stopping a run before its last round: when it is good enough, or no longer gets better. Settings of a run, and callbacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedagg.errors import SettingError

if TYPE_CHECKING:
    from fedagg.config import Config


def metric(config: Config) -> tuple[str, bool]:
    """The figure that a run is judged by, and whether more of it is better."""
    return "accuracy", True


class Rule:
    """A callback that stops a run by what its rounds came to, those before a resume included. `reason` says why it did."""

    def __init__(self) -> None:
        self.reason = ""

    def started(self, config: Config, done: int) -> None:
        self.name, self.rising = metric(config)

    def resumed(self, history: Sequence[dict[str, Any]]) -> bool:
        """Had the run come to its end? Then there is nothing to go on with."""
        return any([self.round_done(row) for row in history][-1:])

    def round_done(self, row: dict[str, Any]) -> bool:
        value = row.get(self.name)
        return value is not None and self.enough(row["round"], value)

    def enough(self, number: int, value: float) -> bool:
        raise NotImplementedError

    def better(self, value: float, other: float) -> bool:
        return value > other if self.rising else value < other


class StopAt(Rule):
    """Stops a run when its accuracy reaches a value.

    Args:
        value: as a share: 0.9 for 90 %.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SettingError("stop_at", value, "give a number, e.g. 0.9")
        self.value = float(value)

    def started(self, config: Config, done: int) -> None:
        super().started(config, done)
        if self.name == "accuracy" and not 0 < self.value <= 1:
            raise SettingError("stop_at", self.value, "accuracy is above 0 and at most 1: give 0.9 for 90 %")

    def enough(self, number: int, value: float) -> bool:
        if not math.isfinite(value) or self.better(self.value, value):
            return False
        self.reason = f"{self.name} {value:.4g} in round {number} reached {self.value:g}"
        return True


class Patience(Rule):
    """Stops a run when its accuracy was not better than before for some evaluations in a row.

    Args:
        evaluations: how many; with `eval_every=1`, as many rounds.
    """

    def __init__(self, evaluations: int) -> None:
        super().__init__()
        if isinstance(evaluations, bool) or not isinstance(evaluations, int) or evaluations < 1:
            raise SettingError("patience", evaluations, "give a whole number of evaluations, from 1 up")
        self.evaluations = evaluations

    def started(self, config: Config, done: int) -> None:
        super().started(config, done)
        self.best, self.at, self.waited = -math.inf if self.rising else math.inf, 0, 0

    def enough(self, number: int, value: float) -> bool:
        if self.better(value, self.best):
            self.best, self.at, self.waited = value, number, 0
            return False
        self.waited += 1
        self.reason = f"no better {self.name} than {self.best:.4g}, of round {self.at}, in {self.waited} evaluations"
        return self.waited >= self.evaluations


def rules(config: Config) -> list[Rule]:
    """Those that the settings ask for. What cannot work is said before any training."""
    made: list[Rule] = [] if config.stop_at is None else [StopAt(config.stop_at)]
    made += [Patience(config.patience)] if config.patience else []
    for rule in made:
        rule.started(config, 0)
    return made
