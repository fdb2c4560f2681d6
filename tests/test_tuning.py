"""Tuning: a grid is tried on data held back, ranked, and resumed; what cannot work is refused before anything runs."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedagg
import tiny
from fedagg import cli, plots
from fedagg.config import Config, make
from fedagg.errors import FedaggWarning, SettingError
from fedagg.measure import ACCURACY, Measure
from fedagg.reproduce.results import Store
from fedagg.tuning import Plan, Tuned

SMALL: dict[str, Any] = {"rounds": 2, "clients": 20, "participation": 0.1, "epochs": 1, "engine": "batched"}
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def carried_out(plan: Plan, accuracy: Any, loss: Any = lambda config: 1.0) -> tuple[Tuned, list[Config]]:
    """The plan with made-up accuracies and losses, and what was run for it."""
    ran: list[Config] = []

    def run(cells: Any) -> bool:
        ran.extend(cell.config for cell in cells)
        return True

    def found(config: Config) -> tuple[float, float, Measure] | None:
        value = accuracy(config)
        return None if value is None else (value, loss(config), ACCURACY)

    return plan.try_and_rank(run, found), ran


def test_a_point_is_ranked_by_its_mean_over_seeds_on_data_held_back() -> None:
    tuned = fedagg.tune("fedavg", {"lr": [0.001, 0.1]}, seeds=[5, 6], **SMALL)
    for trial in tuned.trials:
        alone = [fedagg.run(algorithm="fedavg", seed=s, validation=0.1, **SMALL, **trial.settings).accuracy for s in (5, 6)]
        assert trial.mean == pytest.approx(statistics.mean(alone), abs=1e-4)
        assert trial.deviation == pytest.approx(statistics.stdev(alone), abs=1e-4)
    assert tuned.best.settings == {"lr": 0.1}
    assert tuned.trials[0].mean > tuned.trials[1].mean
    assert tuned.edges == ["lr"]
    assert tuned.table().splitlines()[2].startswith("| 0.1 | ")


def test_the_best_settings_as_toml_and_as_a_command() -> None:
    plan = Plan.make(
        "fedprox", {"mu": [0.1, 0.2], "normalize": [True, False]}, {**SMALL, "partition": "shards"}, preset="mnist-cnn"
    )
    tuned, _ = carried_out(plan, lambda c: c.options["mu"] - (0.5 if c.normalize else 0))
    assert tuned.best.settings == {"mu": 0.2, "normalize": False}
    told = tomllib.loads(tuned.to_toml())
    assert (told["mu"], told["normalize"], told["validation"], told["model"]) == (0.2, False, 0.0, "mnist-cnn")
    words = tuned.command.split()
    assert words[:6] == ["fedagg", "run", "--algorithm", "fedprox", "--preset", "mnist-cnn"]
    assert words[-3:] == ["--mu", "0.2", "--no-normalize"]
    assert "--validation" not in words
    assert make(told) == tuned.config


@pytest.mark.parametrize(
    ("grid", "best", "edges"),
    [
        ({"lr": [0.1, 0.01, 1.0]}, {"lr": 0.1}, []),
        ({"lr": [0.1, 0.01, 1.0]}, {"lr": 0.01}, ["lr"]),
        ({"momentum": [0.0, 0.5, 0.9]}, {"momentum": 0.0}, []),  # there is nothing below
        ({"momentum": [0.0, 0.5, 0.9]}, {"momentum": 0.9}, ["momentum"]),
        ({"lr": [0.1], "client_optimizer": ["sgd", "adam"]}, {"lr": 0.1, "client_optimizer": "sgd"}, []),
    ],
)
def test_the_edge_of_the_grid(grid: dict[str, list[Any]], best: dict[str, Any], edges: list[str]) -> None:
    plan = Plan.make("fedavg", grid, SMALL)
    tuned, _ = carried_out(plan, lambda c: 0.9 if all(getattr(c, k) == v for k, v in best.items()) else 0.1)
    assert (tuned.best.settings, tuned.edges) == (best, edges)


def test_the_edge_of_a_methods_own_option() -> None:
    plan = Plan.make("fedcm", {"cm_alpha": [0.1, 0.5, 1.0]}, SMALL)
    assert carried_out(plan, lambda c: c.options["cm_alpha"])[0].edges == []  # 1 is the largest there is
    assert carried_out(plan, lambda c: -c.options["cm_alpha"])[0].edges == ["cm_alpha"]


def test_halving_gives_all_rounds_to_the_best_quarter() -> None:
    rates = [0.01, 0.02, 0.03, 0.04, 0.05]
    plan = Plan.make("fedavg", {"lr": rates}, {**SMALL, "rounds": 9, "warmup": 4}, seeds=[7], halving=True)
    # After two rounds 0.05 and 0.04 are best; after all of them, 0.04.
    tuned, ran = carried_out(plan, lambda c: c.lr if c.rounds == 2 else 1 - c.lr)
    assert [(c.lr, c.rounds, c.warmup) for c in ran] == [*((lr, 2, 1) for lr in rates), (0.04, 9, 4), (0.05, 9, 4)]
    assert tuned.best.settings == {"lr": 0.04}
    assert [(row["lr"], row["rounds"]) for row in tuned.rows()] == [(0.04, 9), (0.05, 9), (0.03, 2), (0.02, 2), (0.01, 2)]


def test_halving_goes_by_loss_where_scores_are_equal() -> None:
    plan = Plan.make("fedavg", {"lr": [0.01, 0.02, 0.03, 0.04, 0.05]}, {**SMALL, "rounds": 8}, seeds=[7], halving=True)
    losses = {0.01: 3.0, 0.02: float("nan"), 0.03: 1.0, 0.04: 2.0, 0.05: 4.0}
    tuned, _ = carried_out(plan, lambda c: 0.1, lambda c: losses[c.lr])  # all on one plateau
    assert [trial.settings["lr"] for trial in tuned.trials] == [0.03, 0.04]
    assert [trial.settings["lr"] for trial in tuned.first] == [0.03, 0.04, 0.01, 0.05, 0.02]


def test_random_points_are_the_same_every_time() -> None:
    grid = {"lr": [0.01, 0.1, 1.0], "momentum": [0.0, 0.5, 0.9]}
    drawn = [[trial.settings for trial in Plan.make("fedavg", grid, SMALL, random=4).trials] for _ in range(2)]
    assert drawn[0] == drawn[1]
    every = [trial.settings for trial in Plan.make("fedavg", grid, SMALL).trials]
    assert len(every) == 9
    assert len(drawn[0]) == 4
    assert all(point in every for point in drawn[0])
    assert len(Plan.make("fedavg", grid, SMALL, random=100).trials) == 9


def test_a_point_that_fails_is_left_out_and_named() -> None:
    plan = Plan.make("fedavg", {"lr": [0.1, 0.2]}, SMALL)
    with pytest.warns(FedaggWarning, match=r"lr 0\.2: has no result"):
        tuned, _ = carried_out(plan, lambda c: None if (c.lr, c.seed) == (0.2, 6) else c.lr)
    assert [trial.settings for trial in tuned.trials] == [{"lr": 0.1}]


@pytest.mark.parametrize(
    ("method", "grid", "more", "words"),
    [
        ("fedavg", {"mu": [0.1]}, {}, "mu = 0.1: fedavg has no such option; fedprox has"),
        ("fedavg", {"lr": []}, {}, "grid = 'lr=': has no values"),
        ("fedavg", {}, {}, "grid = '': name at least one setting"),
        ("fedavg", {"lr": [0.1, -1.0]}, {}, "lr = -1.0"),
        ("fedavg", {"lr": "0.1"}, {}, "grid = {'lr': '0.1'}: give a list"),
        ("fedavg", {"lr": [[0.1]]}, {}, "grid = {'lr': [[0.1]]}: give numbers or words"),
        ("fedavg", {"lr": [0.1]}, {"lr": 0.2}, "lr = 0.2: is on the grid, with 0.1"),
        ("fedavg", {"seed": [1, 2]}, {}, "grid = 'seed': cannot be on this grid"),
        ("fedavg", {"dataset": ["mnist", "cifar10"]}, {}, "grid = 'dataset': cannot be on this grid"),
        ("fedavg", {"lr": [0.1]}, {"validation": 0.0}, "validation = 0: settings are chosen on training data"),
        ("fedavg", {"lr": [0.1]}, {"seeds": []}, "seeds = (): list at least one, e.g. [5, 6]"),
        ("fedavg", {"lr": [0.1]}, {"seeds": 3}, "seeds = 3: list at least one, e.g. [5, 6]"),
        ("fedavg", {"lr": [0.1]}, {"seeds": [-1]}, "seed = -1"),
        ("fedavg", {"lr": [0.1, 0.2]}, {"halving": True}, "halving = True: needs at least 4 points"),
        ("fedavg", {"lr": [0.1, 0.2]}, {"random": 0}, "random = 0"),
        ("fedavgg", {"lr": [0.1, 0.2]}, {}, "algorithm = 'fedavgg': did you mean 'fedavg'?"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_any_run(
    method: str, grid: Any, more: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(fedagg, "run", never)
    with pytest.raises(SettingError) as error:
        fedagg.tune(method, grid, out=tmp_path / "new", **SMALL | more)
    assert str(error.value).startswith(words)
    assert not (tmp_path / "new").exists()


def test_data_and_network_from_python() -> None:
    given: dict[str, Any] = {"data": tiny.dataset(), "model": tiny.network(), "clients": 6, "rounds": 2, "batch_size": 8}
    tuned = fedagg.tune("fedavg", {"lr": np.array([1e-4, 0.1])}, seeds=[5], **given)
    assert tuned.best.settings == {"lr": 0.1}
    assert type(tuned.best.settings["lr"]) is float
    assert tuned.best.deviation != tuned.best.deviation  # one seed has none
    with pytest.raises(SettingError, match="jobs = 2: cannot be used with data, model from Python"):
        fedagg.tune("fedavg", {"lr": [0.1]}, jobs=2, **given)


def test_the_test_set_is_never_scored() -> None:
    """With labels that no test set has, the figures are the same."""
    whole = tiny.dataset()
    spoilt = fedagg.Dataset(whole.x_train, whole.y_train, whole.x_test, (whole.y_test + 1) % 3, classes=3)
    settings: dict[str, Any] = {"clients": 6, "rounds": 2, "batch_size": 8, "seeds": [5]}
    one, other = (fedagg.tune("fedavg", {"lr": [0.1]}, data=d, model=tiny.network(), **settings) for d in (whole, spoilt))
    assert one.best.scores == other.best.scores


def test_the_command_continues_and_says_what_is_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tuned"
    command = ["tune", "fedavg", *FLAGS, "--seeds", "5,6", "--json", "--out", str(folder)]
    assert call(*command, "--grid", "lr=0.001,0.1") == 0
    first = capsys.readouterr()
    told = json.loads(first.out)
    assert told["best"] == {"lr": 0.1}
    assert "the best lr, 0.1, lies on the edge of the grid" in first.err
    assert first.err.count(": done") == 4
    assert {"best.toml", "accuracy.png", "mnist-mini_linear.jsonl"} <= {path.name for path in folder.iterdir()}
    assert tomllib.loads((folder / "best.toml").read_text(encoding="utf-8"))["lr"] == 0.1
    lines = (folder / "mnist-mini_linear.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4
    # One run is lost, and two points are new: three points with one seed each.
    (folder / "mnist-mini_linear.jsonl").write_text("\n".join(lines[1:]) + "\n", encoding="utf-8")
    assert call(*command, "--grid", "lr=0.001,0.1,0.01") == 0
    again = capsys.readouterr()
    assert again.err.count(": done") == 3
    trials = json.loads(again.out)["trials"]
    assert len(trials) == 3
    assert all(old in trials for old in told["trials"])


def test_the_stopped_command_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedagg.reproduce import running

    run_cell, seen = running.run_cell, []

    def once(cell: Any, store: Any, stop: Any, watch: Any = ()) -> Any:
        seen.append(cell)
        stop.flag.set()
        return run_cell(cell, store, stop, watch)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "run_cell", once)
    assert call("tune", "fedavg", *FLAGS, "--seeds", "5", "--grid", "lr=0.001,0.1") == 130
    assert len(seen) == 1
    told = " ".join(capsys.readouterr().err.split())
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"--out runs/{folder.name} resumes from here" in told
    assert not (folder / "best.toml").exists()
    monkeypatch.setattr(running, "run_cell", run_cell)
    assert call("tune", "fedavg", *FLAGS, "--seeds", "5", "--grid", "lr=0.001,0.1", "--out", str(folder)) == 0
    assert (folder / "best.toml").exists()


# Python runs this before anything else: a worker that says when it has been started, and takes a while to import.
SLOW_START = """
import sys, time
from pathlib import Path
if "--multiprocessing-fork" in sys.orig_argv:
    Path(__file__).with_name("started").touch()
    time.sleep(2)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no process groups to interrupt")
