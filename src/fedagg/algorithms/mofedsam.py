"""MoFedSAM (Qu et al. 2022): FedSAM's gradient in FedCM's step.

The local step is along α g(w + ρ g/|g|) + (1-α) Δ_t with FedCM's Δ_t. Checked against FL-Simulator (woodenchild95, `mofedsam.py`,
`MoFedSAM.py` and `ESAM.py`), which also gives α = 0.1 and ρ = 0.1. There Δ_t is divided by the first client's number of steps;
here, by each client's own.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from fedagg.algorithms.base import option, register
from fedagg.algorithms.fedcm import FedCM
from fedagg.algorithms.fedsam import uphill
from fedagg.clients import Clients
from fedagg.work import Client, Gradient, State, Work


@register("mofedsam")
@dataclass
class MoFedSAM(FedCM):
    rho: float = option(0.1, "ρ, how far uphill the gradient is taken", ge=0)

    def work(self, clients: Clients) -> Work:
        return replace(super().work(clients), step=self.step, pure=True)

    def step(self, client: Client, w: Tensor, gradient: Gradient, rate: Tensor, state: State) -> tuple[Tensor, State]:
        assert client.shift is not None
        return w - rate * (self.cm_alpha * gradient(uphill(w, gradient(w), self.rho)) + client.shift), state
