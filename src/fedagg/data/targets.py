"""Targets: class labels, real numbers, several labels per sample, or a label per token. The arrays tell which, if this is clear."""

from __future__ import annotations

import math

import numpy as np
import torch

from fedagg.data.arrays import Array, kind_of, tensor_of, whole_of
from fedagg.errors import SettingError
from fedagg.tasks import PADDING, TASKS, find

MOST_CLASSES = 1_000_000  # larger labels are ids or other numbers

Targets = dict[str, torch.Tensor]  # y_train and y_test


def understood(task: str | None, x: Array, y_train: Array, y_test: Array) -> str:
    """The task: as given, or as the targets suggest. Targets that could mean two things are an error."""
    if task is not None:
        return find(task).name
    both = {"y_train": y_train, "y_test": y_test}
    kinds = [kind_of_target(key, y) for key, y in both.items()]
    if y_train.ndim < 2:
        return (
            "regression"
            if "floating" in kinds and kinds == [kinds[0]] * 2 and any(map(fractional, both.values()))
            else "classification"
        )
    whole = "floating" not in kinds
    if whole and kind_of("x_train", x) == "integers" and x.shape == y_train.shape:
        return "tokens"
    if any(map(fractional, both.values())):
        return "regression"
    binary = all(bool(((y == 0) | (y == 1)).all()) for y in both.values())
    if y_train.ndim == 2 and y_train.shape[1] > 1 and binary and not bool((y_train.sum(1) == 1).all()):
        return "multilabel"
    if whole and not binary and y_train.shape[1] > 1:
        return "tokens"
    more = f"; or say what they are with task={', '.join(repr(name) for name in TASKS if name != 'classification')}"
    raise not_one_label("y_train", y_train, more)


def kind_of_target(key: str, y: Array) -> str:
    if isinstance(y, np.ndarray) and y.dtype.kind in "OSU":
        words = "labels are numbers; number names with np.unique(y, return_inverse=True), training and test together"
        raise SettingError(key, str(y.dtype), words)
    kind = kind_of(key, y)
    return "integers" if kind == "uint8" or y.dtype in (torch.bool, np.bool_) else kind


def fractional(y: Array) -> bool:
    """Is there a number with a fraction?"""
    numbers = tensor_of(y, torch.float64)
    return bool((torch.isfinite(numbers) & (numbers != numbers.trunc())).any())


def not_one_label(key: str, y: Array, more: str = "") -> SettingError:
    fix = f"; take y.argmax(1) of rows with a 1 for the class, y.ravel() of a column{more}" if y.ndim == 2 else more
    return SettingError(key, tuple(y.shape), f"must be one label per sample, with at least one sample{fix}")


def read(task: str, y_train: Array, y_test: Array) -> Targets:
    """The targets in the form that the task's loss takes."""
    made = {}
    for key, y in (("y_train", y_train), ("y_test", y_test)):
        kind_of_target(key, y)
        made[key] = {"classification": labels, "regression": numbers, "multilabel": marks, "tokens": tokens}[task](key, y)
    if (found := tuple(made["y_test"].shape[1:])) != (wanted := tuple(made["y_train"].shape[1:])):
        raise SettingError("y_test", found, f"targets must have the shape of y_train's, {wanted}")
    return made


def outputs(task: str, targets: Targets, x: torch.Tensor, classes: int | None) -> int:
    """How many outputs a model needs: classes, quantities, labels, or tokens of the vocabulary; `classes` is the given number."""
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 1):
        raise SettingError("classes", classes, "must be a whole number from 1 up, or None to count the labels")
    if task in ("regression", "multilabel"):
        count = math.prod(targets["y_train"].shape[1:])
        if classes not in (None, count):
            raise SettingError("classes", classes, f"every sample has {count} targets; leave it out")
        return count
    if classes is None:
        highest = [int(y.max()) for y in targets.values()]
        if task == "tokens":  # when text is continued, tokens that only appear as input belong to the vocabulary too
            alike = not x.is_floating_point() and x.shape == targets["y_train"].shape
            highest += [0, int(x.max()) if alike else 0]
        classes = 1 + max(highest)
        if classes > MOST_CLASSES:
            fix = f"would make {classes} classes; renumber the labels (np.unique(y, return_inverse=True)), or give classes"
            raise SettingError("labels", classes - 1, fix)
    for key, y in targets.items():
        check_range(key, y, int(classes), task)
    return int(classes)


def labels(key: str, value: Array) -> torch.Tensor:
    if value.ndim != 1 or len(value) == 0:
        raise not_one_label(key, value)
    return whole_numbers(key, value, "labels must be whole numbers from 0 up: classes, not quantities (task='regression')")


def whole_numbers(key: str, value: Array, fix: str) -> torch.Tensor:
    if kind_of(key, value) == "floating":
        whole = tensor_of(value, torch.float64)
        wrong = ((whole != whole.trunc()) | (whole.abs() > 2**53)).nonzero()  # NaN differs from itself
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise SettingError(f"{key}[{', '.join(map(str, at))}]", float(whole[at]), fix)
    return whole_of(key, value)


def numbers(key: str, value: Array) -> torch.Tensor:
    if value.ndim < 1 or 0 in value.shape:
        raise SettingError(key, tuple(value.shape), "must be a number, or several, for every sample, with at least one sample")
    y = tensor_of(value, torch.float32)
    if len(wrong := (~torch.isfinite(y)).nonzero()):
        at = tuple(wrong[0].tolist())
        raise SettingError(f"{key}[{at[0]}]", float(y[at]), "every target must be finite in float32; drop or correct it")
    return y


def marks(key: str, value: Array) -> torch.Tensor:
    if value.ndim != 2 or 0 in value.shape:
        raise SettingError(key, tuple(value.shape), "must be a row of 0 and 1 for every sample, one for each label")
    y = tensor_of(value, torch.float32)
    if len(wrong := ((y != 0) & (y != 1)).nonzero()):
        at = tuple(wrong[0].tolist())
        raise SettingError(f"{key}[{at[0]}, {at[1]}]", float(y[at]), "labels are 1 where a sample has them, else 0")
    return y


def tokens(key: str, value: Array) -> torch.Tensor:
    if value.ndim < 2 or 0 in value.shape:
        raise SettingError(key, tuple(value.shape), "must be a label for every token, (samples, tokens)")
    return whole_numbers(key, value, "tokens must be whole numbers from 0 up")


def check_range(key: str, y: torch.Tensor, classes: int, task: str) -> None:
    wrong = (y < 0) | (y >= classes)
    if task == "tokens":
        wrong &= y != PADDING
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        fix = f"labels must be from 0 to {classes - 1}" if y[at] >= 0 else "labels must be from 0 up"
        fix += f", or {PADDING} for padding" if task == "tokens" else ""
        raise SettingError(f"{key}[{', '.join(map(str, at))}]", int(y[at]), fix)
