"""What a real federation would send: the bytes of a round, counted from the work itself."""

from __future__ import annotations

from fedagg.engines.base import Work
from fedagg.flat import Model

FLOAT = 4


def down(work: Work, model: Model, bits: int = 32) -> int:
    """Bytes to one client: the model, the shared field at `bits` per number, and the plan's scalars."""
    scalars = work.rate.numel() + (work.slope.numel() if work.slope is not None else 0) + 4
    rows = len(work.field) if work.field is not None else 0
    field_bytes = rows * (len(model.w) * bits + 7) // 8
    return FLOAT * (len(model.w) + len(model.buffers) + scalars) + field_bytes


def up(work: Work, model: Model, epochs: int) -> int:
    """Bytes from one client: its update, its loss, rates and sizes; a trace costs a model per epoch and more."""
    vectors = len(model.w) + len(model.buffers)
    if work.trace:
        vectors += (2 * epochs + 1) * len(model.w)
    return FLOAT * (vectors + epochs + 6)
