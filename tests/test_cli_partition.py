"""`fedagg partition`: its files against numbers counted here, on named data, on labels of one's own, on a run."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

import fedagg
from fedagg import Dataset, cli, data, models, partition, seeding
from fedagg.theory import heterogeneity as het

FILES = ["distances.csv", "labels.csv", "labels.png", "sigma.csv", "sigma.png"]


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["partition", *arguments])
    return int(end.value.code or 0)


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_named_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--partition", "shards", "--clients", "10", "--seed", "3", "--out", str(tmp_path))
    assert command("--dataset", "mnist-mini", *given) == 0
    told = capsys.readouterr().out
    assert "shards, 2 each" in told
    assert "gradients at the initial model" in told
    assert names(tmp_path) == sorted([*FILES, "gradients.csv"])
    mini = data.load("mnist-mini")
    parts = partition.shards(mini.y_train, 10, 2, 3)
    for row, part in zip(table(tmp_path / "labels.csv"), parts, strict=True):
        held = [int(row[f"label_{a}"]) for a in range(10)]
        assert held == np.bincount(mini.y_train[part].numpy(), minlength=10).tolist()
    over = table(tmp_path / "sigma.csv")
    assert [row["sigma"] for row in over] == ["0.1", "0.3", "0.6", "1.0", "inf"]
    # Gradient dissimilarity of the initial linear model, by autograd on the module itself
    module = models.build("linear", mini.shape, 10, seed=seeding.derive(3, "model"))
    rows = []
    for part in parts:
        module.zero_grad()
        nn.functional.cross_entropy(module(mini.x_train[part]), mini.y_train[part]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).numpy())
    exact = het.gradient_dissimilarity(np.stack(rows))
    (row,) = table(tmp_path / "gradients.csv")
    assert row["model"] == "initial"
    assert float(row["variance"]) == pytest.approx(exact.variance, rel=1e-3)
    assert float(row["ratio"]) == pytest.approx(exact.ratio, rel=1e-3)


@pytest.mark.parametrize("ending", ["csv", "npy"])
def test_labels_of_your_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str) -> None:
    labels = np.random.default_rng(0).integers(0, 4, 400)
    path = tmp_path / f"mine.{ending}"
    if ending == "npy":
        np.save(path, labels)
    else:
        path.write_text("label\n" + "\n".join(map(str, labels)), encoding="utf-8")
    given = ("--labels", str(path), "--clients", "8", "--sigma", "0.3", "--out", str(tmp_path / "out"), "--json")
    assert command(*given) == 0
    told = json.loads(capsys.readouterr().out)
    assert names(tmp_path / "out") == FILES
    assert told["gradients"] == {}
    exact = het.distances(het.label_counts(labels, partition.dirichlet(labels, 8, 0.3, 0)))
    found = told["splits"]["dirichlet, σ = 0.3"]["total_variation"]
    assert found == {"mean": exact.mean("total_variation"), "std": exact.spread("total_variation")}
    assert list(told["splits"]) == [*(f"dirichlet, σ = {s}" for s in ("0.3", "0.1", "0.6", "1")), "iid"]


def test_a_run_has_two_models(tmp_path: Path) -> None:
    settings = {"dataset": "mnist-mini", "partition": "shards", "clients": 10, "rounds": 2, "participation": 1.0}
    fedagg.run(algorithm="fedavg", out=tmp_path / "run", lr=0.1, **settings)
    assert command("--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")) == 0
    rows = table(tmp_path / "out/gradients.csv")
    assert [row["model"] for row in rows] == ["initial", "final"]
    # Two labels a client: the global gradient shrinks in training, and what the clients disagree about does not
    assert float(rows[1]["ratio"]) > float(rows[0]["ratio"]) > 1.0


def test_the_split_of_a_run_is_of_what_it_trained_on(tmp_path: Path) -> None:
    settings = {"partition": "shards", "clients": 20, "rounds": 1, "seed": 2, "validation": 0.3, "engine": "batched"}
    fedagg.run(algorithm="fedavg", out=tmp_path / "run", **settings)
    assert command("--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")) == 0
    kept = data.load("mnist-mini").held_back(0.3, 2)
    for row, part in zip(table(tmp_path / "out/labels.csv"), partition.shards(kept.y_train, 20, 2, 2), strict=True):
        held = [int(row[f"label_{a}"]) for a in range(10)]
        assert held == np.bincount(kept.y_train[part].numpy(), minlength=10).tolist()
    assert {row["samples"] for row in table(tmp_path / "out/distances.csv")} == {"210"}
    assert len(table(tmp_path / "out/gradients.csv")) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "the run is not finished"), (b"junk", "is damaged"), ("lenet5", "holds the weights of another model")],
)
def test_a_model_that_cannot_be_read_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | str | None, words: str
) -> None:
    run, weights = tmp_path / "run", tmp_path / "run" / "model.safetensors"
    fedagg.run(algorithm="fedavg", clients=10, rounds=1, engine="batched", out=run)
    good = weights.read_bytes()
    if isinstance(content, bytes):
        weights.write_bytes(content)
    elif content is None:
        weights.unlink()
    else:
        save_file(models.build(content, (1, 28, 28), 10).state_dict(), weights)
    assert command("--run", str(run), "--out", str(tmp_path / "out")) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "model.safetensors" in told
    assert f"fedagg run --resume {run}" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()
    fedagg.run(resume=run, algorithm="fedavg", clients=10, rounds=1, engine="batched")
    assert weights.read_bytes() == good


def test_a_bar_over_clients_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(cli.show, "err", Console(file=shown, force_terminal=True, width=120))
    assert command("--clients", "7", "--out", str(tmp_path)) == 0
    assert "gradients at the initial model" in shown.getvalue()
    assert "7/7" in shown.getvalue()


@pytest.mark.filterwarnings("default")
def test_a_sigma_that_leaves_clients_empty_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "l.npy", np.repeat(np.arange(3), 40))
    given = ("--labels", str(tmp_path / "l.npy"), "--partition", "dirichlet-class", "--sigma", "100", "--clients", "20")
    assert command(*given, "--out", str(tmp_path / "out")) == 0
    assert "warning: sigma = 0.1: each of 100 draws left one of the 20 clients" in capsys.readouterr().err
    assert [row["sigma"] for row in table(tmp_path / "out/sigma.csv")][-1] == "inf"
    assert len(table(tmp_path / "out/sigma.csv")) < 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--labels", "no.csv"), "no.csv"),
        (("--labels", "no.csv", "--dataset", "mnist-mini"), "either --labels or --dataset"),
        (("--partition", "dirichlett"), "did you mean 'dirichlet'"),
        (("--clients", "6001"), "only 6000 samples"),
        (("--run", "nowhere"), "is not a run folder"),
        (("--run", "nowhere", "--sigma", "1"), "leave --sigma out"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    assert command(*arguments, "--out", str(tmp_path)) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_streamed_dissimilarity_is_the_same() -> None:
    rng = np.random.default_rng(0)
    rows, theta = rng.normal(size=(7, 5)) + 1.0, rng.dirichlet(np.ones(7))
    whole, streamed = het.gradient_dissimilarity(rows, theta), het.streamed_dissimilarity(iter(rows), theta)
    assert streamed.variance == pytest.approx(whole.variance)
    assert streamed.ratio == pytest.approx(whole.ratio)
    assert het.streamed_dissimilarity([[1.0], [-1.0]], [0.5, 0.5]).ratio == float("inf")
    assert het.streamed_dissimilarity([[0.0]], [1.0]).ratio == 1.0


def test_a_dataset_from_python_has_no_name_to_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    mine = Dataset(x, (x[:, 0] > 0).long(), x, (x[:, 0] > 0).long())
    fedagg.run(data=mine, model="linear", clients=4, rounds=1, participation=1.0, out=tmp_path / "run")
    assert command("--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")) == 2
    assert "the run's data came from Python" in capsys.readouterr().err
