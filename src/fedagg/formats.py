"""The form of run folders and checkpoints has a number. What a newer version wrote is refused: guessing would damage it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from fedagg.errors import FedaggError

FORMAT = 1  # folders and checkpoints without a number are of this one


def check(found: object, path: Path) -> None:
    if not isinstance(found, int) or found > FORMAT:
        raise FedaggError(f"{path}: has format {found}, and this version of fedagg reads up to {FORMAT}; install a newer fedagg")


def check_run(folder: Path) -> None:
    """Can this run folder be read? Its number is in environment.json, which is written before all else."""
    found: object = {}
    with suppress(OSError, ValueError, RecursionError):  # whoever needs the file says that it is damaged
        found = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    check(found.get("format", 1) if isinstance(found, dict) else 1, folder)
