"""The paper's MNIST task on the real data: what the README says of it, run again. Skipped where the data is not."""

from __future__ import annotations

import pytest

import fedagg
from fedagg.errors import DataError


@pytest.fixture(scope="module")
def mnist() -> fedagg.Dataset:
    try:
        return fedagg.data.load("mnist", download=False)
    except DataError:
        pytest.skip("MNIST is not in the data directory")


@pytest.mark.slow
@pytest.mark.parametrize(("split", "ahead"), [("iid", 0.02), ("shards", 0.03)])
def test_fedagg_is_ahead_of_fedavg_at_its_local_work(mnist: fedagg.Dataset, split: str, ahead: float) -> None:
    runs = {
        name: fedagg.run(preset="mnist-linear", algorithm=name, partition=split, data=mnist, eval_every=30)
        for name in ("fedavg", "fedagg")
    }
    work = {name: sum(row["samples"] for row in result.history) for name, result in runs.items()}
    tried = 7  # trainings before the first round: at the start, and one for each rate
    assert 30 * work["fedagg"] == (30 + tried) * work["fedavg"]
    assert runs["fedagg"].accuracy >= runs["fedavg"].accuracy + ahead
    if split == "iid":
        assert runs["fedavg"].accuracy == pytest.approx(0.882, abs=0.005)
