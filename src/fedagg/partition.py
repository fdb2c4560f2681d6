"""Partitions: which client holds which samples of a training set, evenly or skewed.

Each split returns one array of indices per client, in ascending order. No sample is given twice and no client is left empty. The
same seed gives the same split, whatever else draws random numbers.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedagg.errors import DataError, SettingError, unknown
from fedagg.registry import Registry

Indices = list[npt.NDArray[np.int64]]
Labels = torch.Tensor | npt.NDArray[Any]

_IID, _SHARDS, _BY_CLIENT, _BY_CLASS, _QUANTITY, _FEATURE = 101, 102, 103, 104, 105, 106
_TRIES = 100
MANY = 10_000  # more clients than this draw in blocks: other numbers from the same seed, but 20 times as fast
BLOCK = 1 << 20  # numbers drawn at a time
BY_LABEL = ("shards", "dirichlet", "dirichlet-class")  # need one class label per sample
FOR_ALL = ("iid", "quantity", "feature", "user")  # work with any targets
_NAMES = ("iid", "shards", "dirichlet", "dirichlet-class", "quantity", "feature", "user")


# Registered splits: functions of labels, number of clients and seed that return an array of indices per client.
REGISTRY: Registry[Callable[[npt.NDArray[Any], int, int], Sequence[Any]]] = Registry("partition", "fedagg.partitions", taken=_NAMES)
register = REGISTRY.register


def names() -> list[str]:
    """The names of the splits that `partition` knows."""
    return [*_NAMES, *REGISTRY]


def partition(
    name: str,
    labels: Labels,
    clients: int,
    seed: int = 0,
    sigma: float = 0.5,
    per_client: int = 2,
    deviation: float = 1.0,
    column: int = 0,
    x: Labels | None = None,
) -> Indices:
    """The split of that name. `sigma` is for the Dirichlet splits, `per_client` for shards, `deviation` for quantity, `column` and
    the samples `x` for feature."""
    if name == "iid":
        return iid(labels, clients, seed)
    if name == "shards":
        return shards(labels, clients, per_client, seed)
    if name in ("dirichlet", "dirichlet-class"):
        return dirichlet(labels, clients, sigma, seed, by="class" if name == "dirichlet-class" else "client")
    if name == "quantity":
        return quantity(labels, clients, deviation, seed)
    if name == "feature":
        if x is None:
            raise SettingError("partition", name, "sorts samples by a feature, but there are only labels; choose another")
        return feature(x, clients, column, seed)
    if name == "user":
        raise SettingError("partition", name, "deals samples by their users, not by labels; see by_user")
    return _own(name, _counted(labels, clients), clients, seed)


def by_user(users: npt.ArrayLike, clients: int | None = None) -> Indices:
    """One client per user, in the order of their ids. If fewer clients are asked for, the users with the most samples."""
    ids, owners, sizes = np.unique(np.asarray(users), return_inverse=True, return_counts=True)
    parts = _gather(np.arange(len(owners)), owners, len(ids))
    if clients is None or clients == len(ids):
        return parts
    if clients > len(ids):
        raise SettingError("clients", clients, f"the data have {len(ids)} users, and each is one client; give at most that many")
    return [parts[user] for user in np.sort(np.argsort(-sizes, kind="stable")[:clients])]


def _own(name: str, labels: npt.NDArray[Any], clients: int, seed: int) -> Indices:
    """A registered split, checked for what every split guarantees."""
    parts = [np.sort(np.asarray(part)) for part in REGISTRY.find(name)(labels, clients, seed)]
    wrong = ""
    if len(parts) != clients:
        wrong = f"{len(parts)} clients instead of {clients}"
    for client, part in enumerate(parts):
        if part.ndim != 1 or not len(part) or not np.issubdtype(part.dtype, np.integer) or part[0] < 0 or part[-1] >= len(labels):
            wrong = wrong or f"client {client} something other than indices from 0 to {len(labels) - 1}, at least one"
    if not wrong and len(np.unique(every := np.concatenate(parts))) < len(every):
        wrong = "some samples twice"
    if wrong:
        raise SettingError("partition", name, f"its function gave {wrong}")
    return [part.astype(np.int64) for part in parts]


def iid(labels: Labels, clients: int, seed: int = 0) -> Indices:
    """A random split of all samples, as even as possible."""
    labels = _counted(labels, clients)
    order = _rng(_IID, seed).permutation(len(labels))
    return _gather(order, np.repeat(np.arange(clients), _even(len(labels), clients)), clients)


def shards(labels: Labels, clients: int, per_client: int = 2, seed: int = 0) -> Indices:
    """McMahan et al. 2017: sort by label, cut into equal shards, give every client `per_client` of them."""
    labels = _checked(labels, clients)
    _whole("shards", per_client)  # errors name the setting, which is `shards` in files and options
    count = clients * per_client
    if count > len(labels):
        fix = f"{clients} clients need {count} shards of {len(labels)} samples; lower shards or clients"
        raise SettingError("shards", per_client, fix)
    owners = _rng(_SHARDS, seed).permutation(count) // per_client
    return _gather(np.argsort(labels, kind="stable"), np.repeat(owners, _even(len(labels), count)), clients)


def dirichlet(labels: Labels, clients: int, sigma: float, seed: int = 0, by: str = "client") -> Indices:
    """Label skew from a Dirichlet distribution: the smaller `sigma`, the fewer classes a client sees.

    by="client" (Hsu et al. 2019): clients of equal size, each with its own mix of classes drawn from Dir(sigma * C * p), where p is
    the mix of all C classes. With balanced classes this is concentration sigma per class. Samples that do not divide evenly are
    left out. Clients draw in the order of their numbers, so the last ones take what is left; more than 10,000 clients draw in
    blocks, by the same law. by="class" (NIID-Bench): each class is dealt to the clients in shares drawn from Dir(sigma), and sizes
    differ. An infinite sigma is the IID split.
    """
    labels = _checked(labels, clients)
    if by not in ("client", "class"):
        raise unknown("by", by, ("client", "class"))
    if isinstance(sigma, bool) or not isinstance(sigma, int | float | np.floating) or not sigma > 0:
        raise SettingError("sigma", sigma, "must be a number above 0, or inf for the IID split")
    if math.isinf(sigma):
        return iid(labels, clients, seed)
    # Beyond these the draw is a single class, or the prior itself, to the last bit; further out sums overflow.
    concentration = min(max(float(sigma), 1e-100), 1e15)
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    rng = _rng(_BY_CLIENT if by == "client" else _BY_CLASS, seed)
    by_client = _counts_by_client if clients <= MANY else _counts_in_blocks
    count = by_client if by == "client" else _counts_by_class
    counts = count(sizes, clients, concentration, rng)
    if counts is None:
        why = f"each of {_TRIES} draws left one of the {clients} clients without samples"
        raise SettingError("sigma", sigma, f"{why}; raise sigma, lower clients, or split by client")
    return _deal(classes, sizes, counts, rng)


def quantity(samples: Labels, clients: int, deviation: float = 1.0, seed: int = 0) -> Indices:
    """A random split with sizes from a log-normal distribution; `deviation` is that of their logarithm. Every client has at least
    one sample, and all samples are dealt."""
    count = len(_counted(samples, clients))
    if isinstance(deviation, bool) or not isinstance(deviation, int | float | np.floating) or not 0 <= deviation < math.inf:
        raise SettingError("deviation", deviation, "must be a number from 0 up")
    rng = _rng(_QUANTITY, seed)
    logs = deviation * rng.standard_normal(clients)
    shares = np.exp(logs - logs.max())
    exact = (count - clients) * shares / shares.sum()  # beyond the one sample that every client has
    sizes = np.floor(exact).astype(np.int64)
    rest = np.argsort(sizes - exact, kind="stable")[
        : count - clients - int(sizes.sum())
    ]  # what rounding left over, by largest remainder
    sizes[rest] += 1
    return _gather(rng.permutation(count), np.repeat(np.arange(clients), sizes + 1), clients)


def feature(x: Labels, clients: int, column: int = 0, seed: int = 0) -> Indices:
    """Samples sorted by one feature (of the flattened sample) and cut into even parts, which clients get in random order."""
    rows = _counted(x, clients)
    rows = rows.reshape(len(rows), -1)
    _whole("column", column, 0)
    if column >= rows.shape[1]:
        raise SettingError("column", column, f"samples have {rows.shape[1]} features, counted from 0")
    owners = _rng(_FEATURE, seed).permutation(clients)
    return _gather(np.argsort(rows[:, column], kind="stable"), np.repeat(owners, _even(len(rows), clients)), clients)


def from_file(path: str | os.PathLike[str]) -> npt.NDArray[np.int64]:
    """Labels from a .npy file, or from a .csv file with a column named label or with only one column."""
    path = Path(path)
    if path.suffix not in (".csv", ".npy"):
        raise DataError(f"{path}: labels are read from .csv or .npy; save them as one of these")
    try:
        labels = _from_csv(path) if path.suffix == ".csv" else _from_npy(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error
    if labels.size == 0:
        raise DataError(f"{path}: holds no labels; give one per sample")
    if labels.min() < 0:
        at = int(np.argmax(labels < 0))
        raise DataError(f"{path}: label {at} is {labels[at]}; labels must be from 0 up")
    return labels


def _counts_by_client(sizes: npt.NDArray[np.int64], clients: int, sigma: float, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """How many of each class every client draws, without replacement, from its own mix.

    If more is drawn of a class than is left, the excess is drawn again from the remaining classes. Each pass ends the draw or uses
    up a class, and the outcome is distributed as if samples had been drawn one at a time.
    """
    alpha = sigma * sizes * (len(sizes) / sizes.sum())
    left = sizes.copy()
    counts = np.zeros((clients, len(sizes)), dtype=np.int32)
    for row in counts:
        wanted = int(sizes.sum()) // clients
        mix = rng.dirichlet(alpha)
        while wanted:
            mix[left == 0] = 0
            if not (total := mix.sum()) > 0:
                # No weight remains in float64. A Dirichlet restricted to some classes is the Dirichlet of those.
                mix[left > 0] = rng.dirichlet(alpha[left > 0])
                total = mix.sum()
            drawn = np.minimum(rng.multinomial(wanted, mix / total), left)
            row += drawn.astype(np.int32)
            left -= drawn
            wanted -= int(drawn.sum())
    return counts


def _counts_in_blocks(sizes: npt.NDArray[np.int64], clients: int, sigma: float, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """The same law as `_counts_by_client`, for many clients at a time.

    Clients draw side by side. The first that wants more of a class than is left draws the excess from the other classes, and those
    after it draw again. Their first draws have no influence on which client was first.
    """
    alpha = sigma * sizes * (len(sizes) / sizes.sum())
    wanted, most, at = int(sizes.sum()) // clients, max(1, BLOCK // len(sizes)), 0
    left, some = sizes.copy(), most
    counts = np.empty((clients, len(sizes)), dtype=np.int32)
    while at < clients:
        shape = (min(some, clients - at), len(sizes))
        # Gamma(a) is Gamma(a + 1) U^(1/a). In logarithms no weight underflows, whichever classes are left.
        logs = np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha
        drawn = rng.multinomial(wanted, _mixes(logs, left))
        over = (np.cumsum(drawn, axis=0) > left).any(axis=1)
        whole = int(over.argmax()) if over.any() else len(drawn)
        counts[at : at + whole] = drawn[:whole]
        left -= drawn[:whole].sum(axis=0)
        at += whole
        if whole == len(drawn):
            some = min(2 * some, most)
            continue
        row = np.minimum(drawn[whole], left)
        left -= row
        while lacking := wanted - int(row.sum()):
            more = np.minimum(rng.multinomial(lacking, _mixes(logs[whole], left)), left)
            row += more
            left -= more
        counts[at] = row
        at, some = at + 1, max(1, some // 2)  # near the end classes run out one after another: waste fewer draws
    return counts


def _mixes(logs: npt.NDArray[np.float64], left: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Shares of the classes that are left, from the logarithms of their weights."""
    logs = np.where(left > 0, logs, -np.inf)
    weights = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _counts_by_class(
    sizes: npt.NDArray[np.int64], clients: int, sigma: float, rng: np.random.Generator
) -> npt.NDArray[np.int32] | None:
    """How many of each class every client is dealt; None if every attempt leaves some client empty."""
    counts = np.empty((clients, len(sizes)), dtype=np.int32)
    for _ in range(_TRIES):
        for column, size in enumerate(sizes):
            ends = np.floor(np.cumsum(rng.dirichlet(np.full(clients, sigma))) * size).astype(np.int64)
            ends = np.minimum(ends, size)
            ends[-1] = size
            counts[:, column] = np.diff(ends, prepend=0)
        if counts.any(axis=1).all():
            return counts
    return None


