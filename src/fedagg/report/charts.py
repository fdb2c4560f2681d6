"""The charts of a report as plain data, each with a sentence that says what it shows to those who cannot see it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fedagg import federation, runs
from fedagg.errors import FedaggError
from fedagg.report.content import FIGURES, PROGRESS, Column, Content, Entry, Group, Series
from fedagg.reproduce.running import data_of
from fedagg.runs import Run

MOST_CLIENTS = 200  # rows of a heat map: more cannot be told apart on a screen
MOST_MAPS = 12  # rate maps and partitions in one page


def build(content: Content) -> dict[str, Any]:
    """Everything that the page's script draws."""
    return {
        "progress": {key: label for key, (label, _) in PROGRESS.items()},
        "groups": [group(each) for each in content.groups],
        "rates": [rates(run) for run in adaptive_first(t.run for t in content.trials if t.run is not None)][:MOST_MAPS],
        "partitions": partitions(content.trials),
    }


def group(each: Group) -> dict[str, Any]:
    configs, metric = [trial.config for trial in each.trials], each.metric
    names = {
        "accuracy": f"{runs.measured(metric.label, configs)}{metric.unit}",
        "loss": runs.measured("loss", configs),
        "train_loss": "training loss",
        "drift": "mean distance a client moved",
        "rate": "mean learning rate",
    }
    lines = [series(one) for one in each.series.values()]
    texts = {figure: describe(label, figure, lines) for figure, label in names.items()}
    return {"name": each.name, "names": names, "series": lines, "texts": texts}


def series(one: Series) -> dict[str, Any]:
    progress = {by: spent for by in PROGRESS if (spent := one.progress(by)) is not None}
    found: dict[str, Any] = {"name": one.name, "seeds": len(one.trials), "progress": progress}
    for figure in FIGURES:
        mean, spread = one.curve(figure)
        scale = one.trials[0].metric.scale if figure == "accuracy" else 1.0
        found[figure] = scaled(mean, scale)
        found[f"{figure}_std"] = scaled(spread, scale)
    return found


def scaled(values: Column, scale: float) -> Column:
    """Six digits are more than a screen shows, and what is no number is nothing."""
    return [None if value is None or not math.isfinite(value) else float(f"{scale * value:.6g}") for value in values]


def describe(label: str, figure: str, lines: Sequence[dict[str, Any]]) -> str:
    """The chart in words: where each line begins and ends."""
    parts = []
    for line in lines:
        known = [value for value in line[figure] if value is not None]
        if known:
            parts.append(f"{line['name']} from {known[0]:.4g} to {known[-1]:.4g}")
    return f"Line chart of {label} over rounds: {'; '.join(parts)}." if parts else f"No record of {label}."


def adaptive_first(found: Iterable[Run]) -> list[Run]:
    """Runs with a record of rates, FedAgg's before those whose rates are all one number: the first is what the page opens with."""
    return sorted((run for run in found if has_rates(run)), key=lambda run: not run.config.method.startswith("fedagg"))


def has_rates(run: Run) -> bool:
    return any(row.get("rates") for row in run.clients)


def rates(run: Run) -> dict[str, Any]:
    """Learning rates: one client × round table an epoch, empty where a client did not take part, or not for so long."""
    rows = [row | {"rates": made(row)} for row in run.clients if row.get("rates")]
    epochs = max(len(one) for row in rows for one in row["rates"])
    seen = sorted({client for row in rows for client in row["clients"]})
    shown = seen[:MOST_CLIENTS]
    at = {client: index for index, client in enumerate(shown)}
    tables: list[list[Column]] = [[[None] * len(rows) for _ in shown] for _ in range(epochs)]
    moved: list[Column] = [[None] * len(rows) for _ in shown]
    for number, row in enumerate(rows):
        for client, own, distance in zip(row["clients"], row["rates"], row["moved"], strict=True):
            if client in at:
                moved[at[client]][number] = distance
                for epoch, rate in enumerate(own):
                    tables[epoch][at[client]][number] = rate
    every = [rate for row in rows for own in row["rates"] for rate in own]
    some = f" (the first {len(shown)} of {len(seen)})" if len(shown) < len(seen) else ""
    return {
        "name": run.name,
        "rounds": [row["round"] for row in rows],
        "clients": shown,
        "epochs": epochs,
        "tables": tables,
        "moved": moved,
        "bands": [band([[own[e] for own in row["rates"] if e < len(own)] for row in rows]) for e in range(epochs)],
        "text": f"Heat map of the learning rate of {len(shown)} clients{some} over {len(rows)} rounds in {run.name}: "
        f"from {min(every):.3g} to {max(every):.3g}, first round mean {average(rows[0]):.3g}, "
        f"last round mean {average(rows[-1]):.3g}.",
    }


def band(rounds: Sequence[Sequence[float]]) -> dict[str, Column]:
    """Lowest, mean and highest rate of one epoch, round by round."""
    return {
        "low": [min(values) if values else None for values in rounds],
        # rounded, since rates that are all the same must have the same mean in every round
        "mean": scaled([sum(values) / len(values) if values else None for values in rounds], 1.0),
        "high": [max(values) if values else None for values in rounds],
    }


def made(row: dict[str, Any]) -> list[list[float]]:
    """The rates of the epochs that each client made: stragglers stop before the last."""
    did = row.get("epochs", {})
    return [own[: did.get(str(client))] for client, own in zip(row["clients"], row["rates"], strict=True)]


def average(row: dict[str, Any]) -> float:
    values: list[float] = [rate for own in row["rates"] for rate in own]
    return sum(values) / len(values)


def partitions(trials: Sequence[Entry]) -> list[dict[str, Any]]:
    """Who holds which labels, for every split in the report whose data is on this machine."""
    from fedagg.theory.heterogeneity import METRICS, distances, label_counts

    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for trial in trials:
        c = trial.config
        key = (c.dataset, runs.split(c), c.clients, c.validation)
        if key in found or len(found) == MOST_MAPS:
            continue
        try:
            given = data_of(c).of_task(c.task).held_back(c.validation, c.seed)
            if given.task != "classification":
                continue
            counts = label_counts(given.y_train.numpy(), federation.deal(c, given), given.classes)
        except FedaggError:
            continue  # data or split given from Python, or not on this machine
        apart = distances(counts)
        words = (c.dataset, runs.split(c), f"{c.clients} clients", f"seed {c.seed}", runs.held_back(c))
        name = ", ".join(filter(None, words))
        shown = counts[:MOST_CLIENTS]
        figures = ", ".join(f"{METRICS[metric]} {apart.mean(metric):.3g}" for metric in METRICS)
        found[key] = {
            "name": name,
            "table": shown.T.tolist(),
            "text": f"Heat map of samples by label and client for {name}: from {counts.min()} to {counts.max()} "
            f"samples a cell, {apart.sizes.min()} to {apart.sizes.max()} a client. "
            f"Mean distance from everybody's mix: {figures}.",
        }
    return list(found.values())
