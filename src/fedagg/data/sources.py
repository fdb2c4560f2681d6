"""Where the named datasets come from: their files, how they are downloaded, and how damage is detected.

Files keep their publishers' layout. Their hashes are checked after download, and again whenever they are read. This takes half a
second for CIFAR-10, and ensures that a flipped byte is never trained on.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from fedagg.data import natural
from fedagg.data.cifar import PIXELS, read_cifar
from fedagg.data.idx import read_idx
from fedagg.data.natural import Read
from fedagg.errors import DataError, SettingError, unknown

Where = str | os.PathLike[str] | None
Samples = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

_HERE = Path(__file__).resolve().parent
_MEMBER_LIMIT = 1 << 30


@dataclass(frozen=True)
class File:
    """One file of a dataset. `plain_sha256` is for the same file without gz, which is accepted too."""

    name: str
    shape: tuple[int, ...]
    size: int | None = None
    sha256: str | None = None
    plain_sha256: str | None = None


@dataclass(frozen=True)
class Archive:
    """A publisher's archive; `folder` is the folder within it that has the wanted files."""

    url: str
    hash: str
    folder: str


@dataclass(frozen=True)
class Source:
    """A named dataset: training files before test files, and for IDX images before labels.

    A set made from other files has a `reader`, which is given their paths (only the folder if their names are not fixed) and the
    content of the set that it builds `on`. `users` says that it gives the user of every training sample, `how` says where to get
    its files.
    """

    folder: str
    classes: int
    files: tuple[File, ...] = ()
    mirrors: tuple[str, ...] = ()
    archive: Archive | None = None
    first_label: int = 0
    transposed: bool = False
    reader: Callable[[Sequence[Path], Read | None], Read] | None = None
    on: str | None = None
    users: bool = False
    how: str = ""


def _idx(prefix: str, train: int, test: int, *pins: tuple[int, str, str | None]) -> tuple[File, ...]:
    """The four files of an MNIST-like dataset, with (size, SHA-256, SHA-256 without gz) of each, if known."""
    names = (
        (f"{prefix}train-images-idx3-ubyte.gz", (train, 28, 28)),
        (f"{prefix}train-labels-idx1-ubyte.gz", (train,)),
        (f"{prefix}{'test' if prefix else 't10k'}-images-idx3-ubyte.gz", (test, 28, 28)),
        (f"{prefix}{'test' if prefix else 't10k'}-labels-idx1-ubyte.gz", (test,)),
    )
    if not pins:
        return tuple(File(name, shape) for name, shape in names)
    return tuple(File(name, shape, *pin) for (name, shape), pin in zip(names, pins, strict=True))


def _bin(labels: int, *rows: tuple[str, int, str]) -> tuple[File, ...]:
    length = labels + PIXELS
    return tuple(File(name, (count, length), count * length, sha256) for name, count, sha256 in rows)