def test_ctrl_c_while_workers_start_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "fedagg", "tune", "fedavg", *FLAGS, "--grid", "lr=0.1,0.3", "--jobs", "2"]
    command += ["--rounds", "100000", "--out", str(tmp_path / "out")]
    parent = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "started").exists():
            assert parent.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        os.killpg(parent.pid, signal.SIGINT)
        told = parent.communicate(timeout=60)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    assert parent.returncode == 130
    assert "Traceback" not in told
    assert "stopped: 0 of 4 cells done, 0 failed, 4 left; the same command resumes from here" in " ".join(told.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grid", "lr"], "grid = 'lr': give a setting and its values"),
        (["--grid", "lr="], "grid = 'lr=': has no values"),
        (["--grid", "lr=0.1", "--grid", "lr=0.2"], "lr is on the grid already"),
        (["--grid", "lr=fast"], "lr = 'fast'"),
        (["--grid", "mu=0.1"], "fedavg has no such option; fedprox has"),
        (["--grid", "lr=0.1", "--seed", "3"], "give --seeds"),
        (["--grid", "lr=0.1", "--seeds", "a"], "seeds = 'a': give whole numbers"),
        (["--grid", "lr=0.1", "--validation", "0"], "never on the test set"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("tune", "fedavg", *FLAGS, *arguments, "--out", str(tmp_path / "new")) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_words_are_values_too() -> None:
    from fedagg.cli.tune import axes

    base = {"algorithm": "fedgh"}
    assert axes(["head=3", "lr=1,0.5", "normalize=true,false", "client-optimizer=sgd,adam"], base) == {
        "head": ["3"],
        "lr": [1, 0.5],
        "normalize": [True, False],
        "client_optimizer": ["sgd", "adam"],
    }


def test_pictures_of_one_axis_and_of_two(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, _ = carried_out(Plan.make("fedavg", {"client_optimizer": ["sgd", "adam"]}, SMALL, seeds=[5]), lambda c: c.seed / 10)
    assert one.plot(tmp_path / "one.svg").stat().st_size > 1000
    grid = {"lr": [0.1, 0.01], "momentum": [0.0, 0.9], "clip": [0.0, 1.0]}
    two, _ = carried_out(Plan.make("fedavg", grid, SMALL, random=5), lambda c: c.lr + c.momentum / 10)
    assert two.plot(tmp_path / "two.png").stat().st_size > 1000


def test_a_sweep_is_in_the_order_of_its_axes_and_scored_on_the_test_set() -> None:
    swept = fedagg.sweep("fedavg", {"partition": ["shards", "iid"], "lr": [0.1, 0.02, 0.1]}, shards=1, **SMALL)
    assert [tuple(t.settings.values()) for t in swept.trials] == [("shards", 0.02), ("shards", 0.1), ("iid", 0.02), ("iid", 0.1)]
    alone = [
        fedagg.run(algorithm="fedavg", partition=split, lr=lr, **({"shards": 1} if split == "shards" else {}), **SMALL)
        for split, lr in (("shards", 0.02), ("iid", 0.1))
    ]
    assert [swept.trials[0].mean, swept.trials[3].mean] == pytest.approx([result.accuracy for result in alone], abs=1e-4)
    assert swept.trials[0].config.validation == 0.0
    lines = swept.table().splitlines()
    assert lines[0] == "| partition | lr | accuracy | deviation | rounds |"
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| shards", "0.02"],
        ["| shards", "0.1"],
        ["| iid", "0.02"],
        ["| iid", "0.1"],
    ]


def test_numbers_are_sorted_as_numbers() -> None:
    plan = Plan.make("fedavg", {"rounds": [10, 9, 100], "clients": [5, 40]}, {}, seeds=[0], choosing=False)
    swept = plan.try_in_order(lambda cells: True, lambda c: (c.rounds / 1000, 1.0, ACCURACY))
    assert [t.settings["rounds"] for t in swept.trials] == [9, 9, 10, 10, 100, 100]
    assert swept.names == ["rounds", "clients", "accuracy", "deviation"]
    assert swept.table("csv").splitlines()[:2] == ["rounds,clients,accuracy,deviation", "9,5,0.009,"]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"algorithm": ["fedavg", "fedcm"]}, "grid = 'algorithm': cannot be on this grid"),
        ({"seed": [1, 2]}, "grid = 'seed'"),
        ({"threads": [1, 2]}, "grid = 'threads': says where or how fast"),
        ({"mu": [1, 2]}, "mu = 1: fedavg has no such option"),
        ({"sigma": [0.1, 1.0]}, "sigma = 0.1: the iid partition has no such setting"),
    ],
)
def test_what_cannot_be_swept_is_refused(grid: Any, words: str) -> None:
    with pytest.raises(SettingError) as error:
        fedagg.sweep("fedavg", grid, **SMALL)
    assert str(error.value).startswith(words)


