"""The state of runs: running, finished or stopped, and the time that a running one still needs."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fedagg import files
from fedagg.runs import Run

RECENT = 10  # rounds by which the time of the next ones is estimated
QUIET = 60.0  # seconds without news after which a run counts as stopped, if the system cannot tell
MOST_LISTED = 12


@dataclass(frozen=True)
class State:
    name: str
    word: str
    done: int
    rounds: int
    left: float | None = None  # seconds, if known

    def __str__(self) -> str:
        if self.word == "running":
            more = "" if self.left is None else f", about {duration(self.left)} left"
            return f"running, round {min(self.done + 1, self.rounds)} of {self.rounds}{more}"
        if self.word == "stopped" or self.done < self.rounds:
            return f"{self.word} after {self.done} of {self.rounds} rounds"
        return f"finished, {self.rounds} {'round' if self.rounds == 1 else 'rounds'}"


def state(run: Run) -> State:
    done, rounds = len(run.history), run.config.rounds
    summed_up = done > 0 and run.result.get("rounds") == done
    took = [row["seconds"] for row in run.history[-RECENT:] if row.get("seconds") is not None]
    each, since = statistics.fmean(took) if took else None, silence(run)
    if not (summed_up and done >= rounds):
        busy = files.is_claimed(run.folder)
        if busy or (busy is None and since < max(QUIET, 5 * (each or 0.0))):
            left = None if each is None else max(0.0, (rounds - done) * each - min(since, each))
            return State(run.name, "running", done, rounds, left)
    return State(run.name, "finished" if summed_up and not run.result.get("interrupted") else "stopped", done, rounds)


def silence(run: Run) -> float:
    """Seconds since the run last recorded a round, or began."""
    for name in ("metrics.jsonl", "config.toml"):
        with suppress(OSError):
            return max(0.0, time.time() - (run.folder / name).stat().st_mtime)
    return float("inf")


def duration(seconds: float) -> str:
    """A duration, with the precision of an estimate."""
    if seconds < 90:
        return f"{max(1, round(seconds)) if seconds < 10 else 5 * round(seconds / 5)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 10 * 3600 else f"{round(seconds / 3600)} h"


def status(runs: Sequence[Run]) -> dict[str, Any]:
    """One line for all runs, and one for each that is not finished."""
    states = [state(run) for run in runs]
    counts = Counter(one.word for one in states)
    word = next((word for word in ("running", "stopped", "finished") if counts[word]), "waiting")
    if not states:
        return {"word": word, "text": "waiting for a run to begin", "lines": []}
    if len(states) == 1:
        return {"word": word, "text": str(states[0]), "lines": []}
    parts = [f"{counts[word]} {word}" for word in ("running", "finished", "stopped") if counts[word]]
    text = ", ".join(parts) if len(parts) > 1 else f"all {len(states)} runs {word}"
    open_ = [f"{one.name}: {one}" for one in states if one.word != "finished"]
    rest = [f"and {len(open_) - MOST_LISTED} more"] if len(open_) > MOST_LISTED else []
    return {"word": word, "text": text, "lines": open_[:MOST_LISTED] + rest}
