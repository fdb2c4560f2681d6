"""Engines: how and where clients train."""

from __future__ import annotations

from fedagg.engines.base import Problem
from fedagg.engines.choose import build
from fedagg.engines.sequential import Sequential
from fedagg.work import Engine

__all__ = ["Engine", "Problem", "Sequential", "build"]
