"""Read run folders, as `record` wrote them, for reports and pictures; and choose names for the runs."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedagg import config, files
from fedagg.config import NO_EFFECT, Config
from fedagg.errors import FedaggError, SettingError
from fedagg.formats import check_run
from fedagg.measure import Measure, read_measure

if TYPE_CHECKING:
    from torch import nn

# Settings that `task` describes or that are in every name.
DESCRIBED = {
    *("dataset", "model", "task", "metric", "partition", "sigma", "shards", "deviation", "column", "participation", "clients"),
    *("rounds", "normalize", "validation", "seed", "algorithm", "variant"),
}
RESULT = ("rounds", "loss", "seconds")  # numbers in result.json, besides those of the metric
RATES = ("rate_mean", "rate_min", "rate_max")


@dataclass(frozen=True)
class Run:
    """The content of a run folder. `clients` has one row per round: who took part, at which rates, and how far each moved."""

    name: str
    folder: Path
    config: Config
    history: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    environment: dict[str, Any]
    result: dict[str, Any]

    @property
    def metric(self) -> Measure:
        """The metric by which the run is judged."""
        return read_measure(self.environment.get("metric"))

    def curve(self, column: str) -> tuple[list[float], list[float]]:
        """The rounds that have this figure, and its values; for a list (one value per epoch), its mean."""
        found = [(row["round"], row[column]) for row in self.history if row.get(column) is not None]
        values = [sum(value) / len(value) if isinstance(value, list) else value for _, value in found]
        return [float(number) for number, _ in found], [float(value) for value in values]


class Lines:
    """Reads the complete lines of files that may still be growing. Lines read before are not read again, unless they have changed:
    a run that continues from a checkpoint cuts its files back."""

    def __init__(self) -> None:
        self.known: dict[Path, tuple[int, bytes, list[dict[str, Any]]]] = {}  # bytes read, the last line, all rows

    def __call__(self, path: Path, is_valid: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """The rows of a file; `is_valid` checks whether a row's values are of the right kind."""
        size, last, before = self.known.get(path, (0, b"", []))
        text = content(path, size - len(last)) or b""
        if text.startswith(last):
            text, rows = text[len(last) :], [*before]
        else:
            size, last, text, rows = 0, b"", content(path) or b"", []
        for line in text.splitlines(keepends=True):
            if line.endswith(b"\n"):
                row = parse_object(line)
                if row is None or not is_valid(row):
                    raise FedaggError(f"{path}: line {len(rows) + 1} is damaged; repeat the run")
                rows.append(row)
                size, last = size + len(line), line
        self.known[path] = size, last, rows
        return rows


def load(folder: Path, lines: Lines | None = None) -> Run:
    if not (folder / "config.toml").exists():
        raise SettingError("run", str(folder), "is not a run folder: it has no config.toml")
    check_run(folder)
    chosen = config.make(config.read(folder / "config.toml"), recorded=True)
    name, lines = f"{chosen.method} seed {chosen.seed}", lines or Lines()
    environment = read_json(folder / "environment.json")
    key = read_measure(environment.get("metric")).key
    return Run(
        name=name,
        folder=folder,
        config=chosen,
        history=lines(folder / "metrics.jsonl", is_round),
        clients=lines(folder / "clients.jsonl", is_participants),
        environment=environment,
        result=read_json(folder / "result.json", (*RESULT, key, f"best_{key}")),
    )


def load_all(folders: Iterable[Path], load: Callable[[Path], Run] = load) -> list[Run]:
    """Load every folder once, under names that tell the runs apart."""
    found = [load(folder) for folder in {folder.resolve(): folder for folder in folders}.values()]
    return [replace(run, name=name) for run, name in zip(found, names(found), strict=True)]


def names(found: Sequence[Run]) -> list[str]:
    """Method and seed, with what differs: in the task between any two runs, in other settings between runs of a method. If names
    are still equal, the folder is added."""
    tasks = [task(run.config) for run in found]
    of_method: dict[str, list[dict[str, Any]]] = {}
    for run in found:
        of_method.setdefault(run.config.method, []).append(details(run.config))
    differ, own = differing_settings(tasks), {method: differing_settings(same) for method, same in of_method.items()}
    made = []
    for c, described in zip((run.config for run in found), tasks, strict=True):
        words = [described[key] for key in differ if described[key]] + [f"{key} {c.flat().get(key)}" for key in own[c.method]]
        made.append(" ".join([c.method, *words, f"seed {c.seed}"]))
    often = Counter(made)
    shared = [run.folder for run, name in zip(found, made, strict=True) if often[name] > 1]
    tail = dict(zip(shared, tails(shared), strict=True))
    return [f"{name} ({tail[run.folder]})" if run.folder in tail else name for run, name in zip(found, made, strict=True)]


