"""The layers of `stacked` for text. Samples are rows of token ids, (n·B, T); activations are (n, B, T, features)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedagg.models.text import LSTM, CausalAttention, later

aten = torch.ops.aten


def product(a: Tensor, b: Tensor, half: bool) -> Tensor:
    """A batched product; with `half`, in bfloat16."""
    return torch.bmm(a.bfloat16(), b.bfloat16()).float() if half else torch.bmm(a, b)


class Embed:
    def __init__(self, w: Tensor, dw: Tensor) -> None:
        self.w, self.dw = w, dw
        self.first = torch.arange(len(w), device=w.device)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        self.ids = x.reshape(len(self.w), -1)
        return self.w[self.first, self.ids].view(len(self.w), -1, x.shape[1], self.w.shape[2])

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        n, size, width = self.w.shape
        rows = (self.ids + size * self.first).view(-1)  # as one table: torch's gradient of it adds in a fixed order on a GPU too
        self.dw.copy_(aten.embedding_dense_backward(dy.reshape(-1, width), rows, n * size, -1, False).view_as(self.dw))
        return dy


class Shift:
    """Adds the weights for a token's position."""

    def __init__(self, w: Tensor, dw: Tensor) -> None:
        self.w, self.dw = w, dw

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w[:, None]

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        torch.sum(dy, 1, out=self.dw)
        return dy


class LayerNorm:
    def __init__(self, module: nn.LayerNorm, w: Tensor, b: Tensor, dw: Tensor, db: Tensor) -> None:
        self.w, self.b, self.dw, self.db, self.eps = w, b, dw, db, module.eps

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        self.normed, self.mean, self.scale = aten.native_layer_norm(x, x.shape[-1:], None, None, self.eps)
        w, b = (part.view(len(part), *[1] * (x.dim() - 2), -1) for part in (self.w, self.b))
        return torch.addcmul(b, self.normed, w)

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        axes = list(range(1, dy.dim() - 1))
        torch.sum(dy, axes, out=self.db)
        torch.sum(self.normed.mul_(dy), axes, out=self.dw)
        if not need:
            return dy
        dy = dy * self.w.view(len(self.w), *[1] * (dy.dim() - 2), -1)
        dx, _, _ = aten.native_layer_norm_backward(
            dy, self.x, self.x.shape[-1:], self.mean, self.scale, None, None, [True, False, False]
        )
        return dx  # type: ignore[no-any-return]


class GELU:
    def __init__(self, module: nn.GELU) -> None:
        self.approximate = module.approximate

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return aten.gelu(x, approximate=self.approximate)  # type: ignore[no-any-return]

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        return aten.gelu_backward(dy, self.x, approximate=self.approximate) if need else dy


