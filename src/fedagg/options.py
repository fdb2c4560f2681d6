"""A method's options: declared once, in its own file, with default, range and description.

    mu: float = option(0.01, "weight of the proximal term", ge=0)

The command line, files of settings, `fedagg list` and the documentation are made from these declarations.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedagg.errors import SettingError, first_line

LIMITS = ("gt", "ge", "lt", "le")


@dataclass(frozen=True)
class Option:
    """The declaration of one of a method's options."""

    name: str
    kind: type  # bool, int, float or str
    default: Any
    description: str = ""
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    choices: tuple[str, ...] = ()
    optional: bool = False  # may it be None, so that the method chooses?


def option(
    default: Any,
    description: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
) -> Any:
    """A dataclass field that declares an option of a method, with default, meaning and range."""
    given = dict(zip(LIMITS, (gt, ge, lt, le), strict=True))
    limits = {name: value for name, value in given.items() if value is not None}
    return dataclasses.field(default=default, metadata={"description": description, "limits": limits})


def declared(method: type) -> Mapping[str, Option]:
    """The options of a method by name: the dataclass fields that text can set, except `lr`, which every method has.

    A plain field with a default is an option too. A field of another type (a list, a function) is set when the object is made.
    """
    return _declared(method)


@functools.cache
def _declared(method: Any) -> Mapping[str, Option]:
    try:
        hints = get_type_hints(method)
    except Exception as error:  # a name in an annotation that does not exist
        raise SettingError("algorithm", method.__qualname__, f"its annotations cannot be read: {first_line(error)}") from None
    found = {}
    for field in dataclasses.fields(method):
        form = plain_type(hints[field.name])
        if field.init and field.name != "lr" and form is not None and field.default is not dataclasses.MISSING:
            kind, choices, optional = form
            if optional and field.default is not None:
                words = (
                    f"{method.__qualname__}.{field.name} may be None, so None must be its default and may mean {field.default!r}"
                )
                raise SettingError("algorithm", method.__name__, words)
            about, limits = field.metadata.get("description", ""), field.metadata.get("limits", {})
            found[field.name] = Option(field.name, kind, field.default, about, limits, choices, optional)
    return found


def plain_type(annotation: Any) -> tuple[type, tuple[str, ...], bool] | None:
    """The type in an annotation, the words it is limited to, and whether it may be None; or None if text cannot express it."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    rest = [part for part in parts if part is not type(None)]
    if len(rest) != 1:
        return None
    optional = len(rest) < len(parts)
    words = get_args(rest[0])
    if get_origin(rest[0]) is Literal and all(isinstance(word, str) for word in words):
        return str, words, optional
    return (rest[0], (), optional) if rest[0] in (bool, int, float, str) else None
