"""Command-line options made from declarations: a run's settings from `Config`, a method's options from its own file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from fedagg import plugins
from fedagg.algorithms import REGISTRY
from fedagg.cli.catalogue import Plugin
from fedagg.config import PRESETS, SETTINGS, Config, choices, read
from fedagg.options import Option, declared

OF_METHODS = "Options of methods"


def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option(name: str, kind: Any, text: str, panel: str | None = None) -> inspect.Parameter:
    """An option that is None unless given, so that values of a file or preset can take its place."""
    flag = f"--{name.replace('_', '-')}"
    names = (f"{flag}/--no-{name.replace('_', '-')}",) if kind is bool else (flag,)
    made = typer.Option(*names, help=text, show_default=False, rich_help_panel=panel)
    return parameter(name, Annotated[kind | None, made])


def setting(name: str) -> inspect.Parameter:
    if name == "plugin":
        return parameter(name, Plugin)
    field = Config.model_fields[name]
    words = choices(name)
    kind = str if words else next(t for t in (*get_args(field.annotation), field.annotation) if t is not type(None))
    text = f"{field.description}: {', '.join(words)}" if words else f"{field.description}"
    return option(name, kind, text if field.default is None else f"{text} (default {field.default})")


def methods() -> dict[str, dict[str, Option]]:
    """All options of methods by name, with each method's declaration."""
    found: dict[str, dict[str, Option]] = {}
    for method in sorted(REGISTRY):
        for name, about in declared(REGISTRY[method]).items():
            found.setdefault(name, {})[method] = about
    return found


def method_option(name: str, having: dict[str, Option]) -> inspect.Parameter:
    """A command-line option for a method's option. Methods may use a name differently: the chosen method checks the value."""
    kinds = {about.kind for about in having.values()}
    meant: dict[tuple[str, tuple[str, ...], Any], list[str]] = {}
    for method, about in having.items():
        meant.setdefault((about.description, about.choices, about.default), []).append(method)
    texts = []
    for (description, words, default), who in meant.items():
        text = f"{', '.join(who)}: {description}{': ' if words else ''}{', '.join(words)}"
        texts.append(text if default is None else f"{text} (default {default})")
    return option(name, kinds.pop() if len(kinds) == 1 else str, "; ".join(texts), OF_METHODS)


def preset() -> inspect.Parameter:
    text = f"settings to start from: {', '.join(PRESETS)}"
    return parameter("preset", Annotated[str | None, typer.Option("--preset", help=text, show_default=False)])


def load_named(arguments: Sequence[str]) -> None:
    """Load the plugins and methods that a command line names before parsing it, because they have their own options."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    after = list(pairwise(words))
    files = [Path(word) for word in words if word.endswith(".toml")]
    files += [Path(folder) / "config.toml" for flag, folder in after if flag == "--resume"]
    file_settings = [read(file) for file in files if file.is_file()]
    for given in (*(name for flag, name in after if flag == "--plugin"), *(one.get("plugin") for one in file_settings)):
        plugins.load(plugins.parse_names(given))
    for name in (*(part for word in words for part in word.split(",")), *(str(one.get("algorithm")) for one in file_settings)):
        if name and REGISTRY.has(name):
            REGISTRY.find(name)


def with_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command that takes `**settings`, with an option for every setting and for every option of the known methods."""
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {p.name for p in own} | ({"algorithm"} if any(p.name == "algorithms" for p in own) else set())
    made = [preset(), *(setting(name) for name in SETTINGS if name not in taken)]
    made += [method_option(name, having) for name, having in methods().items() if name not in taken]

    def command(**given: Any) -> Any:
        return function(**given)

    parameters = [*own, *made]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
