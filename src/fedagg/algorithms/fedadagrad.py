"""FedAdagrad (Reddi et al. 2021): FedAdam with a second moment that only grows, and no momentum."""

from dataclasses import dataclass, field

from torch import Tensor

from fedagg.algorithms.base import option, register
from fedagg.algorithms.fedadam import FedAdam


@register("fedadagrad")
@dataclass
class FedAdagrad(FedAdam):
    beta1: float = option(0.0, "momentum of the server's step", ge=0, lt=1)
    beta2: float = field(default=0.99, init=False, repr=False)  # not an option: the second moment forgets nothing

    def second_moment(self, v: Tensor, delta2: Tensor) -> Tensor:
        return v + delta2
