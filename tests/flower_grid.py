"""A federation in one process: a Grid that hands messages to the ClientApp at once, through Flower's own bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

Tamper = Callable[[Message, Message], Iterable[Message]]


def through_the_wire(message: Message) -> tuple[Message, int]:
    """The message as the other side gets it, and the bytes of all its objects."""
    with no_object_id_recompute():  # as Flower does, or every object is written out again for each that holds it
        contents = {key: thing.deflate() for key, thing in get_all_nested_objects(message).items()}
        name = message.object_id
    back = inflate_object_from_contents(name, dict(contents))
    assert isinstance(back, Message)
    back.metadata.__dict__["_message_id"] = message.metadata.message_id  # Flower, too, sends it beside the objects
    return back, sum(len(content) for content in contents.values())


class HereGrid(Grid):
    """Nodes 1000, 1001, ... hold partitions 0, 1, ...; `tamper` may lose, alter or double what they answer to work."""

    def __init__(self, app: Any, nodes: int, tamper: Tamper | None = None) -> None:
        self.app, self.tamper = app, tamper
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 1  # Flower sets these in its processes
        self.contexts = {
            1000 + k: Context(7, 1000 + k, {"partition-id": k, "num-partitions": nodes}, RecordDict(), {}) for k in range(nodes)
        }
        self.gone: set[int] = set()
        self.sent: list[tuple[Message, int]] = []
        self.received: list[tuple[Message, int]] = []
        self.waiting: list[Message] = []  # answers to questions that nobody waited for

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.contexts if node not in self.gone]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies: list[Message] = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"{len(self.sent)}"
            there, size = through_the_wire(message)
            self.sent.append((message, size))
            if node in self.gone:
                continue
            try:
                reply = self.app(there, self.contexts[node])
            except Exception as error:
                reply = Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=there)
            back, size = through_the_wire(reply)
            self.received.append((back, size))
            training = self.tamper is not None and message.metadata.message_type == "train"
            replies += self.tamper(message, back) if training and self.tamper else [back]
        return replies[::-1]  # whoever is first, the order of the sums is the order of the participants

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.waiting += self.send_and_receive(messages)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        ready = [message for message in self.waiting if message.metadata.reply_to_message_id in wanted]
        self.waiting = [message for message in self.waiting if message not in ready]
        return ready

    def unexpected(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the strategy asks a grid for nothing else")

    set_run = create_message = unexpected
    run = property(unexpected)


class PowerCut(BaseException):
    """The server's machine stops: nothing may catch this exception."""


def dies_in_round_3(sent: Message, reply: Message) -> list[Message]:
    if reply.metadata.group_id == "3":
        raise PowerCut
    return [reply]
