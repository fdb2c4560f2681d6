"""The tuned table: choosing on data held back, reporting on the test set, stopping and resuming."""

from __future__ import annotations

import csv
import io
import statistics
from pathlib import Path
from typing import Any

import pytest

import fedagg
from fedagg import cli
from fedagg.errors import SettingError
from fedagg.reproduce import grid, running, tuned
from fedagg.reproduce.results import Store

TOML = """
title = "Tuned"
kind = "tuned"
methods = ["fedavg", "fedcm", "fedagg"]
participation = [0.1]
seeds = 2
tuning_seeds = [5]

[common]
lr = [0.001, 0.1]

[grids.fedavg]
[grids.fedcm]
recipe = [{ cm_alpha = 0.5, weight_decay = 1e-3 }]

[settings]
dataset = "mnist-mini"
engine = "sequential"
clients = 20
epochs = 1
rounds = 2

[[rows]]
name = "mini-iid"
label = "mini"
distribution = "IID"
"""


@pytest.fixture
def spec(tmp_path: Path) -> grid.Spec:
    (tmp_path / "t.toml").write_text(TOML, encoding="utf-8")
    return grid.load(str(tmp_path / "t.toml"))


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_the_published_grids_are_of_one_size_and_hold_the_published_settings() -> None:
    spec = grid.load("table-tuned")
    assert spec.tuning is not None
    assert (spec.seeds, spec.tuning.seeds, spec.tuning.validation) == (5, (5, 6), 0.1)
    assert min(spec.tuning.seeds) >= spec.seeds  # nothing is chosen with a seed that is reported
    assert set(spec.methods) == {*spec.tuning.grids, "fedagg"} == {*grid.every_method()} - {"fedagg-paper"}
    for method, points in spec.tuning.grids.items():
        assert len(points) == 24
        assert len({tuple(sorted(point.items())) for point in points}) == 24
        rate = {"delta-sgd": "eta0", "fedsps": "sps_bound"}.get(method, "lr")
        assert {point[rate] for point in points} == {0.003, 0.01, 0.03, 0.1, 0.3, 1.0}
        common = {"weight_decay": 1e-3, "clip": 10.0} | ({"lr_decay": 0.998} if rate == "lr" else {})
        assert any(point.items() >= common.items() for point in points)
    assert {point["dyn_alpha"] for point in spec.tuning.grids["feddyn"]} >= {0.1}
    assert any((p["server_lr"], p["tau"]) == (0.1, 0.01) for p in spec.tuning.grids["fedadam"])


def test_a_row_can_ask_for_rates_beyond_the_highest(tmp_path: Path) -> None:
    text = TOML + "higher = [{ lr = [3, 10], eta0 = [3], weight_decay = [3] }]\n"  # a method has its own axes; others are not meant
    (tmp_path / "t.toml").write_text(text, encoding="utf-8")
    spec = grid.load(str(tmp_path / "t.toml"))
    assert [point["lr"] for point in spec.grid(spec.rows[0], "fedavg")] == [0.001, 0.1, 0.3, 1.0]
    assert spec.grid(spec.rows[0], "fedcm")[-1] == {"cm_alpha": 0.5, "weight_decay": 1e-3, "lr": 1.0}
    assert spec.grid(spec.rows[0], "fedagg") == []  # untuned, here too
    tried = {cell.config.lr for cell in tuned.trials(spec, Store(tmp_path), short=False)}
    assert tried == {0.001, 0.1, 0.3, 1.0}
    assert "higher" not in spec.rows[0].settings
    published = grid.load("table-tuned")
    assert {len(published.grid(row, method)) for row in published.rows for method in published.tuning.grids} == {24, 32, 40}  # type: ignore[union-attr]


def test_a_row_can_ask_for_higher_rates_of_some_methods_alone(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TOML + 'higher = [{ lr = [2] }, { methods = ["fedcm"], lr = [3] }]\n', encoding="utf-8")
    spec = grid.load(str(tmp_path / "t.toml"))
    assert max(point["lr"] for point in spec.grid(spec.rows[0], "fedavg")) == 0.2
    assert max(point["lr"] for point in spec.grid(spec.rows[0], "fedcm")) == 0.6  # three times what the first step reached
    (tmp_path / "t.toml").write_text(TOML + 'higher = [{ methods = ["fedsgd"], lr = [3] }]\n', encoding="utf-8")
    with pytest.raises(SettingError, match="fedsgd"):
        grid.load(str(tmp_path / "t.toml"))


def test_every_point_of_the_published_grids_can_be_run(tmp_path: Path) -> None:
    spec = grid.narrow(grid.load("table-tuned"), rows=["mini-linear-iid"], tuning_seeds=[7])
    cells = list(tuned.trials(spec, Store(tmp_path), short=False))
    assert len(cells) == 18 * 32  # FedBABU does not apply
    assert {(cell.config.validation, cell.config.seed, cell.config.eval_every) for cell in cells} == {(0.1, 7, 30)}
    (few,) = tuned.table_settings(grid.narrow(grid.load("table-tuned"), rows=["cifar10-cnn-500"]))
    assert few[1] == 0.02


