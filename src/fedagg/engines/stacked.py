"""Many copies of one network as one: layers whose weights have a leading client axis.

For networks that are made of the layers below, in a chain or with branches that are added up or put side by side, forward and
backward are written out, on stacks of clients: products become batched products, everything between them is done for all clients in
one operation, and gradients land where the update reads them, with no autograd, no module calls and no copies. Activations are
(n·B, C, H, W) in channels-last memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fedagg.engines.base import Setting, cross_entropy
from fedagg.engines.conv import Convolution, Pointwise, make_convolution
from fedagg.engines.graph import Join, Node, Sum, pair, traced

aten = torch.ops.aten
# With oneDNN and without MKL (Linux on Arm) a small product with a transposed operand takes thrice as long as turning it first.
TURN_FIRST = torch.backends.mkldnn.is_available() and not torch.backends.mkl.is_available()
SMALL = 1 << 18  # weights of a layer


class Layer(Protocol):
    """One layer of the stack: `forward` keeps what `backward` needs; `backward` fills the gradients of its weights."""

    @property
    def forward(self) -> Callable[..., Tensor]: ...

    @property
    def backward(self) -> Callable[..., Tensor | list[Tensor]]:
        """From `dy` and `need` to the gradient of the layer's input, or of each; where there is no need (the first layers), to
        anything. Layers that say `adds` take another gradient of the same input, too, and may put the sum in its place."""


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
        self.step: Tensor | None = None  # (n, 1, 1): step along the gradient instead of writing it down

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:  # flat samples, which no layer has put in rows by client yet
            x = x.reshape(len(self.w), -1, x.shape[1])
        self.x = x
        w = self.w.transpose(1, 2)
        if self.half:
            y = torch.bmm(x.bfloat16(), w.bfloat16()).float()
            return y if self.b is None else y.add_(self.b[:, None])
        if x.is_cpu:  # with the samples innermost, a few outputs a sample are long rows: twice as fast, and the loss likewise
            turned = x.transpose(1, 2)
            y = torch.bmm(self.w, turned.contiguous() if TURN_FIRST and self.w[0].numel() < SMALL else turned)
            return (y if self.b is None else y.add_(self.b[..., None])).transpose(1, 2)
        return torch.bmm(x, w) if self.b is None else torch.baddbmm(self.b[:, None], x, w)

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        if self.db is not None:
            torch.sum(dy, 1, out=self.db)
        if self.half:
            short = dy.bfloat16()
            self.dw.copy_(torch.bmm(short.transpose(1, 2), self.x.bfloat16()))
            return torch.bmm(short, self.w.bfloat16()).float() if need else dy
        if self.step is not None:
            dx = torch.bmm(dy, self.w) if need else dy
            self.w.baddbmm_((dy * -self.step).transpose(1, 2), self.x)
            return dx
        if dy.is_cpu and not self.dw.is_contiguous():  # the fast product of many small matrices writes only to adjacent ones
            self.dw.copy_(torch.bmm(dy.transpose(1, 2), self.x))
        else:
            torch.bmm(dy.transpose(1, 2), self.x, out=self.dw)
        return torch.bmm(dy, self.w) if need else dy


class Conv:
    def __init__(self, kernel: Convolution, w: Tensor, b: Tensor | None, dw: Tensor, db: Tensor | None) -> None:
        self.kernel, self.w, self.b, self.dw, self.db = kernel, w, b, dw, db

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.kernel.forward(x, self.w, self.b)

    @property
    def adds(self) -> bool:
        return isinstance(self.kernel, Pointwise) and self.kernel.stride == 1

    def backward(self, dy: Tensor, need: bool, onto: Tensor | None = None) -> Tensor:
        self.kernel.weight_gradient(self.x, dy, self.dw, self.db)
        if onto is not None and isinstance(self.kernel, Pointwise):
            return self.kernel.add_input_gradient(onto, dy, self.w)
        return self.kernel.input_gradient(self.x, dy, self.w) if need else dy


class ReLU:
    keeps = True  # what it put out: it goes back by that
    spare = False  # may the input's memory be used? nobody else needs it any more

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
        # Only the indices are read: the gradient may go into the input's place, which is still warm.
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
            # Every pixel in one window: the gradient is a copy, which torch's own is many times as slow as.
            share = (dy / (a * b)).permute(0, 2, 3, 1)[:, :, None, :, None].expand(images, high, a, wide, b, channels)
            return share.reshape(images, high * a, wide * b, channels).permute(0, 3, 1, 2)
        return aten.avg_pool2d_backward(dy, self.x, self.kernel, self.stride, [0, 0], False, True, None)  # type: ignore[no-any-return]


class Add:
    """Two branches added up; what is broadcast is summed on the way back."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        self.shapes = a.shape, b.shape
        return a + b

    def backward(self, dy: Tensor, need: bool) -> list[Tensor]:
        return [dy if dy.shape == shape else dy.sum_to_size(shape) for shape in self.shapes]


