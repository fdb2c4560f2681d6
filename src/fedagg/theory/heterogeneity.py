r"""How much the clients differ: their labels compared with those of all clients, and their gradients compared with the mean.

Three distances between a client's label distribution p and the global one q:

- `wasserstein`: $W_1 = \sum_a |P(a) - Q(a)|$, with P and Q the cumulative distributions over the label *index*. The metric
  on the label axis is |a - b|: moving a sample from label 0 to 9 costs nine times as much as to 1. For labels without
  an order (all data sets of the paper) this is a convention, and renumbering the classes changes the distance. It is
  between 0 and C - 1.
- `total_variation`: $\frac12\sum_a|p_a - q_a|$, in [0, 1]. It is the Wasserstein distance for the metric in which any
  two different labels are 1 apart, so it does not depend on the numbering of the classes.
- `jensen_shannon`: the root of the Jensen-Shannon divergence in bits, in [0, 1]. It is a metric and does not depend
  on the numbering either.

A client without samples has no distribution: its distances are nan, and it is left out of means.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedagg import files, plots
from fedagg.errors import DataError, MissingError
from fedagg.partition import dirichlet

try:
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    from scipy.spatial.distance import jensenshannon
    from scipy.stats import wasserstein_distance
except ModuleNotFoundError as error:
    raise MissingError(__name__, str(error.name), "analysis") from None

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SIGMAS = (0.1, 0.3, 0.6, 1.0, math.inf)
METRICS = {
    "wasserstein": "Wasserstein distance (label index)",
    "total_variation": "Total variation",
    "jensen_shannon": "Jensen-Shannon distance",
}


@dataclass(frozen=True)
class Distances:
    """The distances of each client's label distribution from the global one, (N,) each; nan for a client without samples."""

    sizes: Counts
    wasserstein: Floats
    total_variation: Floats
    jensen_shannon: Floats

    def mean(self, metric: str) -> float:
        """The mean over the clients that have samples; every client counts the same."""
        return float(np.nanmean(getattr(self, metric)))

    def spread(self, metric: str) -> float:
        """The standard deviation over the same clients."""
        return float(np.nanstd(getattr(self, metric)))


def label_counts(labels: npt.ArrayLike, parts: Sequence[npt.NDArray[np.integer[Any]]], classes: int | None = None) -> Counts:
    """How many samples of each class each client holds, (N, C).

    Args:
        labels: one label per sample, whole numbers from 0 up.
        parts: for each client, the indices of its samples.
        classes: C; one more than the largest label if not given.
    """
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"labels are {array.dtype} of shape {array.shape}: give a list of whole numbers, one per sample")
    count = int(array.max()) + 1 if classes is None else classes
    if array.min() < 0 or array.max() >= count:
        raise DataError(f"labels go from {array.min()} to {array.max()}: with {count} classes they must be 0 to {count - 1}")
    if not len(parts):
        raise DataError("no clients: give the indices of at least one client's samples")
    return np.stack([np.bincount(array[part], minlength=count) for part in parts]).astype(np.int64)


def distances(counts: Counts) -> Distances:
    """The three distances of every client from the distribution of all clients' samples together."""
    sizes = counts.sum(1)
    if sizes.sum() == 0:
        raise DataError("no client has samples: there is no distribution to compare with")
    overall = counts.sum(0) / sizes.sum()
    names = np.arange(counts.shape[1])
    rows = np.full((3, len(counts)), math.nan)
    for i, (row, size) in enumerate(zip(counts, sizes, strict=True)):
        if size > 0:
            own = row / size
            rows[0, i] = wasserstein_distance(names, names, own, overall)
            rows[1, i] = 0.5 * np.abs(own - overall).sum()
            rows[2, i] = jensenshannon(own, overall, base=2)
    # Equal distributions can differ in the last bit; then the root of a tiny negative number is nan.
    rows[2, (sizes > 0) & np.isnan(rows[2])] = 0.0
    return Distances(sizes, rows[0], rows[1], rows[2])