def test_the_sweep_command_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "fedavg", *FLAGS, "--json", "--out", str(tmp_path / "s"), "--grid", "batch-size=8,100"]
    assert call(*command, "--grid", "partition=iid") == 0
    first = capsys.readouterr()
    assert first.err.count(": done") == 2
    assert call(*command, "--grid", "partition=iid,shards") == 0
    again = capsys.readouterr()
    assert again.err.count(": done") == 2
    points = json.loads(again.out)["points"]
    assert [(p["batch_size"], p["partition"]) for p in points] == [(8, "iid"), (8, "shards"), (100, "iid"), (100, "shards")]
    assert json.loads(first.out)["points"][0] == points[0]
    assert (tmp_path / "s" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert call("sweep", "fedavg", *FLAGS, "--grid", "shards=2,100000", "--partition", "shards", "--out", str(tmp_path / "t")) == 2
    assert "100000" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()  # refused before anything was run


def test_infinity_is_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "fedavg", *FLAGS, "--partition", "dirichlet", "--grid", "sigma=0.5,inf", "--json", "--out", str(tmp_path)]
    assert call(*command) == 0
    first = capsys.readouterr()
    assert [point["sigma"] for point in json.loads(first.out)["points"]] == [0.5, "inf"]  # JSON has no infinity
    assert (tmp_path / "accuracy.png").exists()
    assert call(*command) == 0
    again = capsys.readouterr()
    assert ": done" not in again.err  # what is stored is found again
    assert again.out == first.out
    (whole,) = (one.config for one in Store(tmp_path).all() if one.config["sigma"] == "inf")
    assert make({name: value for name, value in whole.items() if value is not None}).sigma == math.inf