def test_end_to_end(spec: grid.Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("reproduce", "t.toml", "--results", "r")
    run_cell, ran = running.run_cell, []

    def once(cell: Any, store: Any, stop: Any, watch: Any = ()) -> Any:
        ran.append((cell.config.validation, cell.config.seed, cell.method))
        if len(ran) in (2, 6):
            stop.flag.set()  # as Ctrl-C does: in the first phase, and in the second
        return run_cell(cell, store, stop, watch)

    monkeypatch.setattr(running, "run_cell", once)
    assert call(*command) == 130
    assert "1 of 4 cells done" in capsys.readouterr().err
    assert call(*command) == 130
    said = capsys.readouterr().err
    assert "choosing settings" in said
    assert "test set" in said
    assert call(*command, "--target", "0.5", "--format", "csv") == 0
    told = capsys.readouterr()
    assert {(share, seed) for share, seed, _ in ran} == {(0.1, 5), (0.0, 0), (0.0, 1)}
    assert len(ran) == 4 + 6 + 2  # two were stopped in their first round, and went on
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(told.out))}
    assert rows["fedagg"]["settings"] == ""
    assert rows["fedcm"]["settings"] == "lr 0.1, cm_alpha 0.5, weight_decay 0.001"
    settings: dict[str, Any] = {"clients": 20, "epochs": 1, "rounds": 2, "participation": 0.1, "engine": "sequential"}
    alone = {
        "fedavg": [fedagg.run(algorithm="fedavg", lr=0.1, seed=seed, **settings) for seed in (0, 1)],
        "fedagg": [fedagg.run(algorithm="fedagg", seed=seed, **settings) for seed in (0, 1)],
    }
    mean = {method: statistics.mean(result.accuracy for result in found) for method, found in alone.items()}
    for method, value in mean.items():
        assert float(rows[method]["accuracy"]) == pytest.approx(value, abs=1e-4)
    assert float(rows["fedavg"]["ahead"]) == pytest.approx(mean["fedavg"] - mean["fedagg"], abs=1e-4)
    first = [next((row["round"] for row in result.history if row["accuracy"] >= 0.5), None) for result in alone["fedagg"]]
    reached = [number for number in first if number]
    assert int(rows["fedagg"]["reached"]) == len(reached)
    assert float(rows["fedagg"]["rounds_to_target"] or 0) == pytest.approx(statistics.mean(reached or [0]))
    assert call(*command, "--show", "--format", "markdown") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("| setting | split | clients | FedAvg | FedCM | FedAgg | FedAgg ahead of the best rival |")
    best = max(("fedavg", "fedcm"), key=lambda method: float(rows[method]["accuracy"]))
    assert f"{-100 * float(rows[best]['ahead']):+.2f} ± {100 * float(rows[best]['within']):.2f}" in shown
    assert "Every method has the best of 2 settings" in shown
    assert "FedAgg: not tuned." in shown


def test_halving_runs_the_best_quarter_to_the_end(
    spec: grid.Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_cell, ran = running.run_cell, []

    def noted(cell: Any, store: Any, stop: Any, watch: Any = ()) -> Any:
        ran.append(cell)
        return run_cell(cell, store, stop, watch)

    monkeypatch.setattr(running, "run_cell", noted)
    assert call("reproduce", "t.toml", "--results", "r", "--halving") == 0
    capsys.readouterr()
    assert [cell.config.rounds for cell in ran] == [1] * 4 + [2] * 2 + [2] * 6
    tries = Store(tmp_path / "r" / "tuning")
    for number, method in enumerate(("fedavg", "fedcm")):
        short = [tries.get(cell.config) for cell in ran[:4] if cell.method == method]
        best = max((one for one in short if one is not None), key=lambda one: one.score)
        assert ran[4 + number].config.flat() | {"rounds": 1, "eval_every": 1} == ran[4 + number].config.flat() | best.config | {
            "eval_every": 1
        }
    assert call("reproduce", "t.toml", "--results", "r", "--show", "--format", "markdown") == 0
    assert "not run" in capsys.readouterr().out  # for all points are asked for
    assert call("reproduce", "t.toml", "--results", "r", "--show", "--halving", "--format", "markdown") == 0
    assert "All of these were run for a quarter of the rounds, and the best quarter of them for all." in capsys.readouterr().out


def test_nothing_is_chosen_before_the_whole_grid_was_tried(spec: grid.Spec, tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    assert tuned.choice(spec, store, spec.rows[0], "fedavg", 0.1) is None
    assert tuned.choice(spec, store, spec.rows[0], "fedagg", 0.1) == {}
    assert {cell.method for cell in tuned.finals(spec, store)} == {"fedagg"}
    sheet = tuned.sheet(spec, tuned.gather(spec, store, store))
    assert sheet.rows == [["mini", "IID", "10 %", "not run", "not run", "not run", "-"]]
    assert sheet.notes == ["Nothing of this was run yet."]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("recipe = [{ cm_alpha = 0.5, weight_decay = 1e-3 }]", "cm_alpha = [0.1, 0.2]"), "grids = {'fedavg': 2, 'fedcm': 4}"),
        (("cm_alpha = 0.5", "mu = 0.5"), "mu = "),
        (("[grids.fedavg]", "[grids.fedagv]"), "grids = 'fedagv': did you mean 'fedavg'"),
    ],
)
def test_unfair_or_impossible_grids_are_refused(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TOML.replace(*change), encoding="utf-8")
    with pytest.raises(SettingError) as error:
        grid.load(str(tmp_path / "t.toml"))
    assert words in str(error.value)


def test_a_target_for_any_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    plain = "\n".join(line for line in TOML.splitlines() if not line.startswith(("[grids", "recipe", "lr", "[common", "tuning")))
    Path("p.toml").write_text(plain.replace('"tuned"', '"table"').replace('"fedcm", ', ""), encoding="utf-8")
    assert call("reproduce", "p.toml", "--results", "r", "--seeds", "1", "--target", "0.2", "--format", "markdown") == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| setting | split | clients | method | accuracy | rounds to 20 % | MB to 20 % | FedAgg ahead by (95 %) |"
    assert [row.split(" | ")[3] for row in rows if row.startswith("| mini")] == ["FedAgg", "FedAvg"]
