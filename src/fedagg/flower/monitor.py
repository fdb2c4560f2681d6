"""Machine-readable output of a running federation: figures for Prometheus, and log lines as JSON."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from logging import Formatter, LogRecord, StreamHandler, getLogger
from typing import Any

from fedagg.measure import ACCURACY, Measure

# Name in the record, name for Prometheus, meaning. Values are of the last round unless the meaning says otherwise.
FIGURES = (
    ("round", "round", "rounds done"),
    ("loss", "loss", "mean loss on all nodes' test samples together"),
    ("train_loss", "train_loss", "mean loss of the clients' own training"),
    ("participants", "nodes_asked", "nodes asked to train"),
    ("seconds", "round_seconds", "duration of the round"),
    ("epsilon", "epsilon", "privacy spent, compared with a node that sends nothing"),
    ("epsilon_replaced", "epsilon_replaced", "privacy spent, compared with a node that has other data"),
)
TOTALS = (
    ("bytes_down", "bytes_down_total", "bytes of numbers sent to nodes for training, all rounds"),
    ("bytes_up", "bytes_up_total", "bytes of numbers that nodes sent back, all rounds"),
    ("bytes_tests", "bytes_tests_total", "bytes of numbers sent for tests and back, besides those of training, all rounds"),
    ("seconds", "seconds_total", "time spent in rounds, all rounds"),
)


def exposition(
    history: Sequence[Mapping[str, Any]], about: Mapping[str, Any], rounds: int, metrics: Sequence[Measure] = (ACCURACY,)
) -> str:
    """The state after the last round in Prometheus' text format. Unknown figures are left out."""
    last = history[-1]
    tested = {"loss", *(metric.key for metric in metrics)}
    lines: list[str] = []

    def tell(name: str, what: str, kind: str, *values: tuple[str, float]) -> None:
        lines.extend((f"# HELP fedagg_{name} {escaped(what)}", f"# TYPE fedagg_{name} {kind}"))
        lines.extend(f"fedagg_{name}{label} {float(value)!r}" for label, value in values)

    tell("rounds_planned", "rounds of the run", "gauge", ("", rounds))
    judged = [(metric.key, plain(metric.key), f"{metric.label} on all nodes' test samples together") for metric in metrics]
    for key, name, what in (*FIGURES, *judged):
        value = next((row[key] for row in reversed(history) if key in row), None) if key in tested else last.get(key)
        if value is not None and math.isfinite(value):
            tell(name, what, "gauge", ("", value))
    for key, name, what in TOTALS:
        tell(name, what, "counter", ("", math.fsum(row.get(key, 0) for row in history)))
    tell("nodes_answered", "nodes whose answers were used in the last round", "gauge", ("", len(about.get("clients", []))))
    for metric in metrics if about.get("tests") else ():
        test = about["tests"][-1]
        each = [(f'{{client="{c}"}}', v) for c, v in zip(test["clients"], test[metric.key], strict=True) if v is not None]
        what = f"{metric.label} on the node's own test samples, for the last model it has tested"
        tell(f"node_{plain(metric.key)}", what, "gauge", *each)
    causes = Counter(kind(cause) for cause in about.get("left_out", {}).values())
    tell(
        "nodes_left_out",
        "nodes left out of the last round, by cause",
        "gauge",
        *((f'{{cause="{c}"}}', n) for c, n in causes.items()),
    )
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """The text on one line, which a user's label need not be."""
    return " ".join(text.split()).replace("\\", "\\\\")


def plain(key: str) -> str:
    """A name in characters that Prometheus accepts."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in key)


def kind(cause: str) -> str:
    """The cause without numbers of samples or steps: every new value would be a new series."""
    head = cause.split(",")[0].split(":")[0]
    return "".join(c for c in " ".join(w for w in head.split() if not any(d.isdigit() for d in w)) if c.isalnum() or c == " ")


class Lines(Formatter):
    """A log line as one JSON object, with its time."""

    def format(self, record: LogRecord) -> str:
        entry = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "message": record.getMessage().strip(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def log_as_json() -> None:
    """Make the console handlers of Flower's log, which we use too, write JSON without empty lines."""
    logger = getLogger("flwr")
    for handler in [handler for handler in logger.handlers if isinstance(handler, StreamHandler)]:
        lines = StreamHandler(handler.stream)
        lines.setLevel(handler.level)
        lines.setFormatter(Lines())
        lines.addFilter(lambda record: bool(record.getMessage().strip()))
        logger.removeHandler(handler)
        logger.addHandler(lines)
