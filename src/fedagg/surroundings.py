"""The state that a run shares with the rest of its process: torch's switches, threads and random numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedagg.engines.base import switches_restored
from fedagg.errors import SettingError

_running = threading.RLock()  # reentrant, because a callback may start another run: that is in the same thread, which waits for it


@contextmanager
def isolated_torch_state() -> Iterator[None]:
    """Run with gradients and float32, whatever the caller has set, and restore everything afterwards.

    Layers draw from torch's global generator, one per process: two runs at once would take each other's numbers."""
    if not _running.acquire(blocking=False):
        words = (
            "another run is in progress in this process, and both would draw from one generator; run this one in its own process"
        )
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
