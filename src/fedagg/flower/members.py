"""The members of a federation: which node holds which partition of the data, and how many samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING, getLogger
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

import fedagg
from fedagg.errors import FedaggError
from fedagg.flat import Layout
from fedagg.flower.messages import MOST_SAMPLES
from fedagg.tasks import CLASSIFICATION, TASKS

log = getLogger("flwr").log


class NoNodes(FedaggError):
    """No nodes are left to continue with."""


@dataclass
class Members:
    """The connected nodes by the number of their partition, so that a client stays the same whatever id its node has today.

    Rounds do not wait for new nodes: a new node is asked who it is, and takes part once it has answered.
    """

    layout: Layout
    task: str = CLASSIFICATION.name
    subject: Mapping[str, Any] = field(default_factory=dict)  # what nodes are told about the task
    timeout: float = 3600.0  # seconds for a node's first answer: it may have to load its data
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    sizes: dict[int, int] = field(default_factory=dict)  # client -> samples
    refused: dict[int, str] = field(default_factory=dict)  # node -> reason
    failed: dict[int, str] = field(default_factory=dict)  # node -> how its last hello failed; it is asked again
    asked: dict[str, tuple[int, float]] = field(default_factory=dict)  # question -> node, and its deadline
    failures: dict[int, int] = field(default_factory=dict)  # node -> number of failed hellos in a row
    rest: dict[int, float] = field(default_factory=dict)  # node -> when it may be asked again

    def refresh(self, grid: Grid) -> None:
        """Forget nodes that left, ask new ones who they are, and read the answers."""
        present = set(grid.get_node_ids())
        for client, node in list(self.nodes.items()):
            if node not in present:
                log(WARNING, "client %s (node %s) has left", client, node)
                del self.nodes[client]
                self.refused.clear()  # a refused node may have held the same partition
        self.refused = {node: why for node, why in self.refused.items() if node in present}
        for held in (self.failed, self.failures, self.rest):
            for node in held.keys() - present:
                del held[node]
        self.asked = {question: held for question, held in self.asked.items() if held[0] in present}
        self.greet(grid, present)
        self.listen(grid)

    def greet(self, grid: Grid, present: set[int]) -> None:
        now = time.monotonic()
        busy = {node for node, _ in self.asked.values()} | {node for node, until in self.rest.items() if now < until}
        new = sorted(present - set(self.nodes.values()) - set(self.refused) - busy)
        content = RecordDict({"config": ConfigRecord({**self.subject})})
        questions = [Message(content, node, MessageType.QUERY, ttl=self.timeout, group_id="hello") for node in new]
        if questions:
            given = zip(grid.push_messages(questions), new, strict=False)
            self.asked |= {question: (node, now + self.timeout) for question, node in given if question}

    def listen(self, grid: Grid) -> None:
        """Read the answers, and give up on questions past their deadline."""
        if not self.asked:
            return
        for reply in sorted(grid.pull_messages(list(self.asked)), key=lambda r: r.metadata.src_node_id):
            node, _ = self.asked.pop(reply.metadata.reply_to_message_id, (None, 0.0))
            if node is not None:
                self.enter(node, reply)
        now = time.monotonic()
        for question, (node, until) in list(self.asked.items()):
            if now >= until:
                del self.asked[question]
                self.fail(node, f"no answer in {self.timeout:g} seconds")

    def enter(self, node: int, reply: Message) -> None:
        if reply.has_error():
            self.fail(node, " ".join(str(reply.error.reason).split()))
            return
        why = None
        facts = dict(next(iter(reply.content.metric_records.values()), {}))
        client, size = facts.get("client"), facts.get("num-examples")
        about = dict(reply.content.config_records.get("version", {}))
        version, task = str(about.get("fedagg")), about.get("task")
        if version != fedagg.__version__:
            why = f"it runs fedagg {version}, the server {fedagg.__version__}; install the same on both"
        elif not isinstance(client, int) or not isinstance(size, int) or client < 0 or size < 1:
            why = "it did not say which partition and how many samples it holds"
        elif size > MOST_SAMPLES:
            why = f"it claims {size} samples, more than a node can hold"
        elif (facts.get("weights"), facts.get("buffers")) != (self.layout.d, self.layout.b):
            why = f"its model has {facts.get('weights')} weights, the server's {self.layout.d}"
        elif task != self.task:
            what = task if task in TASKS else "another task"
            why = f"its targets are those of {what}, but the run's task is {self.task}; set `task` in the settings"
        elif client in self.nodes:
            why = f"partition-id {client} is taken by node {self.nodes[client]}; give every SuperNode its own"
        else:
            self.nodes[client], self.sizes[client] = node, size
            for held in (self.failed, self.failures, self.rest):
                held.pop(node, None)
            log(INFO, "client %s joined: node %s, %s samples", client, node, size)
        if why is not None:
            self.refused[node] = why
            log(WARNING, "node %s is left out: %s", node, why)

    def fail(self, node: int, why: str) -> None:
        """Note a failed hello. The node is asked again, less and less often: it may succeed later, e.g. when its disk is mounted.
        Repeated failures of the same kind are logged once."""
        if self.failed.get(node) != why:
            log(WARNING, "node %s is left out until it answers; it failed: %s", node, why)
        self.failed[node], self.failures[node] = why, self.failures.get(node, 0) + 1
        self.rest[node] = time.monotonic() + pause(self.failures[node])

    def wait(self, grid: Grid, wanted: int, seconds: float) -> None:
        """Wait until all expected nodes are known, or the time is over."""
        end = time.monotonic() + seconds
        while True:
            self.refresh(grid)
            if len(self.nodes) + len(self.refused) >= wanted or time.monotonic() >= end:
                return
            time.sleep(0.5)

    def gather(self, grid: Grid, least: int, seconds: float) -> None:
        """Wait until at least `least` nodes can take part. Raises NoNodes when the time is over."""
        end, warned = time.monotonic() + seconds, False
        while True:
            self.refresh(grid)
            if len(self.nodes) >= least:
                return
            if time.monotonic() >= end:
                raise NoNodes(f"{len(self.nodes)} nodes are online after {seconds:g} seconds, but {least} are needed")
            if not warned:
                log(WARNING, "%s nodes are online, %s are needed: waiting up to %g seconds", len(self.nodes), least, seconds)
                warned = True
            time.sleep(0.5)

    def client(self, node: int) -> int | None:
        return next((client for client, other in self.nodes.items() if other == node), None)

    def names(self, clients: Iterable[int]) -> dict[str, str]:
        """Node ids by client for the record; as text, because JSON readers round 64-bit numbers."""
        return {str(client): str(self.nodes[client]) for client in clients if client in self.nodes}


def pause(failures: int) -> float:
    """Seconds before a node is asked again who it is: none at first, at most ten minutes."""
    return 0.0 if failures < 3 else min(600.0, 5.0 * 2.0 ** min(failures - 3, 10))
