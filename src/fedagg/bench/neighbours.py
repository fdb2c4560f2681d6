"""How much a run slows down beside other runs: our engine alone, and in several processes at once.

The processes live for the whole measurement and take turns, so that other load on the machine affects both measurements alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from fedagg.bench import measure, ours
from fedagg.bench.task import Task
from fedagg.errors import FedaggError

FOREVER = 10**9  # rounds; a process ends when its standard input ends


def bench(
    task: Task, runs: int = 2, seconds: float = 5.0, passes: int = 3, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """The seconds that a round takes in one run alone and in each of several runs at once, and the ratio of the two: plain values
    for a table, medians over the turns. `tell` is called with lines about the progress."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    alone: list[float] = []
    together: list[float] = []
    with ExitStack() as stack:
        tell(f"{runs} processes start")
        all_runs = [stack.enter_context(Run(task)) for _ in range(runs)]
        notes = [run.answer() for run in all_runs]
        for turn in range(passes):
            tell(f"turn {turn + 1} of {passes}: one alone")
            one = all_runs[turn % runs]
            one.ask(seconds)
            alone.append(one.answer())
            tell(f"turn {turn + 1} of {passes}: {runs} side by side")
            for run in all_runs:
                run.ask(seconds)
            together.append(statistics.mean(run.answer() for run in all_runs))
    return {
        "task": {**asdict(task), "shape": list(task.shape), "per_round": task.per_round, "passes": passes},
        "machine": {**measure.machine(task), "load_before": load},
        "runs": runs,
        "alone": statistics.median(alone),
        "beside": statistics.median(together),
        "ratio": statistics.median(together) / statistics.median(alone),
        "passes": [{"alone": one, "beside": two} for one, two in zip(alone, together, strict=True)],
        "note": notes[0],
    }


class Run:
    """A process that trains when it is asked to."""

    def __init__(self, task: Task) -> None:
        command = [sys.executable, "-m", "fedagg.bench.neighbours", json.dumps(asdict(task))]
        environment = {key: value for key, value in os.environ.items() if key not in measure.INHERITED}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise FedaggError(f"bench: a run beside others ended with exit status {self.process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class Turns:
    """Reads seconds from standard input, trains for that long, answers with the mean seconds of a round, and repeats."""

    def __init__(self) -> None:
        self.rounds, self.began, self.until = 0, 0.0, 0.0

    def tick(self) -> None:
        self.rounds += 1
        now = time.perf_counter()
        if now < self.until:
            return
        if self.until:
            say((now - self.began) / self.rounds)
        asked = sys.stdin.readline()
        if not asked:
            raise SystemExit
        self.rounds, self.began = 0, time.perf_counter()
        self.until = self.began + float(asked)


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    ours.run("auto", replace(Task(**json.loads(sys.argv[1])), rounds=FOREVER), Turns().tick, ready=say)
