"""`fedagg export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import nn

import fedagg
from fedagg import plugins, runs
from fedagg.cli.show import out
from fedagg.errors import SettingError, first_line, unknown
from fedagg.export import ENDINGS

TO = f"the format: {', '.join(ENDINGS)} (weights alone)"
MODEL = "the function that makes the network, if the run got it from Python, e.g. task.py:model"
SHAPE = "shape of a sample, e.g. 1,28,28, if the run folder does not say it"


def export(
    run: Annotated[Path, typer.Argument(help="a run folder, which may be that of a federation's server")],
    *,
    to: Annotated[str, typer.Option("--to", help=TO)],
    path: Annotated[
        Path | None, typer.Option("--out", "-o", help="the file (default export.onnx or the like in the run folder)")
    ] = None,
    model: Annotated[str | None, typer.Option(help=MODEL, show_default=False)] = None,
    shape: Annotated[str | None, typer.Option(help=SHAPE, show_default=False)] = None,
) -> None:
    """Write the trained network to a file that runs without fedagg, and check it by running it."""
    if to not in ENDINGS:
        raise unknown("to", to, ENDINGS)
    if model is None and runs.load(run).config.model == "custom":
        words = "the run's model came from Python; name the function that makes it, with --model FILE.py:FUNCTION"
        raise SettingError("run", str(run), f"{words}. Its weights alone are in {run / 'model.safetensors'}")
    form = numbers(shape)
    written = fedagg.load(run, model=build_network(model) if model is not None else None).export(to, path, shape=form)
    out.print(str(written.path), soft_wrap=True, highlight=False)
    if written.samples:
        words = f"checked: it runs, and its outputs for {written.samples} random samples differ from the network's by at most"
        out.print(f"{words} {written.difference:.1g}", soft_wrap=True, highlight=False)


def build_network(reference: str) -> nn.Module:
    """The network that a function in a file or module returns."""
    place, _, name = reference.rpartition(":")
    if not place:
        raise SettingError("model", reference, "give a Python file or module and a function in it, e.g. task.py:model")
    function = getattr(plugins.module(place), name, None)
    if not callable(function):
        raise SettingError("model", reference, f"there is no function {name} in {place}")
    try:
        network = function()
    except Exception as error:  # a user's code may raise anything
        raise SettingError("model", reference, f"cannot be made: {type(error).__name__}: {first_line(error)}") from None
    if not isinstance(network, nn.Module):
        raise SettingError("model", reference, f"returned a {type(network).__name__}; return a torch module")
    return network


def numbers(shape: str | None) -> tuple[int, ...] | None:
    if shape is None:
        return None
    words = shape.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise SettingError("shape", shape, "give whole numbers with commas, e.g. 1,28,28")
    return tuple(map(int, words))
