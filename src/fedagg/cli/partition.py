"""`fedagg partition`: which client holds which labels, and how much the clients differ."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.table import Table
from torch import nn

from fedagg import files, plugins, runs
from fedagg import partition as splits
from fedagg.cli import from_python
from fedagg.cli.catalogue import Plugin
from fedagg.cli.show import out, waiting
from fedagg.config import Config, resolve
from fedagg.data import Dataset
from fedagg.errors import FedaggWarning, SettingError
from fedagg.from_config import build_model, chosen_data, deal, with_client_count
from fedagg.result import finite

if TYPE_CHECKING:
    from fedagg.theory.heterogeneity import Dissimilarity, Distances

RUN = "take data, split and model from this run folder, and use its final model too"


def partition(
    *,
    dataset: Annotated[str | None, typer.Option(help="the data set (default mnist-mini)", show_default=False)] = None,
    labels: Annotated[Path | None, typer.Option(help="your own labels, .csv or .npy", show_default=False)] = None,
    name: Annotated[str | None, typer.Option("--partition", help="the split: see `fedagg list` (default dirichlet)")] = None,
    sigma: Annotated[float | None, typer.Option(help="concentration (default 0.6)", show_default=False)] = None,
    shards: Annotated[int | None, typer.Option(help="shards per client (default 2)", show_default=False)] = None,
    clients: Annotated[int | None, typer.Option(help="number of clients (default 100)", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the split (default 0)", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option(help="the model whose gradients are compared (default linear)", show_default=False)
    ] = None,
    run: Annotated[Path | None, typer.Option(help=RUN, show_default=False)] = None,
    folder: Annotated[Path, typer.Option("--out", help="where the files go")] = Path("partition"),
    plugin: Plugin = None,
    data_dir: Annotated[str | None, typer.Option(help="where data sets are", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")] = False,
) -> None:
    """Show how a data set is split: label counts, client sizes and three distances, also over σ; as CSV and PNG.

    With --labels, this works for any list of labels. Gradients need samples, so they are then left out.
    """
    from fedagg.theory import heterogeneity as het  # loads matplotlib and scipy

    given = {
        "dataset": dataset,
        "partition": name,
        "sigma": sigma,
        "shards": shards,
        "clients": clients,
        "seed": seed,
        "model": model,
        "data_dir": data_dir,
        "plugin": plugins.parse_names(plugin) or None,
    }
    config = choose_config(given, run, labels)
    if labels is not None:
        samples, known = None, splits.from_file(labels)
    else:
        samples = chosen_data(config).held_back(config.validation, config.seed)
        config = with_client_count(config, samples)
        known = samples.y_train.numpy()
    models = networks(config, samples, run) if samples else {}

    if samples is not None:
        if samples.task != "classification":
            raise SettingError("dataset", config.dataset, f"has no class labels to count: its task is {samples.task}")
        parts = list(deal(config, samples))
    else:
        parts = splits.partition(config.partition, known, config.clients, config.seed, sigma=config.sigma, per_client=config.shards)
    counts = het.label_counts(known, parts, samples.classes if samples else None)
    here, over = het.distances(counts), over_sigma(known, config)
    title = f"{labels.name if labels else config.dataset}, {split_name(config)}, {config.clients} clients"
    files.folder(folder)
    het.write_counts(folder / "labels.csv", counts)
    het.write_distances(folder / "distances.csv", here)
    het.plot_counts(folder / "labels.png", counts, title)
    het.write_summary(folder / "sigma.csv", over)
    het.plot_over_sigma(folder / "sigma.png", over, f"{labels.name if labels else config.dataset}, {config.clients} clients")
    gradients = dissimilarity(config, samples, parts, models) if samples else {}
    if gradients:
        het.write_dissimilarity(folder / "gradients.csv", gradients)

    drawn = "dirichlet-class" if config.partition == "dirichlet-class" else "dirichlet"
    rows = {split_name(config): here}
    rows |= {"iid" if math.isinf(value) else f"{drawn}, σ = {value:g}": found for value, found in over.items()}
    if as_json:
        sys.stdout.write(json.dumps(summary(title, rows, gradients, folder)) + "\n")
        return
    tell(title, rows, gradients)
    out.print(f"files: {folder}", markup=False, highlight=False, soft_wrap=True)


def choose_config(given: dict[str, Any], run: Path | None, labels: Path | None) -> Config:
    options = {key: value for key, value in given.items() if value is not None}
    if run is None:
        if labels is not None and "dataset" in options:
            raise SettingError("labels", str(labels), "give either --labels or --dataset")
        return resolve({"partition": "dirichlet", **options})
    settled = [f"--{key}" for key in options if key not in ("data_dir", "plugin")] + (["--labels"] if labels is not None else [])
    if settled:
        raise SettingError("run", str(run), f"has its own data, split and model; leave {', '.join(settled)} out")
    recorded = runs.load(run).config
    plugins.load(recorded.plugin)
    config = recorded.changed(**options)
    from_python.refuse(config, "run", run, "the functions of fedagg.theory.heterogeneity")
    return config


def split_name(config: Config) -> str:
    if config.partition.startswith("dirichlet"):
        return f"{config.partition}, σ = {config.sigma:g}"
    return f"shards, {config.shards} each" if config.partition == "shards" else config.partition


def over_sigma(labels: npt.NDArray[Any], config: Config) -> dict[float, Distances]:
    """The paper's Fig. 4 for these labels; a σ that leaves clients empty is left out, with a note."""
    from fedagg.theory import heterogeneity as het

    by = "class" if config.partition == "dirichlet-class" else "client"
    found: dict[float, Distances] = {}
    for sigma in het.SIGMAS:
        try:
            found |= het.over_sigma(labels, config.clients, [sigma], config.seed, by)
        except SettingError as error:
            warnings.warn(str(error), FedaggWarning, stacklevel=2)
    return found


