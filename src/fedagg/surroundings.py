"""What a run finds in its process and shares with everybody there: torch's switches, threads and random numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedagg.engines.base import switches_restored
from fedagg.errors import SettingError

_running = threading.RLock()  # a callback may start a run of its own: it is the same thread, and waits for it


@contextmanager
def as_usual() -> Iterator[None]:
    """Gradients and float32, whatever the caller has set; and all as it was afterwards.

    Layers draw from torch's own generator, of which a process has one: two runs at once would draw each other's numbers."""
    if not _running.acquire(blocking=False):
        words = "another run is going on in this process, and both would draw from one generator; give it a process of its own"
        raise SettingError("run", threading.current_thread().name, words)
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        torch.set_default_dtype(torch.float32)
        if device.type != "cpu":
            torch.set_default_device(None)
        with switches_restored(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        if device.type != "cpu":
            torch.set_default_device(device)
        _running.release()
