"""Kernels for stacks of clients on a GPU, in Triton: convolution with a client axis, pooling, and the whole local step in one pass.

Sums are made in a fixed order: the same inputs give the same bits. Sizes that the compiler should know are `constexpr`.
"""

import triton
import triton.language as tl


@triton.jit
def conv(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    M,
    H,
    W,
    HO,
    WO,
    P,
    C: tl.constexpr,
    O: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BO: tl.constexpr,
    PRECISION: tl.constexpr,
    HALF: tl.constexpr,
):
    """y[n, m, o] = Σ_k patch(x)[n, m, k] w[n, o, k] for one client n, a block of output pixels m and of channels o."""
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
        b = tl.load(w_ptr + k[:, None] + o[None, :] * (K * K * C), mask=(k < K * K * C)[:, None] & (o < O)[None, :], other=0.0)
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc) if HALF else tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(b_ptr + n * O + o, mask=o < O, other=0.0)[None, :]
    tl.store(y_ptr + n * M * O + m[:, None] * O + o[None, :], acc, mask=(m < M)[:, None] & (o < O)[None, :])


@triton.jit
def weight_gradient(
    x_ptr,
    dy_ptr,
    out_ptr,
    M,
    SPAN,
    N,
    STRIDE,
    C: tl.constexpr,
    O: tl.constexpr,
    K: tl.constexpr,
    PIXELS: tl.constexpr,
    WO: tl.constexpr,
    PLANE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BO: tl.constexpr,
    PRECISION: tl.constexpr,
    HALF: tl.constexpr,
):
    """out[split, n, o, k] = Σ_m patch(x)[n, k, m] dy[n, o, m] over the output pixels m of one split, k over (C, K, K).

    Tensor cores want the summed axis innermost in both factors, in aligned runs. So dy is channels-first, and x comes as `unroll`
    lays it out: then the patches' rows are plain runs of memory."""
    n = (tl.program_id(2) % N).to(tl.int64)
    split = tl.program_id(2) // N
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    c, tap = k // (K * K), k % (K * K)
    offset = (c * K + tap % K) * PLANE + (tap // K) * WO
    images = M // PIXELS
    x_ptr += n * images * C * K * PLANE
    dy_ptr += n * M * O
    acc = tl.zeros((BK, BO), dtype=tl.float32)
    for m0 in range(split * SPAN, min((split + 1) * SPAN, M), BM):
        m = m0 + tl.arange(0, BM)
        image, pixel = m // PIXELS, m % PIXELS
        a = tl.load(
            x_ptr + (image * (C * K * PLANE) + pixel)[None, :] + offset[:, None],
            mask=(k < K * K * C)[:, None] & (m < M)[None, :],
            other=0.0,
        )
        d = tl.load(
            dy_ptr + (image * (O * PIXELS) + pixel)[:, None] + (o * PIXELS)[None, :],
            mask=(m < M)[:, None] & (o < O)[None, :],
            other=0.0,
        )
        acc = tl.dot(a.to(tl.bfloat16), d.to(tl.bfloat16), acc) if HALF else tl.dot(a, d, acc, input_precision=PRECISION)
    out = out_ptr + (split * N + n) * STRIDE + o[None, :] * (K * K * C) + k[:, None]
    tl.store(out, acc, mask=(k < K * K * C)[:, None] & (o < O)[None, :])


@triton.jit
def unroll(
    x_ptr,
    y_ptr,
    sum_ptr,
    H,
    W,
    P,
    C,
    WO: tl.constexpr,
    PLANE: tl.constexpr,
    K: tl.constexpr,
    SUM: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """y[image, c, j, r, s] = x[image, r - P, s + j - P, c]: from channels-last to channels-first, padded, in K copies shifted by
    one column each and cut to the output's width. With K = 1 and no padding it is a change of memory order, and can leave the sums
    of its blocks' pixels behind, sum[block, c]."""
    blocks = tl.cdiv(PLANE, BP)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    p = tl.program_id(0) % blocks * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row, left = p // WO - P, p % WO - P
    x_ptr += image * H * W * C
    y_ptr += image * C * K * PLANE
    inside = (row >= 0) & (row < H) & (p < PLANE)
    for j in tl.static_range(K):
        col = left + j
        tile = tl.load(
            x_ptr + ((row * W + col) * C)[:, None] + c[None, :],
            mask=(inside & (col >= 0) & (col < W))[:, None] & (c < C)[None, :],
            other=0.0,
        )
        if SUM:
            tl.store(sum_ptr + tl.program_id(0).to(tl.int64) * C + c, tl.sum(tile, 0), mask=c < C)
        tl.store(y_ptr + ((c * K + j) * PLANE)[:, None] + p[None, :], tl.trans(tile), mask=(c < C)[:, None] & (p < PLANE)[None, :])


@triton.jit
def turn(
    w_ptr,
    y_ptr,
    STRIDE,
    O,
    C,
    TAPS: tl.constexpr,
    BACK: tl.constexpr,
    BO: tl.constexpr,
    BC: tl.constexpr,
):
    """y[n, o, tap, c] = w[n, o, c, tap], as `conv` reads weights; for the gradient of its input, y[n, c, last - tap, o]."""
    n = tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    w_ptr += n * STRIDE
    y_ptr += n * O * C * TAPS
    live = (o < O)[:, None] & (c < C)[None, :]
    for tap in tl.static_range(TAPS):
        tile = tl.load(w_ptr + (o[:, None] * C + c[None, :]) * TAPS + tap, mask=live, other=0.0)
        if BACK:
            back = y_ptr + (c[:, None] * TAPS + (TAPS - 1 - tap)) * O + o[None, :]
            tl.store(back, tl.trans(tile), mask=(c < C)[:, None] & (o < O)[None, :])
        else:
            tl.store(y_ptr + (o[:, None] * TAPS + tap) * C + c[None, :], tile, mask=live)


@triton.jit
def pool(x_ptr, y_ptr, where_ptr, TOTAL, H, W, HO, WO, C, BLOCK: tl.constexpr):
    """y = relu(max of 2×2), channels last; `where` is the winner's number, 4 for none (nothing above zero)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < TOTAL
    c, p = at % C, at // C
    col, row, image = p % WO, (p // WO) % HO, p // (WO * HO)
    base = ((image.to(tl.int64) * H + 2 * row) * W + 2 * col) * C + c
    a = tl.load(x_ptr + base, mask=live, other=0.0)
    b = tl.load(x_ptr + base + C, mask=live, other=0.0)
    d = tl.load(x_ptr + base + W * C, mask=live, other=0.0)
    e = tl.load(x_ptr + base + W * C + C, mask=live, other=0.0)
    best, which = a, tl.zeros_like(at)
    which = tl.where((b > best) | (b != b), 1, which)
    best = tl.where((b > best) | (b != b), b, best)
    which = tl.where((d > best) | (d != d), 2, which)
    best = tl.where((d > best) | (d != d), d, best)
    which = tl.where((e > best) | (e != e), 3, which)
    best = tl.where((e > best) | (e != e), e, best)
    which = tl.where(best <= 0.0, 4, which)
    tl.store(y_ptr + at, tl.where(best <= 0.0, 0.0, best), mask=live)
    tl.store(where_ptr + at, which.to(tl.int8), mask=live)


@triton.jit
def unpool(dy_ptr, where_ptr, dx_ptr, TOTAL, H, W, HO, WO, C, BLOCK: tl.constexpr):
    """The gradient of `pool`'s input: every input pixel asks whether it was its window's winner."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < TOTAL
    c, p = at % C, at // C
    col, row, image = p % W, (p // W) % H, p // (W * H)
    inside = live & (col // 2 < WO) & (row // 2 < HO)
    window = ((image.to(tl.int64) * HO + row // 2) * WO + col // 2) * C + c
    which = tl.load(where_ptr + window, mask=inside, other=4)
    dy = tl.load(dy_ptr + window, mask=inside, other=0.0)
    tl.store(dx_ptr + at, tl.where(which == (row % 2) * 2 + col % 2, dy, 0.0), mask=live)


@triton.jit
def step(
    w_ptr,
    g_ptr,
    rate_ptr,
    own_ptr,
    prox_ptr,
    start_ptr,
    shift_ptr,
    memory_ptr,
    mask_ptr,
    D,
    ROW,
    SHIFT: tl.constexpr,
    PROX: tl.constexpr,
    MEMORY: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """w[n] -= rate[n] (own g[n] + shift + prox (w[n] - start) - memory[n]) mask, in one pass over the weights, whose rows
    begin every ROW numbers."""
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < D
    w = tl.load(w_ptr + n * ROW + at, mask=live)
    d = tl.load(own_ptr) * tl.load(g_ptr + n * ROW + at, mask=live)
    if SHIFT:
        d += tl.load(shift_ptr + at, mask=live)
    if PROX:
        d += tl.load(prox_ptr) * (w - tl.load(start_ptr + at, mask=live))
    if MEMORY:
        d -= tl.load(memory_ptr + n * D + at, mask=live)
    if MASK:
        d *= tl.load(mask_ptr + at, mask=live)
    tl.store(w_ptr + n * ROW + at, w - tl.load(rate_ptr + n) * d, mask=live)
