"""FedAvg (McMahan et al. 2017): local SGD at one rate, average the results by data size."""

from dataclasses import dataclass

from fedagg.algorithms.base import Algorithm, register


@register("fedavg")
@dataclass
class FedAvg(Algorithm):
    """`Algorithm` as it is, with nothing overridden."""
