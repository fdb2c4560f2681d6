"""A function that asks questions in the middle, driven from outside.

An algorithm's round is plain code that calls its clients and goes on with what they answer. Flower's strategies work
the other way round: they are called to say what to send, and called again with the replies. The round runs in a
thread of its own and rests whenever it has asked something, so both can be written the way they are meant to be read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R")


class Conversation(Generic[Q, A, R]):
    """`tell` is given a function to ask with. After `start` or `answer`, either `question` is set or `result` has
    come."""

    def __init__(self, tell: Callable[[Callable[[Q], A]], R]) -> None:
        self.out: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self.back: SimpleQueue[A] = SimpleQueue()
        self.tell = tell
        self.thread = threading.Thread(target=self.run, name="fedagg-round", daemon=True)
        self.question: Q | None = None
        self.result: R | None = None

    def run(self) -> None:
        try:
            self.out.put(("result", self.tell(self.ask)))
        except BaseException as error:
            self.out.put(("error", error))

    def ask(self, question: Q) -> A:
        self.out.put(("question", question))
        return self.back.get()

    def start(self) -> None:
        self.thread.start()
        self.listen()

    def answer(self, given: A) -> None:
        self.question = None
        self.back.put(given)
        self.listen()

    def listen(self) -> None:
        """Whatever the round raises is raised here."""
        kind, value = self.out.get()
        if kind != "question":
            self.thread.join()
        if isinstance(value, BaseException):
            raise value
        setattr(self, kind, value)
