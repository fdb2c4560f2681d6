"""For all tests: without a GPU, the GPU's kernels are run by Triton's interpreter, which must be told before anybody imports it.
And a shell that starts the tests in the background has them ignore Ctrl-C, which some are about."""

import functools
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Flushing to the disk is waiting: in a test no power fails. What is flushed must still be an open file.
os.fsync = lambda handle: (os.fstat(handle), None)[1]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from fedagg.data import sources  # noqa: E402 - after Triton was told

# Hundreds of runs are on the data that come with the package: unpacked once, and a copy for each.
OURS = Path(sources.__file__).parent
read_idx = sources.read_idx
unpacked = functools.cache(read_idx)


def read_or_copy(path: Path, *most: int) -> Any:
    return unpacked(path, *most).copy() if OURS in path.parents else read_idx(path, *most)


sources.read_idx = read_or_copy

# Whole commands, processes, pages, pictures and long searches: as files `make quick` leaves them out.
SLOW = {
    f"test_{name}.py"
    for name in [
        "bench",
        "bounds_run",
        "cli_partition",
        "commands",
        "comparison",
        "conv",
        "every_combination",
        "extras",
        "files",
        "flower",
        "flower_cli",
        "flower_pace",
        "flower_privacy",
        "flower_processes",
        "flower_ray",
        "flower_scores",
        "flower_tasks",
        "fused",
        "fuzz",
        "inputs",
        "long_haul",
        "lora",
        "models",
        "networks",
        "outliers",
        "paired",
        "plugins",
        "quantize",
        "real_data",
        "report",
        "report_browser",
        "reproduce",
        "resume",
        "rivals",
        "seam",
        "text_models",
        "theory_bounds",
        "theory_constants",
        "tools",
        "trackers",
        "tuned",
        "tuning",
    ]
}
# Two workers take whole files, in this order: the longest first, or one of them ends up waiting for the other.
LONGEST_FIRST = [
    f"test_{name}.py"
    for name in [
        *("flower_processes", "engines", "docs", "flower", "fused", "resume", "flower_ray", "reproduce", "report_browser"),
        *("flower_privacy", "bench", "algorithms", "models", "report", "notebooks", "result", "faults", "rivals", "checkpoint"),
        *("every_combination", "real_data", "cli", "tuning"),
    ]
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    for item in items:
        if item.path.name in SLOW:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """By now a worker has imported every test and what they import: a million objects that stay. A collection need not look at them
    again, and there are many: a grid collects after every cell."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
