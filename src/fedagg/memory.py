"""What clients remember from one round to the next: a vector each, for those that have taken part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class ClientMemory:
    """Vectors by client, zero until first written.

    New vectors are staged while a round runs and committed when the server has judged the round: a client that was left
    out keeps what it remembered before. With `path`, the rows live in a sparse file and only the operating system's cache is
    memory.
    """

    def __init__(self, clients: int, d: int, path: str | None = None) -> None:
        self.d, self.path = d, path
        self.rows: dict[int, Tensor] = {}
        self.staged: dict[int, Tensor] = {}
        self.file = torch.from_file(path, shared=True, size=clients * d).view(clients, d) if path else None

    def read(self, clients: Sequence[int]) -> Tensor:
        zero = torch.zeros(self.d)
        return torch.stack([self.rows.get(client, zero) for client in clients])

    def stage(self, clients: Sequence[int], vectors: Tensor) -> None:
        self.staged.update(zip(clients, vectors.cpu().unbind(), strict=True))

    def commit(self, valid: Iterable[int]) -> None:
        for client in valid:
            if client in self.staged:
                self.write(client, self.staged[client])
        self.staged.clear()

    def write(self, client: int, vector: Tensor) -> None:
        if self.file is None:
            self.rows[client] = vector.clone()
        else:
            self.file[client] = vector
            self.rows[client] = self.file[client]
