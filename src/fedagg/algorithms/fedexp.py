"""FedExP (Jhunjhunwala, Wang, Joshi 2023): the server extrapolates when the clients' updates disagree.

η_g = max(1, Σ|Δ_i|² / (2|S| (|Δ̄|² + ε))). As published, the model that is evaluated is the mean of the last two
iterates.
"""

from dataclasses import dataclass

from torch import nn

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, Outcome
from fedagg.flat import Layout, Model


@register("fedexp")
@dataclass
class FedExP(Algorithm):
    exp_eps: float = option(1e-3, "ε, which keeps the extrapolation small where updates are small", ge=0)

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        self.state["last"] = model.w

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        self.state["last"] = model.w
        length2 = float(out.trusted(out.norm2).mean())
        spread = length2 / (2.0 * (float(out.plain.double().square().sum()) + self.exp_eps))
        return model.moved(max(1.0, spread) * out.plain, out.buffers)

    def reported(self, model: Model) -> Model:
        return Model((model.w + self.state["last"]) / 2, model.buffers)
