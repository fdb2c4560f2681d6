"""Clients that drop out, fall behind or send nonsense. All faults are seeded, so that a faulty run can be repeated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedagg import seeding
from fedagg.work import Chunk

KINDS = ("nan", "infinity", "huge", "shape")


@dataclass(frozen=True)
class Faults:
    seed: int = 0
    dropout: float = 0.0  # share of participants that never answer
    straggler: float = 0.0  # share that stop after some of their epochs
    corrupt_rate: float = 0.0  # share that send nonsense, of one of the KINDS
    flip: float = 0.0  # share of clients that are hostile: always the same ones, they send their update reversed
    scale: float = 1.0  # and multiplied by this factor

    def happens(self, rate: float, *where: object) -> bool:
        return rate > 0 and bool(seeding.numpy_generator(self.seed, "fault", *where).random() < rate)

    def drops(self, t: int, client: int) -> bool:
        return self.happens(self.dropout, "dropout", t, client)

    def epochs(self, t: int, client: int, epochs: int) -> int:
        """How many of its epochs a client completes: at least one."""
        if epochs < 2 or not self.happens(self.straggler, "straggler", t, client):
            return epochs
        return int(seeding.numpy_generator(self.seed, "fault", "epochs", t, client).integers(1, epochs))

    def hostile(self, client: int) -> bool:
        return self.happens(self.flip, "flip", client)

    def kind(self, t: int, client: int) -> str | None:
        """What is wrong with a client's answer."""
        if not self.happens(self.corrupt_rate, "corrupt", t, client):
            return None
        return KINDS[int(seeding.numpy_generator(self.seed, "fault", "kind", t, client).integers(len(KINDS)))]

    def corrupt(self, t: int, chunk: Chunk) -> None:
        """Alter what these clients send, in place."""
        for row, job in enumerate(chunk.jobs):
            if self.hostile(job.client):
                chunk.delta[row] *= -self.scale
            kind, size = self.kind(t, job.client), chunk.delta.shape[1]
            where = torch.arange(0, size, max(1, size // 7), device=chunk.delta.device)
            if kind == "nan":
                chunk.delta[row, where] = float("nan")
            elif kind == "infinity":
                chunk.delta[row, where] = float("inf")
            elif kind == "huge":
                chunk.delta[row] *= 1e6
            elif kind == "shape":
                # The second half of the update never arrives: what the server has is shorter than the model.
                chunk.received[row] = size // 2
                chunk.delta[row, size // 2 :] = 0.0
