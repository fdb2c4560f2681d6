"""Runs the rivals in turns, each in new processes. If the machine becomes slower or faster meanwhile, the times spread, but no
rival gains from it."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import fedagg
from fedagg import record
from fedagg.bench.rivals import find
from fedagg.bench.task import Task

PATIENCE = 3600.0  # seconds for one turn of one rival
# Variables that would make a rival's process differ from one that the user starts.
INHERITED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "WORLD_SIZE", "RANK", "LOCAL_RANK")
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass
class Timing:
    """The measurements of one rival, over all its turns."""

    rival: str
    about: str
    package: str
    version: str | None
    seconds: list[float] = field(default_factory=list)  # of every timed round
    startup: list[float] = field(default_factory=list)  # from the process's start to the end of the first round, minus one round
    memory: int | None = None  # bytes, the peak
    device_memory: int | None = None
    note: str | None = None
    failure: str | None = None  # why there are no measurements

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    def add(self, seen: dict[str, Any]) -> None:
        self.seconds += seen["seconds"]
        self.startup.append(max(0.0, seen["first"] - statistics.median(seen["seconds"])))
        for name in ("memory", "device_memory"):
            if seen[name] is not None:
                setattr(self, name, max(seen[name], getattr(self, name) or 0))
        self.note = seen["note"]


def bench(task: Task, rivals: Sequence[str], passes: int = 2, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Time every rival on the task and return plain values for a table. `tell` is called with lines about the progress."""
    known = {name: find(name) for name in dict.fromkeys(rivals)}
    timings = {name: Timing(rival.name or name, rival.about, rival.package, rival.version) for name, rival in known.items()}
    rate, operations, load = 0.0, 0.0, os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for turn in range(passes):
        tell(f"turn {turn + 1} of {passes}: the device's peak rate")
        try:
            seen = launch("peak", task)
        except Failed as error:
            tell(f"the device's peak rate: {error}")
        else:
            rate, operations = max(rate, seen["rate"]), seen["operations"]
        for name, timing in timings.items():
            if not known[name].installed:
                timing.failure = "not installed"
            if timing.failure:
                continue
            tell(f"turn {turn + 1} of {passes}: {timing.about}")
            try:
                timing.add(launch(name, task))
            except Failed as error:
                timing.failure = str(error)
    return {
        "task": {**asdict(task), "shape": list(task.shape), "per_round": task.per_round, "passes": passes},
        "machine": {**machine(task), "load_before": load},
        "peak_rate": rate or None,
        "operations_per_round": operations or None,
        "rows": rows(list(timings.values()), operations, rate),
    }


def rows(timings: Sequence[Timing], operations: float, rate: float) -> list[dict[str, Any]]:
    medians = {t.rival: t.median for t in timings}

    def times(yardstick: str, median: float | None) -> float | None:
        """How many times as fast as this loop."""
        slow = medians.get(yardstick)
        return slow / median if slow and median else None

    return [
        {
            "rival": t.rival,
            "about": t.about,
            "package": t.package,
            "version": t.version,
            "median": t.median,
            "fastest": min(t.seconds, default=None),
            "slowest": max(t.seconds, default=None),
            "ratio": times("plain", t.median),
            "ratio_strong": times("strong", t.median),
            "startup": statistics.median(t.startup) if t.startup else None,
            "memory": t.memory,
            "device_memory": t.device_memory,
            "share_of_peak": operations / t.median / rate if t.median and rate else None,
            "seconds": [round(s, 6) for s in t.seconds],
            "note": t.note,
            "failure": t.failure,
        }
        for t in timings
    ]


class Failed(Exception):
    """A rival gave no result; the message is one line."""


def launch(rival: str, task: Task) -> dict[str, Any]:
    """Run one rival once, in a new process with its own home folder."""
    with tempfile.TemporaryDirectory(prefix="fedagg-bench-", ignore_cleanup_errors=True) as scratch:
        answer = Path(scratch) / "answer.json"
        environment = {key: value for key, value in os.environ.items() if key not in INHERITED}
        environment |= {**QUIET, "FLWR_HOME": str(Path(scratch) / "flower")}
        if rival.endswith(".py"):  # the processes it starts may import it
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(Path(rival).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        order = json.dumps({"rival": rival, "task": asdict(task), "launched": time.time()})
        command = [sys.executable, "-m", "fedagg.bench.worker", order, str(answer)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"not done after {PATIENCE:g} s") from None
        if not answer.exists():
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise Failed(re.sub(r"\s+", " ", last)[-300:])
        seen: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return seen


def machine(task: Task) -> dict[str, Any]:
    """The machine and versions that the numbers belong to."""
    about = record.environment(torch.device(task.device), "", fedagg.__version__)
    del about["engine"]
    return {**about, "processor": processor(), "date": time.strftime("%Y-%m-%d")}


def processor() -> str:
    """The processor's name, if the system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{named[1].strip()} ({platform.machine()})" if named else platform.machine()
