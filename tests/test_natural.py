"""Sets that name the people behind their samples, each read from a small file of its publisher's format."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedagg import data, partition
from fedagg.data import natural, sources
from fedagg.errors import DataError


def unpinned(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a test write its own files: no sizes, no hashes."""
    source = sources.SOURCES[name]
    files = tuple(sources.File(file.name, ()) for file in source.files)
    monkeypatch.setitem(sources.SOURCES, name, dataclasses.replace(source, files=files))


def refused(name: str, folder: Path, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        data.load(name, folder, download=False)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- MNIST by writer -------------------------------------------------------------------------------------------------


def qmnist(labels: Any, writers: Any) -> bytes:
    rows = np.zeros((len(labels), 8), dtype=">i4")
    rows[:, 0], rows[:, 2] = labels, writers
    return gzip.compress(b"\0\0\x0c\x02" + len(rows).to_bytes(4, "big") + (8).to_bytes(4, "big") + rows.tobytes())


def test_mnist_by_writer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """mnist-mini's images in MNIST's place."""
    unpinned(monkeypatch, "mnist-writers")
    monkeypatch.setitem(sources.SOURCES, "mnist-writers", dataclasses.replace(sources.SOURCES["mnist-writers"], on="mnist-mini"))
    mini = data.load("mnist-mini")
    writers = np.arange(6000) // 19
    path = put(tmp_path / "qmnist" / "qmnist-train-labels-idx2-int.gz", qmnist(mini.y_train, writers))
    found = data.load("mnist-writers", tmp_path, download=False)
    assert torch.equal(found.x_train, mini.x_train)
    assert np.array_equal(found.users, writers)
    assert len(partition.by_user(found.users)) == 316
    other = mini.y_train.numpy().copy()
    other[7] = (other[7] + 1) % 10
    put(path, qmnist(other, writers))
    refused("mnist-writers", tmp_path, "image 7")
    put(path, qmnist(other[:100], writers[:100]))
    refused("mnist-writers", tmp_path, "(100, 8)")
    put(path, gzip.compress(b"\0\0\x08\x02" + bytes(12)))
    refused("mnist-writers", tmp_path, "not int")


# --- people who move -------------------------------------------------------------------------------------------------


def test_hapt_in_windows_of_one_activity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unpinned(monkeypatch, "hapt")
    runs = [(1, 0, 5, 200), (1, 0, -1, 300), (1, 1, 5, 127), (1, 1, 12, 256), (2, 0, 3, 128)]  # who, recording, activity, readings
    who, recording, label = (np.repeat([run[k] for run in runs], [run[3] for run in runs]) for k in range(3))
    signal = np.arange(6 * len(who), dtype=np.float32).reshape(-1, 6)
    path = tmp_path / "hapt" / "hapt_raw_by_user.npz"
    path.parent.mkdir()
    columns = {"subject": who.astype("i2"), "recording": recording.astype("i2"), "label": label.astype("i1"), "signal": signal}
    np.savez(path, **columns)
    found = data.load("hapt", tmp_path, download=False)
    starts = [0, 64, 627, 691, 755]  # 200 and 256 readings hold two and three windows; 127, and what has no label, none
    assert found.y_train.tolist() == [4, 4, 11, 11, 11]
    assert found.users.tolist() == [1] * 5
    assert found.shape == (6, 128)
    for at, start in enumerate(starts):
        assert np.array_equal(found.x_train[at], signal[start : start + 128].T)
    assert (found.y_test.tolist(), found.classes, found.labels[2]) == ([2], 12, "walking downstairs")  # person 2 is for tests
    np.savez(path, **{**columns, "label": columns["label"] + 10})
    refused("hapt", tmp_path, "out of range")
    np.savez(path, **{**columns, "signal": signal[:, :5]})
    refused("hapt", tmp_path, "six signals")
    path.write_bytes(path.read_bytes()[:50])
    refused("hapt", tmp_path, "cannot be read as an NPZ", "docs/your-own-data.md")


def har(folder: Path, **changed: str) -> None:
    contents = {
        "train/X_train.txt": "  2.8858451e-001 -2.0294171e-002\n  1.0e+000 5.0e-001\n -1 0\n",
        "train/y_train.txt": "5\n1\n6\n",
        "train/subject_train.txt": "1\n3\n3\n",
        "test/X_test.txt": "  0.5 0.25\n",
        "test/y_test.txt": "2\n",
    }
    for name, content in {**contents, **{key.replace("__", "/") + ".txt": value for key, value in changed.items()}}.items():
        put(folder / "UCI HAR Dataset" / name, content)


def test_uci_har(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    har(tmp_path)
    refused("uci-har", tmp_path, "damaged", "bytes, not 66006256", "archive.ics.uci.edu")
    unpinned(monkeypatch, "uci-har")
    found = data.load("uci-har", tmp_path, download=False)
    assert found.x_train.tolist() == pytest.approx(np.array([[0.28858451, -0.020294171], [1, 0.5], [-1, 0]]))
    assert (found.y_train.tolist(), found.y_test.tolist(), found.users.tolist()) == ([4, 0, 5], [1], [1, 3, 3])
    assert (found.classes, found.labels[4]) == (6, "standing")
    for changed, words in (
        ({"train__y_train": "5\n7\n6\n"}, "from 1 to 6"),
        ({"train__subject_train": "1\n"}, "differ in number"),
        ({"test__X_test": "1 2 3\n"}, "3 features"),
        ({"train__X_train": "1 2\nfour 5\n1 2\n"}, "cannot be read as lines of numbers"),
    ):
        har(tmp_path, **changed)
        refused("uci-har", tmp_path, words)


# --- LEAF ------------------------------------------------------------------------------------------------------------


def leaf(folder: Path, part: str, users: dict[str, tuple[list[Any], list[Any]]], name: str = "all_data_0_niid_0_keep_0") -> Path:
    held = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    return put(folder / part / f"{name}_{part}_9.json", json.dumps(held))


def test_femnist(tmp_path: Path) -> None:
    one, two = [0.5] * 784, [1.0] * 783 + [0.25]
    leaf(tmp_path / "femnist", "train", {"f0001_01": ([one, two], [3, 61]), "f0002_00": ([two], [10])})
    leaf(tmp_path / "femnist", "train", {"f0003_00": ([one], [0])}, "all_data_1_niid_0_keep_0")
    leaf(tmp_path / "femnist", "test", {"f0001_01": ([two], [61])})
    found = data.load("femnist", tmp_path, download=False)
    assert (found.shape, found.classes, found.y_train.tolist()) == ((1, 28, 28), 62, [3, 61, 10, 0])
    assert found.users.tolist() == ["f0001_01", "f0001_01", "f0002_00", "f0003_00"]
    assert float(found.x_test[0, 0, 27, 27]) == 0.25
    assert found.labels[10] == "A"
    assert all(right for _, right in data.verify("femnist", tmp_path))
    assert data.fetch("femnist", tmp_path) == tmp_path / "femnist"


def test_shakespeare_of_leaf(tmp_path: Path) -> None:
    line = "To be, or not to be, that is the question: whether 'tis nobler in the mind to su"
    assert len(line) == 80
    leaf(tmp_path / "shakespeare", "train", {"HAMLET": ([line, line], ["f", "~"]), "GHOST": ([line], ["d"])})
    leaf(tmp_path / "shakespeare", "test", {"HAMLET": ([line], ["e"])})
    found = data.load("shakespeare", tmp_path, download=False)
    assert (found.shape, found.classes, found.users.tolist()) == ((80,), 90, ["HAMLET", "HAMLET", "GHOST"])
    numbers = {character: 1 + at for at, character in enumerate(natural.CHARACTERS)}
    assert found.x_train[0].tolist() == [numbers[character] for character in line]
    assert found.y_train.tolist() == [numbers["f"], 87, numbers["d"]]


def test_tokens() -> None:
    assert (len(natural.CHARACTERS), len(set(natural.CHARACTERS))) == (86, 86)
    assert natural.tokens("dh\r").tolist() == [1, 2, 86]
    assert natural.tokens("~{é€😀\0").tolist() == [87] * 6


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "not a file of LEAF"),
        ('{"users": ["a"], "user_data": {}}', "user 'a' has no x and y"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": []}}}', "user 'a' has no x and y"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1, 2]], "y": [0]}}}', "784 numbers and a class"),
        ('{"users": [], "user_data": {}}', "no LEAF files"),
    ],
)
def test_damaged_leaf_files(tmp_path: Path, content: str, words: str) -> None:
    path = put(tmp_path / "femnist" / "train" / "a.json", content)
    refused("femnist", tmp_path, words, str(path.parent), "preprocess.sh")
    assert [right for _, right in data.verify("femnist", tmp_path)] == [False]


