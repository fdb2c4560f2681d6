"""The command line as people use it: what it prints, what it leaves behind, and how it refuses input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import fedagg
from fedagg import cli
from fedagg.cli import compare
from fedagg.config import PRESETS, Config, make, resolve
from fedagg.errors import SettingError

TINY = ["--rounds", "2", "--clients", "20", "--participation", "0.1", "--epochs", "1"]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_run_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *TINY, "--json", "--out", str(tmp_path / "run")) == 0
    printed = json.loads(capsys.readouterr().out)
    for key in (
        "algorithm",
        "dataset",
        "model",
        "partition",
        "seed",
        "rounds",
        "accuracy",
        "best_accuracy",
        "loss",
        "seconds",
        "run",
    ):
        assert key in printed
    assert printed["rounds"] == 2
    assert 0 <= printed["accuracy"] <= printed["best_accuracy"] <= 1
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "metrics.jsonl", "clients.jsonl", "model.safetensors", "environment.json"} <= files


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_greek_letters(encoding: str) -> None:
    command = [sys.executable, "-m", "fedagg", "list"]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"fedprox" in done.stdout


def test_a_narrow_terminal_cuts_no_figures_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert call("run", *TINY, "--quiet", "--out", str(tmp_path / "run")) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    said = capsys.readouterr().out
    assert f"{100 * result['accuracy']:.2f} %" in said
    assert f"{result['loss']:.4f}" in said


@pytest.mark.skipif(version("click") >= "8.5", reason="pyproject.toml asks for an older click")
@pytest.mark.parametrize("command", ["run", "compare", "reproduce", "plot", "report"])
def test_help_says_what_an_argument_is_for(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "--help") == 0
    said = capsys.readouterr().out.partition("Arguments")[2].partition("Options")[0]
    assert "folder" in said or "TOML" in said


def test_a_run_folder_repeats_itself(tmp_path: Path) -> None:
    assert call("run", *TINY, "--algorithm", "fedadam", "--quiet", "--out", str(tmp_path / "a")) == 0
    assert call("run", str(tmp_path / "a" / "config.toml"), "--quiet", "--out", str(tmp_path / "b")) == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    needed = {
        "accuracy",
        "loss",
        "train_loss",
        "rate_mean",
        "rate_min",
        "rate_max",
        "passes",
        "participants",
        "left_out",
        "seconds",
    }
    assert (needed | {"bytes_up", "bytes_down"}) <= rows[0].keys()
    assert rows[0]["participants"] == 2


def test_option_beats_file_beats_preset_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('preset = "cifar10-cnn"\nlr = 0.5\nrounds = 7\n')
    config = resolve({"rounds": 3}, file)
    assert (config.rounds, config.lr, config.model, config.seed) == (3, 0.5, "cifar10-cnn", 0)
    assert resolve({}, file, "mnist-linear").dataset == "mnist"


@pytest.mark.parametrize(
    ("preset", "lr", "batch", "rounds"),
    [
        ("mnist-linear", 0.01, 32, 30), ("mnist-cnn", 0.01, 32, 30), ("emnist-lenet5", 0.1, 64, 50),
        ("emnist-union-lenet5", 0.1, 64, 50),
        ("cifar10-cnn", 0.1, 32, 100), ("cifar100-vgg11", 0.01, 64, 200),
    ],
)  # fmt: skip
def test_presets_are_the_papers_table(preset: str, lr: float, batch: int, rounds: int) -> None:
    config = make(PRESETS[preset])
    assert (config.lr, config.batch_size, config.rounds, config.epochs, config.options["alpha"]) == (lr, batch, rounds, 3, 0.1)


def test_the_toml_of_a_configuration_is_complete(tmp_path: Path) -> None:
    config = Config(algorithm="fedgh", head_lr=0.3, partition="dirichlet", sigma=float("inf"), head="x")
    (tmp_path / "c.toml").write_text(config.toml())
    assert resolve({}, tmp_path / "c.toml") == config


def test_compare_makes_one_table_and_one_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("compare", "fedcm,fedavg", *TINY, "--quiet", "--out", str(tmp_path / "c")) == 0
    printed = capsys.readouterr().out
    assert "fedcm" in printed
    assert "fedavg" in printed
    assert (tmp_path / "c" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    rows = [(tmp_path / "c" / name / "clients.jsonl").read_text().splitlines()[0] for name in ("fedcm", "fedavg")]
    first, second = (json.loads(row) for row in rows)
    assert first["clients"] == second["clients"]
    assert first["rates"] == second["rates"]  # the same participants at the same base rate


def rows(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in lines]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [(["fedagg,fedbabu"], "needs a model with a body"), (["fedagg,fedavg", "--clients", "100000"], "clients = 100000")],
)
def test_compare_checks_every_method_before_it_writes(
    arguments: list[str], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("compare", *arguments, "--rounds", "1", "--out", str(tmp_path / "c")) == 2
    told = capsys.readouterr().err
    assert hint in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_compare_continues_where_it_was_stopped(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Impatient(compare.Live):
        def round_done(self, row: dict[str, object]) -> None:
            if (self.label, row["round"]) == ("fedavg", 1):
                raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    assert call("compare", "fedagg,fedavg,fedadam", *TINY, "--out", "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(compare, "Live", Impatient)
        patch.setattr(cli, "leave", sys.exit)  # a thread of another test must not end this process at once
        assert call("compare", "fedagg,fedavg,fedadam", *TINY, *(["--out", "c"] if named else [])) == 130
    (folder,) = [Path("c")] if named else list(Path("runs").iterdir())
    told = capsys.readouterr().err
    assert f"the same command{'' if named else f' with --out {folder}'} resumes from here" in told
    assert not (folder / "fedadam").exists()
    assert len(rows(folder / "fedavg")) == 1
    before = (folder / "fedagg" / "result.json").stat().st_mtime_ns
    assert call("compare", "fedagg,fedavg,fedadam", *TINY, "--out", str(folder), "--json") == 0
    assert (folder / "fedagg" / "result.json").stat().st_mtime_ns == before  # it was finished
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [run["algorithm"] for run in found] == ["fedagg", "fedavg", "fedadam"]
    assert found[0] == json.loads((folder / "fedagg" / "result.json").read_text())
    for name in ("fedagg", "fedavg", "fedadam"):
        assert rows(folder / name) == rows(Path("whole") / name)
        model = "model.safetensors"
        assert (folder / name / model).read_bytes() == (Path("whole") / name / model).read_bytes()


@pytest.mark.parametrize("change", [["--lr", "0.3"], ["--rounds", "3"]])
def test_compare_does_not_mix_settings(change: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("compare", "fedavg", *TINY, "--quiet", "--out", str(tmp_path)) == 0
    assert call("compare", "fedadam,fedavg", *TINY, *change, "--quiet", "--out", str(tmp_path)) == 2
    told = capsys.readouterr().err
    assert "already contains a run of fedavg, with" in told
    assert change[0].strip("-") in told
    assert not (tmp_path / "fedadam").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", b"junk", "model.safetensors: is damaged; have it written with: fedagg run --resume"),
        ("model.safetensors", None, "has no model.safetensors: the run is not finished; have it written with: fedagg run --resume"),
        ("result.json", b"[1]", "result.json: is damaged; delete it"),
        ("result.json", b'{"rounds": 2}', ""),
    ],
)
def test_compare_handles_a_damaged_run(
    name: str, content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("compare", "fedavg", *TINY, "--quiet", "--out", str(tmp_path))
    assert call(*line) == 0
    path = tmp_path / "fedavg" / name
    good = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    capsys.readouterr()
    if words:
        assert call(*line) == 2
        told = capsys.readouterr().err
        assert words in told
        assert told.count("\n") == 1
        path.unlink(missing_ok=True)
        assert call("run", "--resume", str(tmp_path / "fedavg"), "--quiet") == 0
    assert call(*line) == 0
    assert path.read_bytes() == good or name == "result.json"  # which has the seconds


@pytest.mark.slow
def test_compare_shows_what_a_finished_run_was_found_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("compare", "fedbabu", *TINY, "--model", "lenet5", "--rounds", "1", "--quiet", "--json", "--out", str(tmp_path))
    assert call(*line) == 0
    first = capsys.readouterr().out
    assert call(*line) == 0
    assert capsys.readouterr().out == first
    assert "personal_accuracy" in first


def test_resume_has_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *TINY, "--quiet", "--out", str(tmp_path / "a")) == 0
    capsys.readouterr()
    assert call("run", "--resume", str(tmp_path / "a"), "--rounds", "3", "--out", str(tmp_path / "b")) == 2
    told = capsys.readouterr().err
    assert "leave out --out" in told
    assert told.count("\n") == 1
    assert len(rows(tmp_path / "a")) == 2


@pytest.mark.parametrize(
    ("given", "words"), [(("data",), "the run's data came"), (("data", "model", "parts"), "the run's data, model and parts came")]
)
def test_the_command_line_says_how_to_continue_a_run_from_python(
    given: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    every = {"data": fedagg.Dataset(x, y, x, y), "model": torch.nn.Linear(3, 2), "parts": [range(20), range(20, 40)]}
    fedagg.run(**{key: every[key] for key in given}, rounds=1, clients=2, participation=1.0, out=tmp_path / "f")
    there = str(tmp_path / "f")
    for line, call_there in (
        (["run", "--resume", there], f"fedagg.run(resume={there!r}, {', '.join(f'{key}=...' for key in given)})"),
        (["partition", "--run", there, "--out", str(tmp_path / "p")], "fedagg.theory.heterogeneity"),
        (["bounds", there], f"fedagg.theory.from_run.analyse(Path({there!r}), data=..."),
    ):
        assert call(*line) == 2
        told = capsys.readouterr().err
        assert words in told
        assert call_there in told
        assert told.count("\n") == 1
    assert not (tmp_path / "p").exists()


def test_plot_takes_folders_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("compare", "fedagg,fedavg", *TINY, "--quiet", "--out", "c") == 0
    assert call("run", *TINY, "--quiet", "--out", "r") == 0
    assert call("plot", "c", "r", "--format", "svg", "--each") == 0
    drawn = Path("figures/runs.svg").read_text()
    assert "<!-- fedagg seed 0 (fedagg) -->" in drawn
    assert "<!-- fedagg seed 0 (r) -->" in drawn
    assert "<!-- fedavg seed 0 -->" in drawn
    Path("empty").mkdir()
    capsys.readouterr()
    for wrong, words in (
        ("nope", "choose one of all, fig-"),
        ("empty", "contains no run"),
        ("fig-curve", "did you mean 'fig-curves'"),
    ):
        assert call("plot", "r", wrong, "-o", "other") == 2
        told = capsys.readouterr().err
        assert f"what = {wrong!r}" in told
        assert words in told
    assert not Path("other").exists()


def test_a_run_without_a_finished_round_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("begun").mkdir()
    Path("begun/config.toml").write_text(Config().toml())
    assert call("report", "begun", "-o", "r.html") == 2
    told = capsys.readouterr().err
    assert "what = 'begun': has no finished round yet" in told
    assert call("plot", "begun", "-o", "pictures") == 2
    assert capsys.readouterr().err == told
    assert not Path("pictures").exists()
    assert call("run", *TINY, "--quiet", "--out", "r") == 0
    assert call("plot", "r", "begun", "--format", "svg") == 0
    assert "nothing to draw yet" in capsys.readouterr().err
    assert "<!-- fedagg" not in Path("figures/runs.svg").read_text()  # one line, the run's, needs no legend


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list") == 0
    printed = capsys.readouterr().out
    for name in ("scaffold", "emnist-letters", "densenet121", "dirichlet-class", "batched", "cifar100-vgg11"):
        assert name in printed


BAD = [
    (["--algorithm", "fedag"], "did you mean 'fedagg'"),
    (["--dataset", "minst"], "did you mean 'mnist'"),
    (["--model", "resnet"], "did you mean 'resnet18'"),
    (["--engine", "bached"], "did you mean 'batched'"),
    (["--preset", "mnist-liner"], "did you mean 'mnist-linear'"),
    (["--participation", "0"], "participation = 0"),
    (["--participation", "1.5"], "participation = 1.5"),
    (["--alpha", "1"], "alpha = 1"),
    (["--alpha", "0"], "alpha = 0"),
    (["--partition", "dirichlet", "--sigma", "0"], "sigma = 0"),
    (["--clients", "100000"], "clients = 100000"),
    (["--rounds", "0"], "rounds = 0"),
    (["--lr", "much"], "--lr"),
    (["--nonsense", "1"], "--nonsense"),
    (["--learning-rate", "1"], "Did you mean '--lr'"),
    (["--partition", "shards", "--clients", "4000"], "shards = 2: 4000 clients need 8000 shards"),
    (["--device", "toaster"], "device = 'toaster'"),
    (["--estimator", "pretrain"], "fedagg-paper has (--variant paper)"),
    (["--algorithm", "fedbabu"], "needs a model with a body"),
    (["--resume", "/nowhere"], "is not a run folder"),
    (["/nowhere.toml"], "there is no such file"),
    (["/"], "config = '/': is a folder; name a TOML file"),
    (["--dataset", "custom"], "data=fedagg.Dataset"),
    (["--dataset", "mine.csv"], "there is no such file or folder"),
]


@pytest.mark.parametrize(("arguments", "hint"), BAD)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("run", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert hint in captured.err
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.parametrize(
    ("text", "hint"),
    [("rounds = ", "is not TOML"), ("ronds = 3", "did you mean 'rounds'"), ("rounds = 'x'", "rounds"), ("[a]\nb = 1", "top level")],
)
def test_bad_files(text: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(text)
    assert call("run", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run")) == 2
    assert hint in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_folder_is_not_a_file_of_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("rounds = 1\n")
    assert call("run", str(tmp_path)) == 2
    assert f"name the file in it, {tmp_path / 'config.toml'}, or continue with --resume" in capsys.readouterr().err


def test_a_comparison_does_not_go_into_the_folder_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("rounds = 1\n")
    assert call("compare", "fedagg,fedavg", *TINY, "--out", str(tmp_path)) == 2
    assert "is the folder of a single run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_methods_with_a_blank_between_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("compare", "fedagg", "fedavg") == 2
    assert "separate methods by commas: fedagg,fedavg" in capsys.readouterr().err


def test_a_misspelt_command_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("rn") == 2
    assert capsys.readouterr().err.strip() == "fedagg: No such command 'rn'. Did you mean 'run'?"
    assert call("--version") == 0
    assert capsys.readouterr().out.strip() == fedagg.__version__


@pytest.mark.slow
def test_stopped_means_stopped() -> None:
    """A thread in the middle of a client does not keep the process alive."""
    busy = "import time; from concurrent.futures import ThreadPoolExecutor; ThreadPoolExecutor().submit(time.sleep, 600)"
    code = f"{busy}; from fedagg.cli.process import leave; print('all'); leave(130)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (130, "all\n")


def test_a_full_run_folder_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *TINY, "--quiet", "--out", str(tmp_path / "run")) == 0
    assert call("run", *TINY, "--quiet", "--out", str(tmp_path / "run")) == 2
    assert "already contains a run" in capsys.readouterr().err


def test_missing_data_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAGG_DATA", str(tmp_path))
    assert call("data", "where") == 0
    assert str(tmp_path) in capsys.readouterr().out.replace("\n", "")


def test_unknown_settings_from_python() -> None:
    with pytest.raises(SettingError, match="rounds"):
        make({"round": 3})
    with pytest.raises(SettingError, match="did you mean 'lr'"):
        fedagg.run(learning_rate=0.1)


def test_threads_that_wait_sleep_soon_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    cli.wait_briefly()
    assert int(os.environ["GOMP_SPINCOUNT"]) < 300_000
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    cli.wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    cli.wait_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_how_threads_wait_is_said_before_torch_is_loaded() -> None:
    """OpenMP reads it once."""
    code = "import os, sys; from fedagg import cli; assert 'torch' not in sys.modules; cli.wait_briefly()"
    subprocess.run([sys.executable, "-c", code], check=True)
