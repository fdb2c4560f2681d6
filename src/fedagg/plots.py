"""Pictures with matplotlib: PNG, SVG or PDF by the file's ending.

Matplotlib is imported only when something is drawn, so commands that draw nothing start faster.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedagg import files
from fedagg.errors import need
from fedagg.measure import ACCURACY, Measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Okabe and Ito's colours, which colour-blind readers can tell apart; line styles help in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-.", ":")
FORMATS = ("png", "svg", "pdf")

History = Sequence[Mapping[str, Any]]  # one row per round


@dataclass(frozen=True)
class Series:
    """A line with a band around it: mean and standard deviation over seeds. `index` selects colour and style."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
    index: int = 0
    strong: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    log: bool = False


@dataclass(frozen=True)
class Bars:
    """Groups of bars: a name for each group; for each of its members heights, spreads and marks (nan for none)."""

    title: str
    groups: Sequence[str]
    heights: Mapping[str, Sequence[float]]
    spreads: Mapping[str, Sequence[float]] = field(default_factory=dict)
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)


def line_style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str, width: float, index: int) -> Line2D:
    """Draw a line, or a dot for a single point, which a line would not show."""
    alone = int(np.isfinite(np.asarray(y, dtype=float)).sum()) == 1
    (line,) = axes.plot(x, y, label=name, linewidth=width, marker="o" if alone else "", **line_style(index))
    return line


def score_curves(histories: Mapping[str, Sequence[History]], path: Path, title: str, what: str, metric: Measure = ACCURACY) -> Path:
    return save(score_figure(histories, title, what, metric), path)


def score_figure(histories: Mapping[str, Sequence[History]], title: str, what: str, metric: Measure = ACCURACY) -> Figure:
    """A metric against rounds, one line per method, the best final value on top of the legend. With several seeds, the mean and a
    band of one standard deviation, over the rounds that all seeds have."""
    figure, ((axes,),) = canvas(1, 1, (7.5, 4.6))
    ends = []
    for index, (name, seeds) in enumerate(histories.items()):
        scores = [
            {row["round"]: metric.scale * row[metric.key] for row in history if row.get(metric.key) is not None}
            for history in seeds
        ]
        rounds = [number for number in scores[0] if all(number in score for score in scores)]
        table = np.array([[score[number] for number in rounds] for score in scores], dtype=float)
        mean = table.mean(0).tolist()
        last = mean[-1] if mean else float("nan")
        line = draw_line(
            axes, rounds, mean, f"{name}  {metric.shown(last / metric.scale)}", 2.6 if name == "fedagg" else 1.7, index
        )
        if len(scores) > 1:
            spread = table.std(0, ddof=1)
            axes.fill_between(rounds, mean - spread, mean + spread, color=line.get_color(), alpha=0.18, linewidth=0)
        ends.append((last, line))
    axes.set(xlabel="round", ylabel=f"{what}{metric.unit}")
    axes.set_title(title, loc="left", fontsize=10)
    tidy(axes)
    axes.legend(handles=[line for _, line in sorted(ends, key=lambda end: -metric.better(end[0]))], frameon=False)
    return figure


def panels(grid: Sequence[Sequence[Panel]], paths: Sequence[Path], title: str) -> list[Path]:
    """A grid of line plots under one title, with one legend for all of them."""
    columns = max(len(row) for row in grid)
    figure, axes = canvas(len(grid), columns, (1.2 + 4.0 * columns, 1.4 + 3.0 * len(grid)))
    handles: dict[str, Any] = {}
    for axes_row, row in zip(axes, grid, strict=True):
        for each in axes_row[len(row) :]:
            each.set_visible(False)
        for each, panel in zip(axes_row, row, strict=False):
            for line in panel.series:
                width = 2.4 if line.strong else 1.4
                drawn = draw_line(each, line.x, line.y, line.name, width, line.index)
                handles.setdefault(line.name, drawn)
                if line.spread is not None:
                    y, spread = np.asarray(line.y, dtype=float), np.asarray(line.spread, dtype=float)
                    each.fill_between(line.x, y - spread, y + spread, color=drawn.get_color(), alpha=0.18, linewidth=0)
            each.set(xlabel=panel.xlabel, ylabel=panel.ylabel, yscale="log" if panel.log else "linear")
            each.set_title(panel.title, fontsize=10)
            tidy(each)
    return finish(figure, handles, title, paths)


