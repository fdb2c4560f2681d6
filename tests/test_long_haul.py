"""Long runs: memory, open files and speed stay flat. FEDAGG_HAUL_ROUNDS=2000 for the long mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

HERE = Path(__file__).parent
ROUNDS = int(os.environ.get("FEDAGG_HAUL_ROUNDS", "100"))
# One heap, and blocks of a model's size given back when they are freed: what the allocator keeps for later is no leak.
CALM = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
ROW_KIB = 8  # a round's row in the history that a run hands back, and what the allocator makes of it


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_memory_open_files_and_speed_stay_flat(tmp_path: Path) -> None:
    line = [sys.executable, str(HERE / "hauling.py"), str(tmp_path / "run"), str(ROUNDS)]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | CALM, timeout=3000)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["seconds"]) == ROUNDS
    early, late = slice(ROUNDS // 4, ROUNDS // 2), slice(3 * ROUNDS // 4, ROUNDS)
    assert max(told["files"][late]) <= max(told["files"][early])
    grown = median(told["memory"][late]) - median(told["memory"][early])
    assert grown <= 2 + ROUNDS / 2 * ROW_KIB / 1024, told["memory"][:: ROUNDS // 20]
    assert median(told["seconds"][late]) <= 3 * median(told["seconds"][early])  # the machine may have other work
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 6  # two, each with what clients remember
