"""Checks before any long work: do the arguments fit together? If not, a one-line error says what is wrong and how to fix it."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedagg import partition, plugins, seeding
from fedagg.algorithms.base import LR, REGISTRY, Algorithm, check_names
from fedagg.config import FROM_PYTHON, Config, make, read, resolve
from fedagg.data import Dataset
from fedagg.errors import FedaggWarning, SettingError, first_line
from fedagg.flat import copy_module
from fedagg.formats import check_run
from fedagg.options import declared
from fedagg.registry import origin
from fedagg.tasks import CLASSIFICATION, Task
from fedagg.work import Loss

COLUMNS = ("target", "user", "task")
RANGES = 1000.0  # how many times larger one feature may be than another before it is worth a warning


def samples(data: Any, parts: Any, config: Config | None, settings: dict[str, Any]) -> Dataset | None:
    """The data given from Python, in any form, as a Dataset. A path is a setting, like a name, so that a command line can
    repeat it. Data that name their users are split by user unless another partition is chosen."""
    if data is None or isinstance(data, str | os.PathLike):
        settings |= {} if data is None else {"dataset": os.fspath(data)}
        return None
    known = None if isinstance(data, Dataset) else config  # the Dataset already holds what the configuration said about the data
    memory = settings.get("data_memory") or getattr(known, "data_memory", None)
    made = Dataset.of(data, **{name: settings.get(name) or getattr(known, name, None) for name in COLUMNS}, memory=memory)
    chosen = settings.get("partition") is not None or "partition" in getattr(config, "model_fields_set", ())
    if made.users is not None and parts is None and not chosen:
        settings["partition"] = "user"
    return made


def describe_arguments(data: Dataset | None, model: nn.Module | None, parts: Any) -> dict[str, Any]:
    """What the configuration records about arguments that are not settings."""
    known: dict[str, Any] = {}
    if data is not None:
        known["dataset"] = data.name if data.untouched else "custom"
    if model is not None:
        if not isinstance(model, nn.Module):
            raise SettingError(
                "model", getattr(model, "__name__", type(model).__name__), "give a torch module (an object) or a network's name"
            )
        for name, parameter in model.named_parameters():
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                words = f"{name} has a post-accumulate hook, which writes to gradients itself; change them in register_hook"
                raise SettingError("model", type(model).__name__, words)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta or tensor.layout != torch.strided:
                words = f"{name} is {'on the meta device' if tensor.is_meta else 'sparse'}; give a tensor with all its numbers"
                raise SettingError("model", type(model).__name__, words)
        known["model"] = "custom"
    if parts is not None:
        owners = ids(parts)
        if owners is None and (not isinstance(parts, Sequence | Mapping | np.ndarray | Tensor) or len(parts) == 0):
            words = "give a list or dictionary with the samples of every client, at least one, or the user of every sample"
            raise SettingError("parts", type(parts).__name__, words)
        known |= {"partition": "custom", "clients": len(parts) if owners is None else len(np.unique(owners))}
    return known


def ids(parts: Any) -> np.ndarray[Any, Any] | None:
    """The user of every sample, if `parts` is a row of numbers or words; else None."""
    of_each = isinstance(parts, list | tuple) and not all(isinstance(one, str | int | np.integer) for one in parts[:1])
    if isinstance(parts, Mapping | str) or of_each:
        return None
    try:
        row = np.asarray(parts)
    except (ValueError, RuntimeError, TypeError):  # ragged, on another device, or part of a graph
        return None
    if row.dtype == object and row.ndim == 1 and all(isinstance(one, str) for one in row):
        row = row.astype(str)
    return row if row.ndim == 1 and len(row) > 0 and row.dtype.kind in "iuUS" else None


def copy_model(model: nn.Module) -> nn.Module:
    """A copy of the module, so that the user's own is not changed."""
    try:
        return copy_module(model)
    except Exception as error:  # from anything in it that is not a tensor
        words = f"cannot be copied, and every client trains a copy: {first_line(error)}; keep such things out of the module"
    raise SettingError("model", type(model).__name__, words)


