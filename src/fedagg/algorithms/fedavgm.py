"""FedAvgM (Hsu, Qi, Brown 2019): momentum at the server.

v ← β v + Σ θ_i Δ_i, w ← w + γ v. β = 0.9 is the paper's usual choice. The paper has no γ; it is 1 here.
"""

from dataclasses import dataclass

import torch
from torch import nn

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, Outcome
from fedagg.flat import Layout, Model


@register("fedavgm")
@dataclass
class FedAvgM(Algorithm):
    beta1: float = option(0.9, "β, momentum of the server's step", ge=0, lt=1)
    server_lr: float = option(1.0, "γ, length of the server's step", gt=0)

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        self.state["v"] = torch.zeros_like(model.w)

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        self.state["v"] = self.beta1 * self.state["v"] + out.mean
        return model.moved(self.server_lr * self.state["v"], out.buffers)
