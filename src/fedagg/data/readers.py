"""Make a Dataset from data in common forms: arrays, tables, other libraries' data sets, files and folders.

Everything becomes a training and a test part of samples and targets; tables become dictionaries of columns first. Other libraries'
objects are recognised by their methods, so no library is imported, and no file is unpickled.
"""

from __future__ import annotations

import atexit
import csv
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedagg import seeding
from fedagg.data import Dataset, check_lengths, owners
from fedagg.data.mapped import READING, Mapped, memory_limit
from fedagg.data.mapped import TEST as KEPT
from fedagg.errors import FedaggError, SettingError, first_line, unknown

Array = np.ndarray[Any, Any]
TARGETS = ("label", "labels", "target", "y")  # default names for a column of labels
PICTURES = (".png", ".jpg", ".jpeg")
TEST = 0.2
FEW = 1000  # a table's integer targets with at most this many values are taken as class names
EXACT = 2**53  # up to here, floats hold every integer
FORMS = (
    "give (x, y), (x, y, x_test, y_test), a table, a torch or Hugging Face data set, a pair of those (training, test), the path of "
    "a file or folder, or a fedagg.Dataset"
)


@dataclass(frozen=True)
class Columns:
    """The roles of a table's columns. `user` may also be the ids themselves. `room` is the limit for samples in bytes. `test` says
    that they are those of the training part, which the test part must have too."""

    target: Sequence[str] | str | None = None
    features: Sequence[str] | str | None = None
    user: Any = None
    room: float = math.inf
    test: bool = False

    def split(self, table: Iterable[str]) -> tuple[list[str], list[str], str | None]:
        """The existing columns for targets, features and user."""
        names = list(table)
        target, user = target_of(names, self), self.user if isinstance(self.user, str) else None
        if user is not None and user not in names:
            raise unknown("user", user, names)
        features = self.features_in(names, without=(*target, user))
        if both := [name for name in features if name in target]:
            words = "is the target too, so a model would be told what it should predict; leave it out of the features"
            raise SettingError("features", both[0], words)
        return target, features, user

    def features_in(self, table: Iterable[str], without: Sequence[str | None] = ()) -> list[str]:
        """The chosen features, or all columns without those."""
        names = list(table)
        if self.features is None:
            return [name for name in names if name not in without]
        chosen = [self.features] if isinstance(self.features, str) else list(self.features)
        self.check("features", chosen, names)
        return chosen

    def check(self, setting: str, chosen: Sequence[str], names: Iterable[str]) -> None:
        """Refuse columns that do not exist."""
        if not (missing := [name for name in chosen if name not in names]):
            return
        if self.test:
            words = "the training part has these columns, but the test part does not; give both the same names, in any order"
            raise SettingError("test", ", ".join(missing), words)
        raise unknown(setting, missing[0], names)


@dataclass(frozen=True)
class Part:
    x: Any
    y: Any
    users: Any = None
    names: tuple[str, ...] | None = None  # names of the classes
    table: bool = False
    roles: Columns | None = None  # of the columns that were read, for tables and frames of samples

    def __len__(self) -> int:
        return len(self.y)

    def for_test(self, columns: Columns) -> Columns:
        """The columns to read from the test part: those of this training part, by name. Nobody needs the users of test samples."""
        roles = self.roles or Columns()
        target, features = roles.target or columns.target, roles.features or columns.features
        return replace(columns, target=target, features=features, user=None, test=self.roles is not None)

    def rows(self, chosen: Array) -> Part:
        users = None if self.users is None else np.asarray(self.users)[chosen]
        x = self.x.rows(chosen) if isinstance(self.x, Mapped) else self.x[chosen]
        return replace(self, x=x, y=self.y[chosen], users=users)