def path(setting: str, value: object) -> Path | None:
    """The folder that a Python argument names."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise SettingError(setting, value, "give the name of a folder")
    return Path(value)


def method(algorithm: Algorithm | str | None, settings: dict[str, Any]) -> Algorithm | None:
    """The algorithm, if given as an object; else None, because a name is a setting."""
    if isinstance(algorithm, Algorithm):
        check_names(type(algorithm).__name__, type(algorithm))
        return algorithm
    if isinstance(algorithm, type):
        raise SettingError("algorithm", algorithm.__name__, f"is a class; give an object, {algorithm.__name__}(...), or a name")
    if algorithm is not None:
        settings["algorithm"] = algorithm
    return None


def describe_algorithm(algorithm: Algorithm) -> dict[str, Any]:
    """The name and options that the configuration records for an algorithm given as an object."""
    kind = type(algorithm)
    name = kind.name if REGISTRY.get(kind.name) is kind else origin(kind)
    rate = {} if algorithm.lr == LR else {"lr": algorithm.lr}
    return {"algorithm": name, "variant": "default"} | rate | {name: getattr(algorithm, name) for name in declared(kind)}


def recorded_config(folder: Path, given: dict[str, Any], algorithm: Algorithm | None) -> Config:
    """The settings of the run to resume. What it was given from Python has to be given again."""
    if not (folder / "config.toml").is_file():
        raise SettingError("resume", str(folder), "is not a run folder: it has no config.toml")
    check_run(folder)
    config = make(read(folder / "config.toml"), recorded=algorithm is not None)
    if missing := [word for name, word in FROM_PYTHON.items() if getattr(config, name) == "custom" and name not in given]:
        words = f"the run's {' and '.join(missing)} came from Python; give the same again"
        raise SettingError("resume", str(folder), f"{words}: fedagg.run(resume=..., {', '.join(f'{w}=...' for w in missing)})")
    return config


def merge_config(
    config: Config | None,
    given: dict[str, Any],
    preset: str | None,
    settings: dict[str, Any],
    algorithm: Algorithm | None = None,
) -> Config:
    """The configuration from all arguments. A setting that contradicts another argument is an error."""
    kind = None if algorithm is None else type(algorithm)
    given = given if algorithm is None else given | describe_algorithm(algorithm)
    for name, value in given.items():
        if settings.get(name) not in (None, value):
            raise SettingError(name, settings[name], f"what was given from Python is {value!r}; leave the setting out")
    for name in ("norm", "dropout"):
        if "model" in given and settings.get(name) is not None:
            raise SettingError(name, settings[name], "is for named networks; your own module has its own")
    if config is None:
        return resolve({**settings, **given}, preset=preset, method=kind)
    if not isinstance(config, Config):
        raise SettingError("config", type(config).__name__, "give a fedagg.Config, or settings as keywords")
    if preset is not None:
        raise SettingError("preset", preset, "a configuration is already complete; give one of the two")
    changes = {**given, **{name: value for name, value in settings.items() if value is not None}}
    plugins.load(config.plugin)  # a separate process may not have loaded it yet
    return config.changed_to(changes, kind) if changes else config


def check_callbacks(callbacks: Any) -> None:
    """Refuse objects that are not callbacks: otherwise the mistake shows after all the work, or never."""
    if not isinstance(callbacks, Sequence):
        raise SettingError("callbacks", type(callbacks).__name__, "give a list, even for one")
    for callback in callbacks:
        found = [name for name in ("started", "round_done", "finished") if hasattr(callback, name)]
        if not found or not all(callable(getattr(callback, name)) for name in found) or isinstance(callback, type):
            words = "give an object with some of the methods started(config, done), round_done(row) and finished(result)"
            raise SettingError("callbacks", getattr(callback, "__name__", type(callback).__name__), words)


def indices(parts: Any, data: Dataset) -> Sequence[Any]:
    """Indices of every client's samples. Masks are turned into indices, and users of samples into their parts."""
    if (owners := ids(parts)) is not None:
        if len(owners) != len(data):
            words = f"give the user of each of the {len(data)} training samples, or a list with the samples of every client"
            raise SettingError("parts", f"{len(owners)} users", words)
        return partition.by_user(owners)
    checked = []
    for client, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        try:
            rows = np.asarray(part)
        except (ValueError, RuntimeError, TypeError):  # ragged, on another device, or part of a graph
            rows = np.zeros(0)
        if rows.dtype == bool and rows.shape == (len(data),):
            rows = np.flatnonzero(rows)
        are_indices = np.issubdtype(rows.dtype, np.integer) and rows.ndim == 1 and len(rows) > 0
        if not are_indices or rows.min() < 0 or rows.max() >= len(data):
            words = f"give at least one index from 0 to {len(data) - 1}, whole numbers, or a mask of {len(data)}"
            raise SettingError("parts", f"client {client}", words)
        if len(rows) == len(data) > 2 and rows.max() <= 1:
            raise SettingError("parts", f"client {client}", "looks like a mask of numbers: give it as booleans")
        checked.append(rows)
    return checked


