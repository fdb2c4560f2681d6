"""What clients remember from one round to the next: a vector each, for those that have taken part."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fedagg.engines.distributed import Team
from fedagg.errors import SettingError
from fedagg.files import reason


class ClientMemory:
    """Vectors by client, zero until first written.

    New vectors are staged while a round runs, kept for the clients that the server finds valid, and committed when
    the round is booked: a client that was left out, and every client of a round that was broken off, keeps what it
    remembered before. With `disk`, the vectors live in a file without a name, which goes with the process, and memory does not grow
    with the clients that have taken part."""

    def __init__(self, d: int, disk: bool = False, device: torch.device | str = "cpu") -> None:
        self.d, self.device = d, "cpu" if disk else device
        self.rows: dict[int, Tensor] | Shelf = Shelf(d) if disk else {}
        self.staged: dict[int, Tensor] = {}
        self.kept: dict[int, Tensor] = {}

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
        self.rows[client] = vector.to(self.device, copy=True)


class Shelf:
    """A file of vectors, one after another as clients first bring them. Read and written rather than mapped: mapped pages count as
    the process's own, and those of a million clients are more than it may take."""

    def __init__(self, d: int) -> None:
        self.bytes, self.places = 4 * d, dict[int, int]()
        self.file = tempfile.TemporaryFile(prefix="fedagg-")  # noqa: SIM115  open as long as this is used

    def get(self, client: int, default: Tensor) -> Tensor:
        if client not in self.places:
            return default
        self.file.seek(self.places[client] * self.bytes)
        return torch.frombuffer(bytearray(self.file.read(self.bytes)), dtype=torch.float32)

    def __setitem__(self, client: int, vector: Tensor) -> None:
        place = self.places.get(client, len(self.places))
        try:
            self.file.seek(place * self.bytes)
            self.file.write(vector.contiguous().numpy().data)
            self.file.flush()
        except OSError as error:
            why = f"no room for what clients remember ({reason(error)}); free some space in {tempfile.gettempdir()}"
            raise SettingError("client_memory", "disk", why) from None
        self.places[client] = place

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
