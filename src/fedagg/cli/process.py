"""The command's process: whether it is the one that prints, and how it ends."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn


def leads() -> bool:
    """Is this the process that draws and prints? Under torchrun it is the first one."""
    return os.environ.get("RANK", "0") == "0"


def leave(status: int) -> NoReturn:
    """End the process. It ends at once in a distributed run, whose threads can abort Python while it shuts down
    (pytorch/pytorch#179291), and after Ctrl-C, when Python would wait for threads in the middle of a client."""
    busy = status == 130 and any(not t.daemon and t is not threading.main_thread() for t in threading.enumerate())
    distributed = sys.modules.get("torch.distributed")  # not imported here: `fedagg --version` needs no torch
    if busy or (distributed is not None and distributed.is_available() and distributed.is_initialized()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