@pytest.mark.parametrize("name", ["femnist", "hapt", "uci-har", "shakespeare", "shakespeare-roles", "emnist-letters-union"])
def test_missing_files_say_how_to_get_them(tmp_path: Path, name: str) -> None:
    refused(name, tmp_path, f"{name}: ", "is missing", str(tmp_path), "--data-dir")
    with pytest.raises(DataError, match="is missing"):
        data.fetch(name, tmp_path)


# --- Shakespeare by role, letters ------------------------------------------------------------------------------------


def test_roles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unpinned(monkeypatch, "shakespeare-roles")
    text = "".join(natural.CHARACTERS[k % 60] for k in range(1000))
    held = {"users": ["A", "B"], "speeches": {"A": [text[:400], text[401:]], "B": ["too short"]}}
    path = put(tmp_path / "shakespeare" / "roles.json.gz", gzip.compress(json.dumps(held).encode()))
    found = data.load("shakespeare-roles", tmp_path, download=False)
    said = natural.tokens(text[:400] + "\n" + text[401:])
    assert (found.task, found.classes) == ("tokens", 90)
    assert found.x_train[1].tolist() == said[80:160].tolist()
    assert found.y_train[1].tolist() == said[81:161].tolist()
    assert found.users.tolist() == ["A"] * 12 + ["B"]
    ended = 899 - 11 * 80  # characters that are followed by another one in the last row of A's first nine tenths
    assert found.y_train[11].tolist() == [*said[881:900].tolist(), *[-100] * (80 - ended)]
    assert found.x_train[12, :9].tolist() == [*natural.tokens("too shor").tolist(), 0]
    assert found.y_train[12, :8].tolist() == [*natural.tokens("oo shor").tolist(), -100]
    assert found.x_test[0].tolist() == said[900:980].tolist()
    put(path, gzip.compress(b'{"users": ["A"]}'))
    refused("shakespeare-roles", tmp_path, "not speeches by role")


