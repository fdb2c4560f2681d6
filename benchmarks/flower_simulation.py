"""Flower's simulation: its FedAvg strategy, and clients that run the loop of `plain` on tensors, a core each."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedagg.bench.task import Task

NEEDS, PACKAGE = ("flwr", "ray"), "flwr"


def run(task: Task, tick: Callable[[], None]) -> None:
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    class Timed(FedAvg):
        def aggregate_train(self, *args: Any, **kwargs: Any) -> Any:
            answer = super().aggregate_train(*args, **kwargs)
            if answer[0] is None:
                raise RuntimeError("no Flower client answered")
            tick()
            return answer

    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = Timed(fraction_train=task.participation, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        strategy.start(grid, ArrayRecord(task.module().state_dict()), num_rounds=task.rounds + 1)

    cores = os.cpu_count() or 1
    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1 / cores if torch.device(task.device).type == "cuda" else 0.0}
    backend: dict[str, Any] = {"client_resources": resources, "init_args": {"num_cpus": cores, "include_dashboard": False}}
    run_simulation(server, client_app(task), task.clients, backend_config=backend)


def client_app(task: Task) -> Any:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x, y = samples(task, int(context.node_config["partition-id"]))
        model = task.module().to(x.device).train()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        for _ in range(task.epochs):
            for batch in torch.randperm(len(x), device=x.device).split(task.batch_size):
                optimizer.zero_grad()
                functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        content: dict[str, Any] = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
        return Message(RecordDict(content), reply_to=message)

    return app


@functools.cache
def samples(task: Task, client: int) -> tuple[Tensor, Tensor]:
    """Made once in every process of Flower's, as files would be read once."""
    x, y = task.client(client)
    return x.to(task.device), y.to(task.device)
