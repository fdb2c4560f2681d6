"""Measure the tables of docs/faults.md: accuracy under faults, and under hostile clients with every rule. Prints
Markdown.

python tools/measure_faults.py faults
python tools/measure_faults.py hostile
python tools/measure_faults.py lies
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import fedagg
from fedagg.aggregate import RULES
from fedagg.faults import Faults
from fedagg.work import Chunk

SEEDS = range(3)
METHODS = ("fedavg", "fedagg")
COMMON: dict[str, Any] = {"rounds": 30, "lr": 0.1, "partition": "dirichlet", "engine": "sequential"}
FAULTS: dict[str, dict[str, float]] = {
    "none": {},
    "30 % drop out": {"dropout_rate": 0.3},
    "10 % corrupt": {"corrupt_rate": 0.1},
    "30 % drop out, 10 % corrupt": {"dropout_rate": 0.3, "corrupt_rate": 0.1},
    "40 % corrupt": {"corrupt_rate": 0.4},
    "50 % stragglers": {"straggler_rate": 0.5},
}
ATTACKS: dict[str, dict[str, float]] = {
    "no attack": {},
    "reversed": {"flip_rate": 0.2},
    "reversed, five times over": {"flip_rate": 0.2, "flip_scale": 5.0},
}


def accuracy(**settings: Any) -> str:
    mean = sum(fedagg.run(**{**COMMON, **settings}, seed=seed).accuracy for seed in SEEDS) / len(SEEDS)
    return f"{100 * mean:.1f}"


def row(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def faults() -> None:
    row("faults", *METHODS)
    row("---", *("---:" for _ in METHODS))
    for name, settings in FAULTS.items():
        row(name, *(accuracy(algorithm=method, **settings) for method in METHODS))


def hostile() -> None:
    row("method", "`--robust`", *ATTACKS)
    row("---", "---", *("---:" for _ in ATTACKS))
    for method in METHODS:
        for rule in RULES:
            settings = {"algorithm": method, "robust": rule, "trim": 0.3}
            row(method, f"`{rule}`", *(accuracy(**settings, **attack) for attack in ATTACKS.values()))


def lies() -> None:
    """All clients take part. The updates of hostile ones are honest here, but they say that their losses have risen a lot."""

    def lying(hostile: Faults, t: int, chunk: Chunk) -> None:
        told = [at for at, job in enumerate(chunk.jobs) if hostile.hostile(job.client)]
        chunk.loss[told] = chunk.first[told] = 1e6
        chunk.behind[told] = 0.0

    row("`--robust`", "nobody lies", "a fifth lie")
    row("---", "---:", "---:")
    with patch.object(Faults, "corrupt", lying):
        for rule in RULES:
            settings = {"algorithm": "fedagg", "robust": rule, "trim": 0.3, "participation": 1.0, "engine": "auto"}
            row(f"`{rule}`", *(accuracy(**settings, flip_rate=rate) for rate in (0.0, 0.2)))


if __name__ == "__main__":
    {"faults": faults, "hostile": hostile, "lies": lies}[sys.argv[1]]()
