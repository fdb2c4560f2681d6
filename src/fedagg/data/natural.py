"""Data that belong to people: readers of sets that name the writer, person or role behind every training sample.

As for other named sets, the files may be damaged: any damage is a DataError.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedagg.data.idx import read_idx
from fedagg.errors import DataError
from fedagg.tasks import PADDING

Array = npt.NDArray[Any]

# The characters of the usual federated benchmark on Shakespeare, in its order. A character's number is its index here plus one; 0
# is padding, 87 is any other character, and 88 and 89 are reserved for the beginning and the end of a text: 90 in all.
CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
OTHER, VOCABULARY, LENGTH = 87, 90, 80
TAUGHT = 0.9  # share of a role's text to train on; the rest, which comes later, is for testing

ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
TRANSITIONS = ("stand to sit", "sit to stand", "sit to lie", "lie to sit", "stand to lie", "lie to stand")
TEST_PEOPLE = (2, 4, 9, 10, 12, 13, 18, 20, 24)  # those of the publishers' own split
WINDOW, STEP = 128, 64  # readings at 50 Hz: windows of 2.56 seconds that overlap by half

LETTERS_TEST = 1 / 7  # the official split's share
LETTERS_SEED = 26


@dataclass(frozen=True)
class Read:
    """The content of a named set's files."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    users: Array | None = None  # of the training samples
    labels: tuple[str, ...] | None = None  # names of the classes


def tokens(text: str) -> npt.NDArray[np.int64]:
    """Characters as numbers."""
    table = np.full(256, OTHER, dtype=np.int64)
    table[[ord(character) for character in CHARACTERS]] = np.arange(1, 1 + len(CHARACTERS))
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    return np.take(table, points, mode="clip")


def writers(paths: Sequence[Path], on: Read | None) -> Read:
    """MNIST's images with the writers from QMNIST's labels: eight numbers per image, class first, writer third."""
    assert on is not None
    rows = read_idx(paths[0], kind="int")
    if rows.shape != (len(on.y_train), 8):
        raise DataError(f"{paths[0]}: holds {rows.shape}, not ({len(on.y_train)}, 8)")
    if (wrong := np.flatnonzero(rows[:, 0] != on.y_train)).size:
        at = wrong[0]
        raise DataError(f"{paths[0]}: says that image {at} is a {rows[at, 0]}, but MNIST says that it is a {on.y_train[at]}")
    return replace(on, users=rows[:, 2].astype(np.int64))


def letters(paths: Sequence[Path], _: Read | None) -> Read:
    """EMNIST letters in one set, `X` upright and `y` from 0, split here: the same share of every class is for testing."""
    held = arrays(paths[0], {"X": ("u", 3), "y": ("u", 1)})
    x, y = held["X"][:, None], held["y"].astype(np.int64)
    if len(x) != len(y) or y.max() > 25:
        raise DataError(f"{paths[0]}: its {len(x)} images and {len(y)} labels from 0 to {y.max()} do not match")
    order = np.random.default_rng(LETTERS_SEED).permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    counts = np.bincount(y)
    place = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    tested = place < np.rint(LETTERS_TEST * counts).astype(int).repeat(counts)
    train, test = np.sort(order[~tested]), np.sort(order[tested])
    return Read(x[train], y[train], x[test], y[test], labels=tuple("abcdefghijklmnopqrstuvwxyz"))


def postures(paths: Sequence[Path], _: Read | None) -> Read:
    """HAPT's raw signals, a row per reading, in windows of 2.56 seconds of one activity: (6, 128), acceleration and rotation."""
    held = arrays(paths[0], {"subject": ("i", 1), "recording": ("i", 1), "label": ("i", 1), "signal": ("f", 2)})
    subject, recording, label, signal = (held[name] for name in ("subject", "recording", "label", "signal"))
    if signal.shape != (len(label), 6) or not len(subject) == len(recording) == len(label):
        raise DataError(f"{paths[0]}: its arrays do not have a row for each of the same readings, with six signals")
    if label.max() > 12:
        raise DataError(f"{paths[0]}: activity {label.max()} is out of range; activities end at 12")
    edges = 1 + np.flatnonzero(np.diff(subject) | np.diff(recording) | np.diff(label))
    runs = zip([0, *edges], [*edges, len(label)], strict=True)
    starts = np.concatenate([np.arange(a, b - WINDOW + 1, STEP) for a, b in runs if label[a] > 0]).astype(np.int64)
    x = np.lib.stride_tricks.sliding_window_view(signal, WINDOW, axis=0)[starts]
    tested = np.isin(subject[starts], TEST_PEOPLE)
    y, who = label[starts].astype(np.int64) - 1, subject[starts].astype(np.int64)
    if not tested.any() or tested.all():
        raise DataError(f"{paths[0]}: has no people to train on, or none to test on")
    return Read(x[~tested], y[~tested], x[tested], y[tested], who[~tested], (*ACTIVITIES, *TRANSITIONS))


def activities(paths: Sequence[Path], _: Read | None) -> Read:
    """UCI HAR: 561 features of 2.56 seconds, the activity from 1 to 6, and the person, in text files."""
    x_train, y_train, who, x_test, y_test = (numbers(path) for path in paths)
    for path, part in ((paths[1], y_train), (paths[4], y_test)):
        if part.shape[1] != 1 or part.min() < 1 or part.max() > 6:
            raise DataError(f"{path}: activities must be one number per line, from 1 to 6")
    if who.shape != y_train.shape or len(x_train) != len(y_train) or len(x_test) != len(y_test):
        raise DataError(f"{paths[0].parent}: features, activities and people differ in number")
    if x_train.shape[1] != x_test.shape[1]:
        raise DataError(f"{paths[3]}: {x_test.shape[1]} features to test on, but {x_train.shape[1]} to train on")
    labels = ((part[:, 0] - 1).astype(np.int64) for part in (y_train, y_test))
    return Read(x_train, next(labels), x_test, next(labels), who[:, 0].astype(np.int64), ACTIVITIES)


