"""The run folder: what was asked for, what happened round by round, what came out, and on what it ran."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import nn

from fedagg import checkpoint, files
from fedagg.checkpoint import Checkpoint
from fedagg.config import Config, read
from fedagg.errors import FedaggError, SettingError

MAY_CHANGE = {"rounds", "device", "engine", "threads", "chunk", "checkpoint_every", "data_dir"}


class Record:
    """Keeps the run folder, or only the history in memory when there is no folder."""

    def __init__(self, folder: Path | None, config: Config, environment: dict[str, Any]) -> None:
        self.folder, self.config = folder, config
        self.history: list[dict[str, Any]] = []
        self.resumed: Checkpoint | None = None
        if folder is None:
            return
        files.folder(folder)
        if (folder / "config.toml").exists():
            raise SettingError("out", str(folder), "holds a run already; choose another folder, or --resume it")
        files.write(folder / "config.toml", config.toml())
        files.write(folder / "environment.json", json.dumps(environment, indent=2))

    @classmethod
    def resume(cls, folder: Path, config: Config, environment: dict[str, Any]) -> Record:
        """Open an unfinished run again: cut its files back to the newest whole checkpoint."""
        before = read(folder / "config.toml")
        now = {k: v for k, v in config.model_dump().items() if v is not None}
        differs = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k) and k not in MAY_CHANGE)
        if differs:
            changes = ", ".join(f"{k} was {before.get(k)!r}, now {now.get(k)!r}" for k in differs)
            raise FedaggError(f"resume = {str(folder)!r}: {changes}; resume with the same settings (rounds may grow)")
        record = cls(None, config, environment)
        record.folder = folder
        record.resumed = checkpoint.latest(folder / "checkpoints")
        for name in ("metrics.jsonl", "clients.jsonl"):
            path, keep = folder / name, int(record.resumed.facts[name]) if record.resumed else 0
            if path.exists() and path.stat().st_size >= keep:
                os.truncate(path, keep)
            elif keep:
                raise FedaggError(f"{path}: shorter than its checkpoint says; start the run again in a new folder")
        if record.resumed and (folder / "metrics.jsonl").exists():
            lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            record.history = [json.loads(line) for line in lines]
        files.write(folder / "config.toml", config.toml())
        return record

    def round(self, row: dict[str, Any], clients: dict[str, Any]) -> None:
        self.history.append(row)
        if self.folder is not None:
            self.append("metrics.jsonl", row)
            self.append("clients.jsonl", clients)

    def append(self, name: str, row: dict[str, Any]) -> None:
        assert self.folder is not None
        try:
            with open(self.folder / name, "a", encoding="utf-8") as handle:
                handle.write(json.dumps(row) + "\n")
        except OSError as error:
            raise FedaggError(
                f"{self.folder / name}: cannot be written ({error.strerror or error}); make room, then go on with --resume {self.folder}"
            ) from None

    def checkpoint(self, now: Checkpoint) -> None:
        if self.folder is None:
            return
        for name in ("metrics.jsonl", "clients.jsonl"):
            path = self.folder / name
            now.facts[name] = path.stat().st_size if path.exists() else 0
        checkpoint.save(self.folder / "checkpoints", now)

    def model(self, module: nn.Module) -> None:
        if self.folder is not None:
            tensors = {k: v.detach().cpu().contiguous().clone() for k, v in module.state_dict().items()}
            files.write(self.folder / "model.safetensors", save_tensors(tensors))

    def result(self, facts: dict[str, Any]) -> None:
        if self.folder is not None:
            files.write(self.folder / "result.json", json.dumps(facts, indent=2))


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
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of the checkout fedagg runs from, if it is one."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
