"""The page: one HTML file with style, script, plotly and data inside. It fetches nothing from the network."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import fedagg
from fedagg import files
from fedagg.errors import SettingError, need
from fedagg.report import charts, tables
from fedagg.report.content import FIGURES, Content, gather
from fedagg.report.state import status as status_of

HERE = Path(__file__).parent
Part = tuple[str, str, str, str]  # key, heading, text and tables, charts
# Tells the browser too that nothing may be fetched, whatever the data holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
LIVE = "connect-src 'self'"  # a page that follows a run asks its server for news


def write(paths: list[Path], out: Path) -> Path:
    """Write the report of run folders, or of a results folder."""
    need("a report", "plotly", "analysis")
    if out.is_dir():
        raise SettingError("out", str(out), f"is a folder; give the page a name, {out / 'report.html'} for one")
    files.folder(out.parent if str(out.parent) else Path())
    files.write(out, build(gather(paths)).encode(errors="replace"))  # names of folders may not be valid text
    return out


def build(content: Content, version: int | None = None) -> str:
    """The page. With a version, it asks its server what has changed since."""
    from plotly.offline import get_plotlyjs

    drawn, progress = charts.build(content), status(content)
    found = parts(content, drawn)
    live = {} if version is None else {"version": version}
    title = f"fedagg: {content.title}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}{"" if version is None else f"; {LIVE}"}">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{HERE.joinpath("page.css").read_text(encoding="utf-8")}
</style>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header>
<h1>{escape(title)}</h1>
<p id="status" class="{progress["word"]}">{escape(progress["text"])}</p>
<ul id="unfinished">{"".join(f"<li>{escape(line)}</li>" for line in progress["lines"])}</ul>
<p id="about">{escape(progress["about"])}</p>
<nav aria-label="Sections">{" ".join(f'<a href="#{key}">{escape(head)}</a>' for key, head, _, _ in found)}</nav>
</header>
<main id="main">
{"".join(map(section, found))}
</main>
<script type="application/json" id="data">{as_json(drawn | live)}</script>
<script>{get_plotlyjs()}</script>
<script>
{HERE.joinpath("page.js").read_text(encoding="utf-8")}
</script>
</body>
</html>
"""


def pieces(content: Content) -> dict[str, Any]:
    """Everything that can change in a page that follows runs, in parts that change independently."""
    drawn = charts.build(content)
    return drawn | {"sections": [section(part) for part in parts(content, drawn)]}


def status(content: Content) -> dict[str, Any]:
    """The progress of the runs, and the page's sources."""
    settings = f"{len(content.groups)} {'setting' if len(content.groups) == 1 else 'settings'}"
    about = f"{len(content.trials)} {'run' if len(content.trials) == 1 else 'runs'}, {settings}; fedagg {fedagg.__version__}."
    cells_only = {"word": "finished", "text": "", "lines": []}
    return (status_of(content.runs) if content.runs or not content.trials else cells_only) | {"about": about}


def section(part: Part) -> str:
    key, head, words, charts = part
    return (
        f'<section id="{key}" aria-labelledby="{key}-head"><h2 id="{key}-head">{escape(head)}</h2>\n'
        f'<div class="words">{words}</div>\n{charts}</section>\n'
    )


def parts(content: Content, drawn: dict[str, Any]) -> list[Part]:
    """The sections that have something to show. The page's script fills the menus."""
    if not content.trials:
        return []
    notes = "".join(f"<p>{escape(note)}</p>" for note in content.notes)
    found = [("results", "Results", tables.results(content) + notes, "")]
    if content.store is not None:
        found += [(name, f"Beside the paper: {title}", body, "") for name, title, body in tables.paper_tables(content.store)]
    buttons = " ".join(f'<button type="button" id="save-{form}">{form.upper()}</button>' for form in ("csv", "json"))
    save = f'<p class="choose">Save the numbers of all curves as {buttons}</p>'
    found.append(("curves", "Curves", "", menus(group="setting", progress="against") + figures(*FIGURES) + save))
    if drawn["rates"]:
        maps = menus(rate_run="run", rate_epoch="epoch") + figures("rate-map", "rate-bands", "moved-map")
        found.append(("rates", "Learning rates and drift by client", some(content, drawn["rates"]), maps))
    if drawn["left_out"]:
        bars = menus(left_run="run") + figures("left-out")
        found.append(("left-out", "Who was left out, and why", tables.left_out(content), bars))
    if drawn["partitions"]:
        found.append(("partitions", "Who holds which labels", "", menus(partition="split") + figures("partition")))
    found.append(("configuration", "Configuration", tables.configuration(content), ""))
    found.append(("environment", "Environment", tables.environment(content), ""))
    return found


def some(content: Content, shown: list[Any]) -> str:
    """A note if there are more runs than maps in the page."""
    known = sum(trial.run is not None for trial in content.trials)
    return f"<p>The first {len(shown)} of {known} runs.</p>" if known > len(shown) else ""


def figures(*names: str) -> str:
    """Charts with their text alternatives, which the script fills in for screen readers."""
    drawn = "".join(
        f'<figure aria-labelledby="chart-{name}-text"><div class="chart" id="chart-{name}"></div>'
        f'<figcaption id="chart-{name}-text"></figcaption></figure>'
        for name in names
    )
    return f'<div class="charts">{drawn}</div>'


def menus(**labels: str) -> str:
    made = (f'<label>{label} <select id="{key.replace("_", "-")}"></select></label>' for key, label in labels.items())
    return f'<p class="choose">{" ".join(made)}</p>'


def as_json(drawn: dict[str, Any]) -> str:
    """JSON that cannot close the script element around it."""
    text = json.dumps(drawn, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