def digits_of_leaf(paths: Sequence[Path], _: Read | None) -> Read:
    """LEAF's FEMNIST: 784 numbers from 0 to 1 per image, 62 classes (digits, capitals, small letters)."""

    def images(path: Path, x: list[Any], y: list[Any]) -> tuple[Array, Array]:
        try:
            made = np.asarray(x, dtype=np.float32).reshape(-1, 1, 28, 28), np.asarray(y, dtype=np.int64)
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}: samples must be 784 numbers and a class") from error
        return made

    names = (*"0123456789", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"abcdefghijklmnopqrstuvwxyz")
    return leaf(paths[0], images, names)


def text_of_leaf(paths: Sequence[Path], _: Read | None) -> Read:
    """LEAF's Shakespeare: 80 characters, and the one that follows."""

    def characters(path: Path, x: list[Any], y: list[Any]) -> tuple[Array, Array]:
        if not all(isinstance(text, str) and len(text) == length for part, length in ((x, LENGTH), (y, 1)) for text in part):
            raise DataError(f"{path}: samples must be {LENGTH} characters, and one that follows")
        return tokens("".join(x)).reshape(-1, LENGTH), tokens("".join(y))

    return leaf(paths[0], characters, None)


def leaf(folder: Path, convert: Any, labels: tuple[str, ...] | None) -> Read:
    """LEAF's JSON: files with some users each, in the folders train and test."""
    parts: dict[str, list[tuple[Array, Array]]] = {}
    users: list[str] = []
    for part in ("train", "test"):
        for path in sorted((folder / part).glob("*.json")):
            held = parsed(path)
            for user in held["users"]:
                mine = held["user_data"].get(user, {})
                x, y = mine.get("x"), mine.get("y")
                if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                    raise DataError(f"{path}: user {user!r} has no x and y of the same length")
                if x:
                    parts.setdefault(part, []).append(convert(path, x, y))
                    users += [str(user)] * (len(x) if part == "train" else 0)
        if part not in parts:
            raise DataError(f"{folder / part}: no LEAF files (*.json) with samples in them")
    (x_train, y_train), (x_test, y_test) = (map(np.concatenate, zip(*parts[part], strict=True)) for part in ("train", "test"))
    return Read(x_train, y_train, x_test, y_test, np.array(users), labels)


def parsed(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({type(error).__name__})") from error
    if not isinstance(held, dict) or not isinstance(held.get("users"), list) or not isinstance(held.get("user_data"), dict):
        raise DataError(f"{path}: not a file of LEAF: it has no users and user_data")
    return held


def roles(paths: Sequence[Path], _: Read | None) -> Read:
    """Speeches by role, as {"users": [...], "speeches": {role: [...]}}: 80 characters, and for each of them the one that follows.
    The first nine tenths of a role's text are for training, the rest for testing."""
    try:
        held = json.loads(gzip.decompress(paths[0].read_bytes()))
        texts = {str(user): tokens("\n".join(held["speeches"][user])) for user in held["users"]}
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{paths[0]}: not speeches by role ({type(error).__name__})") from error
    cuts = {user: int(TAUGHT * len(text)) for user, text in texts.items()}
    train = {user: lines(text[: cuts[user]]) for user, text in texts.items()}
    test = [lines(text[cuts[user] :]) for user, text in texts.items()]
    if not any(map(len, train.values())) or not any(map(len, test)):
        raise DataError(f"{paths[0]}: no role has enough text to train and to test on")
    x_train, x_test = np.concatenate(list(train.values())), np.concatenate(test)
    users = np.repeat(list(train), [len(part) for part in train.values()])
    return Read(*reading(x_train), *reading(x_test), users)


def lines(text: Array) -> Array:
    """A text in rows of 81: each begins with the last character of the one before it, and the last row is padded."""
    count = -(-(len(text) - 1) // LENGTH) if len(text) > 1 else 0
    rows = np.zeros((count, LENGTH + 1), dtype=np.int64)
    for at, row in enumerate(rows):
        piece = text[at * LENGTH : (at + 1) * LENGTH + 1]
        row[: len(piece)] = piece
    return rows


def reading(rows: Array) -> tuple[Array, Array]:
    """The inputs, and the characters that follow; nothing follows the end of a text."""
    return rows[:, :-1], np.where(rows[:, 1:] == 0, PADDING, rows[:, 1:])


def arrays(path: Path, wanted: dict[str, tuple[str, int]]) -> dict[str, Array]:
    """Arrays of an NPZ file by name, each of a given kind and number of dimensions."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
            found = {name: held[name] for name in wanted}
    except Exception as error:  # the readers of zip and npy raise many kinds of errors for damaged files
        raise DataError(f"{path}: cannot be read as an NPZ with {', '.join(wanted)} ({type(error).__name__})") from error
    for name, (kind, dimensions) in wanted.items():
        if found[name].dtype.kind != kind or found[name].ndim != dimensions or not found[name].size:
            raise DataError(f"{path}: its {name} is {found[name].dtype} {found[name].shape}")
    return found


def numbers(path: Path) -> npt.NDArray[np.float32]:
    """A text file of numbers, with the same count on every line."""
    try:
        made = np.loadtxt(path, dtype=np.float32, ndmin=2, encoding="ascii")
    except (OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: cannot be read as lines of numbers ({' '.join(str(error).split())[:100]})") from error
    if not made.size:
        raise DataError(f"{path}: holds no numbers")
    return made
