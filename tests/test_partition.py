"""Splits: no sample twice, no client empty, the promised sizes, and the same split for the same seed."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedagg import partition
from fedagg.errors import DataError, SettingError
from fedagg.partition import Indices, dirichlet, from_file, iid, shards

BALANCED = np.repeat(np.arange(10), 500)


def check(parts: Indices, clients: int, samples: int, whole: bool) -> None:
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and len(part) for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    together = np.sort(np.concatenate(parts))
    assert (np.diff(together) > 0).all()
    assert together[0] >= 0
    assert together[-1] < samples
    if whole:
        assert len(together) == samples


def same(one: Indices, other: Indices) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def spread(parts: Indices, labels: np.ndarray) -> float:
    """Mean distance of the clients' class mixes from the global one."""
    classes = int(labels.max()) + 1
    prior = np.bincount(labels, minlength=classes) / len(labels)
    mixes = [np.bincount(labels[part], minlength=classes) / len(part) for part in parts]
    return float(np.mean([np.abs(mix - prior).sum() for mix in mixes]))


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    labels = draw(st.lists(st.integers(0, 6), min_size=1, max_size=120))
    return np.array(labels), draw(st.integers(1, len(labels))), draw(st.integers(0, 2**40))


@settings(deadline=None, max_examples=60)
@given(problems())
def test_iid(problem: tuple[np.ndarray, int, int]) -> None:
    labels, clients, seed = problem
    parts = iid(labels, clients, seed)
    check(parts, clients, len(labels), whole=True)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert same(parts, iid(labels, clients, seed))


