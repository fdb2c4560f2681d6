"""What this package never does: unpickle, run what it reads, write outside its folders, keep training data."""

from __future__ import annotations

import _pickle
import ast
import importlib
import io
import pickle
import pkgutil
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedagg
import tiny
from fedagg import partition
from fedagg.data import load, sources
from fedagg.errors import DataError, FedaggError, FedaggWarning

ROOT = Path(fedagg.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(ROOT)], "fedagg."))

FORBIDDEN_IMPORTS = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "jsonpickle",
    "yaml",
}
FORBIDDEN_OF = {
    ("torch", "load"),
    ("torch", "save"),
    ("jit", "load"),
    ("hub", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("os", "system"),
    ("os", "popen"),
}


def refuses_pickles(call: ast.Call) -> bool:
    words = {word.arg: word.value for word in call.keywords}
    said = words.get("allow_pickle")
    return isinstance(said, ast.Constant) and said.value is False


def suspicious(tree: ast.AST) -> list[str]:
    """Every use of something that could run what it reads."""
    found = []
    plain = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and refuses_pickles(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"import {name}" for name in names if name.split(".")[0] in FORBIDDEN_IMPORTS]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in FORBIDDEN_OF and not (node.attr == "load" and owner in ("np", "numpy") and id(node) in plain):
                found.append(f"{owner}.{node.attr}")
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
            builtin = isinstance(called, ast.Name) and name in ("eval", "exec", "compile", "__import__")
            if builtin or name in ("extractall", "unpack_archive", "mktemp"):
                found.append(f"{name}()")
            for word in node.keywords:
                if word.arg in ("allow_pickle", "shell") and not (
                    isinstance(word.value, ast.Constant) and word.value.value is False
                ):
                    found.append(f"{word.arg}=")
                if word.arg == "weights_only":
                    found.append("weights_only=")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_unpickle_or_run_what_it_reads(path: Path) -> None:
    own = (
        ["jit.load"] if (path.parent.name, path.name) == ("fedagg", "export.py") else []
    )  # it reads back what it has just written, and nothing else
    assert suspicious(ast.parse(path.read_text(encoding="utf-8"))) == own


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from cloudpickle import loads", "torch.load(p)", "x = torch.load", "np.load(p)",
     "np.lib.x(p, allow_pickle=True)",
     "eval(s)", "tar.extractall()", "subprocess.run(s, shell=True)", "f(p, allow_pickle=flag)", "torch.jit.load(p)"],
)  # fmt: skip
def test_the_check_itself_sees(text: str) -> None:
    assert suspicious(ast.parse(text))


def test_every_module_is_checked_and_can_be_imported() -> None:
    assert len(MODULES) > 40
    missing: list[str] = []
    for name in MODULES:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing.append(error.name or "")
    assert [name for name in missing if name.startswith("fedagg")] == []  # only optional dependencies may be


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    class Refusing(pickle.Unpickler):  # a class, for torch makes classes of its own from it
        __init__ = refuse

    for module in (pickle, _pickle):
        for name in ("load", "loads"):
            monkeypatch.setattr(module, name, refuse)
        monkeypatch.setattr(module, "Unpickler", Refusing)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(np, "load", refuse)


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize("engine", tiny.ENGINES)
def test_a_run_with_checkpoints_and_resume_unpickles_nothing(tmp_path: Path, engine: str) -> None:
    with pytest.raises(AssertionError, match="unpickled"):
        pickle.loads(pickle.dumps(1))
    load("mnist-mini")
    np.save(tmp_path / "labels.npy", np.arange(9), allow_pickle=False)
    assert len(partition.from_file(tmp_path / "labels.npy")) == 9
    for name in ("scaffold", "fedagg"):
        run = tmp_path / name
        tiny.job(out=run, rounds=2, engine=engine, **tiny.STATEFUL[name])
        tiny.job(resume=run, rounds=3, engine=engine, **tiny.STATEFUL[name])
        load_file(run / "model.safetensors")


