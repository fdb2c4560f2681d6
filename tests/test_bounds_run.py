"""Real runs against the analysis: on the linear model every bound that applies holds in every round."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn

import fedagg
from fedagg import Dataset, cli
from fedagg.errors import FedaggWarning, SettingError
from fedagg.theory import bounds, from_run, present
from fedagg.theory.bounds import Bound
from fedagg.theory.fixed_point import algorithm_one
from fedagg.theory.from_run import Analysis, Statement, analyse
from fedagg.theory.objective import Objective

ABOUT_F = ("progress", "loss", "gradient", "distance", "contraction", "wandering")


def dataset() -> Dataset:
    """Three classes that overlap, so that w* exists without weight decay."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=generator)
    scores = x @ torch.randn(5, 3, generator=generator) + 1.5 * torch.randn(200, 3, generator=generator)
    y = scores.argmax(1)
    return Dataset(x[:180], y[:180], x[180:], y[180:], classes=3)


DATA = dataset()
FULL: dict[str, Any] = {
    "model": "linear",
    "clients": 6,
    "participation": 1.0,
    "rounds": 15,
    "epochs": 3,
    "batch_size": 200,
    "lr": 0.05,
    "device": "cpu",
}


def analysed(folder: Path, **settings: Any) -> Analysis:
    fedagg.run(data=DATA, out=folder / "run", **{**FULL, **settings})
    return analyse(folder / "run", data=DATA)


CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm": "fedavg"},
    "weight decay": {"algorithm": "fedavg", "weight_decay": 0.05},
    "unequal sizes": {"algorithm": "fedavg", "partition": "dirichlet-class", "sigma": 1.0},
    "one step": {"algorithm": "fedavg", "epochs": 1, "lr": 0.5},
    "theorem 1": {"variant": "paper"},
    "aggregated": {"variant": "paper", "direction": "aggregated"},
    "mixed": {"variant": "paper", "direction": "mixed", "partition": "dirichlet-class", "sigma": 1.0},
}


@pytest.mark.parametrize("case", CASES)
def test_every_bound_holds_in_every_round_on_the_linear_model(tmp_path: Path, case: str) -> None:
    found = analysed(tmp_path, **CASES[case])
    for name in ("drift", *ABOUT_F):
        one = found[name]
        assert all(bound.applies for bound in one.bounds), one.reason
        assert one.broken() == []
        assert len(one.measured) == 15
    assert found["rate"].applies == ("variant" in CASES[case])
    assert found["rate"].broken() == []
    assert found["loss"].measured[-1] < found["loss"].measured[0]  # something was learnt


def test_samples_that_a_run_held_back_are_not_in_its_objective(tmp_path: Path) -> None:
    found = analysed(tmp_path, algorithm="fedavg", rounds=3, validation=0.3)  # a run that came out otherwise would warn
    kept = DATA.held_back(0.3, 0)
    assert len(found.objective.dealt) == len(kept) == 126
    assert torch.equal(found.objective.x, kept.x_train)
    assert found["drift"].applies
    assert found.config.validation == 0.3


def test_bounds_are_near_what_happens(tmp_path: Path) -> None:
    # One full-gradient step a round: the largest drift is the bound, and with a tenth less of P the bound is broken
    found = analysed(tmp_path, algorithm="fedavg", epochs=1, lr=0.5)
    drift, P = found["drift"], found.constants.P
    assert max(drift.measured) == pytest.approx(drift.bounds[0].value, rel=1e-5)
    assert P is not None
    less = bounds.client_drift(replace(found.constants, P=0.9 * P))
    assert replace(drift, bounds=[less] * 15).broken() == [1]


def test_constants_of_a_run(tmp_path: Path) -> None:
    found = analysed(tmp_path, algorithm="fedavg")
    c, objective = found.constants, found.objective
    assert (c.L, c.N, c.local, c.imbalance) == (3, 6, 1.0, 0.0)
    assert c.delta_l == c.delta_h == pytest.approx(0.05)
    # β by hand: no client's curvature is above it anywhere, and at w = 0 it is not much below
    curvature = max(objective.client_smoothness(torch.zeros(18), i, 200) for i in range(6))
    assert c.beta is not None
    assert 0.5 * c.beta < curvature <= c.beta
    # F* by another method, in all 18 weights
    other = scipy.optimize.minimize(
        lambda w: tuple(map(np.asarray, objective.value_and_gradient(torch.from_numpy(w)))),
        found.start.numpy(),
        jac=True,
        method="BFGS",
        options={"gtol": 1e-8},
    )
    assert found.best == pytest.approx(other.fun, abs=1e-12)
    assert set(found.sources) - {"F*"} <= set(vars(c))