class Concatenate:
    """The channels of several branches side by side."""

    slices: Sequence[bool] = ()  # which sources are content with their channels where they stand?

    def forward(self, *parts: Tensor) -> Tensor:
        self.channels = [part.shape[1] for part in parts]
        return torch.cat(parts, 1)

    def backward(self, dy: Tensor, need: bool) -> list[Tensor]:
        slices = self.slices or [False] * len(self.channels)
        return [part if free else packed(part) for part, free in zip(dy.split(self.channels, 1), slices, strict=True)]


def packed(x: Tensor) -> Tensor:
    """x (N, C, H, W) in channels-last memory, copied where it is not."""
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
    """Normalisation by the statistics of a client's own batch. `live` (n, B) marks the samples that are more than padding, `size`
    (n, 1) counts them: others enter no statistic and send no gradient back, and where a client has none its running statistics stay
    as they are. One client without padding on a CPU is torch's own case, and the fastest."""

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
        live = self.live[..., None]  # sums go by sample first, so that leaving samples out costs no pass over the images
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


class Dropout:
    """Every client and sample draws its own mask."""

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


def supported(setting: Setting) -> bool:
    """Is the network made of layers that are written out here? What is found is kept: tracing is no work for several threads."""
    setting.graph = traced(setting.module, setting.x.dim() - 1)
    return setting.graph is not None


@dataclass(eq=False)
class Place:
    """A layer in its network, and the places that feed it (None is the network's input)."""

    layer: Layer
    sources: list[Place | None]
    need: bool  # is there something to train below?

    @property
    def trained(self) -> bool:
        return isinstance(self.layer, Linear | Conv | BatchNorm)

    @property
    def back(self) -> bool:
        """Does a gradient come this way?"""
        return self.need or self.trained


def users(places: list[Place]) -> Counter[Place | None]:
    return Counter(source for place in places for source in place.sources)


def spare(place: Place | None, count: Counter[Place | None]) -> bool:
    """Is what this place put out free to be written over by the one layer that reads it?"""
    if place is None or count[place] > 1:
        return False
    if isinstance(place.layer, Flatten):  # another look at the same memory
        return spare(place.sources[0], count)
    return not getattr(place.layer, "keeps", False)


def fresh(layer: Layer, own: bool) -> bool:
    """Is the gradient that a layer sends down in memory that nobody else looks at, if the one that it got is?"""
    return not isinstance(layer, Add) and (own or not isinstance(layer, Concatenate | Flatten))


