"""The errors that people see: one line that names the setting, the value and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib.util import find_spec


class FedaggError(Exception):
    """Something the user can fix. The command line prints it as one line and exits with status 2."""


class SettingError(FedaggError):
    """A setting has a value that cannot work."""

    def __init__(self, setting: str, value: object, fix: str) -> None:
        self.setting, self.value, self.fix = setting, value, fix
        super().__init__(f"{' '.join(setting.split())} = {quote_value(value)}: {' '.join(fix.split())}")


def quote_value(value: object) -> str:
    """A value as quoted in an error: on one line, and not too long."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        text = type(value).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."


class DataError(FedaggError):
    """A data file is missing, damaged, or not what it claims to be."""


class MissingError(FedaggError, ImportError):
    """An optional package is missing."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package.partition('.')[0]}, which is not installed: pip install 'fedagg[{extra}]'")


def need(what: str, package: str, extra: str) -> None:
    """Raise a one-line error that says what to install, before any long work. The package itself is imported when it is used."""
    if find_spec(package) is None:
        raise MissingError(what, package, extra)


class FedaggWarning(UserWarning):
    """Something the user should know but need not act on. The command line prints it as one line."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, which may be long, or its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def unknown(setting: str, value: object, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> SettingError:
    """The error for an unknown name, with the nearest known one; `elsewhere` maps names that other packages use."""
    names = sorted(known)
    near = [other for word, other in (elsewhere or {}).items() if word == value]
    near = near or [n for n in names if value and n.startswith(str(value))]
    near = near or difflib.get_close_matches(str(value), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return SettingError(setting, value, f"{hint}choose one of {', '.join(names)}")
