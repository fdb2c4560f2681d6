"""Draw FedAgg's pictures in docs/images.

base-rate.png and local-work.png, from results/: accuracy against the base rate, local epochs and batch size, FedAgg beside FedAvg.
rates.png and departure.png, from runs on the embedded images: accuracy against the base rate for several methods, and how far
clients are from where the model of Theorem 1 puts them.

python tools/fedagg_figures.py [base_rate | local_work | rates | departure]...    (all of them without a name)
"""

from __future__ import annotations

import sys
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


def sweep(grid_name: str, values: dict[str, float], label: str, axes: Any) -> None:
    """Accuracy against one setting, FedAgg beside FedAvg, a row of the grid an axis; `values` are its values by variant."""
    spec = grid.load(str(ROOT / f"src/fedagg/experiments/fedagg/{grid_name}.toml"))
    store = Store(ROOT / "results")
    variants = [v for v in spec.variants if v["name"] in values]
    for axis, row in zip(axes, spec.rows, strict=True):
        for index, method in enumerate(reversed(spec.methods)):
            cells = [(values[v["name"]], store.get(spec.config(row, method, 0.2, 0, v))) for v in variants]
            points = sorted((value, 100 * cell.accuracy) for value, cell in cells if cell is not None)
            axis.plot(*zip(*points, strict=True), marker="o", label=method, **plots.line_style(index))
        axis.set(
            xscale="log", xlabel=label, ylim=(0, 102), xticks=list(values.values()), xticklabels=[f"{v:g}" for v in values.values()]
        )
        axis.minorticks_off()
        dress(axis, f"{row.label}, {row.distribution}")


def base_rate() -> None:
    figure, axes = plt.subplots(2, 3, figsize=(12.0, 6.0), layout="constrained")
    rates = {f"lr = {rate:g}": rate for rate in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)}
    sweep("base-rate", rates, "base learning rate", axes.flat)
    for row in axes:
        row[0].set_ylabel("test accuracy (%)")
    axes[0][0].legend(frameon=False)
    plots.save(figure, ROOT / "docs/images/base-rate.png")


def local_work() -> None:
    figure, axes = plt.subplots(4, 3, figsize=(12.0, 11.0), layout="constrained", sharey=True)
    sweep("local-work", {"1 epoch": 1, "3 epochs": 3, "10 epochs": 10}, "local epochs", axes[:2].flat)
    sweep("local-work", {"batches of 8": 8, "3 epochs": 32, "batches of 128": 128}, "batch size", axes[2:].flat)
    for row in axes:
        row[0].set_ylabel("test accuracy (%)")
    axes[0][0].legend(frameon=False)
    plots.save(figure, ROOT / "docs/images/local-work.png")


def rates() -> None:
    """Mean of three seeds, two shards a client. FedAdam has a rate of the server's too, which stays at its default."""
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    bases = [1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0]
    for index, method in enumerate(("fedagg", "fedavg", "fedcm", "scaffold", "fedadam")):
        means = []
        for base in bases:
            task = {"dataset": "mnist-mini", "model": "linear", "partition": "shards", "rounds": 30, "eval_every": 30}
            ends = [fedagg.run(algorithm=method, lr=base, seed=seed, **task).accuracy for seed in range(3)]
            means.append(100 * sum(ends) / len(ends))
        print(method, *(f"{base:g}: {mean:.1f}" for base, mean in zip(bases, means, strict=True)))
        axis.plot(bases, means, marker="o", label=method, **plots.line_style(index))
    axis.set(xscale="log", xlabel="base learning rate", ylabel="test accuracy (%)", ylim=(0, 100))
    axis.legend(frameon=False, loc="lower center", ncols=3)
    dress(axis, "6,000 digits, two label shards a client, 30 rounds")
    plots.save(figure, ROOT / "docs/images/rates.png")


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
    drawn = {draw.__name__: draw for draw in (base_rate, local_work, rates, departure)}
    for name in sys.argv[1:] or drawn:
        drawn[name]()
