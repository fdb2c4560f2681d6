"""Where clients run."""

from __future__ import annotations

from fedagg.engines.base import Chunk, Engine, Job, Local, Memory, Setting, Work
from fedagg.engines.choose import build
from fedagg.engines.sequential import Sequential

__all__ = ["Chunk", "Engine", "Job", "Local", "Memory", "Sequential", "Setting", "Work", "build"]