def test_the_objective_is_that_of_the_clients() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    parts = [range(10), range(10, 40), range(40, 60)]
    objective = Objective(module, DATA.x_train, DATA.y_train, parts, weight_decay=0.1)
    w = objective.layout.pack(module).w.double()
    x, y = DATA.x_train[:60].double(), DATA.y_train[:60]
    module = module.double()
    loss = nn.functional.cross_entropy(module(x), y) + 0.05 * sum(p.square().sum() for p in module.parameters())
    loss.backward()
    exact = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    value, gradient = objective.value_and_gradient(w)
    assert value == pytest.approx(loss.item())
    assert torch.allclose(gradient, exact)
    assert torch.allclose(objective.theta @ objective.gradients(w), exact)
    assert torch.allclose(objective.around(w).gradients(torch.zeros_like(w)), objective.gradients(w))
    assert objective.imbalance == pytest.approx(2 * (1 / 2 - 1 / 3))
    assert objective.linear is None
    assert objective.smoothness_bound() is None
    with pytest.raises(SettingError, match="linear"):
        objective.solve(10)


def test_the_linear_model_as_a_matrix_and_back() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    objective = Objective(module, DATA.x_train, DATA.y_train, [range(9)])
    w = objective.layout.pack(module).w.double()
    matrix = objective.as_matrix(w)
    x = torch.cat([DATA.x_train, torch.ones(len(DATA), 1)], 1).double()
    assert torch.allclose(x @ matrix.T, objective.outputs(w, DATA.x_train.double()))
    assert torch.equal(objective.as_vector(matrix), w)


@pytest.mark.parametrize(
    ("settings", "words", "drifts"),
    [
        ({"algorithm": "fedavg", "batch_size": 8}, "set --batch-size 30", True),
        ({"algorithm": "fedavg", "participation": 0.5}, "set --participation 1", True),
        ({"algorithm": "fedavg", "momentum": 0.5}, "plain gradient steps", False),
        ({"algorithm": "fedavg", "straggler_rate": 0.5}, "all its work", True),
        ({"algorithm": "fedadam"}, "a server that only averages", True),
        ({"algorithm": "fedprox", "mu": 1.0}, "proximal term", False),
        ({"algorithm": "fedagg"}, "a server that only averages", False),  # its clients remember
        ({"algorithm": "fedagg", "memory": "off"}, "a server that only averages", True),
        ({"algorithm": "fedagg", "pace": "base"}, "those of earlier rounds", True),
        ({"variant": "paper", "direction": "aggregated", "weight_decay": 0.1}, "set --weight-decay 0", True),
        ({"algorithm": "fedavg", "batch_size": 8, "weight_decay": 0.1}, "set --batch-size 30", False),
    ],
)
def test_results_that_do_not_apply_give_the_reason(tmp_path: Path, settings: dict[str, Any], words: str, drifts: bool) -> None:
    found = analysed(tmp_path, rounds=4, **settings)
    for name in ABOUT_F:
        assert not found[name].applies
        assert words in found[name].reason
    assert found["drift"].applies == drifts
    assert found["drift"].broken() == []


def test_the_bound_of_the_default(tmp_path: Path) -> None:
    found = analysed(tmp_path / "small", algorithm="fedagg", pace="base", lr=0.02)["field"]
    assert found.applies
    assert found.broken() == []
    assert found.bounds[-1].value < 0.2 * found.bounds[0].value
    bold = analysed(tmp_path / "bold", algorithm="fedagg", pace="base", lr=1.0, rounds=4)["field"]
    assert "1 - βLδ_h" in bold.reason
    assert "the last round" in analysed(tmp_path / "avg", algorithm="fedavg", rounds=3)["field"].reason
    assert "set --participation 1" in analysed(tmp_path / "some", algorithm="fedagg", rounds=3, participation=0.5)["field"].reason


def test_bold_rates_leave_some_results_without_a_number(tmp_path: Path) -> None:
    found = analysed(tmp_path, algorithm="fedavg", lr=1.0, rounds=4)
    assert "β L δ_h < 2" in found["loss"].reason
    assert found["progress"].applies  # needs no condition
    assert all(one.broken() == [] for one in found.statements)


def test_separable_classes_have_no_w_star_but_a_bounded_loss(tmp_path: Path) -> None:
    x = torch.tensor([[-2.0, 0.0], [-1.0, 1.0], [1.0, 1.0], [2.0, 0.0]]).repeat(3, 1)
    data = Dataset(x, (x[:, 0] > 0).long(), x, (x[:, 0] > 0).long(), classes=2)
    fedagg.run(data=data, out=tmp_path / "run", algorithm="fedavg", **{**FULL, "clients": 3})
    found = analyse(tmp_path / "run", data=data)
    assert found.best == 0.0
    assert "separated" in found["distance"].reason
    assert "--weight-decay" in found["distance"].reason
    assert found["loss"].applies
    assert found["loss"].broken() == []