class Attention:
    """`CausalAttention` for all clients' samples and heads at once: it has no weights."""

    def __init__(self, module: CausalAttention, half: bool) -> None:
        self.heads, self.half = module.heads, half

    def forward(self, x: Tensor) -> Tensor:
        n, batch, length, wide = x.shape
        self.shape = n * batch, length, 3, self.heads, wide // (3 * self.heads)
        self.q, self.k, self.v = x.reshape(self.shape).permute(2, 0, 3, 1, 4).reshape(3, -1, length, self.shape[-1])
        scores = product(self.q, self.k.mT, self.half).mul_(1 / math.sqrt(self.shape[-1]))
        self.seen = aten._softmax(scores.add_(later(scores)), -1, False)
        y = product(self.seen, self.v, self.half)
        return y.view(-1, self.heads, length, self.shape[-1]).transpose(1, 2).reshape(n, batch, length, wide // 3)

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        if not need:
            return dy
        n, batch, length, wide = dy.shape
        dy = dy.reshape(-1, length, self.heads, self.shape[-1]).transpose(1, 2).reshape(self.q.shape)
        ds = aten._softmax_backward_data(product(dy, self.v.mT, self.half), self.seen, -1, dy.dtype)
        ds = ds.mul_(1 / math.sqrt(self.shape[-1]))
        pairs = (ds, self.k), (ds.mT, self.q), (self.seen.mT, dy)
        dx = torch.stack([product(a, b, self.half) for a, b in pairs]).view(3, -1, self.heads, length, self.shape[-1])
        return dx.permute(1, 3, 0, 2, 4).reshape(n, batch, length, 3 * wide)


class LastOne:
    """The state at the last position."""

    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        return x[:, :, -1].clone()  # a copy, not a view of memory that a layer keeps

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        if not need:
            return dy
        dx = dy.new_zeros(self.shape)
        dx[:, :, -1] = dy
        return dx


class Recurrent:
    """The layers of an `LSTM`. Between them, values are ordered by time, (T, n, B, ...), so that those of a step are contiguous.
    What does not depend on the step before (products with the inputs, gradients of weights) is one product for all steps."""

    keeps = True  # its output is needed in the backward pass

    def __init__(self, module: LSTM, w: list[list[Tensor]], dw: list[list[Tensor]], half: bool) -> None:
        self.w, self.dw, self.hidden, self.half = w, dw, module.hidden, half

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(2, 0, 1, 3)
        self.kept = []
        for w, u, b, c in self.w:
            given = product(by_client(x), w.mT, self.half).add_((b + c)[:, None])
            gates = by_time(given, x.shape)
            cells = torch.empty(len(x) + 1, *x.shape[1:3], self.hidden, device=x.device)
            states, tanhs = torch.empty_like(cells), torch.empty_like(cells[1:])
            cells[0], states[0] = 0.0, 0.0
            turned = u.mT.bfloat16() if self.half else u.mT
            for at, gate in enumerate(gates):
                if self.half:
                    gate += torch.bmm(states[at].bfloat16(), turned)
                else:
                    gate.baddbmm_(states[at], turned)
                self.cell(gate, cells[at], cells[at + 1], tanhs[at], states[at + 1])
            self.kept.append((x, gates, cells, states, tanhs))
            x = states[1:]
        return x.permute(1, 2, 0, 3)

    def cell(self, gate: Tensor, before: Tensor, after: Tensor, tanh: Tensor, state: Tensor) -> None:
        """One step, to the cell after it, its tanh, and the state. The gates' sums are replaced by the gates."""
        i, f, g, o = gate.chunk(4, -1)
        gate[..., : 2 * self.hidden].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, before, out=after).addcmul_(i, g)
        torch.tanh(after, out=tanh)
        torch.mul(o, tanh, out=state)

    def cell_gradient(self, gate: Tensor, before: Tensor, tanh: Tensor, dy: Tensor, back: Tensor, flow: Tensor) -> None:
        """One step back. The gates are replaced by the gradient of their sums, and `flow`, the gradient of the cell after the step,
        by that of the cell before it. `back` is the gradient of the state from the next step, `dy` from the layer above."""
        i, f, g, o = gate.chunk(4, -1)
        room = torch.empty_like(gate)
        slots, both = room.chunk(4, -1), room[..., : 2 * self.hidden]
        back = back + dy
        flow += aten.tanh_backward(back * o, tanh)
        for part, other, into in zip((flow, flow, flow, back), (g, before, i, tanh), slots, strict=True):
            torch.mul(part, other, out=into)
        flow *= f
        # Through the gates' functions.
        aten.sigmoid_backward.grad_input(both, gate[..., : 2 * self.hidden], grad_input=gate[..., : 2 * self.hidden])
        aten.tanh_backward.grad_input(slots[2], g, grad_input=g)
        aten.sigmoid_backward.grad_input(slots[3], o, grad_input=o)

    def backward(self, dy: Tensor, need: bool) -> Tensor:
        dy = dy.permute(2, 0, 1, 3)
        for layer in reversed(range(len(self.w))):
            (w, u, _, _), (dw, du, db, dc) = self.w[layer], self.dw[layer]
            x, gates, cells, states, tanhs = self.kept.pop()
            flow, back = torch.zeros_like(cells[0]), torch.zeros_like(cells[0])  # gradients of cell and state, from the next step
            turned = u.bfloat16() if self.half else u
            for at in reversed(range(len(x))):
                self.cell_gradient(gates[at], cells[at], tanhs[at], dy[at], back, flow)
                back = product(gates[at], turned, self.half)
            gradient = by_client(gates)
            du.copy_(product(gradient.mT, by_client(states[:-1]), self.half))
            dw.copy_(product(gradient.mT, by_client(x), self.half))
            torch.sum(gradient, 1, out=db)
            dc.copy_(db)
            if layer or need:
                dy = by_time(product(gradient, w, self.half), x.shape)
        return dy.permute(1, 2, 0, 3)


def by_client(x: Tensor) -> Tensor:
    """(T, n, B, F) as (n, T·B, F)."""
    return x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[3])


def by_time(x: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `by_client`, contiguous."""
    length, n, batch, _ = shape
    return x.view(n, length, batch, -1).transpose(0, 1).contiguous()
