"""Pictures of runs, with matplotlib: PNG, SVG or PDF by the file's ending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito's colours, which colour-blind readers can tell apart; line styles help in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-.", ":")


def line_style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}


def accuracy_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, title: str) -> Path:
    """Test accuracy against rounds, one line a method, best at the end on top of the legend."""
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    ends = []
    for index, (name, history) in enumerate(histories.items()):
        scored = [row for row in history if "accuracy" in row]
        rounds, accuracy = [row["round"] for row in scored], [100 * row["accuracy"] for row in scored]
        width = 2.6 if name == "fedagg" else 1.7
        (line,) = axes.plot(rounds, accuracy, label=f"{name}  {accuracy[-1]:.2f} %", linewidth=width, **line_style(index))
        ends.append((accuracy[-1], line))
    axes.set(xlabel="round", ylabel="test accuracy (%)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=[line for _, line in sorted(ends, key=lambda end: -end[0])], frameon=False)
    return save(figure, path)


def save(figure: Any, path: Path) -> Path:
    aside = path.with_name(f".{path.stem}.part{path.suffix}")
    figure.savefig(aside, dpi=150)
    plt.close(figure)
    aside.replace(path)
    return path
