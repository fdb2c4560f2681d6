"""Many copies of one network as one: layers whose weights have a leading client axis.

For networks made of the layers below, in a chain or with branches that are added or concatenated, forward and backward passes are
written out for stacks of clients. Products become batched products, everything between them is one operation for all clients, and
gradients are written where the update reads them, with no autograd, no module calls and no copies. Activations are (n·B, C, H, W)
in channels-last memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedagg.engines.base import Problem
from fedagg.engines.conv import Convolution, Loop, Pointwise
from fedagg.engines.graph import Join, Node, Sum, pair, traced
from fedagg.engines.layers import (
    Add,
    Aside,
    AveragePool,
    BatchNorm,
    Concatenate,
    Conv,
    Dropout,
    Flatten,
    GroupNorm,
    Layer,
    Linear,
    MaxPool,
    MeanPool,
    Place,
    ReLU,
    fresh,
    spare,
    users,
)
from fedagg.engines.sequence import GELU, Attention, Embed, LastOne, LayerNorm, Recurrent, Shift
from fedagg.models.text import LSTM, CausalAttention, Last, Positions
from fedagg.work import cross_entropy

SHORT = torch.bfloat16
HELD_FROM = 1 << 16  # weights of a linear layer
HELD_TO = 128  # samples of a batch: with more, libraries are better at their product


def supported(problem: Problem) -> bool:
    """Is the network made of layers that are written out?"""
    return graph_of(problem) is not None


def graph_of(problem: Problem) -> list[Node] | None:
    """The network's layers, traced unless the problem already has them; None if some are not written out."""
    return problem.graph or traced(problem.module, problem.x.dim() - 1)


def make_convolution(form: str, n: int, kernel: int, padding: int, stride: int, half: bool) -> Convolution:
    # Also on a CPU: a product is faster than oneDNN, which writes past the end of the gradient if there are few input channels.
    if kernel == 1 and padding == 0 and (form == "fused" or not half):
        return Pointwise(n, stride)
    if form == "fused":
        from fedagg.engines.fused import FusedConvolution

        return FusedConvolution(n, padding, stride)
    return Loop(n, padding, stride, half)


