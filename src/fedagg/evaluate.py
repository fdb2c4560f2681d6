"""Loss and metrics of the global model on the whole test set, and for each client."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedagg import seeding
from fedagg.engines.base import Problem
from fedagg.engines.batched import activations
from fedagg.errors import FedaggError
from fedagg.flat import Model, Workspace
from fedagg.measure import Measure
from fedagg.tasks import CLASSIFICATION, Task

BATCH = {"cpu": 500, "cuda": 10_000}
ROOM = 4 << 30  # bytes that the layers' outputs of one batch may take on a GPU
WORST = 0.1  # share of the clients whose mean is reported beside the mean of all


def batch_size(problem: Problem) -> int:
    """Test samples at a time: on a GPU enough to keep it busy, for deep networks as many as fit beside the training. This depends
    on the network only, not on the free memory, so that sums are the same every time."""
    most = BATCH[problem.device.type]
    return most if problem.device.type == "cpu" else max(1, min(most, ROOM // (4 * max(1, activations(problem)))))


def split_rows(rows: Tensor, size: int) -> list[Tensor]:
    """The rows in parts of this size, but never a last part of one row: some modules do not accept that."""
    parts = list(rows.split(size))
    return [*parts[:-2], rows[len(rows) - 1 - size :]] if len(parts) > 1 and len(parts[-1]) == 1 else parts


class Evaluator:
    """Evaluates a model on samples, by the task's loss and metrics."""

    def __init__(self, problem: Problem, x: Tensor, y: Tensor, task: Task = CLASSIFICATION) -> None:
        self.problem, self.task = problem, task
        self.space = Workspace(problem.module, problem.layout, problem.device)
        self.x, self.y = x.to(problem.device), y.to(problem.device)
        self.batch = batch_size(problem)
        self.careful = True  # pass copies until it is known that the module does not change its input

    @torch.no_grad()
    def samples(self, model: Model) -> tuple[Tensor, list[Tensor]]:
        """The loss of every sample, (N,), and for each of the task's metrics the numbers of every sample, (k, N)."""
        self.space.load(model)
        self.space.module.eval()
        losses, wrote = [], False
        tallies: list[list[Tensor]] = [[] for _ in self.task.metrics]
        for x, y in zip(split_rows(self.x, self.batch), split_rows(self.y, self.batch), strict=True):
            given = (x.clone(), y.clone()) if self.careful else (x, y)
            before = [part._version for part in given]
            output = self.space.module(given[0])
            losses.append(self.problem.loss(output, given[1]))
            for metric, found in zip(self.task.metrics, tallies, strict=True):
                found.append(metric.tally(output, y).double().T)
            wrote |= before != [part._version for part in given]
        if wrote and not self.careful:
            raise FedaggError("model: it wrote to the test samples, but did not when it first saw them; give it x.clone()")
        self.careful = wrote
        return torch.cat(losses), [torch.cat(found, 1) for found in tallies]

    def __call__(self, model: Model) -> dict[str, float]:
        """Mean loss and every metric by its key; one transfer from the device."""
        return self.figures(*self.samples(model))

    def figures(self, losses: Tensor, tallies: Sequence[Tensor]) -> dict[str, float]:
        sums = torch.cat([losses.double().mean()[None], *(tally.sum(1) for tally in tallies)]).cpu()
        loss, *each = sums.split([1, *(len(tally) for tally in tallies)])
        scores = {metric.key: metric.score(part) for metric, part in zip(self.task.metrics, each, strict=True)}
        return {"loss": float(loss), **scores}


class ByClient(Protocol):
    """Scores a model for each client by the task's metric; NaN for a client that cannot be scored."""

    def scores(self, model: Model) -> list[float]: ...

    def score(self, model: Model, client: int) -> float: ...


class LabelWeightedTest:
    """The test set weighted for each client, so that labels are as frequent as in the client's own samples."""

    def __init__(self, evaluator: Evaluator, parts: Sequence[Any]) -> None:
        self.evaluator, self.parts = evaluator, parts

    @functools.cached_property
    def present(self) -> Tensor:
        """Test samples of each class, (classes,)."""
        return torch.bincount(self.evaluator.y, minlength=self.evaluator.problem.classes).double()

    def weights(self, client: int) -> Tensor:
        """The weight of a test sample of each class for a client, (classes,)."""
        problem = self.evaluator.problem
        own = torch.as_tensor(np.asarray(self.parts[client]), dtype=torch.int64).to(problem.device)
        wanted = torch.bincount(problem.y[own], minlength=problem.classes).double()
        return wanted / self.present.clamp_min(1)

    def score(self, model: Model, client: int) -> float:
        _, (tally, *_) = self.evaluator.samples(model)
        weights = self.weights(client)[self.evaluator.y]
        return self.evaluator.task.metric.score(torch.stack([(weights * row).sum() for row in tally]).cpu())

    @functools.cached_property
    def table(self) -> Tensor:
        """The weights of all clients, (clients, classes)."""
        return torch.stack([self.weights(client) for client in range(len(self.parts))])

    def scores(self, model: Model) -> list[float]:
        _, (tally, *_) = self.evaluator.samples(model)
        chosen = torch.nn.functional.one_hot(self.evaluator.y, self.evaluator.problem.classes).double()
        by_class = tally @ chosen  # a product, because a scatter on a GPU adds in no fixed order
        return [self.evaluator.task.metric.score(sums) for sums in (self.table @ by_class.T).cpu()]


class HeldOutTest:
    """Test samples that each client holds out from its own."""

    def __init__(self, problem: Problem, held: Sequence[Any], task: Task) -> None:
        self.problem, self.held, self.task = problem, [torch.as_tensor(np.asarray(part), dtype=torch.int64) for part in held], task
        every = torch.cat(self.held)
        self.evaluator = Evaluator(problem, problem.x[every.to(problem.device)], problem.y[every.to(problem.device)], task)
        self.sizes = [len(part) for part in self.held]

    def score(self, model: Model, client: int) -> float:
        if not self.sizes[client]:
            return math.nan
        at = self.held[client].to(self.problem.device)
        _, (tally, *_) = Evaluator(self.problem, self.problem.x[at], self.problem.y[at], self.task).samples(model)
        return self.task.metric.score(tally.sum(1).cpu())

    def scores(self, model: Model) -> list[float]:
        _, (tally, *_) = self.evaluator.samples(model)
        parts = zip(self.sizes, tally.cpu().split(self.sizes, 1), strict=True)
        return [self.task.metric.score(part.sum(1)) if size else math.nan for size, part in parts]


def held_out(parts: Sequence[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Every client's samples to train on and to test on, both sorted. A client with one sample trains on it; any other has at least
    one of each."""
    train, test = [], []
    for client, part in enumerate(parts):
        rows = np.asarray(part)
        count = min(max(1, round(share * len(rows))), len(rows) - 1)
        order = seeding.numpy_generator(seed, "client_test", client).permutation(len(rows))
        test.append(np.sort(rows[order[:count]]))
        train.append(np.sort(rows[order[count:]]))
    return train, test


def spread(scores: Iterable[float], measure: Measure) -> dict[str, float]:
    """Over the clients that can be scored: the mean, the mean of the worst tenth, and the standard deviation."""
    known = sorted((score for score in scores if math.isfinite(score)), key=measure.better)
    if not known:
        return {}
    worst = known[: math.ceil(WORST * len(known))]
    return {
        "client_mean": float(np.mean(known)),
        "client_worst": float(np.mean(worst)),
        "client_spread": float(np.std(known)),
    }
