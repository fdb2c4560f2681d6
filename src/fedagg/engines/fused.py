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
from torch.nn import functional

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
        return self.convolve(x, w.permute(0, 1, 3, 4, 2).contiguous(), bias, self.padding)

    def input_gradient(self, x: Tensor, dy: Tensor, w: Tensor) -> Tensor:
        turned = w.flip(3, 4).permute(0, 2, 3, 4, 1).contiguous()
        return self.convolve(dy, turned, None, w.shape[-1] - 1 - self.padding)

    def weight_gradient(self, x: Tensor, dy: Tensor, dw: Tensor) -> None:
        n, outputs, channels, k, _ = dw.shape
        images, _, height, _width = x.shape
        ho, wo = dy.shape[2:]
        padded = functional.pad(x, (self.padding,) * 4).contiguous()
        shifted = padded.unfold(3, wo, 1).transpose(2, 3).contiguous()  # (images, C, k, H + 2p, WO)
        dy = dy.contiguous()
        m, depth = images // n * ho * wo, k * k * channels
        tile: dict[str, Any] = {"BM": 32, "BK": block(depth, 128 if channels >= 64 else 64), "BO": block(outputs, 64)}
        tiles = triton.cdiv(depth, tile["BK"]) * triton.cdiv(outputs, tile["BO"])
        splits = max(1, min(triton.cdiv(m, 4 * tile["BM"]), triton.cdiv(self.splits_for, tiles * n)))
        span = triton.cdiv(triton.cdiv(m, splits), tile["BM"]) * tile["BM"]
        splits = triton.cdiv(m, span)
        part = x.new_empty(splits, n, outputs, depth)
        grid = (triton.cdiv(depth, tile["BK"]), triton.cdiv(outputs, tile["BO"]), splits * n)
        kernels.weight_gradient[grid](
            shifted,
            dy,
            part,
            m,
            span,
            n,
            C=channels,
            O=outputs,
            K=k,
            PIXELS=ho * wo,
            WO=wo,
            PLANE=(height + 2 * self.padding) * wo,
            PRECISION=precision(),
            HALF=self.half,
            num_warps=4,
            num_stages=3,
            **tile,
        )
        dw.copy_(part.sum(0).view(n, outputs, channels, k, k))


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
        SHIFT=shift is not None,
        PROX=use_prox,
        MEMORY=memory is not None,
        MASK=mask is not None,
        BLOCK=1024,
    )
