"""`fedagg run`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import fedagg
from fedagg import trackers
from fedagg.cli import from_python
from fedagg.cli.process import leads
from fedagg.cli.show import err, out, results_table, task
from fedagg.cli.watch import Watch, watched
from fedagg.config import Config, make, read, resolve
from fedagg.errors import SettingError
from fedagg.formats import check_run
from fedagg.result import Result

TRACK = f"follow the run live, with one or several of {', '.join(trackers.TRACKERS)}"


def run(
    config: Annotated[Path | None, typer.Argument(help="a TOML file of settings", show_default=False)] = None,
    *,
    out_dir: Annotated[Path | None, typer.Option("--out", help="the run folder (default runs/<time>-<name>)")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="resume the run in this folder")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object, and nothing else, on standard output")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress")] = False,
    track: Annotated[str | None, typer.Option("--track", help=TRACK, show_default=False)] = None,
    watch: Watch = False,
    **settings: Any,
) -> int:
    """Train one federated model, and keep everything about it in a run folder."""
    if resume is not None and out_dir is not None:
        raise SettingError("out", str(out_dir), f"--resume continues in its own folder, {resume}; leave out --out")
    chosen = resumed(resume, config, settings) if resume is not None else resolve(settings, config, settings.pop("preset", None))
    folder = resume or out_dir or default_folder(chosen)
    followers = [trackers.make(name, folder) for name in trackers.split_names(track)]
    with watched(folder, watch):
        result = fedagg.run(chosen, out=None if resume else folder, resume=resume, callbacks=followers, progress=not quiet)
    if leads():
        tell(result, as_json)
    return 130 if result.interrupted else 0


def resumed(folder: Path, file: Path | None, settings: dict[str, Any]) -> Config:
    """The settings of the run to resume, changed by those given with --resume."""
    if not (folder / "config.toml").exists():
        raise SettingError("resume", str(folder), "is not a run folder: it has no config.toml")
    given = {**(read(file) if file else {}), **{k: v for k, v in settings.items() if v is not None}}
    if "preset" in given:
        raise SettingError("preset", given["preset"], "a resumed run keeps its own settings; leave out the preset")
    check_run(folder)
    config = make({**read(folder / "config.toml"), **given})
    from_python.refuse(config, "resume", folder, "fedagg.run(resume={folder!r}, {given})")
    return config


def default_folder(config: Config) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{config.method}-{config.data_name}-{config.model}-{config.partition}-seed{config.seed}"
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}-{number}", number + 1
    return folder


def tell(result: Result, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result.summary()) + "\n")
        return
    out.print(results_table([result], task(result.config)), crop=False)
    if (fitted := result.figures.get(f"personal_{result.metric.key}")) is not None:
        out.print(f"personal {result.metric.label}: {result.metric.shown(fitted)}", highlight=False)
    if result.interrupted:
        again = f"continue with: fedagg run --resume {shlex.quote(str(result.run))}"
        err.print(f"stopped after {len(result.history)} rounds; {again}", style="yellow", markup=False, soft_wrap=True)
    if result.stopped:
        early = f"stopped after {len(result.history)} of {result.config.rounds} rounds: {result.stopped}"
        out.print(early, markup=False, highlight=False, soft_wrap=True)
    out.print(f"run folder: {result.run}", markup=False, soft_wrap=True)
