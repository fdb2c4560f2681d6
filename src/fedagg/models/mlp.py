"""The multilayer perceptron of FedAvg's MNIST experiments."""

from __future__ import annotations

import math

from torch import nn

HIDDEN = 200


def mlp(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """The "2NN" of McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017): two
    hidden layers of 200 units, with the published 199,210 parameters for MNIST."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, classes),
    )
