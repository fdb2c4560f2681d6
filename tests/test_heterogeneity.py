"""Distances between label distributions against numbers worked out by hand, and files that are whole or not there."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedagg.errors import DataError
from fedagg.partition import dirichlet
from fedagg.theory import heterogeneity as het


def parts(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def test_label_counts() -> None:
    counts = het.label_counts([0, 1, 1, 2, 2, 2], parts([0, 1, 5], [2, 3, 4], []), classes=4)
    assert counts.tolist() == [[1, 1, 1, 0], [0, 1, 2, 0], [0, 0, 0, 0]]
    assert het.label_counts([0, 2], parts([0], [1])).shape == (2, 3)


@pytest.mark.parametrize(
    ("labels", "rows", "classes"),
    [([], [[]], None), ([0.5], [[0]], None), ([[0]], [[0]], None), ([-1], [[0]], 2), ([2], [[0]], 2), ([0], [], 1)],
)
def test_bad_labels_are_refused(labels: list[float], rows: list[list[int]], classes: int | None) -> None:
    with pytest.raises(DataError):
        het.label_counts(labels, parts(*rows), classes)


def test_distances_by_hand() -> None:
    # Two clients, each with one end of a scale of three labels: the whole is (1/2, 0, 1/2)
    found = het.distances(np.array([[4, 0, 0], [0, 0, 4]]))
    assert found.wasserstein.tolist() == pytest.approx([1.0, 1.0])  # half the mass, two labels far
    assert found.total_variation.tolist() == pytest.approx([0.5, 0.5])
    divergence = 0.5 * math.log2(4 / 3) + 0.5 * (0.5 * math.log2(2 / 3) + 0.5 * 1.0)
    assert found.jensen_shannon.tolist() == pytest.approx([math.sqrt(divergence)] * 2)
    assert found.mean("wasserstein") == pytest.approx(1.0)
    assert found.spread("wasserstein") == pytest.approx(0.0)


def test_wasserstein_depends_on_numbering_and_the_others_do_not() -> None:
    counts = np.array([[5, 0, 0], [0, 0, 5], [0, 5, 0]])
    near, far = het.distances(counts[:, [0, 2, 1]]), het.distances(counts)
    assert near.wasserstein.tolist() != pytest.approx(far.wasserstein.tolist())
    assert near.total_variation.tolist() == pytest.approx(far.total_variation.tolist())
    assert near.jensen_shannon.tolist() == pytest.approx(far.jensen_shannon.tolist())


def test_a_client_without_samples_has_no_distance() -> None:
    found = het.distances(np.array([[3, 1], [0, 0], [1, 3]]))
    assert found.sizes.tolist() == [4, 0, 4]
    assert all(np.isnan(getattr(found, metric)[1]) for metric in het.METRICS)
    assert found.mean("total_variation") == pytest.approx(0.25)
    with pytest.raises(DataError):
        het.distances(np.zeros((2, 3), dtype=np.int64))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=6))
def test_ranges(rows: list[list[int]]) -> None:
    counts = np.array(rows, dtype=np.int64)
    if counts.sum() == 0:
        return
    found = het.distances(counts)
    full = found.sizes > 0
    for metric, top in (("wasserstein", 3.0), ("total_variation", 1.0), ("jensen_shannon", 1.0)):
        values = getattr(found, metric)[full]
        assert np.all((values >= 0.0) & (values <= top + 1e-12))
    # W1 is between TV and (C - 1) TV: any two labels are from 1 to C - 1 apart
    assert np.all(found.wasserstein[full] >= found.total_variation[full] - 1e-12)
    assert np.all(found.wasserstein[full] <= 3.0 * found.total_variation[full] + 1e-12)


def test_equal_clients_are_at_distance_zero() -> None:
    found = het.distances(np.tile(np.array([[1, 2, 3, 4, 5, 6, 7]]), (9, 1)))
    for metric in het.METRICS:
        assert getattr(found, metric).tolist() == pytest.approx([0.0] * 9, abs=1e-7)


def test_skew_falls_with_sigma(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 4000)
    found = het.over_sigma(labels, 20)
    assert list(found) == [0.1, 0.3, 0.6, 1.0, math.inf]
    for metric in het.METRICS:
        means = [one.mean(metric) for one in found.values()]
        assert means == sorted(means, reverse=True)
    het.write_summary(tmp_path / "summary.csv", found)
    het.plot_over_sigma(tmp_path / "sigma.png", found)
    rows = list(csv.DictReader((tmp_path / "summary.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["sigma"] for row in rows] == ["0.1", "0.3", "0.6", "1.0", "inf"]
    assert float(rows[0]["total_variation_mean"]) == found[0.1].mean("total_variation")
    assert rows[0]["clients"] == "20"
    assert (tmp_path / "sigma.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sigma.png", "summary.csv"]


def test_files_of_one_split(tmp_path: Path) -> None:
    labels = np.random.default_rng(1).integers(0, 5, 300)
    counts = het.label_counts(labels, dirichlet(labels, 8, 0.3, by="class"))
    counts[3] = 0
    het.write_counts(tmp_path / "counts.csv", counts)
    het.write_distances(tmp_path / "distances.csv", het.distances(counts))
    het.plot_counts(tmp_path / "counts.png", counts, "Five labels, eight clients")
    read = list(csv.reader((tmp_path / "counts.csv").read_text(encoding="utf-8").splitlines()))
    assert read[0] == ["client", "samples", "label_0", "label_1", "label_2", "label_3", "label_4"]
    assert np.array(read[1:], dtype=np.int64)[:, 2:].tolist() == counts.tolist()
    rows = list(csv.DictReader((tmp_path / "distances.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[3] == {"client": "3", "samples": "0", "wasserstein": "", "total_variation": "", "jensen_shannon": ""}
    assert float(rows[0]["wasserstein"]) == het.distances(counts).wasserstein[0]
    assert (tmp_path / "counts.png").read_bytes().startswith(b"\x89PNG")


def test_gradient_dissimilarity() -> None:
    agreed = het.gradient_dissimilarity(np.ones((5, 3)))
    assert (agreed.variance, agreed.ratio) == (0.0, 1.0)
    found = het.gradient_dissimilarity([[2.0, 0.0], [0.0, 0.0]])
    assert found.variance == pytest.approx(1.0)
    assert found.ratio == pytest.approx(2.0)  # mean of |g|² is 2, |mean|² is 1
    weighted = het.gradient_dissimilarity([[2.0], [0.0]], theta=[0.25, 0.75])
    assert weighted.variance == pytest.approx(0.25 * 1.5**2 + 0.75 * 0.5**2)
    assert weighted.ratio == pytest.approx(0.25 * 4.0 / 0.25)
    assert het.gradient_dissimilarity([[1.0], [-1.0]]).ratio == math.inf
    assert het.gradient_dissimilarity([[0.0], [0.0]]).ratio == 1.0
