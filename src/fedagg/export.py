"""Write a trained network to a file that runs without fedagg: ONNX, TorchScript, or its weights alone. The file is then run, and
its outputs must match the network's."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import fedagg
from fedagg import files, seeding
from fedagg.errors import FedaggError, SettingError, first_line, need, unknown
from fedagg.flat import copy_module
from fedagg.inputs import Inputs

ENDINGS = {"onnx": "onnx", "torchscript": "pt", "safetensors": "safetensors"}
SAMPLES = 8  # number of samples to try the file on
CLOSE = 1e-4  # as a share of the largest output: how far the file's outputs may be from the network's

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """A file that was written, and the result of its check.

    Attributes:
        path: the file.
        samples: random samples that it was tried on; 0 for weights alone, which are compared directly.
        difference: the largest difference between its outputs and the network's.
    """

    path: Path
    samples: int
    difference: float


def export(network: nn.Module, inputs: Inputs | None, to: str, path: Path | None, folder: Path, facts: dict[str, Any]) -> Exported:
    """Carry out `Result.export`: without a path, into the folder; `facts` are stored with weights that are written alone."""
    if to not in ENDINGS:
        raise unknown("to", to, ENDINGS)
    if to == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            need("export to ONNX", package, "export")
    path = path or folder / f"export.{ENDINGS[to]}"
    if path.is_dir():
        raise SettingError("out", str(path), f"is a folder; name a file in it, e.g. {path / f'model.{ENDINGS[to]}'}")
    if to == "safetensors":
        written, samples, difference = weights(network, inputs, facts), 0, 0.0
    else:
        x, whole = example(inputs), copy_module(network).cpu()
        whole = (inputs.in_front(whole) if inputs is not None else whole).eval()
        with torch.no_grad(), one_line(to), quiet():
            expected = whole(x)
            written, run = (onnx if to == "onnx" else torchscript)(whole, x[:2])
            difference = float((run(x) - expected).abs().max())
        if not difference <= CLOSE * max(1.0, float(expected.abs().max())):  # true for NaN too
            raise FedaggError(f"export to {to}: the file returns other numbers than the network, by up to {difference:.3g}")
        samples = len(x)
    files.folder(path.parent)
    files.write(path, written)
    return Exported(path, samples, difference)


def example(inputs: Inputs | None) -> Tensor:
    """Random samples in the form of the run's data; tokens are 0 and 1, which every vocabulary has."""
    if inputs is None:
        raise SettingError("shape", None, "the run folder does not say what a sample's shape is; give it, e.g. 1,28,28")
    generator, form = seeding.torch_generator(0, "export"), (SAMPLES, *inputs.shape)
    return torch.randint(2, form, generator=generator) if inputs.tokens else torch.rand(form, generator=generator)


def weights(network: nn.Module, inputs: Inputs | None, facts: dict[str, Any]) -> bytes:
    """The module's state under its own names, with facts about the run beside it."""
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in network.state_dict().items()}
    facts = {"fedagg": fedagg.__version__, **facts}
    if inputs is not None:
        scale = {name: value.flatten().tolist() for name, value in inputs.scale().items()}
        facts |= inputs.facts() | scale
    written = save_tensors(tensors, {"format": "pt", "fedagg": json.dumps(facts)})
    if not all(torch.equal(tensor, tensors[name]) for name, tensor in load_tensors(written).items()):
        raise FedaggError("export to safetensors: what was written is not what the model holds")
    return written


def torchscript(network: nn.Module, x: Tensor) -> tuple[bytes, Run]:
    """The network as TorchScript, by tracing: what it does with a sample must not depend on the sample's values."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(network, x, check_trace=False), buffer)  # the file is checked instead
    written = buffer.getvalue()
    return written, torch.jit.load(io.BytesIO(written))


def onnx(network: nn.Module, x: Tensor) -> tuple[bytes, Run]:
    """The network as ONNX, for batches of any size. One file, weights included."""
    import onnxruntime

    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        network, (x,), dynamo=True, verbose=False, dynamic_shapes=({0: batch},), input_names=["x"], output_names=["output"]
    )
    assert program is not None
    written: bytes = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    return written, lambda given: torch.from_numpy(session.run(None, {"x": given.numpy()})[0])


@contextmanager
def one_line(to: str) -> Iterator[None]:
    """Turn the long errors that libraries raise for unsupported operations into one line."""
    try:
        yield
    except FedaggError:
        raise
    except Exception as error:
        raise FedaggError(f"export to {to}: {first_line(error)}; the network does something that the format cannot hold") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's deprecation of TorchScript, and its remarks about packages that are not needed here."""

    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
