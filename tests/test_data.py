"""Datasets: what arrays become, what is refused, and files that are missing, damaged or hostile."""

from __future__ import annotations

import ast
import dataclasses
import gzip
import hashlib
import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedagg import data
from fedagg.data import Dataset, sources
from fedagg.data.cifar import read_cifar
from fedagg.data.idx import read_idx, write_idx
from fedagg.errors import DataError, SettingError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4))
Y = np.array([0, 1, 2, 0, 1, 2])


def one_line(caught: pytest.ExceptionInfo[Exception], *words: str) -> None:
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


# --- Dataset ---------------------------------------------------------------------------------------------------------


def test_arrays_are_converted() -> None:
    made = Dataset(X, Y, torch.from_numpy(X[:2]), torch.tensor([0, 1], dtype=torch.int32))
    assert {made.x_train.dtype, made.x_test.dtype} == {torch.float32}
    assert {made.y_train.dtype, made.y_test.dtype} == {torch.int64}
    assert (made.name, made.classes, made.shape, len(made)) == ("custom", 3, (4,), 6)
    assert repr(made) == "Dataset('custom', train=6, test=2, shape=(4,), classes=3)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "other"  # type: ignore[misc]


def test_uint8_is_scaled_and_tokens_stay() -> None:
    images = np.array([[0, 255], [51, 102]], dtype=np.uint8)
    made = Dataset(images, Y[:2], torch.from_numpy(images), Y[:2])
    assert torch.equal(made.x_train, torch.tensor([[0, 1], [0.2, 0.4]]))
    assert torch.equal(made.x_test, made.x_train)
    assert images[0, 1] == 255
    tokens = Dataset(np.array([[5, 6]], dtype=np.int16), Y[:1], np.array([[7, 8]], dtype=np.uint16), Y[:1])
    assert tokens.x_train.dtype == torch.int64
    assert tokens.x_test.tolist() == [[7, 8]]
    with pytest.raises(SettingError, match="token ids"):
        tokens.normalized()


@pytest.mark.parametrize("dtype", [">f4", "<f8", "f2", "?", ">i4", "u8"])
def test_any_byte_order_stride_and_read_only_array(dtype: str) -> None:
    x = np.arange(8).reshape(4, 2).astype(dtype)[::-2, ::-1]
    x.flags.writeable = False
    made = Dataset(x, Y[:2], x, Y[:2].astype(np.float64))
    assert torch.equal(made.x_train.double(), torch.from_numpy(x.astype(np.float64)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y_train": Y[:5]}, ("y_train", "5 labels", "6 samples")),
        ({"x_train": X[:0], "y_train": Y[:0]}, ("x_train", "(0, 4)")),
        ({"x_test": X[:0], "y_test": Y[:0]}, ("x_test", "(0, 4)")),
        ({"x_test": X[:, :3]}, ("x_test", "(3,)", "(4,)")),
        ({"x_test": np.abs(X * 9).astype(np.uint8)}, ("x_test", "uint8", "floating")),
        ({"x_test": (X * 9).astype(int)}, ("x_test", "integers", "floating")),
        ({"x_train": X[:, 0]}, ("x_train", "(6,)")),
        ({"x_train": X * 1j}, ("x_train", "complex128")),
        ({"x_train": torch.ones(6, 4) * 1j}, ("x_train", "complex64")),
        ({"x_train": np.full((6, 4), "a")}, ("x_train", "real numbers")),
        ({"x_train": X.tolist()}, ("x_train", "list", "numpy array")),
        ({"x_train": np.where(X[3, 1] == X, np.nan, X)}, ("x_train[3] = nan",)),
        ({"x_test": np.where(X[2, 1] == X, -np.inf, X)}, ("x_test[2] = -inf",)),
        ({"x_train": np.where(X[4, 1] == X, 1e300, X)}, ("x_train[4] = inf", "float32")),
        ({"y_train": np.array([0, 1, -2, 0, 1, 2])}, ("y_train[2] = -2",)),
        ({"y_test": np.array([0, 1, 2, 0, 3, 2]), "classes": 3}, ("y_test[4] = 3", "from 0 to 2")),
        ({"y_train": np.array([0, 1, 0.5, 0, 1, 2])}, ("y_train[2] = 0.5",)),
        ({"y_train": np.array([0, 1, np.nan, 0, 1, 2])}, ("y_train[2] = nan",)),
        ({"y_train": torch.tensor([0, 1, 2, 0, 1, torch.inf])}, ("y_train[5] = inf",)),
        ({"y_train": np.eye(6)}, ("y_train", "(6, 6)")),
        ({"y_train": np.full(6, -1), "y_test": np.full(6, -1)}, ("y_train[0] = -1",)),
        ({"classes": 0}, ("classes = 0",)),
        ({"classes": 2.0}, ("classes = 2.0",)),
    ],
)
def test_wrong_arrays_are_refused(change: dict[str, object], words: tuple[str, ...]) -> None:
    arguments = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y, **change}
    with pytest.raises(SettingError) as caught:
        Dataset(**arguments)  # type: ignore[arg-type]
    one_line(caught, *words)


