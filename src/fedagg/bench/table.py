"""Shows a benchmark: as a table on the screen, and as a page for the `benchmarks/` folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rich.table import Table

from fedagg import files
from fedagg.bench.task import Task

COLUMNS = ("rival", "s/round", "fastest to slowest", "× plain", "× strong", "start-up s", "memory", "of peak")


def cells(row: dict[str, Any]) -> list[str]:
    if row["median"] is None:
        return [row["rival"], row["failure"] or "", *([""] * (len(COLUMNS) - 2))]
    memory = size(row["memory"])
    if row["device_memory"] is not None:
        memory += f" + {size(row['device_memory'])} on device"
    return [
        row["rival"],
        f"{row['median']:.4g}",
        f"{row['fastest']:.4g} to {row['slowest']:.4g}",
        *("" if row[name] is None else f"{row[name]:.2f}" for name in ("ratio", "ratio_strong")),
        f"{row['startup']:.1f}",
        memory,
        "" if row["share_of_peak"] is None else f"{100 * row['share_of_peak']:.2g} %",
    ]


def size(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**20:,.0f} MiB"


def title(result: dict[str, Any]) -> str:
    t = result["task"]
    shape = "×".join(map(str, t["shape"]))
    return (
        f"{t['model']}: FedAvg, {t['clients']} clients, {t['per_round']} a round, {t['samples']} samples of {shape} each, "
        f"{t['epochs']} epochs, batch {t['batch_size']}"
    )


def facts(result: dict[str, Any]) -> list[str]:
    """The details: the machine, the versions, and how the numbers were measured."""
    m, t = result["machine"], result["task"]
    ours = ("fedagg", "torch")
    versions = {row["package"]: row["version"] for row in result["rows"] if row["package"] not in ours and row["median"]}
    others = "".join(f", {name} {version}" for name, version in versions.items())
    code = f" at {m['commit'][:10]}{m['commit'][40:]}" if m["commit"] else ""
    load = "" if m["load_before"] is None else f", load {m['load_before']:.2f} at the start"
    where = m["device"] if m["device"] != "cpu" else f"{m['processor']}, {m['cores']} cores, {m['threads']} threads by default"
    lines = [
        f"{m['date']}; {where}; {m['platform']}{load}",
        f"fedagg {m['fedagg']}{code}, torch {m['torch']}, Python {m['python']}{others}",
        f"{t['rounds']} rounds after one to warm up, {t['passes']} turns each, in new processes; median over all rounds",
    ]
    if result["peak_rate"]:
        kind = t["precision"] if m["device"] != "cpu" else "fp32"
        peak, needed = result["peak_rate"] / 1e9, result["operations_per_round"] / 1e9
        lines.append(f"peak {peak:,.0f} GFLOP/s in a large {kind} matrix product; the job is {needed:,.4g} GFLOP per round")
    return lines + [f"{row['rival']}: {row['note']}" for row in result["rows"] if row["note"]]


def screen(result: dict[str, Any]) -> Table:
    table = Table(title=title(result), title_justify="left", caption="\n".join(facts(result)), caption_justify="left")
    for at, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if at else "left")
    for row in result["rows"]:
        table.add_row(*cells(row))
    return table


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [f"# {title(result)}", "", *(f"- {fact}" for fact in facts(result)), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in result["rows"]]
    return "\n".join(lines) + "\n"


def neighbours(result: dict[str, Any]) -> str:
    """The result of `neighbours.bench`, in words."""
    m, runs = result["machine"], result["runs"]
    spread = "; ".join(f"{one['alone']:.3g} and {one['beside']:.3g}" for one in result["passes"])
    load = "" if m["load_before"] is None else f", load {m['load_before']:.2f} at the start"
    return (
        f"{title(result)}\n"
        f"one run alone {result['alone']:.4g} s per round, each of {runs} side by side {result['beside']:.4g}: "
        f"{result['ratio']:.2f} times as long\n"
        f"turns: {spread}\n"
        f"{m['date']}; {m['processor']}, {m['cores']} cores; fedagg {m['fedagg']}, torch {m['torch']}{load}; {result['note']}"
    )


def keep(result: dict[str, Any], folder: Path) -> Path:
    """Write <date>-<machine>-<model>.json and .md. The name ends with the samples of a client if they are not the usual 600. A
    second run on the same day replaces the first."""
    m = result["machine"]
    name = m["device"] if m["device"] != "cpu" else f"{m['cores']}-core-{m['processor'].rpartition('(')[2]}"
    stem = f"{m['date']}-{re.sub('[^a-z0-9_]+', '-', name.lower()).strip('-')}-{result['task']['model']}"
    samples = result["task"]["samples"]
    stem += f"-{samples}" if samples != Task.samples else ""
    files.folder(folder)
    files.write(folder / f"{stem}.json", json.dumps(result, indent=1) + "\n")
    files.write(folder / f"{stem}.md", page(result))
    return folder / f"{stem}.md"
