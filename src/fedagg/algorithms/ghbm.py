"""GHBM (Zaccone, Karimireddy, Masone, Ciccone 2024): heavy-ball momentum over the last τ rounds, applied in every local step.

The local step is y ← y - η g - (β/K_i) m with m = (w_{t-τ} - w_t)/τ, where K_i is the client's number of steps in the round. In the
first τ rounds, m = 0. With τ = N/n the momentum covers about every client once. The server averages as FedAvg does. Checked against
the authors' code (RickZack/GHBM, `ghbm_center_server.py` and `ghbm_client.py`): β = 0.9, no Nesterov step.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, Outcome
from fedagg.flat import Model
from fedagg.work import Client, Gradient, State, Work


@register("ghbm")
@dataclass
class GHBM(Algorithm):
    ghb_beta: float = option(0.9, "β, the weight of the momentum", ge=0, lt=1)
    ghb_tau: int | None = option(
        None, "τ, the number of rounds that the momentum covers; by default all clients divided by those of a round", ge=1
    )

    def past(self, model: Model) -> Tensor:
        """The models of the last τ rounds, the oldest first; empty before the first round."""
        past: Tensor = self.state.get("past", model.w[None][:0])
        return past

    def span(self, clients: Clients) -> int:
        return self.ghb_tau or max(1, round(clients.total / len(clients.ids)))

    def work(self, clients: Clients) -> Work:
        tau, past = self.span(clients), self.past(clients.model)
        momentum = torch.zeros_like(clients.model.w) if len(past) < tau else (past[-tau] - clients.model.w) / tau
        mix = torch.full((clients.epochs, 1), self.ghb_beta)
        return replace(super().work(clients), field=momentum[None], mix=mix, step=self.step, pure=True)

    def step(self, client: Client, w: Tensor, gradient: Gradient, rate: Tensor, state: State) -> tuple[Tensor, State]:
        assert client.shift is not None
        assert client.steps is not None
        return w - rate * gradient(w) - client.shift / client.steps, state

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        self.state["past"] = torch.cat([self.past(model), model.w[None]])[-self.span(clients) :]
        return super().update(model, out, clients)
