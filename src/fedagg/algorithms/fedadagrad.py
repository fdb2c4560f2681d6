"""FedAdagrad (Reddi et al. 2021): FedAdam with a second moment that only grows, and no momentum."""

from dataclasses import dataclass

from torch import Tensor

from fedagg.algorithms.base import register
from fedagg.algorithms.fedadam import FedAdam


@register("fedadagrad")
@dataclass
class FedAdagrad(FedAdam):
    beta1: float = 0.0

    def second_moment(self, v: Tensor, delta2: Tensor) -> Tensor:
        return v + delta2
