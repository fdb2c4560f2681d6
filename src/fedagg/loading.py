"""Read a run folder back into the object that the run returned: `fedagg.load`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedagg import checks, models, plugins, runs, tasks
from fedagg.config import Config
from fedagg.errors import FedaggError, SettingError
from fedagg.from_config import build_model, chosen_data
from fedagg.inputs import Inputs
from fedagg.record import SCALE
from fedagg.result import Result, scores
from fedagg.runs import Run
from fedagg.work import Loss


def load(run: str | Path, *, model: nn.Module | None = None, loss: Loss | None = None) -> Result:
    """The result of a run, read from its folder: settings, history, and the network with its weights.

    Args:
        run: the run folder.
        model: the network, if the run got it from Python: a folder holds its weights but cannot rebuild it.
        loss: the loss of a sample, if the run got it from Python; only `evaluate` needs it.
    """
    folder = checks.path("run", run)
    if folder is None:
        raise SettingError("run", run, "give the name of a run folder")
    if model is not None:
        checks.describe_arguments(None, model, None)  # refuses what is not a module
    kept = runs.load(folder)
    inputs = inputs_of(kept)
    network = checks.copy_model(model) if model is not None else rebuild_network(kept.config, inputs, folder)
    module = runs.load_weights(network, folder / "model.safetensors")
    history = [{name: math.nan if value is None else value for name, value in row.items()} for row in kept.history]
    facts = kept.result
    task = tasks.find(inputs.task if inputs is not None else kept.config.task or "classification")
    if kept.config.metric is not None:
        task = task.judged_by(kept.config.metric)
    given: Any = kept.environment.get("given")
    name = given.get("loss") if isinstance(given, dict) else None  # a federation's server does not record it
    result = Result(
        kept.config,
        history,
        module,
        *scores(history, kept.metric),
        timing=facts.get("timing") or {},
        seconds=float(facts.get("seconds") or sum(row.get("seconds", 0.0) for row in history)),
        run=folder,
        interrupted=bool(facts.get("interrupted", False)),
        stopped=facts.get("stopped"),
        left_out=facts.get("left_out", {}),
        metric=kept.metric,
        inputs=inputs,
        criterion=loss or (task.loss if name in (None, checks.name_of(task.loss)) else None),
        task=task,
    )
    result.figures = {key: value for key, value in facts.items() if key not in result.summary() and isinstance(value, int | float)}
    return result


def inputs_of(run: Run) -> Inputs | None:
    """What the folder says about the samples; None from earlier versions and from servers of federations."""
    facts: Any = run.environment.get("inputs")
    try:
        shape, classes, tokens = tuple(map(int, facts["shape"])), int(facts["classes"]), bool(facts["tokens"])
        labels = tuple(map(str, facts["labels"])) if "labels" in facts else None
        found = Inputs(shape, classes, tokens, **scale_of(run), task=str(facts["task"]), labels=labels)
    except (KeyError, TypeError, ValueError):
        return None
    return found


def scale_of(run: Run) -> dict[str, Tensor]:
    path = run.folder / SCALE
    if not run.config.normalize:
        return {}
    try:
        found = load_file(path)
        return {name: found[name] for name in ("mean", "std")}
    except (SafetensorError, OSError, KeyError):
        words = "is missing or damaged, but is needed because the run standardised its samples; make the run again"
        raise FedaggError(f"{path}: {words}") from None


def rebuild_network(config: Config, inputs: Inputs | None, folder: Path) -> nn.Module:
    """The network as it was at the start of the run."""
    if config.model == "custom":
        words = f"the run's model came from Python; give it again: fedagg.load({str(folder)!r}, model=...)"
        raise SettingError("run", str(folder), words)
    if not models.ARCHITECTURES.has(config.model):
        plugins.load(config.plugin)
    return build_model(config, inputs or chosen_data(config))
