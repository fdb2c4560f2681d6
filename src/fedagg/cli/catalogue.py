"""`fedagg list`: show what is available, without importing torch unless a plugin or another package does."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import fedagg
from fedagg import plugins, registry
from fedagg.cli.show import out
from fedagg.config import ENGINES, PRESETS

HERE = Path(fedagg.__file__).parent
PLUGIN = "a Python file or module that adds methods, data sets, models, partitions or trackers; may be repeated"
Plugin = Annotated[list[str] | None, typer.Option("--plugin", help=PLUGIN, show_default=False)]
# What is listed: the file, the table in it, and the group of entry points.
TABLES = {
    "data sets": ("data/sources.py", "SOURCES", "fedagg.datasets"),
    "models": ("models/registry.py", "PUBLISHED", "fedagg.models"),
    "partitions": ("partition.py", "_NAMES", "fedagg.partitions"),
    "trackers": ("trackers.py", "PUBLISHED", "fedagg.trackers"),
}


def list_all(
    method: Annotated[str | None, typer.Argument(help="a method, to see its options", show_default=False)] = None,
    *,
    plugin: Plugin = None,
) -> None:
    """Show algorithms, data sets, models, partitions, engines, trackers and presets; or the options of one method."""
    brought = plugins.parse_names(plugin)
    plugins.load(brought)
    if method is not None:
        return out.print(options(method))
    groups = ("fedagg.algorithms", *(group for _, _, group in TABLES.values()))
    more = bool(brought) or any(registry.installed(group) for group in groups)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, about in sorted((methods_now() if more else methods()).items()):
        table.add_row(f"algorithm {name}", about)
    for label, names in (names_now() if more else {what: keys(*where[:2]) for what, where in TABLES.items()}).items():
        table.add_row(label, ", ".join(names))
    table.add_row("engines", ", ".join(ENGINES))
    for name, preset in PRESETS.items():
        table.add_row(f"preset {name}", ", ".join(f"{k} {v}" for k, v in preset.items()))
    out.print(table)
    return None


def methods() -> dict[str, str]:
    """The package's methods with their descriptions, read from the files that register them: importing those would import torch."""
    found = {}
    for path in (HERE / "algorithms").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            for call in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "register":
                    found[ast.literal_eval(call.args[0])] = first(ast.get_docstring(tree))
    return found


def keys(file: str, table: str) -> list[str]:
    """The names in one of the package's tables: a literal dictionary or tuple in a file."""
    for node in ast.parse((HERE / file).read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == table and isinstance(node, ast.Assign | ast.AnnAssign):
            listed = node.value.keys if isinstance(node.value, ast.Dict) else getattr(node.value, "elts", [])
            return [ast.literal_eval(name) for name in listed if name is not None]
    raise LookupError(f"{file} has no table {table}")


def methods_now() -> dict[str, str]:
    """All methods, including those of plugins and other packages."""
    from fedagg.algorithms import REGISTRY

    return {name: first(kind_doc(REGISTRY[name])) for name in REGISTRY.all()}


def kind_doc(kind: type) -> str | None:
    """The description of a method: in the package that of its file, elsewhere that of its class."""
    module = sys.modules.get(kind.__module__)
    return module.__doc__ if module is not None and kind.__module__.startswith("fedagg.") else kind.__doc__


def first(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def names_now() -> dict[str, list[str]]:
    from fedagg import data, models, partition, trackers

    for others in (data.REGISTRY, models.ARCHITECTURES, partition.REGISTRY, trackers.TRACKERS):
        others.all()
    found = (data.names(), models.names(), partition.names(), trackers.TRACKERS)
    return {what: list(names) for what, names in zip(TABLES, found, strict=True)}


def options(method: str) -> Table:
    """A table of a method's options."""
    from fedagg.algorithms import REGISTRY
    from fedagg.options import LIMITS, declared

    kind = REGISTRY.find(method)
    signs = dict(zip(LIMITS, (">", "≥", "<", "≤"), strict=True))
    nothing = None if declared(kind) else "no options of its own"
    table = Table(title=f"{method}: {first(kind_doc(kind))}", title_justify="left", caption=nothing)
    for column in ("option", "default", "allowed", "meaning"):
        table.add_column(column)
    for name, about in declared(kind).items():
        allowed = about.choices or [f"{signs[limit]} {value:g}" for limit, value in about.limits.items()]
        default = "" if about.default is None else str(about.default)
        table.add_row(f"--{name.replace('_', '-')}", default, ", ".join(allowed) or about.kind.__name__, about.description)
    return table
