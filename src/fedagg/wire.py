"""What a real federation sends: the bytes of a round, counted from the work.

Only the payload is counted: the numbers of the vectors, 8 bytes for every other number and 1 for every flag. The tests compare
this with the messages of `fedagg.flower`. Names and framing add about a kilobyte per message, whatever the model.
"""

from __future__ import annotations

from dataclasses import fields

from fedagg import quantize
from fedagg.flat import Model
from fedagg.work import Report, Work

FLOAT, NUMBER, FLAG = 4, 8, 1
# Round, pass, seed, last accepted answer (2), local options (5), bounds and weights (6), form of the field (2), step back,
# limit of a gradient.
ORDER = 20 * NUMBER + FLAG
ANSWER = len(fields(Report)) * NUMBER  # the report of a client, and its samples; the rates, one per epoch, are counted separately


def down(work: Work, model: Model, bits: int = quantize.EXACT) -> int:
    """Bytes to one client: the model, the shared field at `bits` per number, the mask at one, and the plan's
    numbers."""
    rows, d = (len(work.field) if work.field is not None else 0), len(model.w)
    vectors = FLOAT * (d + len(model.buffers)) + quantize.size(rows, d, bits)
    mask = (d + 7) // 8 if work.mask is not None else 0
    plan = work.rate.shape[-1] + sum(part.numel() for part in (work.slope, work.mix) if part is not None)
    return vectors + mask + NUMBER * plan + ORDER + FLAG * work.trial


def up(work: Work, model: Model, epochs: int, represented: int = 0) -> int:
    """Bytes from one client: its update, unless this is a trial, loss, rates and sizes; a trace is more than a model per epoch."""
    vectors = represented + (0 if work.trial else len(model.w) + len(model.buffers))
    if work.trace:
        vectors += (2 * epochs + 1) * len(model.w)
    return FLOAT * vectors + NUMBER * epochs + ANSWER


def tested_along(asked: int, numbers: int) -> int:
    """Bytes of an evaluation during training, when the nodes have the model already: a flag to each node, and this many numbers
    back from all of them."""
    return asked * FLAG + numbers * NUMBER


def tested(model: Model, asked: int, numbers: int) -> int:
    """Bytes of an evaluation in separate messages: the model to each node, and this many numbers back from all of them."""
    return asked * FLOAT * (len(model.w) + len(model.buffers)) + numbers * NUMBER
