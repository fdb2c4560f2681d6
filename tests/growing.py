"""A run folder that grows by hand, for tests of what follows runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedagg.config import Config

CLIENTS = (3, 7)


class Growing:
    """Two clients with two epochs; accuracy 50 % after the first round, and a tenth more after each other one."""

    def __init__(self, folder: Path, rounds: int, **settings: Any) -> None:
        self.folder, self.done = folder, 0
        folder.mkdir(parents=True)
        config = Config(rounds=rounds, epochs=2, clients=10, participation=0.2, **settings)
        (folder / "environment.json").write_text('{"device": "cpu"}')
        (folder / "config.toml").write_text(config.toml())

    def grow(self, seconds: float = 1.0, left_out: dict[str, str] | None = None) -> None:
        self.done += 1
        t, part = self.done, [client for client in CLIENTS if str(client) not in (left_out or {})]
        rates = [[0.1 * t, 0.1 * t + 0.01 * client] for client in part]
        row = {
            "round": t,
            "accuracy": 0.4 + 0.1 * t,
            "loss": 2.0 / t,
            "train_loss": 1.9 / t,
            "rate_mean": [0.1 * t] * 2,
            "drift": 1.0,
        }
        row |= {"samples": 240, "bytes_up": 800, "bytes_down": 800, "seconds": seconds, "pace": 0.1 * t, "own_share": 1.0 / t}
        about = {"round": t, "left_out": left_out or {}, "clients": part, "rates": rates, "moved": [1.0] * len(part)}
        for name, line in (("metrics.jsonl", row), ("clients.jsonl", about)):
            with open(self.folder / name, "a") as file:
                file.write(json.dumps(line) + "\n")

    def finish(self, **more: Any) -> None:
        (self.folder / "result.json").write_text(json.dumps({"rounds": self.done, "accuracy": 0.4 + 0.1 * self.done, **more}))
