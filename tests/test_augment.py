"""Augmented images: against a loop over pixels, and in whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedagg
from fedagg.augment import KINDS, augmented, draw
from fedagg.cli import main
from fedagg.errors import SettingError


def by_hand(image: np.ndarray, drawn: int) -> np.ndarray:
    """The pixel at (i, j) comes from (i + down, j + right), mirrored first where the draw says so; from outside comes zero."""
    mirrored, down, right = drawn // 81, drawn % 81 // 9 - 4, drawn % 9 - 4
    channels, height, width = image.shape
    result = np.zeros_like(image)
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                row, column = i + down, (width - 1 - j if mirrored else j) + right
                if 0 <= row < height and 0 <= column < width:
                    result[c, i, j] = image[c, row, column]
    return result


@given(st.integers(1, 3), st.integers(2, 9), st.integers(2, 9), st.lists(st.integers(0, 161), min_size=1, max_size=4))
def test_every_draw_is_what_it_says(channels: int, height: int, width: int, drawn: list[int]) -> None:
    x = torch.rand(len(drawn), channels, height, width, generator=torch.Generator().manual_seed(0))
    ours = augmented(x, torch.tensor(drawn))
    for image, what, made in zip(x.numpy(), drawn, ours.numpy(), strict=True):
        np.testing.assert_array_equal(made, by_hand(image, what))


def test_the_middle_draw_changes_nothing_and_the_last_kind_mirrors() -> None:
    x = torch.rand(2, 3, 5, 5)
    assert torch.equal(augmented(x, torch.tensor([40, 40])), x)
    assert torch.equal(augmented(x, torch.tensor([121, 121])), x.flip(3))
    assert torch.equal(
        augmented(x.contiguous(memory_format=torch.channels_last), torch.tensor([3, 150])), augmented(x, torch.tensor([3, 150]))
    )


def test_draws_are_even_and_by_seed() -> None:
    drawn = draw(3, 20_000, 2, "crop-flip")
    counts = torch.bincount(drawn.flatten(), minlength=KINDS["crop-flip"])
    assert drawn.shape == (2, 20_000)
    assert len(counts) == 162
    assert counts.min() > 150  # 247 expected, standard deviation 16
    assert torch.equal(drawn, draw(3, 20_000, 2, "crop-flip"))
    assert not torch.equal(drawn, draw(4, 20_000, 2, "crop-flip"))
    assert draw(3, 1000, 1, "crop").max() < 81


@pytest.mark.slow
def test_runs_with_it_differ_and_repeat() -> None:
    def weights(augment: str, engine: str = "auto") -> torch.Tensor:
        result = fedagg.run(model="lenet5", rounds=1, clients=60, participation=0.05, epochs=1, augment=augment, engine=engine)
        return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])

    plain, shifted = weights("none"), weights("crop")
    assert not torch.allclose(plain, shifted)
    assert torch.equal(shifted, weights("crop"))
    assert torch.allclose(shifted, weights("crop", "sequential"), atol=1e-5)


def test_it_needs_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((40, 6), dtype=np.float32), np.arange(40) % 2
    with pytest.raises(SettingError, match=r"augment.*crop.*needs images"):
        fedagg.run(data=fedagg.Dataset(x, y, x, y), model="linear", clients=4, participation=0.5, rounds=1, augment="crop")
    with pytest.raises(SystemExit) as stop:
        main(["run", "--augment", "rotate", "--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert "augment" in capsys.readouterr().err
