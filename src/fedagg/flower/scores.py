"""Test results: the sums that a node tells of a model, and the figures that the server makes of everybody's.

A mean of the nodes' own figures would be another figure: R² and F1 of many samples are no means of those of their parts. Sums add
up, and the score of the total is that of all test samples together.
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
ALONG = "test-"  # before the names of test results that go along with an update

OwnMetric = Metric | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Scores:
    """What a node says of a model."""

    samples: int  # that it was tested on
    loss: float  # their mean
    tallies: dict[str, list[float]]  # by metric: the sums over these samples

    def told(self, prefix: str = "") -> dict[str, Any]:
        """By the names that a message has them under, the first two as Flower has them."""
        named = {"num-examples": self.samples, "loss": self.loss, **self.tallies}
        return {prefix + name: value for name, value in named.items()}

    @property
    def numbers(self) -> int:
        """That travel."""
        return 2 + sum(map(len, self.tallies.values()))


def chosen(task: str | None, named: str | None, own: OwnMetric | None) -> Task:
    """What a run learns, and the figures that nodes are asked for. Where one was chosen, the sums of no other travel."""
    found, metric = tasks.find(task or tasks.CLASSIFICATION.name), named if own is None else own
    return found if metric is None else replace(found.judged_by(metric), others=())


def subject(task: Task, said: str | None) -> dict[str, Any]:
    """What messages to nodes say of it: the task, if the settings `said` one, and which figures, where these are not its own."""
    usual = task.metrics == tasks.find(task.name).metrics
    return ({} if said is None else {"task": said}) | ({} if usual else {"metrics": [metric.key for metric in task.metrics]})


def asked(told: Mapping[str, Any], own: OwnMetric | None) -> Task:
    """On the node: the task of a message, with the figures that are asked for. Functions do not travel: the node has its `own`."""
    task = tasks.find(str(told.get("task", tasks.CLASSIFICATION.name)))
    if "metrics" not in told:
        return task
    known = {metric.key: metric for metric in task.judged_by(own).metrics}
    if missing := [key for key in told["metrics"] if key not in known]:
        raise SettingError("metric", missing[0], "is not known on this node; give it to client_app(metric=...), as to the server")
    first, *others = (known[key] for key in told["metrics"])
    return replace(task, metric=first, others=tuple(others))


def read(told: Any, metrics: Sequence[Metric], prefix: str = "") -> Scores | None:
    """A node's test results; None of one that has nothing to test on."""
    size = told.get(prefix + "num-examples")
    if size is None or size == 0:
        return None
    size, loss = number(size), number(told.get(prefix + "loss"))
    tallies = {metric.key: numbers(told.get(prefix + metric.key)) for metric in metrics}
    known = size % 1 == 0 and 1 <= size <= MOST_SAMPLES and abs(loss) < ABSURD
    if not known or not all(possible(metric, tallies[metric.key], int(size)) for metric in metrics):
        raise BadAnswer("sent test results that cannot be")
    return Scores(int(size), loss, tallies)


def possible(metric: Metric, sums: list[float], samples: int) -> bool:
    try:
        return all(abs(value) < ABSURD for value in sums) and metric.possible(tensor(sums), samples)
    except Exception:  # whatever a function of the user's says to numbers that do not fit
        return False


def tensor(sums: list[float]) -> Tensor:
    return torch.tensor(sums, dtype=torch.float64)


def unlike(scores: Mapping[int, Scores]) -> list[int]:
    """Clients whose sums are of other lengths than most clients' are, so that they do not add up."""
    lengths = {client: tuple(map(len, scores[client].tallies.values())) for client in sorted(scores)}
    ((usual, _),) = Counter(lengths.values()).most_common(1) or [((), 0)]
    return [client for client, found in lengths.items() if found != usual]


def pooled(scores: Mapping[int, Scores], task: Task) -> dict[str, Any]:
    """The figures of all nodes' test samples together; nothing where nobody has any."""
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
    """Each node's own figures of the model that a round made, for clients.jsonl; none where its samples do not tell."""
    known = sorted(scores.items())
    columns: dict[str, list[Any]] = {name: [getattr(one, name) for _, one in known] for name in ("samples", "loss")}
    for metric in task.metrics:
        columns[metric.key] = [finite(figure(metric, one.tallies[metric.key], f"client {client}")) for client, one in known]
    return {"round": number, "clients": [client for client, _ in known], **columns}


def figure(metric: Metric, sums: list[float], whose: str) -> float:
    """The score of sums. A function of the user's may not take them: what nodes send is not to end a run."""
    try:
        return float(metric.score(tensor(sums)))
    except Exception as error:
        log(WARNING, "%s of %s cannot be computed: %s", metric.label, whose, type(error).__name__)
        return math.nan
