"""Convolution, pooling and the local step of n clients at once on a GPU, on the kernels of `fedagg.engines.kernels`.

Libraries run n clients' convolutions as a grouped convolution or one after the other; neither fills a large GPU with the small
images
of federated learning. Here a client is one more axis of the grid, and the patches of an image are gathered on the fly (implicit
matrix product), so no patch is ever written to memory. Sums are made in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fedagg.engines import kernels


def precision() -> str:
    """tf32 where torch allows it for its own products, plain float32 elsewhere."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def block(size: int, most: int) -> int:
    return int(max(16, min(most, triton.next_power_of_2(size))))


class FusedConvolution:
    """Convolution of n clients' images with n clients' filters."""

    splits_for = 264  # blocks that keep a large GPU busy

    def __init__(self, n: int, padding: int, half: bool = False) -> None:
        self.n, self.padding, self.half = n, padding, half

    def convolve(self, x: Tensor, w: Tensor, b: Tensor | None, padding: int) -> Tensor:
        """w (n, O, k, k, C), contiguous: tensor cores want the summed axis innermost."""
        n, outputs, k, _, channels = w.shape
        images, _, height, width = x.shape
        ho, wo = height + 2 * padding - k + 1, width + 2 * padding - k + 1
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.empty(images, outputs, ho, wo, device=x.device, memory_format=torch.channels_last)
        m = images // n * ho * wo
        wide = outputs >= 128  # blocks measured on an H200
        tile: dict[str, Any] = {"BM": 128, "BK": block(k * k * channels, 32), "BO": block(outputs, 128 if wide else 64)}
        grid = (triton.cdiv(m, tile["BM"]), triton.cdiv(outputs, tile["BO"]), n)
        kernels.conv[grid](
            x,
            w,
            b if b is not None else w,
            y,
            m,
            height,
            width,
            ho,
            wo,
            padding,
            C=channels,
            O=outputs,
            K=k,
            BIAS=b is not None,
            PRECISION=precision(),
            HALF=self.half,
            num_warps=8 if wide else 4,
            num_stages=3,
            **tile,
        )
        return y

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        bias = b.contiguous() if b is not None else None
        return self.convolve(x, turned(w, back=False), bias, self.padding)

    def input_gradient(self, x: Tensor, dy: Tensor, w: Tensor) -> Tensor:
        return self.convolve(dy, turned(w, back=True), None, w.shape[-1] - 1 - self.padding)

    def weight_gradient(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None) -> None:
        n, outputs, channels, k, _ = dw.shape
        images, _, height, _width = x.shape
        ho, wo = dy.shape[2:]
        m, depth = images // n * ho * wo, k * k * channels
        tile = self.tile(channels, outputs, depth)
        tiles = triton.cdiv(depth, tile["BK"]) * triton.cdiv(outputs, tile["BO"])
        splits = max(1, min(triton.cdiv(m, 4 * tile["BM"]), triton.cdiv(self.splits_for, tiles * n)))
        span = triton.cdiv(triton.cdiv(m, splits), tile["BM"]) * tile["BM"]
        splits = triton.cdiv(m, span)
        # One split goes straight to where the update reads.
        out = dw if splits == 1 else x.new_empty(splits * n, outputs * depth)
        grid = (triton.cdiv(depth, tile["BK"]), triton.cdiv(outputs, tile["BO"]), splits * n)
        kernels.weight_gradient[grid](
            unrolled(x, k, self.padding, wo),
            unrolled(dy, 1, 0, wo, sums=db),
            out,
            m,
            span,
            n,
            out.stride(0),
            C=channels,
            O=outputs,
            K=k,
            PIXELS=ho * wo,
            WO=wo,
            PLANE=(height + 2 * self.padding) * wo,
            PRECISION=precision(),
            HALF=self.half,
            **tile,
        )
        if splits > 1:
            dw.copy_(out.view(splits, n, -1).sum(0).view_as(dw))

    def tile(self, channels: int, outputs: int, depth: int) -> dict[str, Any]:
        """Blocks of the weight gradient, measured on an H200."""
        few = depth > 9 * channels  # 5×5 filters of few channels
        return {"BM": 32, "BK": block(depth, 64 if few else 128), "BO": block(outputs, 128), "num_warps": 4, "num_stages": 3}


