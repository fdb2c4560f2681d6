"""Comparisons from Python and side by side; tables of runs in every format; rounds and bytes to a target."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fedagg
import tiny
from fedagg import cli, comparison, trackers
from fedagg.errors import SettingError
from fedagg.reproduce import running
from fedagg.scores import Score, sheet, standings
from fedagg.sheets import Sheet

TINY: dict[str, Any] = {"rounds": 2, "clients": 20, "participation": 0.1, "epochs": 1, "engine": "sequential"}
FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def scored(seed: int, *curve: float | None) -> Score:
    """A run that sends a megabyte a round."""
    known = [value for value in curve if value is not None]
    return Score(seed, known[-1], 0.5, curve, [1e6 * t for t in range(1, 1 + len(curve))], 4, 2.0)


def test_the_target_is_reached_in_the_first_evaluated_round_at_or_above_it() -> None:
    one = scored(0, None, 0.5, None, 0.8, 0.7, 0.9)
    assert one.reached(0.8) == (4, 4e6)
    assert one.reached(0.5) == (2, 2e6)
    assert one.reached(0.95) is None
    assert one.best == 0.9


def test_rounds_and_bytes_to_the_target_are_means_over_the_seeds_that_reached_it() -> None:
    runs = {"a": [scored(0, 0.1, 0.8), scored(1, 0.8, 0.7)], "b": [scored(0, 0.1, 0.2), scored(1, 0.1, 0.8)]}
    a, b = standings(runs, 0.75)
    assert (a.reached, a.rounds_to_target, a.megabytes_to_target) == (2, 1.5, 1.5)
    assert a.to_target() == ("1.5", "1.5")
    assert b.to_target() == ("2 (1 of 2)", "2.0")
    assert (b.ahead, round(b.within, 6)) == (pytest.approx(-0.25), round(12.706 * 0.35, 6))  # of -0.6 and 0.1
    made = sheet({"": [a, b]}, "t")
    assert list(made.heads[7:9]) == ["rounds to 75 %", "MB to 75 %"]
    assert made.bold == {(0, 2)}
    assert "rounds_to_target" not in standings(runs)[0].record()


def test_a_sheet_in_every_format() -> None:
    made = Sheet(
        "t",
        ["a|b", "n (%)"],
        [["x_1", "1 ± 2"], ["y", "3"]],
        [{"a": "x_1", "n": 1.5}, {"a": "y", "n": None}],
        bold=frozenset({(1, 1)}),
    )
    assert made.render("markdown").splitlines() == [r"| a\|b | n (%) |", "| --- | ---: |", "| x_1 | 1 ± 2 |", "| y | **3** |"]
    assert made.render("csv") == "a,n\nx_1,1.5\ny,\n"
    latex = made.render("latex")
    assert r"x\_1 & 1 $\pm$ 2 \\" in latex
    assert r"y & \textbf{3} \\" in latex
    assert r"n (\%) \\" in latex
    assert "│ x_1 │ 1 ± 2 │" in made.render("text")
    assert "<td><strong>3</strong></td>" in made.html()
    with pytest.raises(SettingError, match="format = 'word'"):
        made.render("word")


def test_from_python_it_is_the_same_as_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fedagg.compare("fedavg,fedcm", seeds=2, target=0.3, **TINY)
    told = found.json()
    command = ("compare", "fedavg,fedcm", *FLAGS, "--seeds", "2", "--target", "0.3", "--json", "--quiet")
    assert call(*command, "--out", str(tmp_path)) == 0
    same = json.loads(capsys.readouterr().out)
    for one, other in zip(told["methods"], same["methods"], strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert [result.run for result in found.results] == [None] * 4
    again = fedagg.compare(["fedavg", "fedcm"], seeds=2, target=0.3, out=tmp_path, **TINY)  # nothing is run
    assert again.json()["runs"] == same["runs"]
    rows = list(csv.DictReader(io.StringIO(again.table("csv"))))
    assert [row["method"] for row in rows] == ["fedavg", "fedcm"]
    assert float(rows[1]["ahead"]) == same["methods"][1]["ahead"]
    assert again.table().startswith("| algorithm | seeds | accuracy | against fedavg (95 %) | best |")


def test_a_comparison_in_a_notebook_and_as_a_frame(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pandas = pytest.importorskip("pandas")
    given: dict[str, Any] = {"data": tiny.dataset(), "model": tiny.network(), "clients": 6, "rounds": 2, "batch_size": 8}
    given |= {"engine": "sequential"}
    found = fedagg.compare("fedavg,fedcm", seeds=2, target=0.99, **given)
    page = found._repr_html_()
    assert "<th>against fedavg (95 %)</th>" in page
    assert 'src="data:image/png;base64,iVBOR' in page
    frame = found.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["method"]) == ["fedavg", "fedcm"] * 2
    assert list(frame["accuracy"]) == [result.accuracy for result in found.results]
    assert found.plot(tmp_path / "a.png") == tmp_path / "a.png"
    assert found.plot().axes
    with pytest.raises(SettingError, match="jobs = 2: data, model from Python"):
        fedagg.compare("fedavg", jobs=2, **given)


def test_without_pandas_the_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedagg.errors.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs pandas, which is not installed: pip install 'fedagg\[analysis\]'"):
        fedagg.comparison.Comparison([]).to_pandas()


@pytest.mark.slow
def test_side_by_side_gives_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("compare", "fedavg,fedcm", *FLAGS, "--threads", "1", "--json")
    for folder, jobs in (("one", "1"), ("two", "2")):
        assert call(*command, "--jobs", jobs, "--out", str(tmp_path / folder)) == 0
    assert "runs" in capsys.readouterr().err
    for method in ("fedavg", "fedcm"):
        assert tiny.same_run(tmp_path / "one" / method, tmp_path / "two" / method)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_killed_command_leaves_no_process_behind(tmp_path: Path) -> None:
    rows = [tmp_path / method / "metrics.jsonl" for method in ("fedavg", "fedcm")]
    command = [sys.executable, "-m", "fedagg", "compare", "fedavg,fedcm", *FLAGS, "--rounds", "1000000", "--jobs", "2", "--quiet"]
    command += ["--checkpoint-every", "1", "--out", str(tmp_path)]
    # Every process of the command holds the pipe, so it ends when all of them are gone. Their session is ended if the test fails.
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while not all(path.exists() and path.read_bytes().count(b"\n") > 1 for path in rows):  # so there is a checkpoint
            assert parent.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        parent.kill()
        parent.communicate(timeout=20)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    for path in rows:  # nobody uses the folders any more
        done = len(path.read_bytes().splitlines())
        assert len(fedagg.run(resume=path.parent, stop_at=0.001, progress=False).history) <= done + 1


def test_every_run_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []

    class Follower:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def started(self, config: Any, done: int) -> None:
            followed.append(self.folder.name)

        def round_done(self, row: Any) -> None: ...

        def finished(self, result: Any) -> None: ...

    monkeypatch.setitem(trackers.TRACKERS, "mine", Follower)
    fedagg.compare("fedavg,fedcm", track="mine", out=tmp_path / "c", **TINY)
    assert followed == ["fedavg", "fedcm"]
    with pytest.raises(SettingError, match="track = 'yours'"):
        fedagg.compare("fedavg", track="mine,yours", out=tmp_path / "d", **TINY)
    assert not (tmp_path / "d").exists()


def test_jobs_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "cores", lambda: 8)
    assert running.processes("auto", 3) == 3
    assert running.processes("auto", 100) == 8
    assert running.processes("2", 100) == running.processes(2, 1) == 2
    for wrong in ("0", "many", 0, -1):
        with pytest.raises(SettingError, match="jobs = "):
            running.processes(wrong, 1)
    given: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", given.append)
    monkeypatch.setattr(running.signal, "signal", lambda *_: None)
    for jobs in (1, 3, 16):
        running.begin(Path("none"), None, running.threading.Event(), jobs, running.run_cell)
    assert given == [8, 2, 1]


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("target = 80: give the accuracy to reach as a share", {"target": 80}),
        ("target = 80: give the accuracy to reach as a share", {"target": 80, "metric": "accuracy"}),
        ("seeds = 0", {"seeds": 0}),
        ("seeds = []", {"seeds": []}),
        ("seeds = 1.5", {"seeds": 1.5}),
        ("seeds = '34'", {"seeds": "34"}),
        ("seed = 1: all seeds are listed in seeds", {"seeds": [3, 4], "seed": 1}),
        ("jobs = 'some'", {"jobs": "some"}),
        ("track = 'tensorboard': needs a folder", {"track": "tensorboard"}),
        ("mu = 5: fedavg has no such option", {"mu": 5}),
    ],
)
def test_what_cannot_be_compared_is_refused(words: str, more: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as error:
        fedagg.compare("fedavg", **TINY | more)
    assert str(error.value).startswith(words)


def test_a_target_is_checked_against_the_metric_of_the_data() -> None:
    given: dict[str, Any] = {"data": tiny.dataset(), "model": tiny.network(), "clients": 6, "rounds": 1, "engine": "sequential"}
    with pytest.raises(SettingError, match="target = 90: give the accuracy to reach as a share"):
        fedagg.compare("fedavg", target=90, **given)

    def margin(output: Any, y: Any) -> Any:
        return output.max(1).values

    found = fedagg.compare("fedavg", target=-90, metric=margin, **given)  # any number, and always reached in the first round
    assert found.standings[0].rounds_to_target == 1
    with pytest.raises(SettingError, match="target = inf: give the margin to reach, a finite number"):
        fedagg.compare("fedavg", target=float("inf"), metric=margin, **given)


def test_settings_for_each_method_are_refused() -> None:
    with pytest.raises(SettingError) as error:
        fedagg.compare({"fedagg": {}, "fedavg": {"lr": 0.3}}, **TINY)
    assert str(error.value).startswith(
        "methods = {'fedagg': {}, 'fedavg': {'lr': 0.3}}: give a list of names; settings are keywords"
    )


def test_seeds_may_be_listed() -> None:
    found = fedagg.compare("fedavg", seeds=[7, 3, 7], **TINY | {"rounds": 1})
    assert [result.config.seed for result in found.results] == [7, 3]
    assert found.title.endswith("seeds 3, 7")
    assert comparison.task(found.results[0].config, [4, 3]).endswith("seeds 3 to 4")
    assert comparison.list_seeds(3, 5) == [5, 6, 7]


def folder(path: Path, seed: int, *accuracies: float, **settings: Any) -> None:
    """A run folder with these accuracies, and a megabyte each way a round."""
    path.mkdir(parents=True)
    config = fedagg.Config(**{"algorithm": "fedavg", "seed": seed, "rounds": len(accuracies), **settings})
    (path / "config.toml").write_text(config.toml(), encoding="utf-8")
    rows = [
        {"round": t, "accuracy": a, "loss": 1.0, "bytes_up": 1e6, "bytes_down": 1e6, "passes": 1, "seconds": 1.0, "samples": 1}
        | {"drift": a, "rate_mean": [0.1]}
        for t, a in enumerate(accuracies, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(Path("k/a0"), 0, 0.1, 0.5)
    folder(Path("k/a1"), 1, 0.3, 0.7)
    folder(Path("k/b0"), 0, 0.6, 0.9, algorithm="fedcm")
    folder(Path("k/b1"), 1, 0.2, 0.9, algorithm="fedcm")


@pytest.mark.usefixtures("kept")
def test_a_table_of_run_folders(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("table", "k", "--format", "markdown", "--target", "0.6") == 0
    head, _, one, other = capsys.readouterr().out.splitlines()
    assert head.startswith("| method | seeds | accuracy | against FedAvg (95 %) | best |")
    assert "rounds to 60 % | MB to 60 %" in head
    assert one.startswith("| FedAvg | 2 | 60.00 % ± 14.14 | - |")
    assert "| 2 (1 of 2) | 4.0 |" in one
    assert other.startswith("| FedCM | 2 | **90.00 % ± 0.00** | +30.00 ± 127.06 |")  # 40 and 20: deviation 14.14, t 12.706
    assert "| 1.5 | 3.0 |" in other
    assert call("table", "k/a0", "k/b0", "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["method"], row["accuracy"]) for row in rows] == [("FedAvg", "0.5"), ("FedCM", "0.9")]
    folder(Path("k/c0"), 0, 0.4, partition="shards")
    assert call("table", "k", "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [("shards" in row["setting"], row["method"]) for row in rows] == [(False, "FedAvg"), (False, "FedCM"), (True, "FedAvg")]
    for wrong, words in (
        (["--format", "word"], "format = 'word'"),
        (["--target", "60"], "target = 60"),
        (["none"], "what = 'none'"),
    ):
        assert call("table", "k", *wrong) == 2
        assert words in capsys.readouterr().err


@pytest.mark.usefixtures("kept")
def test_plot_shows_the_mean_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from fedagg import plots

    drawn: list[Any] = []
    monkeypatch.setattr(plots, "panels", lambda grid, paths, title: drawn.append(grid[0][0].series) or [])
    call("plot", "k")
    call("plot", "k", "--each")
    folder(Path("k/c0"), 0, 0.4, partition="shards")
    call("plot", "k")
    means, every, more = drawn
    assert [one.name for one in means] == ["FedAvg (2 seeds)", "FedCM (2 seeds)"]
    assert (means[0].x, means[0].y) == ([1.0, 2.0], pytest.approx([20.0, 60.0]))
    assert means[0].spread == pytest.approx([200**0.5, 200**0.5])
    assert [one.name for one in every] == ["fedavg seed 0", "fedavg seed 1", "fedcm seed 0", "fedcm seed 1"]
    assert "FedAvg, shards 2, 1 rounds" in [one.name for one in more]
