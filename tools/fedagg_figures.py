"""Draw docs/images/base-rate.png from results/: accuracy against the base rate, FedAgg beside FedAvg.

python tools/fedagg_figures.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from fedagg import plots
from fedagg.reproduce import grid
from fedagg.reproduce.results import Store

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
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
    figure, axes = plt.subplots(1, len(shown), figsize=(4.2 * len(shown), 3.8), layout="constrained", sharey=True, squeeze=False)
    for axis, (title, lines) in zip(axes[0], shown, strict=True):
        for index, (method, points) in enumerate(reversed(lines.items())):
            axis.plot(*zip(*points, strict=True), marker="o", label=method, **plots.line_style(index))
        axis.set(xscale="log", xlabel="base learning rate")
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("test accuracy (%)")
    axes[0][0].legend(frameon=False)
    plots.save(figure, ROOT / "docs/images/base-rate.png")


if __name__ == "__main__":
    main()
