"""A long run, watched: `python hauling.py FOLDER ROUNDS` prints, as JSON, what each round took of time, memory and
open files."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

import fedagg


class Watch:
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.memory: list[float] = []
        self.files: list[int] = []

    def started(self, *_: Any) -> None:
        self.clock = time.process_time()

    def round_done(self, row: dict[str, Any]) -> None:
        self.seconds.append(time.process_time() - self.clock)  # of the processor: others may be busy on the machine
        self.clock = time.process_time()
        with open("/proc/self/statm", encoding="ascii") as handle:
            self.memory.append(int(handle.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20)
        self.files.append(len(os.listdir("/proc/self/fd")))

    def finished(self, *_: Any) -> None: ...


def main(folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    watch = Watch()
    result = fedagg.run(
        rounds=rounds,
        out=folder,
        checkpoint_every=5,
        callbacks=[watch],
        dropout_rate=0.2,
        corrupt_rate=0.05,
        eval_every=5,
    )
    told = {"seconds": watch.seconds, "memory": watch.memory, "files": watch.files, "accuracy": result.accuracy}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
