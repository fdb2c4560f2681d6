"""The layers of `stacked`, whose weights have a leading client axis, with forward and backward passes written out.

Activations are (n·B, C, H, W) in channels-last memory, or (n, B, features) after the first linear layer or flattening.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fedagg.engines.conv import Convolution
from fedagg.engines.graph import pair
from fedagg.engines.sequence import Shift

aten = torch.ops.aten
# With oneDNN and without MKL (Linux on Arm) transposing first makes a small product with a transposed operand three times as fast.
TURN_FIRST = torch.backends.mkldnn.is_available() and not torch.backends.mkl.is_available()
SMALL = 1 << 18  # weights of a layer


class Aside:
    """Work on a second stream of a GPU, with a result that the rest of the backward pass does not read: the gradients of filters.
    Blocks of one kernel then fill the processors that the last blocks of another leave idle."""

    ahead = 2  # how many may be under way: the memory that they read is not free until they end

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.waiting: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def __call__(self, work: Callable[[], None], *reads: Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        self.waiting.append((self.stream.record_event(), reads))
        if len(self.waiting) > self.ahead:
            torch.cuda.current_stream().wait_event(self.waiting.popleft()[0])

    def join(self) -> None:
        if self.waiting:  # a graph that is captured must not wait for a stream that is not part of it
            torch.cuda.current_stream().wait_event(self.waiting[-1][0])
            self.waiting.clear()


def at_once(work: Callable[[], None], *reads: Tensor) -> None:
    work()


class Layer(Protocol):
    """One layer of the stack: `forward` keeps what `backward` needs; `backward` fills the gradients of its weights."""

    @property
    def forward(self) -> Callable[..., Tensor]: ...

    @property
    def backward(self) -> Callable[..., Tensor | list[Tensor]]:
        """From `dy` and `need` to the gradient of the layer's input, or of each input; anything if it is not needed (the first
        layers). Layers with `adds` also take another gradient of the same input, and may replace it by the sum."""


class Flatten:
    def __init__(self, n: int) -> None:
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.dtype = x.shape, x.dtype
        self.images = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        return x.reshape(self.n, x.shape[0] // self.n, -1)

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        dx = dy.reshape(self.shape).to(self.dtype)
        return packed(dx) if self.images and need else dx


class Linear:
    def __init__(self, w: Tensor, b: Tensor | None, dw: Tensor, db: Tensor | None, half: bool) -> None:
        self.w, self.b, self.dw, self.db, self.half = w, b, dw, db, half
        self.step: Tensor | None = None  # (n, 1, 1): step along the gradient instead of storing it
        self.holds = False  # is the gradient left to whoever reads its factors, x and dy?
        self.short: Tensor | None = None  # the weights in 16 bits, if the step keeps them

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:  # flat samples, not yet in rows by client
            x = x.reshape(len(self.w), -1, x.shape[1])
        if x.dim() == 4:  # positions of a text count as samples
            return self.product(x.flatten(1, 2), few=False).reshape(*x.shape[:3], -1)
        return self.product(x)

    def product(self, x: Tensor, few: bool = True) -> Tensor:
        self.x = x
        if self.half:
            self.read = self.w.bfloat16() if self.short is None else self.short
            y = torch.bmm(x.to(self.read.dtype), self.read.transpose(1, 2)).float()
            return y if self.b is None else y.add_(self.b[:, None])
        if (
            x.is_cpu and few
        ):  # with the samples innermost, a few outputs a sample are long rows: twice as fast, and the loss likewise
            turned = x.transpose(1, 2)
            y = torch.bmm(self.w, turned.contiguous() if TURN_FIRST and self.w[0].numel() < SMALL else turned)
            return (y if self.b is None else y.add_(self.b[..., None])).transpose(1, 2)
        w = self.w.transpose(1, 2)
        return torch.bmm(x, w) if self.b is None else torch.baddbmm(self.b[:, None], x, w)

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        if dy.dim() == 4:
            return self.backward(dy.flatten(1, 2), need).reshape(*dy.shape[:3], -1)
        if self.db is not None:
            torch.sum(dy, 1, out=self.db)
        short = dy.to(self.read.dtype) if self.half else dy
        dx = torch.bmm(short, self.read if self.half else self.w).to(dy.dtype) if need else dy
        if self.holds:
            self.dy = dy
        elif self.half:
            self.dw.copy_(torch.bmm(short.transpose(1, 2), self.x.to(short.dtype)))
        elif self.step is not None:
            self.w.baddbmm_((dy * -self.step).transpose(1, 2), self.x)
        elif dy.is_cpu and not self.dw.is_contiguous():  # the fast product of many small matrices needs contiguous output
            self.dw.copy_(torch.bmm(dy.transpose(1, 2), self.x))
        else:
            torch.bmm(dy.transpose(1, 2), self.x, out=self.dw)
        return dx


class Conv:
    adds = True
    aside: Callable[..., None] = staticmethod(at_once)

    def __init__(self, kernel: Convolution, w: Tensor, b: Tensor | None, dw: Tensor, db: Tensor | None) -> None:
        self.kernel, self.w, self.b, self.dw, self.db = kernel, w, b, dw, db

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.kernel.forward(x, self.w, self.b)

    def backward(self, dy: Tensor, need: bool, onto: Tensor | None = None) -> Tensor:
        self.aside(lambda: self.kernel.weight_gradient(self.x, dy, self.dw, self.db), dy)
        return self.kernel.input_gradient(self.x, dy, self.w, onto) if need else dy


class ReLU:
    keeps = True  # its output is needed in the backward pass
    spare = False  # may the input's memory be reused? Nothing else needs it any more

    def forward(self, x: Tensor) -> Tensor:
        self.y = x.relu_() if self.spare else x.relu()
        return self.y

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        return aten.threshold_backward(dy, self.y, 0) if need else dy


class MaxPool:
    spare = False

    def __init__(self, module: nn.MaxPool2d) -> None:
        self.options = [pair(v) for v in (module.kernel_size, module.stride, module.padding, module.dilation)]
        self.ceil = module.ceil_mode
        self.square = all(a == b for a, b in self.options) and self.options[3] == [1, 1] and not self.ceil
        self.halves = self.square and self.options[:3] == [[2, 2], [2, 2], [0, 0]]

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        y, self.where = aten.max_pool2d_with_indices(x, *self.options, self.ceil)
        return y  # type: ignore[no-any-return]

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        if not need:
            return dy
        # Only the indices are read: the gradient may overwrite the input, which is still in the cache.
        dx = self.x if self.spare else torch.empty_like(self.x)
        return aten.max_pool2d_with_indices_backward.grad_input(  # type: ignore[no-any-return]
            dy, self.x, *self.options, self.ceil, self.where, grad_input=dx
        )


class AveragePool:
    """Average over windows, `AvgPool2d`."""

    def __init__(self, module: nn.AvgPool2d) -> None:
        self.kernel, self.stride = pair(module.kernel_size), pair(module.stride)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return aten.avg_pool2d(x, self.kernel, self.stride)  # type: ignore[no-any-return]

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        if not need:
            return dy
        images, channels, high, wide = dy.shape
        a, b = self.kernel
        if dy.is_cuda and self.kernel == self.stride and self.x.shape[2:] == (high * a, wide * b):
            # Every pixel is in one window, so the gradient is a copy. Torch's own kernel is many times slower.
            share = (dy / (a * b)).permute(0, 2, 3, 1)[:, :, None, :, None].expand(images, high, a, wide, b, channels)
            return share.reshape(images, high * a, wide * b, channels).permute(0, 3, 1, 2)
        return aten.avg_pool2d_backward(dy, self.x, self.kernel, self.stride, [0, 0], False, True, None)  # type: ignore[no-any-return]


class Add:
    """The sum of two branches; broadcast axes are summed in the backward pass."""

    shares = True  # both branches receive the same gradient

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        self.shapes = a.shape, b.shape
        return a + b

    def backward(self, dy: Tensor, need: bool) -> list[Tensor]:
        return [dy if dy.shape == shape else dy.sum_to_size(shape) for shape in self.shapes]


class Concatenate:
    """The channels of several branches side by side."""

    slices: Sequence[bool] = ()  # which sources accept their gradient as a slice?

    def forward(self, *parts: Tensor) -> Tensor:
        self.channels = [part.shape[1] for part in parts]
        return torch.cat(parts, 1)

    def backward(self, dy: Tensor, need: bool) -> list[Tensor]:
        slices = self.slices or [False] * len(self.channels)
        return [part if free else packed(part) for part, free in zip(dy.split(self.channels, 1), slices, strict=True)]


def packed(x: Tensor) -> Tensor:
    """x (N, C, H, W) in channels-last memory, copied if necessary."""
    return x.contiguous(memory_format=torch.channels_last)


class MeanPool:
    """Average over the whole image, `AdaptiveAvgPool2d(1)`."""

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        return x.mean((2, 3), keepdim=True)

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        area = self.shape[2] * self.shape[3]
        return packed((dy / area).expand(self.shape)) if need else dy


class BatchNorm:
    """Normalisation by the statistics of a client's own batch. `live` (n, B) marks the samples that are not padding, `size` (n, 1)
    counts them. Padding enters no statistic and sends no gradient back; a client with only padding keeps its running statistics.
    One client without padding on a CPU uses torch's own kernel, which is fastest."""

    training = True

    def __init__(
        self, module: nn.BatchNorm2d, w: Tensor, b: Tensor, dw: Tensor, db: Tensor, mean: Tensor, var: Tensor, seen: Tensor
    ) -> None:
        self.w, self.b, self.dw, self.db, self.mean, self.var, self.seen = w, b, dw, db, mean, var, seen
        self.eps, self.momentum = module.eps, module.momentum or 0.0
        self.live = self.size = torch.ones(0)

    def forward(self, x: Tensor) -> Tensor:
        n, channels = self.w.shape
        x = packed(x)
        if not self.training:
            _, _, p, q = self.settled().view(4, n, 1, channels, 1, 1)
            return torch.addcmul(q, x.view(n, -1, *x.shape[1:]), p).view(x.shape)
        self.alone = n == 1 and x.is_cpu and bool(self.live.all())
        if self.alone:
            self.x, self.seen[0] = x, self.seen[0] + 1
            y, self.centre, self.scale = aten.native_batch_norm(
                x, self.w[0], self.b[0], self.mean[0], self.var[0], True, self.momentum, self.eps
            )
            return y  # type: ignore[no-any-return]
        rows = x.view(n, -1, *x.shape[1:])  # (n, B, C, H, W)
        live = self.live[..., None]  # sum by sample first, so that leaving samples out needs no pass over the images
        area, size = x.shape[2] * x.shape[3], self.size
        self.count = (size * area).clamp_min(1.0)
        mean = (rows.sum((3, 4)) * live).sum(1) / self.count
        self.centred = rows - mean.view(n, 1, channels, 1, 1)
        var = (torch.linalg.vector_norm(self.centred, dim=(3, 4)).square_() * live).sum(1) / self.count
        self.scale = (var + self.eps).rsqrt_()
        pull = self.momentum * (size > 0)
        self.mean += pull * (mean - self.mean)
        self.var += pull * (var * (self.count / (self.count - 1).clamp_min(1.0)) - self.var)
        self.seen += (size > 0).to(self.seen.dtype)
        gain = self.w * self.scale
        y = torch.addcmul(self.b.view(n, 1, channels, 1, 1), self.centred, gain.view(n, 1, channels, 1, 1))
        return y.view(x.shape)

    def settled(self) -> Tensor:
        """What normalises by the running statistics, (4, n, C): centre, 1 / deviation, and p and q of y = p x + q."""
        scale = (self.var + self.eps).rsqrt()
        gain = self.w * scale
        return torch.stack([self.mean, scale, gain, self.b - self.mean * gain])

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        n, channels = self.w.shape
        dy = packed(dy)
        if self.alone:
            dx, self.dw[0], self.db[0] = aten.native_batch_norm_backward(
                dy, self.x, self.w[0], self.mean[0], self.var[0], self.centre, self.scale, True, self.eps, [need, True, True]
            )
            return dx if need else dy
        rows = dy.view(self.centred.shape)
        torch.sum(rows.sum((3, 4)), 1, out=self.db)
        torch.mul((rows * self.centred).sum((3, 4)).sum(1), self.scale, out=self.dw)
        if not need:
            return dy
        gain, live = self.w * self.scale, self.live[..., None]
        flat, slope = -gain * self.db / self.count, -gain * self.scale * self.dw / self.count
        flat, slope = ((part[:, None] * live)[..., None, None] for part in (flat, slope))
        common = torch.addcmul(flat, self.centred, slope, out=self.centred)
        return torch.addcmul(common, rows, gain.view(n, 1, channels, 1, 1), out=common).view(dy.shape)


