"""Who is there: which node holds which partition of the data, and how much of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from logging import INFO, WARNING, getLogger

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedagg.flat import Layout
from fedagg.flower.messages import MOST_SAMPLES

log = getLogger("flwr").log


@dataclass
class Members:
    """The connected nodes by the number of their partition, so that a client is the same whatever id its node has
    today."""

    layout: Layout
    timeout: float = 120.0  # seconds for a node's first answer: it may have to load its data
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    sizes: dict[int, int] = field(default_factory=dict)  # client -> samples
    refused: dict[int, str] = field(default_factory=dict)  # node -> why
    failed: dict[int, str] = field(default_factory=dict)  # node -> what its last hello ended in; it is asked again

    def refresh(self, grid: Grid) -> None:
        """Forget nodes that left, ask new ones who they are."""
        present = set(grid.get_node_ids())
        for client, node in list(self.nodes.items()):
            if node not in present:
                log(WARNING, "client %s (node %s) has left", client, node)
                del self.nodes[client]
                self.refused.clear()  # one that was refused may have held the same partition
        self.refused = {node: why for node, why in self.refused.items() if node in present}
        new = sorted(present - set(self.nodes.values()) - set(self.refused))
        if not new:
            return
        questions = [
            Message(RecordDict({"config": ConfigRecord()}), node, MessageType.QUERY, ttl=self.timeout, group_id="hello")
            for node in new
        ]
        for reply in sorted(grid.send_and_receive(questions, timeout=self.timeout), key=lambda r: r.metadata.src_node_id):
            self.enter(reply)

    def enter(self, reply: Message) -> None:
        node = reply.metadata.src_node_id
        if node in self.nodes.values() or node in self.refused:
            return  # it says so twice
        if reply.has_error():
            self.fail(node, " ".join(str(reply.error.reason).split()))
            return
        why = None
        facts = dict(next(iter(reply.content.metric_records.values()), {}))
        client, size = facts.get("client"), facts.get("num-examples")
        if not isinstance(client, int) or not isinstance(size, int) or client < 0 or size < 1:
            why = "it did not say which partition it holds and how many samples"
        elif size > MOST_SAMPLES:
            why = f"it claims {size} samples, more than a node can hold"
        elif (facts.get("weights"), facts.get("buffers")) != (self.layout.d, self.layout.b):
            why = f"its model has {facts.get('weights')} weights, the server's {self.layout.d}"
        elif client in self.nodes:
            why = f"partition-id {client} is taken by node {self.nodes[client]}; give every SuperNode its own"
        else:
            self.nodes[client], self.sizes[client] = node, size
            self.failed.pop(node, None)
            log(INFO, "client %s joined: node %s, %s samples", client, node, size)
        if why is not None:
            self.refused[node] = why
            log(WARNING, "node %s is left out: %s", node, why)

    def fail(self, node: int, why: str) -> None:
        """It may do better the next time, when its disk is mounted. The log is told once, however often it is asked."""
        if self.failed.get(node) != why:
            log(WARNING, "node %s is left out until it answers; it failed: %s", node, why)
        self.failed[node] = why

    def wait(self, grid: Grid, wanted: int, seconds: float) -> None:
        """Until all are there that should be, or the time is over."""
        end = time.monotonic() + seconds
        while True:
            self.refresh(grid)
            if len(self.nodes) + len(self.refused) >= wanted or time.monotonic() > end:
                return
            time.sleep(0.5)

    def client(self, node: int) -> int | None:
        return next((client for client, other in self.nodes.items() if other == node), None)

    def names(self, clients: Iterable[int]) -> dict[str, str]:
        """Node ids by client for the record; as text, because JSON readers round 64-bit numbers."""
        return {str(client): str(self.nodes[client]) for client in clients if client in self.nodes}
