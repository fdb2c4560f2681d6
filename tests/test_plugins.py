"""Plugins from a file, a module or a package are known by name to every command; and some commands need no torch."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import fedagg
import tiny
from fedagg import cli, data, models, partition, plugins, registry, trackers
from fedagg.algorithms import REGISTRY
from fedagg.config import make
from fedagg.errors import FedaggWarning, SettingError
from fedagg.reproduce.results import Store

REGISTRIES = (REGISTRY, data.REGISTRY, models.ARCHITECTURES, partition.REGISTRY, trackers.TRACKERS)
SHORT = ["--rounds", "1", "--clients", "4", "--participation", "0.5", "--epochs", "1", "--quiet"]
OWN = '''
"""A plugin with one of everything."""
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedagg import Algorithm, Dataset, data, models, option, partition, register, trackers


@register("own-method")
@dataclass
class Own(Algorithm):
    """FedAvg at a share of the rate."""

    share: float = option(0.5, "share of the rate", gt=0, le=1)

    def work(self, clients):
        work = super().work(clients)
        return replace(work, rate=self.share * work.rate)


@data.register("own-data")
def blobs():
    x = torch.arange(80.0).reshape(40, 2) / 80
    return Dataset(x, torch.arange(40) % 2, x, torch.arange(40) % 2)


@models.register("own-network")
def network(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 3), nn.Tanh(), nn.Linear(3, classes))


@partition.register("own-split")
def halves(labels, clients, seed):
    return np.array_split(np.argsort(labels, kind="stable"), clients)


@trackers.register("own-tracker")
class Notes:
    def __init__(self, folder):
        self.path = Path(folder) / "notes.txt"

    def started(self, config, done):
        self.path.write_text(config.algorithm)

    def round_done(self, row): ...

    def finished(self, result): ...
'''


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = [dict(one) for one in REGISTRIES]
    modules, loaded = set(sys.modules), dict(plugins._loaded)
    registry.installed.cache_clear()
    yield
    for one, known in zip(REGISTRIES, before, strict=True):
        one.clear()
        one.update(known)  # type: ignore[arg-type]
    for name in set(sys.modules) - modules:
        if name in plugins._loaded.values() or name.startswith("own_"):
            del sys.modules[name]
    plugins._loaded.clear()
    plugins._loaded.update(loaded)
    registry.installed.cache_clear()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own_plugin.py"
    path.write_text(OWN)
    return path


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


ALL = ["--algorithm", "own-method", "--dataset", "own-data", "--model", "own-network", "--partition", "own-split"]


def test_a_run_made_only_of_registered_parts(own: Path) -> None:
    line = ["run", *ALL, "--plugin", "own_plugin.py", "--share", "0.25", "--track", "own-tracker", *SHORT]
    assert call(*line, "--out", "a") == 0
    recorded = tomllib.loads(Path("a/config.toml").read_text())
    assert (recorded["plugin"], recorded["share"], recorded["partition"]) == ([str(own)], 0.25, "own-split")
    assert Path("a/notes.txt").read_text() == "own-method"
    row = json.loads(Path("a/metrics.jsonl").read_text())
    assert row["rate_mean"] == pytest.approx([0.0025])
    assert row["participants"] == 2
    assert call("run", "a/config.toml", "--share", "0.25", "--quiet", "--out", "b") == 0
    assert tiny.same_run(Path("a"), Path("b"))
    assert call("run", "--resume", "a", "--rounds", "2", "--quiet") == 0


def test_several_plugins_with_commas(own: Path) -> None:
    Path("other_plugin.py").write_text("")
    both = (str(own), str(own.with_name("other_plugin.py")))
    assert plugins.parse_names("own_plugin.py, other_plugin.py") == both
    assert plugins.parse_names(["own_plugin.py,other_plugin.py"]) == both


def test_a_script_may_name_itself(own: Path) -> None:
    text = """
import fedagg
@fedagg.register("selfish")
class Selfish(fedagg.Algorithm): ...
if __name__ == "__main__":
    fedagg.run(algorithm="selfish", plugin=__file__, rounds=1, clients=20, progress=False)
    print("done")
