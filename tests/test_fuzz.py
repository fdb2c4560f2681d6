"""Bad input at scale: every reader either works or says what is wrong in one line. Never a traceback, a hang, a
partial file.

FEDAGG_FUZZ_CASES=100000 for the long mode: as many generated cases, shared out over the readers below.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import resource
import shutil
import signal
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_tensors

import fedagg
import tiny
from fedagg import checkpoint, config, partition
from fedagg.checkpoint import Checkpoint
from fedagg.cli.options import methods
from fedagg.config import PRESETS, SETTINGS, Config
from fedagg.data import sources
from fedagg.data.cifar import read_cifar
from fedagg.data.idx import read_idx
from fedagg.errors import FedaggError

CASES = int(os.environ.get("FEDAGG_FUZZ_CASES", "600"))
SHARES = {
    "bytes as settings": 0.1,
    "settings": 0.15,
    "command lines": 0.05,
    "idx": 0.2,
    "cifar": 0.1,
    "labels": 0.15,
    "archives": 0.05,
    "checkpoints": 0.1,
    "resumed": 0.1,
}
SECONDS = 30  # a case that takes longer hangs
counted: dict[str, int] = dict.fromkeys(SHARES, 0)


def cases(name: str) -> Callable[[Any], Any]:
    """The settings of a fuzz test: its share of the cases, the same ones every time in the quick mode."""
    return settings(
        max_examples=max(20, int(CASES * SHARES[name])),
        deadline=None,
        derandomize=CASES <= 2000,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def calm(name: str, count: int = 1) -> Iterator[None]:
    """Within the block, only readable errors may happen, and soon."""

    def hangs(*_: Any) -> None:
        raise AssertionError(f"over {SECONDS} seconds")

    counted[name] += count
    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    except FedaggError as error:
        text = str(error)
        assert text.strip()
        assert "\n" not in text
        assert len(text) < 2000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True, scope="module")
def memory_stays_bounded() -> Iterator[None]:
    """Whatever sizes the inputs declare: some hundred megabytes are what the tests themselves need."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@st.composite
