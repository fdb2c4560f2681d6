"""Convolution of n clients' images with n clients' filters: square, zero padding, channels-last memory.

Which form is fastest depends strongly on device and shape, so there are several.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Convolution(Protocol):
    """x (n·B, C, H, W), w (n, O, C, k, k), b (n, O). The gradient of x may be added to `onto`, and may replace it."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor: ...

    def input_gradient(self, x: Tensor, dy: Tensor, w: Tensor, onto: Tensor | None = None) -> Tensor: ...

    def weight_gradient(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None) -> None: ...


class Loop:
    """One convolution per client: good if one client's share keeps the machine busy, as on a CPU."""

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

    def input_gradient(self, x: Tensor, dy: Tensor, w: Tensor, onto: Tensor | None = None) -> Tensor:
        pieces = zip(x.chunk(self.n), dy.chunk(self.n), w.unbind(), strict=True)
        dx = joined([self.backward(xi, dyi, wi, [True, False, False])[0].float() for xi, dyi, wi in pieces])
        return dx if onto is None else dx.add_(onto)

    def weight_gradient(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None) -> None:
        if db is not None:
            n, channels = db.shape
            torch.sum(dy.permute(0, 2, 3, 1).reshape(n, -1, channels), 1, out=db)
        for xi, dyi, dwi in zip(channels_last(x).chunk(self.n), dy.chunk(self.n), dw.unbind(), strict=True):
            dwi.copy_(self.backward(xi, dyi, dwi, [False, True, False])[1])


class Pointwise:
    """1×1 filters: a product over the channels of every pixel, which matrix libraries do best."""

    splits_for = 264  # blocks of 128×128 that keep a large GPU busy

    def __init__(self, n: int, stride: int = 1) -> None:
        self.n, self.stride = n, stride

    def rows(self, x: Tensor) -> Tensor:
        """(n·B, C, H, W) as (n, B·H·W, C); in channels-last memory this is only a view."""
        return channels_last(x).permute(0, 2, 3, 1).reshape(self.n, -1, x.shape[1])

    def images(self, rows: Tensor, count: int, height: int, width: int) -> Tensor:
        return rows.reshape(count, height, width, -1).permute(0, 3, 1, 2)

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        x = thin(x, self.stride)
        rows, filters = self.rows(x), w.flatten(2).transpose(1, 2).to(x.dtype)
        y = torch.bmm(rows, filters) if b is None else torch.baddbmm(b[:, None].to(x.dtype), rows, filters)
        return self.images(y, len(x), *x.shape[2:])

    def input_gradient(self, x: Tensor, dy: Tensor, w: Tensor, onto: Tensor | None = None) -> Tensor:
        rows, filters = self.rows(dy), w.flatten(2).to(dy.dtype)
        if onto is not None and self.stride == 1:
            onto = channels_last(onto)
            self.rows(onto).baddbmm_(rows, filters)
            return onto
        dx = self.images(torch.bmm(rows, filters), len(dy), *dy.shape[2:])
        if onto is None:
            return spread(dx, self.stride, x.shape[2], x.shape[3])
        onto[:, :, :: self.stride, :: self.stride] += dx
        return onto

    def weight_gradient(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None) -> None:
        rows = self.rows(dy)
        if db is not None:
            torch.sum(rows, 1, dtype=db.dtype, out=db)
        # A sum over many pixels for few weights. It is split, because a library uses a single block for all of a client's pixels.
        parts, images = self.n, len(x) // self.n
        blocks = -(-dw.shape[1] // 128) * -(-dw.shape[2] // 128)
        while images % 2 == 0 and 2 * parts * blocks <= self.splits_for:
            parts, images = 2 * parts, images // 2
        rows, seen = (part.reshape(parts, -1, part.shape[2]) for part in (rows, self.rows(thin(x, self.stride))))
        product = torch.bmm(rows.transpose(1, 2), seen).view(self.n, -1, *dw.shape[1:3])
        torch.sum(product, 1, dtype=dw.dtype, out=dw.flatten(2))


def thin(x: Tensor, stride: int) -> Tensor:
    """Every `stride`-th pixel in both directions."""
    return x if stride == 1 else x[:, :, ::stride, ::stride].contiguous(memory_format=torch.channels_last)


def spread(x: Tensor, stride: int, height: int, width: int) -> Tensor:
    """The inverse of `thin`, with zeros between."""
    if stride == 1:
        return x
    y = torch.empty(*x.shape[:2], height, width, device=x.device, dtype=x.dtype, memory_format=torch.channels_last).zero_()
    y[:, :, ::stride, ::stride] = x
    return y


def joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def channels_last(x: Tensor) -> Tensor:
    """x (N, C, H, W) in channels-last memory, with matching strides.

    With one channel both orders are the same memory. Torch takes it for channels-first, passes that on from layer to layer, and
    pooling takes ten times as long.
    """
    _, channels, height, width = x.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)