def task(config: Config) -> dict[str, str]:
    """A description of a run's task; runs of different tasks cannot be compared."""
    return {
        "dataset": config.dataset,
        "model": config.model,
        "task": " ".join(filter(None, (config.task, config.metric and f"judged by {config.metric}"))),
        "split": split(config),
        "clients": f"{100 * config.participation:g} % of {config.clients} clients",
        "rounds": f"{config.rounds} rounds",
        "normalize": "inputs standardised" if config.normalize else "",
        "validation": f"scored on {held_back(config)}" if config.validation else "",
    }


def split(config: Config) -> str:
    if config.partition.startswith("dirichlet"):
        return f"{config.partition} {config.sigma:g}"
    own = {"shards": config.shards, "quantity": f"{config.deviation:g}", "feature": config.column}
    return f"{config.partition} {own[config.partition]}" if config.partition in own else config.partition


def held_back(config: Config) -> str:
    return f"{100 * config.validation:g} % of the training data held back" if config.validation else ""


def metric_name(what: str, configs: Iterable[Config]) -> str:
    """The name of a metric or loss, with the data it is measured on if that is the same for all."""
    held = {config.validation > 0 for config in configs}
    return what if len(held) > 1 else f"validation {what}" if True in held else f"test {what}"


def details(config: Config) -> dict[str, Any]:
    """The other settings that the outcome depends on, besides task, method and seed."""
    return {k: v for k, v in config.flat().items() if k not in DESCRIBED | NO_EFFECT}


def differing_settings(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The settings that are not the same everywhere."""
    names = dict.fromkeys(key for one in settings for key in one)
    return [key for key in names if any(one.get(key) != settings[0].get(key) for one in settings)]


def tails(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell folders apart: their names, or more if these are equal."""
    parts = [folder.resolve().parts for folder in folders]
    enough = next(n for n in range(1, 1 + max(map(len, parts), default=1)) if len({one[-n:] for one in parts}) == len(parts))
    return ["/".join(one[-enough:]) for one in parts]


def no_round(what: Iterable[object]) -> SettingError:
    """The error for runs that have nothing to show."""
    return SettingError("what", ", ".join(map(str, what)), "has no finished round yet")


def find(folder: Path) -> list[Path]:
    """The run folders at or below a folder, e.g. those of `fedagg compare`."""
    found = (path for path in folder.rglob("config.toml") if ".partial" not in path.relative_to(folder).parts)
    return sorted(path.parent for path in found)


def load_weights(module: nn.Module, path: Path) -> nn.Module:
    """The module with the weights that a run ended with."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    again = f"have it written with: fedagg run --resume {shlex.quote(str(path.parent))}"
    if not path.exists():
        raise SettingError("run", str(path.parent), f"has no model.safetensors: the run is not finished; {again}")
    try:
        module.load_state_dict(load_file(path))
    except (SafetensorError, OSError):
        raise FedaggError(f"{path}: is damaged; {again}") from None
    except RuntimeError:  # names or shapes that are not the module's
        raise FedaggError(f"{path}: holds the weights of another model; {again}") from None
    return module


def read_json(path: Path, numbers: Iterable[str] = ()) -> dict[str, Any]:
    """The object in a JSON file, or an empty one if there is no file. The values of `numbers` must be numbers or missing."""
    text = content(path)
    found = parse_object(text) if text is not None else {}
    if found is None or not all(is_number(found[name]) for name in numbers if found.get(name) is not None):
        raise FedaggError(f"{path}: is damaged; delete it and try again, the run can be read without it")
    return found


def content(path: Path, start: int = 0) -> bytes | None:
    """The bytes of a file from `start` on; None if there is no file."""
    try:
        with open(path, "rb") as handle:
            handle.seek(start)
            return handle.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FedaggError(f"{path}: cannot be read ({files.reason(error)}); give a file that you may read") from None


def parse_object(text: bytes) -> dict[str, Any] | None:
    """A JSON object; None if the text is anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # a ValueError also for bytes that are not text
        return None
    return found if isinstance(found, dict) else None


def is_round(row: dict[str, Any]) -> bool:
    """Is this a line of metrics.jsonl? Rates are one number per epoch, causes are words, the rest are numbers."""
    figures = {name: value for name, value in row.items() if name != "causes" and value is not None}
    return "round" in figures and all(is_row(v) if name in RATES else is_number(v) for name, v in figures.items())


def is_participants(row: dict[str, Any]) -> bool:
    """Is this a line of clients.jsonl? Each participant has rates and a distance moved, each client left out has a cause."""
    clients, rates, moved = (row.get(name, []) for name in ("clients", "rates", "moved"))
    listed = is_row(clients) and is_row(moved) and isinstance(rates, list) and all(map(is_row, rates))
    causes = row.get("left_out", {})
    caused = isinstance(causes, dict) and all(isinstance(cause, str) for cause in causes.values())
    return is_number(row.get("round")) and listed and caused and len(clients) == len(rates) == len(moved)


def is_row(value: object) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


def is_number(value: object) -> bool:
    return isinstance(value, int | float)
