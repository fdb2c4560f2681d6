"""Rounds that end when enough have answered, not when the last has."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid


class Closing(Grid):
    """A grid that stops listening once a share of those asked has answered well. What the others send goes unread."""

    def __init__(self, grid: Grid, share: float) -> None:
        self.grid, self.share = grid, share

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        given = list(messages)
        open_ = {question for question in self.grid.push_messages(given) if question} if given else set()
        wanted = math.ceil(self.share * len(given) - 1e-9)
        end, pause = time.monotonic() + (math.inf if timeout is None else timeout), 0.05
        replies: list[Message] = []
        while open_:
            heard = list(self.grid.pull_messages(sorted(open_)))
            replies += heard
            open_ -= {reply.metadata.reply_to_message_id for reply in heard}
            if sum(not reply.has_error() for reply in replies) >= wanted or time.monotonic() >= end:
                break
            time.sleep(pause)
            pause = min(1.5 * pause, 3.0)
        return replies

    # Everything else is the grid's own.

    def set_run(self, *args: Any, **kwargs: Any) -> None:
        self.grid.set_run(*args, **kwargs)

    @property
    def run(self) -> Any:
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)