def test_normalized_by_channel_of_the_training_set() -> None:
    x = RNG.normal(size=(50, 3, 4, 5)) * np.array([1, 5, 0]).reshape(3, 1, 1) + 7
    y = np.zeros(50, dtype=int)
    made = Dataset(x, y, x[:10] * 2, y[:10], name="mine", classes=4)
    before = made.x_train.clone()
    normal = made.normalized()
    assert torch.equal(made.x_train, before)
    assert (normal.name, normal.classes) == ("mine", 4)
    mean, std = x.mean((0, 2, 3), keepdims=True), x.std((0, 2, 3), keepdims=True)
    std[0, 2] = 1
    np.testing.assert_allclose(normal.x_train, (x - mean) / std, atol=1e-5)
    np.testing.assert_allclose(normal.x_test, (x[:10] * 2 - mean) / std, atol=1e-4)


def test_normalized_rows_have_each_feature_by_itself() -> None:
    x = X * np.array([1, 1e-3, 1e4, 0]) + np.array([0, 7, -3e4, 0.1])
    normal = Dataset(x, Y, 2 * x, Y).normalized()
    std = np.where(x.std(0) > 1e-9, x.std(0), 1)
    np.testing.assert_allclose(normal.x_train, (x - x.mean(0)) / std, atol=2e-3)
    np.testing.assert_allclose(normal.x_test, (2 * x - x.mean(0)) / std, rtol=1e-3, atol=2e-3)
    assert torch.equal(normal.x_train[:, 3], torch.zeros(len(x)))


def test_standardising_needs_only_sums_from_clients() -> None:
    """Three clients of different sizes: mean and deviation of what they hold together."""
    x = torch.from_numpy(RNG.normal(3, 2, (30, 4))).float()
    mean, std = data.standard(*data.pooled(x.split([5, 1, 24])))
    np.testing.assert_allclose(mean, x.double().mean(0), rtol=1e-6)
    np.testing.assert_allclose(std, x.double().std(0, correction=0), rtol=1e-6)


