"""FedDyn (Acar et al. 2021): a linear term per client and a correction at the server make the local optima agree.

Client k minimises f_k(θ) - <g_k, θ> + (α/2)|θ - θ_t|², then g_k ← g_k - α(θ_k - θ_t). The server keeps
h ← h - (α/m) Σ_P (θ_k - θ_t), where m counts all clients, not only the participants, and sets θ ← mean_P θ_k - h/α.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, Outcome
from fedagg.flat import Layout, Model
from fedagg.work import Chunk, Work


@register("feddyn")
@dataclass
class FedDyn(Algorithm):
    dyn_alpha: float = option(0.01, "α, the weight of the proximal and linear terms", gt=0)

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        self.state["h"] = torch.zeros_like(model.w)

    def work(self, clients: Clients) -> Work:
        return replace(super().work(clients), prox=self.dyn_alpha, memory=True)

    def remember(self, chunk: Chunk, work: Work) -> Tensor:
        assert chunk.memory is not None
        return chunk.memory - self.dyn_alpha * chunk.delta

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        share = len(out.clients) / clients.total
        self.state["h"] = self.state["h"] - self.dyn_alpha * share * out.plain
        return model.moved(out.plain - self.state["h"] / self.dyn_alpha, out.buffers)
