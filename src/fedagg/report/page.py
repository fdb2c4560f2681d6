"""The page: one HTML file with style, script, plotly and data inside. It asks the network for nothing."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import fedagg
from fedagg import files
from fedagg.errors import SettingError, need
from fedagg.report import charts, tables
from fedagg.report.content import Content, gather

HERE = Path(__file__).parent
Part = tuple[str, str, str]  # key, heading, content
# Says it to the browser too: nothing may be fetched, whatever the data holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def write(paths: list[Path], out: Path) -> Path:
    """Make the report of run folders, or of a results folder."""
    need("a report", "plotly", "analysis")
    if out.is_dir():
        raise SettingError("out", str(out), f"is a folder; give the page a name, {out / 'report.html'} for one")
    files.folder(out.parent if str(out.parent) else Path())
    files.write(out, build(gather(paths)).encode(errors="replace"))  # names of folders may be no text
    return out


def build(content: Content) -> str:
    from plotly.offline import get_plotlyjs

    drawn = charts.build(content)
    found = parts(content, drawn)
    title = f"fedagg: {content.title}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
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
<p>{len(content.trials)} {"run" if len(content.trials) == 1 else "runs"}, {len(content.groups)}
{"setting" if len(content.groups) == 1 else "settings"}; made by fedagg {escape(fedagg.__version__)}.</p>
<nav aria-label="Sections">{links(found)}</nav>
</header>
<main id="main">
{sections(found)}
</main>
<script type="application/json" id="data">{as_json(drawn)}</script>
<script>{get_plotlyjs()}</script>
<script>
{HERE.joinpath("page.js").read_text(encoding="utf-8")}
</script>
</body>
</html>
"""


def links(found: list[Part]) -> str:
    return " ".join(f'<a href="#{key}">{escape(head)}</a>' for key, head, _ in found)


def sections(found: list[Part]) -> str:
    return "\n".join(
        f'<section id="{key}" aria-labelledby="{key}-head"><h2 id="{key}-head">{escape(head)}</h2>\n{body}\n</section>'
        for key, head, body in found
    )


def parts(content: Content, drawn: dict[str, Any]) -> list[Part]:
    """The sections that there is something to show for."""
    found = [("results", "Results", tables.results(content) + "".join(f"<p>{escape(note)}</p>" for note in content.notes))]
    if content.store is not None:
        found += [(name, f"Beside the paper: {title}", body) for name, title, body in tables.beside_paper(content.store)]
    groups = chooser("group", "setting", [group["name"] for group in drawn["groups"]])
    against = chooser("progress", "against", list(drawn["progress"].values()), list(drawn["progress"]))
    curves = "".join(figure(f"chart-{name}") for name in ("accuracy", "loss", "train_loss", "rate", "drift"))
    buttons = " ".join(f'<button type="button" id="save-{form}">{form.upper()}</button>' for form in ("csv", "json"))
    save = f'<p class="choose">Save the numbers of all curves as {buttons}</p>'
    found.append(("curves", "Curves", f'<p class="choose">{groups} {against}</p><div class="charts">{curves}</div>{save}'))
    if drawn["rates"]:
        names = chooser("rate-run", "run", [one["name"] for one in drawn["rates"]])
        epoch = '<label>epoch <select id="rate-epoch"></select></label>'
        maps = figure("chart-rate-map") + figure("chart-rate-bands") + figure("chart-moved-map")
        body = f'<p class="choose">{names} {epoch}</p><div class="charts">{maps}</div>'
        found.append(("rates", "Learning rates and drift by client", some(content, drawn["rates"]) + body))
    if drawn["partitions"]:
        names = chooser("partition", "split", [one["name"] for one in drawn["partitions"]])
        body = f'<p class="choose">{names}</p><div class="charts">{figure("chart-partition")}</div>'
        found.append(("partitions", "Who holds which labels", body))
    found.append(("configuration", "Configuration", tables.configuration(content)))
    found.append(("environment", "Environment", tables.environment(content)))
    return found


def some(content: Content, shown: list[Any]) -> str:
    """Says so when there are more runs than the page has maps for."""
    known = sum(trial.run is not None for trial in content.trials)
    return f"<p>The first {len(shown)} of {known} runs.</p>" if known > len(shown) else ""


def figure(key: str) -> str:
    """A chart and its text alternative, which the script fills in and screen readers read in its place."""
    return (
        f'<figure aria-labelledby="{key}-text"><div class="chart" id="{key}"></div>'
        f'<figcaption id="{key}-text"></figcaption></figure>'
    )


def chooser(key: str, label: str, names: list[str], values: list[str] | None = None) -> str:
    given = values or [str(index) for index in range(len(names))]
    options = "".join(f'<option value="{escape(v)}">{escape(n)}</option>' for v, n in zip(given, names, strict=True))
    return f'<label>{label} <select id="{key}">{options}</select></label>'


def as_json(drawn: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(drawn, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
