"""Comparisons over several seeds: means, deviations, paired differences with an interval, a band in the plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedagg import cli, paired, plots
from fedagg.cli import compare
from fedagg.scores import sheet, standings

TINY = ["--rounds", "2", "--clients", "20", "--participation", "0.1", "--epochs", "1", "--quiet"]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_students_t_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (*range(1, 40), 60, 100, 1000):
        assert paired.student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=6e-4)


def test_a_paired_difference_is_narrower_than_the_seeds_are_apart() -> None:
    """By hand: the differences 1, 2, 3 have mean 2, deviation 1, and t = 4.303 for two degrees of freedom."""
    one, other = {0: 11.0, 1: 52.0, 2: 93.0}, {0: 10.0, 1: 50.0, 2: 90.0}
    assert paired.difference(one, other) == pytest.approx((2.0, 4.303 / math.sqrt(3)))
    assert paired.deviation(list(one.values())) == pytest.approx(41.0)
    assert paired.difference(one, {0: 10.0})[0] == 1.0  # the one seed that both have
    assert math.isnan(paired.difference(one, {0: 10.0})[1])
    assert math.isnan(paired.difference(one, {})[0])


def test_compare_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("compare", "fedavg,fedcm", *TINY, "--seed", "3", "--seeds", "3", "--out", str(tmp_path))
    assert call(*command, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(run["algorithm"], run["seed"]) for run in told["runs"]] == [(m, s) for s in (3, 4, 5) for m in ("fedavg", "fedcm")]
    avg, cm = ([run["accuracy"] for run in told["runs"] if run["algorithm"] == m] for m in ("fedavg", "fedcm"))
    base, other = told["methods"]
    assert (base["accuracy"], base["deviation"]) == pytest.approx((statistics.mean(avg), statistics.stdev(avg)))
    assert (base["ahead"], base["within"]) == (None, None)
    gaps = [b - a for a, b in zip(avg, cm, strict=True)]
    assert (other["ahead"], other["within"]) == pytest.approx(
        (statistics.mean(gaps), 4.303 * statistics.stdev(gaps) / math.sqrt(3))
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        "accuracy.png", *(f"{m}-seed{s}" for m in ("fedavg", "fedcm") for s in (3, 4, 5))
    }  # fmt: skip
    assert call(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"] == told["runs"]  # with their seconds: nothing is run again
    assert call(*command) == 0
    printed = capsys.readouterr().out
    assert f"{100 * other['ahead']:+.2f} ± {100 * other['within']:.2f}" in printed
    assert "seeds 3 to 5" in printed
    assert "against fedavg (95 %)" in printed


def test_a_run_that_was_stopped_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Impatient(compare.Live):
        def started(self, config: Any, done: int) -> None: ...

        def round_done(self, row: dict[str, object]) -> None:
            if self.label == "fedcm-seed1":
                raise KeyboardInterrupt

    loud = [word for word in TINY if word != "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(compare, "Live", Impatient)
        assert call("compare", "fedavg,fedcm", *loud, "--seeds", "2", "--json", "--out", str(tmp_path)) == 130
    methods = json.loads(capsys.readouterr().out)["methods"]
    assert [one["seeds"] for one in methods] == [2, 1]
    assert methods[1]["within"] is None


def test_a_method_without_a_whole_run_has_no_figures() -> None:
    (one,) = standings({"fedavg": []}, 0.5)
    assert (one.seeds, one.record()["accuracy"], one.to_target()) == (0, None, ("-", "-"))
    assert sheet({"": [one]}, "").rows[0][:2] == ["fedavg", "-"]


def test_the_band_is_one_deviation_around_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn: list[tuple[Sequence[float], ...]] = []
    monkeypatch.setattr(Axes, "fill_between", lambda self, x, low, high, **_: drawn.append((x, low, high)))
    seeds = [[{"round": t, "accuracy": a} for t, a in enumerate(curve, start=1)] for curve in ([0.1, 0.5, 0.9], [0.3, 0.5])]
    plots.score_curves({"fedavg": seeds, "fedcm": seeds[:1]}, tmp_path / "a.png", "", "accuracy")
    ((rounds, low, high),) = drawn  # one curve alone has no band
    assert list(rounds) == [1, 2]
    deviation = math.sqrt(200)  # of 10 and 30
    assert np.allclose(low, [20 - deviation, 50])
    assert np.allclose(high, [20 + deviation, 50])
