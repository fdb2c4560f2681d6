"""Test results: the sums that a node reports about a model, and the server's figures for all nodes.

A mean of the nodes' own figures would be a different figure: R² and F1 of many samples are not means over their parts. Sums can be
added, and the score of the total is that of all test samples together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING, getLogger
from typing import Any

import torch
from torch import Tensor

from fedagg import tasks
from fedagg.errors import SettingError
from fedagg.flower.messages import ABSURD, MOST_SAMPLES, BadAnswer, number, numbers
from fedagg.result import finite
from fedagg.tasks import Metric, Task

log = getLogger("flwr").log
ALONG = "test-"  # prefix of test results that are sent along with an update

OwnMetric = Metric | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Scores:
    """A node's test results for a model."""

    samples: int  # number of test samples
    loss: float  # mean loss
    tallies: dict[str, list[float]]  # by metric: the sums over these samples

    def as_record(self, prefix: str = "") -> dict[str, Any]:
        """The results under their names in a message; the first two are Flower's own names."""
        named = {"num-examples": self.samples, "loss": self.loss, **self.tallies}
        return {prefix + name: value for name, value in named.items()}

    @property
    def numbers(self) -> int:
        """How many numbers are sent."""
        return 2 + sum(map(len, self.tallies.values()))


def run_task(task: str | None, named: str | None, own: OwnMetric | None) -> Task:
    """The run's task, and the figures that nodes are asked for. If a metric was chosen, only its sums are sent."""
    found, metric = tasks.find(task or tasks.CLASSIFICATION.name), named if own is None else own
    return found if metric is None else replace(found.judged_by(metric), others=())


def subject(task: Task, setting: str | None) -> dict[str, Any]:
    """What messages tell nodes about it: the task, if the settings name one, and the figures, if they are not the task's own."""
    usual = task.metrics == tasks.find(task.name).metrics
    return ({} if setting is None else {"task": setting}) | ({} if usual else {"metrics": [metric.key for metric in task.metrics]})


def message_task(message: Mapping[str, Any], own: OwnMetric | None) -> Task:
    """On the node: the task of a message, with the figures asked for. Functions are not sent: the node has its `own`."""
    task = tasks.find(str(message.get("task", tasks.CLASSIFICATION.name)))
    if "metrics" not in message:
        return task
    known = {metric.key: metric for metric in task.judged_by(own).metrics}
    if missing := [key for key in message["metrics"] if key not in known]:
        raise SettingError(
            "metric", missing[0], "is not known on this node; give it to client_app(metric=...), as you gave it to the server"
        )
    first, *others = (known[key] for key in message["metrics"])
    return replace(task, metric=first, others=tuple(others))


def read(record: Any, metrics: Sequence[Metric], prefix: str = "") -> Scores | None:
    """A node's test results; None for a node without test samples."""
    size = record.get(prefix + "num-examples")
    if size is None or size == 0:
        return None
    size, loss = number(size), number(record.get(prefix + "loss"))
    tallies = {metric.key: numbers(record.get(prefix + metric.key)) for metric in metrics}
    known = size % 1 == 0 and 1 <= size <= MOST_SAMPLES and abs(loss) < ABSURD
    if not known or not all(possible(metric, tallies[metric.key], int(size)) for metric in metrics):
        raise BadAnswer("sent impossible test results")
    return Scores(int(size), loss, tallies)


def possible(metric: Metric, sums: list[float], samples: int) -> bool:
    try:
        return all(abs(value) < ABSURD for value in sums) and metric.possible(tensor(sums), samples)
    except Exception:  # a user's function may raise anything for numbers that do not fit
        return False


def tensor(sums: list[float]) -> Tensor:
    return torch.tensor(sums, dtype=torch.float64)


def odd_clients(scores: Mapping[int, Scores]) -> list[int]:
    """Clients whose sums have other lengths than those of most clients, so that they cannot be added."""
    lengths = {client: tuple(map(len, scores[client].tallies.values())) for client in sorted(scores)}
    ((usual, _),) = Counter(lengths.values()).most_common(1) or [((), 0)]
    return [client for client, found in lengths.items() if found != usual]


def pool(scores: Mapping[int, Scores], task: Task) -> dict[str, Any]:
    """The figures of all nodes' test samples together; empty if there are none."""
    if not scores:
        return {}
    every = scores.values()
    loss = math.fsum(one.samples * one.loss for one in every) / sum(one.samples for one in every)
    sums = {
        metric.key: [math.fsum(column) for column in zip(*(one.tallies[metric.key] for one in every), strict=True)]
        for metric in task.metrics
    }
    return {"loss": loss, **{m.key: figure(m, sums[m.key], "all nodes") for m in task.metrics}, "tested": len(scores)}


def one_by_one(number: int, scores: Mapping[int, Scores], task: Task) -> dict[str, Any]:
    """Each node's own figures for the model of a round, for clients.jsonl; none if its samples do not determine them."""
    known = sorted(scores.items())
    columns: dict[str, list[Any]] = {name: [getattr(one, name) for _, one in known] for name in ("samples", "loss")}
    for metric in task.metrics:
        columns[metric.key] = [finite(figure(metric, one.tallies[metric.key], f"client {client}")) for client, one in known]
    return {"round": number, "clients": [client for client, _ in known], **columns}


def figure(metric: Metric, sums: list[float], whose: str) -> float:
    """The score of sums. A user's function may fail on what nodes send, and this must not end a run."""
    try:
        return float(metric.score(tensor(sums)))
    except Exception as error:
        log(WARNING, "%s of %s cannot be computed: %s", metric.label, whose, type(error).__name__)
        return math.nan