def turned(w: Tensor, back: bool) -> Tensor:
    """w (n, O, C, k, k) as (n, O, k, k, C); `back`, the filters of the transposed convolution, (n, C, k, k, O)."""
    n, outputs, channels, k, _ = w.shape
    shape = (n, channels, k, k, outputs) if back else (n, outputs, k, k, channels)
    y = torch.empty(shape, device=w.device)
    # Long in the direction that is written, short in the other, so that a block's reads stay in its cache.
    wide, narrow = triton.next_power_of_2(outputs if back else channels), triton.next_power_of_2(channels if back else outputs)
    tile: dict[str, Any] = {"BO" if back else "BC": min(32, wide), "BC" if back else "BO": min(8, narrow)}
    grid = (triton.cdiv(outputs, tile["BO"]), triton.cdiv(channels, tile["BC"]), n)
    kernels.turn[grid](w, y, w.stride(0), outputs, channels, TAPS=k * k, BACK=back, **tile)
    return y


def unrolled(x: Tensor, k: int, padding: int, width: int, sums: Tensor | None = None) -> Tensor:
    """x (images, C, H, W) in channels-last memory as (images, C, k, H + 2p, width), see `kernels.unroll`. `sums` (n, C) gets
    the sum over every client's images."""
    x = x.contiguous(memory_format=torch.channels_last)
    images, channels, height, across = x.shape
    y = torch.empty(images, channels, k, height + 2 * padding, width, device=x.device)
    plane = (height + 2 * padding) * width
    tile: dict[str, Any] = {"BP": int(min(128, triton.next_power_of_2(plane))), "BC": min(32, triton.next_power_of_2(channels))}
    grid = (images * triton.cdiv(plane, tile["BP"]), triton.cdiv(channels, tile["BC"]))
    part = x.new_empty(grid[0], channels) if sums is not None else y
    kernels.unroll[grid](x, y, part, height, across, padding, channels, WO=width, PLANE=plane, K=k, SUM=sums is not None, **tile)
    if sums is not None:
        torch.sum(part.view(len(sums), -1, channels), 1, out=sums)
    return y


class FusedPool:
    """ReLU and 2×2 max pooling in one pass each way; the pool's window numbers are all that is kept."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        self.shape = images, channels, height, width = x.shape
        ho, wo = height // 2, width // 2
        y = torch.empty(images, channels, ho, wo, device=x.device, memory_format=torch.channels_last)
        self.where = torch.empty(y.numel(), dtype=torch.int8, device=x.device)
        kernels.pool[(triton.cdiv(y.numel(), 1024),)](x, y, self.where, y.numel(), height, width, ho, wo, channels, BLOCK=1024)
        return y

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        if not need:
            return dy
        _images, channels, height, width = self.shape
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty(self.shape, device=dy.device, memory_format=torch.channels_last)
        kernels.unpool[(triton.cdiv(dx.numel(), 1024),)](
            dy, self.where, dx, dx.numel(), height, width, height // 2, width // 2, channels, BLOCK=1024
        )
        return dx


def fused_step(
    w: Tensor,
    g: Tensor,
    rate: Tensor,
    own: Tensor,
    prox: Tensor,
    start: Tensor,
    shift: Tensor | None,
    memory: Tensor | None,
    mask: Tensor | None,
    use_prox: bool,
) -> None:
    n, d = w.shape
    grid = (triton.cdiv(d, 1024), n)
    none = start
    kernels.step[grid](
        w,
        g,
        rate,
        own,
        prox,
        start,
        shift if shift is not None else none,
        memory if memory is not None else none,
        mask if mask is not None else none,
        d,
        w.stride(0),
        SHIFT=shift is not None,
        PROX=use_prox,
        MEMORY=memory is not None,
        MASK=mask is not None,
        BLOCK=1024,
    )