def dataset(
    source: Any,
    *,
    target: Sequence[str] | str | None = None,
    features: Sequence[str] | str | None = None,
    user: Any = None,
    test: Any = None,
    name: str | None = None,
    classes: int | None = None,
    task: str | None = None,
    memory: float | None = None,
) -> Dataset:
    """The Dataset; see `Dataset.of`."""
    if isinstance(source, Dataset):
        for option, value in (("target", target), ("features", features), ("user", user), ("test", test), ("classes", classes)):
            if value is not None:
                raise SettingError(option, value, "a Dataset is already complete; give this when you make the Dataset")
        return source if task is None else source.of_task(task)
    room = memory_limit(memory)
    columns = Columns(target, features, user, room)
    train, own_test = read(source, columns)
    refuse_uneven(train, "train")
    if train.users is not None:
        train = replace(train, users=owners(train.users, len(train)))
    if isinstance(train.x, np.memmap) and Mapped.size(train.x) > room:
        train = replace(train, x=Mapped(train.x, room))
    if test is not None and own_test is not None:
        raise SettingError("test", test, "the data already have a test part; leave it out")
    if test is None or isinstance(test, int | float):
        train, tested = (train, own_test) if own_test is not None else split_off_test(train, TEST if test is None else test)
    else:
        tested = read(test, train.for_test(columns))[0]
    refuse_uneven(tested, "test")
    train, tested = pad_to_width(train, tested), pad_to_width(tested, train)
    y_train, y_test, labels = number_labels(train, tested) if task in (None, "classification") else (train.y, tested.y, None)
    if name is None:
        name = Path(source).stem if isinstance(source, str | os.PathLike) else "custom"
    count = classes if classes is not None or labels is None else len(labels)
    named = labels if labels is not None and count == len(labels) else None
    return Dataset(train.x, y_train, tested.x, y_test, name, count, task, train.users, named)


def read(source: Any, columns: Columns | None = None) -> tuple[Part, Part | None]:
    """The training part, and the test part if the source has one."""
    columns = columns or Columns()
    if isinstance(source, str | os.PathLike):
        return from_path(Path(source), columns)
    if isinstance(source, Mapping) and (splits := [key for key in source if is_hugging(source[key])]):
        tested = next((key for key in ("test", "validation") if key in splits), None)
        if "train" not in splits:
            raise SettingError("data", ", ".join(map(str, splits)), "has no split named train; give one of its splits")
        train = read_part(source["train"], columns)
        return train, None if tested is None else read_part(source[tested], train.for_test(columns))
    if isinstance(source, tuple | list):
        if len(source) == 4:
            train = from_pair(source[0], source[1], columns)
            return train, from_pair(source[2], source[3], train.for_test(columns))
        apart = getattr(source[-1], "ndim", 2) == 1 or all(str(one).endswith(".npy") for one in source)
        if len(source) == 2 and is_whole(source[0]) and not apart:
            train = read(source[0], columns)[0]
            return train, read(source[1], train.for_test(columns))[0]
        if len(source) == 2:
            return from_pair(source[0], source[1], columns), None
        raise SettingError("data", f"{type(source).__name__} of {len(source)}", FORMS)
    return read_part(source, columns), None


def read_part(source: Any, columns: Columns) -> Part:
    """One part, from an object that holds samples and targets together."""
    if isinstance(source, TorchDataset | DataLoader):
        return Part(*stack_samples(source), columns.user)
    if (table := table_of(source)) is not None:
        part = from_table(table, columns)
        label = getattr(source, "features", None)
        names = getattr(label[target_of(table, columns)[0]], "names", None) if isinstance(label, Mapping) else None
        return part if names is None else replace(part, names=tuple(names))
    raise SettingError("data", type(source).__name__, FORMS)


def from_pair(x: Any, y: Any, columns: Columns) -> Part:
    """Samples and targets apart. The samples may be a frame, whose columns have names."""
    if not hasattr(x, "columns"):
        return Part(array(x), array(y), columns.user)
    table = table_of(x) or {}
    features = columns.features_in(table)
    return Part(features_of(table, features), array(y), columns.user, roles=Columns(features=features))


def is_whole(source: Any) -> bool:
    """Does this hold samples and targets together?"""
    return isinstance(source, TorchDataset | DataLoader | str | os.PathLike) or is_table(source)


