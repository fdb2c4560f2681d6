"""What clients remember from one round to the next: a vector each, for those that have taken part."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedagg.engines.distributed import Team
from fedagg.errors import SettingError
from fedagg.files import reason


class ClientMemory:
    """Vectors by client, zero until first written.

    New vectors are staged while a round runs, kept for the clients that the server finds valid, and committed when
    the round is booked: a client that was left out, and every client of a round that was broken off, keeps what it
    remembered before. With `disk`, the rows live in a sparse file without a name, which goes with the process; only
    the operating system's cache is memory."""

    def __init__(self, clients: int, d: int, disk: bool = False, device: torch.device | str = "cpu") -> None:
        self.d, self.device = d, "cpu" if disk else device
        self.rows: dict[int, Tensor] = {}
        self.staged: dict[int, Tensor] = {}
        self.kept: dict[int, Tensor] = {}
        self.room = Room(clients, d) if disk else None

    def read(self, clients: Sequence[int]) -> Tensor:
        zero = torch.zeros(self.d, device=self.device)
        return torch.stack([self.rows.get(client, zero) for client in clients])

    def stage(self, clients: Sequence[int], vectors: Tensor) -> None:
        self.staged.update(zip(clients, vectors.to(self.device).unbind(), strict=True))

    def share(self, clients: Sequence[int], team: Team) -> None:
        """In a distributed run, what one process staged is staged by all: next time the client may be dealt to another."""
        for client in clients:
            vector = self.staged.get(client, torch.zeros(self.d, device=self.device))
            self.staged[client] = team.sum(vector)

    def keep(self, valid: Iterable[int]) -> None:
        """The server has judged: of what is staged, this stays."""
        self.kept = {client: self.staged[client] for client in valid if client in self.staged}
        self.staged = {}

    def commit(self) -> None:
        for client, vector in self.kept.items():
            self.write(client, vector)
        self.kept = {}

    def write(self, client: int, vector: Tensor) -> None:
        if self.room is None:
            self.rows[client] = vector.to(self.device, copy=True)
            return
        if client not in self.rows:
            self.rows[client] = self.room.row(client)
        self.rows[client].copy_(vector)


class Room:
    """A sparse file of (clients, d) numbers. A row's bytes are asked for before it is touched: a full disk is then an
    error, and not the end of the process."""

    def __init__(self, clients: int, d: int) -> None:
        self.bytes = 4 * d
        with tempfile.TemporaryDirectory(prefix="fedagg-", ignore_cleanup_errors=True) as folder:
            path = os.path.join(folder, "memory")
            self.table = torch.from_file(path, shared=True, size=clients * d).view(clients, d)
            self.handle = os.open(path, os.O_RDWR)

    def row(self, client: int) -> Tensor:
        if sys.platform != "win32":
            try:
                os.posix_fallocate(self.handle, client * self.bytes, self.bytes)
            except OSError as error:
                why = f"no room for what clients remember ({reason(error)}); free some space in {tempfile.gettempdir()}"
                raise SettingError("client_memory", "disk", why) from None
        return self.table[client]

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)
