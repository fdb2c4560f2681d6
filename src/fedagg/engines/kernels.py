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
    where_ptr,
    M,
    H,
    W,
    HO,
    WO,
    P,
    ROW,
    C: tl.constexpr,
    O: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    SPREAD: tl.constexpr,
    BIAS: tl.constexpr,
    POOL: tl.constexpr,
    BACK: tl.constexpr,
    ADD: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[n, m, o] = Σ_k patch(x)[n, m, k] w[n, o, k] for one client n, a block of output pixels m and of channels o. Patches begin
    every STRIDE pixels. With SPREAD, the image's pixels are that far apart, with zeros between. With POOL, the four pixels of each
    2×2 window follow each other, and only relu(max) of them is stored, as by `pool`. With BACK, y is the gradient of the input of a
    convolution with the filters w[n, c, tap, o]: they take the place of w[n, o, last - tap, c]. With ADD, the result is added to y.
    Clients' biases begin every ROW numbers."""
    n = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    if POOL:
        image, pixel = m // (4 * HO * WO), m % (4 * HO * WO)  # HO and WO are those of the pool
        row, col = pixel // 4 // WO * 2 + pixel % 4 // 2, pixel // 4 % WO * 2 + pixel % 2
        x_ptr += n * (M // (4 * HO * WO)) * H * W * C
    else:
        image, pixel = m // (HO * WO), m % (HO * WO)
        row, col = pixel // WO, pixel % WO
        x_ptr += n * (M // (HO * WO)) * H * W * C
    row, col = row * STRIDE - P, col * STRIDE - P
    w_ptr += n * (K * K * C) * O
    acc = tl.zeros((BM, BO), dtype=tl.float32)
    for k0 in range(0, K * K * C, BK):
        k = k0 + tl.arange(0, BK)
        if C % BK == 0:  # the whole block is at one tap: whether it is inside depends only on the pixel
            tap = k0 // C
            i, j = tap // K, tap % K
            r, s = row + i, col + j
            inside = (r >= 0) & (r < SPREAD * H) & (s >= 0) & (s < SPREAD * W) & (m < M)
            if SPREAD > 1:
                inside = inside & (r % SPREAD == 0) & (s % SPREAD == 0)
            at = (image * H + r // SPREAD) * W + s // SPREAD
            # A hint: without it the compiler loads one number at a time, and takes two to five times as long.
            c = tl.multiple_of(k0 % C + tl.arange(0, BK), BK)
            a = tl.load(x_ptr + (at * C)[:, None] + c[None, :], mask=inside[:, None], other=0.0)
        else:
            tap, c = k // C, k % C
            i, j = tap // K, tap % K
            r, s = row[:, None] + i[None, :], col[:, None] + j[None, :]
            inside = (r >= 0) & (r < SPREAD * H) & (s >= 0) & (s < SPREAD * W) & (k < K * K * C)[None, :] & (m < M)[:, None]
            if SPREAD > 1:
                inside = inside & (r % SPREAD == 0) & (s % SPREAD == 0)
            at = (image[:, None] * H + r // SPREAD) * W + s // SPREAD
            a = tl.load(x_ptr + at * C + c[None, :], mask=inside, other=0.0)
        place = ((c * (K * K) + K * K - 1 - tap) * O)[:, None] + o[None, :] if BACK else k[:, None] + o[None, :] * (K * K * C)
        b = tl.load(w_ptr + place, mask=(k < K * K * C)[:, None] & (o < O)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(b_ptr + n * ROW + o, mask=o < O, other=0.0)[None, :]
    if POOL:
        best, which = tl.max(tl.where(acc != acc, float("inf"), acc).reshape(BM // 4, 4, BO), 1, return_indices=True)
        m = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
        at = n * (M // 4) * O + m[:, None] * O + o[None, :]
        inside = (m < M // 4)[:, None] & (o < O)[None, :]
        tl.store(y_ptr + at, tl.where(best <= 0.0, 0.0, best), mask=inside)
        tl.store(where_ptr + at, tl.where(best <= 0.0, 4, which).to(tl.int8), mask=inside)
    else:
        at = y_ptr + n * M * O + m[:, None] * O + o[None, :]
        live = (m < M)[:, None] & (o < O)[None, :]
        if ADD:
            acc += tl.load(at, mask=live, other=0.0).to(tl.float32)
        tl.store(at, acc, mask=live)


@triton.jit
def weight_gradient(
    x_ptr,
    dy_ptr,
    out_ptr,
    M,
    SPAN,
    N,
    ROW,
    C: tl.constexpr,
    O: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    PIXELS: tl.constexpr,
    WO: tl.constexpr,
    PLANE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[split, n, o, k] = Σ_m patch(x)[n, k, m] dy[n, o, m] over the output pixels m of one split, k over (C, K, K).

    Tensor cores need the summed axis innermost in both factors, in aligned runs. So dy is channels-first, and x is laid out by
    `unroll`: then the rows of patches are contiguous."""
    n = (tl.program_id(2) % N).to(tl.int64)
    split = tl.program_id(2) // N
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    c, tap = k // (K * K), k % (K * K)
    i, j = tap // K, tap % K
    offset = (c * K + j) * PLANE + i % STRIDE * (PLANE // STRIDE) + i // STRIDE * WO
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
        acc = tl.dot(a, d, acc, input_precision=PRECISION)
    out = out_ptr + (split * N + n) * ROW + o[None, :] * (K * K * C) + k[:, None]
    tl.store(out, acc, mask=(k < K * K * C)[:, None] & (o < O)[None, :])


@triton.jit
def weight_gradient_of_rows(
    x_ptr,
    dy_ptr,
    out_ptr,
    M,
    SPAN,
    N,
    ROW,
    H,
    W,
    P,
    C: tl.constexpr,
    O: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    LAST: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `weight_gradient`, with x and dy in channels-last order: with 16 bits, tensor cores accept the summed axis anywhere. A
    block has channels of one tap; C is a multiple of BK. With LAST, k is over (K, K, C), and what is stored is in runs."""
    n = (tl.program_id(2) % N).to(tl.int64)
    split = tl.program_id(2) // N
    tap = tl.program_id(0) // (C // BK)
    c = tl.program_id(0) % (C // BK) * BK + tl.arange(0, BK)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    i, j = tap // K - P, tap % K - P
    x_ptr += n * (M // (HO * WO)) * H * W * C
    dy_ptr += n * M * O
    acc = tl.zeros((BK, BO), dtype=tl.float32)
    for m0 in range(split * SPAN, min((split + 1) * SPAN, M), BM):
        m = m0 + tl.arange(0, BM)
        image, pixel = m // (HO * WO), m % (HO * WO)
        r, s = pixel // WO * STRIDE + i, pixel % WO * STRIDE + j
        inside = (r >= 0) & (r < H) & (s >= 0) & (s < W) & (m < M)
        a = tl.load(x_ptr + (((image * H + r) * W + s) * C)[:, None] + c[None, :], mask=inside[:, None], other=0.0)
        d = tl.load(dy_ptr + (m * O)[:, None] + o[None, :], mask=(m < M)[:, None] & (o < O)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), d, acc, input_precision=PRECISION)
    k = tap * C + c if LAST else c * (K * K) + tap
    out = out_ptr + (split * N + n) * ROW + o[None, :] * (K * K * C) + k[:, None]
    tl.store(out, acc, mask=(o < O)[None, :])


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
    STRIDE: tl.constexpr,
    SUM: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """y[image, c, j, q, r, s] = x[image, r STRIDE + q - P, s STRIDE + j - P, c]: from channels-last to channels-first, padded, in K
    copies shifted by one column each. Of these every STRIDE-th column is kept, and rows that are STRIDE apart are put together.
    With K = 1 and no padding it only changes the memory order, and can store the sums over its blocks' pixels, sum[block, c]."""
    blocks = tl.cdiv(PLANE, BP)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    p = tl.program_id(0) % blocks * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    rows: tl.constexpr = PLANE // (WO * STRIDE)
    row, left = p // WO % rows * STRIDE + p // WO // rows - P, p % WO * STRIDE - P
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
            tl.store(sum_ptr + tl.program_id(0).to(tl.int64) * C + c, tl.sum(tile.to(tl.float32), 0), mask=c < C)
        tl.store(y_ptr + ((c * K + j) * PLANE)[:, None] + p[None, :], tl.trans(tile), mask=(c < C)[:, None] & (p < PLANE)[None, :])


@triton.jit
def turn(
    w_ptr,
    y_ptr,
    z_ptr,
    STRIDE,
    O,
    C,
    TAPS: tl.constexpr,
    BACK: tl.constexpr,
    BO: tl.constexpr,
    BC: tl.constexpr,
    BT: tl.constexpr,
):
    """y[n, o, tap, c] = w[n, o, c, tap], as `conv` reads weights; with BACK, also z[n, c, last - tap, o] for the gradient of its
    input. A tile is read in the order of w and turned on the chip, so that reads and writes are in runs; taps are filled up to BT,
    a power of two."""
    n = tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    tap = tl.arange(0, BT)
    w_ptr += n * STRIDE
    y_ptr += n * O * C * TAPS
    at = (o[:, None, None] * C + c[None, :, None]) * TAPS + tap[None, None, :]
    live = (o < O)[:, None, None] & (c < C)[None, :, None] & (tap < TAPS)[None, None, :]
    tile = tl.load(w_ptr + at, mask=live, other=0.0).to(y_ptr.dtype.element_ty)
    at = (o[:, None, None] * TAPS + tap[None, :, None]) * C + c[None, None, :]
    live = (o < O)[:, None, None] & (tap < TAPS)[None, :, None] & (c < C)[None, None, :]
    tl.store(y_ptr + at, tl.permute(tile, (0, 2, 1)), mask=live)
    if BACK:
        z_ptr += n * O * C * TAPS
        at = (c[:, None, None] * TAPS + (TAPS - 1 - tap)[None, :, None]) * O + o[None, None, :]
        live = (c < C)[:, None, None] & (tap < TAPS)[None, :, None] & (o < O)[None, None, :]
        tl.store(z_ptr + at, tl.permute(tile, (1, 2, 0)), mask=live)


@triton.jit
def pool(x_ptr, y_ptr, where_ptr, p_ptr, q_ptr, TOTAL, H, W, HO, WO, C, IMAGES, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """y = relu(max of 2×2), channels last; `where` is the winner's number, 4 for none (nothing above zero). With NORM, of p x + q,
    with p and q for each client and channel; a client has IMAGES images."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < TOTAL
    c, pixel = at % C, at // C
    col, row, image = pixel % WO, (pixel // WO) % HO, pixel // (WO * HO)
    base = ((image.to(tl.int64) * H + 2 * row) * W + 2 * col) * C + c
    a = tl.load(x_ptr + base, mask=live, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + base + C, mask=live, other=0.0).to(tl.float32)
    d = tl.load(x_ptr + base + W * C, mask=live, other=0.0).to(tl.float32)
    e = tl.load(x_ptr + base + W * C + C, mask=live, other=0.0).to(tl.float32)
    if NORM:
        p = tl.load(p_ptr + image // IMAGES * C + c, mask=live, other=0.0)
        q = tl.load(q_ptr + image // IMAGES * C + c, mask=live, other=0.0)
        a, b, d, e = p * a + q, p * b + q, p * d + q, p * e + q
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
    """The gradient of `pool`'s input: every input pixel checks whether it was its window's winner."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < TOTAL
    c, p = at % C, at // C
    col, row, image = p % W, (p // W) % H, p // (W * H)
    inside = live & (col // 2 < WO) & (row // 2 < HO)
    window = ((image.to(tl.int64) * HO + row // 2) * WO + col // 2) * C + c
    which = tl.load(where_ptr + window, mask=inside, other=4)
    dy = tl.load(dy_ptr + window, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, tl.where(which == (row % 2) * 2 + col % 2, dy, 0.0), mask=live)


@triton.jit
def unpool_turned(
    dy_ptr,
    where_ptr,
    dx_ptr,
    turned_ptr,
    sum_ptr,
    H,
    W,
    HO,
    WO,
    C,
    BOTH: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """As `unpool`, with the gradient in channels-first order, for `weight_gradient`, and its sums over blocks of pixels, sum[block,
    c]; with BOTH, in channels-last order too."""
    blocks = tl.cdiv(H * W, BP)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    p = tl.program_id(0) % blocks * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row, col = p // W, p % W
    live = (p < H * W)[:, None] & (c < C)[None, :]
    inside = live & ((row // 2 < HO) & (col // 2 < WO))[:, None]
    window = (((image * HO + row // 2) * WO + col // 2) * C)[:, None] + c[None, :]
    which = tl.load(where_ptr + window, mask=inside, other=4)
    dy = tl.load(dy_ptr + window, mask=inside, other=0.0)
    dx = tl.where(which == (row % 2 * 2 + col % 2)[:, None], dy, 0.0)
    tl.store(sum_ptr + tl.program_id(0).to(tl.int64) * C + c, tl.sum(dx.to(tl.float32), 0), mask=c < C)
    if BOTH:
        tl.store(dx_ptr + ((image * H * W + p) * C)[:, None] + c[None, :], dx, mask=live)
    out = turned_ptr + ((image * C + c) * (H * W))[:, None] + p[None, :]
    tl.store(out, tl.trans(dx), mask=(c < C)[:, None] & (p < H * W)[None, :])


@triton.jit
def pool_windows(x_ptr, y_ptr, where_ptr, TOTAL, H, W, HO, WO, C, P, K: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """y = max over windows of K×K pixels, one every STRIDE pixels, the first P outside; `where` is the winner's number there."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < TOTAL
    c, pixel = at % C, at // C
    col, row, image = pixel % WO * STRIDE - P, (pixel // WO) % HO * STRIDE - P, pixel // (WO * HO)
    base = ((image.to(tl.int64) * H + row) * W + col) * C + c
    best, which = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros_like(at)
    for tap in tl.static_range(K * K):
        i, j = tap // K, tap % K
        inside = live & (row + i >= 0) & (row + i < H) & (col + j >= 0) & (col + j < W)
        x = tl.load(x_ptr + base + (i * W + j) * C, mask=inside, other=float("-inf")).to(tl.float32)
        wins = (x > best) | (x != x)
        which = tl.where(wins, tap, which)
        best = tl.where(wins, x, best)
    tl.store(y_ptr + at, best, mask=live)
    tl.store(where_ptr + at, which.to(tl.int8), mask=live)


@triton.jit
def unpool_windows(
    dy_ptr,
    where_ptr,
    dx_ptr,
    M,
    H,
    W,
    HO,
    WO,
    C,
    P,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    ADD: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradient of `pool_windows`' input: every input pixel checks in turn, for all windows over it, whether it was the winner.
    With ADD, the result is added to dx. (If windows added to pixels instead, the order would not be fixed.)"""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    live = (m < M)[:, None] & (c < C)[None, :]
    col, row, image = m % W + P, (m // W) % H + P, m // (W * H)
    dx = tl.zeros((BM, BC), dtype=tl.float32)
    over: tl.constexpr = (K + STRIDE - 1) // STRIDE  # windows that can contain a pixel, in each direction
    for number in tl.static_range(over * over):
        high, wide = row // STRIDE - number // over, col // STRIDE - number % over
        i, j = row - high * STRIDE, col - wide * STRIDE
        inside = (high >= 0) & (high < HO) & (i < K) & (wide >= 0) & (wide < WO) & (j < K)
        window = (((image.to(tl.int64) * HO + high) * WO + wide) * C)[:, None] + c[None, :]
        which = tl.load(where_ptr + window, mask=live & inside[:, None], other=-1)
        dy = tl.load(dy_ptr + window, mask=live & inside[:, None], other=0.0).to(tl.float32)
        dx += tl.where(which == (i * K + j)[:, None], dy, 0.0)
    at = dx_ptr + (m.to(tl.int64) * C)[:, None] + c[None, :]
    if ADD:
        dx += tl.load(at, mask=live, other=0.0).to(tl.float32)
    tl.store(at, dx, mask=live)


@triton.jit
def pool_rows(x_ptr, y_ptr, where_ptr, M, H, C, W: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """As `pool_windows`, for windows of 3×3 around every pixel. Each program goes down its columns: a row is read three times, once
    for each shift, and not nine times. M columns of all images."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    live = (m < M)[:, None] & (c < C)[None, :]
    col = (m % W)[:, None]
    first = ((m // W).to(tl.int64) * (H * W) + m % W) * C
    # Each begins with a tensor of its own: Triton 3.6 confuses variables that begin a loop with the same one.
    above, won_above = tl.full((BM, BC), float("-inf"), tl.float32), tl.zeros((BM, BC), tl.int32)
    middle, won_middle = tl.full((BM, BC), float("-inf"), tl.float32), tl.zeros((BM, BC), tl.int32)
    for row in range(H + 1):  # the window around the row before ends here
        at = (first + row * (W * C))[:, None] + c[None, :]
        there, before = live & (row + 0 * col < H), live & (row + 0 * col > 0)
        below, won = tl.full((BM, BC), float("-inf"), tl.float32), tl.zeros((BM, BC), tl.int32)
        for j in tl.static_range(3):
            inside = there & (col + j >= 1) & (col + j <= W)
            x = tl.load(x_ptr + at + (j - 1) * C, mask=inside, other=float("-inf")).to(tl.float32)
            wins = (x > below) | (x != x)
            below, won = tl.where(wins, x, below), tl.where(wins, j, won)
        wins = (middle > above) | (middle != middle)
        best, which = tl.where(wins, middle, above), tl.where(wins, 3 + won_middle, won_above)
        wins = (below > best) | (below != below)
        best, which = tl.where(wins, below, best), tl.where(wins, 6 + won, which)
        tl.store(y_ptr + at - W * C, best, mask=before)
        tl.store(where_ptr + at - W * C, which.to(tl.int8), mask=before)
        above, won_above, middle, won_middle = middle, won_middle, below, won


@triton.jit
def unpool_rows(dy_ptr, where_ptr, dx_ptr, M, H, C, W: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """The gradient of `pool_rows`' input: a row of windows is read three times, and adds to the rows of pixels above, at and below
    it. With ADD, the result is added to dx."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    live = (m < M)[:, None] & (c < C)[None, :]
    col = (m % W)[:, None]
    first = ((m // W).to(tl.int64) * (H * W) + m % W) * C
    above = tl.zeros((BM, BC), dtype=tl.float32)
    middle = tl.zeros((BM, BC), dtype=tl.float32)
    for row in range(H + 1):  # the pixels of the row before are complete here
        at = (first + row * (W * C))[:, None] + c[None, :]
        there, before = live & (row + 0 * col < H), live & (row + 0 * col > 0)
        below = tl.zeros((BM, BC), dtype=tl.float32)
        for j in tl.static_range(3):  # the windows at column col + 1 - j
            inside = there & (col + 1 >= j) & (col + 1 - j < W)
            which = tl.load(where_ptr + at + (1 - j) * C, mask=inside, other=-1)
            dy = tl.load(dy_ptr + at + (1 - j) * C, mask=inside, other=0.0).to(tl.float32)
            above += tl.where(which == j, dy, 0.0)
            middle += tl.where(which == 3 + j, dy, 0.0)
            below += tl.where(which == 6 + j, dy, 0.0)
        out = dx_ptr + at - W * C
        if ADD:
            above += tl.load(out, mask=before, other=0.0).to(tl.float32)
        tl.store(out, above, mask=before)
        above, middle = middle, below


@triton.jit
def moments(x_ptr, live_ptr, a_ptr, b_ptr, M, SPAN, PIXELS, C, XC, N, BM: tl.constexpr, BC: tl.constexpr):
    """Sums over one span of client n's pixels, without padding: a[span, n, c] of d = x - near and b[span, n, c] of d². `near` is a
    value near the mean, here the first pixel's: it keeps the digits that a difference of large sums would lose. Pixels of x are XC
    numbers apart, because x may be a part of more channels."""
    n = tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    span = tl.program_id(1)
    x_ptr += n * M * XC
    near = tl.load(x_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    live_ptr += n * (M // PIXELS)
    a = tl.zeros((BM, BC), dtype=tl.float32)
    b = tl.zeros((BM, BC), dtype=tl.float32)
    for m0 in range(span * SPAN, min((span + 1) * SPAN, M), BM):
        m = m0 + tl.arange(0, BM)
        live = tl.load(live_ptr + m // PIXELS, mask=m < M, other=0.0)
        x = tl.load(x_ptr + m[:, None] * XC + c[None, :], mask=(m < M)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        d = (x - near[None, :]) * live[:, None]
        a += d
        b += d * d
    out = (span.to(tl.int64) * N + n) * C + c
    tl.store(a_ptr + out, tl.sum(a, 0), mask=c < C)
    tl.store(b_ptr + out, tl.sum(b, 0), mask=c < C)


@triton.jit
def totals(a_ptr, b_ptr, n, c, SPANS, C, N, BS: tl.constexpr, BC: tl.constexpr):
    """The sums over spans of client n's parts a and b. BS spans are loaded at a time: a load takes far longer than a sum."""
    a = tl.zeros((BS, BC), dtype=tl.float32)
    b = tl.zeros((BS, BC), dtype=tl.float32)
    for s0 in range(0, SPANS, BS):
        span = s0 + tl.arange(0, BS)
        inside = (span < SPANS)[:, None] & (c < C)[None, :]
        at = ((span * N + n) * C)[:, None] + c[None, :]
        a += tl.load(a_ptr + at, mask=inside, other=0.0)
        b += tl.load(b_ptr + at, mask=inside, other=0.0)
    return tl.sum(a, 0), tl.sum(b, 0)


@triton.jit
def settle(
    a_ptr,
    b_ptr,
    near_ptr,
    NEAR,
    size_ptr,
    w_ptr,
    bias_ptr,
    ROW,
    mean_ptr,
    var_ptr,
    seen_ptr,
    KEPT,
    out_ptr,
    SPANS,
    PIXELS,
    C,
    N,
    EPS,
    MOMENTUM,
    BS: tl.constexpr,
    BC: tl.constexpr,
):
    """Turn the sums of `moments` into what normalises client n: out[0] centre, [1] 1 / deviation, [2] p and [3] q of y = p x + q.
    Also update its running statistics, whose rows begin every KEPT numbers."""
    n = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    first = seen_ptr + n * KEPT + c * 0
    # All loads before the sums: those end in a barrier, and what is loaded after it is waited for once more.
    size = tl.load(size_ptr + n)
    near = tl.load(near_ptr + n * NEAR + c, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + n * ROW + c, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + n * ROW + c, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + n * KEPT + c, mask=inside, other=0.0)
    kept = tl.load(var_ptr + n * KEPT + c, mask=inside, other=0.0)
    seen = tl.load(first, mask=c == 0, other=0.0)
    a, b = totals(a_ptr, b_ptr, n, c, SPANS, C, N, BS, BC)
    count = tl.maximum(size * PIXELS, 1.0)
    off = a / count
    var = tl.maximum(b / count - off * off, 0.0)
    centre = near + off
    scale = 1.0 / tl.sqrt(var + EPS)
    gain = w * scale
    out = out_ptr + n * C + c
    tl.store(out, centre, mask=inside)
    tl.store(out + N * C, scale, mask=inside)
    tl.store(out + 2 * N * C, gain, mask=inside)
    tl.store(out + 3 * N * C, bias - centre * gain, mask=inside)
    active = tl.where(size > 0, 1.0, 0.0)
    pull = MOMENTUM * active
    tl.store(mean_ptr + n * KEPT + c, mean + pull * (centre - mean), mask=inside)
    free = count / tl.maximum(count - 1.0, 1.0)
    tl.store(var_ptr + n * KEPT + c, kept + pull * (var * free - kept), mask=inside)
    tl.store(first, seen + active, mask=c == 0)


@triton.jit
def incoming_gradient(dy_ptr, where_ptr, x, n, m, c, p, q, inside, M, H, W, C, DC, THEN: tl.constexpr):
    """The gradient of a normalised pixel: as received (THEN = 0), through a ReLU (1), or through ReLU and pooling (2)."""
    if THEN == 2:
        image, row, col = m // (H * W), m // W % H, m % W
        high, wide = H // 2, W // 2
        window = (n * (M // (H * W)) + image) * (high * wide) + row // 2 * wide + col // 2
        at = window[:, None] * C + c[None, :]
        inside = inside & ((row // 2 < high) & (col // 2 < wide))[:, None]
        which = tl.load(where_ptr + at, mask=inside, other=4)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.where(which == ((row % 2) * 2 + col % 2)[:, None], dy, 0.0)
    else:
        dy = tl.load(dy_ptr + n * M * DC + m[:, None] * DC + c[None, :], mask=inside, other=0.0).to(tl.float32)
        if THEN == 1:
            dy = tl.where(p[None, :] * x + q[None, :] <= 0.0, 0.0, dy)
    return dy


@triton.jit
def gradient_moments(
    x_ptr,
    dy_ptr,
    where_ptr,
    kept_ptr,
    a_ptr,
    b_ptr,
    M,
    SPAN,
    H,
    W,
    C,
    XC,
    DC,
    N,
    THEN: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Sums over one span of client n's pixels: a of dy, b of dy (x - centre). Padding sends no gradient. Pixels are XC and DC
    numbers apart."""
    n = tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    span = tl.program_id(1)
    kept = kept_ptr + n * C + c
    centre = tl.load(kept, mask=c < C, other=0.0)
    p = tl.load(kept + 2 * N * C, mask=c < C, other=0.0)
    q = tl.load(kept + 3 * N * C, mask=c < C, other=0.0)
    a = tl.zeros((BM, BC), dtype=tl.float32)
    b = tl.zeros((BM, BC), dtype=tl.float32)
    # In stages, so that the next tiles are on their way: sums of two tiles take so many registers that few programs run at once.
    for m0 in tl.range(span * SPAN, min((span + 1) * SPAN, M), BM, num_stages=3):
        m = m0 + tl.arange(0, BM)
        inside = (m < M)[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + n * M * XC + m[:, None] * XC + c[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = incoming_gradient(dy_ptr, where_ptr, x, n, m, c, p, q, inside, M, H, W, C, DC, THEN)
        a += dy
        b += dy * (x - centre[None, :])
    out = (span.to(tl.int64) * N + n) * C + c
    tl.store(a_ptr + out, tl.sum(a, 0), mask=c < C)
    tl.store(b_ptr + out, tl.sum(b, 0), mask=c < C)


@triton.jit
def settle_gradient(
    a_ptr,
    b_ptr,
    kept_ptr,
    size_ptr,
    dw_ptr,
    db_ptr,
    ROW,
    out_ptr,
    SPANS,
    PIXELS,
    C,
    N,
    BS: tl.constexpr,
    BC: tl.constexpr,
):
    """Turn the sums of `gradient_moments` into the gradients of gain and bias, and out[0] u and [1] v of dx = p dy + u x + v."""
    n = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    kept = kept_ptr + n * C + c
    centre = tl.load(kept, mask=inside, other=0.0)
    scale = tl.load(kept + N * C, mask=inside, other=0.0)
    gain = tl.load(kept + 2 * N * C, mask=inside, other=0.0)
    size = tl.load(size_ptr + n)
    a, b = totals(a_ptr, b_ptr, n, c, SPANS, C, N, BS, BC)
    dw = b * scale
    tl.store(db_ptr + n * ROW + c, a, mask=inside)
    tl.store(dw_ptr + n * ROW + c, dw, mask=inside)
    count = tl.maximum(size * PIXELS, 1.0)
    slope = -gain * scale * dw / count
    tl.store(out_ptr + n * C + c, slope, mask=inside)
    tl.store(out_ptr + (N + n) * C + c, -gain * a / count - centre * slope, mask=inside)


@triton.jit
def affine(
    x_ptr,
    other_ptr,
    y_ptr,
    kept_ptr,
    other_kept_ptr,
    M,
    C,
    XC,
    OC,
    YC,
    N,
    ADD: tl.constexpr,
    RELU: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """y = p x + q for every client and channel, plus another image as it is (ADD = 1) or normalised too (2); with RELU, max(y, 0).
    Pixels are XC, OC and YC numbers apart."""
    n = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < M)[:, None] & (c < C)[None, :]
    p = tl.load(kept_ptr + (2 * N + n) * C + c, mask=c < C, other=0.0)
    q = tl.load(kept_ptr + (3 * N + n) * C + c, mask=c < C, other=0.0)
    y = p[None, :] * tl.load(x_ptr + n * M * XC + m[:, None] * XC + c[None, :], mask=inside, other=0.0).to(tl.float32) + q[None, :]
    if ADD > 0:
        other = tl.load(other_ptr + n * M * OC + m[:, None] * OC + c[None, :], mask=inside, other=0.0).to(tl.float32)
        if ADD == 2:
            p = tl.load(other_kept_ptr + (2 * N + n) * C + c, mask=c < C, other=0.0)
            q = tl.load(other_kept_ptr + (3 * N + n) * C + c, mask=c < C, other=0.0)
            other = p[None, :] * other + q[None, :]
        y += other
    tl.store(y_ptr + n * M * YC + m[:, None] * YC + c[None, :], tl.where(y <= 0.0, 0.0, y) if RELU else y, mask=inside)


@triton.jit
def gradient_affine(
    x_ptr,
    dy_ptr,
    where_ptr,
    dx_ptr,
    kept_ptr,
    slope_ptr,
    live_ptr,
    M,
    H,
    W,
    C,
    XC,
    DC,
    GC,
    N,
    ADD: tl.constexpr,
    THEN: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """dx = p dy + u x + v, the last two terms except at padding; with ADD, added to dx. Pixels are XC, DC and GC numbers apart."""
    n = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (m < M)[:, None] & (c < C)[None, :]
    p = tl.load(kept_ptr + (2 * N + n) * C + c, mask=c < C, other=0.0)
    q = tl.load(kept_ptr + (3 * N + n) * C + c, mask=c < C, other=0.0)
    u = tl.load(slope_ptr + n * C + c, mask=c < C, other=0.0)
    v = tl.load(slope_ptr + (N + n) * C + c, mask=c < C, other=0.0)
    x = tl.load(x_ptr + n * M * XC + m[:, None] * XC + c[None, :], mask=inside, other=0.0).to(tl.float32)
    dy = incoming_gradient(dy_ptr, where_ptr, x, n, m, c, p, q, inside, M, H, W, C, DC, THEN)
    live = tl.load(live_ptr + n * (M // (H * W)) + m // (H * W), mask=m < M, other=0.0)
    at = dx_ptr + n * M * GC + m[:, None] * GC + c[None, :]
    dx = p[None, :] * dy + live[:, None] * (u[None, :] * x + v[None, :])
    if ADD:
        dx += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, dx, mask=inside)


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def cell(gate_ptr, before_ptr, after_ptr, tanh_ptr, state_ptr, TOTAL, H, BLOCK: tl.constexpr):
    """A step of an LSTM with H units a row; the gates (rows, 4, H) replace their sums."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < TOTAL
    gate = gate_ptr + at // H * (4 * H) + at % H
    i = tl.sigmoid(tl.load(gate, mask=live, other=0.0))
    f = tl.sigmoid(tl.load(gate + H, mask=live, other=0.0))
    g = tanh(tl.load(gate + 2 * H, mask=live, other=0.0))
    o = tl.sigmoid(tl.load(gate + 3 * H, mask=live, other=0.0))
    after = f * tl.load(before_ptr + at, mask=live, other=0.0) + i * g
    bent = tanh(after)
    tl.store(gate, i, mask=live)
    tl.store(gate + H, f, mask=live)
    tl.store(gate + 2 * H, g, mask=live)
    tl.store(gate + 3 * H, o, mask=live)
    tl.store(after_ptr + at, after, mask=live)
    tl.store(tanh_ptr + at, bent, mask=live)
    tl.store(state_ptr + at, o * bent, mask=live)


@triton.jit
def cell_gradient(gate_ptr, before_ptr, tanh_ptr, dy_ptr, back_ptr, flow_ptr, TOTAL, H, BLOCK: tl.constexpr):
    """The same step back: the gradients of the gates' sums replace the gates, and that of the cell before replaces `flow`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < TOTAL
    gate = gate_ptr + at // H * (4 * H) + at % H
    i = tl.load(gate, mask=live, other=0.0)
    f = tl.load(gate + H, mask=live, other=0.0)
    g = tl.load(gate + 2 * H, mask=live, other=0.0)
    o = tl.load(gate + 3 * H, mask=live, other=0.0)
    bent = tl.load(tanh_ptr + at, mask=live, other=0.0)
    back = tl.load(back_ptr + at, mask=live, other=0.0) + tl.load(dy_ptr + at, mask=live, other=0.0)
    flow = tl.load(flow_ptr + at, mask=live, other=0.0) + back * o * (1.0 - bent * bent)
    tl.store(gate, flow * g * i * (1.0 - i), mask=live)
    tl.store(gate + H, flow * tl.load(before_ptr + at, mask=live, other=0.0) * f * (1.0 - f), mask=live)
    tl.store(gate + 2 * H, flow * i * (1.0 - g * g), mask=live)
    tl.store(gate + 3 * H, back * bent * o * (1.0 - o), mask=live)
    tl.store(flow_ptr + at, flow * f, mask=live)


@triton.jit
def moved(
    w,
    g,
    n,
    at,
    live,
    rate_ptr,
    gain_ptr,
    pull_ptr,
    prox_ptr,
    start_ptr,
    shift_ptr,
    memory_ptr,
    mask_ptr,
    ROW,
    PULL: tl.constexpr,
    PROX: tl.constexpr,
    SHIFT: tl.constexpr,
    MEMORY: tl.constexpr,
    MASK: tl.constexpr,
):
    """w - rate[n] (gain[n] g + pull[n] w + shift + prox (w - start) - memory[n]) mask, for weights w of client n and their
    gradients g, at these places of its row. Rows begin every ROW numbers."""
    d = tl.load(gain_ptr + n) * g
    if PULL:
        d += tl.load(pull_ptr + n) * w
    if SHIFT:
        d += tl.load(shift_ptr + at, mask=live, other=0.0)
    if PROX:
        d += tl.load(prox_ptr) * (w - tl.load(start_ptr + at, mask=live, other=0.0))
    if MEMORY:
        d -= tl.load(memory_ptr + n * ROW + at, mask=live, other=0.0)
    if MASK:
        d *= tl.load(mask_ptr + at, mask=live, other=0.0)
    return w - tl.load(rate_ptr + n) * d


@triton.jit
def step(
    w_ptr,
    g_ptr,
    D,
    rate_ptr,
    gain_ptr,
    pull_ptr,
    prox_ptr,
    start_ptr,
    shift_ptr,
    memory_ptr,
    mask_ptr,
    ROW,
    PULL: tl.constexpr,
    PROX: tl.constexpr,
    SHIFT: tl.constexpr,
    MEMORY: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The whole local step of D weights of every client, in one pass."""
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < D
    w = tl.load(w_ptr + n * ROW + at, mask=live, other=0.0)
    g = tl.load(g_ptr + n * ROW + at, mask=live, other=0.0)
    new = moved(
        w, g, n, at, live, rate_ptr, gain_ptr, pull_ptr, prox_ptr, start_ptr, shift_ptr, memory_ptr, mask_ptr,
        ROW, PULL, PROX, SHIFT, MEMORY, MASK,
    )  # fmt: skip
    tl.store(w_ptr + n * ROW + at, new, mask=live)


@triton.jit
def step_along_product(
    w_ptr,
    dy_ptr,
    x_ptr,
    short_ptr,
    B,
    O,
    I,
    rate_ptr,
    gain_ptr,
    pull_ptr,
    prox_ptr,
    start_ptr,
    shift_ptr,
    memory_ptr,
    mask_ptr,
    ROW,
    PULL: tl.constexpr,
    PROX: tl.constexpr,
    SHIFT: tl.constexpr,
    MEMORY: tl.constexpr,
    MASK: tl.constexpr,
    SHORT: tl.constexpr,
    BB: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The whole local step of a linear layer's weights (O, I) of every client, with its gradient Σ_b dy[n, b, o] x[n, b, i], which
    is not stored. With SHORT, the new weights are stored in 16 bits too."""
    n = tl.program_id(2).to(tl.int64)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    dy_ptr += n * B * O
    x_ptr += n * B * I
    g = tl.zeros((BO, BI), dtype=tl.float32)
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)
        dy = tl.load(dy_ptr + (b * O)[None, :] + o[:, None], mask=(b < B)[None, :] & (o < O)[:, None], other=0.0)
        x = tl.load(x_ptr + (b * I)[:, None] + i[None, :], mask=(b < B)[:, None] & (i < I)[None, :], other=0.0)
        g = tl.dot(dy.to(tl.float32), x.to(tl.float32), g, input_precision=PRECISION)
    at = o[:, None] * I + i[None, :]
    live = (o < O)[:, None] & (i < I)[None, :]
    w = tl.load(w_ptr + n * ROW + at, mask=live, other=0.0)
    new = moved(
        w, g, n, at, live, rate_ptr, gain_ptr, pull_ptr, prox_ptr, start_ptr, shift_ptr, memory_ptr, mask_ptr,
        ROW, PULL, PROX, SHIFT, MEMORY, MASK,
    )  # fmt: skip
    tl.store(w_ptr + n * ROW + at, new, mask=live)
    if SHORT:
        tl.store(short_ptr + n * O * I + at, new.to(short_ptr.dtype.element_ty), mask=live)


@triton.jit
def step_of_filters(
    w_ptr,
    g_ptr,
    short_ptr,
    O,
    C,
    rate_ptr,
    gain_ptr,
    pull_ptr,
    prox_ptr,
    start_ptr,
    shift_ptr,
    memory_ptr,
    mask_ptr,
    ROW,
    PULL: tl.constexpr,
    PROX: tl.constexpr,
    SHIFT: tl.constexpr,
    MEMORY: tl.constexpr,
    MASK: tl.constexpr,
    TAPS: tl.constexpr,
    BO: tl.constexpr,
    BC: tl.constexpr,
    BT: tl.constexpr,
):
    """The whole local step of a convolution's filters (O, C, TAPS) of every client, with their gradient in the order (O, TAPS, C).
    The new filters are stored in 16 bits too, in that order, as `conv` reads them; see `turn`."""
    n = tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    tap = tl.arange(0, BT)
    turned = (o[:, None, None] * TAPS + tap[None, :, None]) * C + c[None, None, :]
    there = (o < O)[:, None, None] & (tap < TAPS)[None, :, None] & (c < C)[None, None, :]
    g = tl.permute(tl.load(g_ptr + n * ROW + turned, mask=there, other=0.0), (0, 2, 1))
    at = (o[:, None, None] * C + c[None, :, None]) * TAPS + tap[None, None, :]
    live = (o < O)[:, None, None] & (c < C)[None, :, None] & (tap < TAPS)[None, None, :]
    w = tl.load(w_ptr + n * ROW + at, mask=live, other=0.0)
    new = moved(
        w, g, n, at, live, rate_ptr, gain_ptr, pull_ptr, prox_ptr, start_ptr, shift_ptr, memory_ptr, mask_ptr,
        ROW, PULL, PROX, SHIFT, MEMORY, MASK,
    )  # fmt: skip
    tl.store(w_ptr + n * ROW + at, new, mask=live)
    short = new.to(short_ptr.dtype.element_ty)
    tl.store(short_ptr + n * (O * TAPS * C) + turned, tl.permute(short, (0, 2, 1)), mask=there)


@triton.jit
def squares(g_ptr, out_ptr, D, ROW, COUNT, BLOCK: tl.constexpr):
    """out[n, block] = Σ g[n]² over a block of D numbers. Rows of g begin every ROW numbers, those of out every COUNT."""
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + n * ROW + at, mask=at < D, other=0.0)
    tl.store(out_ptr + n * COUNT + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def cross_entropy(z_ptr, y_ptr, scale_ptr, dy_ptr, loss_ptr, B, C, BB: tl.constexpr, BC: tl.constexpr):
    """The weighted loss of a block of client n's samples, loss[n, block], and its gradient dy[n, b, c] by the outputs z."""
    n = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    c = tl.arange(0, BC)
    live = (b < B)[:, None] & (c < C)[None, :]
    at = (n * B + b)[:, None] * C + c[None, :]
    z = tl.where((c < C)[None, :], tl.load(z_ptr + at, mask=live, other=0.0).to(tl.float32), float("-inf"))
    z -= tl.max(z, 1)[:, None]
    e = tl.exp(z)
    total = tl.sum(e, 1)
    true = c[None, :] == tl.load(y_ptr + n * B + b, mask=b < B, other=0)[:, None]
    scale = tl.load(scale_ptr + n * B + b, mask=b < B, other=0.0)
    losses = tl.log(total) - tl.sum(tl.where(true, z, 0.0), 1)
    tl.store(loss_ptr + n * tl.num_programs(1) + tl.program_id(1), tl.sum(losses * scale, 0))
    tl.store(dy_ptr + at, (e / total[:, None] - tl.where(true, 1.0, 0.0)) * scale[:, None], mask=live)