class GroupNorm:
    """Group normalisation. It treats each sample separately, so padding needs no care."""

    def __init__(self, module: nn.GroupNorm, w: Tensor, b: Tensor, dw: Tensor, db: Tensor) -> None:
        self.w, self.b, self.dw, self.db, self.groups, self.eps = w, b, dw, db, module.num_groups, module.eps

    def forward(self, x: Tensor) -> Tensor:
        self.x = x = self.ordered(x)
        self.sizes = len(x), x.shape[1], x.shape[2] * x.shape[3], self.groups
        normed, self.mean, self.scale = aten.native_group_norm(x, None, None, *self.sizes, self.eps)
        self.normed = packed(normed)
        w, b = (self.by_sample(part) for part in (self.w, self.b))
        return torch.addcmul(b, self.normed, w).to(x.dtype)

    def ordered(self, x: Tensor) -> Tensor:
        """x in the memory order that torch's kernel reads: on a GPU it refuses channels-last."""
        return packed(x) if x.device.type == "cpu" else x.contiguous()

    def by_sample(self, part: Tensor) -> Tensor:
        """(n, C) as (n·B, C, 1, 1)."""
        return part.repeat_interleave(self.sizes[0] // len(part), 0)[..., None, None]

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        n, (count, channels, _, _) = len(self.w), self.sizes
        dy = packed(dy)
        torch.sum(dy.sum((2, 3)).view(n, count // n, channels), 1, out=self.db)
        torch.sum(self.normed.mul_(dy).sum((2, 3)).view(n, count // n, channels), 1, out=self.dw)
        if not need:
            return dy
        dy = dy * self.by_sample(self.w)
        dx, _, _ = aten.native_group_norm_backward(
            self.ordered(dy.to(self.x.dtype)), self.x, self.mean, self.scale, None, *self.sizes, [True, False, False]
        )
        return packed(dx)


class Dropout:
    """Dropout with a separate mask for every client and sample."""

    training = True

    def __init__(self, p: float, generator: torch.Generator | None) -> None:
        self.p, self.generator = p, generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.keep = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.generator).div_(1 - self.p)
        return x * self.keep

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        return dy * self.keep if need else dy


@dataclass(eq=False)
class Place:
    """A layer in its network, and the places that feed it (None is the network's input)."""

    layer: Layer
    sources: list[Place | None]
    need: bool  # is there anything to train before it?

    @property
    def trained(self) -> bool:
        return hasattr(self.layer, "dw")

    @property
    def back(self) -> bool:
        """Does this layer need a gradient?"""
        return self.need or self.trained


def users(places: list[Place]) -> Counter[Place | None]:
    return Counter(source for place in places for source in place.sources)


def spare(place: Place | None, count: Counter[Place | None]) -> bool:
    """May the one layer that reads this place's output overwrite it?"""
    if place is None or count[place] > 1:
        return False
    if isinstance(place.layer, Flatten):  # a view of the same memory
        return spare(place.sources[0], count)
    return not getattr(place.layer, "keeps", False)


def fresh(layer: Layer, own: bool) -> bool:
    """Is the gradient that a layer sends back in memory that nothing else reads? `own` says so for the gradient it received."""
    return not getattr(layer, "shares", False) and (own or not isinstance(layer, Concatenate | Flatten | Shift))