# --- IDX and CIFAR ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.gz", "a"])
@settings(deadline=None, max_examples=25)
@given(array=hnp.arrays(np.uint8, hnp.array_shapes(max_dims=4, max_side=6)))
def test_idx_round_trip(tmp_path_factory: pytest.TempPathFactory, name: str, array: np.ndarray) -> None:
    path = tmp_path_factory.getbasetemp() / name
    write_idx(path, array)
    first = path.read_bytes()
    back = read_idx(path)
    assert back.dtype == np.uint8
    assert np.array_equal(back, array)
    write_idx(path, array)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.glob(".*.part")] == []


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((), np.uint8), np.zeros((1,) * 5, np.uint8)])
def test_idx_refuses_other_arrays(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(DataError):
        write_idx(tmp_path / "a", array)
    assert not list(tmp_path.iterdir())


HEAD = b"\0\0\x08\x01"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an IDX file"),
        (b"\0\0\x08", "not an IDX file"),
        (b"PK\x03\x04" + bytes(9), "not an IDX file"),
        (b"\0\0\x0d\x01" + bytes(9), "not ubyte"),
        (b"\0\0\x08\x00", "not ubyte"),
        (b"\0\0\x08\x05" + bytes(30), "not ubyte"),
        (HEAD + b"\0\0", "truncated"),
        (HEAD + b"\0\0\0\0", "cannot be right"),
        (HEAD + b"\0\0\0\x03ab", "holds only 2"),
        (HEAD + b"\0\0\0\x03abcd", "holds more"),
        (HEAD + b"\xff\xff\xff\xffab", "holds only 2"),
        (b"\0\0\x08\x04" + b"\xff" * 16 + b"ab", "cannot be right"),
        (b"\0\0\x08\x04" + bytes(4) + b"\xff" * 12, "cannot be right"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_idx_errors(tmp_path: Path, content: bytes, words: str, packed: bool) -> None:
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError) as caught:
        read_idx(path)
    one_line(caught, words, str(path))


def test_idx_stops_reading_a_gz_bomb(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(HEAD + b"\0\0\0\x10")
        for _ in range(64):
            stream.write(bytes(1 << 20))
    with pytest.raises(DataError, match="holds more"):
        read_idx(path)


@settings(deadline=None, max_examples=150)
@given(st.booleans(), st.data())
def test_damaged_idx_is_a_data_error_or_an_array(
    tmp_path_factory: pytest.TempPathFactory, packed: bool, choose: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / ("fuzz.gz" if packed else "fuzz")
    array = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    write_idx(path, array)
    content = bytearray(path.read_bytes())
    cut = choose.draw(st.booleans())
    if cut:
        del content[choose.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[choose.draw(st.integers(0, len(content) - 1))] ^= 1 << choose.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        back = read_idx(path)
    except DataError:
        return
    assert not cut
    assert back.dtype == np.uint8
    assert back.size == 24
    assert not packed or np.array_equal(back, array)


def test_idx_of_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=path.name):
            read_idx(path)


def test_cifar(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    pixels = RNG.integers(0, 256, (3, 3072), dtype=np.uint8)
    ten = np.hstack([np.array([[9], [0], [4]], dtype=np.uint8), pixels])
    hundred = np.hstack([np.array([[19, 99], [0, 0], [3, 42]], dtype=np.uint8), pixels])
    for records, coarse, labels in ((ten, False, [9, 0, 4]), (hundred, True, [99, 0, 42])):
        path.write_bytes(records.tobytes())
        images, found = read_cifar(path, coarse)
        assert images.shape == (3, 3, 32, 32)
        assert np.array_equal(images.reshape(3, -1), pixels)
        assert found.tolist() == labels
    for column, value in ((0, 20), (1, 100)):
        wrong = hundred.copy()
        wrong[1, column] = value
        path.write_bytes(wrong.tobytes())
        with pytest.raises(DataError, match=f"record 1 has the label {value}"):
            read_cifar(path, coarse=True)
    for content in (b"", ten.tobytes()[:-1]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="whole number of records"):
            read_cifar(path, coarse=False)
    with pytest.raises(DataError, match=r"none\.bin"):
        read_cifar(tmp_path / "none.bin", coarse=False)


# --- named datasets --------------------------------------------------------------------------------------------------


def test_names() -> None:
    published = ["mnist-mini", "mnist", "emnist-letters", "cifar10", "cifar100"]
    people = ["mnist-writers", "hapt", "uci-har", "femnist", "shakespeare", "shakespeare-roles"]
    assert data.names() == [*published, *people, "emnist-letters-union"]
    assert [name for name in data.names() if data.names_users(name)] == people
    for call in (data.load, data.fetch, data.verify):
        with pytest.raises(SettingError, match="did you mean 'cifar10'"):
            call("cifar-10")


def test_mnist_mini() -> None:
    mini = data.load("mnist-mini", download=False)
    assert mini.x_train.shape == (6000, 1, 28, 28)
    assert mini.x_test.shape == (1000, 1, 28, 28)
    assert mini.x_train.dtype == torch.float32
    assert (float(mini.x_train.min()), float(mini.x_train.max())) == (0.0, 1.0)
    assert mini.y_train.bincount().tolist() == [600] * 10
    assert mini.y_test.bincount().tolist() == [100] * 10
    assert all(right for _, right in data.verify("mnist-mini"))
    assert (data.fetch("mnist-mini") / "ATTRIBUTION.md").exists()


def test_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDAGG_DATA", raising=False)
    assert data.where().name == "fedagg"
    monkeypatch.setenv("FEDAGG_DATA", str(tmp_path))
    assert data.where() == tmp_path
    assert data.where(tmp_path / "other") == tmp_path / "other"
    assert data.where("~") == Path.home()


def small(monkeypatch: pytest.MonkeyPatch, name: str, train: int, test: int) -> None:
    """Make a named IDX dataset expect fewer samples and no particular hash, so that a test can write one."""
    source = sources.SOURCES[name]
    files = tuple(
        sources.File(file.name, (train if "-train-" in f"-{file.name}" else test, *file.shape[1:])) for file in source.files
    )
    monkeypatch.setitem(sources.SOURCES, name, dataclasses.replace(source, files=files))


def write_emnist(folder: Path, gz: str = ".gz") -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True)
    images = RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    labels = np.array([1, 26, 3, 3, 2], dtype=np.uint8)
    for part, count in (("train", 5), ("test", 2)):
        write_idx(folder / f"emnist-letters-{part}-images-idx3-ubyte{gz}", images[:count])
        write_idx(folder / f"emnist-letters-{part}-labels-idx1-ubyte{gz}", labels[:count])
    return images, labels


@pytest.mark.parametrize("gz", [".gz", ""])
def test_emnist_letters_upright_from_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gz: str) -> None:
    small(monkeypatch, "emnist-letters", 5, 2)
    images, labels = write_emnist(tmp_path / "emnist", gz)
    letters = data.load("emnist-letters", tmp_path, download=False)
    assert letters.classes == 26
    assert letters.y_train.tolist() == (labels.astype(int) - 1).tolist()
    assert letters.x_test.shape == (2, 1, 28, 28)
    np.testing.assert_allclose(letters.x_train[3, 0], images[3].T / 255, atol=1e-6)
    assert all(right for _, right in data.verify("emnist-letters", tmp_path))
    assert data.fetch("emnist-letters", tmp_path) == tmp_path / "emnist"


def test_emnist_wrong_label_and_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small(monkeypatch, "emnist-letters", 5, 2)
    write_emnist(tmp_path / "emnist")
    labels = tmp_path / "emnist" / "emnist-letters-train-labels-idx1-ubyte.gz"
    write_idx(labels, np.array([1, 0, 3, 3, 2], dtype=np.uint8))
    with pytest.raises(DataError) as caught:
        data.load("emnist-letters", tmp_path)
    one_line(caught, str(labels), "label 1 is 0", "delete it and run `fedagg data fetch emnist-letters`")
    write_idx(labels, np.array([1, 3, 3, 2], dtype=np.uint8))
    with pytest.raises(DataError) as caught:
        data.load("emnist-letters", tmp_path)
    one_line(caught, str(labels), "(4,)", "(5,)")
    assert (labels, False) in data.verify("emnist-letters", tmp_path)
    with pytest.raises(DataError, match="damaged"):
        data.fetch("emnist-letters", tmp_path)


def test_missing_file_without_download(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        data.load("mnist", tmp_path, download=False)
    fixes = ("`fedagg data fetch mnist`", "put the file there", "--data-dir")
    one_line(caught, "train-images-idx3-ubyte.gz", str(tmp_path / "mnist"), *fixes)
    assert [right for _, right in data.verify("mnist", tmp_path)] == [False] * 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "words"),
    [(OSError("no\nnetwork"), "could not be downloaded (OSError)"), (ValueError("hash"), "wrong hash")],
)
@pytest.mark.parametrize("name", ["mnist", "cifar10", "emnist-letters"])
def test_missing_file_without_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, error: Exception, words: str
) -> None:
    asked = []

    def retrieve(url: str, *_: object, **__: object) -> str:
        asked.append(url)
        raise error

    monkeypatch.setattr("pooch.retrieve", retrieve)
    with pytest.raises(DataError) as caught:
        data.load(name, tmp_path / "new" / "data")
    one_line(caught, words, sources.SOURCES[name].files[0].name, str(tmp_path), f"fedagg data fetch {name}")
    assert len(asked) == (2 if name == "mnist" else 1)
    assert list(tmp_path.iterdir()) == []  # folders that were made for it are gone, those that were there are not


