"""Convert users' arrays to checked tensors of a few types, or raise a one-line error."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedagg.errors import SettingError

Array = torch.Tensor | np.ndarray[Any, Any]


def kind_of(key: str, value: Array) -> str:
    """The kind of x. Training and test samples must agree, because otherwise only one of them might be scaled."""
    value = getattr(value, "source", value)  # the file, for samples that stay on disk
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise SettingError(
            key, type(value).__name__, "give a torch tensor or a numpy array; np.asarray makes one of lists and tables"
        )
    if np.ma.is_masked(value):
        raise SettingError(key, "masked array", "some of its values are masked; drop these samples, or give x.filled(...)")
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


def tensor_of(value: Array, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", dtype)
    wanted = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}[dtype]
    with np.errstate(over="ignore"):  # overflow becomes infinite and is refused as such
        return torch.from_numpy(np.require(value, wanted, ["C", "W"]))


def samples_of(key: str, value: Array) -> torch.Tensor:
    kind = kind_of(key, value)
    if value.ndim < 2 or 0 in value.shape:
        fix = "; give x.reshape(-1, 1) where a sample is one number" if value.ndim == 1 and len(value) else ""
        raise SettingError(key, tuple(value.shape), f"must have the shape (samples, ...), and no length may be 0{fix}")
    if kind == "integers":
        return whole_of(key, value)
    x = tensor_of(value, torch.float32)
    if kind == "uint8":
        return x.div_(255)  # the conversion has already made a copy
    low, high = torch.aminmax(x)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        at = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
        bad = x[at][~torch.isfinite(x[at])]
        raise SettingError(f"{key}[{at}]", float(bad[0]), "every number must be finite in float32; drop or correct it")
    return x


def whole_of(key: str, value: Array) -> torch.Tensor:
    """Integers as int64. Unsigned 64-bit integers may exceed int64, and would become negative."""
    made = tensor_of(value, torch.int64)
    if value.dtype in (torch.uint64, np.uint64) and bool((made < 0).any()):
        raise SettingError(key, str(value.dtype), "holds numbers of 2**63 and more; renumber the tokens, from 0 up")
    return made