def over_sigma(
    labels: npt.ArrayLike, clients: int, sigmas: Sequence[float] = SIGMAS, seed: int = 0, by: str = "client"
) -> dict[float, Distances]:
    """The distances of a Dirichlet split for each of these σ; ∞ is the IID split (the paper's Fig. 4)."""
    array = np.asarray(labels)
    return {float(sigma): distances(label_counts(array, dirichlet(array, clients, sigma, seed, by))) for sigma in sigmas}


@dataclass(frozen=True)
class Dissimilarity:
    r"""How much the clients' gradients $g_i$ at one point differ; g is their mean weighted by θ.

    Attributes:
        variance: $\sum_i\theta_i\|g_i - g\|^2$, zero when all clients agree.
        ratio: $B^2 = \sum_i\theta_i\|g_i\|^2 / \|g\|^2 \ge 1$ (FedProx's B-local dissimilarity); inf where g = 0.
    """

    variance: float
    ratio: float


def gradient_dissimilarity(gradients: npt.ArrayLike, theta: npt.ArrayLike | None = None) -> Dissimilarity:
    """The dissimilarity of the gradients (N, d) of all clients at the same point, with aggregation weights (equal if not given)."""
    rows = np.asarray(gradients, dtype=np.float64)
    weights = np.full(len(rows), 1.0 / len(rows)) if theta is None else np.asarray(theta, dtype=np.float64)
    mean = weights @ rows
    variance = float(weights @ ((rows - mean) ** 2).sum(1))
    norm2 = float(mean @ mean)
    if norm2 == 0.0:
        return Dissimilarity(variance, 1.0 if variance == 0.0 else math.inf)
    return Dissimilarity(variance, 1.0 + variance / norm2)


def streamed_dissimilarity(gradients: Iterable[npt.ArrayLike], theta: npt.ArrayLike) -> Dissimilarity:
    """The same from the gradients (d,) of one client at a time, for models so large that N of them do not fit into memory."""
    mean: Floats = np.zeros(1)
    norms2 = 0.0
    for weight, gradient in zip(np.asarray(theta, dtype=np.float64), gradients, strict=True):
        row = np.asarray(gradient, dtype=np.float64)
        mean = mean + weight * row
        norms2 += float(weight * (row @ row))
    norm2 = float(mean @ mean)
    variance = max(0.0, norms2 - norm2)
    if norm2 == 0.0:
        return Dissimilarity(variance, 1.0 if variance == 0.0 else math.inf)
    return Dissimilarity(variance, 1.0 + variance / norm2)


def write_dissimilarity(path: str | os.PathLike[str], found: Mapping[str, Dissimilarity]) -> None:
    """Write a CSV with a row per model: how much the clients' gradients differ there."""
    rows = [[name, _plain(one.variance), _plain(one.ratio)] for name, one in found.items()]
    _write_csv(Path(path), ["model", "variance", "ratio"], rows)


def write_counts(path: str | os.PathLike[str], counts: Counts) -> None:
    """Write a CSV with a row per client: how many samples of each class it holds."""
    header = ["client", "samples", *(f"label_{a}" for a in range(counts.shape[1]))]
    _write_csv(Path(path), header, [[i, int(row.sum()), *row.tolist()] for i, row in enumerate(counts)])


def write_distances(path: str | os.PathLike[str], found: Distances) -> None:
    """Write a CSV with a row per client: its size and its three distances."""
    columns = zip(found.sizes, found.wasserstein, found.total_variation, found.jensen_shannon, strict=True)
    _write_csv(Path(path), ["client", "samples", *METRICS], [[i, *map(_plain, row)] for i, row in enumerate(columns)])