SOURCES = {
    "mnist-mini": Source(
        folder="mnist-mini",
        classes=10,
        files=_idx(
            "",
            6_000,
            1_000,
            (969054, "35e7303648013d2f21d8756301af3b6a705acf815572e29a880c850a77ae09a6", None),
            (3072, "71ee4db908a22372c87d88857b408f91e2ff3db4fc058ef96d835b0908e44536", None),
            (163222, "515f438c3295901eeb1541462653753bd47ece531e8e50b9f38cddbc546688b7", None),
            (521, "4620938512eee1e8cc81bc908b08535f1a3e65a8e781ceaebbb8564dec1ef4b2", None),
        ),
    ),
    "mnist": Source(
        folder="mnist",
        classes=10,
        files=_idx(
            "",
            60_000,
            10_000,
            (
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            ),
            (
                28881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            ),
            (
                1648877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            ),
            (
                4542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
    ),
    # The hashes of the single letters files are not known here: they are verified through the archive's MD5 and, once extracted,
    # through their sample counts.
    "emnist-letters": Source(
        folder="emnist",
        classes=26,
        files=_idx("emnist-letters-", 124_800, 20_800),
        archive=Archive("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "md5:58c8d27c78d21e728a6bc7b3cc06412e", "gzip"),
        first_label=1,
        transposed=True,
    ),
    "cifar10": Source(
        folder="cifar-10-batches-bin",
        classes=10,
        files=_bin(
            1,
            ("data_batch_1.bin", 10_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            ("data_batch_2.bin", 10_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            ("data_batch_3.bin", 10_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            ("data_batch_4.bin", 10_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            ("data_batch_5.bin", 10_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            ("test_batch.bin", 10_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        ),
        archive=Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d13530",
            "cifar-10-batches-bin",
        ),
    ),
    "cifar100": Source(
        folder="cifar-100-binary",
        classes=100,
        files=_bin(
            2,
            ("train.bin", 50_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
            ("test.bin", 10_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
        ),
        archive=Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "md5:03b5dce01913d631647c71ecec9e9cb8",
            "cifar-100-binary",
        ),
    ),
    # Sets that give the user of every training sample.
    "mnist-writers": Source(
        folder="qmnist",
        classes=10,
        files=(
            File(
                "qmnist-train-labels-idx2-int.gz",
                (60_000, 8),
                463024,
                "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f",
            ),
        ),
        mirrors=("https://raw.githubusercontent.com/facebookresearch/qmnist/master/",),
        reader=natural.writers,
        on="mnist",
        users=True,
    ),
    "hapt": Source(
        folder="hapt",
        classes=12,
        files=(
            File(
                "hapt_raw_by_user.npz",
                (1_122_772, 6),
                14707687,
                "6b421858fc8e367011bff5c5ebf2e8d1b427e74147f622a1b194390a7478212f",
            ),
        ),
        reader=natural.postures,
        users=True,
        how="put the raw signals there, as `docs/your-own-data.md` says",
    ),
    # UCI publishes no hashes: these files are checked by their sizes and content.
    "uci-har": Source(
        folder="UCI HAR Dataset",
        classes=6,
        files=(
            File("train/X_train.txt", (7352, 561), 66006256),
            File("train/y_train.txt", (7352, 1), 14704),
            File("train/subject_train.txt", (7352, 1)),
            File("test/X_test.txt", (2947, 561), 26458166),
            File("test/y_test.txt", (2947, 1), 5894),
        ),
        reader=natural.activities,
        users=True,
        how="unpack `UCI HAR Dataset.zip` of https://archive.ics.uci.edu/dataset/240 in the data folder",
    ),
    "femnist": Source(
        folder="femnist",
        classes=62,
        reader=natural.digits_of_leaf,
        users=True,
        how="make it with LEAF's data/femnist/preprocess.sh, and put its folders train and test there",
    ),
    "shakespeare": Source(
        folder="shakespeare",
        classes=natural.VOCABULARY,
        reader=natural.text_of_leaf,
        users=True,
        how="make it with LEAF's data/shakespeare/preprocess.sh, and put its folders train and test there",
    ),
    "shakespeare-roles": Source(
        folder="shakespeare",
        classes=natural.VOCABULARY,
        files=(File("roles.json.gz", (982,), 1673932, "3c130c69b4fc47aa5a27035085af36dfaf87cc1d39edbf924c501c67d2d14b36"),),
        reader=natural.roles,
        users=True,
        how="put the speeches there, as `docs/your-own-data.md` says",
    ),
    # EMNIST's byclass and bymerge test parts together, letters only: not the official split of letters.
    "emnist-letters-union": Source(
        folder="emnist-letters-union",
        classes=26,
        files=(
            File(
                "emnist_letters26_union.npz",
                (108_935, 28, 28),
                27809535,
                "acad2776092211d2fc0a79c3feffd4dff29ef047fd68b709bf1124de3dc67d6e",
            ),
        ),
        reader=natural.letters,
        how="put the letters there, as `docs/your-own-data.md` says",
    ),
}


def names() -> list[str]:
    """The names of the datasets that `load` knows, the embedded one first."""
    return list(SOURCES)


def where(data_dir: Where = None) -> Path:
    """The folder of downloaded data: the argument, else the environment variable FEDAGG_DATA, else the user's cache."""
    chosen = data_dir or os.environ.get("FEDAGG_DATA")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("fedagg")


def fetch(name: str, data_dir: Where = None) -> Path:
    """Download what is missing, check the hash of every file, and return the folder.

    An existing wrong file is not overwritten, because it is not ours: it is an error that says to delete it.
    """
    source = _source(name)
    folder = _folder(name, data_dir)
    if source.on:
        fetch(source.on, data_dir)
    if not source.files and not folder.is_dir():
        raise DataError(_missing(name, folder, "is missing"))
    for path in _paths(source, folder):
        if os.path.isfile(path) and not _right(source, path):
            raise DataError(_damaged(name, path, "its content is not what was published"))
    _download(name, folder)
    return folder


def verify(name: str, data_dir: Where = None) -> list[tuple[Path, bool]]:
    """Every file of the dataset, and whether it exists with the published content, by its full hash."""
    source = _source(name)
    checked = verify(source.on, data_dir) if source.on else []
    if not source.files:  # files without fixed names, such as a user's own split: reading them is the check
        return checked + [(path, _reads(name, data_dir)) for path in [_folder(name, data_dir)]]
    paths = _paths(source, _folder(name, data_dir))
    return checked + [(path, os.path.isfile(path) and _right(source, path)) for path in paths]


def _reads(name: str, data_dir: Where) -> bool:
    try:
        read(name, data_dir, download=False)
    except DataError:
        return False
    return True


def read(name: str, data_dir: Where = None, download: bool = True) -> Read:
    """Training and test samples as published: bytes and labels, upright and with labels from 0."""
    source = _source(name)
    folder = _folder(name, data_dir)
    on = read(source.on, data_dir, download) if source.on else None
    if not source.files and not folder.is_dir():
        raise DataError(_missing(name, folder, "is missing"))
    paths = _paths(source, folder)
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing and not download:
        raise DataError(_missing(name, missing[0], "is missing"))
    if missing:
        _download(name, folder)
        paths = _paths(source, folder)
    for path in paths:
        expected = _file(source, path)
        if path.name == Path(expected.name).name and expected.size not in (None, path.stat().st_size):
            raise DataError(_damaged(name, path, f"{path.stat().st_size} bytes, not {expected.size}"))
    with ThreadPoolExecutor(4) as pool:  # hashing lets other threads run
        for path, right in zip(paths, pool.map(lambda path: _untouched(source, path), paths), strict=True):
            if not right:
                raise DataError(_damaged(name, path, "its content is not what was published"))
    try:
        if source.reader is not None:
            return source.reader(paths or [folder], on)
        if paths[0].suffix == ".bin":
            return Read(*_read_bin(source, paths[:-1]), *_read_bin(source, paths[-1:]))
        return Read(*_read_idx(source, *paths[:2]), *_read_idx(source, *paths[2:]))
    except DataError as error:
        raise DataError(f"{error}: {_again(name)}") from error


def _source(name: str) -> Source:
    if name == "custom":
        raise SettingError("dataset", name, "give your own data from Python as data=fedagg.Dataset(...)")
    if name not in SOURCES:
        raise unknown("dataset", name, SOURCES)
    return SOURCES[name]


def _folder(name: str, data_dir: Where) -> Path:
    """The set's folder: mnist-mini is part of the package, the others are in the data directory."""
    return (_HERE if name == "mnist-mini" else where(data_dir)) / SOURCES[name].folder


def _paths(source: Source, folder: Path) -> list[Path]:
    """The path of each file; without gz if only that one exists."""
    paths = [folder / file.name for file in source.files]
    return [
        path.with_suffix("") if path.suffix == ".gz" and not os.path.isfile(path) and os.path.isfile(path.with_suffix("")) else path
        for path in paths
    ]


def _file(source: Source, path: Path) -> File:
    return next(file for file in source.files if path.name in (Path(file.name).name, Path(file.name).name.removesuffix(".gz")))


def _right(source: Source, path: Path) -> bool:
    """Whether a file has the published content: by its hash, or by its structure if no hash is known."""
    file = _file(source, path)
    try:
        if _expected(file, path) is None:
            if source.reader is None:
                return read_idx(path, math.prod(file.shape)).shape == file.shape
            return file.size in (None, path.stat().st_size)
        return _untouched(source, path)
    except DataError:
        return False


def _untouched(source: Source, path: Path) -> bool:
    """Whether a file has the published hash, if one is known; its structure is checked when it is read."""
    expected = _expected(_file(source, path), path)
    try:
        with path.open("rb") as stream:
            return expected is None or hashlib.file_digest(stream, "sha256").hexdigest() == expected
    except OSError:
        return False


def _expected(file: File, path: Path) -> str | None:
    return file.sha256 if path.name == Path(file.name).name else file.plain_sha256


def _download(name: str, folder: Path) -> None:
    """Download every missing file; each is checked in a temporary place and only then moved."""
    source = SOURCES[name]
    missing = [path for path in _paths(source, folder) if not os.path.isfile(path)]
    if not missing:
        return
    if source.archive is None and not source.mirrors:
        raise DataError(_missing(name, missing[0], "is missing"))
    new = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
            scratch = Path(temporary)
            if source.archive is None:
                for path in missing:
                    sha256 = f"sha256:{_file(source, path).sha256}"
                    urls = [mirror + path.name for mirror in source.mirrors]
                    _place(name, _retrieve(urls, sha256, scratch), path)
            else:
                archive = _retrieve([source.archive.url], source.archive.hash, scratch)
                files = [_file(source, path) for path in missing]
                for path, extracted in zip(missing, extract(archive, source.archive.folder, files, scratch), strict=True):
                    _place(name, extracted, path)
    except (OSError, ValueError) as error:
        # ValueError is how pooch reports a wrong hash; every failure of the network is an OSError.
        why = "was downloaded with a wrong hash" if isinstance(error, ValueError) else "could not be downloaded"
        raise DataError(_missing(name, missing[0], f"is missing and {why} ({type(error).__name__})")) from error
    finally:
        for path in new:  # the inner ones first; non-empty ones stay
            with suppress(OSError):
                path.rmdir()


def _retrieve(urls: Sequence[str], known_hash: str, scratch: Path) -> Path:
    """Download from the first mirror that has the file; if all fail, raise the last one's error."""
    import pooch

    for url in urls[:-1]:
        try:
            return Path(str(pooch.retrieve(url, known_hash, fname=url.rsplit("/", 1)[-1], path=scratch)))
        except (OSError, ValueError):
            continue
    return Path(str(pooch.retrieve(urls[-1], known_hash, fname=urls[-1].rsplit("/", 1)[-1], path=scratch)))


def _place(name: str, new: Path, path: Path) -> None:
    if not _right(SOURCES[name], new):
        raise DataError(_missing(name, path, "was downloaded, but its content is not what was published"))
    os.replace(new, path)


def extract(archive: Path, folder: str, wanted: Sequence[File], into: Path) -> list[Path]:
    """Extract the wanted files, and nothing else, from that folder of a tar or zip.

    Members are found by their exact names and copied to our own names, so no path, link or device in the archive can lead out of
    `into`.
    """
    targets = []
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                for file in wanted:
                    info = zipped.getinfo(f"{folder}/{file.name}")
                    with zipped.open(info) as stream:
                        targets.append(_copy(stream, info.file_size, file, into))
        else:
            with tarfile.open(archive) as tarred:
                for file in wanted:
                    member = tarred.getmember(f"{folder}/{file.name}")
                    contents = tarred.extractfile(member) if member.isreg() else None
                    if contents is None:
                        raise DataError(f"{archive.name}: its {member.name} is not a plain file; fetch it again")
                    with contents:
                        targets.append(_copy(contents, member.size, file, into))
    except DataError:
        raise
    except Exception as error:  # the readers of tar and zip, and their decompressors, raise many kinds of errors
        why = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{archive.name}: not the expected archive ({why}); fetch it again") from error
    return targets


def _copy(stream: IO[bytes], size: int, file: File, into: Path) -> Path:
    if size > _MEMBER_LIMIT or file.size not in (None, size):
        raise DataError(f"{file.name}: {size} bytes in the archive, which is not its size; fetch it again")
    target = into / file.name
    with target.open("wb") as copy:
        shutil.copyfileobj(stream, copy, 1 << 20)
    return target


def _read_bin(source: Source, paths: Sequence[Path]) -> Samples:
    parts = [read_cifar(path, coarse=source.classes == 100) for path in paths]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def _read_idx(source: Source, images_path: Path, labels_path: Path) -> Samples:
    images, stored = (read_idx(p, math.prod(_file(source, p).shape)) for p in (images_path, labels_path))
    for path, array in ((images_path, images), (labels_path, stored)):
        if array.shape != _file(source, path).shape:
            raise DataError(f"{path}: holds {array.shape}, not {_file(source, path).shape}")
    labels = stored.astype(np.int64) - source.first_label
    wrong = np.flatnonzero((labels < 0) | (labels >= source.classes))
    if wrong.size:
        raise DataError(f"{labels_path}: label {wrong[0]} is {stored[wrong[0]]}, out of range")
    if source.transposed:
        images = np.ascontiguousarray(images.transpose(0, 2, 1))
    return images[:, None], labels


def _missing(name: str, path: Path, what: str) -> str:
    if name == "mnist-mini":
        return f"{name}: {path.name} {what}; looked in {path.parent}: {_again(name)}"
    if SOURCES[name].how:
        return f"{name}: {path.name} {what}; looked in {path.parent}: {SOURCES[name].how}, or name the data folder with --data-dir"
    return (
        f"{name}: {path.name} {what}; looked in {path.parent}: run `fedagg data fetch {name}` with a network, "
        "put the file there, or name the folder that has it with --data-dir"
    )


def _damaged(name: str, path: Path, why: str) -> str:
    return f"{path}: damaged ({why}): {_again(name)}"


def _again(name: str) -> str:
    if SOURCES[name].how:
        return SOURCES[name].how
    return "install fedagg again" if name == "mnist-mini" else f"delete it and run `fedagg data fetch {name}`"