@settings(deadline=None, max_examples=60)
@given(problems(), st.integers(1, 4))
def test_shards(problem: tuple[np.ndarray, int, int], per_client: int) -> None:
    labels, clients, seed = problem
    clients = max(1, clients // per_client)
    if clients * per_client > len(labels):
        with pytest.raises(SettingError, match="shards = "):
            shards(labels, clients, per_client, seed)
        return
    parts = shards(labels, clients, per_client, seed)
    check(parts, clients, len(labels), whole=True)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= per_client
    assert same(parts, shards(labels, clients, per_client, seed))


@settings(deadline=None, max_examples=100)
@given(problems(), st.one_of(st.floats(5e-324, 1.7e308), st.floats(1e-3, 10)))
def test_dirichlet_by_client(problem: tuple[np.ndarray, int, int], sigma: float) -> None:
    labels, clients, seed = problem
    parts = dirichlet(labels, clients, sigma, seed)
    check(parts, clients, len(labels), whole=False)
    assert {len(part) for part in parts} == {len(labels) // clients}
    assert same(parts, dirichlet(labels, clients, sigma, seed))


@settings(deadline=None, max_examples=60)
@given(problems(), st.one_of(st.floats(5e-324, 1.8e308), st.floats(0.1, 10)))
def test_dirichlet_by_class(problem: tuple[np.ndarray, int, int], sigma: float) -> None:
    labels, clients, seed = problem
    try:
        parts = dirichlet(labels, clients, sigma, seed, by="class")
    except SettingError:
        assert clients > 1
        return
    check(parts, clients, len(labels), whole=True)
    assert same(parts, dirichlet(labels, clients, sigma, seed, by="class"))


@pytest.mark.parametrize("name", [name for name in partition.names() if name not in ("feature", "user")])
def test_seed_decides_and_global_state_does_not(name: str) -> None:
    first = partition.partition(name, BALANCED, 10, seed=1, sigma=1.0)
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    assert same(first, partition.partition(name, torch.from_numpy(BALANCED), 10, seed=1, sigma=1.0))
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    assert not same(first, partition.partition(name, BALANCED, 10, seed=2, sigma=1.0))


def test_shards_hold_few_classes() -> None:
    labels = np.random.default_rng(0).permutation(BALANCED)
    parts = shards(labels, 50, per_client=2)
    assert all(len(np.unique(labels[part])) <= 2 for part in parts)
    uneven = shards(labels, 49, per_client=2)
    assert all(len(np.unique(labels[part])) <= 4 for part in uneven)


def test_one_shard_each_is_the_sorted_order() -> None:
    labels = np.array([1, 0, 1, 0, 2, 2])
    assert sorted(part.tolist() for part in shards(labels, 3, per_client=1)) == [[0, 2], [1, 3], [4, 5]]


@pytest.mark.parametrize("by", ["client", "class"])
def test_skew_falls_as_sigma_grows(by: str) -> None:
    labels = np.random.default_rng(1).permutation(BALANCED)
    spreads = [spread(dirichlet(labels, 20, sigma, 3, by=by), labels) for sigma in (0.2, 1.0, 10.0, 1000.0)]
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[0] > 0.8
    assert spreads[-1] < 0.25


def test_tiny_sigma_gives_one_class_while_they_last() -> None:
    parts = dirichlet(BALANCED, 20, 1e-6, 0)
    assert sum(len(np.unique(BALANCED[part])) == 1 for part in parts) >= 10


def test_dirichlet_has_the_law_of_drawing_one_at_a_time() -> None:
    """With one client taking half of two classes, mean and variance follow the beta-binomial (a class never ends)."""
    labels = np.repeat([0, 1], 40)
    firsts = np.array([(labels[dirichlet(labels, 2, 1.0, seed)[0]] == 0).sum() for seed in range(1500)])
    # Dir(1, 1) over 40 draws is uniform on 0..40.
    assert abs(firsts.mean() - 20) < 1.3
    assert abs(firsts.var() - (41**2 - 1) / 12) < 16


def test_a_class_that_runs_out_is_drawn_again_from_the_others() -> None:
    """The same mean counts, for who draws first, as a plain loop that draws one sample at a time."""
    rng = np.random.default_rng(9)
    counts = np.zeros((2, 1500, 3))
    for run in range(1500):
        counts[0, run] = partition._counts_by_client(np.array([3, 3, 6]), 2, 0.7, np.random.default_rng(run))[0]
        mix, left = rng.dirichlet(0.7 * 3 * np.array([0.25, 0.25, 0.5])), np.array([3, 3, 6])
        for _ in range(6):
            open_mix = np.where(left > 0, mix, 0)
            left[rng.choice(3, p=open_mix / open_mix.sum())] -= 1
        counts[1, run] = np.array([3, 3, 6]) - left
    means, errors = counts.mean(1), np.sqrt((counts.var(1) / 1500).sum(0))
    assert (np.abs(means[0] - means[1]) < 4 * errors).all()


def outcomes(count: Callable[..., np.ndarray]) -> Counter[bytes]:
    """What three clients of four samples draw from three classes, in 1500 draws."""
    sizes = np.array([3, 3, 6])
    return Counter(count(sizes, 3, 0.4, np.random.default_rng(seed)).tobytes() for seed in range(1500))


def test_many_clients_draw_by_the_same_law_as_few() -> None:
    """How often each table of counts comes out, in blocks and client by client: a chi-square test of two samples."""
    one, other = outcomes(partition._counts_by_client), outcomes(partition._counts_in_blocks)
    pairs = np.array([(one[table], other[table]) for table in one | other])
    rare = pairs.sum(1) < 20
    pairs = np.vstack([pairs[~rare], pairs[rare].sum(0)])
    square = ((pairs[:, 0] - pairs[:, 1]) ** 2 / pairs.sum(1).clip(1)).sum()
    freedom = len(pairs) - 1
    assert freedom > 5
    assert square < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("sigma", [1e-200, 0.1, 1e200])
def test_many_clients_share_as_few_do(sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MANY", 10)
    monkeypatch.setattr(partition, "BLOCK", 640)
    labels = np.random.default_rng(0).choice(8, 3001, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.04, 0.01])
    parts = dirichlet(labels, 1000, sigma, 4)
    check(parts, 1000, len(labels), whole=False)
    assert {len(part) for part in parts} == {3}
    assert same(parts, dirichlet(labels, 1000, sigma, 4))


def test_few_clients_get_the_split_they_always_got() -> None:
    """Published results stand on these draws."""
    labels = np.random.default_rng(0).integers(0, 10, 6000)
    splits = (np.concatenate(dirichlet(labels, 50, 0.3, 1, by=by)) for by in ("client", "class"))
    found = [hashlib.sha256(split.tobytes()).hexdigest()[:16] for split in splits]
    assert found == ["9106bf4ef1b01235", "94792dc08eaad1b6"]


def test_samples_are_gathered_by_owner_in_ascending_order() -> None:
    rng = np.random.default_rng(1)
    samples, owners = rng.permutation(500)[:400], rng.integers(0, 30, 400)
    parts = partition._gather(samples, owners, 31)
    assert same(parts, [np.sort(samples[owners == owner]) for owner in range(31)])


def test_prior_follows_unbalanced_classes() -> None:
    labels = np.repeat([0, 1], [900, 100])
    shares = [np.mean(labels[dirichlet(labels, 10, 5.0, seed)[0]]) for seed in range(400)]
    assert abs(np.mean(shares) - 0.1) < 0.02


def test_infinite_sigma_is_iid() -> None:
    for by in ("client", "class"):
        assert same(dirichlet(BALANCED, 7, math.inf, 5, by=by), iid(BALANCED, 7, 5))


def test_very_many_clients() -> None:
    assert len(iid(np.zeros(600_000, dtype=np.int8), 200_000, 0)) == 200_000


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: iid(BALANCED, 0), "clients = 0"),
        (lambda: iid(BALANCED, True), "clients = True"),
        (lambda: iid(BALANCED, 5001), "only 5000 samples"),
        (lambda: iid(BALANCED, 2, -1), "seed = -1"),
        (lambda: shards(BALANCED.reshape(2, -1), 2), "labels"),
        (lambda: dirichlet(BALANCED / 2, 2, 1.0), "labels"),
        (lambda: iid(np.array([], dtype=np.int64), 1), "only 0 samples"),
        (lambda: shards(BALANCED, 5, 0), "shards = 0"),
        (lambda: shards(BALANCED, 2501, 2), "shards = 2: 2501 clients need 5002 shards of 5000 samples; lower shards or clients"),
        (lambda: dirichlet(BALANCED, 5, 0.0), "sigma = 0.0"),
        (lambda: dirichlet(BALANCED, 5, -1), "sigma = -1"),
        (lambda: dirichlet(BALANCED, 5, math.nan), "sigma = nan"),
        (lambda: dirichlet(BALANCED, 5, -math.inf), "sigma = -inf"),
        (lambda: dirichlet(BALANCED, 5, "1"), "sigma = '1'"),  # type: ignore[arg-type]
        (lambda: dirichlet(BALANCED, 5, 1.0, by="clients"), "did you mean 'client'"),
        (lambda: dirichlet(BALANCED, 1000, 0.001, by="class"), "sigma = 0.001: each of 100 draws left one of the 1000"),
        (lambda: partition.partition("shard", BALANCED, 5), "did you mean 'shards'"),
    ],
)
def test_errors_name_setting_and_value(call: object, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        call()  # type: ignore[operator]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["3\n1\n2\n", "label\n3\n1\n2\n", "what\n3\n1\n2", "\ufeffid,Label\n7,3\n\n8,1\n9,2\n"])
def test_labels_from_csv(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels.csv").write_text(text, encoding="utf-8")
    labels = from_file(tmp_path / "labels.csv")
    assert labels.dtype == np.int64
    assert labels.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no labels"),
        (b"label\n", "no labels"),
        (b"1,2\n3,4\n", "none named label"),
        (b"label\n1\ncat\n", "line 3 has 'cat'"),
        (b"id,label\n1,2\n3\n", "line 3 has 'nothing'"),
        (b"1\n-1\n", "label 1 is -1"),
        (b"1\n99999999999999999999\n", "not a csv of labels"),
        (b"\xff\xfe\x00", "not a csv of labels"),
    ],
)
def test_wrong_csv(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "l.csv").write_bytes(content)
    with pytest.raises(DataError) as caught:
        from_file(tmp_path / "l.csv")
    assert words in str(caught.value)
    assert "l.csv" in str(caught.value)


