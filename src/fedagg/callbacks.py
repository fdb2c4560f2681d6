"""Objects that watch a run: progress displays, trackers, rules that end it early, and your own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fedagg.config import Config
from fedagg.result import Result


class Callback(Protocol):
    """Watches a run, e.g. a progress display or a tracker. Missing methods are not called. If `round_done` returns True, the run
    stops after this round. A method `judged(measure)` is called first, with the figure that the run is judged by. A method
    `resumed(history)` is given the rounds that a resumed run has already done; if it returns True, the run ends there. An attribute
    `reason` says why a callback ended a run."""

    def started(self, config: Config, done: int) -> None: ...

    def round_done(self, row: dict[str, Any]) -> bool | None: ...

    def finished(self, result: Result) -> None: ...


def tell(callbacks: Sequence[Any], method: str, *what: Any) -> str | None:
    """Call this method of each callback. If one returned True, return the reason."""
    called = [(one, getattr(one, method)(*what)) for one in callbacks if hasattr(one, method)]
    stops = (one for one, answer in called if isinstance(answer, bool | np.bool_) and answer)
    return next((getattr(one, "reason", "") or type(one).__name__ for one in stops), None)
