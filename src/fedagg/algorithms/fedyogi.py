"""FedYogi (Reddi et al. 2021): FedAdam with a second moment that moves by at most (1-β2)Δ² per round."""

from dataclasses import dataclass

from torch import Tensor

from fedagg.algorithms.base import register
from fedagg.algorithms.fedadam import FedAdam


@register("fedyogi")
@dataclass
class FedYogi(FedAdam):
    def second_moment(self, v: Tensor, delta2: Tensor) -> Tensor:
        return v - (1 - self.beta2) * delta2 * (v - delta2).sign()
