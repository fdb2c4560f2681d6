"""Run by test_flower_ray.py in a process of its own: two methods in one Flower simulation, weights into a file."""

from __future__ import annotations

import sys
from pathlib import Path

from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from safetensors.torch import save_file

import test_flower
from fedagg.flower import FedAggStrategy, client_app

METHODS = ("fedagg", "feddyn")  # one whose server remembers, one whose nodes do
server = ServerApp()
client = client_app(test_flower.model, test_flower.node)


@server.main()
def main(grid, context):
    weights = {}
    for method in METHODS:
        strategy = FedAggStrategy(test_flower.model(), test_flower.settings(algorithm=method, eval_every=3))
        strategy.run(grid, wait=600)  # Ray may take minutes to start its workers on a busy machine
        assert sorted(strategy.members.nodes) == list(range(test_flower.NODES))
        weights[method] = strategy.server.reported_model.w
    save_file(weights, sys.argv[1])


if __name__ == "__main__":
    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "include_dashboard": False},
    }
    run_simulation(server, client, test_flower.NODES, backend_config=resources)
    assert Path(sys.argv[1]).exists()
