"""The base rate over the rounds: warm-up, schedule and decay, for every method that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedagg
import tiny
from fedagg.algorithms import REGISTRY
from fedagg.config import make, resolve_each
from fedagg.errors import FedaggError, SettingError

# By hand: of a base rate of 0.8 over eight rounds; √2/2 = 0.70711, cos(π/8) = 0.92388, cos(3π/8) = 0.38268.
BY_HAND: list[tuple[dict[str, Any], list[float]]] = [
    ({}, [0.8] * 8),
    ({"lr_decay": 0.5}, [0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625]),
    ({"lr_schedule": "step"}, [0.8, 0.8, 0.8, 0.8, 0.08, 0.08, 0.008, 0.008]),
    ({"lr_schedule": "cosine"}, [0.8, 0.769552, 0.682843, 0.553073, 0.4, 0.246927, 0.117157, 0.030448]),
    ({"warmup": 3}, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8]),
    ({"warmup": 4, "lr_schedule": "cosine"}, [0.16, 0.32, 0.48, 0.64, 0.8, 0.682843, 0.4, 0.117157]),
    ({"warmup": 4, "lr_schedule": "step", "lr_decay": 0.5}, [0.16, 0.32, 0.48, 0.64, 0.8, 0.4, 0.02, 0.001]),
]


@pytest.mark.parametrize(("settings", "rates"), BY_HAND)
def test_rates_by_hand(settings: dict[str, Any], rates: list[float]) -> None:
    config = make({"algorithm": "fedavg", "lr": 0.8, "rounds": 8, **settings})
    assert [config.rate(t) for t in range(8)] == pytest.approx(rates, abs=1e-6)
    assert config.rate(8) == 0.8  # after training, where models are fitted to clients


def trained_at(result: fedagg.Result) -> list[float]:
    return [row["rate_mean"][0] for row in result.history]


@pytest.mark.parametrize("method", sorted(name for name in REGISTRY if REGISTRY[name].scheduled and "-" not in name))
def test_every_method_that_reads_the_rate_follows(method: str) -> None:
    more = {"head": "3"} if method in ("fedbabu", "fedgh") else {}
    run = tiny.job(algorithm=method, rounds=3, lr=0.1, lr_decay=0.5, **more)
    assert trained_at(run) == pytest.approx([0.1, 0.05, 0.025])


def test_the_papers_rehearsal_has_the_rates_of_the_rounds() -> None:
    """It trains for all rounds before the first, each at its own base rate; with hardly any, nothing moves."""
    seen: list[float] = []

    def wrap(engine: Any) -> Any:
        run = engine.run

        def spied(model: Any, work: Any, *rest: Any) -> Any:
            if work.slope is None:
                seen.append(float(work.rate[0]))
            return run(model, work, *rest)

        engine.run = spied
        return engine

    tiny.job(algorithm="fedagg", variant="paper", estimator="pretrain", rounds=3, lr=0.1, lr_decay=0.5, wrap=wrap)
    assert seen == pytest.approx([0.1, 0.05, 0.025])


def test_a_resumed_run_continues_at_the_rate_of_its_round(tmp_path: Path) -> None:
    class Stop:
        def round_done(self, row: dict[str, Any]) -> bool:
            return row["round"] == 2

    settings: dict[str, Any] = {"algorithm": "fedcm", "rounds": 4, "lr_schedule": "cosine", "warmup": 1}
    tiny.job(**settings, out=tmp_path / "whole")
    tiny.job(**settings, out=tmp_path / "parts", callbacks=[Stop()])
    tiny.job(**settings, resume=tmp_path / "parts")
    assert tiny.same_run(tmp_path / "whole", tmp_path / "parts")
    with pytest.raises(FedaggError, match=r"rounds was 4, now 6; .* \(lr_schedule cosine needs the same rounds\)"):
        tiny.job(**settings | {"rounds": 6}, resume=tmp_path / "parts")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": "fedagg", "lr_decay": 0.9}, "lr_decay = 0.9: fedagg takes its rates from measurements"),
        ({"algorithm": "fedagg", "lr_schedule": "cosine"}, "lr_schedule = 'cosine': fedagg takes its rates from measurements"),
        ({"algorithm": "fedavg", "warmup": 5, "rounds": 5}, "warmup = 5: must be below rounds, 5"),
        ({"algorithm": "fedavg", "lr_decay": 0.001}, "lr_decay = 0.001: leaves a rate of 1e-89 for the last round"),
        ({"algorithm": "fedavg", "lr_schedule": "linear"}, "lr_schedule = 'linear'"),
        ({"algorithm": "fedavg", "lr_decay": 1.1}, "lr_decay = 1.1"),
    ],
)
def test_what_cannot_be_followed_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError) as error:
        make({"rounds": 30, **settings})
    assert str(error.value).startswith(words)


def test_a_comparison_asks_only_those_that_follow() -> None:
    avg, agg = resolve_each(["fedavg", "fedagg"], {"lr_decay": 0.9})
    assert (avg.lr_decay, agg.lr_decay) == (0.9, 1.0)
    with pytest.raises(SettingError, match="fedagg takes its rates"):
        resolve_each(["fedagg"], {"lr_decay": 0.9})
