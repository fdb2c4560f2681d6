"""Command-line options made from the configuration: every field is an option, described once, in `Config`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer

from fedagg.config import PRESETS, Config, choices


def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option(name: str) -> inspect.Parameter:
    """A setting as an option that is None unless given, so that file and preset can be told from it."""
    field = Config.model_fields[name]
    kind = next(t for t in (*get_args(field.annotation), field.annotation) if t is not type(None))
    if choices(name):
        kind = str
    default = field.default
    text = field.description or ""
    if choices(name):
        text += f": {', '.join(choices(name))}"
    if default is not None:
        text += f" (default {default})"
    flag = f"--{name.replace('_', '-')}"
    names = (f"{flag}/--no-{name.replace('_', '-')}",) if kind is bool else (flag,)
    return parameter(name, Annotated[kind | None, typer.Option(*names, help=text, show_default=False)])


def preset() -> inspect.Parameter:
    text = f"one of the paper's settings: {', '.join(PRESETS)}"
    return parameter("preset", Annotated[str | None, typer.Option("--preset", help=text, show_default=False)])


def with_settings(function: Callable[..., Any], *, leave_out: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Give a command that takes `**settings` one option for every setting."""
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {p.name for p in own} | set(leave_out)
    made = [preset(), *(option(name) for name in Config.model_fields if name not in taken)]
    parameters = [*own, *made]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function
