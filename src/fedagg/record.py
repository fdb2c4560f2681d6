"""The run folder: what was asked for, what happened in each round, the outcome, and the environment."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from fedagg import checkpoint, files
from fedagg.algorithms import Algorithm
from fedagg.checkpoint import Checkpoint
from fedagg.clients import Clients
from fedagg.config import Config, make, read
from fedagg.errors import FedaggError, FedaggWarning, SettingError
from fedagg.formats import FORMAT, check_run

MAY_CHANGE = {
    *("rounds", "device", "engine", "threads", "chunk", "checkpoint_every", "data_dir", "client_memory", "eval_every", "plugin"),
    *("stop_at", "patience"),
}
SCALE = "inputs.safetensors"
# What the last digits of a run depend on besides its settings: if these are equal, the same run gives the same bytes.
DIGITS = ("fedagg", "torch", "processor", "device", "engine", "threads")


class Record:
    """Writes the run folder, or only keeps the history in memory if there is no folder. Use it in a `with` block, which releases
    the folder."""

    def __init__(self, folder: Path | None, config: Config, environment: dict[str, Any]) -> None:
        self.folder, self.config = folder, config
        self.history: list[dict[str, Any]] = []
        self.left_out: dict[str, Counter[str]] = {}  # by cause: the number of rounds each client was left out of
        self.resumed: Checkpoint | None = None
        self.claim: files.Claim | None = None
        self.new = folder is not None
        if folder is None:
            return
        files.folder(folder)
        if (folder / "config.toml").exists():
            raise SettingError("out", str(folder), "already contains a run; choose another folder, or --resume it")
        self.claim = files.Claim(folder, "out")
        with self.closed_on_failure():
            files.remove_temporary(folder)  # of a run that was killed before it had begun
            # config.toml comes last: a folder that has one is a run that can be resumed.
            files.write(folder / "environment.json", json.dumps({"format": FORMAT, **environment}, indent=2))
            files.write(folder / "config.toml", config.toml())

    @classmethod
    def resume(cls, folder: Path, config: Config, identity: dict[str, str], environment: dict[str, Any]) -> Record:
        """Reopen an unfinished run: cut its files back to the newest complete checkpoint."""
        if not (folder / "config.toml").is_file():
            raise SettingError("resume", str(folder), "is not a run folder: it has no config.toml")
        check_run(folder)
        before, now = make(read(folder / "config.toml"), recorded=True).flat(), config.flat()
        free = MAY_CHANGE - ({"rounds"} if config.lr_schedule != "constant" else set())  # a schedule depends on the last round
        differs = sorted(k for k in before | now if before.get(k) != now.get(k) and k not in free)
        if differs:
            changes = ", ".join(f"{k} was {before.get(k)!r}, now {now.get(k)!r}" for k in differs)
            more = " (rounds may grow)" if "rounds" in free else f" (lr_schedule {config.lr_schedule} needs the same rounds)"
            raise FedaggError(f"resume = {str(folder)!r}: {changes}; resume with the same settings{more}")
        files.folder(folder, "resume")
        record = cls(None, config, {})
        record.folder, record.claim = folder, files.Claim(folder, "resume")
        with record.closed_on_failure():
            record.go_back(folder, identity)
            record.note_changes(folder, environment)
        return record

    def go_back(self, folder: Path, identity: dict[str, str]) -> None:
        """Go back to the newest complete checkpoint: later records are cut off, and will be written again."""
        files.remove_temporary(folder)
        files.remove_temporary(folder / "checkpoints")
        self.resumed = checkpoint.latest(folder / "checkpoints")
        done = self.resumed.round if self.resumed else 0
        if self.resumed is None and not checkpoint.list_files(folder / "checkpoints") and (folder / "metrics.jsonl").exists():
            if (folder / "result.json").exists():  # the run has ended
                words = "its checkpoints are gone; start a new run, with --checkpoint-every to keep them"
                raise SettingError("resume", str(folder), words)
            words = f"{folder}: stopped before its first checkpoint, or has lost them; the run starts from its first round"
            warnings.warn(words, FedaggWarning, stacklevel=2)
        if self.config.rounds < done:
            raise SettingError("rounds", self.config.rounds, f"the run has done {done} already; give at least that many")
        facts = self.resumed.facts if self.resumed else {}
        for name, value in facts.get("identity", {}).items():
            if identity.get(name) != value:
                raise SettingError("resume", str(folder), f"{name} is not what the run began with; give the same again")
        for name in ("metrics.jsonl", "clients.jsonl"):
            path, keep = folder / name, facts.get(name, 0)
            if path.exists() and path.stat().st_size >= keep:
                rows, keep = cut(path, keep, done)
                if name == "metrics.jsonl":
                    self.history = rows
                else:
                    for row in rows:
                        self.count(row)
                os.truncate(path, keep)
            elif keep:
                raise FedaggError(f"{path}: shorter than its checkpoint says; start the run again in a new folder")
        files.write(folder / "config.toml", self.config.toml())

    def note_changes(self, folder: Path, now: dict[str, Any]) -> None:
        """Warn if the run continues in another environment than it began in, and record that."""
        path = folder / "environment.json"
        try:
            begun = json.loads(path.read_text(encoding="utf-8"))
            changed = {name: now[name] for name in DIGITS if name in begun and begun[name] != now[name]}
        except (OSError, ValueError, TypeError):  # an old folder, or a file edited by hand: training does not need it
            return
        if changed:
            changes = ", ".join(f"{name} was {begun[name]!r}, now {value!r}" for name, value in changed.items())
            words = f"{changes}: the last digits may differ from those of a run that was not stopped"
            warnings.warn(words, FedaggWarning, stacklevel=2)
            since = {"round": self.resumed.round if self.resumed else 0, **changed}
            files.write(path, json.dumps({**begun, "resumed": [*begun.get("resumed", []), since]}, indent=2))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def withdraw(self) -> None:
        """Remove what was written to a new folder if the run could not begin, so that a second try does not find a run there."""
        if self.new and self.folder is not None:
            with suppress(OSError):  # a tracker may have left its own files: then the folder stays
                (self.folder / "config.toml").unlink()
                (self.folder / "environment.json").unlink()
                self.folder.rmdir()

    def close(self) -> None:
        if self.claim is not None:
            self.claim.release()

    def round(self, row: dict[str, Any], clients: dict[str, Any]) -> None:
        self.history.append(row)
        self.count(clients)
        if self.folder is not None:
            files.append(self.folder / "metrics.jsonl", line(row))
            files.append(self.folder / "clients.jsonl", json.dumps(clients))

    def amend(self, facts: dict[str, Any]) -> None:
        """Add facts to the last round's line that became known after it. The line only grows at its end, so a checkpoint saved
        before still finds it."""
        self.history[-1] |= facts
        if self.folder is not None:
            path = self.folder / "metrics.jsonl"
            before = b"".join(path.read_bytes().splitlines(keepends=True)[:-1])
            files.write(path, before + line(self.history[-1]).encode() + b"\n")

    def count(self, clients: dict[str, Any]) -> None:
        for client, cause in clients["left_out"].items():
            self.left_out.setdefault(cause, Counter())[client] += 1

    def left_out_clients(self) -> dict[str, dict[str, int]]:
        """By cause, the clients that answered and were left out, those with the most rounds first."""
        return {why: dict(who.most_common()) for why, who in self.left_out.items() if why != "dropped out"}

    def checkpoint(self, now: Checkpoint) -> None:
        """Save a checkpoint. The record is flushed to disk first, so a power cut cannot lose lines that the checkpoint counts."""
        if self.folder is None:
            return
        for name in ("metrics.jsonl", "clients.jsonl"):
            path = self.folder / name
            files.flush(path)
            now.facts[name] = path.stat().st_size
        checkpoint.save(self.folder / "checkpoints", now)

    def remove_checkpoints(self) -> None:
        if self.folder is not None:
            checkpoint.remove_others(self.folder / "checkpoints", keep=[])

    def model(self, module: nn.Module, scale: dict[str, Tensor] | None = None) -> None:
        """Save the weights, and the standardisation of the samples, if there was one."""
        if self.folder is not None:
            if scale:
                files.write(self.folder / SCALE, save_tensors(scale))
            tensors = {k: v.detach().cpu().contiguous().clone() for k, v in module.state_dict().items()}
            files.write(self.folder / "model.safetensors", save_tensors(tensors))

    def result(self, facts: dict[str, Any]) -> None:
        if self.folder is not None:
            files.write(self.folder / "result.json", json.dumps(facts, indent=2))


def describe(t: int, clients: Clients, algorithm: Algorithm, unchanged: bool) -> dict[str, Any]:
    """A line of metrics.jsonl. A round that left the model unchanged has no figures from the algorithm."""
    row: dict[str, Any] = {"round": t + 1}
    out = clients.outcome
    if out is not None:
        row["train_loss"] = float(out.theta @ out.loss)
        did = [clients.stragglers.get(client, clients.epochs) for client in out.clients]
        for epoch, rates in enumerate(out.rates.T.tolist()):
            made = [rate for rate, epochs in zip(rates, did, strict=True) if epoch < epochs] or [0.0]
            for name, value in (("mean", sum(made) / len(made)), ("min", min(made)), ("max", max(made))):
                row.setdefault(f"rate_{name}", []).append(value)
        row["drift"], row["drift_max"] = float(out.norm2.sqrt().mean()), float(out.norm2.sqrt().max())
    row |= {
        "passes": clients.passes,
        "participants": len(clients.ids),
        "left_out": len(clients.left_out),
        "causes": sorted(set(clients.left_out.values())),
        "stragglers": len(clients.stragglers),
        "samples": clients.samples_seen,
        "bytes_up": clients.bytes_up,
        "bytes_down": clients.bytes_down,
    }
    if unchanged:
        return row | {"unchanged": True}
    figures = {name: float(value) for name, value in algorithm.figures().items()}
    if taken := sorted(figures.keys() & row.keys()):
        raise FedaggError(f"algorithm {algorithm.name}: figures() names {', '.join(taken)}, which every record has; rename it")
    return row | {name: value for name, value in figures.items() if math.isfinite(value)}


def describe_clients(t: int, clients: Clients) -> dict[str, Any]:
    """A line of clients.jsonl: what each participant did."""
    row: dict[str, Any] = {"round": t + 1, "left_out": {str(k): v for k, v in sorted(clients.left_out.items())}}
    if clients.stragglers:
        row["epochs"] = {str(k): v for k, v in sorted(clients.stragglers.items())}
    if hostile := [client for client in clients.ids if clients.faults.hostile(client)]:
        row["hostile"] = hostile
    out = clients.outcome
    if out is not None:
        row |= {
            "clients": out.clients,
            "rates": [[float(f"{r:.6g}") for r in rates] for rates in out.rates.tolist()],
            "loss": [float(f"{v:.6g}") for v in out.loss.tolist()],
            "moved": [float(f"{v:.6g}") for v in out.norm2.sqrt().tolist()],
        }
    return row


def line(row: dict[str, Any]) -> str:
    """A line of metrics.jsonl. A loss may be infinite, which JSON cannot express: null stands for it."""
    finite = {name: value if not isinstance(value, float) or math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(finite, allow_nan=False)


def cut(path: Path, size: int, done: int) -> tuple[list[dict[str, Any]], int]:
    """The rows in a record's first `size` bytes, which must cover its `done` rounds, and how many bytes these take now: the last
    line may have grown since."""
    try:
        with open(path, "rb") as handle:
            held = handle.read(size)
            held += b"" if held.endswith(b"\n") or not held else handle.readline()
        lines = [json.loads(line) for line in held.splitlines()]
        rows = [{name: math.nan if value is None else value for name, value in line.items()} for line in lines]
        if [row["round"] for row in rows] != list(range(1, done + 1)):
            raise ValueError(f"its rounds are not 1 to {done}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise FedaggError(f"{path}: damaged ({why}); start the run again in a new folder") from None
    return rows, len(held)


def environment(device: torch.device, engine: str, version: str) -> dict[str, Any]:
    """Versions, machine and commit, so that a number can be traced."""
    import numpy as np

    return {
        "fedagg": version,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "engine": engine,
        "commit": own_commit(),
    }


@functools.cache
def own_commit() -> str | None:
    """The commit of this package when the process first asked: the running code was read by then."""
    return commit(Path(__file__).parent)


def commit(folder: Path) -> str | None:
    """The commit of the checkout that contains a folder of code, if any, and whether the code there has been changed since."""

    def git(*words: str) -> str:
        line = ["git", "-C", str(folder), *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
