"""FedProx (Li et al. 2020): every local step is pulled back towards the global model, gradient + μ(w - w̄).

The reported training loss leaves out the penalty, so that it can be compared with that of other methods.
"""

from dataclasses import dataclass, replace

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients
from fedagg.work import Work


@register("fedprox")
@dataclass
class FedProx(Algorithm):
    mu: float = option(0.01, "μ, the weight of the proximal term", ge=0)

    def work(self, clients: Clients) -> Work:
        return replace(super().work(clients), prox=self.mu)