def test_another_model_has_measured_constants(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    fedagg.run(data=DATA, out=tmp_path / "run", algorithm="fedavg", **{**FULL, "model": module, "rounds": 5})
    found = analyse(tmp_path / "run", data=DATA, model=module)
    assert found.constants.beta is not None
    assert found.constants.psi is None
    assert "power iteration" in found.sources["beta"]
    assert "w* is not known" in found["distance"].reason
    assert found["loss"].applies
    assert all(one.broken() == [] for one in found.statements)


def test_batch_normalisation_and_size_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    fedagg.run(data=DATA, out=tmp_path / "norm", **{**FULL, "model": module, "rounds": 2})
    with pytest.raises(SettingError, match="batch normalisation"):
        analyse(tmp_path / "norm", data=DATA, model=module)
    fedagg.run(data=DATA, out=tmp_path / "run", **{**FULL, "rounds": 4})
    monkeypatch.setattr(from_run, "LIMIT", 180 * 18 * 3.5)
    with pytest.raises(SettingError, match="--rounds 3"):
        analyse(tmp_path / "run", data=DATA)
    assert analyse(tmp_path / "run", 3, data=DATA).rounds == 3


def test_a_run_that_comes_out_differently_is_noticed(tmp_path: Path) -> None:
    fedagg.run(data=DATA, out=tmp_path / "run", algorithm="fedavg", **{**FULL, "rounds": 2})
    other = Dataset(DATA.x_train + 1.0, DATA.y_train, DATA.x_test, DATA.y_test)
    with pytest.warns(FedaggWarning, match="when repeated"):
        analyse(tmp_path / "run", data=other)


def test_algorithm_1_on_the_clients_of_a_run(tmp_path: Path) -> None:
    found = analysed(tmp_path, algorithm="fedavg", rounds=1)
    record = algorithm_one(found.objective, found.start, alpha=0.1, epochs=3, rate=0.05, passes=5)
    assert all(one.rate_factor <= one.limit * (1 + 1e-9) for one in record)
    beta = found.constants.beta
    assert beta is not None
    assert record[0].paper == pytest.approx(((beta**2 + 1) * float(record[0].rates.max()) / 6) ** 0.5)
    present.write_passes(record, tmp_path / "passes.csv")
    rows = list(csv.DictReader((tmp_path / "passes.csv").read_text(encoding="utf-8").splitlines()))
    assert [float(row["measured"]) for row in rows] == [one.rate_factor for one in record]


def test_broken_bounds_are_counted() -> None:
    one = Statement("x", "", "", [1.0, 2.0, 3.0], [Bound.of(1.5), Bound.of(1.5), Bound.none("why")], [Bound.of(5.0)] * 3)
    assert one.broken() == [2]
    assert one.reason == "why"
    assert present.verdict(one) == "1 of 2"
    assert present.verdict(one, printed=True) == "3 of 3"


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    return int(end.value.code or 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    named = Dataset(DATA.x_train, DATA.y_train, DATA.x_test, DATA.y_test, name="mnist-mini")
    monkeypatch.setattr("fedagg.from_config.load", lambda *asked: named)
    monkeypatch.setattr(Dataset, "untouched", True)  # as if it had been loaded by that name
    fedagg.run(data=named, algorithm="fedavg", out=tmp_path / "run", **{**FULL, "rounds": 3})
    assert command("bounds", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--fixed-point", "--passes", "2") == 0
    told = capsys.readouterr().out
    assert "holds everywhere" in told
    assert "Proposition 3 (largest |η|) does not apply: needs rates of Theorem 1" in told
    assert "Algorithm 1" in told
    rows = list(csv.DictReader((tmp_path / "out/bounds.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    assert rows[0]["rate_bound"] == ""
    for name in ("drift", *ABOUT_F):
        assert all(float(row[name]) <= float(row[f"{name}_bound"]) * (1 + 1e-4) or name == "progress" for row in rows)
    facts = json.loads((tmp_path / "out/bounds.json").read_text(encoding="utf-8"))
    assert facts["constants"]["N"] == 6
    assert [one["name"] for one in facts["results"] if not one["applies"]] == ["rate", "field"]
    assert (tmp_path / "out/bounds.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "bounds.csv",
        "bounds.json",
        "bounds.png",
        "fixed_point.csv",
    ]
    assert command("bounds", str(tmp_path / "run"), "--rounds", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 1
    assert (tmp_path / "run/bounds.csv").exists()


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("bounds", str(tmp_path)) == 2
    assert "is not a run folder" in capsys.readouterr().err
