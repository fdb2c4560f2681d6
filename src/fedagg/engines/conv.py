"""Convolution of n clients' images with n clients' filters: square, zero padding, channels-last memory.

Which form is fastest depends on device and shape by factors, so there are several, and the engine measures.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Convolution(Protocol):
    """x (n·B, C, H, W), w (n, O, C, k, k), b (n, O)."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor: ...

    def input_gradient(self, x: Tensor, dy: Tensor, w: Tensor) -> Tensor: ...

    def weight_gradient(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None) -> None: ...


class Loop:
    """One convolution a client: good where one client's share fills the machine, as on a CPU."""

    def __init__(self, n: int, padding: int, stride: int = 1, half: bool = False) -> None:
        self.n, self.padding, self.stride, self.dtype = n, padding, stride, torch.bfloat16 if half else torch.float32

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        rows, filters = channels_last(x).to(self.dtype).chunk(self.n), w.to(self.dtype).unbind()
        biases = b.to(self.dtype).unbind() if b is not None else [None] * self.n
        pieces = zip(rows, filters, biases, strict=True)
        return joined([functional.conv2d(xi, wi, bi, self.stride, self.padding).float() for xi, wi, bi in pieces])

    def backward(self, x: Tensor, dy: Tensor, w: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        strides, pads = [self.stride, self.stride], [self.padding, self.padding]
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            dy.to(self.dtype), x.to(self.dtype), w.to(self.dtype), None, strides, pads, [1, 1], False, [0, 0], 1, mask
        )
        return result

    def input_gradient(self, x: Tensor, dy: Tensor, w: Tensor) -> Tensor:
        pieces = zip(x.chunk(self.n), dy.chunk(self.n), w.unbind(), strict=True)
        return joined([self.backward(xi, dyi, wi, [True, False, False])[0].float() for xi, dyi, wi in pieces])

    def weight_gradient(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None) -> None:
        if db is not None:
            n, channels = db.shape
            torch.sum(dy.permute(0, 2, 3, 1).reshape(n, -1, channels), 1, out=db)
        for xi, dyi, dwi in zip(channels_last(x).chunk(self.n), dy.chunk(self.n), dw.unbind(), strict=True):
            dwi.copy_(self.backward(xi, dyi, dwi, [False, True, False])[1])


def joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def channels_last(x: Tensor) -> Tensor:
    """x (N, C, H, W) in channels-last memory, and with strides that say so.

    With one channel both orders are the same memory. Torch takes it for the other one, passes that on from layer to layer, and
    pooling takes ten times as long.
    """
    _, channels, height, width = x.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)


def make_convolution(form: str, n: int, padding: int, stride: int, half: bool) -> Convolution:
    if form == "fused":
        from fedagg.engines.fused import FusedConvolution

        return FusedConvolution(n, padding, stride)
    return Loop(n, padding, stride, half)