class StackedNetwork:
    """n copies of a network: weights `w` (n, d), gradients `g` (n, d). `gradient` makes the second from the first."""

    def __init__(self, setting: Setting, n: int, conv: str = "loop") -> None:
        self.setting, self.n = setting, n
        # Between the layers; our kernels gain as much from moving half the bytes as from the faster products.
        self.dtype = torch.bfloat16 if setting.half and conv == "fused" else torch.float32
        layout, device = setting.layout, setting.device
        # Its own where several threads may draw at once; a captured graph needs torch's.
        self.generator: torch.Generator | None = torch.Generator() if device.type == "cpu" else None
        # On a GPU rows begin on multiples of 16 bytes: products of matrices that do not are up to twice as slow.
        row = -(-layout.d // 4) * 4 if device.type == "cuda" else layout.d
        self.w, self.g = (torch.zeros(n, row, device=device)[:, : layout.d] for _ in range(2))
        self.buffers = torch.zeros(n, layout.b, device=device)
        weights, grads = dict(layout.weights(self.w)), dict(layout.weights(self.g))
        self.places: list[Place] = []
        self.named: dict[str, Place] = {}
        made: dict[Node | None, Place | None] = {None: None}
        if setting.graph is None and not supported(setting):
            raise ValueError("a network with layers that are not written out")
        for node in setting.graph or []:
            layer, sources = self.layer(node.module, node.name, weights, grads, conv), [made[source] for source in node.sources]
            if layer is None:
                made[node] = sources[0]
                continue
            place = made[node] = Place(layer, sources, any(source is not None and source.back for source in sources))
            self.places.append(place)
            self.named[node.name] = place
        self.pair_up(fused=conv == "fused")
        layers = [place.layer for place in self.places]
        self.norms = [layer for layer in layers if isinstance(layer, BatchNorm)]
        # Alone on a CPU, a linear layer can step where its gradient is made: bound by memory as it is, two passes less.
        alone = n == 1 and device.type == "cpu" and not setting.half
        self.linear = [layer for layer in layers if isinstance(layer, Linear)] if alone else []
        stepped = {layer.w.data_ptr() for layer in self.linear}
        self.rest = (
            [(w.flatten(1), grads[name].flatten(1)) for name, w in weights.items() if w.data_ptr() not in stepped] if alone else []
        )

    def layer(self, module: nn.Module, name: str, w: dict[str, Tensor], g: dict[str, Tensor], conv: str) -> Layer | None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            parts = (w[f"{name}.weight"], w.get(f"{name}.bias"), g[f"{name}.weight"], g.get(f"{name}.bias"))
            if isinstance(module, nn.Linear):
                return Linear(*parts, half=self.setting.half)
            kernel, padding, stride = (pair(v)[0] for v in (module.kernel_size, module.padding, module.stride))
            return Conv(make_convolution(conv, self.n, kernel, padding, stride, self.setting.half), *parts)
        if isinstance(module, nn.BatchNorm2d):
            kept = dict(self.setting.layout.views(self.buffers))
            names = ("running_mean", "running_var", "num_batches_tracked")
            both = (w[f"{name}.weight"], w[f"{name}.bias"], g[f"{name}.weight"], g[f"{name}.bias"])
            return BatchNorm(module, *both, *(kept[f"{name}.{which}"] for which in names))
        if isinstance(module, nn.Flatten):
            return Flatten(self.n)
        if isinstance(module, nn.ReLU):
            return ReLU()
        if isinstance(module, nn.MaxPool2d):
            return MaxPool(module)
        if isinstance(module, nn.AdaptiveAvgPool2d):
            return MeanPool()
        if isinstance(module, nn.AvgPool2d):
            return AveragePool(module)
        if isinstance(module, Sum):
            return Add()
        if isinstance(module, Join):
            return Concatenate()
        if isinstance(module, nn.Dropout):
            return Dropout(module.p, self.generator) if module.p else None
        return None

    def pair_up(self, fused: bool) -> None:
        """ReLU and max pooling may change places, to the same result: pooling first leaves a quarter to rectify. Where there is a
        kernel that does several layers at once, use it."""
        count = users(self.places)
        for then in reversed(self.places):
            here = then.sources[0]
            if here is not None and count[here] == 1 and isinstance(here.layer, ReLU) and isinstance(then.layer, MaxPool):
                here.layer, then.layer = then.layer, here.layer
        if fused:
            from fedagg.engines.fused import fuse

            fuse(self.places)
        count = users(self.places)
        for place in self.places:
            if hasattr(place.layer, "spare"):
                place.layer.spare = spare(place.sources[0], count)

    @torch.no_grad()
    def gradient(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        """x (n·B, ...), y (n·B,), scale (n, B): the weight of each sample. Returns the weighted loss, (n,)."""
        x = self.taken(x)
        if self.norms:
            live = (scale > 0).to(scale.dtype)
            size = live.sum(1, keepdim=True)
            for norm in self.norms:
                norm.live, norm.size = live, size
        last = self.places[-1]
        loss, dy = self.loss(self.outputs(x)[last], y, scale)
        came, own = {last: dy}, {last}  # gradients on their way, and those among them that nobody else looks at
        for place in reversed(self.places):
            if not place.back:
                continue
            onto = [came[source] for source in place.sources if source in own] if getattr(place.layer, "adds", False) else []
            went = place.layer.backward(came.pop(place), place.need, *onto)
            for source, dx in zip(place.sources, went if isinstance(went, list) else [went], strict=True):
                if source is None or not source.back:
                    continue
                if source in came or fresh(place.layer, place in own):
                    own.add(source)
                came[source] = came[source] + dx if source in came and not onto else dx
        return loss

    def taken(self, x: Tensor) -> Tensor:
        """Samples in the form that the layers take them in."""
        return x.to(self.dtype, memory_format=torch.channels_last) if x.dim() == 4 else x

    def feeds(self, head: str) -> bool:
        """Is it known what that layer is given? Others may be done together with the one before them."""
        return head in self.named and isinstance(self.named[head].layer, Linear)

    @torch.no_grad()
    def fed(self, head: str, x: Tensor) -> Tensor:
        """What that layer is given for x (n·B, ...), (n, B, features), with every client in evaluation mode."""
        changing = [place.layer for place in self.places if isinstance(place.layer, BatchNorm | Dropout)]
        for layer in changing:
            layer.training = False
        given = self.outputs(self.taken(x))[self.named[head].sources[0]]
        for layer in changing:
            layer.training = True
        return given.reshape(self.n, -1, given.shape[-1])

    def outputs(self, x: Tensor) -> dict[Place | None, Tensor]:
        values: dict[Place | None, Tensor] = {None: x}
        for place in self.places:
            values[place] = place.layer.forward(*(values[source] for source in place.sources))
        return values

    @torch.no_grad()
    def descend(self, x: Tensor, y: Tensor, scale: Tensor, step: Tensor) -> Tensor:
        """As `gradient`, and a step (n, 1) along it, with fewer passes over the weights; `g` is not filled."""
        for layer in self.linear:
            layer.step = step[..., None]
        loss = self.gradient(x, y, scale)
        for layer in self.linear:
            layer.step = None
        for w, g in self.rest:
            w.addcmul_(g, step, value=-1.0)
        return loss

    def loss(self, output: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every client, and its gradient in the outputs; by hand for cross-entropy."""
        if self.setting.loss is cross_entropy and output.dim() == 3:
            logp = output.transpose(1, 2).log_softmax(1)
            target = y.view(len(scale), 1, -1)
            losses = -logp.gather(1, target).squeeze(1)
            dy = logp.exp_()
            dy.scatter_add_(1, target, torch.full_like(target, -1, dtype=dy.dtype))
            return (losses * scale).sum(1), dy.mul_(scale[:, None]).transpose(1, 2)
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            losses = self.setting.loss(leaf.flatten(0, 1), y).view_as(scale)
            total = (losses * scale).sum(1)
            (dy,) = torch.autograd.grad(total.sum(), leaf)
        return total.detach(), dy
