"""FedSpeed (Sun et al. 2023): FedDyn's terms with a gradient that is taken partly uphill.

The local step is along (1-α) g(w) + α g(w + ρ g/|g|) - g_i + λ(w - w̄). The clients' memory and the server's update are FedDyn's.
This follows the authors' code (woodenchild95/FL-Simulator, `client/fedspeed.py`, `server/FedSpeed.py` and `ESAM.py`), with its
λ = 0.1, ρ = 0.1 and α = 1. The server's correction is the mean over all clients there, too.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from fedagg.algorithms.base import option, register
from fedagg.algorithms.feddyn import FedDyn
from fedagg.algorithms.fedsam import uphill
from fedagg.clients import Clients
from fedagg.work import Client, Gradient, State, Work


@register("fedspeed")
@dataclass
class FedSpeed(FedDyn):
    dyn_alpha: float = option(0.1, "λ, the weight of the proximal and linear terms", gt=0)
    rho: float = option(0.1, "ρ, how far uphill the second gradient is taken", ge=0)
    speed_alpha: float = option(1.0, "α, the weight of the second gradient", ge=0, le=1)

    def work(self, clients: Clients) -> Work:
        return replace(super().work(clients), prox=0.0, step=self.step, pure=True)  # the step includes the proximal term

    def step(self, client: Client, w: Tensor, gradient: Gradient, rate: Tensor, state: State) -> tuple[Tensor, State]:
        assert client.memory is not None
        g = gradient(w)
        mixed = (1 - self.speed_alpha) * g + self.speed_alpha * gradient(uphill(w, g, self.rho))
        return w - rate * (mixed - client.memory + self.dyn_alpha * (w - client.start)), state