def is_hugging(source: Any) -> bool:
    return hasattr(source, "column_names") and hasattr(source, "features")


def is_table(source: Any) -> bool:
    return is_hugging(source) or (hasattr(source, "columns") and hasattr(source, "__getitem__")) or isinstance(source, Mapping)


def array(value: Any) -> Any:
    """Samples or targets alone, as an array or a tensor."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value
    if isinstance(value, str | os.PathLike):
        return npy(Path(value), "data")
    if hasattr(value, "toarray"):  # a sparse matrix from SciPy
        return value.toarray()
    if hasattr(value, "columns"):
        table = table_of(value) or {}
        return features_of(table, list(table))
    return column_array("data", value)


# --- torch -----------------------------------------------------------------------------------------------------------


def stack_samples(samples: Any) -> tuple[torch.Tensor, Any]:
    """Every sample of a map-style dataset in one tensor, and every target: words stay words. Transforms run once, here."""
    source: Any = samples.dataset if isinstance(samples, DataLoader) else samples
    if isinstance(source, IterableDataset) or not hasattr(source, "__len__"):
        raise SettingError("data", type(source).__name__, "has no length: give a map-style dataset, or arrays")
    if type(source) is TensorDataset and len(source.tensors) == 2:
        return source.tensors[0], source.tensors[1]
    pairs = [source[i] for i in range(len(source))]
    if not pairs or not isinstance(pairs[0], tuple | list) or len(pairs[0]) != 2:
        raise SettingError("data", type(source).__name__, "must give (sample, target) for each index, and have some")
    x, y = zip(*pairs, strict=True)
    words = all(isinstance(target, str) for target in y)
    return stack(source, x, "samples"), np.array(y) if words else stack(source, y, "targets")


def stack(source: Any, rows: Sequence[Any], what: str) -> torch.Tensor:
    """Rows of numbers in one tensor."""
    try:
        tensors = [torch.as_tensor(pixels(row) if is_picture(row) else row) for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:
        words = f"its {what} are not all numbers: {first_line(error)}; return tensors, numbers or, as targets, words"
        raise SettingError("data", type(source).__name__, words) from None
    try:
        return torch.stack(tensors)
    except RuntimeError as error:
        words = f"its {what} differ in shape: {first_line(error)}; crop or pad them"
    raise SettingError("data", type(source).__name__, words)


# --- tables ----------------------------------------------------------------------------------------------------------


def table_of(source: Any) -> dict[str, Any] | None:
    """The columns of a table from pandas, polars, pyarrow or Hugging Face, or of a dictionary of arrays."""
    if is_hugging(source):
        if not hasattr(source, "__len__"):
            raise SettingError(
                "data", type(source).__name__, "is streamed and has no length; copy a part of it into a data set first"
            )
        whole = source.with_format("numpy")[:]
        pictures = [name for name in source.column_names if type(source.features[name]).__name__ == "Image"]
        return {name: channels_first(whole[name]) if name in pictures else whole[name] for name in source.column_names}
    if not is_table(source):
        return None
    names = source if isinstance(source, Mapping) else getattr(source, "column_names", source.columns)  # the former in pyarrow
    return {str(name): source[name] for name in names}


def target_of(table: Sequence[str] | Mapping[str, Any], columns: Columns) -> list[str]:
    chosen = [columns.target] if isinstance(columns.target, str) else list(columns.target or ())
    columns.check("target", chosen, table)
    if chosen := chosen or [name for name in TARGETS if name in table][:1]:
        return chosen
    raise SettingError("target", None, f"name the column that holds the labels: {', '.join(table)}")


def from_table(table: Mapping[str, Any], columns: Columns) -> Part:
    target, features, user = columns.split(table)
    users = columns.user if user is None else table[user]
    return part_with_target(features_of(table, features), table, Columns(target, features, users))


def part_with_target(x: Array, table: Mapping[str, Any], roles: Columns) -> Part:
    """The part with these samples. The targets are read from the table; the users are those of the roles."""
    found = {name: column_array(name, table[name]) for name in roles.target or ()}
    refuse_uneven_columns("target", found)
    for name, column in found.items():
        refuse_empty("target", name, column)
    y = next(iter(found.values())) if len(found) == 1 else np.column_stack(list(found.values()))
    users = None if roles.user is None else column_array("user", roles.user)
    if users is not None:
        refuse_empty("user", "the column", users)
    return Part(x, y, users, table=True, roles=roles)


def refuse_uneven_columns(setting: str, found: Mapping[str, Array]) -> None:
    """Refuse columns of different lengths."""
    rows = {name: len(column) if column.ndim else 1 for name, column in found.items()}
    first = next(iter(rows))
    if odd := [name for name in rows if rows[name] != rows[first]]:
        words = f"has {rows[odd[0]]} rows, but {first} has {rows[first]}; give columns of one length"
        raise SettingError(setting, odd[0], words)


def refuse_empty(setting: str, name: str, column: Array) -> None:
    """Refuse words that are empty: a file has no other way to say that a value is missing."""
    if column.dtype.kind in "US" and len(empty := np.flatnonzero(np.char.str_len(np.char.strip(column)) == 0)):
        raise SettingError(setting, name, f"row {int(empty[0]) + 1} is empty; fill it in, or drop the row")


def features_of(table: Mapping[str, Any], chosen: list[str]) -> Array:
    """Columns of numbers side by side as float32; or the single column that holds an array per row, unchanged."""
    if not chosen:
        raise SettingError("features", chosen, f"name at least one column of {', '.join(table)}")
    found = {name: column_array(name, table[name]) for name in chosen}
    refuse_uneven_columns("features", found)
    deep = [name for name, column in found.items() if column.ndim > 1]
    if deep and len(found) > 1:
        raise SettingError(
            "features", ", ".join(found), f"{deep[0]} holds an array in each row; name only this column, or only the others"
        )
    for name, column in found.items():
        if column.dtype.kind not in "biuf":
            kind = "text" if column.dtype.kind in "OUS" else str(column.dtype)
            others = [other for other in found if found[other].dtype.kind in "biuf"]
            words = f"holds {kind}; turn it into numbers (pandas.get_dummies), or leave it out: features={others}"
            raise SettingError("features", name, words)
    return found[deep[0]] if deep else np.column_stack([column.astype(np.float32) for column in found.values()])


def column_array(name: str, column: Any) -> Array:
    """A column as an array of numbers, of words, or with an array per row; rows of tokens are padded with 0 to equal length."""
    try:
        made = np.asarray(column)
    except ValueError:  # rows of different lengths
        made = np.empty(len(column), dtype=object)
        made[:] = list(column)
    if made.dtype != object:
        return made
    rows = list(made.reshape(-1)) if made.ndim == 1 else [None]
    if all(isinstance(row, str) for row in rows):
        return np.array(rows)
    if all(is_picture(row) for row in rows):
        rows = [pixels(row) for row in rows]
    if all(isinstance(row, list | tuple | np.ndarray) for row in rows):
        arrays = [np.asarray(row) for row in rows]
        if len({row.shape for row in arrays}) == 1:
            return np.stack(arrays)
        if all(row.ndim == 1 and (row.dtype.kind in "iu" or not row.size) for row in arrays):
            padded = np.zeros((len(arrays), max(len(row) for row in arrays)), dtype=np.int64)
            for at, row in enumerate(arrays):
                padded[at, : len(row)] = row
            return padded
        raise SettingError("data", name, f"its rows differ in shape: {arrays[0].shape} and others; crop or pad them")
    try:
        return made.astype(np.float64)  # numbers, with some value for those that are missing
    except (ValueError, TypeError):
        kinds = sorted({type(row).__name__ for row in rows})
    raise SettingError("data", name, f"holds {' and '.join(kinds[:3])}; give a column of one kind, without missing values")


# --- files -----------------------------------------------------------------------------------------------------------


def from_path(path: Path, columns: Columns) -> tuple[Part, Part | None]:
    if path.is_dir():
        return from_folder(path, columns)
    if not path.is_file():
        raise SettingError("dataset", str(path), "there is no such file or folder")
    kind = path.suffix.lower()
    if kind in (".csv", ".parquet"):
        return from_table(from_csv(path), columns) if kind == ".csv" else from_parquet(path, columns), None
    if kind == ".npz":
        return from_npz(path)
    if kind == ".npy":
        return from_npy(path, columns), None
    raise SettingError("dataset", str(path), "give a .csv, .parquet, .npz or .npy file, or a folder of images by class")


def from_folder(folder: Path, columns: Columns) -> tuple[Part, Part | None]:
    """Images by class, in train and test or all together; or tables or arrays with those names."""
    for ending in (".csv", ".parquet"):
        if (train := folder / f"train{ending}").is_file():
            part, tested = from_path(train, columns)[0], train.with_stem("test")
            return part, from_path(tested, part.for_test(columns))[0] if tested.is_file() else None
    if (folder / "x_train.npy").is_file():
        held = {name: npy(folder / f"{name}.npy", "dataset") for name in ARRAYS if (folder / f"{name}.npy").is_file()}
        return from_arrays(folder, held)
    return from_images(folder)


def from_images(folder: Path) -> tuple[Part, Part | None]:
    tops = [folder / "train", folder / "test"] if (folder / "train").is_dir() else [folder]
    found = [(path, top) for top in tops for path in sorted(top.glob("*/*")) if path.suffix.lower() in PICTURES]
    if not found:
        raise SettingError("dataset", str(folder), f"has no images: put {', '.join(PICTURES)} into a folder for each class")
    if find_spec("PIL") is None:
        raise SettingError("dataset", str(folder), "reading images needs Pillow, which is not installed: pip install Pillow")
    from PIL import Image

    held: dict[Path, list[Array]] = {top: [] for top in tops}
    for path, top in found:
        try:
            with Image.open(path) as image:
                held[top].append(np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB")))
        except Exception as error:  # Pillow's readers raise many kinds of errors for files that are not images
            raise SettingError("dataset", str(path), f"cannot be read as an image: {first_line(error)}") from None
    every = [picture for top in tops for picture in held[top]]
    if any(picture.ndim == 3 for picture in every):  # if some are in colour, all become so
        held = {top: [np.broadcast_to(p[..., None], (*p.shape, 3)) if p.ndim == 2 else p for p in held[top]] for top in tops}
    sizes = [picture.shape for top in tops for picture in held[top]]
    if odd := [(path, size) for (path, _), size in zip(found, sizes, strict=True) if size != sizes[0]]:
        words = f"is {odd[0][1][1]} x {odd[0][1][0]}, but the first one is {sizes[0][1]} x {sizes[0][0]}; make them one size"
        raise SettingError("dataset", str(odd[0][0]), words)
    names = tuple(sorted({path.parent.name for path, _ in found}))
    parts = []
    for top in tops:
        labels = np.array([names.index(path.parent.name) for path, where in found if where == top], dtype=np.int64)
        if len(labels):
            parts.append(Part(channels_first(np.stack(held[top])), labels, names=names))
    if not any(top == tops[0] for _, top in found):
        raise SettingError("dataset", str(tops[0]), "has no images to train on")
    return parts[0], parts[1] if parts[1:] else None


def is_picture(value: Any) -> bool:
    """Is this a Pillow image?"""
    return type(value).__module__.startswith("PIL.")


def pixels(image: Any) -> Array:
    made: Array = channels_first(np.asarray(image)[None])[0]
    return made


def channels_first(images: Any) -> Array:
    """(n, height, width) or (n, height, width, channels) in torch's order, (n, channels, height, width)."""
    stack = column_array("images", images)
    return stack[:, None] if stack.ndim == 3 else np.ascontiguousarray(stack.transpose(0, 3, 1, 2))


