"""Delay Ctrl-C until a safe moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Complete the block without interruption: an interrupt that arrives meanwhile is delivered at its end."""
    if threading.current_thread() is not threading.main_thread():  # other threads never receive one
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
