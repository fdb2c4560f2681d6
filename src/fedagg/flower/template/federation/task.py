"""Your model and your data: the two functions to replace."""

from typing import Any

import torch
from flwr.app import Context
from torch import nn

import fedagg


def model() -> nn.Module:
    """The network that all nodes train together. Server and nodes call this: it must always make the same one."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def data(context: Context) -> Any:
    """This node's own samples: training x and y, test x and y. They never leave the node.

    On a real node, read your files here. It is called for every message, each time in a new process: what takes long to read
    should be kept on the disk, with fedagg.flower.cached. For a first try, every node takes its part of a small data set.
    """
    node, nodes = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    digits = fedagg.data.load("mnist-mini")
    mine = torch.arange(node, len(digits), nodes)
    return digits.x_train[mine], digits.y_train[mine], digits.x_test, digits.y_test
