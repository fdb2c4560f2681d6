"""Users' code that registers methods, data sets, networks, partitions or trackers: a Python file, or the name of a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedagg.errors import FedaggError, SettingError, first_line

_loaded: dict[str, str] = {}  # file -> the module made from it


def parse_names(given: Any, folder: Path | None = None) -> tuple[str, ...]:
    """Plugins as users give them: one, several separated by commas, or a list. Files become absolute, so that a run can be resumed
    from anywhere."""
    words = [] if given is None else [given] if isinstance(given, str | Path) else given
    if not isinstance(words, list | tuple) or not all(isinstance(word, str | Path) for word in words):
        raise SettingError("plugin", given, "give a Python file or the name of a module, or a list of these")
    stripped = [part.strip() for word in words for part in (word.split(",") if isinstance(word, str) else [str(word)])]
    return tuple(dict.fromkeys(str(((folder or Path()) / w).resolve()) if w.endswith(".py") else w for w in stripped if w))


def load(names: Iterable[str]) -> None:
    """Import plugins, which register what they define. One that is already loaded is not loaded again."""
    for name in names:
        try:
            if name.endswith(".py"):
                from_file(Path(name))
            elif name not in sys.modules:
                from_module(name)
        except FedaggError:
            raise
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            raise SettingError("plugin", name, f"cannot be loaded: {type(error).__name__}: {first_line(error)}") from None


def module(name: str) -> ModuleType:
    """The module of a plugin, loaded if necessary."""
    (given,) = parse_names(name)
    load([given])
    return sys.modules[_loaded.get(given, given)]


def from_file(path: Path) -> None:
    path = path.resolve()
    if str(path) in _loaded:
        return
    if path == Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve():  # a script that names itself
        _loaded[str(path)] = "__main__"
        return
    if not path.is_file():
        raise SettingError("plugin", str(path), "there is no such file")
    name = path.stem
    while name in sys.modules or (not name.startswith("plugin_") and importlib.util.find_spec(name)):
        name = f"plugin_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SettingError("plugin", str(path), "is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _loaded[str(path)] = name


def from_module(name: str) -> None:
    """Import a module, also one in the current folder, as `python -m` does."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        importlib.import_module(name)
    finally:
        sys.path.remove(here)
