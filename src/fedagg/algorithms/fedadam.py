"""FedAdam (Reddi et al. 2021): the mean update is a pseudo-gradient for Adam at the server.

v starts at τ². There is no bias correction. Only trainable weights pass through the optimiser; buffers are averaged.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, Outcome
from fedagg.flat import Layout, Model


@register("fedadam")
@dataclass
class FedAdam(Algorithm):
    server_lr: float = option(0.01, "learning rate of the server", gt=0)
    beta1: float = option(0.9, "momentum of the server's step", ge=0, lt=1)
    beta2: float = option(0.99, "weight of earlier rounds in the second moment", ge=0, lt=1)
    tau: float = option(1e-3, "adaptivity: the smaller, the more steps differ between weights", gt=0)

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        self.state["m"] = torch.zeros_like(model.w)
        self.state["v"] = torch.full_like(model.w, self.tau**2)

    def second_moment(self, v: Tensor, delta2: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * delta2

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        m = self.state["m"] = self.beta1 * self.state["m"] + (1 - self.beta1) * out.mean
        v = self.state["v"] = self.second_moment(self.state["v"], out.mean.square())
        return model.moved(self.server_lr * m / (v.sqrt() + self.tau), out.buffers)