def altered(draw: st.DrawFn, whole: bytes) -> bytes:
    """A good file, damaged: cut, lengthened, with bytes changed, parts repeated or exchanged for noise."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(["cut", "byte", "noise", "repeat", "end", "insert", "drop"]))
        if kind == "cut":
            del content[at:]
        elif kind == "byte" and content:
            content[at] = draw(st.integers(0, 255))
        elif kind == "noise":
            noise = draw(st.binary(min_size=1, max_size=12))
            content[at : at + len(noise)] = noise
        elif kind == "repeat":
            content += content[at : at + 64]
        elif kind == "end":
            content += draw(st.binary(max_size=20))
        elif kind == "insert":
            content[at:at] = draw(st.binary(max_size=8))
        else:
            del content[at : at + draw(st.integers(1, 40))]
    return bytes(content)


# --- settings -------------------------------------------------------------------------------------------------------

GOOD_TOML = (Config(algorithm="scaffold", partition="shards").toml() + 'preset = "mnist-cnn"\n').encode()
WORDS = [
    "fedagg",
    "fedavg",
    "mnist",
    "linear",
    "iid",
    "inf",
    "nan",
    "auto",
    "cuda:99",
    "median",
    "-1",
    "0",
    "1e400",
    "\x00",
    "é",
    "x" * 300,
]
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.integers(), st.integers(-3, 200), st.floats(), st.booleans(), st.text(max_size=8), st.sampled_from(WORDS),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=1),
    st.dates(), st.none(),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from([*SETTINGS, *methods(), "preset"]), st.text(max_size=6))


def usable(made: Config) -> None:
    """A configuration that was accepted is whole: it can be written, read back, and is the same."""
    assert config.make(config.tomllib.loads(made.toml())) == made
    assert made.per_round >= 1


@cases("bytes as settings")
@given(
    st.one_of(
        st.binary(max_size=80),
        altered(GOOD_TOML),
        st.sampled_from([b"a=" + b"9" * 5000, b"a=" + b"[" * 9000, b"a.b.c=1", b"a={"]),
    )
)
def test_any_bytes_as_a_file_of_settings(place: Path, content: bytes) -> None:
    path = place / "settings.toml"
    path.write_bytes(content)
    with calm("bytes as settings"):
        usable(config.resolve({}, path))


@cases("settings")
@given(
    st.dictionaries(KEYS, VALUES, max_size=4),
    st.dictionaries(KEYS, VALUES, max_size=2),
    st.one_of(st.none(), st.sampled_from([*PRESETS, "none"])),
)
def test_any_values_as_settings(place: Path, in_file: dict[str, Any], given: dict[str, Any], preset: str | None) -> None:
    path = place / "values.toml"
    path.write_text(tomli_w.dumps({k: v for k, v in in_file.items() if v is not None}), encoding="utf-8", errors="replace")
    with calm("settings"):
        usable(config.resolve(given, path, preset))
    with calm("settings", count=0):
        usable(config.make(given))


FLAGS = [f"--{name.replace('_', '-')}" for name in (*SETTINGS, *methods())]
ARGUMENTS = st.one_of(
    st.sampled_from(
        [
            *FLAGS,
            "--out",
            "--resume",
            "--json",
            "--quiet",
            "--preset",
            "--no-normalize",
            "-h",
            "--help",
            "--",
            "-",
            "--version",
        ]
    ),
    st.sampled_from(["run", "compare", "list", "data", "where", "verify", "settings.toml", *WORDS[:-4], "fedagg,fedavg", ","]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=6),
    st.integers().map(str),
)


@cases("command lines")
@given(st.sampled_from(["run", "run", "run", "compare", "data", ""]), st.lists(ARGUMENTS, max_size=6))
def test_any_command_line(place: Path, command: str, arguments: list[str]) -> None:
    """Parsing and settings only: training is put aside, and `data fetch` would go to the network."""
    from fedagg import cli

    def stop(chosen: Config, **_: Any) -> None:
        usable(chosen)
        raise FedaggError("this is where training would begin")

    folder = place / "here"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "settings.toml").write_bytes(GOOD_TOML)
    said, printed = io.StringIO(), io.StringIO()
    line = [part for part in (command, *arguments) if part not in ("", "fetch", "reproduce", "plot", "flower")]
    with pytest.MonkeyPatch.context() as patch, calm("command lines"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(fedagg, "run", stop)
        patch.setattr(fedagg.data, "load", lambda *_: None)
        patch.setattr(cli, "err", cli.err.__class__(file=said))
        patch.chdir(folder)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as left:
            cli.main(line)
        assert left.value.code in (0, 2), said.getvalue()
    assert "Traceback" not in said.getvalue()
    assert [p.name for p in folder.rglob("*") if p.is_file()] == ["settings.toml"]


# --- data -----------------------------------------------------------------------------------------------------------

GOOD_IDX = bytes([0, 0, 8, 3, 0, 0, 0, 5, 0, 0, 0, 4, 0, 0, 0, 3]) + bytes(range(60))
SIZES = st.one_of(st.integers(0, 6), st.sampled_from([2**31, 2**32 - 1, 65536, 60_000]))


@st.composite
def idx_files(draw: st.DrawFn) -> bytes:
    dimensions = draw(st.integers(0, 6))
    head = bytes([0, 0, draw(st.sampled_from([8, 8, 8, 9, 13])), draw(st.sampled_from([dimensions, 3, 255]))])
    sizes = b"".join(draw(SIZES).to_bytes(4, "big") for _ in range(dimensions))
    return head + sizes + draw(st.binary(max_size=80))


@cases("idx")
@given(st.one_of(idx_files(), altered(GOOD_IDX), altered(gzip.compress(GOOD_IDX)), st.binary(max_size=60)), st.booleans())
def test_any_bytes_as_idx(place: Path, content: bytes, pack: bool) -> None:
    path = place / "images"
    path.write_bytes(gzip.compress(content, 1) if pack else content)
    with calm("idx"):
        found = read_idx(path)
        assert found.dtype == np.uint8
        assert 1 <= found.ndim <= 4
        assert 0 < found.size <= len(gzip.decompress(path.read_bytes()) if path.read_bytes()[:2] == b"\x1f\x8b" else content)


RECORDS = np.random.default_rng(0).integers(0, 10, (2, 3074)).astype(np.uint8)


@cases("cifar")
@given(st.one_of(altered(RECORDS[:, 1:].tobytes()), altered(RECORDS.tobytes()), st.binary(max_size=40)), st.booleans())
def test_any_bytes_as_cifar(place: Path, content: bytes, coarse: bool) -> None:
    path = place / "batch.bin"
    path.write_bytes(content)
    with calm("cifar"):
        images, labels = read_cifar(path, coarse)
        assert images.shape == (len(labels), 3, 32, 32)
        assert 0 <= labels.min() <= labels.max() < (100 if coarse else 10)


def stored(array: Any) -> bytes:
    made = io.BytesIO()
    np.lib.format.write_array(made, array, allow_pickle=True)
    return made.getvalue()


LABELS = [
    stored(np.arange(5)), stored(np.arange(6).reshape(2, 3)), stored(np.array([1.5])),
    stored(np.array([{"a": 1}], dtype=object)), b'"1\n', b"9" * 5000,
    b"id,label\n1,2\n3,4\n", b"label\n1\n2\n", "label\n１\n".encode(), b"1\n-2\n", b"a,b\n1,2\n", b"\xff\xfe1\n",
    stored(np.arange(5)).replace(b"(5,)", b"(9999999999,)"),
]  # fmt: skip


@cases("labels")
@given(
    st.one_of(st.sampled_from(LABELS), *(altered(content) for content in LABELS), st.binary(max_size=40)),
    st.sampled_from([".csv", ".npy", ".txt"]),
)
def test_any_bytes_as_labels(place: Path, content: bytes, suffix: str) -> None:
    path = place / f"labels{suffix}"
    path.write_bytes(content)
    with calm("labels"):
        found = partition.from_file(path)
        assert found.ndim == 1
        assert found.dtype == np.int64
        assert found.min() >= 0


def archive(kind: str) -> bytes:
    made = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as zipped:
            zipped.writestr("folder/wanted", b"content" * 9)
            zipped.writestr("../outside", b"x")
    else:
        with tarfile.open(fileobj=made, mode=f"w:{kind}") as tarred:
            for name in ("folder/wanted", "../outside"):
                member = tarfile.TarInfo(name)
                member.size = 63
                tarred.addfile(member, io.BytesIO(b"content" * 9))
    return made.getvalue()


@cases("archives")
@given(st.one_of(*(altered(archive(kind)) for kind in ("zip", "", "gz")), st.binary(max_size=60)))
def test_any_bytes_as_an_archive(place: Path, content: bytes) -> None:
    folder = place / "archives" / "into"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder.parent / "archive").write_bytes(content)
    with calm("archives"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sources.extract(folder.parent / "archive", "folder", [sources.File("wanted", (63,), 63)], folder)
    assert {path.name for path in folder.rglob("*")} <= {"wanted"}
    assert {path.name for path in folder.parent.iterdir()} == {"archive", "into"}


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    tiny.job(out=place / "run", rounds=2, checkpoint_every=1, algorithm="scaffold")
    return place / "run"


GOOD_TENSORS = save_tensors({"w": torch.arange(4.0), "state/c": torch.zeros(2, 3)})


@cases("checkpoints")
@given(altered(GOOD_TENSORS), st.one_of(st.none(), st.binary(max_size=60)), st.booleans())
def test_any_bytes_as_a_checkpoint(place: Path, tensors: bytes, facts: bytes | None, sealed: bool) -> None:
    """Also with checksums that are right: whatever is in the file, the good one before it is found."""
    folder = place / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint.save(folder, Checkpoint(1, {"w": torch.zeros(1)}, {}))
    known: dict[str, Any] = {"round": 2, "sha256": [checkpoint.hashlib.sha256(tensors).hexdigest() if sealed else ""]}
    (folder / "round-000002.0.safetensors").write_bytes(tensors)
    (folder / "round-000002.json").write_bytes(facts or json.dumps({**known, "self": checkpoint.facts_checksum(known)}).encode())
    with calm("checkpoints"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = checkpoint.latest(folder)
        assert found is not None
        assert found.round == 1 or sealed


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=4), inner, max_size=2))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    nested,
    max_leaves=4,
)


REMEMBERED = ("ids", "rows")  # the second file of a checkpoint holds these


@cases("resumed")
@given(
    st.dictionaries(st.sampled_from(["round", "metrics.jsonl", "clients.jsonl", "seconds", "identity", "other"]), JSON, max_size=3),
    st.dictionaries(
        st.sampled_from(["w", "average", "state/c", *REMEMBERED]),
        st.sampled_from([None, (), (0,), (3,), (2, 83), (2, 2)]),
        max_size=2,
    ),
    st.one_of(st.none(), altered(b'{"round": 1, "accuracy": 0.5}\n{"round": 2, "accuracy": 0.6}\n')),
)
def test_resuming_from_anything(
    place: Path, run: Path, facts: dict[str, Any], tensors: dict[str, Any], record: bytes | None
) -> None:
    """A checkpoint with right checksums and wrong content, and a damaged record."""
    folder = place / "resumed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    path = checkpoint.list_files(folder / "checkpoints")[-1]
    found = checkpoint.load(path)
    sums = []
    for part, old in enumerate([found.tensors, *found.parts]):
        changed = {
            name: None if shape is None else torch.zeros(shape) for name, shape in tensors.items() if part == (name in REMEMBERED)
        }
        packed = save_tensors({name: t for name, t in {**old, **changed}.items() if t is not None})
        path.with_suffix(f".{part}.safetensors").write_bytes(packed)
        sums.append(checkpoint.hashlib.sha256(packed).hexdigest())
    known = {**found.facts, "sha256": sums, **facts}
    path.write_text(json.dumps({**known, "self": checkpoint.facts_checksum(known)}))
    if record is not None:
        (folder / "metrics.jsonl").write_bytes(record)
    with calm("resumed"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = tiny.job(resume=folder, rounds=2, checkpoint_every=1, algorithm="scaffold")
        assert [row["round"] for row in result.history] == [1, 2]
    assert list(folder.rglob(".*.part")) == []


def test_the_cases_were_run() -> None:
    """Last: hypothesis must not have stopped early anywhere."""
    short = {name: number for name, number in counted.items() if 0 < number < int(CASES * SHARES[name])}
    assert short == {}
