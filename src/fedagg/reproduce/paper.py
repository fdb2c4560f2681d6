"""The paper's own numbers."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def numbers() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("paper.toml").read_text(encoding="utf-8"))


def accuracy(section: str | None, row: str, participation: float, method: str) -> float | None:
    """The paper's accuracy in percent; both forms of FedAgg are compared with its FedAgg."""
    at = numbers().get(section or "", {}).get(row, {}).get(f"{participation:.1f}", {})
    value: float | None = at.get("fedagg" if method == "fedagg-paper" else method)
    return value
