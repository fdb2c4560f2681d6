"""The simulators that are compared: plain loops and our engines by name, any other as a Python file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from fedagg.bench import ours, plain, strong
from fedagg.bench.task import Task
from fedagg.errors import SettingError, first_line, unknown


@dataclass(frozen=True)
class Rival:
    """A simulator. `run` makes one round to warm up and then the task's rounds, calling `tick` after each. It may return a note."""

    about: str
    run: Callable[[Task, Callable[[], None]], str | None]
    needs: tuple[str, ...] = ()  # modules that must be installed
    package: str = "fedagg"
    name: str = ""

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
    "strong": Rival("the strongest plain loop, on tensors", strong.run, package="torch"),
    "sequential": Rival("fedagg, sequential engine", functools.partial(ours.run, "sequential")),
    "batched": Rival("fedagg, batched engine", functools.partial(ours.run, "batched")),
    "auto": Rival("fedagg, the engine it picks", functools.partial(ours.run, "auto")),
}


def find(name: str) -> Rival:
    """A rival by name, or from a Python file with `run(task, tick)`. The file may define NEEDS, the modules that must be installed,
    and PACKAGE, the package whose version is recorded with its numbers."""
    if not name.endswith(".py"):
        if name not in RIVALS:
            raise unknown("rivals", name, RIVALS)
        return RIVALS[name]
    path = Path(name)
    spec = util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SettingError("rivals", name, "there is no such file; give a Python file with a function run(task, tick)")
    module = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        run = module.run
    except Exception as error:
        raise SettingError("rivals", name, f"{first_line(error)}; give a Python file with a function run(task, tick)") from None
    about = (module.__doc__ or path.stem).strip().splitlines()[0]
    return Rival(about, run, tuple(getattr(module, "NEEDS", ())), getattr(module, "PACKAGE", path.stem), path.stem)
