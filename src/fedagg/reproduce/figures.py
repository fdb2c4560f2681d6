"""The paper's figures, drawn from the results folder."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from fedagg import from_config, plots
from fedagg.errors import DataError
from fedagg.plots import Bars, Panel, Series
from fedagg.reproduce import table
from fedagg.reproduce.formats import name as method_name
from fedagg.reproduce.grid import Row, Spec
from fedagg.reproduce.results import Measured, Store


def draw(spec: Spec, store: Store, folder: Path, formats: Sequence[str]) -> list[Path]:
    """The figure's files, one for every data set and model in it; none if nothing was measured."""
    if spec.kind == "partition":
        return partition(spec, folder, formats)
    drawn: list[Path] = []
    for label, rows in groupby(spec.rows, key=lambda row: row.label):
        group = list(rows)
        for participation in spec.participation if spec.kind == "curves" else [None]:
            # Bars show all shares of clients together; curves have a file for each.
            share = f"_p{100 * participation:g}" if participation is not None and len(spec.participation) > 1 else ""
            paths = [folder / f"{spec.name}_{common(group)}{share}.{ending}" for ending in formats]
            if participation is not None:
                drawn += curves(spec, store, group, participation, paths, f"{spec.title}\n{label}")
            else:
                drawn += bars(spec, store, group, paths, f"{spec.title}\n{label}")
    return drawn


def curves(spec: Spec, store: Store, rows: Sequence[Row], participation: float, paths: Sequence[Path], title: str) -> list[Path]:
    """Accuracy above loss (beside it, if alone), one column per distribution; mean and standard deviation over seeds."""
    accuracy, loss = [], []
    for row in rows:
        found = list(measured(spec, store, row, participation))
        top = [line(label, "accuracy", cells, index, 100.0) for index, label, cells in found]
        bottom = [line(label, "loss", cells, index) for index, label, cells in found]
        accuracy.append(Panel(row.distribution, "round", "test accuracy (%)", top))
        loss.append(Panel(row.distribution, "round", "test loss", bottom))
    if not any(panel.series for panel in accuracy):
        return []
    return plots.panels([accuracy, loss] if len(rows) > 1 else [accuracy + loss], paths, title)


def measured(spec: Spec, store: Store, row: Row, participation: float) -> Iterator[tuple[int, str, list[Measured]]]:
    """The content of a panel: a number that determines the colour, a label, and one cell per seed."""
    lines = [(method, variant) for method in spec.methods for variant in spec.variants]
    for index, (method, variant) in enumerate(lines):
        if spec.applies(row, method):
            found = [store.get(spec.config(row, method, participation, seed, variant)) for seed in range(spec.seeds)]
            cells = [cell for cell in found if cell is not None]
            if cells:
                many = len(spec.methods) > 1
                label = " ".join(filter(None, (method_name(method) if many or not variant["name"] else "", variant["name"])))
                yield index, label, cells


def line(label: str, column: str, cells: Sequence[Measured], index: int, scale: float = 1.0) -> Series:
    """A line over the rounds in which every seed was evaluated; it ends at a loss that is NaN."""
    columns = [cell.column(column) for cell in cells]
    x, y, spread = [], [], []
    for number, values in enumerate(zip(*columns, strict=False), start=1):
        known = [scale * value for value in values if value is not None]
        if len(known) == len(cells):
            x.append(float(number))
            y.append(statistics.fmean(known))
            spread.append(statistics.stdev(known) if len(known) > 1 else 0.0)
    band = spread if len(cells) > 1 else None
    return Series(label, x, y, band, index, strong=label.startswith("FedAgg"))


def bars(spec: Spec, store: Store, rows: Sequence[Row], paths: Sequence[Path], title: str) -> list[Path]:
    """Accuracy of every method by distribution and share of clients, with the paper's numbers marked on the bars."""
    whole = table.build(spec, store)
    lines = [line for line in whole.lines if line.row in rows and line.best is not None]
    if not lines:
        return []
    nan = float("nan")
    groups = [f"{line.split}\n{100 * line.participation:g} %" for line in lines]
    heights, spreads, marks = {}, {}, {}
    for method in whole.methods:
        entries = [line.entries[method] for line in lines]
        if not any(entry.ours for entry in entries):
            continue
        heights[method_name(method)] = [entry.mean if entry.ours else nan for entry in entries]
        spreads[method_name(method)] = [entry.std or 0.0 if entry.ours else nan for entry in entries]
        marks[method_name(method)] = [nan if entry.theirs is None else entry.theirs for entry in entries]
    return plots.bars([Bars("", groups, heights, spreads, marks)], paths, title)


def partition(spec: Spec, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Which client holds which labels, and the Wasserstein distance from the overall mix. Needs the data, but no results."""
    from fedagg.theory import heterogeneity

    counts, distances = {}, {}
    for row in spec.rows:
        config = spec.config(row, "fedavg", spec.participation[0], 0)
        try:
            labels = from_config.chosen_data(config, download=False)
        except DataError:
            return []
        parts = from_config.deal(from_config.with_client_count(config, labels), labels)
        found = heterogeneity.label_counts(labels.y_train.numpy(), parts, labels.classes)
        counts[row.distribution] = found
        distances[row.distribution] = heterogeneity.distances(found).wasserstein
    paths = [folder / f"{spec.name}.{ending}" for ending in formats]
    return plots.label_maps(counts, distances, heterogeneity.METRICS["wasserstein"], paths, spec.title)


def common(rows: Sequence[Row]) -> str:
    """The common beginning of the rows' names: `cifar10-cnn` for `cifar10-cnn-iid`."""
    return rows[0].name.rsplit("-", 1)[0]