"""
    Path("own_script.py").write_text(text)
    said = subprocess.run([sys.executable, "own_script.py"], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, "done\n"), said.stderr


def test_a_module_by_its_name_and_a_file_of_settings(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sub").mkdir()
    Path("sub/c.toml").write_text('plugin = "../own_plugin.py"\nalgorithm = "own-method"\nshare = 0.75\n')  # beside the file
    assert call("run", "sub/c.toml", *SHORT, "--out", "a", "--json") == 0
    assert json.loads(capsys.readouterr().out)["algorithm"] == "own-method"
    Path("own_package").mkdir()
    Path("own_package/methods.py").write_text(OWN.replace("own-", "my-"))
    assert call("compare", "my-method,fedprox", "--plugin", "own_package.methods", "--share", "0.1", "--mu", "1", *SHORT) == 0
    assert fedagg.run(algorithm="own-method", plugin=own, share=0.75, rounds=1, clients=4).config.options == {"share": 0.75}


def test_list_and_other_commands_know_a_plugin(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list", "--plugin", str(own)) == 0
    said = capsys.readouterr().out
    assert "FedAvg at a share of the rate." in said
    assert all(name in said for name in ("own-method", "own-data", "own-network", "own-split", "own-tracker"))
    assert call("list", "own-method") == 0
    assert "share of the rate" in capsys.readouterr().out
    assert call("partition", "--plugin", str(own), "--dataset", "own-data", "--partition", "own-split", "--clients", "4") == 0
    assert "own-split" in capsys.readouterr().out


@pytest.mark.slow
def test_a_grid_loads_the_plugin_in_every_process(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("grid.toml").write_text(
        'title = "Own"\nkind = "table"\nmethods = ["own-method", "fedavg"]\nparticipation = [0.5]\n'
        '[settings]\nplugin = "own_plugin.py"\nrounds = 1\nclients = 4\nepochs = 1\nshare = 0.25\n'
        '[[rows]]\nname = "own"\ndataset = "own-data"\nmodel = "own-network"\npartition = "own-split"\n'
    )
    assert call("reproduce", "grid.toml", "--seeds", "1", "--jobs", "2") == 0, capsys.readouterr().err
    cells = [cell.config for cell in Store(Path("results")).all()]
    assert {cell["algorithm"]: cell.get("share") for cell in cells} == {"own-method": 0.25, "fedavg": None}


def test_the_report_of_a_run_needs_no_plugin(own: Path) -> None:
    known = [set(one) for one in REGISTRIES]
    assert call("run", *ALL, "--plugin", "own_plugin.py", *SHORT, "--out", "a") == 0
    own.unlink()
    for one, before in zip(REGISTRIES, known, strict=True):  # as in a process that has not loaded it
        for name in set(one) - before:
            del one[name]
    for module in plugins._loaded.values():
        sys.modules.pop(module, None)
    plugins._loaded.clear()
    assert call("report", "a") == 0
    assert "own-method" not in REGISTRY
    assert "own-method" in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no such file"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("import nowhere_to_be_found", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("raise SystemExit('enough')", "cannot be loaded: SystemExit: enough"),
        ("def (", "cannot be loaded: SyntaxError"),
    ],
)
def test_a_plugin_that_cannot_be_loaded(text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own_bad.py"
    if text is not None:
        path.write_text(text)
    for command in (["run"], ["list"], ["compare", "fedavg"]):
        assert call(*command, "--plugin", str(path)) == 2
        told = capsys.readouterr().err
        assert f"plugin = {str(path)!r}: {words}" in told
        assert told.count("\n") == 1
    with pytest.raises(SettingError, match="give a Python file or the name of a module"):
        make({"plugin": 3})


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("partition.register('own-bad')(lambda labels, clients, seed: [[0]])", "its function gave 1 clients instead of 4"),
        (
            "partition.register('own-bad')(lambda labels, clients, seed: [[0], [1], [], [2]])",
            "its function gave client 2 something",
        ),
        (
            "partition.register('own-bad')(lambda labels, clients, seed: [[0], [1], [1], [2]])",
            "its function gave some samples twice",
        ),
        ("data.register('own-bad')(lambda: 3)", "its function returned a int; return a fedagg.Dataset"),
        ("models.register('own-bad')(lambda shape, classes: 3)", "its function returned a int; return a torch module"),
    ],
)
def test_functions_that_return_something_else(code: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own_wrong.py"
    path.write_text(f"from fedagg import data, models, partition\n{code}\n")
    kind = {"partition": "partition", "data": "dataset", "models": "model"}[code.split(".")[0]]
    assert call("run", "--plugin", str(path), f"--{kind}", "own-bad", *SHORT, "--out", str(tmp_path / "r")) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_names_of_the_package_cannot_be_taken() -> None:
    for register, name in (
        (data.register, "mnist"),
        (models.register, "linear"),
        (partition.register, "iid"),
        (trackers.register, "wandb"),
    ):
        with pytest.raises(SettingError, match="choose another name for"):
            register(name)(lambda *_: None)


@pytest.mark.slow
def test_a_network_from_a_plugin_is_tried_before_it_is_used(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedagg.engines import choose

    tried = []
    monkeypatch.setattr(choose, "Trial", lambda setting: tried.append(setting) or None)
    given = {"rounds": 1, "clients": 4, "epochs": 1, "engine": "batched", "plugin": str(own)}
    fedagg.run(model="own-network", **given)
    fedagg.run(model="linear", **given)
    assert len(tried) == 1


# --- packages


@pytest.fixture
def installed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package were installed that offers what is in the file, and something that is broken."""
    monkeypatch.syspath_prepend(str(own.parent))
    known = {
        "fedagg.algorithms": {"own-method": "own_plugin:Own", "broken": "own_nowhere:Own"},
        "fedagg.datasets": {"own-data": "own_plugin:blobs"},
        "fedagg.models": {"own-network": "own_plugin:network"},
        "fedagg.partitions": {"own-split": "own_plugin:halves"},
        "fedagg.trackers": {"own-tracker": "own_plugin:Notes"},
    }
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [EntryPoint(name, value, group) for name, value in known.get(group, {}).items()]
    )
    registry.installed.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_package_brings_names_that_are_loaded_when_asked_for(own: Path) -> None:
    assert call("run", "--algorithm", "fedavg", *SHORT, "--out", "a") == 0
    assert "own_plugin" not in sys.modules
    assert call("run", *ALL, "--share", "0.25", "--track", "own-tracker", *SHORT, "--out", "b") == 0
    assert Path("b/notes.txt").read_text() == "own-method"
    assert "plugin" not in Path("b/config.toml").read_text()  # the name is enough


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("always::fedagg.errors.FedaggWarning")
def test_a_broken_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list") == 0
    printed = capsys.readouterr()
    assert "own-method" in printed.out
    assert printed.err.count("\n") == 1
    assert "algorithm 'broken' cannot be loaded from own_nowhere:Own" in printed.err
    assert call("run", "--algorithm", "broken") == 2
    assert "algorithm = 'broken': cannot be loaded from own_nowhere:Own" in capsys.readouterr().err
    with pytest.warns(FedaggWarning, match="broken"), pytest.raises(SettingError, match="did you mean 'own-method'"):
        make({"algorithm": "own-metod"})


