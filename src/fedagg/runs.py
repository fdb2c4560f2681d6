"""Reading run folders back: what `record` wrote, for reports and pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedagg import config
from fedagg.config import Config
from fedagg.errors import FedaggError, SettingError


@dataclass(frozen=True)
class Run:
    """A run folder's content. `clients` has one row a round: who took part, with which rates, how far each moved."""

    name: str
    folder: Path
    config: Config
    history: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    environment: dict[str, Any]
    result: dict[str, Any]

    def curve(self, column: str) -> tuple[list[float], list[float]]:
        """The rounds that have this figure, and its values; a list (one value an epoch) counts by its mean."""
        found = [(row["round"], row[column]) for row in self.history if row.get(column) is not None]
        values = [sum(value) / len(value) if isinstance(value, list) else value for _, value in found]
        return [float(number) for number, _ in found], [float(value) for value in values]


def load(folder: Path) -> Run:
    if not (folder / "config.toml").exists():
        raise SettingError("run", str(folder), "is not a run folder: it has no config.toml")
    chosen = config.make(config.read(folder / "config.toml"))
    name = f"{chosen.method} seed {chosen.seed}"
    return Run(
        name=name,
        folder=folder,
        config=chosen,
        history=lines(folder / "metrics.jsonl"),
        clients=lines(folder / "clients.jsonl"),
        environment=whole(folder / "environment.json"),
        result=whole(folder / "result.json"),
    )


def find(folder: Path) -> list[Path]:
    """The run folders at or below a folder, e.g. those of `fedagg compare`."""
    return sorted(path.parent for path in folder.rglob("config.toml") if ".partial" not in path.parts)


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be growing."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if line.endswith("\n"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                raise FedaggError(f"{path}: line {number} is damaged; the run has to be made again") from None
    return rows


def whole(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        raise FedaggError(f"{path}: is damaged; the run has to be made again") from None
    return dict(found)
