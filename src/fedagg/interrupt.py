"""Ctrl-C at a moment of our choosing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """What is done within is done whole: an interrupt that arrives meanwhile is delivered at the end."""
    if threading.current_thread() is not threading.main_thread():  # others never receive one
        yield
        return
    waiting: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    if waiting:
        signal.raise_signal(signal.SIGINT)