def test_an_entry_point_need_not_register_itself(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.write_text(
        "from dataclasses import dataclass\nfrom fedagg import Algorithm\n\n@dataclass\nclass Own(Algorithm):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(own.parent))
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("bare", "own_plugin:Own", group)])
    registry.installed.cache_clear()
    assert REGISTRY.find("bare").name == "bare"


# --- without torch


WITHOUT_TORCH = """
import sys
from fedagg import cli
for words in (["--version"], ["--help"], ["list"], ["list", "--help"]):
    try:
        cli.main(words)
    except SystemExit as ended:
        assert ended.code == 0, words
    assert "torch" not in sys.modules, words
"""


def test_some_commands_do_without_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], stdout=subprocess.DEVNULL, check=True)


CATALOGUE = """
from fedagg.cli import catalogue
assert catalogue.methods() == catalogue.methods_now()
assert {what: catalogue.keys(*where[:2]) for what, where in catalogue.TABLES.items()} == catalogue.names_now()
"""


def test_the_catalogue_is_what_there_is() -> None:
    """In a process of its own: other tests register things."""
    subprocess.run([sys.executable, "-c", CATALOGUE], check=True)


def test_the_help_page_says_what_the_commands_say() -> None:
    for name, (_, about) in cli.COMMANDS.items():
        told = inspect.cleandoc(cli.load(name).help or "").partition("\n")[0]
        assert told.startswith(about.rstrip(".")), name


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/fedagg/__init__.py"
    assert fedagg.__version__


def test_the_package_gives_what_an_extension_imports() -> None:
    for name in fedagg.__all__:
        assert getattr(fedagg, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fedagg.nothing  # type: ignore[attr-defined]
