"""`fedagg compare`: several methods on the same partition, participants and initial weights."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import fedagg
from fedagg import data, files, plots
from fedagg.cli.options import with_settings
from fedagg.cli.show import Live, err, out, results_table
from fedagg.config import resolve
from fedagg.errors import SettingError


def compare(
    algorithms: Annotated[str, typer.Argument(help="methods, separated by commas, e.g. fedagg,fedavg,fedadam")],
    config: Annotated[Path | None, typer.Argument(help="a TOML file of settings", show_default=False)] = None,
    *,
    out_dir: Annotated[Path | None, typer.Option("--out", help="folder of the comparison (default runs/<time>-compare)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress display")] = False,
    **settings: Any,
) -> int:
    """Run several methods side by side: one table, one plot, and a run folder each."""
    preset = settings.pop("preset", None)
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    if not names:
        raise SettingError("algorithms", algorithms, "name at least one method, e.g. fedagg,fedavg")
    configs = [resolve({**settings, "algorithm": name}, config, preset) for name in dict.fromkeys(names)]
    folder = files.folder(out_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare")
    for chosen in configs:
        if (folder / chosen.method).exists():
            raise SettingError("out", str(folder), f"holds a run of {chosen.method} already; choose another folder")
    given = data.load(configs[0].dataset, configs[0].data_dir)
    results = []
    for chosen in configs:
        live = Live(chosen.method)
        try:
            callbacks = [] if quiet else [live]
            results.append(fedagg.run(chosen, data=given, out=folder / chosen.method, callbacks=callbacks))
        finally:
            live.stop()
        if results[-1].interrupted:
            err.print("[yellow]stopped[/]: the methods after this one were not run")
            break
    c = configs[0]
    title = f"{c.dataset}, {c.model}, {c.partition}, {c.clients} clients, {100 * c.participation:g} % a round, seed {c.seed}"
    picture = plots.accuracy_curves({r.config.method: r.history for r in results}, folder / "accuracy.png", title)
    if as_json:
        sys.stdout.write(json.dumps({"runs": [r.summary() for r in results], "plot": str(picture)}) + "\n")
    else:
        out.print(results_table(results, title))
        out.print(f"plot: {picture}", soft_wrap=True)
    return 130 if results[-1].interrupted else 0


compare = with_settings(compare, leave_out=("algorithm",))
