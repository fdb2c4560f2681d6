"""Live tracking, against the real libraries where they are installed; nothing leaves the machine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fedagg
from fedagg import cli, trackers
from fedagg.config import Config
from fedagg.errors import FedaggError, FedaggWarning, SettingError
from fedagg.result import Result

SMALL: dict[str, Any] = {"clients": 10, "epochs": 2, "rounds": 3, "engine": "batched"}
theirs = pytest.mark.filterwarnings("ignore")  # what the library and its database layer warn each other of


def test_figures_one_by_one() -> None:
    row = {"round": 4, "accuracy": 0.5, "rate_mean": [0.1, 0.2], "passes": 2, "causes": ["late"], "unchanged": True}
    assert dict(trackers.scalars(row)) == {
        "accuracy": 0.5,
        "rate_mean/epoch_1": 0.1,
        "rate_mean/epoch_2": 0.2,
        "passes": 2.0,
    }


def test_tensorboard_files_hold_the_run(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = fedagg.run(Config(**SMALL), out=tmp_path / "run", callbacks=[trackers.make("tensorboard", tmp_path / "run")])
    read = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    logged = read.Scalars("accuracy")
    assert [event.step for event in logged] == [1, 2, 3]
    assert [event.value for event in logged] == pytest.approx([row["accuracy"] for row in result.history])
    assert len(read.Scalars("rate_mean/epoch_2")) == 3
    text = read.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert 'dataset = "mnist-mini"' in text


@theirs
def test_mlflow_in_a_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs" / "one"
    result = fedagg.run(Config(**SMALL), out=folder, callbacks=[trackers.make("mlflow", folder)])
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fedagg")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "one"
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm"] == "fedagg"
    assert run.data.params["rounds"] == "3"
    logged = client.get_metric_history(run.info.run_id, "accuracy")
    assert [(m.step, m.value) for m in logged] == [(row["round"], row["accuracy"]) for row in result.history]


@theirs
def test_mlflow_goes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    tracker = trackers.make("mlflow", tmp_path / "runs" / "one")
    tracker.started(Config(**SMALL), 0)
    assert (tmp_path / "elsewhere.db").exists()
    assert not (tmp_path / "runs" / "mlflow.db").exists()


class FakeWandB:
    """What the tracker asks of the library: `init` once, then `log` and `finish` of what it returns."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def init(self, **settings: Any) -> FakeWandB:
        self.said.append(("init", settings["project"], settings["name"], settings["config"]["algorithm"]))
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.said.append(("log", step, figures["accuracy"]))

    def finish(self, exit_code: int) -> None:
        self.said.append(("finish", exit_code))


def test_wandb_is_told_of_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    result: Result = fedagg.run(Config(**SMALL), callbacks=[trackers.make("wandb", tmp_path / "one")])
    rounds = [("log", row["round"], row["accuracy"]) for row in result.history]
    assert fake.said == [("init", "fedagg", "one", "fedagg"), *rounds, ("finish", 0)]


class GoesAway(FakeWandB):
    """A store that cannot be reached any more after the first round."""

    def log(self, figures: dict[str, float], step: int) -> None:
        super().log(figures, step)
        if step == 2:
            raise ConnectionError("the server is gone.\nMore is said of it.")


def test_a_store_that_becomes_unreachable_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = GoesAway()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    with pytest.warns(FedaggWarning, match="track = 'wandb': the server is gone; the run continues without it") as told:
        result = fedagg.run(Config(**SMALL), callbacks=[trackers.make("wandb", tmp_path / "one")])
    assert len(told) == 1
    assert len(result.history) == 3
    assert [said[:2] for said in fake.said] == [("init", "fedagg"), ("log", 1), ("log", 2)]


def test_a_tracker_is_a_callback_like_any_other(tmp_path: Path) -> None:
    class Enough:
        def __init__(self, folder: Path) -> None:
            self.reason = f"enough for {folder.name}"

        def round_done(self, row: dict[str, Any]) -> bool:
            return bool(row["round"] == 2)

    trackers.TRACKERS["enough"], trackers.TRACKERS["deaf"] = Enough, lambda folder: object()  # type: ignore[assignment, return-value]
    try:
        result = fedagg.run(Config(**SMALL), callbacks=[trackers.make("enough", tmp_path / "one")])
        with pytest.raises(SettingError, match="give an object with some of the methods"):
            trackers.make("deaf", tmp_path)
    finally:
        del trackers.TRACKERS["enough"], trackers.TRACKERS["deaf"]
    assert (len(result.history), result.stopped) == (2, "enough for one")


class NoKey(FakeWandB):
    """The library where nobody has logged in."""

    def init(self, **settings: Any) -> FakeWandB:
        raise RuntimeError("No API key configured. Use `wandb login` to log in.\nMore is said of it.")


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--clients", "10", "--rounds", "1", "--quiet", *arguments])
    return int(end.value.code or 0)


def test_wandb_that_cannot_start_is_one_line_and_leaves_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--track", "wandb", "--out", str(tmp_path / "one"))
    monkeypatch.setitem(sys.modules, "wandb", NoKey())  # type: ignore[arg-type]
    assert command(*given) == 2
    told = capsys.readouterr().err
    assert told.startswith("fedagg: track = 'wandb': No API key configured. Use `wandb login` to log in; see that wandb can log in")
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB())  # type: ignore[arg-type]
    assert command(*given) == 0
    # A run that was there before is not taken back
    monkeypatch.setitem(sys.modules, "wandb", NoKey())  # type: ignore[arg-type]
    assert command("--track", "wandb", "--resume", str(tmp_path / "one"), "--rounds", "2") == 2
    assert (tmp_path / "one" / "config.toml").exists()


@theirs
@pytest.mark.parametrize(
    ("store", "words"), [("http://127.0.0.1:1", "Connection refused"), ("foo://x", "unsupported URI 'foo://x'")]
)
def test_mlflow_that_cannot_start_is_one_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: str, words: str
) -> None:
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    began = time.monotonic()
    assert command("--track", "mlflow", "--out", str(tmp_path / "runs" / "one")) == 2
    assert time.monotonic() - began < 60  # by itself it tries for minutes
    told = capsys.readouterr().err
    assert told.startswith("fedagg: track = 'mlflow': ")
    assert words in told
    assert "; set MLFLOW_TRACKING_URI to a store that can be reached" in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_a_missing_library_is_one_line_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(FedaggError, match=r"pip install 'fedagg\[wandb\]'"):
        trackers.make("wandb", tmp_path)
    with pytest.raises(SettingError, match="did you mean 'tensorboard'"):
        trackers.make("tensor", tmp_path)