def check_images(augment: str, data: Dataset) -> None:
    """Refuse augmentation for samples that cannot be shifted and mirrored."""
    if len(data.shape) != 3:
        raise SettingError("augment", augment, f"needs images; samples of {data.name} have the shape {data.shape}")
    if data.shape[2] <= 4 < data.shape[0]:
        words = f"images are (channels, height, width), but these are {data.shape}; give x.transpose(0, 3, 1, 2)"
        raise SettingError("augment", augment, words)


def warn_of_ranges(data: Dataset) -> None:
    """Warn if some columns of a table have far larger numbers than others: a network learns such data badly at any rate."""
    x = data.x_train
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        return
    ranges = x.amax(0) - x.amin(0)
    least = ranges.where(ranges > 0, math.inf)
    factor = float(ranges.max() / least.min())
    if RANGES < factor < math.inf:
        columns = f"columns {int(ranges.argmax())} and {int(least.argmin())}"
        words = f"the ranges of features differ by a factor of {factor:,.0f} ({columns}); --normalize standardises every feature"
        warnings.warn(words, FedaggWarning, stacklevel=2)


def check_task(config: Config, algorithm: Algorithm, task: Task) -> None:
    """Refuse a method that cannot learn this task, and scores per client that need labels where the task has none."""
    if task.name == CLASSIFICATION.name:
        return
    check_method(config, algorithm, task)
    asked = [f"--{name.replace('_', '-')}" for name in ("per_client", "personal") if getattr(config, name)]
    asked += [config.method] if type(algorithm).personalised is not Algorithm.personalised else []
    if asked and not config.client_test:
        words = f"{asked[0]} needs class labels, but {task.name} has none; give a share, such as 0.2"
        raise SettingError("client_test", config.client_test, words)


def check_method(config: Config, algorithm: Algorithm, task: Task) -> None:
    """Refuse a method that cannot learn this task."""
    if algorithm.labels and task.name != CLASSIFICATION.name:
        raise SettingError("algorithm", config.method, f"uses class labels, but the task is {task.name}; choose another method")


def try_out(
    config: Config, module: nn.Module, loss: Loss, task: Task, data: Dataset, parts: Sequence[Any], device: torch.device
) -> None:
    """Try the first mini-batch, so that a mismatch is a one-line error here and not an error deep inside a library."""

    def wrong(words: str, error: Exception | None = None) -> SettingError:
        return SettingError("model", config.model, words + (f": {first_line(error)}" if error else ""))

    if any(isinstance(p, UninitializedParameter | UninitializedBuffer) for p in (*module.parameters(), *module.buffers())):
        raise wrong("has layers without sizes; run a batch through it first")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise wrong("is scripted; give the module that it was made from")
    if not any(p.requires_grad for p in module.parameters()):
        raise wrong("has no trainable parameters")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise wrong(f"{name} is {str(parameter.dtype)[6:]}, but weights are trained in float32; give model.float()")
    x, y = data.x_train[:2].to(device, copy=True), data.y_train[:2].to(device, copy=True)
    probe = copy_module(module).to(device).train()
    with seeding.seeded_global(0, device):
        try:
            output = probe(x)
            if not x.is_floating_point():
                probe(extremes(data).to(device))
        except Exception as error:  # layers raise anything for input they cannot take
            words = f"does not take samples of shape {tuple(data.shape)} in {str(x.dtype)[6:]}{hint(module, data)}"
            raise wrong(words, error) from None
        if words := misfit(output, y, task, data):
            form = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise wrong(f"must return {words}, but returned {form} for {len(x)} samples")
        if loss is task.loss and data.task in ("classification", "tokens") and output.shape[-1] < data.classes:
            unused = not bool((data.y_train == 0).any() | (data.y_test == 0).any())
            advice = "; no label is 0: count from 0, with y - 1" if unused else ""
            each = "per sample" if data.task == "classification" else "per token"
            words = f"returns {output.shape[-1]} numbers {each}; labels from 0 to {data.classes - 1} need {data.classes}{advice}"
            raise wrong(words)
        check_loss(loss, output, y)
        check_metric(task, output.detach(), y)
        try:  # a batch of one: batch normalisation cannot compute its deviation, and `squeeze` drops the batch axis
            alone = probe(x[:1])
            taken = not misfit(alone, y[:1], task, data) and loss(alone, y[:1]).shape == (1,)
        except Exception:
            taken = False
        for client, part in enumerate(parts if not taken else ()):
            if len(part) == 1:
                words = f"gives client {client} one sample, but the model does not take a single sample; give the client more"
                raise SettingError("partition", config.partition, words)
            if len(part) % config.batch_size == 1 or config.batch_size == 1:
                words = f"leaves client {client} with a batch of one, which the model does not take; choose another size"
                raise SettingError("batch_size", config.batch_size, words)
        x, y = data.x_test[:2].to(device, copy=True), data.y_test[:2].to(device, copy=True)
        try:
            with torch.no_grad():
                output = probe.eval()(x)
                taken = not misfit(output, y, task, data) and loss(output, y).shape == (len(x),)
        except Exception as error:
            raise wrong("does not take test samples in evaluation mode", error) from None
        if not taken:
            raise wrong(f"must return a row of numbers per sample in evaluation mode too, even for {len(x)} samples")