def bars(charts: Sequence[Bars], paths: Sequence[Path], title: str) -> list[Path]:
    """Groups of bars, with the paper's numbers as black marks; the axis starts near the lowest bar."""
    figure, axes = canvas(len(charts), 1, (10.0, 1.4 + 3.2 * len(charts)))
    handles: dict[str, Any] = {}
    for (each,), chart in zip(axes, charts, strict=True):
        names = list(chart.heights)
        width = 0.84 / max(1, len(names))
        seen = [v for group in (chart.heights, chart.marks) for row in group.values() for v in row if np.isfinite(v)]
        for index, name in enumerate(names):
            at = np.arange(len(chart.groups)) + (index - (len(names) - 1) / 2) * width
            error = chart.spreads.get(name)
            colour = COLOURS[index % len(COLOURS)]
            hatch = ("", "//", "..", "xx")[index // len(COLOURS) % 4]
            drawn = each.bar(
                at, chart.heights[name], width * 0.92, yerr=error, color=colour, hatch=hatch,
                edgecolor="white", linewidth=0, error_kw={"elinewidth": 0.9},
            )  # fmt: skip
            handles.setdefault(name, drawn)
            if name in chart.marks:
                mark = each.scatter(at, chart.marks[name], marker="_", s=60, color="black", zorder=3)
                handles.setdefault("the paper", mark)
        if seen:
            each.set_ylim(bottom=max(0.0, min(seen) - 0.25 * (max(seen) - min(seen)) - 1.0))
        each.set_xticks(np.arange(len(chart.groups)), chart.groups)
        each.set_ylabel("test accuracy (%)")
        each.set_title(chart.title, fontsize=10)
        tidy(each)
    return finish(figure, handles, title, paths)


def label_maps(
    counts: Mapping[str, npt.NDArray[Any]],
    distances: Mapping[str, npt.NDArray[Any]],
    distance: str,
    paths: Sequence[Path],
    title: str,
) -> list[Path]:
    """Heat maps of labels over clients on one colour scale, and each client's distance from the overall mix."""
    from matplotlib.colors import PowerNorm

    figure, axes = canvas(1, len(counts) + 1, (1.0 + 4.2 * (len(counts) + 1), 4.4))
    # Skewed splits have a few large cells and many small ones: the square root shows both.
    scale = PowerNorm(0.5, vmin=0, vmax=max(int(table.max()) for table in counts.values()))
    for each, (name, table) in zip(axes[0], counts.items(), strict=False):
        image = each.imshow(table.T, aspect="auto", origin="lower", cmap="viridis", norm=scale)
        each.set(xlabel="client", ylabel="label")
        each.set_title(name, fontsize=10)
    figure.colorbar(image, ax=axes[0][: len(counts)], pad=0.01, label="samples (root scale)")
    boxes = axes[0][-1]
    boxes.boxplot([values[np.isfinite(values)] for values in distances.values()], tick_labels=list(distances))
    boxes.set_ylabel(distance)
    boxes.set_ylim(bottom=0)
    boxes.set_title("distance of clients from the overall mix", fontsize=10)
    tidy(boxes)
    return finish(figure, {}, title, paths)


def over_grid(
    axes: Mapping[str, Sequence[Any]],
    at: Mapping[tuple[Any, ...], tuple[float, float]],
    best: tuple[Any, ...] | None,
    path: Path,
    title: str,
    what: str,
    metric: Measure = ACCURACY,
    scattered: bool = False,
) -> Path:
    """A metric over a grid: a line with deviations for one axis, a heat map for two; the `best` point, if one was chosen, has a
    star. `at` has mean and deviation of the points that were tried. If they are `scattered` over two axes, they are dots."""
    figure, ((each,),) = canvas(1, 1, (7.5, 4.6))
    (name, values), *second = ((name, in_order(values)) for name, values in axes.items())
    if second and scattered:
        other = second[0][0]
        across, up = ([point[k] if is_numeric([point[k]]) else str(point[k]) for point in at] for k in (0, 1))
        dots = each.scatter(across, up, c=[metric.scale * mean for mean, _ in at.values()], cmap="viridis", s=60)
        for k in [list(at).index(best)] if best is not None else []:
            each.scatter([across[k]], [up[k]], marker="*", s=300, facecolors="none", edgecolors=COLOURS[1])
        for values_on, scale in ((values, each.set_xscale), (second[0][1], each.set_yscale)):
            if is_numeric(values_on) and min(values_on) > 0 and max(values_on) >= 10 * min(values_on):
                scale("log")
        each.set(xlabel=name, ylabel=other)
        figure.colorbar(dots, label=f"{what}{metric.unit}")
    elif second:
        ((other, others),) = second
        table = np.array([[metric.scale * at.get((x, y), (np.nan,))[0] for x in values] for y in others])
        image = each.imshow(table, aspect="auto", origin="lower", cmap="viridis")
        middle = (np.nanmin(table) + np.nanmax(table)) / 2
        for (row, column), value in np.ndenumerate(table):
            if np.isfinite(value):
                star = " ★" if (values[column], others[row]) == best else ""
                colour = "black" if value > middle else "white"
                each.text(column, row, f"{metric.points(value / metric.scale)}{star}", ha="center", va="center", color=colour)
        each.set_xticks(range(len(values)), list(map(str, values)))
        each.set_yticks(range(len(others)), list(map(str, others)))
        each.set(xlabel=name, ylabel=other)
        figure.colorbar(image, label=f"{what}{metric.unit}")
    else:
        numeric = is_numeric(values) and math.inf not in values  # infinity is a word: it has no place on a scale
        tried = [value for value in values if (value,) in at]
        x = tried if numeric else list(map(str, tried))
        means, spreads = (metric.scale * np.array([at[(value,)][k] for value in tried]) for k in (0, 1))
        each.errorbar(x, means, yerr=np.nan_to_num(spreads), marker="o", capsize=3, color=COLOURS[0])
        if best is not None:
            each.plot([x[tried.index(best[0])]], [metric.scale * at[best][0]], marker="*", markersize=16, color=COLOURS[1])
        if numeric and min(tried) > 0 and max(tried) >= 10 * min(tried):
            each.set_xscale("log")
            if not scattered:
                each.set_xticks(tried, list(map(str, tried)), minor=False)
                each.minorticks_off()
        each.set(xlabel=name, ylabel=f"{what}{metric.unit}")
        tidy(each)
    each.set_title(title, loc="left", fontsize=10)
    return save(figure, path)


def is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def in_order(values: Sequence[Any]) -> Sequence[Any]:
    """Numbers in ascending order, words as given."""
    return sorted(values) if is_numeric(values) else values


def require_matplotlib() -> None:
    need("a picture", "matplotlib", "analysis")


def canvas(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def tidy(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    if axes.get_xlabel() == "round":  # avoid ticks such as round 1.5
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def finish(figure: Figure, handles: Mapping[str, Any], title: str, paths: Sequence[Path]) -> list[Path]:
    figure.suptitle(title, fontsize=12)
    if handles:
        inches = max(1.6, 0.7 + 0.07 * max(map(len, handles)))  # width of an entry: the legend must not be wider than the picture
        columns = min(len(handles), max(1, int(figure.get_figwidth() // inches)))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)
    return [save(figure, path) for path in paths]


def displayed(figure: Figure) -> Figure:
    """The same figure, made visible in a notebook: one that pyplot does not know shows only its name there."""

    def png() -> bytes:
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=100)
        return drawn.getvalue()

    figure._repr_png_ = png  # type: ignore[attr-defined]
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write the picture in one step; without a date, so that the same numbers give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    undated, drawn = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix), io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:] or None, dpi=150, metadata=undated)
    files.write(path, drawn.getvalue())
    return path
