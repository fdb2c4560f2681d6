"""The result of a run: the object that `fedagg.run` returns and that `fedagg.load` reads from a run folder."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedagg import plots, runs
from fedagg.config import Config
from fedagg.data import Dataset
from fedagg.data.arrays import Array, samples_of
from fedagg.errors import SettingError, need
from fedagg.evaluate import split_rows
from fedagg.export import Exported, export
from fedagg.inputs import Inputs
from fedagg.measure import ACCURACY, Measure
from fedagg.tasks import CLASSIFICATION, Task
from fedagg.work import Loss, cross_entropy

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

LOSS = Measure("loss", "loss", percent=False, higher=False)
BATCH = 500  # samples at a time
NOT_GIVEN = "came from Python; give it again: fedagg.load({run!r}, loss=...)"


@dataclass(repr=False, eq=False)
class Result:
    """The result of a run. `fedagg.run` returns it; `fedagg.load` reads it from a run folder.

    Attributes:
        config: the complete settings of the run.
        history: one dictionary per round, the lines of `metrics.jsonl`.
        model: the network with its final weights, on the CPU.
        score: the task's metric at the last evaluation; NaN before the first one. It is measured on the test set, or on the
            training data held back if `validation` is set. `accuracy` is the same, from 0 to 1, if that is the metric.
        best: the best of all evaluations; `best_accuracy` likewise.
        loss: mean loss of the last evaluation.
        seconds: time that the run took, including the time before a resume.
        timing: where the time went since the run was started or resumed: `data`, `network and engine` (with its trial),
            `checksum` (of what was given), `first round` (on a GPU it compiles), `rounds`, `evaluation`, and `record` (folder,
            checkpoints, callbacks).
        run: the run folder, if there is one.
        interrupted: was the run stopped by Ctrl-C? Then it can be resumed.
        stopped: why the run ended before its last round, if a rule or a callback ended it.
        left_out: by cause, how many rounds each client was left out of.
        figures: other final figures, e.g. `personal_accuracy`.
        metric: what `score` is: its key in the history, its name, and which way is better.
        inputs: shape and kind of the samples; None in folders of earlier versions.
        criterion: the loss of a sample; None if it came from Python and was not given to `fedagg.load`.
        task: the task, with the figures it is judged by.
    """

    config: Config
    history: list[dict[str, Any]]
    model: nn.Module
    score: float
    best: float
    loss: float
    seconds: float
    run: Path | None = None
    interrupted: bool = False
    timing: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    metric: Measure = ACCURACY
    stopped: str | None = None
    inputs: Inputs | None = None
    criterion: Loss | None = cross_entropy
    task: Task = CLASSIFICATION

    def __post_init__(self) -> None:
        """Times are rounded here rather than when they are written: a result that is read back is the one that was returned."""
        self.seconds = round(self.seconds, 3)
        self.timing = {what: round(taken, 3) for what, taken in self.timing.items()}

    @property
    def accuracy(self) -> float:
        """Accuracy at the last evaluation, from 0 to 1; only if that is the metric."""
        return self.of_accuracy(self.score)

    @property
    def best_accuracy(self) -> float:
        """The best accuracy of all evaluations, from 0 to 1; only if that is the metric."""
        return self.of_accuracy(self.best)

    def of_accuracy(self, value: float) -> float:
        if self.metric.key != ACCURACY.key:
            raise AttributeError(f"the run is judged by its {self.metric.label}: see Result.score and Result.best")
        return value

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        c = self.config
        return {
            "algorithm": c.algorithm,
            "variant": c.variant,
            "dataset": c.dataset,
            "model": c.model,
            "partition": c.partition,
            "seed": c.seed,
            **({"validation": c.validation} if c.validation else {}),
            "rounds": len(self.history),
            self.metric.key: finite(self.score),
            f"best_{self.metric.key}": finite(self.best),
            "loss": finite(self.loss),
            "seconds": self.seconds,
            **({"timing": self.timing} if self.timing else {}),
            "run": str(self.run) if self.run else None,
            **({"interrupted": True} if self.interrupted else {}),
            **({"stopped": self.stopped} if self.stopped else {}),
            **({"left_out": self.left_out} if self.left_out else {}),
            **self.figures,
        }

    @property
    def network(self) -> nn.Module:
        """The model for samples from outside: preceded by the run's standardisation, if it had one."""
        return self.model if self.inputs is None else self.inputs.in_front(self.model)

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the classes that `predict` numbers, if the run's data named them."""
        return None if self.inputs is None else self.inputs.labels

    def outputs(self, x: Array) -> Tensor:
        """The network's outputs for samples, one row each. Samples are given as to `fedagg.Dataset`: images of bytes are scaled to
        [0, 1], and normalised if the run did so."""
        samples = samples_of("x", x)
        if self.inputs is not None and tuple(samples.shape[1:]) != self.inputs.shape:
            raise SettingError("x", tuple(samples.shape[1:]), f"the run's samples have the shape {self.inputs.shape}")
        if self.inputs is not None and samples.is_floating_point() == self.inputs.tokens:
            words = "tokens, whole numbers" if self.inputs.tokens else "real numbers; x.astype('float32') makes them"
            raise SettingError("x", str(samples.dtype)[6:], f"the run's samples are {words}")
        network, mode = self.network, self.model.training
        where = next(self.model.parameters()).device
        try:
            network.to(where).eval()
            with torch.no_grad():
                return torch.cat([network(part.to(where)).cpu() for part in split_rows(samples, BATCH)])
        finally:
            self.model.train(mode)

    def predict(self, x: Array) -> Tensor:
        """The most likely class of every sample or token; for several labels, those that are found; for quantities, the outputs."""
        output = self.outputs(x)
        if self.task.name in ("classification", "tokens"):
            return output.argmax(-1)
        return output > 0 if self.task.name == "multilabel" else output

    def evaluate(self, x: Array, y: Array) -> dict[str, float]:
        """Mean loss, and the task's figures, on your own samples."""
        if self.criterion is None:
            raise SettingError("loss", "custom", f"the run's loss {NOT_GIVEN.format(run=str(self.run))}")
        known: dict[str, Any] = {} if self.inputs is None else {"classes": self.inputs.classes, "task": self.inputs.task}
        given = Dataset(x, y, x, y, **known)  # this checks both
        output = self.outputs(given.x_test)
        sums = {metric.key: metric.score(metric.tally(output, given.y_test).double().sum(0)) for metric in self.task.metrics}
        return {"loss": float(self.criterion(output, given.y_test).double().mean()), **sums}

    def curve(self, column: str) -> tuple[list[int], list[float]]:
        """The rounds that have this figure, and its values."""
        found = [(row["round"], row[column]) for row in self.history if row.get(column) is not None]
        return [number for number, _ in found], [float(np.mean(value)) for _, value in found]

    def to_pandas(self) -> DataFrame:
        """The history as a data frame: one row per round, one column per figure. Figures per epoch have a column for each epoch."""
        need("to_pandas", "pandas", "analysis")
        import pandas

        return pandas.DataFrame([columns(row) for row in self.history]).set_index("round")

    def plot(self, path: str | Path | None = None) -> Figure:
        """The run's metric and loss over its rounds; also as a file, PNG, SVG or PDF by its ending."""
        figure, (axes,) = plots.canvas(1, 2, (9.5, 3.4))
        for each, shown in zip(axes, (self.metric, LOSS), strict=True):
            rounds, values = self.curve(shown.key)
            plots.draw_line(each, rounds, [shown.scale * value for value in values], self.config.method, 1.8, 0)
            each.set(xlabel="round", ylabel=f"{runs.metric_name(shown.label, [self.config])}{shown.unit}")
            plots.tidy(each)
        figure.suptitle(about(self.config), fontsize=10)
        if path is not None:
            if (ending := Path(path).suffix.removeprefix(".")) not in plots.FORMATS:
                raise SettingError("path", str(path), f"choose an ending of {', '.join(plots.FORMATS)}, not {ending!r}")
            plots.save(figure, Path(path))
        return plots.displayed(figure)

    def export(self, to: str, path: str | Path | None = None, *, shape: Sequence[int] | None = None) -> Exported:
        """Write the network to a file that runs without fedagg, and run that file to check that its outputs are the same.

        Args:
            to: `onnx`, `torchscript` or `safetensors` (weights alone).
            path: the file; by default `export.onnx` and the like in the run folder.
            shape: of one sample of real numbers, if the run folder does not say it.
        """
        if path is None and self.run is None:
            raise SettingError("path", None, "the run has no folder; say where the file is to go")
        given = Inputs(tuple(shape), 0) if shape is not None else None
        facts = {"model": self.config.model, "dataset": self.config.dataset}
        return export(self.model, self.inputs or given, to, None if path is None else Path(path), self.run or Path(), facts)

    def __repr__(self) -> str:
        c, how = self.config, ", interrupted" if self.interrupted else f", stopped: {self.stopped}" if self.stopped else ""
        shown = self.metric.shown
        scores = f"{self.metric.label} {shown(self.score)} (best {shown(self.best)}), loss {self.loss:.4f}"
        where = f"run folder {self.run}" if self.run is not None else "no run folder: give out=... to keep a run"
        return f"{about(c)}\n{scores}, {len(self.history)} of {c.rounds} rounds in {self.seconds:.1f} s{how}\n{where}"

    def _repr_html_(self) -> str:
        """A small table and the curve, for notebooks."""
        c = self.config
        rows = {
            "method": f"{c.method}, seed {c.seed}",
            "task": ", ".join(word for word in runs.task(c).values() if word),
            self.metric.label: f"{self.metric.shown(self.score)} (best {self.metric.shown(self.best)})",
            "loss": f"{self.loss:.4f}",
            "rounds": f"{len(self.history)} of {c.rounds}{' (interrupted)' if self.interrupted else ''}",
            **({"stopped": self.stopped} if self.stopped else {}),
            "seconds": f"{self.seconds:.1f}",
            **({"run folder": str(self.run)} if self.run is not None else {}),
        }
        cells = "".join(
            f'<tr><th style="text-align:left">{html.escape(key)}</th><td style="text-align:left">{html.escape(value)}</td></tr>'
            for key, value in rows.items()
        )
        return f"<table>{cells}</table>{drawing(*self.curve(self.metric.key), runs.metric_name(self.metric.label, [c]))}"


