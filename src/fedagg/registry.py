"""Registries: things by name, from this package, from plugins, and from other packages' entry points."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from fedagg.errors import FedaggWarning, SettingError, first_line, unknown

T = TypeVar("T")
G = TypeVar("G")


class Registry(dict[str, T]):
    """A dictionary that refuses to replace an entry by another of the same name.

    Entry points of other packages are loaded when their name, or a list of all names, is asked for.
    """

    def __init__(self, setting: str, group: str, known: dict[str, T] | None = None, taken: Iterable[str] = ()) -> None:
        """`taken` are names that already mean something else."""
        super().__init__(known or {})
        self.setting, self.group, self.taken = setting, group, tuple(taken)

    def register(self, name: str) -> Callable[[G], G]:
        """A decorator that registers a thing under this name."""

        def enter(thing: G) -> G:
            self.add(name, thing)  # type: ignore[arg-type]
            return thing

        return enter

    def add(self, name: str, thing: T) -> None:
        """Add a thing. Registering the same class or function again, as reloading its module does, is fine."""
        if not isinstance(name, str) or not name or name == "custom" or not name.isprintable() or set(name) & set(" ,/\\"):
            raise SettingError(self.setting, name, "a name is a word without spaces, commas or slashes, and not 'custom'")
        if name in self.taken:
            raise SettingError(self.setting, name, f"is a name of the package itself; choose another name for {origin(thing)}")
        if name in self and origin(self[name]) != origin(thing):
            raise SettingError(self.setting, name, f"is taken by {origin(self[name])}; choose another name for {origin(thing)}")
        self[name] = thing

    def find(self, name: str) -> T:
        """The thing of that name, or a one-line error that lists the known names."""
        if name not in self:
            for entry in installed(self.group):
                if entry.name == name:
                    try:
                        self.load(entry)
                    except Exception as error:  # other packages' code may raise anything
                        words = f"cannot be loaded from {entry.value}: {first_line(error)}; repair or remove that package"
                        raise SettingError(self.setting, name, words) from None
        if name not in self:
            raise unknown(self.setting, name, [*self.taken, *self.all()])
        return self[name]

    def has(self, name: str) -> bool:
        """Does this name exist, here or among the entry points?"""
        return name in self or any(entry.name == name for entry in installed(self.group))

    def all(self) -> list[str]:
        """All names, with all entry points loaded; one that cannot be loaded causes a warning."""
        for entry in installed(self.group):
            if entry.name not in self:
                try:
                    self.load(entry)
                except Exception as error:  # other packages' code may raise anything
                    words = f"{self.setting} {entry.name!r} cannot be loaded from {entry.value}: {first_line(error)}"
                    warnings.warn(words, FedaggWarning, stacklevel=2)
        return list(self)

    def load(self, entry: EntryPoint) -> None:
        thing = entry.load()  # this may also register it
        if entry.name not in self:
            self.register(entry.name)(thing)


@functools.cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """The entry points that packages offer in a group. Cached, because every installed package is searched."""
    return tuple(entry_points(group=group))


def origin(thing: object) -> str:
    """The full name of a class or function, with its module."""
    thing = getattr(thing, "make", thing)  # a network is stored together with its options
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