def drawn(monkeypatch: pytest.MonkeyPatch, grid: dict[str, Any], **settings: Any) -> tuple[Any, str]:
    """The point that has a star in the plot of a sweep, and the title."""
    seen: list[Any] = []
    monkeypatch.setattr(plots, "over_grid", lambda *given: seen.append(given))
    plan = Plan.make("fedavg", grid, {"dataset": "mnist-mini", "clients": 20, **settings}, seeds=[0], choosing=False)
    plan.try_in_order(lambda cells: True, lambda c: (c.lr, 1.0, ACCURACY)).plot("none.png")
    return seen[0][2], seen[0][4]


def test_the_plot_of_a_sweep_marks_no_point_and_names_no_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    about = "fedavg on mnist-mini, linear"
    assert drawn(monkeypatch, {"partition": ["iid", "shards"]}) == (None, f"{about}, 20 clients, 20 % a round, seed 0")
    sigma = drawn(monkeypatch, {"sigma": [0.1, 1.0]}, partition="dirichlet")
    assert sigma == (None, f"{about}, dirichlet, 20 clients, 20 % a round, seed 0")
    three = drawn(monkeypatch, {"epochs": [1, 3], "batch_size": [8, 16], "lr": [0.1, 0.2]})
    assert three == (None, f"{about}, iid, 20 clients, 20 % a round, seed 0, each at its best lr")


