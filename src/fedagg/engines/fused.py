"""Kernels for stacks of clients on a GPU, in Triton: convolution with a client axis, and the whole local step in one pass.

Libraries run n clients' convolutions as a grouped convolution or one after the other; neither fills a large GPU with the small images
of federated learning. Here a client is one more axis of the grid, and the patches of an image are gathered on the fly (implicit
matrix product), so no patch is ever written to memory. Sums are made in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _conv(x_ptr, w_ptr, b_ptr, y_ptr, M, H, W, HO, WO, P,
          C: tl.constexpr, O: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
          BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """y[n, m, o] = Σ_k patch(x)[n, m, k] w[n, k, o] for one client n, a block of output pixels m and of channels o."""
    n = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    image, pixel = m // (HO * WO), m % (HO * WO)
    row, col = pixel // WO - P, pixel % WO - P
    x_ptr += n * (M // (HO * WO)) * H * W * C
    w_ptr += n * (K * K * C) * O
    base = (image * H + row) * W + col
    acc = tl.zeros((BM, BO), dtype=tl.float32)
    for k0 in range(0, K * K * C, BK):
        k = k0 + tl.arange(0, BK)
        tap, c = k // C, k % C
        i, j = tap // K, tap % K
        r, s = row[:, None] + i[None, :], col[:, None] + j[None, :]
        inside = (r >= 0) & (r < H) & (s >= 0) & (s < W) & (k < K * K * C)[None, :] & (m < M)[:, None]
        a = tl.load(x_ptr + (base[:, None] + (i * W + j)[None, :]) * C + c[None, :], mask=inside, other=0.0)
        b = tl.load(w_ptr + k[:, None] * O + o[None, :], mask=(k < K * K * C)[:, None] & (o < O)[None, :], other=0.0)
        if HALF:
            acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(b_ptr + n * O + o, mask=o < O, other=0.0)[None, :]
    tl.store(y_ptr + n * M * O + m[:, None] * O + o[None, :], acc, mask=(m < M)[:, None] & (o < O)[None, :])


@triton.jit
def _weight_gradient(x_ptr, dy_ptr, part_ptr, M, SPAN, H, W, HO, WO, P, N,
                     C: tl.constexpr, O: tl.constexpr, K: tl.constexpr,
                     BM: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """part[split, n, k, o] = Σ_m patch(x)[n, m, k] dy[n, m, o] over the output pixels m of one split."""
    n = (tl.program_id(2) % N).to(tl.int64)
    split = tl.program_id(2) // N
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    tap, c = k // C, k % C
    i, j = tap // K, tap % K
    x_ptr += n * (M // (HO * WO)) * H * W * C
    dy_ptr += n * M * O
    acc = tl.zeros((BK, BO), dtype=tl.float32)
    for m0 in range(split * SPAN, min((split + 1) * SPAN, M), BM):
        m = m0 + tl.arange(0, BM)
        image, pixel = m // (HO * WO), m % (HO * WO)
        row, col = pixel // WO - P, pixel % WO - P
        r, s = row[None, :] + i[:, None], col[None, :] + j[:, None]
        inside = (r >= 0) & (r < H) & (s >= 0) & (s < W) & (k < K * K * C)[:, None] & (m < M)[None, :]
        at = ((image * H + row) * W + col)[None, :] + (i * W + j)[:, None]
        a = tl.load(x_ptr + at * C + c[:, None], mask=inside, other=0.0)
        d = tl.load(dy_ptr + m[:, None] * O + o[None, :], mask=(m < M)[:, None] & (o < O)[None, :], other=0.0)
        if HALF:
            acc = tl.dot(a.to(tl.bfloat16), d.to(tl.bfloat16), acc)
        else:
            acc = tl.dot(a, d, acc, input_precision=PRECISION)
    out = part_ptr + (split * N + n) * (K * K * C) * O + k[:, None] * O + o[None, :]
    tl.store(out, acc, mask=(k < K * K * C)[:, None] & (o < O)[None, :])


@triton.jit
def _step(w_ptr, g_ptr, rate_ptr, own_ptr, prox_ptr, start_ptr, shift_ptr, memory_ptr, mask_ptr, D,
          SHIFT: tl.constexpr, PROX: tl.constexpr, MEMORY: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """w[n] -= rate[n] (own g[n] + shift + prox (w[n] - start) - memory[n]) mask, in one pass over the weights."""
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < D
    w = tl.load(w_ptr + n * D + at, mask=live)
    d = tl.load(own_ptr) * tl.load(g_ptr + n * D + at, mask=live)
    if SHIFT:
        d += tl.load(shift_ptr + at, mask=live)
    if PROX:
        d += tl.load(prox_ptr) * (w - tl.load(start_ptr + at, mask=live))
    if MEMORY:
        d -= tl.load(memory_ptr + n * D + at, mask=live)
    if MASK:
        d *= tl.load(mask_ptr + at, mask=live)
    tl.store(w_ptr + n * D + at, w - tl.load(rate_ptr + n) * d, mask=live)


def precision() -> str:
    """tf32 where torch allows it for its own products, plain float32 elsewhere."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def block(size: int, most: int) -> int:
    return int(max(16, min(most, triton.next_power_of_2(size))))


