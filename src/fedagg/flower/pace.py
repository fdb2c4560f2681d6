"""How many epochs each node has time for, judged by the time of its last answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.app import Message, MessageType

from fedagg.faults import Faults

ROOM = 0.8  # share of `timeout` that an answer should take: the next one may take longer


@dataclass(frozen=True)
class Slow(Faults):
    """Clients that have time for only some of their epochs."""

    allotted: dict[int, int] = field(default_factory=dict)

    def epochs(self, t: int, client: int, epochs: int) -> int:
        return self.allotted.get(client, epochs)


@dataclass
class Pace:
    """Seconds that nodes need per epoch, including everything before and after it.

    If rounds close at a share of the answers, a node has as much time as a round would take to close if all nodes did all epochs.
    This does not depend on which nodes currently do fewer epochs, so rounds do not get shorter and shorter.
    """

    full: int  # epochs of a node that has enough time
    timeout: float
    share: float  # share of answers that ends a round
    client: Callable[[int], int | None]  # the client of a node
    each: dict[int, float] = field(default_factory=dict)  # client -> seconds per epoch
    pending: dict[str, tuple[int, int, float]] = field(default_factory=dict)  # question -> client, its epochs, when it was asked

    def note_question(self, question: str, message: Message) -> None:
        client = self.client(message.metadata.dst_node_id)
        if client is not None and message.metadata.message_type == MessageType.TRAIN:
            self.pending[question] = (client, int(str(message.content.config_records["config"]["epochs"])), time.monotonic())

    def note_answer(self, question: str, failed: bool) -> None:
        """Note an answer, in time or too late to be used. The time of a failed one says nothing, unless it failed because the time
        for an answer was over, which Flower also reports as an error."""
        if question not in self.pending:
            return
        client, epochs, since = self.pending.pop(question)
        took = time.monotonic() - since
        if not failed:
            self.each[client] = (self.each.get(client, took / epochs) + took / epochs) / 2
        elif took >= ROOM * self.timeout:
            self.note_late(client, epochs)

    def note_late(self, client: int, epochs: int) -> None:
        """Assume that a node which did not answer in time needs twice as long."""
        self.each[client] = max(2 * self.timeout / epochs, self.each.get(client, 0.0))

    def drop_overdue(self) -> None:
        """Give up on nodes whose time is over."""
        for question, (client, epochs, since) in list(self.pending.items()):
            if time.monotonic() - since >= self.timeout:
                del self.pending[question]
                self.note_late(client, epochs)

    def allot(self, clients: Iterable[int]) -> dict[int, int]:
        """The epochs for each of these clients whose speed is known."""
        self.drop_overdue()
        now, known = time.monotonic(), dict(self.each)
        for client, epochs, since in self.pending.values():  # these are still working
            known[client] = max(known.get(client, 0.0), (now - since) / epochs)
        here = {client: known[client] for client in clients if client in known}
        limit = ROOM * self.timeout
        if here and self.share < 1:
            last = math.ceil(self.share * len(here) - 1e-9) - 1
            limit = min(limit, self.full * sorted(here.values())[last])
        return {client: max(1, min(self.full, int(limit / max(each, 1e-9) + 1e-9))) for client, each in here.items()}
