"""`fedagg list`."""

from __future__ import annotations

import sys

from rich.table import Table

from fedagg import data, models, partition
from fedagg.algorithms import REGISTRY
from fedagg.cli.show import out
from fedagg.config import ENGINES, PRESETS


def list_all() -> None:
    """Show algorithms, data sets, models, partitions, engines and presets."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, kind in sorted(REGISTRY.items()):
        about = (sys.modules[kind.__module__].__doc__ or "").strip().splitlines()[0]
        table.add_row(f"algorithm {name}", about)
    for label, names in (
        ("data sets", data.names()),
        ("models", models.names()),
        ("partitions", partition.names()),
        ("engines", ENGINES),
    ):
        table.add_row(label, ", ".join(names))
    for name, preset in PRESETS.items():
        table.add_row(f"preset {name}", ", ".join(f"{k} {v}" for k, v in preset.items()))
    out.print(table)
