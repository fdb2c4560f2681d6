"""Datasets: your own arrays, or one of the named ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedagg import seeding
from fedagg.data import sources
from fedagg.data.sources import Where, fetch, verify, where
from fedagg.errors import SettingError
from fedagg.registry import Registry

__all__ = ["REGISTRY", "Dataset", "fetch", "load", "names", "register", "verify", "where"]

Array = torch.Tensor | np.ndarray[Any, Any]


MOST_CLASSES = 1_000_000  # labels beyond this are names or numbers of another kind


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Dataset:
    """Training and test samples, checked once here so that training never meets a wrong one.

    Floating x becomes float32, uint8 x (images) float32 in [0, 1], other integers (token ids) int64; y becomes int64.
    `classes` defaults to the largest label plus one. Inputs are never changed, and not copied where they need no
    conversion.
    """

    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    name: str
    classes: int
    scale: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)  # mean and deviation, once standardised
    _loaded: list[int] | None = field(default=None, init=False)  # the state of its tensors when `load` made it

    def __init__(
        self,
        x_train: Array,
        y_train: Array,
        x_test: Array,
        y_test: Array,
        name: str = "custom",
        classes: int | None = None,
    ) -> None:
        if (kinds := (_kind("x_train", x_train), _kind("x_test", x_test)))[0] != kinds[1]:
            raise SettingError("x_test", kinds[1], f"x_train holds {kinds[0]}; give both the same type")
        tensors = {
            "x_train": _samples("x_train", x_train),
            "y_train": _labels("y_train", y_train),
            "x_test": _samples("x_test", x_test),
            "y_test": _labels("y_test", y_test),
        }
        for part in ("train", "test"):
            x, y = tensors[f"x_{part}"], tensors[f"y_{part}"]
            if len(x) != len(y):
                raise SettingError(f"y_{part}", f"{len(y)} labels", f"x_{part} has {len(x)} samples; the two must agree")
        if (found := tensors["x_test"].shape[1:]) != (shape := tensors["x_train"].shape[1:]):
            raise SettingError("x_test", tuple(found), f"samples must have the shape of x_train's, {tuple(shape)}")
        if classes is None:
            classes = 1 + int(max(tensors["y_train"].max(), tensors["y_test"].max()))
            if classes > MOST_CLASSES:
                fix = f"would make {classes} classes; number labels anew (np.unique(y, return_inverse=True)), or give classes"
                raise SettingError("labels", classes - 1, fix)
        elif isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 1:
            raise SettingError("classes", classes, "must be a whole number from 1 up, or None to count the labels")
        for key in ("y_train", "y_test"):
            _check_range(key, tensors[key], int(classes))
        for key, value in {**tensors, "name": name, "classes": int(classes)}.items():
            object.__setattr__(self, key, value)

    @property
    def untouched(self) -> bool:
        """Is this the named set as `load` makes it? Not if it was normalised, cut, or written to since, or only has the name."""
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
        return f"Dataset({self.name!r}, train={len(self)}, test={len(self.x_test)}, shape={self.shape}, classes={self.classes})"

    def normalized(self) -> Dataset:
        """The same samples standardised with the training set's mean and deviation.

        Per channel (the first axis) for image-shaped samples, over everything for flat ones. The test set is
        standardised by the training set's numbers, so it tells nothing about itself. A constant channel becomes 0.
        """
        if not self.x_train.is_floating_point():
            raise SettingError("x_train", "integers", "token ids cannot be normalised; use them as they are")
        axes = [axis for axis in range(self.x_train.ndim) if axis != 1 or len(self.shape) < 3]
        std, mean = torch.std_mean(self.x_train, dim=axes, correction=0, keepdim=True)
        std = torch.where(std > 0, std, torch.ones_like(std))
        x_train, x_test = (torch.sub(x, mean).div_(std) for x in (self.x_train, self.x_test))
        made = Dataset(x_train, self.y_train, x_test, self.y_test, self.name, self.classes)
        object.__setattr__(made, "scale", (mean, std))
        return made

    def held_back(self, share: float, seed: int = 0) -> Dataset:
        """A share of the training samples, drawn at random, takes the place of the test set: choose settings on these, and report
        on the test set once they are chosen. Nothing is held back of a share of 0."""
        if share == 0:
            return self
        count = round(share * len(self))
        if not 0 < count < len(self):
            raise SettingError("validation", share, f"leaves {count} of {len(self)} samples to report on; both parts need some")
        order = torch.randperm(len(self), generator=seeding.torch_generator(seed, "validation"))
        held, rest = order[:count].sort().values, order[count:].sort().values
        x, y = self.x_train, self.y_train
        return Dataset(x[rest], y[rest], x[held], y[held], self.name, self.classes)


# Data sets of others, by functions that make them; those of the package are in `sources`.
REGISTRY: Registry[Callable[[], Dataset]] = Registry("dataset", "fedagg.datasets", taken=sources.names())
register = REGISTRY.register


def names() -> list[str]:
    """The datasets that `load` knows, the embedded one first."""
    return [*sources.names(), *REGISTRY]


def load(name: str, data_dir: Where = None, download: bool = True) -> Dataset:
    """A named dataset, with images as float32 in [0, 1]; fetched first where it is missing and `download` allows."""
    if name not in sources.SOURCES and REGISTRY.has(name):
        own = REGISTRY.find(name)()
        if not isinstance(own, Dataset):
            raise SettingError("dataset", name, f"its function returned a {type(own).__name__}; return a fedagg.Dataset")
        made = Dataset(own.x_train, own.y_train, own.x_test, own.y_test, name, own.classes)
    else:
        train, test = sources.read(name, data_dir, download)
        made = Dataset(*train, *test, name=name, classes=sources.SOURCES[name].classes)
    object.__setattr__(made, "_loaded", made._versions())
    return made


def _kind(key: str, value: Array) -> str:
    """How x is to be understood; training and test samples must agree, or one would be scaled and the other not."""
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise SettingError(
            key, type(value).__name__, "give a torch tensor or a numpy array; np.asarray makes one of lists and tables"
        )
    if np.ma.is_masked(value):
        raise SettingError(key, "masked array", "some of its numbers are masked; drop these samples, or give x.filled(...)")
    if isinstance(value, torch.Tensor) and (value.is_meta or value.layout != torch.strided):
        form = "meta" if value.is_meta else str(value.layout)[6:]
        raise SettingError(key, f"{form} tensor", "give a tensor with all its numbers; x.to_dense() makes one of a sparse one")
    if value.dtype in (torch.uint8, np.uint8):
        return "uint8"
    if isinstance(value, torch.Tensor):
        letter = "f" if value.dtype.is_floating_point else "c" if value.dtype.is_complex else "i"
        letter = "b" if value.dtype == torch.bool else letter
    else:
        letter = value.dtype.kind
    if letter not in "biuf":
        fix = "; x.astype('float32') makes them of text or objects that hold some" if letter in "OSU" else ""
        raise SettingError(key, str(value.dtype), f"give real numbers{fix}")
    return "integers" if letter in "iu" else "floating"


def _tensor(value: Array, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", dtype)
    wanted = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}[dtype]
    with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused as such
        return torch.from_numpy(np.require(value, wanted, ["C", "W"]))


def _samples(key: str, value: Array) -> torch.Tensor:
    kind = _kind(key, value)
    if value.ndim < 2 or 0 in value.shape:
        fix = "; give x.reshape(-1, 1) where a sample is one number" if value.ndim == 1 and len(value) else ""
        raise SettingError(key, tuple(value.shape), f"must have the shape (samples, ...) with none of them 0{fix}")
    if kind == "integers":
        return _whole(key, value)
    x = _tensor(value, torch.float32)
    if kind == "uint8":
        return x.div_(255)  # the conversion has already made a copy
    low, high = torch.aminmax(x)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        at = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
        bad = x[at][~torch.isfinite(x[at])]
        raise SettingError(f"{key}[{at}]", float(bad[0]), "every number must be finite in float32; drop or mend it")
    return x


def _labels(key: str, value: Array) -> torch.Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        words = "labels are numbers; number names with np.unique(y, return_inverse=True), training and test together"
        raise SettingError(key, str(value.dtype), words)
    kind = _kind(key, value)
    if value.ndim != 1 or len(value) == 0:
        fix = "; take y.argmax(1) of rows with a 1 for the class, y.ravel() of a column" if value.ndim == 2 else ""
        raise SettingError(key, tuple(value.shape), f"must be one label per sample, with at least one sample{fix}")
    if kind == "floating":
        whole = _tensor(value, torch.float64)
        wrong = ((whole != whole.trunc()) | (whole.abs() > 2**53)).nonzero()  # NaN differs from itself
        if len(wrong):
            at = int(wrong[0])
            raise SettingError(f"{key}[{at}]", float(whole[at]), "labels must be whole numbers from 0 up: classes, not quantities")
    return _whole(key, value)


def _whole(key: str, value: Array) -> torch.Tensor:
    """Whole numbers; those of 64 bits without a sign may be beyond what int64 holds, and would come out below zero."""
    made = _tensor(value, torch.int64)
    if value.dtype in (torch.uint64, np.uint64) and bool((made < 0).any()):
        raise SettingError(key, str(value.dtype), "holds numbers of 2**63 and more; number tokens anew, from 0 up")
    return made


def _check_range(key: str, y: torch.Tensor, classes: int) -> None:
    wrong = ((y < 0) | (y >= classes)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        fix = f"labels must be from 0 to {classes - 1}" if y[at] >= 0 else "labels must be from 0 up"
        raise SettingError(f"{key}[{at}]", int(y[at]), fix)
