"""Everything a run needs to continue as if it had never stopped.

A checkpoint has one safetensors file with the server's tensors, others with what clients remember, and a JSON file with the
rest, including the checksums of the other files. The JSON file is moved into place last, so the files it describes are
complete. The last two checkpoints are kept, and damaged ones are skipped."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedagg import files, formats
from fedagg.errors import FedaggError, FedaggWarning

KEEP = 2


@dataclass
class Checkpoint:
    round: int  # rounds done
    tensors: dict[str, Tensor]
    facts: dict[str, Any]  # record position, seconds, ...
    parts: Iterable[dict[str, Tensor]] = ()  # more tensors than fit into memory at once: made, written and read one after another


def save(folder: Path, checkpoint: Checkpoint) -> None:
    files.folder(folder)
    stem, sums = f"round-{checkpoint.round:06d}", []
    for part, tensors in enumerate(chain([checkpoint.tensors], checkpoint.parts)):
        packed = save_tensors({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
        files.write(folder / f"{stem}.{part}.safetensors", packed)
        sums.append(hashlib.sha256(packed).hexdigest())
    facts = {**checkpoint.facts, "format": formats.FORMAT, "round": checkpoint.round, "sha256": sums}
    facts["self"] = facts_checksum(facts)
    files.write(folder / f"{stem}.json", json.dumps(facts))
    remove_others(folder, keep=list_files(folder)[-KEEP:])


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint. Incomplete ones are named in a warning and removed."""
    damaged = False
    for path in reversed(list_files(folder)):
        try:
            found = load(path)
        except FedaggError:  # from a newer version: complete, so do not remove it
            raise
        except Exception as error:  # a damaged file can raise anything, and the checkpoint before it may be good
            why = " ".join(str(error).split()) or type(error).__name__
            text = f"checkpoint {path.name} is damaged ({why}); going back to the one before it"
            warnings.warn(text, FedaggWarning, stacklevel=2)
            damaged = True
            continue
        remove_others(folder, keep=[p for p in list_files(folder) if order(p) <= order(path)])
        return found
    if damaged:
        warnings.warn(f"no intact checkpoint is left in {folder}; the run starts from its first round", FedaggWarning, 2)
    return None


def load(path: Path) -> Checkpoint:
    facts = json.loads(path.read_text(encoding="utf-8"))
    if type(facts.get("format")) is int:  # checked before the checksum, which newer versions may compute differently
        formats.check(facts["format"], path)
    parts = [path.with_suffix(f".{part}.safetensors") for part in range(len(facts["sha256"]))]
    if facts.pop("self") != facts_checksum(facts) or [checksum(part) for part in parts] != facts["sha256"]:
        raise ValueError("its checksum does not match")
    counts = [facts[name] for name in ("round", "format", "metrics.jsonl", "clients.jsonl") if name in facts or name == "round"]
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError("its numbers are not valid")
    if not isinstance(facts.get("identity", {}), dict) or not isinstance(facts.get("seconds", 0.0), int | float):
        raise ValueError("its facts are not valid")
    numbers = facts.get("numbers", {})
    if not isinstance(numbers, dict) or not all(isinstance(value, int | float) for value in numbers.values()):
        raise ValueError("its state is not valid")
    tensors = (load_tensors(part.read_bytes()) for part in parts)
    return Checkpoint(facts["round"], next(tensors), facts, tensors)


def identity(folder: Path) -> dict[str, str]:
    """What the run was given, from the newest readable checkpoint. Nothing is checked or removed: the run may still be going."""
    for path in reversed(list_files(folder)):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return dict(json.loads(path.read_text(encoding="utf-8"))["identity"])
    return {}


def checksum(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def list_files(folder: Path) -> list[Path]:
    """The JSON files, oldest round first."""
    return sorted(folder.glob("round-*.json"), key=order)


def order(path: Path) -> tuple[int, str]:
    """Sort key: the round as a number, whatever its number of digits."""
    return len(path.name), path.name


def remove_others(folder: Path, keep: list[Path]) -> None:
    """Remove all other checkpoints, JSON first, and tensors that a killed process left without their JSON."""
    stay = {path.stem for path in keep}
    for suffix in (".json", ".safetensors"):
        for path in folder.glob(f"round-*{suffix}"):
            if path.name.split(".")[0] not in stay:
                with suppress(OSError):
                    path.unlink()


def facts_checksum(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def check_form(now: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Check that the checkpoint has every tensor of a fresh run, with the same shape and type."""
    for name, tensor in now.items():
        held = before.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            found = "missing" if held is None else f"{held.dtype} {tuple(held.shape)}"
            raise FedaggError(
                f"checkpoint: {name} is {found}, this run needs {tensor.dtype} {tuple(tensor.shape)}; "
                "resume with the data and the model the run began with"
            )