def from_csv(path: Path) -> dict[str, Array]:
    """Columns by the names in the first line: integers, numbers or text."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            lines = csv.reader(stream)
            header, rows = [name.strip() for name in next(lines, [])], [row for row in lines if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SettingError("dataset", str(path), f"cannot be read as CSV: {first_line(error)}") from None
    if not rows or len(set(header)) < len(header) or all(is_number(name) for name in header):
        raise SettingError("dataset", str(path), "the first line must name every column once, and rows must follow")
    if uneven := [at for at, row in enumerate(rows) if len(row) != len(header)]:
        words = f"row {uneven[0] + 1} has {len(rows[uneven[0]])} values, but the first line has {len(header)}"
        raise SettingError("dataset", str(path), words)
    return {name: parse_column(column) for name, column in zip(header, zip(*rows, strict=True), strict=True)}


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_column(column: Sequence[str]) -> Array:
    """A column in its type; an empty cell among numbers is a missing value."""
    for kind in (np.int64, np.float64):
        try:
            return np.array([cell or "nan" for cell in column] if kind is np.float64 else column).astype(kind)
        except (ValueError, OverflowError):
            continue
    return np.array(column)


def from_parquet(path: Path, columns: Columns) -> Part:
    if find_spec("pyarrow") is None:
        raise SettingError("dataset", str(path), "reading Parquet needs pyarrow, which is not installed: pip install pyarrow")
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            about = file.metadata
            size = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
            if size <= columns.room:
                return from_table(numpy_of(file.read()), columns)
            target, features, user = columns.split(file.schema_arrow.names)
            rows = max(1, int(columns.room / READING / size * about.num_rows))
            batches = (features_of(numpy_of(some), features) for some in file.iter_batches(rows, columns=features))
            x = write_temporary(batches, about.num_rows)
            table = numpy_of(file.read([*target, *([] if user is None else [user])]))
            return part_with_target(x, table, Columns(target, features, columns.user if user is None else table[user]))
    except FedaggError:
        raise
    except Exception as error:  # pyarrow's own errors, and those of the file system
        raise SettingError("dataset", str(path), f"cannot be read as Parquet: {first_line(error)}") from None


def numpy_of(table: Any) -> dict[str, Any]:
    """The columns of an Arrow table or batch."""
    return {name: column.to_numpy(zero_copy_only=False) for name, column in zip(table.schema.names, table.columns, strict=True)}


def write_temporary(batches: Iterable[Array], count: int) -> np.memmap[Any, Any]:
    """Write batches of samples to a .npy file that is removed when the process ends: Parquet cannot read single rows."""
    folder = tempfile.mkdtemp(prefix="fedagg-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, whole, at = Path(folder) / "x.npy", None, 0
    for batch in batches:
        if whole is None:
            whole = np.lib.format.open_memmap(path, mode="w+", dtype=batch.dtype, shape=(count, *batch.shape[1:]))
        whole[at : at + len(batch)] = batch
        at += len(batch)
    del whole
    return np.lib.format.open_memmap(path, mode="r")


ARRAYS = ("x_train", "y_train", "x_test", "y_test", "x", "y", "users")


def from_npz(path: Path) -> tuple[Part, Part | None]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
            found = {name.lower(): held[name] for name in held.files if name.lower() in ARRAYS}
            names = ", ".join(held.files)
    except Exception as error:  # the readers of zip and npy raise many kinds of errors for other files
        raise SettingError("dataset", str(path), f"cannot be read as NPZ: {first_line(error)}") from None
    return from_arrays(path, found, names)


def from_arrays(path: Path, found: Mapping[str, Array], names: str = "") -> tuple[Part, Part | None]:
    """The parts from arrays named x_train and y_train, or x and y; and x_test, y_test and users if present."""
    x, y = next(((a, b) for a, b in (("x_train", "y_train"), ("x", "y")) if a in found and b in found), ("", ""))
    if not x:
        words = f"needs x_train and y_train, or x and y, and optionally x_test, y_test and users; it has {names}"
        raise SettingError("dataset", str(path), words)
    tested = [name for name in ("x_test", "y_test") if name in found]
    if len(tested) == 1:
        raise SettingError("dataset", str(path), f"has {tested[0]} alone; give both x_test and y_test, or neither")
    return Part(found[x], found[y], found.get("users")), Part(found["x_test"], found["y_test"]) if tested else None


def from_npy(path: Path, columns: Columns) -> Part:
    """The samples; targets and users are in separate files."""
    if not isinstance(columns.target, str):
        raise SettingError("target", columns.target, f"{path.name} holds only samples; name the .npy file with their labels")
    users = npy(Path(columns.user), "user") if isinstance(columns.user, str) else columns.user
    return Part(npy(path, "dataset"), npy(Path(columns.target), "target"), users)


def npy(path: Path, setting: str) -> Array:
    """An array that stays on disk until it is used; mapping a file never unpickles."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy's reader raises many kinds of errors for a damaged header
        raise SettingError(setting, str(path), f"cannot be read as .npy: {first_line(error)}") from None


