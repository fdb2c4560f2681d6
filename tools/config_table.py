"""Bring the tables in docs/configuration.md up to date: settings with `Config`, options with the methods that declare them.

A table stands between two comments; the first names its settings, or is `presets`, or `methods` for the options of all methods:

    <!-- settings: algorithm dataset model -->
    (the table)
    <!-- /settings -->

`python tools/config_table.py` rewrites them; with `--check` it only says whether they are out of date, and fails if so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from fedagg import files
from fedagg.algorithms import REGISTRY
from fedagg.config import PRESETS, SETTINGS, Config, choices
from fedagg.options import LIMITS, Option, declared

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
MARKED = re.compile(r"(<!-- settings: (?P<names>[a-z0-9_ \n]+) -->\n).*?(<!-- /settings -->)", re.DOTALL)
SIGNS = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}"}


def allowed(name: str) -> str:
    """The values a setting may take, as far as its type says: words, or the ends of a range."""
    if words := choices(name):
        return ", ".join(f"`{word}`" for word in words)
    limits = (
        sign.format(getattr(limit, kind))
        for limit in Config.model_fields[name].metadata
        for kind, sign in SIGNS.items()
        if getattr(limit, kind, None) is not None
    )
    return ", ".join(limits)


def method_row(method: str, option: Option) -> str:
    words = [f"`{word}`" for word in option.choices] or [
        SIGNS[limit].format(option.limits[limit]) for limit in LIMITS if limit in option.limits
    ]
    flag = f"`--{option.name.replace('_', '-')}`"
    return f"| `{method}` | {flag} | {shown(option.default)} | {', '.join(words)} | {option.description} |"


def methods_table() -> str:
    rows = [method_row(method, option) for method, kind in sorted(REGISTRY.items()) for option in declared(kind).values()]
    return "\n".join(["| method | option | default | allowed | meaning |", "|---|---|---|---|---|", *rows])


def shown(value: Any) -> str:
    if value is None or value == ():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def row(name: str) -> str:
    field = Config.model_fields[name]
    option = f"`--{name.replace('_', '-')}`"
    return f"| {option} | {shown(field.default)} | {allowed(name)} | {field.description} |"


def settings_table(names: list[str]) -> str:
    return "\n".join(["| option | default | allowed | meaning |", "|---|---|---|---|", *map(row, names)])


def presets_table() -> str:
    names = list(max(PRESETS.values(), key=len))
    rows = [
        f"| `{preset}` | " + " | ".join(str(values.get(name, "")) for name in names) + " |" for preset, values in PRESETS.items()
    ]
    return "\n".join(["| preset | " + " | ".join(names) + " |", "|---|" + "---|" * len(names), *rows])


def updated(text: str) -> str:
    def table(found: re.Match[str]) -> str:
        names = found["names"].split()
        special = {"presets": presets_table, "methods": methods_table}
        made = special[names[0]]() if names[0] in special else settings_table(names)
        return f"{found[1]}\n{made}\n\n{found[3]}"

    return MARKED.sub(table, text)


def named(text: str) -> list[str]:
    """The settings that the page's tables have, in order."""
    return [name for found in MARKED.finditer(text) for name in found["names"].split() if name not in ("presets", "methods")]


def main(check: bool) -> int:
    before = PAGE.read_text(encoding="utf-8")
    after = updated(before)
    if after != before and not check:
        files.write(PAGE, after)
    missing = sorted(set(SETTINGS) - set(named(after)))
    if missing:
        sys.stdout.write(f"{PAGE.name}: no table has {', '.join(missing)}\n")
    if after != before:
        sys.stdout.write(f"{PAGE.name}: {'out of date' if check else 'updated'}\n")
    return int(bool(missing) or (check and after != before))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
