"""Tasks: the loss of a model, and the figures that it is judged by.

A metric is a function of sums. Every sample gives a few numbers, which are added over the samples in question (the test set, one
client's, those of many nodes), and the score is a function of these sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fedagg.errors import SettingError, unknown
from fedagg.measure import Measure
from fedagg.work import Loss, cross_entropy

PADDING = -100  # the label of a token that does not count
LEAST_VARIANCE = 1e-12  # of a target, relative to its square: less is rounding
ROUNDING = 1e-9  # relative error of sums over many samples


def always_possible(sums: Tensor, samples: int) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Metric(Measure):
    """A figure and how it is computed. `tally` gives the numbers of every sample, (B, k), from output and target; `score` is a
    function of their sums, (k,). `possible` checks whether this many samples can have these (finite) sums, because reports from
    nodes of a federation are not trusted."""

    tally: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor], float]
    possible: Callable[[Tensor, int], bool] = always_possible


@dataclass(frozen=True)
class Task:
    """A kind of target. `metric` is the figure that runs are judged by; `others` are recorded too."""

    name: str
    loss: Loss
    metric: Metric
    others: tuple[Metric, ...] = ()

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (self.metric, *self.others)

    def judged_by(self, metric: str | Metric | Callable[[Tensor, Tensor], Tensor] | None) -> Task:
        """The same task with another metric: one of its own by name, a `Metric`, or a function of output and target that gives a
        score per sample, of which the mean is reported."""
        if metric is None:
            return self
        if isinstance(metric, str):
            known = {each.key: each for each in self.metrics}
            if metric not in known:
                raise unknown("metric", metric, known)
            chosen = known[metric]
        elif callable(metric) or isinstance(metric, Metric):
            chosen = metric if isinstance(metric, Metric) else averaged(metric)
        else:
            raise SettingError("metric", metric, "give a function of output and target, a fedagg.tasks.Metric, or a name")
        if not chosen.key.isidentifier() or chosen.key in TAKEN:
            raise SettingError("metric", chosen.key, "cannot be the name of a metric; choose another")
        return replace(self, metric=chosen, others=tuple(each for each in self.metrics if each.key != chosen.key))


# Other columns of the record: names that no metric may have.
TAKEN = {
    *("round", "loss", "train_loss", "rate_mean", "rate_min", "rate_max", "drift", "drift_max", "passes", "participants"),
    *("left_out", "causes", "stragglers", "samples", "bytes_up", "bytes_down", "unchanged", "seconds", "client_mean"),
    *("client_worst", "client_spread"),
    *("tested", "bytes_tests", "epsilon", "epsilon_replaced"),  # in a real federation
}


def averaged(function: Callable[[Tensor, Tensor], Tensor]) -> Metric:
    """A metric that is the mean of a function of output and target, which gives one score per sample, (B,)."""
    name = getattr(function, "__name__", type(function).__name__)
    key = name if name.isidentifier() else "score"  # a lambda's name is not

    def tally(output: Tensor, y: Tensor) -> Tensor:
        scores = function(output, y)
        if not isinstance(scores, Tensor) or scores.shape != (len(y),):
            form = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise SettingError("metric", name, f"must give one number per sample, but gave {form} for {len(y)}")
        return with_count(scores)

    return Metric(key, key.replace("_", " "), percent=False, tally=tally, score=mean, possible=possible_mean)


def with_count(values: Tensor) -> Tensor:
    """Values (B,) with a one beside each, (B, 2), so that their sums give a mean."""
    values = values.double()
    return torch.stack([values, torch.ones_like(values)], 1)


def mean(sums: Tensor) -> float:
    total, count = sums.tolist()
    return total / count if count else math.nan


def possible_mean(sums: Tensor, samples: int) -> bool:
    """Can this be a total and the number of these samples?"""
    return len(sums) == 2 and float(sums[1]) == samples


def are_counts(sums: Tensor) -> bool:
    return bool(((sums >= 0) & (sums == sums.round())).all())


def possible_hits(sums: Tensor, samples: int) -> bool:
    """Can this be a number of hits and of attempts?"""
    return len(sums) == 2 and are_counts(sums) and bool(sums[0] <= sums[1])


def as_rows(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both as one row of numbers per sample, (B, k)."""
    return output.reshape(output.shape[0], -1), y.reshape(y.shape[0], -1)


