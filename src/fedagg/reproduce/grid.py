"""Specifications: a table or figure as a grid of settings, read from a TOML file, and its cells."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedagg import plugins
from fedagg.algorithms import REGISTRY
from fedagg.config import Config, known_method, methods_with, no_such_option, options_of, resolve
from fedagg.errors import SettingError, unknown

FOLDER = Path(__file__).resolve().parent.parent / "experiments" / "paper"
OURS = ("quick", "table-letters", "table-tuned")  # not from the paper: stored beside its folder
KINDS = ("table", "tuned", "curves", "bars", "partition")


@dataclass(frozen=True)
class Higher:
    """More points of a tuned row, for the methods that it names: multiples of what is highest so far on an axis of their grids."""

    axes: dict[str, list[float]]
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One setting of the paper: data, model and distribution. `settings` are as in a configuration file."""

    name: str
    label: str
    distribution: str
    settings: dict[str, Any]
    paper: str = ""  # the row of the paper to compare with, if its name is another
    higher: tuple[Higher, ...] = ()


@dataclass(frozen=True)
class Tuning:
    """How methods of a tuned table get their settings: the points to try, the same number for each, and on which data."""

    grids: dict[str, tuple[dict[str, Any], ...]]
    validation: float = 0.1
    seeds: tuple[int, ...] = (5, 6)
    halving: bool = False  # all points for a quarter of the rounds, and the best quarter of them for all rounds


@dataclass(frozen=True)
class Spec:
    """One table or figure. Cells are rows × participation × methods × variants × seeds."""

    name: str
    title: str
    kind: str
    methods: tuple[str, ...]
    participation: tuple[float, ...]
    rows: tuple[Row, ...]
    settings: dict[str, Any]
    paper: str | None = None
    variants: tuple[dict[str, Any], ...] = ({"name": ""},)
    leave_out: tuple[dict[str, str], ...] = ()
    seeds: int = 3
    rounds_scale: float = 1.0
    overrides: dict[str, Any] = field(default_factory=dict)
    tuning: Tuning | None = None

    def applies(self, row: Row, method: str) -> bool:
        """Whether the method can be run in this row."""
        model = self.config(row, method, self.participation[0], 0).model
        return not any(x["method"] == method and x["model"] == model for x in self.leave_out)

    def grid(self, row: Row, method: str) -> list[dict[str, Any]]:
        """The points to try for a method: in a row where the highest rate was the best one, higher ones too."""
        points = list(self.tuning.grids.get(method, ())) if self.tuning is not None else []
        for name, values in ((k, v) for more in row.higher if method in more.methods for k, v in more.axes.items()):
            tried = {point[name] for point in points if name in point}
            if len(tried) > 1:
                top = [point for point in points if point.get(name) == max(tried)]
                points += [{**point, name: float(f"{value * max(tried):.9g}")} for value in values for point in top]
        return points

    def config(self, row: Row, method: str, participation: float, seed: int, variant: dict[str, Any] | None = None) -> Config:
        """The configuration of one cell."""
        own = {k: v for k, v in (variant or self.variants[0]).items() if k != "name"}
        named = {"algorithm": "fedagg", "variant": "paper"} if method == "fedagg-paper" else {"algorithm": method}
        given = {**self.settings, "participation": participation, **row.settings, **own, **named, "seed": seed}
        config = resolve(self.fit({k: v for k, v in given.items() if k != "preset"}), preset=given.get("preset"))
        rounds = max(1, round(config.rounds * self.rounds_scale))
        return config.changed(rounds=rounds, **self.overrides)

    @staticmethod
    def fit(given: dict[str, Any]) -> dict[str, Any]:
        """Keep an option for the methods that have it; a name that no method has stays, and is refused later."""
        own = options_of(given)
        return {k: v for k, v in given.items() if k in Config.model_fields or k in own or not methods_with(k)}


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    row: str
    method: str
    config: Config
    variant: str = ""

    @property
    def label(self) -> str:
        about = f"{self.row}, {100 * self.config.participation:g} %, {self.method}, seed {self.config.seed}"
        return f"{about}, {self.variant}" if self.variant else about


def names() -> list[str]:
    """The paper's tables and figures, tables first."""
    found = sorted(path.stem for path in FOLDER.glob("*.toml"))
    return sorted(found, key=lambda name: not name.startswith("table"))


