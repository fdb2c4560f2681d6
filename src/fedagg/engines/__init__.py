"""Where clients run."""

from __future__ import annotations

from fedagg.engines.base import Chunk, Engine, Job, Local, Memory, Setting, Work
from fedagg.engines.sequential import Sequential

__all__ = ["Chunk", "Engine", "Job", "Local", "Memory", "Sequential", "Setting", "Work"]


def build(name: str, setting: Setting, config: object) -> Engine:
    return Sequential(setting)