def test_a_plot_without_a_star(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for axes in ({"sigma": [0.1, math.inf]}, {"sigma": [0.1, math.inf], "epochs": [1, 3]}):
        plan = Plan.make("fedavg", axes, {"partition": "dirichlet"}, seeds=[0], choosing=False)
        swept = plan.try_in_order(lambda cells: True, lambda c: (0.5, 1.0, ACCURACY))
        path = swept.plot(tmp_path / "a.svg")
        assert "★" not in path.read_text(encoding="utf-8")


def test_optuna_looks_between_the_ends(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    grid = {"lr": [0.001, 1.0], "batch_size": [8, 64], "client_optimizer": ["sgd", "adam"]}

    def good(c: Config) -> float:
        return 1 - abs(c.lr - 0.2) - 0.01 * abs(c.batch_size - 32) - 0.2 * (c.client_optimizer == "adam")

    first, second = (carried_out(Plan.make("fedavg", grid, SMALL, seeds=[5], trials=30), good) for _ in range(2))
    settings = [trial.settings for trial in first[0].trials]
    assert settings == [trial.settings for trial in second[0].trials]  # so that a search that was stopped goes on
    assert [c.lr for c in first[1]] == [c.lr for c in second[1]]
    assert len({c.lr for c in first[1]}) > 10
    assert all(0.001 <= c.lr <= 1 and 8 <= c.batch_size <= 64 for c in first[1])
    assert first[0].best.mean > 0.9  # of 30 points drawn at random, the best has 0.87 in the mean
    assert all(float(f"{c.lr:.3g}") == c.lr for c in first[1])
    assert first[0].plot(tmp_path / "a.png").stat().st_size > 1000


def test_options_that_exclude_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    for more, words in (({"random": 3}, "trials = 5: and random"), ({"halving": True}, "trials = 5: and halving")):
        with pytest.raises(SettingError, match=words):
            Plan.make("fedavg", {"lr": [0.1, 1.0]}, SMALL, trials=5, **more)  # type: ignore[arg-type]
    monkeypatch.setattr("fedagg.errors.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'fedagg\[optuna\]'"):
        Plan.make("fedavg", {"lr": [0.1, 1.0]}, SMALL, trials=5)
