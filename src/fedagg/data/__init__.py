"""Datasets: your own arrays, or one of the named sets."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedagg import seeding
from fedagg.data import sources, targets
from fedagg.data.arrays import Array, kind_of, samples_of
from fedagg.data.mapped import on_disk
from fedagg.data.sources import Where, fetch, verify, where
from fedagg.errors import SettingError
from fedagg.registry import Registry
from fedagg.tasks import LEAST_VARIANCE

__all__ = ["REGISTRY", "Dataset", "fetch", "is_path", "load", "names", "register", "verify", "where"]

FILES = (".csv", ".npy", ".npz", ".parquet")
AT_ONCE = 10_000  # samples converted to float64 at a time


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Dataset:
    """Training and test samples, checked here once, so that training never meets a bad one.

    Floating x becomes float32, uint8 x (images) float32 in [0, 1], other integers (token ids) int64. The form of y depends on the
    task: one label per sample, (N,), is classification; numbers with fractions, (N,) or (N, k), are regression; a matrix of 0 and
    1, (N, k), is multilabel; a label per token, (N, T), is tokens, with -100 for padding. `task` says which if y is not clear.
    `classes` is the number of outputs that this needs: classes (by default the largest label plus one), quantities, labels, or
    tokens of the vocabulary. Inputs are never changed, and only copied if they need conversion. `users` gives the user of each
    training sample, for the partition `user`; `labels` are the names of the classes. `Dataset.of` makes a Dataset from tables,
    files and other libraries' data sets.
    """

    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    name: str
    classes: int
    task: str
    users: np.ndarray[Any, Any] | None
    labels: tuple[str, ...] | None
    scale: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)  # mean and deviation, once standardised
    _loaded: list[int] | None = field(default=None, init=False)  # the versions of its tensors when `load` made it

    def __init__(
        self,
        x_train: Array,
        y_train: Array,
        x_test: Array,
        y_test: Array,
        name: str = "custom",
        classes: int | None = None,
        task: str | None = None,
        users: Any = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        if (kinds := (kind_of("x_train", x_train), kind_of("x_test", x_test)))[0] != kinds[1]:
            raise SettingError("x_test", kinds[1], f"x_train holds {kinds[0]}; give both the same type")
        task = targets.understood(task, x_train, y_train, y_test)
        stays: Any = on_disk(x_train)
        x = {"x_train": stays or samples_of("x_train", x_train), "x_test": samples_of("x_test", x_test)}
        y = targets.read(task, y_train, y_test)
        for part in ("train", "test"):
            check_lengths(part, len(x[f"x_{part}"]), len(y[f"y_{part}"]))
        if (found := x["x_test"].shape[1:]) != (shape := x["x_train"].shape[1:]):
            raise SettingError("x_test", tuple(found), f"samples must have the shape of x_train's, {tuple(shape)}")
        count = targets.outputs(task, y, x["x_train"], classes)
        people = {"users": None if users is None else owners(users, len(x["x_train"])), "labels": class_names(labels, count)}
        for key, value in {**x, **y, "name": name, "classes": count, "task": task, **people}.items():
            object.__setattr__(self, key, value)

    @classmethod
    def of(cls, source: Any, **options: Any) -> Dataset:
        """A Dataset from arrays, tensors, a pandas frame, a torch or Hugging Face data set, a file or a folder.

        Args:
            source: (x, y), (x, y, x_test, y_test) or (training, test) of anything below; a frame or another table; a torch
                Dataset or DataLoader; a Hugging Face Dataset or DatasetDict; the path of a CSV, Parquet, NPZ or NPY file, or of a
                folder of images by class; or a Dataset, which is returned unchanged.
            options: `target`, `features` and `user` name columns of a table; `test` is the share held out if there is no test
                part (0.2), or the test part itself; `name`, `classes` and `task` are those of the Dataset; samples in files
                that would take more than `memory` GiB (by default half of the machine's memory) stay on disk.
        """
        readers = importlib.import_module("fedagg.data.readers")  # imported here because it imports Dataset itself
        made: Dataset = readers.dataset(source, **options)
        return made

    def of_task(self, task: str | None) -> Dataset:
        """The same samples, with their targets read as those of another task."""
        if task in (None, self.task):
            return self
        return Dataset(self.x_train, self.y_train, self.x_test, self.y_test, self.name, task=task, users=self.users)

    def changed(self, **parts: Any) -> Dataset:
        """The same task with other samples."""
        kept = ("x_train", "y_train", "x_test", "y_test", "name", "classes", "task", "users", "labels")
        return Dataset(**({key: getattr(self, key) for key in kept} | parts))

    @property
    def untouched(self) -> bool:
        """Is this the named set as `load` made it? Not if it was normalised, cut or written to, or only has the same name."""
        return self._loaded is not None and self._loaded == self._versions()

    def _versions(self) -> list[int]:
        return [part._version for part in (self.x_train, self.y_train, self.x_test, self.y_test)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x_train.shape[1:])

    def __len__(self) -> int:
        """The number of training samples."""
        return len(self.x_train)

    def __repr__(self) -> str:
        kind = "" if self.task == "classification" else f", task={self.task!r}"
        what = "outputs" if self.task == "regression" else "labels" if self.task == "multilabel" else "classes"
        sizes = f"train={len(self)}, test={len(self.x_test)}, shape={self.shape}"
        people = "" if self.users is None else f", users={len(np.unique(self.users))}"
        return f"Dataset({self.name!r}, {sizes}{kind}, {what}={self.classes}{people})"

    def normalized(self) -> Dataset:
        """The same samples, standardised with the training set's mean and deviation.

        They are taken per channel (the first axis) for images, per feature for rows, and over everything for other shapes. The test
        set is standardised with the training set's numbers, so that nothing about it is used. Constant values become 0.
        """
        if not self.x_train.is_floating_point():
            raise SettingError("x_train", "integers", "token ids cannot be normalised; use them as they are")
        if on_disk(self.x_train) is not None:
            words = "the samples stay on the disk and are used as they are: standardise the file, or raise data_memory"
            raise SettingError("normalize", True, words)
        if len(self.shape) == 1:
            mean, std = standard(*pooled([self.x_train]))
        else:
            axes = [axis for axis in range(self.x_train.ndim) if axis != 1 or len(self.shape) < 3]
            std, mean = torch.std_mean(self.x_train, dim=axes, correction=0, keepdim=True)
            std = torch.where(std > 0, std, torch.ones_like(std))
        made = self.changed(**{key: torch.sub(getattr(self, key), mean).div_(std) for key in ("x_train", "x_test")})
        object.__setattr__(made, "scale", (mean, std))
        return made

    def held_back(self, share: float, seed: int = 0) -> Dataset:
        """A data set in which a random share of the training samples replaces the test set. Choose settings on it, then report
        results on the real test set. A share of 0 changes nothing."""
        if share == 0:
            return self
        count = round(share * len(self))
        if not 0 < count < len(self):
            raise SettingError("validation", share, f"leaves {count} of {len(self)} samples to report on; both parts need some")
        order = torch.randperm(len(self), generator=seeding.torch_generator(seed, "validation"))
        held, rest = order[:count].sort().values, order[count:].sort().values
        x, y = self.x_train, self.y_train
        stays = on_disk(x)
        kept, tested = (x[rest], x[held]) if stays is None else (stays.rows(rest), stays.raw(held.numpy()))
        users = None if self.users is None else self.users[rest.numpy()]
        return self.changed(x_train=kept, y_train=y[rest], x_test=tested, y_test=y[held], users=users)


Sums = tuple[torch.Tensor, torch.Tensor, int]  # sum of the samples, sum of their squares, and their number


def pooled(clients: Iterable[torch.Tensor]) -> Sums:
    """The sums for standardising, added over clients: none has to show a sample. In float64, because large sums lose digits."""
    total = squares = torch.zeros((), dtype=torch.float64)
    count = 0
    for x in clients:
        for part in x.split(AT_ONCE):
            wide = part.double()
            total, squares, count = total + wide.sum(0), squares + wide.square().sum(0), count + len(part)
    return total, squares, count


def standard(total: torch.Tensor, squares: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation from such sums, in float32; the deviation of constant values is 1."""
    mean = total / count
    variance = squares / count - mean.square()
    constant = variance <= LEAST_VARIANCE * mean.square()
    return mean.float(), torch.where(constant, 1.0, variance.clamp_min(0).sqrt()).float()


# Registered data sets, by the functions that make them; those of the package are in `sources`.
REGISTRY: Registry[Callable[[], Dataset]] = Registry("dataset", "fedagg.datasets", taken=sources.names())
register = REGISTRY.register


def names() -> list[str]:
    """The names of the datasets that `load` knows, the embedded one first."""
    return [*sources.names(), *REGISTRY]


def load(
    name: str,
    data_dir: Where = None,
    download: bool = True,
    target: str | None = None,
    user: str | None = None,
    task: str | None = None,
    memory: float | None = None,
) -> Dataset:
    """A named dataset, with images as float32 in [0, 1]; it is downloaded if it is missing and `download` allows it. Or a file or
    folder by its path, where `target` and `user` name columns, and arrays of more than `memory` GiB stay on disk."""
    if is_path(name):
        made = Dataset.of(name, target=target, user=user, task=task, name=name, memory=memory)
    elif name not in sources.SOURCES and REGISTRY.has(name):
        own = REGISTRY.find(name)()
        if not isinstance(own, Dataset):
            raise SettingError("dataset", name, f"its function returned a {type(own).__name__}; return a fedagg.Dataset")
        made = own.changed(name=name)
    else:
        found = sources.read(name, data_dir, download)
        parts = (found.x_train, found.y_train, found.x_test, found.y_test)
        made = Dataset(*parts, name, sources.SOURCES[name].classes, users=found.users, labels=found.labels)
    object.__setattr__(made, "_loaded", made._versions())
    return made


def names_users(name: str) -> bool:
    """Does this set of the package give the user of each training sample?"""
    return name in sources.SOURCES and sources.SOURCES[name].users


def is_path(name: str) -> bool:
    """Is this a file or a folder, and not the name of a set?"""
    return Path(name).suffix.lower() in FILES or "/" in name or os.sep in name


def check_lengths(part: str, samples: int, targets: int) -> None:
    """Check that the training or the test part has one target per sample."""
    if samples != targets:
        raise SettingError(f"y_{part}", f"{targets} labels", f"x_{part} has {samples} samples; the two must agree")


def owners(given: Any, samples: int) -> np.ndarray[Any, Any]:
    """The user of each sample, as integers or words."""
    users = np.asarray(given)
    if users.dtype == object:
        users = np.array([str(user) for user in users.reshape(-1)]).reshape(users.shape)
    if users.shape != (samples,) or users.dtype.kind not in "iuUSb":
        words = f"give a whole number or a word for each of the {samples} training samples"
        raise SettingError("users", f"{users.dtype} {users.shape}", words)
    return users


def class_names(given: Sequence[str] | None, classes: int) -> tuple[str, ...] | None:
    """The names of all classes."""
    if given is None:
        return None
    names = tuple(str(name) for name in given)
    if len(names) != classes:
        raise SettingError("labels", f"{len(names)} names", f"there are {classes} classes; name each of them")
    return names
