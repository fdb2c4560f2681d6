"""Networks that read text, as rows of token ids, (B, T), and predict the next token: after the last position, or at every position.

Each of their layers has one input and one output, so that the engines can trace them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

EMBEDDING, HIDDEN, LAYERS = 8, 256, 2  # char-lstm
WIDTH, HEADS, BLOCKS = 128, 4, 4  # char-transformer


class LSTM(nn.Module):
    """`nn.LSTM` with batches first, and with the same parameters and names; it returns the last layer's state at every position.

    Torch's own LSTM cannot be vectorised over clients (`vmap` runs it one client after another). In that case the cell is written
    out.
    """

    def __init__(self, inputs: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.inputs, self.hidden, self.layers = inputs, hidden, layers
        gates, limit = 4 * hidden, 1 / math.sqrt(hidden)
        for layer in range(layers):
            shapes = (gates, hidden if layer else inputs), (gates, hidden), (gates,), (gates,)
            for name, size in zip(self.names(layer), shapes, strict=True):
                self.register_parameter(name, nn.Parameter(torch.empty(size).uniform_(-limit, limit)))

    @staticmethod
    def names(layer: int) -> tuple[str, str, str, str]:
        return f"weight_ih_l{layer}", f"weight_hh_l{layer}", f"bias_ih_l{layer}", f"bias_hh_l{layer}"

    def weights(self, layer: int) -> list[Tensor]:
        return [getattr(self, name) for name in self.names(layer)]

    def forward(self, x: Tensor) -> Tensor:
        if is_functorch_wrapped_tensor(x) or is_functorch_wrapped_tensor(self.weights(0)[0]):
            for layer in range(self.layers):
                x = cells(x, *self.weights(layer))
            return x
        start = x.new_zeros(self.layers, len(x), self.hidden)
        flat = [weight for layer in range(self.layers) for weight in self.weights(layer)]
        return torch.lstm(x, (start, start), flat, True, self.layers, 0.0, self.training, False, True)[0]

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.hidden}, layers={self.layers}"


def cells(x: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One layer of an LSTM, position by position: x (B, T, I) to (B, T, H), with the gates in torch's order."""
    given, turned, states = F.linear(x, w, b + c), u.t(), []
    state = cell = torch.zeros_like(given[:, 0, : u.shape[1]])
    for at in given.unbind(1):
        i, f, g, o = (at + state @ turned).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = o.sigmoid() * cell.tanh()
        states.append(state)
    return torch.stack(states, 1)


class Positions(nn.Module):
    """Adds a learnt vector for its position to every token."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class CausalAttention(nn.Module):
    """Attention from every position to itself and those before it; queries, keys and values come side by side, (B, T, 3 E)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, E / heads) each
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        seen = (scores + later(scores)).softmax(-1)
        return (seen @ v).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


def later(scores: Tensor) -> Tensor:
    """Minus infinity where a column comes after its row, else 0."""
    return torch.full(scores.shape[-2:], -math.inf, dtype=scores.dtype, device=scores.device).triu_(1)


class Last(nn.Module):
    """The state at the last position."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


class Block(nn.Module):
    """A transformer block with the norms first, which trains without a warm-up of the rate (Xiong et al., ICML 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 3 * width), CausalAttention(heads), nn.Linear(width, width)
        )
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


def char_lstm(shape: tuple[int], classes: int, *, tokens: bool) -> nn.Sequential:
    """LEAF's network for Shakespeare (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018): an embedding of 8, two
    layers of LSTM with 256 units, and a dense layer on the last state. Torch's LSTM has two biases where TensorFlow's has one."""
    return nn.Sequential(
        nn.Embedding(classes, EMBEDDING),
        LSTM(EMBEDDING, HIDDEN, LAYERS),
        nn.Identity() if tokens else Last(),
        nn.Linear(HIDDEN, classes),
    )


def char_transformer(shape: tuple[int], classes: int, *, tokens: bool) -> nn.Sequential:
    """A small GPT (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019), about as large as `char-lstm`:
    four blocks with the norms first, width 128, four heads, learnt positions, GPT-2's initial weights, no dropout."""
    model = nn.Sequential(
        nn.Embedding(classes, WIDTH),
        Positions(shape[0], WIDTH),
        *(Block(WIDTH, HEADS) for _ in range(BLOCKS)),
        nn.LayerNorm(WIDTH),
        nn.Identity() if tokens else Last(),
        nn.Linear(WIDTH, classes),
    )
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | Positions):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    for block in model.children():
        if isinstance(block, Block):  # all blocks add to the same sum, twice each
            for branch in (block.attention, block.mlp):
                nn.init.normal_(branch[-1].weight, std=0.02 / math.sqrt(2 * BLOCKS))  # type: ignore[arg-type]
    return model