# --- targets and the test part ---------------------------------------------------------------------------------------


def number_labels(train: Part, test: Part) -> tuple[Any, Any, tuple[str, ...] | None]:
    """Words as numbers, over both parts, and the words in that order; also a table's integers that do not count from 0. Parts that
    name their classes differently are renumbered; negative labels, which name none, are left to be refused."""
    if train.names is not None and test.names not in (None, train.names) and test.y.dtype.kind in "iu":
        every = tuple(dict.fromkeys((*train.names, *test.names)))
        places = np.array([every.index(name) for name in test.names])
        return train.y, np.where(test.y < 0, test.y, places[test.y]), every
    if train.names is not None or not all(isinstance(part.y, np.ndarray) and part.y.ndim == 1 for part in (train, test)):
        return train.y, test.y, train.names
    both = np.concatenate([train.y, test.y])
    both = as_integers(both) if train.table else both
    words = both.dtype.kind in "OUSb"
    if not words and not (train.table and both.dtype.kind in "iu"):
        return train.y, test.y, None
    names, numbers = np.unique(both, return_inverse=True)
    if not words and (len(names) > FEW or np.array_equal(names, np.arange(len(names)))):
        return train.y, test.y, None
    return numbers[: len(train)], numbers[len(train) :], tuple(str(name) for name in names)


