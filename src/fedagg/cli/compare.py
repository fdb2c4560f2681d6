"""`fedagg compare`: several methods on the same partition, participants and initial weights."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import fedagg
from fedagg import files, plots, record, runs
from fedagg.algorithms import REGISTRY
from fedagg.cli.partition import trained
from fedagg.cli.process import leads
from fedagg.cli.show import Live, err, out, results_table, seeds_table, summed, task
from fedagg.cli.watch import Watch, watched
from fedagg.config import Config, make, read, resolve_each
from fedagg.data import Dataset
from fedagg.errors import FedaggWarning, MissingError, SettingError
from fedagg.federation import Result, build_model, chosen_data, counted
from fedagg.formats import check_run
from fedagg.measure import Measure


def numbers(metric: Measure) -> tuple[str, ...]:
    """What a result says of a finished run."""
    return metric.key, f"best_{metric.key}", "loss", "seconds"


def compare(
    algorithms: Annotated[str, typer.Argument(help="methods, separated by commas, e.g. fedagg,fedavg,fedadam")],
    config: Annotated[Path | None, typer.Argument(help="a TOML file of settings", show_default=False)] = None,
    *,
    seeds: Annotated[int, typer.Option(help="run every method with so many seeds, from --seed on", min=1)] = 1,
    out_dir: Annotated[Path | None, typer.Option("--out", help="folder of the comparison (default runs/<time>-compare)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress display")] = False,
    watch: Watch = False,
    **settings: Any,
) -> int:
    """Run several methods side by side: one table, one plot, and a run folder each.

    With several seeds: mean and deviation, a band in the plot, and the differences from the first method, seed by seed, with a 95 %
    interval. Stopped, the same command goes on: what is finished in its folder is not run again.
    """
    preset = settings.pop("preset", None)
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    if not names:
        raise SettingError("algorithms", algorithms, "name at least one method, e.g. fedagg,fedavg")
    if config is not None and str(config) in REGISTRY and not config.exists():
        raise SettingError("config", str(config), f"is a method; separate methods by commas: {','.join(names)},{config}")
    named = resolve_each(names, settings, config, preset)
    given = chosen_data(named[0])
    once = list({chosen.method: counted(chosen, given) for chosen in named}.values())
    # Seeds come outermost, so that a comparison cut short is a whole one of fewer seeds.
    configs = [chosen.changed(seed=chosen.seed + k) if k else chosen for k in range(seeds) for chosen in once]
    folder = out_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare"
    if (folder / "config.toml").exists():
        raise SettingError("out", str(folder), "is the folder of one run; choose another, which gets a folder for each method")
    places = {chosen: folder / (chosen.method if seeds == 1 else f"{chosen.method}-seed{chosen.seed}") for chosen in configs}
    for chosen in configs:
        same(places[chosen], chosen, folder)
    done = {chosen: finished(places[chosen], given) for chosen in configs}
    for chosen in once:
        if done[chosen] is None:
            check(chosen, given)
    files.folder(folder)
    try:
        with watched(folder, watch):
            results = run_all(places, done, given, quiet)
    except KeyboardInterrupt:
        hint(folder, out_dir)
        raise
    if results[-1].interrupted:
        hint(folder, out_dir)
    if not leads():
        return 130 if results[-1].interrupted else 0
    title = task(configs[0])
    if seeds > 1:
        title = title.replace(f"seed {configs[0].seed}", f"seeds {configs[0].seed} to {configs[-1].seed}")
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.config.method, []).append(result)
    # A run that was stopped would cut the mean of its method short.
    histories = {m: [r.history for r in group if not r.interrupted] or [group[0].history] for m, group in groups.items()}
    metric = results[0].metric
    picture: Path | None = folder / f"{metric.key}.png"
    try:
        plots.score_curves(histories, folder / f"{metric.key}.png", title, runs.measured(metric.label, configs), metric)
    except MissingError as error:
        picture = None
        warnings.warn(str(error), FedaggWarning, stacklevel=2)
    if as_json:
        found: dict[str, Any] = {"runs": [r.summary() for r in results], "plot": picture and str(picture)}
        if seeds > 1:
            found["methods"] = [one.json() for one in summed(groups)]
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        out.print(seeds_table(summed(groups), title) if seeds > 1 else results_table(results, title), crop=False)
        if picture is not None:
            out.print(f"plot: {picture}", soft_wrap=True)
    return 130 if results[-1].interrupted else 0


def same(place: Path, config: Config, folder: Path) -> None:
    """Refuse a folder that holds another run of the method. Where it runs may change, as with `--resume`; its rounds may not."""
    if not (place / "config.toml").exists():
        return
    check_run(place)
    before, now = make(read(place / "config.toml"), recorded=True).flat(), config.flat()
    free = record.MAY_CHANGE - {"rounds"}
    differs = ", ".join(f"{k} {before.get(k)!r}" for k in before | now if before.get(k) != now.get(k) and k not in free)
    if differs:
        raise SettingError("out", str(folder), f"holds a run of {config.method} already, with {differs}; choose another folder")


class Ready(Exception):
    """A run would begin now."""


class Stopper:
    """Ends a run before its first round."""

    def started(self, config: Config, done: int) -> None:
        raise Ready

    def round_done(self, row: dict[str, Any]) -> None: ...

    def finished(self, result: Result) -> None: ...


def check(config: Config, given: Dataset) -> None:
    """All that a run checks, up to its first round and without a folder: the last method must not be refused after the first has
    been trained for hours. One process does it alone, whatever engine the run has."""
    try:
        fedagg.run(config.changed(engine="sequential"), data=given, callbacks=[Stopper()])
    except Ready:
        return


def run_all(places: Mapping[Config, Path], done: Mapping[Config, Result | None], given: Dataset, quiet: bool) -> list[Result]:
    """The runs in turn, each in its place, until one is interrupted; those in `done` have been run before."""
    # Looked at before anything is run: of several processes, the first is soon to write these folders.
    begun = {chosen for chosen, own in places.items() if (own / "config.toml").exists()}
    results: list[Result] = []
    for chosen, own in places.items():
        if (before := done[chosen]) is not None:
            results.append(before)
            continue
        live = Live(own.name)
        new, old = (None, own) if chosen in begun else (own, None)
        try:
            results.append(fedagg.run(chosen, data=given, out=new, resume=old, callbacks=[] if quiet else [live]))
        finally:
            live.stop()
        if results[-1].interrupted:
            break
    return results


def finished(folder: Path, given: Dataset) -> Result | None:
    """The result in a run folder, if the run came to its end."""
    facts = runs.whole(folder / "result.json")
    if facts.get("interrupted") or not facts:
        return None
    run = runs.load(folder)
    if not facts.keys() >= set(numbers(run.metric)):
        return None
    if not facts.get("rounds") == len(run.history) == run.config.rounds:  # it was gone on with afterwards, for more rounds
        return None
    model = trained(build_model(run.config, given), folder / "model.safetensors")
    score, best, loss, seconds = (math.nan if facts[key] is None else facts[key] for key in numbers(run.metric))
    result = Result(run.config, run.history, model, score, best, loss, seconds, run=folder, metric=run.metric)
    return replace(result, figures={key: value for key, value in facts.items() if key not in result.summary()})


def hint(folder: Path, out_dir: Path | None) -> None:
    more = "" if out_dir is not None else f" with --out {shlex.quote(str(folder))}"
    err.print(f"stopped; the same command{more} goes on from here", style="yellow", markup=False, soft_wrap=True)