def test_a_pickle_in_a_files_place_is_refused_unread(tmp_path: Path) -> None:
    """A bomb: unpickling it would make a file."""

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    bomb = pickle.dumps(Bomb())
    stored = io.BytesIO()
    np.lib.format.write_array(stored, np.array([Bomb()], dtype=object), allow_pickle=True)
    (tmp_path / "labels.npy").write_bytes(stored.getvalue())
    with pytest.raises(DataError):
        partition.from_file(tmp_path / "labels.npy")
    run = tmp_path / "run"
    tiny.job(out=run, rounds=1)
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(bomb)
    with pytest.warns(FedaggWarning) as caught:
        tiny.job(resume=run, rounds=1)
    assert "damaged" in str(caught[0].message)
    (run / "config.toml").write_bytes(bomb)
    with pytest.raises(FedaggError):
        tiny.job(resume=run, rounds=1)
    assert not (tmp_path / "exploded").exists()


# --- archives -------------------------------------------------------------------------------------------------------

ESCAPES = ["../escaped", "/tmp/fedagg-escaped", "folder/../../escaped", "folder/wanted/../../../escaped", "..\\escaped"]


def tarred(path: Path, wanted: tarfile.TarInfo | None) -> None:
    with tarfile.open(path, "w:gz") as made:
        for name in ESCAPES:
            member = tarfile.TarInfo(name)
            member.size = 4
            made.addfile(member, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("folder/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        made.addfile(link)
        if wanted is not None:
            made.addfile(wanted, io.BytesIO(b"good"))


def special(kind: bytes, target: str = "/etc/passwd") -> tarfile.TarInfo:
    member = tarfile.TarInfo("folder/wanted")
    member.type, member.linkname, member.size = kind, target, 4 if kind == tarfile.REGTYPE else 0
    return member


def test_an_archive_cannot_escape(tmp_path: Path) -> None:
    wanted = [sources.File("wanted", (4,), 4)]
    for number, kind in enumerate(("tar", "zip")):
        outer = tmp_path / f"outer{number}"
        into = outer / "into"
        into.mkdir(parents=True)
        path = tmp_path / f"archive.{kind}"
        if kind == "tar":
            tarred(path, special(tarfile.REGTYPE))
        else:
            with zipfile.ZipFile(path, "w") as zipped:
                for name in [*ESCAPES, "folder/wanted"]:
                    zipped.writestr(name, b"good" if name == "folder/wanted" else b"evil")
        assert sources.extract(path, "folder", wanted, into) == [into / "wanted"]
        assert (into / "wanted").read_bytes() == b"good"
        assert [p.name for p in outer.rglob("*")] == ["into", "wanted"]
    assert not Path("/tmp/fedagg-escaped").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_a_link_or_a_device_in_a_files_place_is_refused(tmp_path: Path, kind: bytes) -> None:
    into = tmp_path / "into"
    into.mkdir()
    tarred(tmp_path / "archive.tar.gz", special(kind))
    with pytest.raises(DataError, match=r"not a plain file|not the archive"):
        sources.extract(tmp_path / "archive.tar.gz", "folder", [sources.File("wanted", (4,))], into)
    assert list(into.iterdir()) == []


def test_a_member_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "archive.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("folder/wanted", bytes(50_000_000))
    for file in (sources.File("wanted", (4,), 4), sources.File("wanted", (4,))):
        monkeypatch.setattr(sources, "_MEMBER_LIMIT", 1_000_000)
        with pytest.raises(DataError, match="is not its size"):
            sources.extract(tmp_path / "archive.zip", "folder", [file], tmp_path)
    assert not (tmp_path / "wanted").exists()


# --- the run folder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.STATEFUL)
def test_the_run_folder_never_holds_training_data(tmp_path: Path, name: str) -> None:
    """No sample, nor any half of one, in any file, as float32, float64, or text."""
    tiny.job(out=tmp_path / "run", rounds=3, checkpoint_every=1, **tiny.STATEFUL[name])
    content = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    data = tiny.dataset()
    for sample in torch.cat([data.x_train, data.x_test]).numpy():
        for piece in (sample[:3], sample[3:]):
            assert piece.tobytes() not in content
            assert piece.astype(np.float64).tobytes() not in content
        assert repr(float(sample[0])).encode() not in content


def test_the_run_folder_is_all_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    tiny.job(out="run", rounds=2, checkpoint_every=1, algorithm="feddyn", client_memory="disk")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "temporary"]
    assert list((tmp_path / "temporary").iterdir()) == []
    expected = {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "clients.jsonl",
        "model.safetensors",
        "result.json",
        "checkpoints",
    }
    assert {path.name for path in (tmp_path / "run").iterdir()} == expected
    shutil.rmtree(tmp_path / "run")
