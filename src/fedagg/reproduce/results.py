"""Measured results, shared by all tables: a file for each data set and model, with a line of JSON per cell, sorted by name."""

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
from fedagg.config import NO_EFFECT, Config, options_of
from fedagg.errors import FedaggError, first_line
from fedagg.measure import ACCURACY, Measure, read_measure
from fedagg.result import Result

COLUMNS = ("loss", "train_loss", "drift", "passes", "samples", "bytes_up", "bytes_down", "seconds")


@dataclass(frozen=True)
class Measured:
    """A finished cell. `curve` has one list per column; a value that is the same in every round is stored once."""

    config: dict[str, Any]
    score: float
    best: float
    loss: float
    seconds: float
    rounds: int
    figures: dict[str, float]
    curve: dict[str, Any]
    environment: dict[str, Any]
    metric: Measure = ACCURACY  # the measure of score and best

    @property
    def accuracy(self) -> float:
        return self.score

    def column(self, name: str) -> list[float | None]:
        values = self.curve.get(name)
        return list(values) if isinstance(values, list) else [values] * self.rounds


def settings(config: Config) -> dict[str, Any]:
    """The settings that a result depends on."""
    return {k: v for k, v in config.flat().items() if k not in NO_EFFECT}


def in_json(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are stored. JSON has no infinity, which sigma may be; its name as text is read as the same setting."""
    return {name: str(value) if value == math.inf else value for name, value in values.items()}


def key(config: Config) -> str:
    """The name of a cell: its main settings in readable form, and a hash of all that differ from the defaults.

    Defaults are left out of the hash so that a new setting does not orphan old results. The line holds the whole configuration,
    which is compared before a result is used.
    """
    defaults = {name: field.default for name, field in Config.model_fields.items()}
    defaults |= {name: option.default for name, option in options_of(config.flat()).items()}
    changed = {k: v for k, v in settings(config).items() if v != defaults.get(k)}
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:10]
    split = f"{config.partition}{config.sigma:g}" if config.partition.startswith("dirichlet") else config.partition
    share = f"p{100 * config.participation:g}"
    return f"{config.data_name}_{config.model}_{split}_{share}_{config.method}_seed{config.seed}_{digest}"


class Store:
    """A results folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[Path, tuple[object, dict[str, Any]]] = {}  # the state of a file when it was read, and its cells
        self.take_over()

    def path(self, config: Config) -> Path:
        return self.folder / f"{config.data_name}_{config.model}.jsonl"

    def partial(self, config: Config) -> Path:
        """The run folder of an unfinished cell; it is removed when the cell is finished."""
        return self.folder / ".partial" / key(config)

    def get(self, config: Config) -> Measured | None:
        """The result of exactly this configuration, if there is one."""
        path, name = self.path(config), key(config)
        cell = self.cells(path).get(name)
        if cell is None:
            return None
        found, wanted = measured(path, name, cell), in_json(settings(config))
        return found if all(wanted[k] == v for k, v in found.config.items() if k in wanted and v is not None) else None

    def put(self, result: Result, environment: dict[str, Any]) -> None:
        self.add(self.path(result.config), {key(result.config): describe(result, environment)})

    def add(self, path: Path, new: dict[str, Any]) -> None:
        """Put cells into a file, replacing older ones of the same name. Other processes may do this at the same time."""
        files.folder(self.folder / ".partial", "results")
        with files.locked(self.folder / ".partial" / "lock"):
            lines = [json.dumps({"cell": name, **cell}, allow_nan=False, separators=(",", ":"))
                     for name, cell in sorted({**self.cells(path), **new}.items())]  # fmt: skip
            files.write(path, "\n".join(lines) + "\n")

    def cells(self, path: Path) -> dict[str, Any]:
        """A file's cells by name. Of two with the same name the later one counts, so that several machines' files can be joined."""
        try:
            state = path.stat()
            stamp = (state.st_ino, state.st_mtime_ns, state.st_size)
            if path not in self.known or self.known[path][0] != stamp:
                self.known[path] = stamp, split(path, path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise FedaggError(f"{path}: cannot be read ({first_line(error)})") from None
        return self.known[path][1]

    def files(self) -> list[Path]:
        """The files that hold results; files of run folders have no underscore in their names."""
        return sorted(self.folder.glob("*_*.jsonl"))

    def all(self) -> Iterator[Measured]:
        for path in self.files():
            for name, cell in sorted(self.cells(path).items()):
                yield measured(path, name, cell)

    def forget(self, config: Config) -> None:
        shutil.rmtree(self.partial(config), ignore_errors=True)

    def take_over(self) -> None:
        """Move the results of earlier versions, which stored each cell in a separate file, to their present place."""
        old = sorted((self.folder / "cells").glob("*.json"))
        grouped: dict[Path, dict[str, Any]] = {}
        for path in old:
            found = json.loads(path.read_text(encoding="utf-8"))
            config = measured(path, path.stem, found).config
            grouped.setdefault(self.folder / f"{config['dataset']}_{config['model']}.jsonl", {})[path.stem] = found
        for path, cells in grouped.items():
            self.add(path, cells)
        for path in old:
            path.unlink()


def describe(result: Result, environment: dict[str, Any]) -> dict[str, Any]:
    metric = result.metric
    curve = {name: compact([number(row.get(name)) for row in result.history]) for name in (metric.key, *COLUMNS)}
    curve["rate"] = compact([number(mean(row.get("rate_mean"))) for row in result.history])
    return {
        **({} if metric == ACCURACY else {"metric": metric.facts()}),
        metric.key: number(result.score),
        f"best_{metric.key}": number(result.best),
        "loss": number(result.loss),
        "seconds": round(result.seconds, 2),
        "rounds": len(result.history),
        "figures": {name: number(value) for name, value in result.figures.items()},
        "curve": curve,
        "config": in_json(settings(result.config)) | {"eval_every": result.config.eval_every},
        "environment": environment,
    }


def split(path: Path, text: str) -> dict[str, Any]:
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            cell = json.loads(line)
            found[cell.pop("cell")] = cell
        except (ValueError, TypeError, KeyError, AttributeError):
            raise FedaggError(f"{path}: line {number} is not a result of fedagg; delete it, and its cell runs again") from None
    return found


def measured(path: Path, name: str, cell: dict[str, Any]) -> Measured:
    try:
        measure = read_measure(cell.get("metric"))
        figures = {"score": cell[measure.key], "best": cell[f"best_{measure.key}"], "loss": cell["loss"]}
        known: dict[str, Any] = {name: math.nan if value is None else value for name, value in figures.items()}
        rest = {name: value for name, value in cell.items() if name not in (measure.key, f"best_{measure.key}", "loss", "metric")}
        return Measured(**rest, **known, metric=measure)
    except (TypeError, KeyError) as error:
        raise FedaggError(f"{path}: {name} is not a result of fedagg ({error}); delete its line, and it runs again") from None


def number(value: float | None) -> float | None:
    """A number rounded to five digits: more than a test set can distinguish, and it keeps files small."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")


def mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def compact(values: list[float | None]) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else values
