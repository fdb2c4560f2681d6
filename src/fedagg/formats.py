"""The format number of run folders and checkpoints. Those of a newer version are refused: guessing would damage them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from fedagg.errors import FedaggError

FORMAT = 1  # also the format of folders and checkpoints without a number


def check(found: object, path: Path) -> None:
    if not isinstance(found, int) or found > FORMAT:
        raise FedaggError(f"{path}: has format {found}, but this version of fedagg reads up to {FORMAT}; install a newer fedagg")


def check_run(folder: Path) -> None:
    """Refuse a run folder of a newer format. The number is in environment.json, which is written first."""
    found: object = {}
    with suppress(OSError, ValueError, RecursionError):  # the code that needs the file reports the damage
        found = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    check(found.get("format", 1) if isinstance(found, dict) else 1, folder)
