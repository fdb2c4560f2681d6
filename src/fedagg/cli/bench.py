"""`fedagg bench`: how fast rounds are on this machine, compared with a plain loop and with the user's own loops."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedagg import models, plugins
from fedagg.bench import measure, neighbours, table
from fedagg.bench.rivals import RIVALS
from fedagg.bench.task import Task
from fedagg.cli.catalogue import Plugin
from fedagg.cli.show import err, out
from fedagg.config import choices
from fedagg.errors import SettingError, unknown
from fedagg.from_config import pick_device

RIVAL_HELP = f"loops to time, separated by commas: {', '.join(RIVALS)}, or a Python file with run(task, tick)"


def bench(
    *,
    model: Annotated[str, typer.Option(help=f"the network: {', '.join(models.names())}")] = "linear",
    clients: Annotated[int, typer.Option(min=1, help="clients in the federation")] = 100,
    participation: Annotated[float, typer.Option(help="share of the clients that takes part in a round")] = 0.2,
    rounds: Annotated[int, typer.Option(min=1, help="timed rounds of every rival in each of its turns")] = 5,
    samples: Annotated[int, typer.Option(min=1, help="samples of every client")] = 600,
    passes: Annotated[int, typer.Option(min=1, help="number of turns of every rival")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0, ...")] = "auto",
    precision: Annotated[str, typer.Option(help="our arithmetic on a GPU: tf32, fp32 or bf16")] = "tf32",
    rivals: Annotated[str, typer.Option(help=RIVAL_HELP)] = ",".join(RIVALS),
    beside: Annotated[
        int, typer.Option("--neighbours", help="instead of rivals, time our engine alone and in this many processes side by side")
    ] = 0,
    seconds: Annotated[float, typer.Option(min=0.01, help="with --neighbours: how long each turn lasts")] = 5.0,
    out_dir: Annotated[Path | None, typer.Option("--out", help="keep the table in this folder, as JSON and Markdown")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")] = False,
    plugin: Plugin = None,
) -> None:
    """Time FedAvg's rounds: plain PyTorch loops, our engines, and your own loops."""
    given = plugins.parse_names(plugin)
    plugins.load(given)
    if model not in models.names():
        raise unknown("model", model, models.names())
    if not 0 < participation <= 1:
        raise SettingError("participation", participation, "give a share of the clients, over 0 and at most 1")
    if precision not in choices("precision"):
        raise unknown("precision", precision, choices("precision"))
    task = Task(
        model=model,
        clients=clients,
        participation=participation,
        rounds=rounds,
        samples=samples,
        device=str(pick_device(device)),
        precision=precision,
        plugin=",".join(given),
    )
    if beside:
        side_by_side(task, beside, seconds, passes, as_json)
        return
    names = [name.strip() for name in rivals.split(",") if name.strip()]
    with err.status("bench", spinner="dots") as status:
        result = measure.bench(task, names, passes, status.update)
    if out_dir is not None:
        err.print(f"kept in {table.keep(result, out_dir)}", markup=False, soft_wrap=True)
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        out.print(table.screen(result))


def side_by_side(task: Task, runs: int, seconds: float, passes: int, as_json: bool) -> None:
    if runs < 2:
        raise SettingError("neighbours", runs, "give 2 or more runs")
    with err.status("bench", spinner="dots") as status:
        result = neighbours.bench(task, runs, seconds, passes, status.update)
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        out.print(table.neighbours(result), markup=False, highlight=False, soft_wrap=True)
