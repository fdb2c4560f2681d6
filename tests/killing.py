"""Runs that are killed with SIGKILL at random moments and resumed until they end: `python killing.py FOLDER KILLS
SEED`.

One process imports everything once and forks a child per attempt, so that a kill costs the run's time alone. Prints a
line of JSON per method: how often it was killed, in how many pieces it was made, and whether it ended like the run
that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tiny

ROUNDS = 4


def child(settings: dict[str, Any]) -> int:
    """A run in a process of its own."""
    number = os.fork()
    if number == 0:
        status = 1
        try:
            tiny.job(**settings)
            status = 0
        finally:
            os._exit(status)
    return number


def killed(number: int, run: Path, chance: random.Random) -> bool:
    """Kill the child some random while after it has recorded a random number of rounds; False where it had ended by
    then."""
    record, rows = run / "metrics.jsonl", chance.randrange(ROUNDS)
    while os.waitpid(number, os.WNOHANG) == (0, 0):
        if rows == 0 or (record.exists() and record.read_bytes().count(b"\n") >= rows):
            time.sleep(chance.uniform(0.0, 0.03))
            os.kill(number, signal.SIGKILL)
            return os.WIFSIGNALED(os.waitpid(number, 0)[1])
        time.sleep(0.002)
    return False


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    for engine in tiny.ENGINES:
        tiny.job(rounds=1, engine=engine)  # what torch imports at first use, no child has to import again
    chance = random.Random(seed)
    for name, engine in tiny.STATES:
        settings = {**tiny.STATEFUL[name], "rounds": ROUNDS, "engine": engine, "checkpoint_every": chance.choice([1, 2])}
        whole = folder / engine / name / "whole"
        assert os.waitpid(child({**settings, "out": whole}), 0)[1] == 0
        happened, runs, same = 0, 0, True
        while happened < kills:
            run, runs = folder / engine / name / f"run{runs}", runs + 1
            for _ in range(kills):
                where = {"resume": run} if (run / "config.toml").exists() else {"out": run}
                happened += killed(child({**settings, **where}), run, chance)
            where = {"resume": run} if (run / "config.toml").exists() else {"out": run}
            assert os.waitpid(child({**settings, **where}), 0)[1] == 0
            same = same and tiny.same_run(run, whole) and not list(run.rglob(".*.part"))
        sys.stdout.write(json.dumps({"name": name, "engine": engine, "kills": happened, "runs": runs, "same": same}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
