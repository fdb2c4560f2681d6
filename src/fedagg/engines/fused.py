"""Convolution, pooling and the local step of n clients at once on a GPU, on the kernels of `fedagg.engines.kernels`.

Libraries run n clients' convolutions as a grouped convolution or one after another; neither keeps a large GPU busy with the small
images of federated learning. Here the client is one more axis of the grid, and the patches of an image are gathered on the fly
(implicit matrix product), so no patch is written to memory; at most, for the gradient of k×k filters, k shifted copies of an image.
Sums are made in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import triton
from torch import Tensor

from fedagg.engines import kernels
from fedagg.engines.base import allows_tf32
from fedagg.engines.layers import (
    Add,
    BatchNorm,
    Concatenate,
    Conv,
    Linear,
    MaxPool,
    Place,
    ReLU,
    aten,
    packed,
    users,
)
from fedagg.engines.sequence import Recurrent

WIDEST = 11  # largest window: its pixels are numbered in a byte
MOST_CLASSES = 1024  # of the loss: they are in one block


def precision() -> str:
    """tf32 if torch allows it for its own products, else plain float32."""
    return "tf32" if allows_tf32() else "ieee"


def block(size: int, most: int) -> int:
    return int(max(16, min(most, triton.next_power_of_2(size))))


def fuse(places: list[Place]) -> None:
    """Fuse normalisation, addition, 2×2 max pooling and ReLU where they follow each other and nothing else reads the values
    between."""
    count = users(places)
    for place in list(places):
        source = place.sources[0]
        if isinstance(place.layer, BatchNorm):
            place.layer = FusedNorm(place.layer, then=0)
        if isinstance(place.layer, Recurrent):
            place.layer = FusedRecurrent(place.layer)
        if source is None or count[source] > 1 or not isinstance(place.layer, ReLU):
            continue
        below = source.sources[0]
        if isinstance(source.layer, FusedNorm) and source.layer.then == 0:
            source.layer.then = 1
            merge(places, place, source)
            count[source] = count[place]
        elif isinstance(source.layer, Add):
            parts = [part for part in source.sources if part is not None and count[part] == 1]
            norms = {part: part.layer for part in parts if isinstance(part.layer, FusedNorm) and part.layer.then == 0}
            if not norms:
                continue
            source.layer = AddReLU(*norms.values())
            source.sources.sort(key=lambda part: part not in norms)
            for part in norms:  # directly before the sum: see AddReLU
                places.remove(part)
                places.insert(places.index(source), part)
            merge(places, place, source)
            count[source] = count[place]
        elif isinstance(source.layer, MaxPool) and source.layer.halves:
            source.layer = FusedPool()
            merge(places, place, source)
            count[source] = count[place]
            if below is None or count[below] > 1:
                continue
            if isinstance(below.layer, FusedNorm) and below.layer.then == 0:
                below.layer.then = 2
            elif isinstance(below.layer, Conv) and isinstance(below.layer.kernel, FusedConvolution):
                below.layer = ConvPool(below.layer)
            else:
                continue
            merge(places, source, below)
            count[below] = count[source]
    grow(places)
    for place in places:
        if isinstance(place.layer, MaxPool) and place.layer.square and place.layer.options[0][0] <= WIDEST:
            place.layer = WindowPool(place.layer)


def merge(places: list[Place], place: Place, into: Place) -> None:
    """Remove a place whose work is now done by the one that feeds it."""
    places.remove(place)
    for other in places:
        other.sources = [into if source is place else source for source in other.sources]


def normalises(place: Place | None) -> bool:
    """Is this a normalisation that can read and write a part of a larger tensor's channels?"""
    return place is not None and isinstance(place.layer, FusedNorm) and place.layer.then < 2


def grow(places: list[Place]) -> None:
    """Let successive concatenations, each of which adds channels to the one before, share one piece of memory. This is possible if
    only normalisations read them."""
    readers = {place: [other for other in places if place in other.sources] for place in places}
    count = users(places)
    wholes: dict[Place, Whole] = {}
    for place in places:
        before = place.sources[0]
        norms = [reader.layer for reader in readers[place] if normalises(reader)]
        others = [reader for reader in readers[place] if not normalises(reader)]
        next_one = [o for o in others if isinstance(o.layer, Concatenate) and o.sources.index(place) == 0 and len(o.sources) > 1]
        if isinstance(place.layer, Concatenate) and norms and len(others) <= 1 and others == next_one:
            whole = wholes[place] = wholes[before] if before is not None and before in wholes else Whole()
            whole.places.append(place)
            whole.width = cast(FusedNorm, norms[0]).w.shape[1]
    for place, whole in wholes.items():
        if len(whole.places) > 1:
            place.layer = Grow(whole, first=place is whole.places[0])
    for place in places:
        if type(place.layer) is Concatenate and all(normalises(source) and count[source] == 1 for source in place.sources):
            place.layer = DirectConcatenate([cast(FusedNorm, source.layer) for source in place.sources if source is not None])
        if isinstance(place.layer, Concatenate):
            inner = isinstance(place.layer, Grow) and not place.layer.first
            place.layer.slices = [normalises(source) or (inner and source is place.sources[0]) for source in place.sources]


