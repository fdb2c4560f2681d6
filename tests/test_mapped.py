"""Samples that stay on the disk: a file ten times the memory it may take trains as it would in memory, and is read by need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedagg
from fedagg import Dataset
from fedagg.data.mapped import Mapped
from fedagg.errors import SettingError

ROWS, WIDE = 1000, 25
BYTES = ROWS * WIDE * 4
GIB = BYTES / 10 / (1 << 30)  # a tenth of the file
SHORT: dict[str, Any] = {"rounds": 2, "epochs": 2, "clients": 30, "participation": 0.2, "batch_size": 8, "lr": 0.1}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, WIDE)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", (x @ rng.normal(size=(WIDE, 3))).argmax(1))
    return tmp_path / "x.npy"


def opened(file: Path, **options: Any) -> Dataset:
    return Dataset.of(file, target=str(file.with_name("y.npy")), memory=GIB, **options)


def in_memory(data: Dataset) -> Dataset:
    return Dataset(data.x_train[:], data.y_train, data.x_test, data.y_test)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_no_more_than_allowed_is_read_or_kept_in_memory(file: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    read: list[int] = []
    block = Mapped.block

    def counted(self: Mapped, rows: Any) -> torch.Tensor:
        found = block(self, rows)
        read.append(found.numel() * 4)
        return found

    monkeypatch.setattr(Mapped, "block", counted)
    kept: list[int] = []
    rounds: list[int] = []

    class Watch:
        def started(self, config: Any, done: int) -> None:
            rounds.append(sum(read))

        def round_done(self, row: dict[str, Any]) -> None:
            rounds.append(sum(read))

    def wrap(outer: Any) -> Any:
        kept.append(outer.within.x.numel() * 4)
        return outer

    data = opened(file)
    assert isinstance(data.x_train, Mapped)
    assert sum(read) == 0  # nothing but the test part, which is raw
    result = fedagg.run(data=data, algorithm="fedavg", engine=engine, callbacks=[Watch()], wrap=wrap, **SHORT)
    allowance = BYTES // 10
    assert kept[0] + max(read) + data.x_test.numel() * 4 <= allowance
    assert rounds[0] <= 2 * allowance  # the first window, and the first samples for the checks
    for before, after, row in zip(rounds[:-1], rounds[1:], result.history, strict=True):
        assert after - before == row["samples"] // 2 * WIDE * 4  # of two epochs: the participants' rows, each once

    same = fedagg.run(data=in_memory(data), algorithm="fedavg", engine=engine, **SHORT)
    assert result.loss == pytest.approx(same.loss, rel=1e-5)
    assert result.accuracy == pytest.approx(same.accuracy, abs=0.05)
    if engine == "sequential":
        assert result.loss == same.loss


def test_rows_are_the_same_as_from_memory(file: Path, tmp_path: Path) -> None:
    x = np.load(file)
    data: Any = opened(file).x_train
    at = torch.tensor([5, 3, 700, 3])
    assert torch.equal(data[at], torch.from_numpy(x[data.chosen[at]]))
    assert torch.equal(data.rows(at.numpy())[1:3], data[at][1:3])
    for kind, expected in ((np.uint8, torch.float32), (np.int16, torch.int64)):
        whole = (np.abs(x) * 50).astype(kind)
        np.save(tmp_path / "other.npy", whole)
        rows = Mapped(np.lib.format.open_memmap(tmp_path / "other.npy", mode="r"), 10_000)[torch.tensor([9, 2])]
        assert rows.dtype == expected
        wanted = whole[[9, 2]] / 255 if kind is np.uint8 else whole[[9, 2]]
        np.testing.assert_allclose(rows, wanted, rtol=1e-6)


def test_parquet_is_unpacked_once_and_then_read_by_need(file: Path) -> None:
    x, y = np.load(file), np.load(file.with_name("y.npy"))
    table = pd.DataFrame(x, columns=[f"x{k}" for k in range(WIDE)]).assign(label=y, who=y % 2)
    table.to_parquet(file.with_suffix(".parquet"))
    data = Dataset.of(file.with_suffix(".parquet"), user="who", memory=GIB)
    rows: Any = data.x_train
    assert isinstance(rows, Mapped)
    assert torch.equal(rows[:], torch.from_numpy(x[rows.chosen]))
    assert np.array_equal(data.y_train, y[rows.chosen])
    assert np.array_equal(data.users, data.y_train % 2)
    assert isinstance(Dataset.of(file.with_suffix(".parquet"), user="who").x_train, torch.Tensor)


def test_small_files_are_read_whole(file: Path) -> None:
    data = Dataset.of(file, target=str(file.with_name("y.npy")))
    assert isinstance(data.x_train, torch.Tensor)
    assert len(data.x_test) == ROWS // 5


def test_validation_and_the_command_line_setting(file: Path) -> None:
    settings = {"dataset": str(file), "target": str(file.with_name("y.npy")), "data_memory": GIB, "algorithm": "fedavg"}
    result = fedagg.run(**settings, validation=0.02, **{**SHORT, "rounds": 1})
    assert 0 <= result.accuracy <= 1


def test_what_cannot_be_done_is_said(file: Path) -> None:
    data = opened(file)
    for given, words in (
        ({"normalize": True}, "standardise the file"),
        ({"partition": "feature"}, "stay on the disk"),
        ({"clients": 2}, "client 0 has .* samples, but 50 fit"),
    ):
        with pytest.raises(SettingError, match=words):
            fedagg.run(data=data, **{**SHORT, **given})
    with pytest.raises(SettingError, match="data_memory"):
        Dataset.of(file, target=str(file.with_name("y.npy")), memory=100 / (1 << 30))
    x = np.load(file)
    x[500, 3] = np.nan
    np.save(file, x)
    with pytest.raises(SettingError, match=r"x_train\[500\] = 'not finite'"):
        fedagg.run(data=opened(file), **{**SHORT, "participation": 1.0})