def test_damaged_files(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(b"short")
    (folder / "test.bin").write_bytes(b"short")
    with pytest.raises(DataError) as caught:
        data.load("cifar100", tmp_path)
    one_line(caught, "train.bin", "damaged", "5 bytes, not 153700000", "delete it and run `fedagg data fetch cifar100`")
    with pytest.raises(DataError) as caught:
        data.fetch("cifar100", tmp_path)
    one_line(caught, "train.bin", "damaged", "delete it")
    assert (folder / "train.bin").read_bytes() == b"short"
    assert [right for _, right in data.verify("cifar100", tmp_path)] == [False, False]


# --- fetching, with a stand-in for the network -----------------------------------------------------------------------


def serve(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> list[str]:
    """pooch.retrieve that copies from this machine and checks the hash as pooch does."""
    asked: list[str] = []

    def retrieve(url: str, known_hash: str, fname: str, path: Path) -> str:
        asked.append(url)
        if url not in files:
            raise OSError("unreachable")
        kind, expected = known_hash.split(":")
        if hashlib.new(kind, files[url].read_bytes()).hexdigest() != expected:
            raise ValueError("hash")
        return str(shutil.copy(files[url], path / fname))

    monkeypatch.setattr("pooch.retrieve", retrieve)
    return asked


def test_fetch_falls_back_to_the_second_mirror_and_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """mnist-mini's files, served as if they were MNIST's."""
    mini = data.fetch("mnist-mini")
    source = sources.SOURCES["mnist"]
    monkeypatch.setitem(sources.SOURCES, "mnist", dataclasses.replace(source, files=sources.SOURCES["mnist-mini"].files))
    asked = serve(monkeypatch, {source.mirrors[1] + file.name: mini / file.name for file in source.files})
    loaded = data.load("mnist", tmp_path)
    assert (len(loaded), loaded.name) == (6000, "mnist")
    assert len(asked) == 8
    (tmp_path / "mnist" / source.files[3].name).unlink()
    assert data.fetch("mnist", tmp_path) == tmp_path / "mnist"
    assert len(asked) == 10
    assert data.load("mnist", tmp_path, download=False).y_test.equal(loaded.y_test)
    assert sorted(path.name for path in (tmp_path / "mnist").iterdir()) == sorted(file.name for file in source.files)
    assert all(right for _, right in data.verify("mnist", tmp_path))


def tiny_cifar(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """CIFAR-100 with two training records and one test record."""
    contents = {"train.bin": bytes([1, 2]) + bytes(3072) + bytes([3, 4]) + bytes(3072), "test.bin": bytes(3074)}
    files = tuple(
        sources.File(name, (len(content) // 3074, 3074), len(content), hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    )
    monkeypatch.setitem(sources.SOURCES, "cifar100", dataclasses.replace(sources.SOURCES["cifar100"], files=files))
    return contents


def write_tar(path: Path, members: dict[str, bytes | str]) -> None:
    """A tar of files (bytes) and symbolic links (str)."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def serve_archive(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    source = sources.SOURCES[name]
    assert source.archive is not None
    pinned = dataclasses.replace(source.archive, hash="md5:" + hashlib.md5(path.read_bytes()).hexdigest())
    monkeypatch.setitem(sources.SOURCES, name, dataclasses.replace(source, archive=pinned))
    serve(monkeypatch, {pinned.url: path})


def test_fetch_takes_only_the_expected_members_of_a_tar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    contents = tiny_cifar(monkeypatch)
    hostile = {"../escaped": b"x", "/tmp/escaped": b"x", "cifar-100-binary/../../escaped": b"x", "link": "/etc"}
    archive = tmp_path / "a.tar.gz"
    write_tar(archive, {**hostile, **{f"cifar-100-binary/{name}": content for name, content in contents.items()}})
    serve_archive(monkeypatch, "cifar100", archive)
    made = data.load("cifar100", tmp_path / "data")
    assert made.y_train.tolist() == [2, 4]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "a.tar.gz",
        "data/cifar-100-binary/test.bin",
        "data/cifar-100-binary/train.bin",
    ]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("/etc/hostname", "not a plain file"),
        ("../../outside", "not a plain file"),
        (b"short", "5 bytes in the archive"),
        (bytes(6148), "not what was published"),
        (None, "not the expected archive"),
    ],
)
def test_fetch_refuses_wrong_members(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, train: bytes | str | None, words: str
) -> None:
    contents = tiny_cifar(monkeypatch)
    members: dict[str, bytes | str] = {"cifar-100-binary/test.bin": contents["test.bin"]}
    if train is not None:
        members["cifar-100-binary/train.bin"] = train
    write_tar(tmp_path / "a.tar.gz", members)
    serve_archive(monkeypatch, "cifar100", tmp_path / "a.tar.gz")
    with pytest.raises(DataError) as caught:
        data.fetch("cifar100", tmp_path / "data")
    one_line(caught, words)
    assert [path for path in (tmp_path / "data").rglob("*") if path.is_file() or path.is_symlink()] == []


def test_fetch_emnist_from_its_zip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small(monkeypatch, "emnist-letters", 5, 2)
    write_emnist(tmp_path / "written")
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        archive.writestr("../escaped", b"x")
        archive.writestr("gzip/../../escaped", b"x")
        archive.writestr("gzip/emnist-balanced-train-images-idx3-ubyte.gz", b"x")
        for path in sorted((tmp_path / "written").iterdir()):
            archive.write(path, f"gzip/{path.name}")
    serve_archive(monkeypatch, "emnist-letters", tmp_path / "gzip.zip")
    assert len(data.load("emnist-letters", tmp_path / "data")) == 5
    names = sorted(path.name for path in (tmp_path / "data").rglob("*") if path.is_file())
    assert names == sorted(path.name for path in (tmp_path / "written").iterdir())
    assert not (tmp_path / "escaped").exists()


def test_a_file_that_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    file = sources.File("train.bin", (1, 1))
    for content in (b"", b"nonsense" * 200, gzip.compress(b"nonsense")):
        (tmp_path / "a.tar.gz").write_bytes(content)
        with pytest.raises(DataError) as caught:
            sources.extract(tmp_path / "a.tar.gz", "folder", [file], tmp_path)
        one_line(caught, "a.tar.gz")


def test_importing_needs_only_torch_and_numpy() -> None:
    """The downloader and its kin are imported where they are used, so that importing stays light."""
    package = Path(data.__file__).parent
    for path in [*package.glob("*.py"), package.parent / "partition.py"]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {module.split(".")[0] for module in modules}
            assert roots <= {"torch", "numpy", "fedagg", *sys.stdlib_module_names}, path


def test_held_back_samples_take_the_place_of_the_test_set() -> None:
    x, y = torch.arange(50.0)[:, None], torch.arange(50) % 5
    made = Dataset(x, y, -x, y)
    split = made.held_back(0.2, seed=3)
    assert (len(split), len(split.x_test)) == (40, 10)
    assert (
        sorted([*split.x_train[:, 0].tolist(), *split.x_test[:, 0].tolist()]) == x[:, 0].tolist()
    )  # each sample once, none of the test set's
    assert torch.equal(split.y_test, split.x_test[:, 0].long() % 5)
    assert torch.equal(split.y_train, split.x_train[:, 0].long() % 5)
    assert torch.equal(split.x_test, made.held_back(0.2, seed=3).x_test)
    assert not torch.equal(split.x_test, made.held_back(0.2, seed=4).x_test)
    with pytest.raises(SettingError, match=r"validation = 0\.001"):
        made.held_back(0.001)


def test_a_run_reports_on_what_was_held_back() -> None:
    import fedagg

    wrong = Dataset(
        torch.eye(4).repeat(25, 1), torch.arange(100) % 4, torch.eye(4), torch.tensor([1, 2, 3, 0])
    )  # a test set of false labels
    common = {"data": wrong, "clients": 4, "participation": 1.0, "rounds": 3, "lr": 0.5, "batch_size": 5}
    assert fedagg.run(**common).accuracy == 0.0
    found = fedagg.run(**common, validation=0.2)
    assert found.accuracy == 1.0
    assert found.summary()["validation"] == 0.2
    with pytest.raises(SettingError, match="validation"):
        fedagg.run(data=wrong, parts=[range(50), range(50, 100)], validation=0.2)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (np.zeros(2), r"x_train = \(2,\): .*x.reshape\(-1, 1\)"),
        (np.array([["1", "2"], ["3", "4"]]), r"x.astype\('float32'\)"),
        ([[1.0], [2.0]], r"x_train = 'list': .*np.asarray"),
    ],
)
def test_samples_of_other_kinds_are_told_how_to_become_numbers(samples: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Dataset(samples, np.array([0, 1]), np.zeros((1, 2)), np.array([1]))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array(["cat", "dog"]), r"np.unique"),
        (np.array(["cat", "dog"], dtype=object), r"np.unique"),
        (np.eye(2), r"y.argmax\(1\)"),
        (np.array([-1, 1]), r"y_train\[0\] = -1: labels must be from 0 up"),
        (np.array([0.5, 1.5]), r"classes, not quantities"),
    ],
)
def test_labels_of_other_kinds_are_told_how_to_become_classes(labels: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Dataset(np.zeros((2, 3)), labels, np.zeros((1, 3)), np.array([1]))