def write_summary(path: str | os.PathLike[str], found: Mapping[float, Distances]) -> None:
    """Write a CSV with a row per σ: mean and spread of each distance over clients, and the smallest and largest client."""
    header = ["sigma", "clients", "samples_min", "samples_max"]
    header += [f"{metric}_{what}" for metric in METRICS for what in ("mean", "std")]
    rows: list[list[object]] = []
    for sigma, one in found.items():
        numbers = [f(metric) for metric in METRICS for f in (one.mean, one.spread)]
        rows.append([sigma, len(one.sizes), int(one.sizes.min()), int(one.sizes.max()), *map(_plain, numbers)])
    _write_csv(Path(path), header, rows)


def plot_counts(path: str | os.PathLike[str], counts: Counts, title: str = "Samples per label and client") -> None:
    """Draw a heat map as PNG, with clients across and labels up, and the clients' sizes as bars above it."""
    clients, classes = counts.shape
    height = min(9.0, 3.2 + 0.08 * classes)
    figure = Figure(figsize=(min(16.0, 6.0 + 0.08 * clients), height + 2.0), layout="constrained")
    sizes, heat = figure.subplots(2, 1, sharex=True, height_ratios=(1.1, height))
    figure.suptitle(title, fontsize=16)
    sizes.bar(np.arange(clients), counts.sum(1), width=0.9, color="#35608d")
    sizes.set_ylabel("samples", fontsize=12)
    sizes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    sizes.spines[["top", "right"]].set_visible(False)
    # Skewed splits have a few large cells and many small ones: the square root shows both.
    image = heat.imshow(
        counts.T, aspect="auto", origin="lower", interpolation="nearest", cmap="viridis", norm=PowerNorm(0.5, vmin=0)
    )
    heat.set_xlabel("client", fontsize=13)
    heat.set_ylabel("label", fontsize=13)
    heat.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    heat.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    bar = figure.colorbar(image, ax=heat, pad=0.01)
    bar.set_label("samples (root scale)", fontsize=12)
    for axes in (sizes, heat, bar.ax):
        axes.tick_params(labelsize=11)
    plots.save(figure, Path(path))


def plot_over_sigma(
    path: str | os.PathLike[str], found: Mapping[float, Distances], title: str = "Label skew of the clients"
) -> None:
    """Draw the three distances over σ as PNG: a dot for every client, a line for their mean, one standard deviation shaded."""
    figure = Figure(figsize=(14.0, 4.8), layout="constrained")
    figure.suptitle(title, fontsize=16)
    at = np.arange(len(found))
    rng = np.random.default_rng(0)
    colours = ("#35608d", "#22a884", "#bb5f2a")
    for axes, (metric, name), colour in zip(figure.subplots(1, 3), METRICS.items(), colours, strict=True):
        means = np.array([one.mean(metric) for one in found.values()])
        spreads = np.array([one.spread(metric) for one in found.values()])
        for x, one in zip(at, found.values(), strict=True):
            values = getattr(one, metric)
            axes.scatter(x + rng.uniform(-0.12, 0.12, len(values)), values, s=10, alpha=0.35, color=colour, linewidths=0)
        axes.fill_between(at, np.maximum(means - spreads, 0.0), means + spreads, color=colour, alpha=0.15, linewidth=0)
        axes.plot(at, means, color=colour, linewidth=2.5, marker="o", markersize=7)
        axes.set_xticks(at, ["∞ (IID)" if math.isinf(sigma) else f"{sigma:g}" for sigma in found])
        axes.set_xlabel("Dirichlet σ", fontsize=13)
        axes.set_title(name, fontsize=14)
        axes.set_ylim(bottom=0.0)
        axes.tick_params(labelsize=12)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    plots.save(figure, Path(path))


def _plain(value: float) -> str:
    """A number for a CSV: integers without a point, others with all their digits, nan as an empty field."""
    if math.isnan(value):
        return ""
    return repr(int(value)) if float(value).is_integer() else repr(float(value))


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    files.write(path, text.getvalue())