class FusedConvolution:
    """Convolution of n clients' images with n clients' filters."""

    splits_for = 264  # blocks that keep a large GPU busy
    rows_from = 64  # pixels per image above which unrolling it costs more than scattered weights

    def __init__(self, n: int, padding: int, stride: int = 1) -> None:
        self.n, self.padding, self.stride = n, padding, stride
        self.filters: Tensor | None = None  # as `turned` makes them, if the step does

    def convolve(
        self, x: Tensor, w: Tensor, b: Tensor | None, padding: int, sides: Sequence[int], stride: int = 1, spread: int = 1,
        pool: bool = False, back: bool = False, onto: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """w (n, O, k, k, C), contiguous: tensor cores want the summed axis innermost. With `back`, it is (n, C, k, k, O) and read
        backwards. The result, added to `onto`, and which pixel of its window was the largest, if it is pooled; `sides` are then
        the pool's."""
        n, k = w.shape[0], w.shape[2]
        outputs, channels = (w.shape[4], w.shape[1]) if back else (w.shape[1], w.shape[4])
        images, _, height, width = x.shape
        ho, wo = sides
        x = packed(x)
        if onto is None:
            y = torch.empty(images, outputs, ho, wo, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
        else:
            y = packed(onto)
        where = torch.empty(y.numel() if pool else 0, dtype=torch.int8, device=x.device)
        m = images // n * ho * wo * (4 if pool else 1)
        tile = self.tile(outputs, k * k * channels, channels, x.element_size(), m)
        grid = (triton.cdiv(m, tile["BM"]), triton.cdiv(outputs, tile["BO"]), n)
        bias = b if b is not None else w
        kernels.conv[grid](
            x, w, bias, y, where, m, height, width, ho, wo, padding, bias.stride(0), C=channels, O=outputs, K=k, STRIDE=stride,
            SPREAD=spread, BIAS=b is not None, POOL=pool, BACK=back, ADD=onto is not None, PRECISION=precision(), **tile,
        )  # fmt: skip
        return y, where

    def sides(self, x: Tensor, w: Tensor) -> list[int]:
        return [(side + 2 * self.padding - w.shape[-1]) // self.stride + 1 for side in x.shape[2:]]

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return self.output(x, w, b, self.sides(x, w))[0]

    def output(self, x: Tensor, w: Tensor, b: Tensor | None, sides: Sequence[int], pool: bool = False) -> tuple[Tensor, Tensor]:
        filters, self.back = turned(w, x.dtype) if self.filters is None else (self.filters, self.filters)
        return self.convolve(x, filters, b, self.padding, sides, stride=self.stride, pool=pool)

    def input_gradient(self, x: Tensor, dy: Tensor, w: Tensor, onto: Tensor | None = None) -> Tensor:
        padding, back = w.shape[-1] - 1 - self.padding, self.back.element_size() == 2
        return self.convolve(dy, self.back, None, padding, x.shape[2:], spread=self.stride, back=back, onto=onto)[0]

    def weight_gradient(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None, turned: Tensor | None = None) -> None:
        """`turned` is dy in channels-first memory, if it is there already, with its sums in `db`. `dw` may be in channels-last
        memory; see `hold`."""
        n, outputs, channels, k, _ = dw.shape
        images, _, ho, wo = dy.shape
        m, depth = images // n * ho * wo, k * k * channels
        short = x.element_size() == 2
        rows, last = self.by_rows(x, ho * wo), self.filters is not None
        tile = self.gradient_tile(channels, outputs, depth, short and ho * wo >= 64)
        tiles = triton.cdiv(depth, tile["BK"]) * triton.cdiv(outputs, tile["BO"])
        splits = max(1, min(triton.cdiv(m, 4 * tile["BM"]), triton.cdiv(self.splits_for, tiles * n)))
        span = triton.cdiv(triton.cdiv(m, splits), tile["BM"]) * tile["BM"]
        splits = triton.cdiv(m, span)
        # A single split is written directly to where the update reads it.
        out = dw if splits == 1 else dw.new_empty(splits * n, outputs * depth)
        grid = (triton.cdiv(depth, tile["BK"]), triton.cdiv(outputs, tile["BO"]), splits * n)
        if rows:
            x, dy = packed(x), packed(dy)
            kernels.weight_gradient_of_rows[grid](
                x, dy, out, m, span, n, out.stride(0), *x.shape[2:], self.padding, C=channels, O=outputs, K=k,
                STRIDE=self.stride, HO=ho, WO=wo, LAST=last, PRECISION=precision(), **tile,
            )  # fmt: skip
            if db is not None:
                torch.sum(dy.permute(0, 2, 3, 1).reshape(n, -1, outputs), 1, dtype=db.dtype, out=db)
        else:
            patches = unrolled(x, k, self.padding, wo, self.stride)
            turned = unrolled(dy, 1, 0, wo, sums=db) if turned is None else turned
            kernels.weight_gradient[grid](
                patches, turned, out, m, span, n, out.stride(0), C=channels, O=outputs, K=k,
                STRIDE=self.stride, PIXELS=ho * wo, WO=wo, PLANE=patches[0, 0, 0].numel(), PRECISION=precision(), **tile,
            )  # fmt: skip
        if splits > 1:
            torch.sum(out.view(splits, n, -1), 0, out=(dw.permute(0, 1, 3, 4, 2) if last else dw).flatten(1))

    def by_rows(self, x: Tensor, pixels: int) -> bool:
        """Is the weight gradient computed from channels-last memory?"""
        return self.filters is not None or (x.element_size() == 2 and pixels >= self.rows_from and x.shape[1] % 64 == 0)

    @staticmethod
    def may_hold(channels: int) -> bool:
        """Are weight gradients faster in channels-last order, with 16 bits?"""
        return channels % 64 == 0 or channels in (16, 32)

    def hold(self, dw: Tensor, filters: Tensor) -> Tensor:
        """Leave turning the filters to `FusedStep`: it keeps them in `filters`, and reads their gradient in the same order. In that
        order it is stored in runs. Returns such a view of dw."""
        self.filters = filters
        return dw.flatten(1).view(filters.shape).permute(0, 1, 4, 2, 3)

    def tile(self, outputs: int, depth: int, channels: int, bytes: int, m: int) -> dict[str, Any]:
        """Blocks of the convolution, measured on an H200."""
        if bytes == 2 and channels % 64 == 32:  # then a block of 32 is at one tap
            return {"BM": 128, "BK": 32, "BO": block(outputs, 128), "num_warps": 4, "num_stages": 4}
        exact = bytes == 4 and precision() == "ieee"  # without tensor cores, their work takes registers
        sizes = {"BM": 128, "BK": block(depth, 128 // bytes), "BO": block(outputs, 128 if exact else 256)}
        few = triton.cdiv(m, 128) * triton.cdiv(outputs, 256) * self.n < self.splits_for
        if bytes == 2 and few and outputs >= 128:  # otherwise some of the GPU would be idle
            return {**sizes, "BM": 64, "BO": 128, "num_warps": 4, "num_stages": 3}
        return {**sizes, "num_warps": 8 if outputs >= 128 else 4, "num_stages": 3}

    def gradient_tile(self, channels: int, outputs: int, depth: int, long: bool) -> dict[str, Any]:
        """Blocks of the weight gradient, measured on an H200."""
        if self.filters is not None:
            wide = math.gcd(channels, 128)
            sizes = {"BM": 64 if wide >= 64 else 128, "BK": wide, "BO": block(outputs, 128)}
            return {**sizes, "num_warps": 4, "num_stages": 3 if wide == 128 else 4}
        few = depth > 9 * channels  # 5×5 filters of few channels
        return {
            "BM": 64 if long else 32,
            "BK": block(depth, 64 if few or long else 128),
            "BO": block(outputs, 128),
            "num_warps": 4,
            "num_stages": 4 if long else 3,
        }


def filter_tiles(w: Tensor, most: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """The grid and blocks of a kernel that turns the filters w, with as many channels as that at most."""
    n, outputs, channels, k, _ = w.shape
    taps, wide = triton.next_power_of_2(k * k), min(most, triton.next_power_of_2(channels))
    tall = max(1, min(4096 // (taps * wide), triton.next_power_of_2(outputs)))
    return (triton.cdiv(outputs, tall), triton.cdiv(channels, wide), n), {"BO": tall, "BC": wide, "BT": taps}


def turned(w: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """w (n, O, C, k, k) as (n, O, k, k, C), and as the filters of the transposed convolution, (n, C, k, k, O). With 16 bits tensor
    cores accept the summed axis anywhere, so the first serves as the second too: see `kernels.conv`, BACK."""
    n, outputs, channels, k, _ = w.shape
    y = torch.empty(n, outputs, k, k, channels, device=w.device, dtype=dtype) if out is None else out
    z = y if dtype.itemsize == 2 else torch.empty(n, channels, k, k, outputs, device=w.device, dtype=dtype)
    grid, tile = filter_tiles(w, 64 if z is y else 16)
    kernels.turn[grid](w, y, z, w.stride(0), outputs, channels, TAPS=k * k, BACK=z is not y, num_warps=8, **tile)
    return y, z


def unrolled(x: Tensor, k: int, padding: int, width: int, stride: int = 1, sums: Tensor | None = None) -> Tensor:
    """x (images, C, H, W) in channels-last memory as (images, C, k, stride, rows, width); see `kernels.unroll`. `sums` (n, C)
    receives the sum over every client's images."""
    x = packed(x)
    images, channels, height, across = x.shape
    rows = -(-(height + 2 * padding) // stride)
    y = torch.empty(images, channels, k, stride, rows, width, device=x.device, dtype=x.dtype)
    plane = stride * rows * width
    tile: dict[str, Any] = {"BP": int(min(128, triton.next_power_of_2(plane))), "BC": min(32, triton.next_power_of_2(channels))}
    grid = (images * triton.cdiv(plane, tile["BP"]), triton.cdiv(channels, tile["BC"]))
    part = sums.new_empty(grid[0], channels) if sums is not None else y
    kernels.unroll[grid](
        x, y, part, height, across, padding, channels, WO=width, PLANE=plane, K=k, STRIDE=stride, SUM=sums is not None, **tile
    )
    if sums is not None:
        torch.sum(part.view(len(sums), -1, channels), 1, out=sums)
    return y


@dataclass
class Whole:
    """Memory for the channels of several concatenations, each of which adds to the one before."""

    places: list[Place] = field(default_factory=list)
    width: int = 0
    memory: Tensor | None = None


def blank(x: Tensor, channels: int) -> Tensor:
    """Memory for the images of x with this many channels."""
    images, _, *sides = x.shape
    return x.new_empty(images, *sides, channels).permute(0, 3, 1, 2)


class Grow(Concatenate):
    """One of several concatenations in one piece of memory: only new channels are written. In the backward pass the gradient of all
    their channels is in one piece too, and every reader adds to its share."""

    keeps = True

    def __init__(self, whole: Whole, first: bool) -> None:
        self.whole, self.first = whole, first

    def forward(self, *parts: Tensor) -> Tensor:
        self.channels = [part.shape[1] for part in parts]
        if self.first or self.whole.memory is None:
            self.whole.memory = blank(parts[0], self.whole.width)
        at = 0 if self.first else self.channels[0]
        for part in parts if self.first else parts[1:]:
            self.whole.memory[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        return self.whole.memory[:, :at]


class DirectConcatenate(Concatenate):
    """A concatenation of normalisations that write their results directly into it."""

    def __init__(self, norms: list[FusedNorm]) -> None:
        self.channels = [norm.w.shape[1] for norm in norms]
        for number, norm in enumerate(norms):
            norm.target = self, sum(self.channels[:number])
        self.memory: Tensor | None = None

    def room(self, x: Tensor) -> Tensor:
        """Memory for all of them, made on the first call."""
        if self.memory is None:
            self.memory = blank(x, sum(self.channels))
        return self.memory

    def forward(self, *parts: Tensor) -> Tensor:
        whole, self.memory = self.room(parts[0]), None
        return whole


class FusedPool:
    """ReLU and 2×2 max pooling in one pass each way; only the pool's window numbers are kept."""

    def forward(self, x: Tensor) -> Tensor:
        x = packed(x)
        self.shape = x.shape
        y, self.where = pooled(x, None, 1)
        return y

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        if not need:
            return dy
        return unpooled(packed(dy), self.where, self.shape[2:])


def unpooled(dy: Tensor, where: Tensor, sides: Sequence[int]) -> Tensor:
    """The gradient of the images that were pooled by 2×2, from that of the result."""
    images, channels, high, wide = dy.shape
    dx = torch.empty(images, channels, *sides, device=dy.device, dtype=dy.dtype, memory_format=torch.channels_last)
    kernels.unpool[(triton.cdiv(dx.numel(), 1024),)](dy, where, dx, dx.numel(), *sides, high, wide, channels, BLOCK=1024)
    return dx


class ConvPool(Conv):
    """Convolution, ReLU and 2×2 max pooling: the images between them are not stored."""

    kernel: FusedConvolution

    def __init__(self, conv: Conv) -> None:
        self.__dict__.update(vars(conv))

    def forward(self, x: Tensor) -> Tensor:
        self.x, self.full = x, self.kernel.sides(x, self.w)
        y, self.where = self.kernel.output(x, self.w, self.b, [side // 2 for side in self.full], pool=True)
        return y

    def backward(self, dy: Tensor, need: bool, onto: Tensor | None = None) -> Tensor:
        dy, area = packed(dy), self.full[0] * self.full[1]
        images, channels, high, wide = dy.shape
        if self.kernel.by_rows(self.x, area):
            full = unpooled(dy, self.where, self.full)
            self.aside(lambda: self.kernel.weight_gradient(self.x, full, self.dw, self.db), full)
        else:
            tile: dict[str, Any] = {"BP": min(128, triton.next_power_of_2(area)), "BC": min(32, triton.next_power_of_2(channels))}
            grid = (images * triton.cdiv(area, tile["BP"]), triton.cdiv(channels, tile["BC"]))
            turned = torch.empty(images, channels, *self.full, device=dy.device, dtype=dy.dtype)
            full = torch.empty_like(turned, memory_format=torch.channels_last)
            sums = torch.empty(grid[0], channels, device=dy.device)
            kernels.unpool_turned[grid](dy, self.where, full, turned, sums, *self.full, high, wide, channels, BOTH=need, **tile)

            def gradient() -> None:
                if self.db is not None:
                    torch.sum(sums.view(len(self.db), -1, channels), 1, out=self.db)
                self.kernel.weight_gradient(self.x, full, self.dw, self.db, turned)

            self.aside(gradient, full, turned, sums)
        return self.kernel.input_gradient(self.x, full, self.w, onto) if need else dy


def pooled(x: Tensor, kept: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
    """relu(max of 2×2) of x, or of x normalised by `kept` (see `kernels.settle`), and which of the four was the largest."""
    images, channels, height, width = x.shape
    ho, wo = height // 2, width // 2
    y = torch.empty(images, channels, ho, wo, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    where = torch.empty(y.numel(), dtype=torch.int8, device=x.device)
    p, q = (kept[2], kept[3]) if kept is not None else (x, x)
    grid = (triton.cdiv(y.numel(), 1024),)
    kernels.pool[grid](x, y, where, p, q, y.numel(), height, width, ho, wo, channels, images // n,
                       NORM=kept is not None, BLOCK=1024)  # fmt: skip
    return y, where


def with_pitch(x: Tensor) -> tuple[Tensor, int]:
    """x (images, C, H, W) in channels-last memory and its pitch, the distance between two pixels. It is more than C if x is a part
    of a larger tensor's channels."""
    _, channels, height, width = x.shape
    apart = x.stride(0) // (height * width)
    if apart > channels and x.stride() == (height * width * apart, 1, width * apart, apart):
        return x, apart
    return packed(x), channels


class WindowPool(MaxPool):
    """Max pooling over windows that may overlap, with a reproducible gradient."""

    adds = True

    def __init__(self, pool: MaxPool) -> None:
        self.__dict__.update(vars(pool))
        (self.k, _), (self.stride, _), (self.padding, _), _ = self.options
        self.around = (self.k, self.stride, self.padding) == (3, 1, 1)  # as in inception networks: has its own kernels

    def forward(self, x: Tensor) -> Tensor:
        self.x = x = packed(x)
        images, channels, *sides = x.shape
        high, wide = ((side + 2 * self.padding - self.k) // self.stride + 1 for side in sides)
        y = torch.empty(images, channels, high, wide, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
        self.where = torch.empty(y.numel(), dtype=torch.int8, device=x.device)
        if self.around:
            grid, tile = self.tiles(images * wide, channels, 1024)
            kernels.pool_rows[grid](x, y, self.where, images * wide, high, channels, W=wide, **tile)
            return y
        kernels.pool_windows[(triton.cdiv(y.numel(), 1024),)](
            x, y, self.where, y.numel(), *sides, high, wide, channels, self.padding, K=self.k, STRIDE=self.stride, BLOCK=1024
        )
        return y

    def backward(self, dy: Tensor, need: bool, onto: Tensor | None = None) -> Tensor:
        if not need:
            return dy
        dx = packed(onto) if onto is not None else self.x if self.spare else torch.empty_like(self.x)
        images, channels, height, width = dx.shape
        m, add = images * width * (1 if self.around else height), onto is not None
        grid, tile = self.tiles(m, channels, 1024 if self.around else 2048)
        if self.around:
            kernels.unpool_rows[grid](packed(dy), self.where, dx, m, height, channels, W=width, ADD=add, **tile)
            return dx
        kernels.unpool_windows[grid](
            packed(dy), self.where, dx, m, height, width, *dy.shape[2:], channels, self.padding, K=self.k, STRIDE=self.stride,
            ADD=add, **tile,
        )  # fmt: skip
        return dx

    def tiles(self, m: int, channels: int, size: int) -> tuple[tuple[int, int], dict[str, Any]]:
        """The grid, and blocks of m and of channels; their sizes were measured on an H200."""
        wide = block(channels, 64)
        return (triton.cdiv(m, size // wide), triton.cdiv(channels, wide)), {"BM": size // wide, "BC": wide}


class FusedNorm(BatchNorm):
    """Batch normalisation of n clients, fused with a following ReLU, or ReLU and 2×2 pooling: two passes over the images forward,
    two backward. What the backward pass needs of the ReLU and the pool is recomputed from the layer's input."""

    adds = True

    def __init__(self, norm: BatchNorm, then: int) -> None:
        """`then` is what follows in the same pass: 1 for a ReLU, 2 for a ReLU and pooling."""
        self.__dict__.update(vars(norm))
        self.then, self.spare = then, False
        self.target: tuple[DirectConcatenate, int] | None = None  # the concatenation that receives the result, and where
        self.left = False  # is the last pass left to the layer that reads the result?

    def forward(self, x: Tensor) -> Tensor:
        n, channels = self.w.shape
        x, apart = with_pitch(x)
        self.x = x
        self.area = x.shape[2] * x.shape[3]
        self.m = x.shape[0] // n * self.area
        blocks, spans, a, b = self.parts()
        near = self.m * apart  # the distance between the first pixels of two clients
        tile: dict[str, Any] = self.tile()
        if self.training:
            kernels.moments[(blocks, spans, n)](x, self.live, a, b, self.m, self.span, self.area, channels, apart, n, **tile)
            self.kept = a.new_empty(4, n, channels)
            kernels.settle[(triton.cdiv(channels, 16), n)](
                a, b, x, near, self.size, self.w, self.b, self.w.stride(0), self.mean, self.var, self.seen, self.mean.stride(0),
                self.kept, spans, self.area, channels, n, self.eps, self.momentum, BS=block(spans, 64), BC=16,
            )  # fmt: skip
        else:
            self.kept = self.settled()
        self.where = self.live
        if self.then == 2:
            y, self.where = pooled(packed(x), self.kept, n)
            return y
        return x if self.left else self.affine(x, self.then == 1)

    def affine(self, x: Tensor, relu: bool, other: Tensor | None = None, second: FusedNorm | None = None) -> Tensor:
        """The normalised x; plus `other`, if it is given, normalised by `second`, if that is given; and with `relu` a ReLU."""
        n, channels = self.w.shape
        add = 0 if other is None else 1 if second is None else 2
        (x, apart), (other, beside) = with_pitch(x), with_pitch(x if other is None else other)
        if self.target is not None:
            joint, at = self.target
            y = joint.room(x)[:, at : at + channels]
        else:
            y = torch.empty(x.shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
        tile = self.tile()
        kept = self.kept if second is None else second.kept
        grid = (triton.cdiv(self.m, tile["BM"]), triton.cdiv(channels, tile["BC"]), n)
        kernels.affine[grid](
            x, other, y, self.kept, kept, self.m, channels, apart, beside, with_pitch(y)[1], n, ADD=add, RELU=relu, **tile
        )
        return y

    def backward(self, dy: Tensor, need: bool, onto: Tensor | None = None) -> Tensor:
        n, channels = self.w.shape
        (x, apart), (dy, below) = with_pitch(self.x), with_pitch(dy)
        height, width = x.shape[2:]
        blocks, spans, a, b = self.parts()
        tile: dict[str, Any] = self.tile()
        kernels.gradient_moments[(blocks, spans, n)](
            x, dy, self.where, self.kept, a, b, self.m, self.span, height, width, channels, apart, below, n, THEN=self.then, **tile
        )
        slopes = a.new_empty(2, n, channels)
        kernels.settle_gradient[(triton.cdiv(channels, 16), n)](
            a, b, self.kept, self.size, self.dw, self.db, self.dw.stride(0), slopes, spans, self.area, channels, n,
            BS=block(spans, 64), BC=16,
        )  # fmt: skip
        if not need:
            return dy
        dx = x if self.spare else torch.empty(x.shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
        dx, gap = with_pitch(dx if onto is None else onto)
        grid = (triton.cdiv(self.m, tile["BM"]), blocks, n)
        kernels.gradient_affine[grid](
            x, dy, self.where, dx, self.kept, slopes, self.live, self.m, height, width, channels, apart, below, gap, n,
            ADD=onto is not None, THEN=self.then, **tile,
        )  # fmt: skip
        return dx

    def tile(self) -> dict[str, int]:
        return {"BM": 64, "BC": block(self.w.shape[1], 64)}

    def parts(self) -> tuple[int, int, Tensor, Tensor]:
        """Blocks of channels, spans of pixels, and memory for the sums over each span."""
        n, channels = self.w.shape
        tile = self.tile()
        blocks = triton.cdiv(channels, tile["BC"])
        spans = max(1, min(triton.cdiv(self.m, 2 * tile["BM"]), triton.cdiv(1056, blocks * n)))  # enough for a large GPU
        self.span = triton.cdiv(triton.cdiv(self.m, spans), tile["BM"]) * tile["BM"]
        spans = triton.cdiv(self.m, self.span)
        a, b = self.w.new_empty(2, spans, n, channels)
        return blocks, spans, a, b


class AddReLU(Add):
    """The sum of a normalisation's result and another branch, which may be one too, and a ReLU, in one pass: what is added is not
    stored. In the backward pass normalisations are next and only read the gradient. After them it is the other branch's own."""

    keeps, shares = True, False

    def __init__(self, norm: FusedNorm, second: FusedNorm | None = None) -> None:
        self.norm, self.second = norm, second
        for layer in (norm, second):
            if layer is not None:
                layer.left = True

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        self.shapes = a.shape, b.shape
        if a.shape == b.shape:
            self.y = self.norm.affine(a, True, b, self.second)
        else:
            self.y = super().forward(self.norm.affine(a, False), b if self.second is None else self.second.affine(b, False)).relu_()
        return self.y

    def backward(self, dy: Tensor, need: bool) -> list[Tensor]:
        return super().backward(aten.threshold_backward(dy, self.y, 0), need)


class FusedRecurrent(Recurrent):
    """An LSTM in which all that a step does between two products is one kernel."""

    def __init__(self, layer: Recurrent) -> None:
        self.__dict__.update(vars(layer))

    def cell(self, gate: Tensor, before: Tensor, after: Tensor, tanh: Tensor, state: Tensor) -> None:
        grid = (triton.cdiv(after.numel(), 512),)
        kernels.cell[grid](gate, before, after, tanh, state, after.numel(), self.hidden, BLOCK=512)

    def cell_gradient(self, gate: Tensor, before: Tensor, tanh: Tensor, dy: Tensor, back: Tensor, flow: Tensor) -> None:
        grid = (triton.cdiv(flow.numel(), 512),)
        kernels.cell_gradient[grid](gate, before, tanh, dy, back, flow, flow.numel(), self.hidden, BLOCK=512)

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        return super().backward(dy.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), need)  # a step's values in one piece


class FusedStep:
    """The whole local step of n clients in one pass over their weights. The gradient of a large linear layer is a product over the
    few samples of a batch: it is computed in that pass, and neither stored nor read again. That of filters may be stored in
    another order, in which new filters are stored too."""

    def __init__(self, w: Tensor, g: Tensor, held: list[Linear | Conv]) -> None:
        """Weights and gradients, (n, d), and the layers that hold back the gradient of their weights."""
        self.w, self.g, self.held = w, g, {int(layer.w.storage_offset() - w.storage_offset()): layer for layer in held}
        self.rest: list[tuple[int, int]] = []  # ranges of a row whose gradient is stored
        at = 0
        for first, layer in sorted(self.held.items()):
            self.rest.append((at, first))
            at = first + layer.w[0].numel()
        self.rest = [(a, b) for a, b in (*self.rest, (at, w.shape[1])) if a < b]
        self.products = [layer for layer in held if isinstance(layer, Linear)]
        filters = [(first, first + layer.w[0].numel()) for first, layer in self.held.items() if isinstance(layer, Conv)]
        self.stored = self.rest + filters  # in whatever order

    def norm(self) -> Tensor:
        """The norms of all clients' gradients, (n, 1)."""
        blocks = [triton.cdiv(b - a, 4096) for a, b in self.stored]
        count = sum(blocks) + len(self.products)
        parts, at = torch.empty(len(self.w), count, device=self.w.device), 0
        for (a, b), many in zip(self.stored, blocks, strict=True):
            kernels.squares[(many, len(self.w))](self.g[:, a:], parts[:, at:], b - a, self.g.stride(0), count, BLOCK=4096)
            at += many
        for layer in self.products:
            parts[:, at] = squared_product(layer.dy, layer.x)
            at += 1
        return parts.sum(1, keepdim=True).clamp_min_(0.0).sqrt_()

    def __call__(
        self,
        rate: Tensor,
        gain: Tensor,
        pull: Tensor | None,
        prox: Tensor | None,
        start: Tensor,
        shift: Tensor | None,
        memory: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        """w[n] -= rate[n] (gain[n] g[n] + pull[n] w[n] + shift + prox (w[n] - start) - memory[n]) mask."""
        n, row = self.w.shape[0], self.w.stride(0)
        flags = {"PULL": pull is not None, "PROX": prox is not None, "SHIFT": shift is not None, "MEMORY": memory is not None,
                 "MASK": mask is not None}  # fmt: skip

        def terms(a: int) -> list[Any]:
            whole = (rate, gain, pull, prox)
            parts = (start, shift, memory if memory is None else memory[0], mask)  # by a place in the row
            return [*(start if one is None else one for one in whole), *(start if one is None else one[a:] for one in parts), row]

        for a, b in self.rest:
            kernels.step[(triton.cdiv(b - a, 1024), n)](self.w[:, a:], self.g[:, a:], b - a, *terms(a), **flags, BLOCK=1024)
        for first, layer in self.held.items():
            if isinstance(layer, Conv):
                filters = cast(FusedConvolution, layer.kernel).filters
                outputs, channels, k = layer.w.shape[1:4]
                grid, tile = filter_tiles(layer.w, 64)
                kernels.step_of_filters[grid](
                    layer.w, layer.dw, filters, outputs, channels, *terms(first), **flags, TAPS=k * k, num_warps=8, **tile
                )
                continue
            dy, x = layer.dy.contiguous(), layer.x.contiguous()
            (batch, outputs), inputs = dy.shape[1:], x.shape[2]
            tile = {"BB": block(batch, 32), "BO": 32, "BI": 128}
            grid = (triton.cdiv(inputs, tile["BI"]), triton.cdiv(outputs, tile["BO"]), n)
            kernels.step_along_product[grid](
                layer.w, dy, x, layer.w if layer.short is None else layer.short, batch, outputs, inputs, *terms(first), **flags,
                SHORT=layer.short is not None, **tile, PRECISION=precision(),
            )  # fmt: skip


def squared_product(dy: Tensor, x: Tensor) -> Tensor:
    """|Σ_b dy[n, b] x[n, b]ᵀ|², (n,): it is Σ_bc (dy[n, b]·dy[n, c]) (x[n, b]·x[n, c])."""
    samples, inputs = (torch.bmm(part, part.transpose(1, 2)) for part in (dy, x.float()))
    return (samples * inputs).sum((1, 2))


def softmax_loss(z: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of n clients' outputs z (n, B, classes), weighted, (n,), and its gradient by z."""
    n, batch, classes = z.shape
    wide = triton.next_power_of_2(classes)
    tile: dict[str, Any] = {"BB": max(1, min(triton.next_power_of_2(batch), MOST_CLASSES // wide)), "BC": wide}
    grid = (n, triton.cdiv(batch, tile["BB"]))
    dy, loss = torch.empty(z.shape, device=z.device), torch.empty(grid, device=z.device)
    kernels.cross_entropy[grid](z.contiguous(), y, scale.contiguous(), dy, loss, batch, classes, **tile)
    return loss.sum(1) if grid[1] > 1 else loss[:, 0], dy