def test_labels_from_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.array([2, 0, 1], dtype=np.uint8))
    assert from_file(tmp_path / "l.npy").tolist() == [2, 0, 1]
    for wrong in (np.array([0.5]), np.zeros((2, 2), dtype=int), np.array(["a"]), np.array([], dtype=int)):
        np.save(tmp_path / "l.npy", wrong)
        with pytest.raises(DataError):
            from_file(tmp_path / "l.npy")
    np.save(tmp_path / "l.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"l\.npy"):
        from_file(tmp_path / "l.npy")
    with (tmp_path / "l.npy").open("wb") as archive:
        np.savez(archive, np.arange(3))
    with pytest.raises(DataError, match=r"l\.npy"):
        from_file(tmp_path / "l.npy")
    for missing in ("none.npy", "none.csv", "none.txt"):
        with pytest.raises(DataError, match="none"):
            from_file(tmp_path / missing)


def test_npy_that_declares_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.npy"
    np.save(path, np.arange(3))
    path.write_bytes(path.read_bytes().replace(b"(3,), }" + b" " * 12, b"(3000000000000,), }"))
    with pytest.raises(DataError):
        from_file(path)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 151), st.integers(0, 255), st.integers(0, 152))
def test_damaged_npy_is_a_data_error_or_labels(tmp_path_factory: pytest.TempPathFactory, at: int, to: int, end: int) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.npy"
    np.save(path, np.arange(3))
    content = bytearray(path.read_bytes())
    content[at] = to
    path.write_bytes(content[:end] if end % 4 == 0 else content)
    with contextlib.suppress(DataError):
        assert from_file(path).ndim == 1