class StackedNetwork:
    """n copies of a network: weights `w` (n, d), gradients `g` (n, d). `gradient` computes `g` from `w`."""

    def __init__(self, problem: Problem, n: int, conv: str = "loop", within: StackedNetwork | None = None) -> None:
        self.problem, self.n, self.conv, self.fused = problem, n, conv, conv == "fused"
        # Between layers: our kernels gain as much from moving half the bytes as from faster products.
        self.dtype = SHORT if problem.half and self.fused else torch.float32
        layout, device = problem.layout, problem.device
        self.generator: torch.Generator | None
        if within is None:
            # Its own generator if several threads may draw at once; a captured graph needs torch's.
            self.generator = torch.Generator() if device.type == "cpu" else None
            # On a GPU rows begin at multiples of 16 numbers: otherwise products of matrices are up to twice as slow, and our
            # kernels cannot load several numbers at a time.
            row = -(-layout.d // 16) * 16 if device.type == "cuda" else layout.d
            self.w, self.g = (torch.zeros(n, row, device=device)[:, : layout.d] for _ in range(2))
            self.buffers = torch.zeros(n, layout.b, device=device)
            self.short: dict[str, Tensor] = {}  # weights that the step keeps in 16 bits too, as products read them
        else:
            self.generator, self.w, self.g, self.buffers = within.generator, within.w[:n], within.g[:n], within.buffers[:n]
            self.short = {name: short[:n] for name, short in within.short.items()}
        weights, grads = dict(layout.weights(self.w)), dict(layout.weights(self.g))
        self.places: list[Place] = []
        self.named: dict[str, Place] = {}
        made: dict[Node | None, Place | None] = {None: None}
        graph = graph_of(problem)
        if graph is None:
            raise ValueError("a network with layers that are not written out")
        for node in graph:
            layer, sources = self.layer(node.module, node.name, weights, grads, conv), [made[source] for source in node.sources]
            if layer is None:
                made[node] = sources[0]
                continue
            place = made[node] = Place(layer, sources, any(source is not None and source.back for source in sources))
            self.places.append(place)
            self.named[node.name] = place
        self.pair_up()
        layers = [place.layer for place in self.places]
        self.flattens = all(isinstance(place.layer, Flatten) for place in self.places if None in place.sources)
        self.norms = [layer for layer in layers if isinstance(layer, BatchNorm)]
        self.aside = Aside(device) if self.fused and device.type == "cuda" else None
        for layer in layers:
            if isinstance(layer, Conv) and self.aside is not None:
                layer.aside = self.aside
        # A single client's linear layer on a CPU is limited by memory. Stepping while its gradient is computed saves two passes.
        alone = n == 1 and device.type == "cpu" and not problem.half
        self.linear = [layer for layer in layers if isinstance(layer, Linear)] if alone else []
        stepped = {layer.w.data_ptr() for layer in self.linear}
        self.rest = (
            [(w.flatten(1), grads[name].flatten(1)) for name, w in weights.items() if w.data_ptr() not in stepped] if alone else []
        )

    def first(self, n: int) -> StackedNetwork:
        return StackedNetwork(self.problem, n, self.conv, within=self)

    def hold(self, batch: int) -> list[Linear | Conv]:
        """Have layers leave the gradient of their weights to the step, for batches of this size, and return them: large linear
        layers, but not in texts, where all positions of a batch are summed; and convolutions that can. After that, whoever sets `w`
        calls `refresh`."""
        rows = self.problem.x.is_floating_point() and self.problem.x.dim() in (2, 4) and batch <= HELD_TO
        held: list[Linear | Conv] = []
        for name, place in self.named.items():
            layer = place.layer
            if isinstance(layer, Linear) and rows and layer.w[0].numel() >= HELD_FROM:
                layer.holds = True
                if layer.half:
                    layer.short = self.room(name, layer.w.shape)
                held.append(layer)
            if isinstance(layer, Conv) and self.fused and self.dtype.itemsize == 2:
                from fedagg.engines.fused import FusedConvolution

                n, outputs, channels, k, _ = layer.w.shape
                if isinstance(layer.kernel, FusedConvolution) and layer.kernel.may_hold(channels):
                    layer.dw = layer.kernel.hold(layer.dw, self.room(name, (n, outputs, k, k, channels)))
                    held.append(layer)
        return held

    def room(self, name: str, shape: Sequence[int]) -> Tensor:
        """Memory for a layer's weights in 16 bits. A network within another one uses that one's."""
        if name not in self.short:
            self.short[name] = self.w.new_empty(shape, dtype=SHORT)
        return self.short[name]

    def refresh(self) -> None:
        """Compute what is kept of the weights in another form."""
        if self.short:
            from fedagg.engines.fused import turned

            for name, short in self.short.items():
                layer = self.named[name].layer
                if isinstance(layer, Conv):
                    turned(layer.w, short.dtype, short)
                elif isinstance(layer, Linear):
                    short.copy_(layer.w)

    def layer(self, module: nn.Module, name: str, w: dict[str, Tensor], g: dict[str, Tensor], conv: str) -> Layer | None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            parts = (w[f"{name}.weight"], w.get(f"{name}.bias"), g[f"{name}.weight"], g.get(f"{name}.bias"))
            if isinstance(module, nn.Linear):
                return Linear(*parts, half=self.problem.half)
            kernel, padding, stride = (pair(v)[0] for v in (module.kernel_size, module.padding, module.stride))
            return Conv(make_convolution(conv, self.n, kernel, padding, stride, self.problem.half), *parts)
        if isinstance(module, nn.BatchNorm2d):
            kept = dict(self.problem.layout.views(self.buffers))
            names = ("running_mean", "running_var", "num_batches_tracked")
            both = (w[f"{name}.weight"], w[f"{name}.bias"], g[f"{name}.weight"], g[f"{name}.bias"])
            return BatchNorm(module, *both, *(kept[f"{name}.{which}"] for which in names))
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            both = (w[f"{name}.weight"], w[f"{name}.bias"], g[f"{name}.weight"], g[f"{name}.bias"])
            return LayerNorm(module, *both) if isinstance(module, nn.LayerNorm) else GroupNorm(module, *both)
        if isinstance(module, nn.Embedding | Positions):
            return (Embed if isinstance(module, nn.Embedding) else Shift)(w[f"{name}.weight"], g[f"{name}.weight"])
        if isinstance(module, LSTM):
            stack = [[f"{name}.{part}" for part in module.names(layer)] for layer in range(module.layers)]
            weights, grads = ([[which[part] for part in layer] for layer in stack] for which in (w, g))
            return Recurrent(module, weights, grads, self.problem.half)
        if isinstance(module, CausalAttention):
            return Attention(module, self.problem.half)
        if isinstance(module, Last):
            return LastOne()
        if isinstance(module, nn.GELU):
            return GELU(module)
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

    def pair_up(self) -> None:
        """Swap ReLU and max pooling, which gives the same result: after pooling only a quarter is left to rectify. If there are
        kernels for several layers at once, use them."""
        count = users(self.places)
        for then in reversed(self.places):
            here = then.sources[0]
            if here is not None and count[here] == 1 and isinstance(here.layer, ReLU) and isinstance(then.layer, MaxPool):
                here.layer, then.layer = then.layer, here.layer
        if self.fused:
            from fedagg.engines.fused import fuse

            fuse(self.places)
        count = users(self.places)
        for place in self.places:
            if hasattr(place.layer, "spare"):
                place.layer.spare = spare(place.sources[0], count)

    @torch.no_grad()
    def gradient(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        """Compute `g` for x (n·B, ...), y (n·B,) and the weight of each sample, scale (n, B). Returns the weighted loss, (n,)."""
        x = self.taken(x)
        if self.norms:
            live = (scale > 0).to(scale.dtype)
            size = live.sum(1, keepdim=True)
            for norm in self.norms:
                norm.live, norm.size = live, size
        last = self.places[-1]
        loss, dy = self.loss(self.outputs(x)[last], y, scale)
        came, own = {last: dy}, {last}  # pending gradients, and those of them that nothing else reads
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
        if self.aside is not None:
            self.aside.join()
        return loss

    def taken(self, x: Tensor) -> Tensor:
        """Samples in the type and memory order that the layers need."""
        return x.to(self.dtype, memory_format=torch.channels_last) if x.dim() == 4 and not self.flattens else x

    def feeds(self, head: str) -> bool:
        """Is the input of that layer available? Other layers may be fused with the one before them."""
        return head in self.named and isinstance(self.named[head].layer, Linear)

    @torch.no_grad()
    def fed(self, head: str, x: Tensor) -> Tensor:
        """The input of that layer for x (n·B, ...), (n, B, features), with every client in evaluation mode."""
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
        """As `gradient`, with a step (n, 1) along it, in fewer passes over the weights; `g` is not filled."""
        for layer in self.linear:
            layer.step = step[..., None]
        loss = self.gradient(x, y, scale)
        for layer in self.linear:
            layer.step = None
        for w, g in self.rest:
            w.addcmul_(g, step, value=-1.0)
        return loss

    def loss(self, output: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every client, and its gradient with respect to the outputs; written out for cross-entropy."""
        written = self.problem.loss is cross_entropy and output.dim() == 3
        if written and self.fused:
            from fedagg.engines.fused import MOST_CLASSES, softmax_loss

            if output.shape[2] <= MOST_CLASSES:
                return softmax_loss(output, y, scale)
        if written:
            logp = output.transpose(1, 2).log_softmax(1)
            target = y.view(len(scale), 1, -1)
            losses = -logp.gather(1, target).squeeze(1)
            dy = logp.exp_()
            dy.scatter_add_(1, target, torch.full_like(target, -1, dtype=dy.dtype))
            return (losses * scale).sum(1), dy.mul_(scale[:, None]).transpose(1, 2)
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            losses = vmap(self.problem.loss, randomness="different")(leaf, y.view(*scale.shape, *y.shape[1:]))  # a client at a time
            total = (losses * scale).sum(1)
            (dy,) = torch.autograd.grad(total.sum(), leaf)
        return total.detach(), dy