def load(name: str) -> Spec:
    """The specification of that name, or the one in the user's TOML file."""
    path = Path(name) if name.endswith(".toml") else (FOLDER.parent if name in OURS else FOLDER) / f"{name}.toml"
    if not name.endswith(".toml") and name not in (*names(), *OURS):
        raise unknown("experiment", name, [*names(), "all", *OURS])
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError("experiment", name, f"cannot be read ({error.strerror or error})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError("experiment", name, f"is not TOML: {error}") from None
    try:
        spec = parse(path.stem, text)
    except (KeyError, TypeError, AttributeError) as error:
        fix = f"{error} is missing or has the wrong type; see experiments/paper"
        raise SettingError("experiment", name, fix) from None
    if "plugin" in spec.settings:
        spec.settings["plugin"] = plugins.parse_names(spec.settings["plugin"], path.parent)
        plugins.load(spec.settings["plugin"])
    return spec


def parse_higher(more: dict[str, Any], methods: Sequence[str]) -> Higher:
    for method in more.get("methods", ()):
        if method not in methods:
            raise unknown("higher", method, methods)
    return Higher({k: v for k, v in more.items() if k != "methods"}, tuple(more.get("methods", methods)))


def parse(name: str, text: dict[str, Any]) -> Spec:
    if text["kind"] not in KINDS:
        raise unknown("kind", text["kind"], KINDS)
    rows = []
    for row in text["rows"]:
        own = {k: v for k, v in row.items() if k not in ("name", "label", "distribution", "paper", "higher")}
        about = row["name"], row.get("label", row["name"]), row.get("distribution", "")
        higher = tuple(parse_higher(more, text["methods"]) for more in row.get("higher", ()))
        rows.append(Row(*about, own, row.get("paper", row["name"]), higher))
    return Spec(
        name=name,
        title=text["title"],
        kind=text["kind"],
        methods=tuple(text["methods"]),
        participation=tuple(float(p) for p in text["participation"]),
        rows=tuple(rows),
        settings=dict(text.get("settings", {})),
        paper=text.get("paper"),
        variants=tuple(text.get("variants", ({"name": ""},))),
        leave_out=tuple(text.get("leave_out", ())),
        seeds=int(text.get("seeds", 3)),
        tuning=tuning(text) if text["kind"] == "tuned" else None,
    )


def tuning(text: dict[str, Any]) -> Tuning:
    """The grids of a tuned table. An axis has values of a setting, or tables of several settings that belong together. The axes in
    `common` are for every method, unless its own grid has an axis of the same name."""
    grids: dict[str, tuple[dict[str, Any], ...]] = {}
    for method, own in text["grids"].items():
        axes = text.get("common", {}) | own
        choices = [[v if isinstance(v, dict) else {name: v} for v in values] for name, values in axes.items()]
        points = [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*choices)]
        if known_method(method) is None:
            raise unknown("grids", method, REGISTRY.all())
        for name in {name for point in points for name in point}:
            if name not in Config.model_fields and name not in options_of({"algorithm": method}):
                raise no_such_option(name, axes.get(name), [method], "")
        grids[method] = tuple(points)
    sizes = {method: len(points) for method, points in grids.items()}
    if len(set(sizes.values())) != 1:
        raise SettingError("grids", sizes, "give every method the same number of points; otherwise the comparison is not fair")
    seeds = tuple(int(seed) for seed in text.get("tuning_seeds", Tuning.seeds))
    return Tuning(grids, float(text.get("validation", Tuning.validation)), seeds)


def narrow(
    spec: Spec,
    *,
    rows: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    participation: Sequence[float] | None = None,
    seeds: int | None = None,
    rounds_scale: float = 1.0,
    overrides: dict[str, Any] | None = None,
    tuning_seeds: Sequence[int] | None = None,
    halving: bool = False,
) -> Spec:
    """A part of the specification, or a cheaper version of it."""
    chosen = spec.rows
    if rows is not None:
        chosen = tuple(row for row in spec.rows if any(matches(row.name, pattern) for pattern in rows))
        for pattern in rows:
            if not any(matches(row.name, pattern) for row in spec.rows):
                raise unknown("rows", pattern, [row.name for row in spec.rows])
    if methods is not None:
        methods = list(every_method()) if list(methods) == ["all"] else methods
        for method in methods:
            if not REGISTRY.has(method):
                raise unknown("algorithms", method, [*REGISTRY.all(), "all"])
    if not 0 < rounds_scale < float("inf"):
        raise SettingError("rounds-scale", rounds_scale, "must be above 0; 1 is the paper's number of rounds")
    return replace(
        spec,
        rows=chosen,
        methods=spec.methods if methods is None or spec.kind == "partition" else tuple(dict.fromkeys(methods)),
        participation=spec.participation if participation is None else tuple(participation),
        seeds=spec.seeds if seeds is None else seeds,
        rounds_scale=rounds_scale,
        overrides=dict(overrides or {}),
        tuning=spec.tuning and replace(spec.tuning, seeds=tuple(tuning_seeds or spec.tuning.seeds), halving=halving),
    )


def matches(name: str, pattern: str) -> bool:
    """Whether a row matches: `cifar10-cnn` stands for all rows that begin with it; `*` and `?` work as in file names."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}-")


def every_method() -> tuple[str, ...]:
    """All methods, FedAgg last, as in the paper."""
    last = ("fedagg-paper", "fedagg")
    return (*sorted(name for name in REGISTRY.all() if name not in last), *last)


def cells(spec: Spec) -> Iterator[Cell]:
    """The cells to run. Seeds are the outer loop, so that a grid cut short is a complete grid with fewer seeds."""
    for participation in spec.participation:
        for seed in range(spec.seeds):
            for row in spec.rows:
                for method in spec.methods:
                    if spec.applies(row, method):
                        for variant in spec.variants:
                            config = spec.config(row, method, participation, seed, variant)
                            yield Cell(row.name, method, config, variant["name"])