class FusedConvolution:
    """Convolution of n clients' images with n clients' filters."""

    half = False  # products in bfloat16, sums in float32
    splits_for = 528  # blocks that keep a large GPU busy

    def __init__(self, n: int, padding: int) -> None:
        self.n, self.padding = n, padding

    def convolve(self, x: Tensor, w: Tensor, b: Tensor | None, padding: int) -> Tensor:
        """w (n, k, k, C, O), contiguous."""
        n, k, _, channels, outputs = w.shape
        images, _, height, width = x.shape
        ho, wo = height + 2 * padding - k + 1, width + 2 * padding - k + 1
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.empty(images, outputs, ho, wo, device=x.device, memory_format=torch.channels_last)
        m = images // n * ho * wo
        tile: dict[str, Any] = {"BM": 128, "BK": block(k * k * channels, 32), "BO": block(outputs, 64)}
        grid = (triton.cdiv(m, tile["BM"]), triton.cdiv(outputs, tile["BO"]), n)
        _conv[grid](x, w, b if b is not None else w, y, m, height, width, ho, wo, padding, C=channels, O=outputs, K=k,
                    BIAS=b is not None, PRECISION=precision(), HALF=self.half, num_warps=4, num_stages=3, **tile)  # fmt: skip
        return y

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        bias = b.contiguous() if b is not None else None
        return self.convolve(x, w.permute(0, 3, 4, 2, 1).contiguous(), bias, self.padding)

    def input_gradient(self, x: Tensor, dy: Tensor, w: Tensor) -> Tensor:
        turned = w.flip(3, 4).permute(0, 3, 4, 1, 2).contiguous()
        return self.convolve(dy, turned, None, w.shape[-1] - 1 - self.padding)

    def weight_gradient(self, x: Tensor, dy: Tensor, dw: Tensor) -> None:
        n, outputs, channels, k, _ = dw.shape
        images, _, height, width = x.shape
        ho, wo = dy.shape[2:]
        x, dy = x.contiguous(memory_format=torch.channels_last), dy.contiguous(memory_format=torch.channels_last)
        m, depth = images // n * ho * wo, k * k * channels
        tile: dict[str, Any] = {"BM": 32, "BK": block(depth, 64), "BO": block(outputs, 64)}
        tiles = triton.cdiv(depth, tile["BK"]) * triton.cdiv(outputs, tile["BO"])
        splits = max(1, min(triton.cdiv(m, 4 * tile["BM"]), triton.cdiv(self.splits_for, tiles * n)))
        span = triton.cdiv(triton.cdiv(m, splits), tile["BM"]) * tile["BM"]
        splits = triton.cdiv(m, span)
        part = x.new_empty(splits, n, depth, outputs)
        grid = (triton.cdiv(depth, tile["BK"]), triton.cdiv(outputs, tile["BO"]), splits * n)
        _weight_gradient[grid](x, dy, part, m, span, height, width, ho, wo, self.padding, n, C=channels, O=outputs, K=k,
                               PRECISION=precision(), HALF=self.half, num_warps=4, num_stages=3, **tile)  # fmt: skip
        dw.copy_(part.sum(0).view(n, k, k, channels, outputs).permute(0, 4, 3, 1, 2))


def fused_step(w: Tensor, g: Tensor, rate: Tensor, own: Tensor, prox: Tensor, start: Tensor, shift: Tensor | None,
               memory: Tensor | None, mask: Tensor | None, use_prox: bool) -> None:  # fmt: skip
    n, d = w.shape
    grid = (triton.cdiv(d, 1024), n)
    none = start
    _step[grid](w, g, rate, own, prox, start, shift if shift is not None else none, memory if memory is not None else none,
                mask if mask is not None else none, d, SHIFT=shift is not None, PROX=use_prox, MEMORY=memory is not None,
                MASK=mask is not None, BLOCK=1024)  # fmt: skip
