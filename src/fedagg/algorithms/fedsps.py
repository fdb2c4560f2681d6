"""FedSPS (Mukherjee, Loizou, Stich 2024): clients take stochastic Polyak steps.

η = min(f_B(w)/(c |g|²), γ_b), where f_B is the mini-batch's loss, whose lowest value is assumed to be 0. The server takes the plain
mean. The rule and c = 0.5 were checked against the usual code for stochastic Polyak steps (IssamLaradji/sps, as
jlylekim/auto-tuned-FL uses it for its clients), with a constant bound. According to the paper's public reviews, γ_b = 1 is its best
value. The paper's smoothed bound is not implemented.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, Outcome
from fedagg.flat import Model
from fedagg.work import Client, Gradient, State, Work


@register("fedsps")
@dataclass
class FedSPS(Algorithm):
    sps_c: float = option(0.5, "c, by which Polyak's rate is divided", gt=0)
    sps_bound: float = option(1.0, "γ_b, the largest rate, in place of lr", gt=0)
    scheduled: ClassVar[bool] = False

    def work(self, clients: Clients) -> Work:
        return replace(super().work(clients), rate=clients.constant(self.sps_bound), step=self.step, pure=True)

    def step(self, client: Client, w: Tensor, gradient: Gradient, rate: Tensor, state: State) -> tuple[Tensor, State]:
        g = gradient(w)
        assert client.loss is not None
        polyak = client.loss / (self.sps_c * g.square().sum(-1, keepdim=True)).clamp_min(1e-12)
        return w - torch.minimum(polyak, rate) * g, state

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        return model.moved(out.plain, out.buffers)
