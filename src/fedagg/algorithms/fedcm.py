"""FedCM (Xu, Wang, Wang, Yao 2021): every local step mixes in the last round's global direction.

The local step is along α g + (1-α) Δ_t with Δ_{t+1} = mean_S (x_t - x_i)/(η K_i). Δ starts at zero, so the first round is
slow, as published.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, Outcome
from fedagg.flat import Layout, Model
from fedagg.work import Work


@register("fedcm")
@dataclass
class FedCM(Algorithm):
    cm_alpha: float = option(0.1, "α, the weight of the client's own gradient", gt=0, le=1)

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        self.state["direction"] = torch.zeros_like(model.w)

    def work(self, clients: Clients) -> Work:
        mix = torch.full((clients.epochs, 1), 1 - self.cm_alpha)
        return replace(super().work(clients), own=self.cm_alpha, field=self.state["direction"][None], mix=mix)

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        self.state["direction"] = -out.velocity
        return model.moved(out.plain, out.buffers)
