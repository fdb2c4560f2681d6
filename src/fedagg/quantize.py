"""Compress the shared field on its way to the clients to a few bits per number.

FedAgg's default sends one vector besides the weights, φ1. At 2 or 3 bits per number this costs a few percent of what FedAvg sends.
Three things keep it harmless: the rounding is stochastic, so it is right on average; every block of 128 numbers has its own
scale; and the rounding error is added before the next rounding (error feedback), so nothing is lost for good. The generator is
seeded by the round, so the simulator and a real federation send the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedagg import seeding
from fedagg.work import Work

EXACT = 32  # bits of a number that is sent unchanged
BLOCK = 128  # numbers that share a scale; a scale is a bfloat16
# The largest number a block can express, in standard deviations of the block. With few levels a wide range makes steps coarse, and
# error feedback needs a rounding error well below the signal. So larger numbers are cut off, and the rest follows in later rounds.
REACH = {2: 1.5, 3: 2.25, 4: 3.0}


@dataclass(frozen=True)
class Packed:
    """Rows (m, d) of numbers as codes of `bits` bits and a scale per block."""

    shape: tuple[int, int]
    bits: int
    codes: bytes
    scales: bytes

    def tensor(self) -> Tensor:
        """The numbers that the receiver works with, (m, d), on the CPU."""
        rows, d = self.shape
        unpacked = np.unpackbits(np.frombuffer(self.codes, np.uint8), count=rows * d * self.bits).reshape(-1, self.bits)
        codes = np.zeros(rows * d, np.int64)
        for bit in range(self.bits):
            codes = 2 * codes + unpacked[:, bit]
        scales = torch.from_numpy(np.frombuffer(self.scales, np.int16).copy()).view(torch.bfloat16).float()
        levels: Tensor = torch.from_numpy(codes).view(rows, d).double() * (2 / (2**self.bits - 1)) - 1
        return (levels * spread(scales.view(rows, -1), d)).float()


def size(rows: int, d: int, bits: int) -> int:
    """Bytes of rows (m, d) on the wire."""
    if bits >= EXACT:
        return 4 * rows * d
    return (rows * d * bits + 7) // 8 + 2 * rows * blocks(d)


def blocks(d: int) -> int:
    return -(-d // BLOCK)


def spread(scales: Tensor, d: int) -> Tensor:
    """The scale of every number: (m, blocks) -> (m, d)."""
    return scales.repeat_interleave(BLOCK, dim=1)[:, :d]


def quantize(x: Tensor, bits: int, generator: torch.Generator) -> Packed:
    """Round (m, d) stochastically to 2^bits levels, evenly spaced between minus and plus each block's scale."""
    x = x.detach().cpu().float()
    rows, d = x.shape
    count = torch.full((blocks(d),), float(BLOCK))
    count[-1] = d - BLOCK * (blocks(d) - 1)
    padded = torch.nn.functional.pad(x, (0, BLOCK * blocks(d) - d)).view(rows, -1, BLOCK)
    largest = padded.abs().amax(2)
    deviation = (padded.double().square().sum(2) / count).sqrt().float()
    scales = torch.minimum(largest, REACH[bits] * deviation) if bits in REACH else largest
    scales = scales.bfloat16()
    each = spread(scales.float(), d).double()
    top = 2**bits - 1
    level = (x.double() / each.where(each > 0, torch.ones_like(each)) + 1) * (top / 2)
    codes = (level + torch.rand(rows, d, generator=generator, dtype=torch.float64)).floor().clamp(0, top).long()
    flat = codes.view(-1, 1).numpy()
    bit = (flat >> np.arange(bits - 1, -1, -1)) & 1
    return Packed((rows, d), bits, np.packbits(bit.astype(np.uint8)).tobytes(), scales.view(torch.int16).numpy().tobytes())


@dataclass
class Downlink:
    """Rounds a work's field before it is sent; with 32 bits it does nothing."""

    bits: int = EXACT
    seed: int = 0
    error: Tensor | None = None  # accumulated rounding error, (m, d)
    packed: Packed | None = None  # the field as last sent

    def send(self, work: Work, t: int, passes: int) -> Work:
        """The work as clients see it."""
        self.packed = None
        if work.field is None or self.bits >= EXACT:
            return work
        wanted = work.field
        if self.error is not None and self.error.shape == wanted.shape:
            wanted = wanted + self.error.to(wanted)
        self.packed = quantize(wanted, self.bits, seeding.torch_generator(self.seed, "downlink", t, passes))
        sent = self.packed.tensor().to(wanted)
        # A diverged field is handled elsewhere; its error would spoil every later round.
        self.error = torch.nan_to_num(wanted - sent, nan=0.0, posinf=0.0, neginf=0.0)
        return replace(work, field=sent)