def test_letters_are_split_alike_in_every_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unpinned(monkeypatch, "emnist-letters-union")
    y = np.repeat(np.arange(26), 14).astype(np.uint8)
    x = np.arange(len(y), dtype=np.uint32)[:, None, None].repeat(28, 1).repeat(28, 2)
    (tmp_path / "emnist-letters-union").mkdir()
    np.savez(tmp_path / "emnist-letters-union" / "emnist_letters26_union.npz", X=(x % 251).astype(np.uint8), y=y)
    found = data.load("emnist-letters-union", tmp_path, download=False)
    again = data.load("emnist-letters-union", tmp_path, download=False)
    assert found.y_test.bincount().tolist() == [2] * 26
    assert found.y_train.bincount().tolist() == [12] * 26
    assert torch.equal(found.x_test, again.x_test)
    assert found.users is None
    assert found.labels[25] == "z"


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_never_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the right size and structure: only the hash shows the damage."""
    content = bytes([3]) + bytes(3072)
    pinned = tuple(
        sources.File(file.name, (1, 3073), 3073, hashlib.sha256(content).hexdigest()) for file in sources.SOURCES["cifar10"].files
    )
    monkeypatch.setitem(sources.SOURCES, "cifar10", dataclasses.replace(sources.SOURCES["cifar10"], files=pinned))
    for file in pinned:
        put(tmp_path / "cifar-10-batches-bin" / file.name, content)
    assert len(data.load("cifar10", tmp_path)) == 5
    flipped = put(tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin", content[:1000] + b"\x01" + content[1001:])
    refused("cifar10", tmp_path, str(flipped), "its content is not what was published", "fedagg data fetch cifar10")


@pytest.mark.parametrize(
    ("name", "train", "test", "users"),
    [
        ("mnist-writers", 60_000, 10_000, 539),
        ("hapt", 7767, 3162, 21),  # as many as the publishers cut from the same signals
        ("emnist-letters-union", 93_373, 15_562, None),
    ],
)
@pytest.mark.slow
def test_the_real_files(name: str, train: int, test: int, users: int | None) -> None:
    try:
        found = data.load(name, download=False)
    except DataError:
        pytest.skip(f"{name} is not in the data directory")
    assert (len(found), len(found.x_test)) == (train, test)
    assert (None if found.users is None else len(np.unique(found.users))) == users
