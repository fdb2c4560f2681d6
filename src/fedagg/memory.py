"""What clients remember from one round to the next: one vector for each client that has taken part."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fedagg.errors import FedaggError, SettingError
from fedagg.files import reason
from fedagg.work import Team

PART = 256 << 20  # bytes that a checkpoint handles at a time: all of it may not fit into memory
MUCH = 4 << 30  # bytes that all clients together may remember unless the user asks for more


def is_much(clients: int, d: int) -> bool:
    """Do vectors of d numbers for this many clients take much room?"""
    return 4 * clients * d > MUCH


class ClientMemory:
    """Vectors by client, zero until first written.

    New vectors are staged during a round, kept for the clients that the server finds valid, and committed with its record.
    So a client that was left out, and every client of an aborted round, keeps its earlier vector. With `disk`, the vectors live in
    an unnamed file that disappears with the process, and memory does not grow with the number of clients."""

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
        """Stage in all processes of a distributed run what one has staged: next time the client may be given to another process."""
        for client in clients:
            vector = self.staged.get(client, torch.zeros(self.d, device=self.device))
            self.staged[client] = team.sum(vector)

    def keep(self, valid: Iterable[int]) -> None:
        """Keep the staged vectors of these valid clients, and drop the others."""
        self.kept = {client: self.staged[client] for client in valid if client in self.staged}
        self.staged = {}

    def commit(self) -> None:
        for client, vector in self.kept.items():
            self.write(client, vector)
        self.kept = {}

    def write(self, client: int, vector: Tensor) -> None:
        self.rows[client] = vector.to(self.device, copy=True)

    @property
    def is_large(self) -> bool:
        """Does it take more room than a checkpoint should?"""
        return 4 * self.d * len(self.rows) > PART

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Everything, for a checkpoint: a few clients at a time."""
        ids, some = sorted(self.rows), max(1, PART // (4 * self.d))
        for at in range(0, len(ids), some):
            yield {"ids": torch.tensor(ids[at : at + some]), "rows": self.read(ids[at : at + some])}

    def restore(self, parts: Iterable[dict[str, Tensor]], clients: int) -> None:
        """Bring back what `parts` gave, for some of this many clients."""
        for part in parts:
            ids, rows = part.get("ids", torch.zeros(0)), part.get("rows", torch.zeros(0))
            if ids.ndim != 1 or rows.shape != (len(ids), self.d) or any(not 0 <= client < clients for client in ids.tolist()):
                raise FedaggError(f"checkpoint: what its clients remember is not {self.d} numbers for some of {clients} clients")
            for client, row in zip(ids.tolist(), rows, strict=True):
                self.write(int(client), row)


class Shelf:
    """A file of vectors, in the order in which clients first bring them. It is read and written, not mapped: mapped pages count as
    the process's memory, and those of a million clients would be too much."""

    def __init__(self, d: int) -> None:
        self.bytes, self.places = 4 * d, dict[int, int]()
        self.file = tempfile.TemporaryFile(prefix="fedagg-")  # noqa: SIM115  stays open as long as this object

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

    def __len__(self) -> int:
        return len(self.places)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
