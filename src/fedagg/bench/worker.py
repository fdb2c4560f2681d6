"""Runs one rival in its own process: `python -m fedagg.bench.worker ORDER ANSWER`. ORDER is JSON, ANSWER the JSON file to write."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fedagg.bench import peak
from fedagg.bench.rivals import RIVALS
from fedagg.bench.task import Task


def main(order: dict[str, Any], answer: Path) -> None:
    task = Task(**order["task"])
    if order["rival"] == "peak":
        answer.write_text(json.dumps({"rate": peak.rate(task), "operations": peak.operations(task)}), encoding="utf-8")
        return
    name = order["rival"]
    run = import_module(Path(name).stem).run if name.endswith(".py") else RIVALS[name].run
    device = torch.device(task.device)
    ends: list[float] = []
    memory: dict[str, int | None] = {}

    def tick() -> None:
        peak.settle(device)
        ends.append(time.time())
        if len(ends) == task.rounds + 1:  # now: the processes that the rival started are gone when it returns
            memory["resident"] = resident()

    note = run(task, tick)
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    if len(seconds) != task.rounds:
        raise SystemExit(f"made {len(ends)} rounds instead of {task.rounds + 1}")
    memory["device"] = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    result = {
        "seconds": seconds,
        "first": ends[0] - order["launched"],
        "memory": memory["resident"],
        "device_memory": memory["device"],
        "note": note,
    }
    answer.write_text(json.dumps(result), encoding="utf-8")


def resident() -> int | None:
    """The peak memory of this process and of those it started, in bytes: the sum of their separate peaks."""
    if Path("/proc/self/status").exists():
        return 1024 * sum(status(pid).get("VmHWM", 0) for pid in family())
    try:
        import resource
    except ImportError:
        return None
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held


def family() -> set[int]:
    """This process and its descendants."""
    parents = {int(p.name): status(int(p.name)).get("PPid", 0) for p in Path("/proc").iterdir() if p.name.isdigit()}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def status(pid: int) -> dict[str, int]:
    """The integers in a process's status."""
    numbers = {}
    with contextlib.suppress(OSError):  # it may have ended by now
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(":")
            first = rest.split()[:1]
            if first and first[0].isdigit():
                numbers[name] = int(first[0])
    return numbers


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
