"""Run a function that asks questions midway, and answer them from outside.

An algorithm's round is plain code that calls its clients and continues with their answers. Flower's strategies work the other way
round: they are called to say what to send, and called again with the replies. So the round runs in its own thread and pauses
whenever it has asked something. Both sides can then be written in their natural form.
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
    """`tell` receives a function for asking. After `start` or `answer`, either `question` or `result` is set."""

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
        """Wait for the next question or the result. An exception in the round is raised here."""
        kind, value = self.out.get()
        if kind != "question":
            self.thread.join()
        if isinstance(value, BaseException):
            raise value
        setattr(self, kind, value)
