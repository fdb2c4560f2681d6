"""Engines: how and where clients train."""

from __future__ import annotations

from fedagg.engines.base import Engine, Setting
from fedagg.engines.choose import build
from fedagg.engines.sequential import Sequential

__all__ = ["Engine", "Sequential", "Setting", "build"]
