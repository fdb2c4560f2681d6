"""Stop a run before its last round, when it is good enough or no longer improves. Available as settings and as callbacks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedagg.errors import SettingError
from fedagg.measure import ACCURACY, Measure

if TYPE_CHECKING:
    from fedagg.config import Config


class Rule(ABC):
    """A callback that stops a run by the results of its rounds, including those before a resume. `reason` says why."""

    def __init__(self) -> None:
        self.reason, self.metric = "", ACCURACY

    def judged(self, metric: Measure) -> None:
        self.metric = metric

    def started(self, config: Config, done: int) -> None:
        """Forget any earlier run."""
        self.reason = ""

    def resumed(self, history: Sequence[dict[str, Any]]) -> bool:
        """Had the run already reached its end? Then there is nothing to resume."""
        return any([self.round_done(row) for row in history][-1:])

    def round_done(self, row: dict[str, Any]) -> bool:
        value = row.get(self.metric.key)
        return value is not None and self.enough(row["round"], value)

    @abstractmethod
    def enough(self, number: int, value: float) -> bool:
        """Is this value of the metric in this round a reason to stop?"""


class StopAt(Rule):
    """Stops a run when its metric, usually accuracy, reaches a value.

    Args:
        value: accuracy as a share: 0.9 for 90 %.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SettingError("stop_at", value, "give a number, e.g. 0.9")
        self.value = float(value)

    def judged(self, metric: Measure) -> None:
        super().judged(metric)
        if metric.key == ACCURACY.key and not 0 < self.value <= 1:
            raise SettingError("stop_at", self.value, "accuracy is above 0 and at most 1: give 0.9 for 90 %")

    def enough(self, number: int, value: float) -> bool:
        if self.metric.better(value) < self.metric.better(self.value):
            return False
        self.reason = f"{self.metric.label} {value:.4g} in round {number} reached {self.value:g}"
        return True


class Patience(Rule):
    """Stops a run when its metric, usually accuracy, has not improved for some evaluations in a row.

    Args:
        evaluations: how many; with `eval_every=1`, this is the number of rounds.
    """

    def __init__(self, evaluations: int) -> None:
        super().__init__()
        if isinstance(evaluations, bool) or not isinstance(evaluations, int) or evaluations < 1:
            raise SettingError("patience", evaluations, "give a whole number of evaluations, from 1 up")
        self.evaluations = evaluations

    def started(self, config: Config, done: int) -> None:
        super().started(config, done)
        self.best, self.at, self.waited = math.nan, 0, 0

    def enough(self, number: int, value: float) -> bool:
        if self.metric.better(value) > self.metric.better(self.best):
            self.best, self.at, self.waited = value, number, 0
            return False
        self.waited += 1
        self.reason = f"no better {self.metric.label} than {self.best:.4g}, of round {self.at}, in {self.waited} evaluations"
        return self.waited >= self.evaluations


def rules(config: Config) -> list[Rule]:
    """The rules that the settings ask for."""
    made: list[Rule] = [] if config.stop_at is None else [StopAt(config.stop_at)]
    return made + ([Patience(config.patience)] if config.patience else [])
