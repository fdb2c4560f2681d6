"""Draw FedAgg's pictures in docs/images.

base-rate.png, from results/: accuracy against the base rate, FedAgg beside FedAvg.
departure.png, from runs on the embedded images: how far clients are from where the model of Theorem 1 puts them.

python tools/fedagg_figures.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

import fedagg
from fedagg import plots
from fedagg.reproduce import grid
from fedagg.reproduce.results import Store

ROOT = Path(__file__).resolve().parent.parent


def base_rate() -> None:
    spec = grid.load(str(ROOT / "src/fedagg/experiments/fedagg/base-rate.toml"))
    store = Store(ROOT / "results")
    shown = []
    for row in spec.rows:
        lines: dict[str, list[tuple[float, float]]] = {}
        for method in spec.methods:
            cells = [store.get(spec.config(row, method, 0.2, 0, variant)) for variant in spec.variants]
            points = [(v["lr"], 100 * c.accuracy) for v, c in zip(spec.variants, cells, strict=True) if c is not None]
            lines[method] = points if len(points) == len(cells) else []
        if all(lines.values()):
            shown.append((f"{row.label}, {row.distribution}", lines))
    across = 3
    down = -(-len(shown) // across)
    figure, axes = plt.subplots(down, across, figsize=(4.0 * across, 3.0 * down), layout="constrained", squeeze=False)
    for axis, (title, lines) in zip(axes.flat, shown, strict=True):
        for index, (method, points) in enumerate(reversed(lines.items())):
            axis.plot(*zip(*points, strict=True), marker="o", label=method, **plots.line_style(index))
        axis.set(xscale="log", xlabel="base learning rate", ylim=(0, 102))
        dress(axis, title)
    for row in axes:
        row[0].set_ylabel("test accuracy (%)")
    axes[0][0].legend(frameon=False)
    plots.save(figure, ROOT / "docs/images/base-rate.png")


def departure() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained", sharey=True)
    for axis, (partition, title) in zip(axes, (("iid", "IID"), ("shards", "two shards a client")), strict=True):
        for index, (variant, name) in enumerate((("default", "the default"), ("paper", "the paper to the letter"))):
            history = fedagg.run(dataset="mnist-mini", partition=partition, rounds=30, variant=variant).history
            rows = [(row["round"], row["departure"]) for row in history if "departure" in row]  # the first round has no field yet
            axis.plot(*zip(*rows, strict=True), label=name, **plots.line_style(index))
            print(f"{partition}, {name}: {min(v for _, v in rows):.2f} to {max(v for _, v in rows):.2f}")
        axis.set(xlabel="round", ylim=(0, 1.02))
        dress(axis, title)
    axes[0].set_ylabel("departure from Eq. 14")
    axes[0].legend(frameon=False, loc="lower right")
    plots.save(figure, ROOT / "docs/images/departure.png")


def dress(axis: Any, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    base_rate()
    departure()
