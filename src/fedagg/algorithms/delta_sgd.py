"""Δ-SGD (Kim, Toghani, Uribe, Kyrillidis 2024): every client finds its own rate from the smoothness that it meets.

η_k = min(γ |w_k - w_{k-1}| / (2 |g_k - g'_{k-1}|), √(1 + δ θ_{k-1}) η_{k-1}), θ_k = η_k/η_{k-1}, both gradients on the batch of
step k, so a step takes two backward passes. Every round starts again with one step at η_0 and θ_0 = 1. The server averages as
FedAvg does.

Checked against the authors' code (jlylekim/auto-tuned-FL, `adsgd.py` and `update.py`), which also gives γ, δ and η_0. The code also
lets η grow before its first step and adds 1e-8 to it; the formula does neither.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients
from fedagg.work import Client, Gradient, State, Work


def length(v: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return found


@register("delta-sgd")
@dataclass
class DeltaSGD(Algorithm):
    gamma: float = option(2.0, "γ, the rate as a multiple of half the inverse smoothness", gt=0)
    growth: float = option(0.02, "δ, how fast the rate may grow", ge=0)
    eta0: float = option(0.2, "η_0, the rate of a round's first step, in place of lr", gt=0)
    scheduled: ClassVar[bool] = False

    def work(self, clients: Clients) -> Work:
        return replace(super().work(clients), rate=clients.constant(self.eta0), step=self.step, pure=True)

    def step(self, client: Client, w: Tensor, gradient: Gradient, rate: Tensor, state: State) -> tuple[Tensor, State]:
        g = gradient(w)
        eta, theta = rate + torch.zeros_like(length(g)), torch.ones_like(length(g))
        if state:
            grown = (1 + self.growth * state["theta"]).sqrt() * state["eta"]
            moved, change = length(w - state["w"]), length(g - gradient(state["w"]))
            known = (moved > 0) & (change > 0)  # else nothing is learnt about the smoothness
            secant = self.gamma * moved / (2 * torch.where(known, change, 1.0))
            eta = torch.where(known, torch.minimum(secant, grown), grown)
            theta = eta / state["eta"]
        return w - eta * g, {"w": w, "eta": eta, "theta": theta}
