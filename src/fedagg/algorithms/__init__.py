"""The methods: one short file each, with only what differs from FedAvg."""

from fedagg.algorithms import (  # noqa: F401 - importing them registers them
    delta_sgd,
    fedadagrad,
    fedadam,
    fedagg,
    fedagg_paper,
    fedavg,
    fedavgm,
    fedbabu,
    fedcm,
    feddyn,
    fedexp,
    fedgh,
    fednova,
    fedprox,
    fedsam,
    fedspeed,
    fedsps,
    fedyogi,
    ghbm,
    mofedsam,
    scaffold,
)
from fedagg.algorithms.base import REGISTRY, Algorithm, build, option, options, register

__all__ = ["REGISTRY", "Algorithm", "build", "option", "options", "register"]