def about(c: Config) -> str:
    return f"{c.method}, seed {c.seed}: {', '.join(word for word in runs.task(c).values() if word)}"


def finite(value: float) -> float | None:
    """The value, or None for infinity and NaN, which JSON cannot express."""
    return value if math.isfinite(value) else None


def columns(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the history without lists: one column per epoch, and causes as words."""
    made: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, list) and name != "causes":
            made |= {f"{name}/epoch_{epoch}": one for epoch, one in enumerate(value, start=1)}
        else:
            made[name] = ", ".join(value) if isinstance(value, list) else value
    return made


def drawing(rounds: list[int], values: list[float], what: str, width: int = 360, height: int = 120) -> str:
    """A curve as SVG, made without any library: the highest and lowest value are beside it, the rounds below."""
    points = [(number, value) for number, value in zip(rounds, values, strict=True) if math.isfinite(value)]
    if not points:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]

    def place(number: int, value: float) -> str:
        x = 60 + (width - 70) * (number - first) / max(1, last - first)
        y = 10 + (height - 40) * (high - value) / ((high - low) or 1.0)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(*point) for point in points)
    x, y = place(*points[-1]).split(",")
    label = html.escape(f"{what}: {values[-1]:.4g} after round {last}, from {low:.4g} to {high:.4g}")
    texts: tuple[tuple[float, float, str, str], ...]
    texts = ((54, 14, "end", f"{high:.4g}"), (54, height - 27, "end", f"{low:.4g}"), (60, height - 10, "start", f"round {first}"))
    texts += ((width - 10, height - 10, "end", str(last)), (width / 2, height - 10, "middle", what))
    words = "".join(
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="11" fill="currentColor">{html.escape(text)}</text>'
        for x, y, anchor, text in texts
    )
    return (
        f'<svg role="img" aria-label="{label}" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<polyline points="{line}" fill="none" stroke="{plots.COLOURS[0]}" stroke-width="2"/>'
        f'<circle cx="{x}" cy="{y}" r="3" fill="{plots.COLOURS[0]}"/>{words}</svg>'
    )


def scores(history: list[dict[str, Any]], metric: Measure) -> tuple[float, float, float]:
    """The metric of the last evaluation, the best of all, and the last loss."""
    scored = [row for row in history if metric.key in row]
    best = metric.best(row[metric.key] for row in scored)
    return (scored[-1][metric.key], best, scored[-1]["loss"]) if scored else (math.nan, math.nan, math.nan)
