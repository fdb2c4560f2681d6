"""Rounds that end when enough nodes have answered, not when the last one has."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedagg.flower.pace import Pace


class Closing(Grid):
    """A grid that stops waiting when a share of those asked has answered well. Later answers are not used, but if there is a
    `Pace`, it records when they arrive."""

    def __init__(self, grid: Grid, share: float, pace: Pace | None = None) -> None:
        self.grid, self.share, self.pace = grid, share, pace

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        given = list(messages)
        asked = list(zip(self.grid.push_messages(given), given, strict=False)) if given else []
        mine = {question: message for question, message in asked if question}
        open_ = set(mine)
        if self.pace is not None:
            for question, message in mine.items():
                self.pace.note_question(question, message)
        wanted = math.ceil(self.share * len(given) - 1e-9)
        end, pause = time.monotonic() + (math.inf if timeout is None else timeout), 0.05
        replies: list[Message] = []
        while open_:
            watched = set(self.pace.pending) if self.pace is not None else set()
            for reply in self.grid.pull_messages(sorted(open_ | watched)):
                question = reply.metadata.reply_to_message_id
                if self.pace is not None:
                    self.pace.note_answer(question, reply.has_error())
                if question in mine:
                    replies.append(reply)
                    open_.discard(question)
            if sum(not reply.has_error() for reply in replies) >= wanted or time.monotonic() >= end:
                break
            time.sleep(pause)
            pause = min(1.5 * pause, 3.0)
        if self.pace is not None:
            self.pace.drop_overdue()
        return replies

    # Everything else is passed on to the grid.

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