def misfit(output: object, y: Tensor, task: Task, data: Dataset) -> str:
    """What the output should be, if it does not fit the targets; else an empty string."""
    shape = tuple(output.shape) if isinstance(output, Tensor) else None
    if task.name == "tokens":
        wanted = tuple(y.shape)
        return (
            "" if shape is not None and shape[:-1] == wanted else f"one number per class for every token, {(*wanted, data.classes)}"
        )
    if task.name == "classification":
        return (
            ""
            if shape is not None and len(shape) == 2 and shape[0] == len(y)
            else "a row of numbers per sample, one number per class"
        )
    fits = shape is not None and shape[:1] == (len(y),) and (shape == tuple(y.shape) or shape[1:] == (data.classes,))
    return "" if fits else f"{data.classes} numbers per sample, one for each target"


def extremes(data: Dataset) -> Tensor:
    """The samples with the smallest and the largest token: an embedding may have too few rows for them."""
    some = data.x_train if isinstance(data.x_train, Tensor) else data.x_train[:1000]  # leave the rest on disk
    sets_of = [(x, x.flatten(1)) for x in (some, data.x_test)]
    return torch.stack([x[at] for x, flat in sets_of for at in (flat.amin(1).argmin(), flat.amax(1).argmax())])


def hint(module: nn.Module, data: Dataset) -> str:
    """A guess why a model does not accept the samples."""
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters()):
        return " (samples are float32: give model.float())"
    if data.x_train.is_floating_point():
        return ""
    tokens = extremes(data)
    return f", tokens from {int(tokens.min())} to {int(tokens.max())} (features go in as x.astype('float32'))"


def check_loss(loss: Loss, output: Tensor, y: Tensor) -> None:
    if not callable(loss):
        raise SettingError("loss", loss, "give a function of output and target, with one number per sample")
    try:
        losses = loss(output, y)
        shape = tuple(losses.shape)
    except Exception as error:  # a user's function may raise anything
        words = f"does not take the model's output: {first_line(error)}"
        raise SettingError("loss", name_of(loss), words) from None
    if shape != (len(y),):
        words = f"must give one number per sample, but gave shape {shape} for {len(y)} (in torch: reduction='none')"
        raise SettingError("loss", name_of(loss), words)
    if not losses.requires_grad:
        raise SettingError("loss", name_of(loss), "has no gradient: neither the loss nor the model may detach its result")


def check_metric(task: Task, output: Tensor, y: Tensor) -> None:
    for metric in task.metrics:
        try:
            tally = metric.tally(output, y)
            good = tally.dim() == 2 and len(tally) == len(y) and isinstance(metric.score(tally.double().sum(0).cpu()), float)
        except SettingError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise SettingError("metric", metric.key, f"does not take the model's output: {first_line(error)}") from None
        if not good:
            raise SettingError(
                "metric", metric.key, "tally must give numbers for every sample, (B, k), and score a float of their sums"
            )


def name_of(loss: Loss) -> str:
    return getattr(loss, "__qualname__", type(loss).__qualname__)
