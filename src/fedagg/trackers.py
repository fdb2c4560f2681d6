"""Live tracking of a run: TensorBoard, MLflow or Weights & Biases, each a callback and an optional extra.

A tracker is a `fedagg.callbacks.Callback`. You can write your own and give it to `fedagg.run`.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fedagg import files
from fedagg.callbacks import Callback, tell
from fedagg.checks import check_callbacks
from fedagg.config import Config
from fedagg.errors import FedaggError, FedaggWarning, first_line
from fedagg.measure import Measure
from fedagg.registry import Registry
from fedagg.result import Result


def split_names(track: str | None) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in (track or "").split(",") if name.strip()]


def make(name: str, folder: Path) -> Callback:
    """The tracker of that name; its files go under `folder`."""
    tracker = TRACKERS.find(name)(folder)
    check_callbacks([tracker])
    return Tolerant(name, tracker)


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A round's figures one by one; a figure with a value per epoch becomes one series per epoch."""
    for name, value in row.items():
        if isinstance(value, list):
            yield from ((f"{name}/epoch_{i}", v) for i, v in enumerate(value, start=1) if isinstance(v, float))
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "round":
            yield name, float(value)


def load(module: str, extra: str) -> Any:
    """The library of a tracker, or a one-line error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise FedaggError(f"track = {extra!r}: {error}; install it with: pip install 'fedagg[{extra}]'") from None


@contextmanager
def one_line(name: str, fix: str) -> Iterator[None]:
    """Turn errors of a tracking library that cannot start into one line, because the user can fix them."""
    try:
        yield
    except Exception as error:
        raise FedaggError(f"track = {name!r}: {first_line(error).rstrip('.')}; {fix}") from None


@contextmanager
def unless_set(**values: str) -> Iterator[None]:
    """Set environment variables for a while, unless the user has set them."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


class Tolerant:
    """Wraps a tracker. If it cannot start, the run does not start. If its store becomes unreachable later, there is one warning,
    and the run continues without it."""

    def __init__(self, name: str, tracker: Callback) -> None:
        self.name, self.tracker, self.works = name, tracker, True

    @property
    def reason(self) -> str:
        return getattr(self.tracker, "reason", "") or self.name

    def judged(self, measure: Measure) -> None:
        tell([self.tracker], "judged", measure)

    def started(self, config: Config, done: int) -> None:
        tell([self.tracker], "started", config, done)

    def resumed(self, history: list[dict[str, Any]]) -> bool:
        return self.tell("resumed", history)

    def round_done(self, row: dict[str, Any]) -> bool:
        return self.tell("round_done", row)

    def finished(self, result: Result) -> None:
        self.tell("finished", result)

    def tell(self, method: str, what: object) -> bool:
        """Call this method of the tracker, if it has one. Does it end the run?"""
        if self.works:
            try:
                return tell([self.tracker], method, what) is not None
            except Exception as error:
                self.works = False
                words = f"track = {self.name!r}: {first_line(error).rstrip('.')}; the run continues without it"
                warnings.warn(words, FedaggWarning, stacklevel=3)
        return False


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir runs` shows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self.writers = load("tensorboard", "tensorboard") and load("torch.utils.tensorboard", "tensorboard")

    def started(self, config: Config, done: int) -> None:
        # A resumed run writes from its checkpoint on; later events are purged.
        self.writer = self.writers.SummaryWriter(str(self.folder), purge_step=done + 1)
        self.writer.add_text("config", f"```toml\n{config.toml()}```")

    def round_done(self, row: dict[str, Any]) -> None:
        for name, value in scalars(row):
            self.writer.add_scalar(name, value, row["round"])

    def finished(self, result: Result) -> None:
        self.writer.close()


class MLflow:
    """A run in the store that MLFLOW_TRACKING_URI names, else in mlflow.db beside the run folder."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # do not report to third parties
        client = load("mlflow.tracking", "mlflow").MlflowClient
        self.entities = load("mlflow.entities", "mlflow")
        self.name, store = folder.name, os.environ.get("MLFLOW_TRACKING_URI")
        if not store:
            files.folder(folder.parent)
            store = f"sqlite:///{(folder.parent / 'mlflow.db').resolve()}"
        # Check the store once before the run, without long retries. Later, MLflow's own retries suit a long run.
        with self.one_line(), unless_set(MLFLOW_HTTP_REQUEST_MAX_RETRIES="1", MLFLOW_HTTP_REQUEST_TIMEOUT="20"):
            self.client = client(store)
            self.client.get_experiment_by_name("fedagg")

    def one_line(self) -> AbstractContextManager[None]:
        return one_line("mlflow", "set MLFLOW_TRACKING_URI to a store that can be reached, or unset it to have one beside the run")

    def started(self, config: Config, done: int) -> None:
        param = self.entities.Param
        chosen = [param(name, str(value)) for name, value in config.flat().items() if value not in (None, ())]
        with self.one_line():
            found = self.client.get_experiment_by_name("fedagg")
            experiment = found.experiment_id if found else self.client.create_experiment("fedagg")
            self.run = self.client.create_run(experiment, run_name=self.name).info.run_id
            self.client.log_batch(self.run, params=chosen)

    def round_done(self, row: dict[str, Any]) -> None:
        now = int(1000 * time.time())
        figures = [self.entities.Metric(name, value, now, row["round"]) for name, value in scalars(row)]
        self.client.log_batch(self.run, metrics=figures)

    def finished(self, result: Result) -> None:
        self.client.set_terminated(self.run, "KILLED" if result.interrupted else "FINISHED")


class WandB:
    """A Weights & Biases run, as its own settings say; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, folder: Path) -> None:
        self.wandb, self.folder = load("wandb", "wandb"), folder

    def started(self, config: Config, done: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"name": self.folder.name, "dir": str(self.folder), "config": config.flat()}
        with one_line("wandb", "see that wandb can log in, or set WANDB_MODE=offline to keep the run on this machine"):
            self.run = self.wandb.init(project="fedagg", **about)

    def round_done(self, row: dict[str, Any]) -> None:
        self.run.log(dict(scalars(row)), step=row["round"])

    def finished(self, result: Result) -> None:
        self.run.finish(exit_code=int(result.interrupted))


PUBLISHED: dict[str, Callable[[Path], Callback]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
TRACKERS: Registry[Callable[[Path], Callback]] = Registry("track", "fedagg.trackers", PUBLISHED)
register = TRACKERS.register
