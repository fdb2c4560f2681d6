"""What was measured: one small JSON file a cell, named by its configuration, so that every table can share it."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedagg import files
from fedagg.config import NO_BEARING, Config, options_of
from fedagg.errors import FedaggError
from fedagg.federation import Result

COLUMNS = ("accuracy", "loss", "train_loss", "drift", "passes", "samples", "bytes_up", "bytes_down", "seconds")


@dataclass(frozen=True)
class Measured:
    """A finished cell. `curve` has one list a column; a value that is the same in every round is kept once."""

    config: dict[str, Any]
    accuracy: float
    best_accuracy: float
    loss: float
    seconds: float
    rounds: int
    figures: dict[str, float]
    curve: dict[str, Any]
    environment: dict[str, Any]

    def column(self, name: str) -> list[float | None]:
        values = self.curve.get(name)
        return list(values) if isinstance(values, list) else [values] * self.rounds


def settings(config: Config) -> dict[str, Any]:
    """The settings that a result depends on."""
    return {k: v for k, v in config.flat().items() if k not in NO_BEARING}


def key(config: Config) -> str:
    """The name of a cell's file: the main settings to read, and a hash of all that differ from the defaults.

    Defaults are left out of the hash so that a new setting does not orphan old results; the file holds the whole
    configuration, and it is compared before a result is believed.
    """
    defaults = {name: field.default for name, field in Config.model_fields.items()}
    defaults |= {name: option.default for name, option in options_of(config.flat()).items()}
    changed = {k: v for k, v in settings(config).items() if v != defaults.get(k)}
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:10]
    split = f"{config.partition}{config.sigma:g}" if config.partition.startswith("dirichlet") else config.partition
    share = f"p{100 * config.participation:g}"
    return f"{config.dataset}_{config.model}_{split}_{share}_{config.method}_seed{config.seed}_{digest}"


class Store:
    """A results folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells = folder / "cells"

    def path(self, config: Config) -> Path:
        return self.cells / f"{key(config)}.json"

    def partial(self, config: Config) -> Path:
        """The run folder of a cell that is not finished; it is removed when the cell is."""
        return self.folder / ".partial" / key(config)

    def get(self, config: Config) -> Measured | None:
        """The result of exactly this configuration, if it is there."""
        path = self.path(config)
        if not path.exists():
            return None
        found = read(path)
        wanted = settings(config)
        return found if all(wanted[k] == v for k, v in found.config.items() if k in wanted and v is not None) else None

    def put(self, result: Result, environment: dict[str, Any]) -> Path:
        files.folder(self.cells, "results")
        text = json.dumps(describe(result, environment), allow_nan=False, separators=(",", ":"))
        path = self.path(result.config)
        files.write(path, text.replace(',"', ',\n"').replace(":{", ":{\n") + "\n")
        return path

    def forget(self, config: Config) -> None:
        shutil.rmtree(self.partial(config), ignore_errors=True)

    def all(self) -> Iterator[Measured]:
        for path in sorted(self.cells.glob("*.json")):
            yield read(path)


def describe(result: Result, environment: dict[str, Any]) -> dict[str, Any]:
    curve = {name: compact([number(row.get(name)) for row in result.history]) for name in COLUMNS}
    curve["rate"] = compact([number(mean(row.get("rate_mean"))) for row in result.history])
    return {
        "accuracy": number(result.accuracy),
        "best_accuracy": number(result.best_accuracy),
        "loss": number(result.loss),
        "seconds": round(result.seconds, 2),
        "rounds": len(result.history),
        "figures": {name: number(value) for name, value in result.figures.items()},
        "curve": curve,
        "config": settings(result.config) | {"eval_every": result.config.eval_every},
        "environment": environment,
    }


def read(path: Path) -> Measured:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["loss"] = math.nan if found["loss"] is None else found["loss"]
        return Measured(**found)
    except OSError as error:
        raise FedaggError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, TypeError, KeyError) as error:
        raise FedaggError(f"{path}: is not a result of fedagg ({error}); delete it, and its cell runs again") from None


def number(value: float | None) -> float | None:
    """Five digits are more than a test set tells apart, and keep the files small."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")


def mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def compact(values: list[float | None]) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else values
