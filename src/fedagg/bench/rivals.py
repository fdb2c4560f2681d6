"""Who takes part, by name, and whether it can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util

from fedagg.bench import flower, ours, plain, research
from fedagg.bench.task import Task


@dataclass(frozen=True)
class Rival:
    """`run` makes the task's rounds, and one more before them to warm up, calls `tick` after each, and may say how."""

    about: str
    run: Callable[[Task, Callable[[], None]], str | None]
    needs: tuple[str, ...] = ()  # modules that have to be there
    package: str = "fedagg"

    @property
    def installed(self) -> bool:
        return all(util.find_spec(name) is not None for name in self.needs)

    @property
    def version(self) -> str | None:
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


RIVALS = {
    "plain": Rival("a plain PyTorch loop", plain.run, package="torch"),
    "sequential": Rival("fedagg, sequential engine", functools.partial(ours.run, "sequential")),
    "batched": Rival("fedagg, batched engine", functools.partial(ours.run, "batched")),
    "auto": Rival("fedagg, the engine it picks", functools.partial(ours.run, "auto")),
    "flower": Rival("Flower's simulation", flower.run, ("flwr", "ray"), "flwr"),
    "pfl": Rival("pfl-research", research.run, ("pfl",), "pfl"),
}