def networks(config: Config, data: Dataset, run: Path | None) -> dict[str, nn.Module]:
    """The models whose gradients are compared: the initial one, and the final one of a run."""
    models = {"initial": build_model(config, data)}
    if run is not None:
        models["final"] = runs.load_weights(build_model(config, data), run / "model.safetensors")
    return models


def dissimilarity(config: Config, data: Dataset, parts: splits.Indices, models: dict[str, nn.Module]) -> dict[str, Dissimilarity]:
    """How much the clients' full gradients differ, for each model. This can take minutes, so there is a bar."""
    from fedagg.theory import heterogeneity as het
    from fedagg.theory.objective import Objective

    data = data.normalized() if config.normalize else data
    found = {}
    with waiting() as progress:
        for name, module in models.items():
            objective = Objective(module, data.x_train, data.y_train, parts, config.weight_decay, torch.float32)
            w = objective.layout.pack(objective.module).w
            each = progress.track(objective.each_gradient(w), len(parts), description=f"gradients at the {name} model")
            found[name] = het.streamed_dissimilarity((g.numpy() for g in each), objective.theta.numpy())
    return found


def summary(title: str, rows: dict[str, Distances], gradients: dict[str, Dissimilarity], folder: Path) -> dict[str, Any]:
    from fedagg.theory.heterogeneity import METRICS

    splits_found = {
        name: {metric: {"mean": one.mean(metric), "std": one.spread(metric)} for metric in METRICS} for name, one in rows.items()
    }
    unlike = {name: {"variance": one.variance, "ratio": finite(one.ratio)} for name, one in gradients.items()}
    return {"title": title, "splits": splits_found, "gradients": unlike, "out": str(folder)}


def tell(title: str, rows: dict[str, Distances], gradients: dict[str, Dissimilarity]) -> None:
    from fedagg.theory.heterogeneity import METRICS

    table = Table(title=title, title_justify="left")
    for column in ("split", "samples", "Wasserstein", "TV", "JS"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name, one in rows.items():
        low, high = int(np.min(one.sizes)), int(np.max(one.sizes))
        numbers = [f"{one.mean(metric):.2f} ± {one.spread(metric):.2f}" for metric in METRICS]
        table.add_row(name, str(low) if low == high else f"{low} to {high}", *numbers)
    out.print(table)
    for name, found in gradients.items():
        words = f"gradients at the {name} model: variance {found.variance:.4g}, ratio B² {found.ratio:.4g}"
        out.print(words, highlight=False, soft_wrap=True)
