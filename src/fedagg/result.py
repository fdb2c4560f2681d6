"""What a run leaves behind: the object that `fedagg.run` returns and that `fedagg.load` reads from a run folder."""

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

from fedagg import data, plots, runs
from fedagg.config import Config
from fedagg.data import Array
from fedagg.errors import SettingError, need
from fedagg.evaluate import parted
from fedagg.export import Exported, export
from fedagg.inputs import Inputs
from fedagg.runs import percent
from fedagg.stopping import metric
from fedagg.work import Loss, cross_entropy

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

BATCH = 500  # samples at a time
NOT_GIVEN = "came from Python; give it again: fedagg.load({run!r}, loss=...)"


@dataclass(repr=False, eq=False)
class Result:
    """What a run leaves behind. `fedagg.run` returns it; `fedagg.load` reads it from a run folder.

    Attributes:
        config: the settings of the run, complete.
        history: a dictionary for each round, the lines of `metrics.jsonl`.
        model: the network with the weights of the end, on the CPU.
        accuracy: of the last evaluation, from 0 to 1; not a number before the first one. It is of the test set, or of the training
            data held back where `validation` is set.
        best_accuracy: the highest of all evaluations.
        loss: mean loss of the last evaluation.
        seconds: time that the run took, those before a resume included.
        run: the run folder, if there is one.
        interrupted: was the run stopped by Ctrl-C? Then it can be gone on with.
        stopped: why the run ended before its last round, where a rule or a callback ended it.
        left_out: by cause, how many rounds each client was left out of.
        figures: what a method says of the end beside that, e.g. `personal_accuracy`.
        inputs: shape and kind of the samples; None in folders of earlier versions.
        criterion: the loss of a sample; None where it came from Python and was not given to `fedagg.load`.
    """

    config: Config
    history: list[dict[str, Any]]
    model: nn.Module
    accuracy: float
    best_accuracy: float
    loss: float
    seconds: float
    run: Path | None = None
    interrupted: bool = False
    stopped: str | None = None
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    inputs: Inputs | None = None
    criterion: Loss | None = cross_entropy

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
            "accuracy": finite(self.accuracy),
            "best_accuracy": finite(self.best_accuracy),
            "loss": finite(self.loss),
            "seconds": round(self.seconds, 3),
            "run": str(self.run) if self.run else None,
            **({"interrupted": True} if self.interrupted else {}),
            **({"stopped": self.stopped} if self.stopped else {}),
            **({"left_out": self.left_out} if self.left_out else {}),
            **self.figures,
        }

    @property
    def network(self) -> nn.Module:
        """The model as it takes samples from outside: with the standardisation of the run, if it had one, in front."""
        return self.model if self.inputs is None else self.inputs.in_front(self.model)

    def outputs(self, x: Array) -> Tensor:
        """What the network puts out for samples: a row of numbers each. Samples are given as to `fedagg.Dataset`: images of bytes
        are scaled to [0, 1], and what `normalize` did in the run is done here too."""
        samples = data._samples("x", x)
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
                return torch.cat([network(part.to(where)).cpu() for part in parted(samples, BATCH)])
        finally:
            self.model.train(mode)

    def predict(self, x: Array) -> Tensor:
        """The most likely class of every sample."""
        return self.outputs(x).argmax(-1)

    def evaluate(self, x: Array, y: Array) -> dict[str, float]:
        """Mean loss and accuracy on samples of yours."""
        if self.criterion is None:
            raise SettingError("loss", "custom", f"the run's loss {NOT_GIVEN.format(run=str(self.run))}")
        labels, output = data._labels("y", y), self.outputs(x)
        if len(labels) != len(output):
            raise SettingError("y", f"{len(labels)} labels", f"x has {len(output)} samples; the two must agree")
        if int(labels.max()) >= output.shape[1] or int(labels.min()) < 0:
            raise SettingError("y", int(labels.max()), f"the network knows labels from 0 to {output.shape[1] - 1}")
        loss = self.criterion(output, labels).double().mean()
        return {"loss": float(loss), "accuracy": float((output.argmax(-1) == labels).double().mean())}

    def curve(self, column: str) -> tuple[list[int], list[float]]:
        """The rounds that have this figure, and its values."""
        found = [(row["round"], row[column]) for row in self.history if row.get(column) is not None]
        return [number for number, _ in found], [float(np.mean(value)) for _, value in found]

    def to_pandas(self) -> DataFrame:
        """The history as a data frame: a row a round, a column a figure. Figures of epochs have a column for each epoch."""
        need("to_pandas", "pandas", "analysis")
        import pandas

        return pandas.DataFrame([columns(row) for row in self.history]).set_index("round")

    def plot(self, path: str | Path | None = None) -> Figure:
        """The run's figure of merit and loss over its rounds; also as a file, PNG, SVG or PDF by its ending."""
        figure, (axes,) = plots.canvas(1, 2, (9.5, 3.4))
        name, _ = metric(self.config)
        for each, column in zip(axes, (name, "loss"), strict=True):
            scale, unit = (100.0, " (%)") if column == "accuracy" else (1.0, "")
            rounds, values = self.curve(column)
            plots.draw_line(each, rounds, [scale * value for value in values], self.config.method, 1.8, 0)
            each.set(xlabel="round", ylabel=f"{runs.measured(column, [self.config])}{unit}")
            plots.tidy(each)
        figure.suptitle(about(self.config), fontsize=10)
        if path is not None:
            if (ending := Path(path).suffix.removeprefix(".")) not in plots.FORMATS:
                raise SettingError("path", str(path), f"choose an ending of {', '.join(plots.FORMATS)}, not {ending!r}")
            plots.save(figure, Path(path))
        return plots.displayed(figure)

    def export(self, to: str, path: str | Path | None = None, *, shape: Sequence[int] | None = None) -> Exported:
        """Write the network to a file that runs without fedagg, and run that file to see that it puts out the same.

        Args:
            to: `onnx`, `torchscript` or `safetensors` (weights alone).
            path: the file; by default `export.onnx` and the like in the run folder.
            shape: of one sample, where the run folder does not say it; of real numbers then.
        """
        if path is None and self.run is None:
            raise SettingError("path", None, "the run has no folder; say where the file is to go")
        given = Inputs(tuple(shape), 0) if shape is not None else None
        facts = {"model": self.config.model, "dataset": self.config.dataset}
        return export(self.model, self.inputs or given, to, None if path is None else Path(path), self.run or Path(), facts)

    def __repr__(self) -> str:
        c, how = self.config, ", interrupted" if self.interrupted else f", stopped: {self.stopped}" if self.stopped else ""
        scores = f"accuracy {percent(self.accuracy)} (best {percent(self.best_accuracy)}), loss {self.loss:.4f}"
        where = f"run folder {self.run}" if self.run is not None else "no run folder: give out=... to keep a run"
        return f"{about(c)}\n{scores}, {len(self.history)} of {c.rounds} rounds in {self.seconds:.1f} s{how}\n{where}"

    def _repr_html_(self) -> str:
        """In a notebook: a small table and the curve."""
        c = self.config
        rows = {
            "method": f"{c.method}, seed {c.seed}",
            "task": ", ".join(word for word in runs.task(c).values() if word),
            "accuracy": f"{percent(self.accuracy)} (best {percent(self.best_accuracy)})",
            "loss": f"{self.loss:.4f}",
            "rounds": f"{len(self.history)} of {c.rounds}{' (interrupted)' if self.interrupted else ''}",
            **({"stopped": self.stopped} if self.stopped else {}),
            "seconds": f"{self.seconds:.1f}",
            **({"run folder": str(self.run)} if self.run is not None else {}),
        }
        name, _ = metric(c)
        cells = "".join(
            f'<tr><th style="text-align:left">{html.escape(key)}</th><td style="text-align:left">{html.escape(value)}</td></tr>'
            for key, value in rows.items()
        )
        return f"<table>{cells}</table>{drawing(*self.curve(name), runs.measured(name, [c]))}"


def about(c: Config) -> str:
    return f"{c.method}, seed {c.seed}: {', '.join(word for word in runs.task(c).values() if word)}"


def finite(value: float) -> float | None:
    """JSON has no infinity, and nothing that is not a number."""
    return value if math.isfinite(value) else None


def columns(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the history without lists: a column for each epoch, and causes as words."""
    made: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, list) and name != "causes":
            made |= {f"{name}/epoch_{epoch}": one for epoch, one in enumerate(value, start=1)}
        else:
            made[name] = ", ".join(value) if isinstance(value, list) else value
    return made


def drawing(rounds: list[int], values: list[float], what: str, width: int = 360, height: int = 120) -> str:
    """A curve as SVG, without any library: the highest and the lowest value stand beside it, the rounds below."""
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


def scores(history: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Accuracy of the last evaluation, the best of all, and the last loss."""
    scored = [row for row in history if "accuracy" in row]
    best = max((row["accuracy"] for row in scored), default=math.nan)
    return (scored[-1]["accuracy"], best, scored[-1]["loss"]) if scored else (math.nan, math.nan, math.nan)