def as_integers(numbers: Array) -> Array:
    """Floats without fractions as integers, since a column of integers is often kept as floats; others unchanged."""
    if numbers.dtype.kind != "f" or not bool(((np.abs(numbers) <= EXACT) & (numbers == np.trunc(numbers))).all()):
        return numbers
    return numbers.astype(np.int64)


def refuse_uneven(part: Part, which: str) -> None:
    """Refuse samples and targets of different number. Called before any are held out, which would hide it."""
    x, y = tuple(part.x.shape), tuple(part.y.shape)
    if not (x and y):
        raise SettingError("data", "a single number", f"samples and targets need one row each; {FORMS}")
    check_lengths(which, x[0], y[0])


def pad_to_width(part: Part, other: Part) -> Part:
    """Rows of tokens, padded with 0 to the longer of both parts."""
    if not all(isinstance(x, np.ndarray) and x.ndim == 2 and x.dtype.kind in "iu" for x in (part.x, other.x)):
        return part
    more = other.x.shape[1] - part.x.shape[1]
    return replace(part, x=np.pad(part.x, ((0, 0), (0, more)))) if more > 0 else part


def split_off_test(part: Part, share: Any) -> tuple[Part, Part]:
    """Training and test parts. The test share is drawn by a fixed seed; from disk it is at most what fits into memory."""
    most = part.x.room(KEPT) if isinstance(part.x, Mapped) else len(part)
    count = min(most, round(float(share) * len(part))) if 0 < share < 1 else 0
    if not 0 < count < len(part):
        raise SettingError("test", share, f"must leave some of the {len(part)} samples to train on and some to test on")
    order = seeding.numpy_generator(0, "held out").permutation(len(part))
    train, test = part.rows(np.sort(order[count:])), part.rows(np.sort(order[:count]))
    return train, replace(test, x=test.x.raw(np.arange(count))) if isinstance(test.x, Mapped) else test
