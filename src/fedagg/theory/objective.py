r"""The objective of a run as the paper writes it, $F = \sum_i\theta_i F_i$ (Eq. 3), with its gradient, in float64.

Training uses mini-batches of F in float32; the analysis is about F itself. Weight decay is part of F, as
$\frac{\lambda}{2}|w|^2$ in every F_i, because the clients' steps include it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedagg.errors import SettingError
from fedagg.flat import Layout
from fedagg.theory import constants
from fedagg.work import cross_entropy

BATCH = 4096


class Objective:
    """All clients' losses as functions of flat weights (d,), with the network in evaluation mode.

    Args:
        module: the network; copied.
        x: training samples, and y their labels.
        parts: the indices of every client's samples.
        weight_decay: the clients' weight decay.
        beta: the smoothness of Assumption 1; only the printed constant of Algorithm 1 needs it.
    """

    def __init__(
        self,
        module: nn.Module,
        x: Tensor,
        y: Tensor,
        parts: Sequence[Any],
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float64,
        beta: float = float("nan"),
    ) -> None:
        self.module = copy.deepcopy(module).cpu().to(dtype).eval()
        self.layout = Layout(self.module)
        self.shapes = dict(self.layout.parameters)
        self.x, self.y, self.dtype = x.cpu(), y.cpu(), dtype
        self.samples = [torch.as_tensor(np.asarray(part), dtype=torch.int64) for part in parts]
        self.dealt = torch.cat(self.samples)
        self.theta = torch.tensor([float(len(part)) for part in self.samples], dtype=dtype) / len(self.dealt)
        self.weight_decay, self.beta = weight_decay, beta
        self.origin: Tensor | None = None

    def around(self, w: Tensor) -> Objective:
        """The same clients, with positions measured from w."""
        other = copy.copy(self)
        other.origin = w
        return other

    @property
    def imbalance(self) -> float:
        """Σ_i |θ_i - 1/N|."""
        return float((self.theta - 1.0 / len(self.theta)).abs().sum())

    def loss_of(self, w: Tensor, samples: Tensor) -> Tensor:
        """The mean loss on some samples, differentiable twice."""
        x = self.x[samples]
        x = x.to(self.dtype) if x.is_floating_point() else x
        return cross_entropy(self.outputs(w, x), self.y[samples]).mean() + 0.5 * self.weight_decay * w.square().sum()

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        weights = {name: view.reshape(self.shapes[name]) for name, view in self.layout.weights(w)}
        out: Tensor = functional_call(self.module, weights, (x,))
        return out

    def value_and_gradient(self, w: Tensor, samples: Tensor | None = None) -> tuple[float, Tensor]:
        """F(w) and ∇F(w), or the same for some samples, computed in pieces that fit into memory."""
        chosen = self.dealt if samples is None else samples
        at = w.to(self.dtype) if self.origin is None else self.origin.to(self.dtype) + w.to(self.dtype)
        value, gradient = 0.0, torch.zeros_like(at)
        for piece in torch.split(chosen, BATCH):
            here = at.clone().requires_grad_(True)
            loss = self.loss_of(here, piece)
            (part,) = torch.autograd.grad(loss, here)
            value += float(loss.detach()) * len(piece) / len(chosen)
            gradient += part * (len(piece) / len(chosen))
        return value, gradient

    def gradients(self, w: Tensor) -> Tensor:
        """∇F_i(w_i) for a stack (N, d) of positions, or ∇F_i(w) of all clients at one w (d,)."""
        return torch.stack(list(self.each_gradient(w)))

    def each_gradient(self, w: Tensor) -> Iterator[Tensor]:
        """The same, one client at a time."""
        for samples, at in zip(self.samples, w if w.dim() == 2 else w.expand(len(self.samples), -1), strict=True):
            yield self.value_and_gradient(at, samples)[1]

    def client_smoothness(self, w: Tensor, client: int, iterations: int = 20) -> float:
        """The curvature of one client's loss at w, by power iteration. It is at most the client's β, the largest over all w."""
        seeded = torch.Generator().manual_seed(client)
        samples = self.samples[client]
        return constants.smoothness(lambda v: self.loss_of(v, samples), w.to(self.dtype), iterations, seeded)

    # --- The linear model, about which more is known ---

    @property
    def linear(self) -> nn.Linear | None:
        """The only layer of a linear model; None for other models."""
        leaves = [m for m in self.module.modules() if not list(m.children()) and not isinstance(m, nn.Flatten)]
        layer = leaves[0] if len(leaves) == 1 else None
        if not isinstance(layer, nn.Linear) or not all(p.requires_grad for p in layer.parameters()):
            return None
        return layer

    def smoothness_bound(self) -> float | None:
        r"""β of the linear model, valid for all w: $\max_i\frac12\lambda_{\max}(X_i^\top X_i/D_i)$ + weight decay.

        The Hessian of the cross-entropy in the outputs, diag(p) - pp', is at most 1/2.
        """
        if (layer := self.linear) is None:
            return None
        largest = 0.0
        for samples in self.samples:
            x = self.x[samples].flatten(1).double()
            x = torch.cat([x, torch.ones_like(x[:, :1])], 1) if layer.bias is not None else x
            gram = x @ x.T if len(x) < x.shape[1] else x.T @ x
            largest = max(largest, float(torch.linalg.eigvalsh(gram)[-1]) / len(x))
        return 0.5 * largest + self.weight_decay

    @property
    def unknowns(self) -> int | None:
        """The most unknowns that w* of the linear model can have; None for other models."""
        layer = self.linear
        return None if layer is None else (layer.out_features - 1) * (layer.in_features + (layer.bias is not None))

    def solve(self, dense_limit: int) -> constants.SoftmaxSolution:
        """w* of the linear model by a full solve. With weight decay, no Hessian is needed to know the curvature."""
        layer = self.linear
        if layer is None:
            raise SettingError("model", type(self.module).__name__, "only the linear model can be solved")
        x, y = self.x[self.dealt], self.y[self.dealt]
        dense = 0 if self.weight_decay > 0.0 else dense_limit
        return constants.solve_softmax(x, y, layer.out_features, self.weight_decay, bias=layer.bias is not None, dense_limit=dense)

    def as_matrix(self, w: Tensor) -> Tensor:
        """Flat weights of the linear model in the form that `solve` uses: (classes, features [+ 1 for the bias])."""
        pieces = dict(self.layout.weights(w.double()))
        return torch.cat([piece if piece.dim() == 2 else piece[:, None] for piece in pieces.values()], 1)

    def as_vector(self, matrix: Tensor) -> Tensor:
        """The inverse of `as_matrix`."""
        layer = self.linear
        features = matrix.shape[1] if layer is None else layer.in_features
        return torch.cat([matrix[:, :features].flatten(), matrix[:, features:].flatten()])
