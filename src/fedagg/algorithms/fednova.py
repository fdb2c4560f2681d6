"""FedNova (Wang, Liu, Liang, Joshi, Poor 2020): clients that make more steps do not pull more.

w ← w + τ_eff Σ p_i Δ_i/τ_i with τ_eff = Σ p_i τ_i, where p_i is the client's share of the data and τ_i its number of steps.
With momentum m, the k-th step counts (1-m^k)/(1-m) times. Checked against the authors' code (JYWa/FedNova, `distoptim/FedNova.py`),
without its proximal term and server momentum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedagg.algorithms.base import Algorithm, register
from fedagg.clients import Clients, Outcome
from fedagg.flat import Model
from fedagg.work import Chunk


@register("fednova")
@dataclass
class FedNova(Algorithm):
    def weigh(self, chunk: Chunk) -> Tensor:
        """D_i/τ_i: `travel` is η τ_i, and η is the same for all."""
        travel = chunk.travel.double().cpu()
        return torch.where(travel > 0, super().weigh(chunk) / travel.clamp_min(1e-30), 0.0)

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        # The mean is Σ (D_i/τ_i) Δ_i / Σ D_i/τ_i, but Σ p_i Δ_i/τ_i is needed.
        effective = float((out.size * out.travel).sum() / out.size.sum())
        return model.moved(effective * float(out.weight.sum() / out.size.sum()) * out.mean, out.buffers)
