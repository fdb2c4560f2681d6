"""Bring the tables in README.md and docs/ up to date with results/.

A table stands between two comments; the first holds the arguments of `fedagg reproduce` that make it:

    <!-- results: table-accuracy --participation 0.2 -->
    (the table)
    <!-- /results -->

`python tools/readme_tables.py` rewrites them; with `--check` it only says which are out of date, and fails.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from fedagg import files
from fedagg.cli import app

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- results: (?P<arguments>.*?) -->\n).*?(<!-- /results -->)", re.DOTALL)


def table(arguments: str, results: Path) -> str:
    """The Markdown table that `fedagg reproduce` makes of these arguments, from what is in the results folder."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        command = ["reproduce", *shlex.split(arguments), "--show", "--format", "markdown", "--results", str(results)]
        app(command, standalone_mode=False)
    return said.getvalue()


def updated(text: str, results: Path) -> str:
    return MARKED.sub(lambda found: found[1] + "\n" + table(found["arguments"], results) + "\n" + found[3], text)


def main(check: bool) -> int:
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = updated(before, ROOT / "results")
        if after != before:
            stale.append(path.relative_to(ROOT))
            if not check:
                files.write(path, after)
    for name in stale:
        sys.stdout.write(f"{name}: {'out of date' if check else 'updated'}\n")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
