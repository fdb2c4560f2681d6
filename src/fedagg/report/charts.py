"""The charts of a report as plain data, each with a sentence that describes it to readers who cannot see it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from fedagg import from_config, runs
from fedagg.config import Config
from fedagg.errors import FedaggError
from fedagg.report.content import FIGURES, PROGRESS, Column, Content, Entry, Group, Series, labels
from fedagg.reproduce.running import data_of
from fedagg.runs import Run

MOST_CLIENTS = 200  # rows of a heat map: more cannot be distinguished on a screen
MOST_MAPS = 12  # rate maps and partitions in one page
MOST_CAUSES = 7  # causes of being left out that have their own colour


def build(content: Content) -> dict[str, Any]:
    """All data that the page's script draws."""
    known = [trial.run for trial in content.trials if trial.run is not None]
    return {
        "progress": {key: label for key, (label, _) in PROGRESS.items()},
        "groups": [group(each) for each in content.groups],
        "rates": [rates(run) for run in adaptive_first(known)[:MOST_MAPS]],
        "left_out": [missing(run) for run in known if has_missing(run)][:MOST_MAPS],
        "partitions": partitions(content.trials),
    }


def group(each: Group) -> dict[str, Any]:
    names = labels(each)
    seen: Counter[str] = Counter()
    lines = []
    for one in each.series.values():
        # A line keeps its identity while a run goes on, so that the reader's changes to it are kept.
        lines.append(series(one) | {"uid": f"{one.settings} {seen[one.settings]}"})
        seen[one.settings] += 1
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
    """The scaled values with six digits, more than a screen shows; None for those that are not finite."""
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
    """Runs with a record of rates. FedAgg's come first, because the page opens with the first and other rates are constant."""
    return sorted((run for run in found if has_rates(run)), key=lambda run: not run.config.method.startswith("fedagg"))


def has_rates(run: Run) -> bool:
    return any(row.get("rates") for row in run.clients)


def rates(run: Run) -> dict[str, Any]:
    """Learning rates: one client × round table per epoch, empty where a client did not take part or stopped earlier."""
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
        # rounded, because equal rates must have the same mean in every round
        "mean": scaled([sum(values) / len(values) if values else None for values in rounds], 1.0),
        "high": [max(values) if values else None for values in rounds],
    }


def made(row: dict[str, Any]) -> list[list[float]]:
    """The rates of the epochs that each client completed: stragglers stop before the last."""
    did = row.get("epochs", {})
    return [own[: did.get(str(client))] for client, own in zip(row["clients"], row["rates"], strict=True)]


def has_missing(run: Run) -> bool:
    return any(row.get("left_out") for row in run.clients)


def missing(run: Run) -> dict[str, Any]:
    """How many clients were left out of each round, by cause."""
    causes = Counter(cause for row in run.clients for cause in row.get("left_out", {}).values())
    named = [cause for cause, _ in causes.most_common(MOST_CAUSES)]
    counts: dict[str, list[int]] = {cause: [0] * len(run.clients) for cause in named}
    for number, row in enumerate(run.clients):
        for cause in row.get("left_out", {}).values():
            counts.setdefault(cause if cause in named else "other causes", [0] * len(run.clients))[number] += 1
    summary = "; ".join(f"{cause} {sum(values)} times" for cause, values in counts.items())
    return {
        "name": run.name,
        "rounds": [row["round"] for row in run.clients],
        "counts": counts,
        "text": f"Bar chart of the clients left out of each of {len(run.clients)} rounds in {run.name}, by cause: {summary}.",
    }


def average(row: dict[str, Any]) -> float:
    values: list[float] = [rate for own in row["rates"] for rate in own]
    return sum(values) / len(values)


def partitions(trials: Sequence[Entry]) -> list[dict[str, Any]]:
    """Which client holds which labels, for every split in the report whose data is on this machine."""
    first: dict[tuple[Any, ...], Config] = {}
    for trial in trials:
        c = trial.config
        first.setdefault((c.dataset, runs.split(c), c.clients, c.validation), c)
    return [found for c in list(first.values())[:MOST_MAPS] if (found := partition(c)) is not None]


@lru_cache(MOST_MAPS)  # a page that follows a run is built again and again
def partition(c: Config) -> dict[str, Any] | None:
    from fedagg.theory.heterogeneity import METRICS, distances, label_counts

    try:
        given = data_of(c).of_task(c.task).held_back(c.validation, c.seed)
        if given.task != "classification":
            return None
        counts = label_counts(given.y_train.numpy(), from_config.deal(c, given), given.classes)
    except FedaggError:
        return None  # data or split given from Python, or not on this machine
    apart = distances(counts)
    words = (c.dataset, runs.split(c), f"{c.clients} clients", f"seed {c.seed}", runs.held_back(c))
    name = ", ".join(filter(None, words))
    shown = counts[:MOST_CLIENTS]
    figures = ", ".join(f"{METRICS[metric]} {apart.mean(metric):.3g}" for metric in METRICS)
    return {
        "name": name,
        "table": shown.T.tolist(),
        "text": f"Heat map of samples by label and client for {name}: from {counts.min()} to {counts.max()} "
        f"samples per cell, {apart.sizes.min()} to {apart.sizes.max()} per client. "
        f"Mean distance from the overall mix: {figures}.",
    }
