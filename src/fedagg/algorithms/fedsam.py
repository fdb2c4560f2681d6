"""FedSAM (Qu et al. 2022; Caldarola et al. 2022): clients look for flat minima.

Every step uses the gradient at a point uphill of the client's weights, g(w + ρ g/|g|), on the same batch, so a step takes two
backward passes. The server takes the plain mean. Checked against FL-Simulator (woodenchild95, `fedsam.py` and `ESAM.py`), which
also gives ρ = 0.1.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, Outcome
from fedagg.flat import Model
from fedagg.work import Client, Gradient, State, Work


def uphill(w: Tensor, g: Tensor, rho: float) -> Tensor:
    """The point at distance ρ along the gradient; w itself if the gradient is zero."""
    length: Tensor = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
    return w + rho * g / length.clamp_min(1e-12)


@register("fedsam")
@dataclass
class FedSAM(Algorithm):
    rho: float = option(0.1, "ρ, how far uphill the gradient is taken", ge=0)

    def work(self, clients: Clients) -> Work:
        return replace(super().work(clients), step=self.step, pure=True)

    def step(self, client: Client, w: Tensor, gradient: Gradient, rate: Tensor, state: State) -> tuple[Tensor, State]:
        return w - rate * gradient(uphill(w, gradient(w), self.rho)), state

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        return model.moved(out.plain, out.buffers)