# Regression.


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The loss of every sample, (B,): the mean over its outputs."""
    output, target = as_rows(output, target)
    return (output - target).square().mean(1)


def residuals(output: Tensor, y: Tensor) -> Tensor:
    """For every output: squared error, target and its square; and a one, (B, 3k + 1)."""
    output, y = (part.double() for part in as_rows(output, y))
    return torch.cat([(output - y).square(), y, y.square(), torch.ones_like(y[:, :1])], 1)


def r_squared(sums: Tensor) -> float:
    """The mean of 1 - Σ(y - ŷ)² / Σ(y - ȳ)² over the outputs that vary; NaN if none does."""
    count = sums[-1]
    error, total, squares = sums[:-1].view(3, -1)
    spread = squares - total.square() / count
    varies = spread > LEAST_VARIANCE * squares
    return float((1 - error / spread)[varies].mean()) if bool(varies.any()) else math.nan


def possible_residuals(sums: Tensor, samples: int) -> bool:
    if len(sums) < 4 or len(sums) % 3 != 1 or float(sums[-1]) != samples:
        return False
    error, total, squares = sums[:-1].view(3, -1)
    most = (samples * squares * (1 + ROUNDING)).clamp_min(0)  # Cauchy and Schwarz
    return bool(((error >= 0) & (squares >= 0) & (total.square() <= most)).all())


def absolute_error(output: Tensor, y: Tensor) -> Tensor:
    output, y = as_rows(output, y)
    return with_count((output.double() - y).abs().mean(1))


# Several labels per sample.


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The loss of every sample, (B,): the mean over its labels. Outputs are logits."""
    return functional.binary_cross_entropy_with_logits(output, target, reduction="none").mean(1)


def found_labels(output: Tensor, y: Tensor) -> Tensor:
    """Number of labels rightly found, wrongly found and missed, (B, 3); a label is found if its output is above 0."""
    found, present = output > 0, y > 0.5
    return torch.stack([(found & present).sum(1), (found & ~present).sum(1), (~found & present).sum(1)], 1).double()


def f1(sums: Tensor) -> float:
    """The F1 score over all labels together; NaN if there are none and none were found."""
    right, wrong, missed = sums.tolist()
    return 2 * right / (2 * right + wrong + missed) if right + wrong + missed else math.nan


# A label for every token.


def token_losses(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of every token, 0 for padding, and which tokens count; both (B, tokens). Outputs are (B, ..., classes)."""
    logp = output.log_softmax(-1)
    picked = logp.gather(-1, y.clamp_min(0)[..., None]).squeeze(-1)
    counts = y != PADDING
    return torch.where(counts, -picked, 0.0).flatten(1), counts.flatten(1)


def token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The loss of every sample, (B,): the mean over its tokens, without padding."""
    losses, counts = token_losses(output, target)
    return losses.sum(1) / counts.sum(1).clamp_min(1)


def token_hits(output: Tensor, y: Tensor) -> Tensor:
    counts = (y != PADDING).flatten(1)
    hits = (output.argmax(-1) == y).flatten(1) & counts
    return torch.stack([hits.sum(1), counts.sum(1)], 1).double()


def token_surprise(output: Tensor, y: Tensor) -> Tensor:
    losses, counts = token_losses(output, y)
    return torch.stack([losses.double().sum(1), counts.sum(1).double()], 1)


def perplexity(sums: Tensor) -> float:
    return float(torch.exp(sums[0] / sums[1])) if sums[1] else math.nan  # infinite on overflow


def hits(output: Tensor, y: Tensor) -> Tensor:
    return with_count(output.argmax(-1) == y)


ACCURACY = Metric(
    "accuracy", "accuracy", tally=hits, score=mean, possible=lambda sums, n: possible_hits(sums, n) and possible_mean(sums, n)
)
R2 = Metric("r2", "R²", percent=False, tally=residuals, score=r_squared, possible=possible_residuals)
MAE = Metric(
    *("mae", "MAE"),
    percent=False,
    higher=False,
    tally=absolute_error,
    score=mean,
    possible=lambda sums, n: possible_mean(sums, n) and bool(sums[0] >= 0),
)
F1 = Metric("f1", "F1", tally=found_labels, score=f1, possible=lambda sums, _: len(sums) == 3 and are_counts(sums))
TOKEN_ACCURACY = Metric("accuracy", "token accuracy", tally=token_hits, score=mean, possible=possible_hits)
PERPLEXITY = Metric(
    *("perplexity", "perplexity"),
    percent=False,
    higher=False,
    tally=token_surprise,
    score=perplexity,
    possible=lambda sums, _: len(sums) == 2 and bool(sums[0] >= 0) and are_counts(sums[1]),
)

CLASSIFICATION = Task("classification", cross_entropy, ACCURACY)
REGRESSION = Task("regression", squared_error, R2, (MAE,))
MULTILABEL = Task("multilabel", binary_cross_entropy, F1)
TOKENS = Task("tokens", token_cross_entropy, TOKEN_ACCURACY, (PERPLEXITY,))
TASKS = {task.name: task for task in (CLASSIFICATION, REGRESSION, MULTILABEL, TOKENS)}


def find(name: str) -> Task:
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]
