"""The processes of one run, started by torchrun: how they add up numbers, and how they end together."""

from __future__ import annotations

import atexit
import os
import signal
from types import FrameType

import torch
from torch import Tensor, distributed

from fedagg.errors import SettingError
from fedagg.work import Team


class PeerGone(KeyboardInterrupt):
    """Another process has died: the run stops as after Ctrl-C, and all completed work is kept."""


class TorchTeam(Team):
    """The processes of a run."""

    def __init__(self, device: torch.device) -> None:
        if "RANK" not in os.environ:
            raise SettingError("engine", "distributed", "start it with: torchrun --nproc-per-node=2 -m fedagg run ...")
        if not distributed.is_initialized():
            signal.signal(signal.SIGTERM, end_cleanly)
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(distributed.destroy_process_group)
        self.device, self.rank, self.size = device, distributed.get_rank(), distributed.get_world_size()

    def part(self) -> None:
        """Wait for each other at the end: a process that left early would look like one that died."""
        self.sum(torch.zeros(1))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to save

    def sum(self, tensor: Tensor) -> Tensor:
        return self.reduce(tensor, distributed.ReduceOp.SUM)

    def most(self, tensor: Tensor) -> Tensor:
        return self.reduce(tensor, distributed.ReduceOp.MAX)

    def reduce(self, tensor: Tensor, how: distributed.ReduceOp.RedOpType) -> Tensor:
        """All-reduce a tensor; the result is on the tensor's own device."""
        there = tensor.to(self.device, copy=True)
        try:
            distributed.all_reduce(there, how)
        except RuntimeError as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun is about to send it, while completed work is being saved
            raise PeerGone("another process of the run is gone; start all of them again with --resume") from error
        return there.to(tensor.device)


def end_cleanly(number: int, frame: FrameType | None) -> None:
    """Stop at torchrun's first signal, which it sends when one process dies. Ignore later ones: completed work is being saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise PeerGone("asked to stop, most likely because another process of the run is gone; start again with --resume")