def _deal(
    classes: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int32],
    rng: np.random.Generator,
) -> Indices:
    """Give each client its count of each class, chosen at random."""
    order = rng.permutation(len(classes))
    few = classes.astype(np.uint16) if len(sizes) <= 1 << 16 else classes  # short integers are sorted by radix
    order = order[np.argsort(few[order], kind="stable")]
    clients = len(counts)
    dealt, owners = [], []
    for column, start in enumerate(np.cumsum(sizes) - sizes):
        owners.append(np.repeat(np.arange(clients), counts[:, column]))
        dealt.append(order[start : start + len(owners[-1])])
    return _gather(np.concatenate(dealt), np.concatenate(owners), clients)


def _gather(samples: npt.NDArray[np.int64], owners: npt.NDArray[np.int64], clients: int) -> Indices:
    """The samples of each owner, ascending. They are slices of one array, which is cheap even for a million clients."""
    both = owners * (count := int(samples.max(initial=0)) + 1) + samples  # one sort instead of two
    both.sort()
    samples = both % count
    ends = np.cumsum(np.bincount(owners, minlength=clients)).tolist()
    return [samples[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _even(total: int, parts: int) -> npt.NDArray[np.int64]:
    """Sizes that differ by at most one, the larger ones first, as np.array_split cuts."""
    return np.full(parts, total // parts, dtype=np.int64) + (np.arange(parts) < total % parts)


def _rng(purpose: int, seed: int) -> np.random.Generator:
    _whole("seed", seed, 0)
    return np.random.default_rng([purpose, int(seed)])


def _whole(setting: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise SettingError(setting, value, f"must be a whole number from {least} up")


def _checked(labels: Labels, clients: int) -> npt.NDArray[Any]:
    array = _array(labels)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SettingError("labels", f"{array.dtype} {array.shape}", "must be one whole number per sample")
    return _counted(array, clients)


def _array(values: Labels) -> npt.NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _counted(samples: Labels, clients: int) -> npt.NDArray[Any]:
    """The samples as an array, whatever they are, checked for their number."""
    array = _array(samples)
    if array.ndim < 1:
        raise SettingError("labels", f"{array.dtype} {array.shape}", "must be one per sample")
    _whole("clients", clients)
    if clients > len(array):
        raise SettingError("clients", clients, f"there are only {len(array)} samples; give at most that many clients")
    return array


def _from_csv(path: Path) -> npt.NDArray[np.int64]:
    labels: list[int] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = csv.reader(stream)
            column = None
            for row in rows:
                if not row:
                    continue
                if column is None:
                    column = _column(path, row)
                    if not _is_whole(row[column]):
                        continue
                if len(row) <= column or not _is_whole(row[column]):
                    found = row[column] if len(row) > column else "nothing"
                    raise DataError(f"{path}: line {rows.line_num} has {found[:40]!r}; labels must be whole numbers")
                labels.append(int(row[column]))
        return np.array(labels, dtype=np.int64)
    except (UnicodeDecodeError, csv.Error, OverflowError) as error:
        raise DataError(f"{path}: not a csv of labels ({' '.join(str(error).split())})") from error


def _column(path: Path, first: list[str]) -> int:
    header = [name.strip().lower() for name in first]
    if "label" in header:
        return header.index("label")
    if len(first) == 1:
        return 0
    raise DataError(f"{path}: {len(first)} columns and none named label; name one of them label in the first line")


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _from_npy(path: Path) -> npt.NDArray[np.int64]:
    try:
        # Mapped, not read: a header that declares more than the file holds then fails before any allocation.
        # It never unpickles either.
        stored = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy's reader raises many kinds of errors on a damaged header
        raise DataError(f"{path}: not a .npy of numbers ({' '.join(str(error).split())[:120]})") from error
    if stored.ndim != 1 or stored.dtype.kind not in "iu":
        raise DataError(f"{path}: holds {stored.dtype} {stored.shape}; labels must be one whole number per sample")
    return np.array(stored, dtype=np.int64)
