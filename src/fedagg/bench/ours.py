"""Our engines, called as `fedagg.run` calls them, but without evaluation and records."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedagg import algorithms, engines
from fedagg.bench.task import Task
from fedagg.clients import Clients
from fedagg.config import make
from fedagg.engines.base import Problem, set_precision
from fedagg.work import ClientOptions


def run(engine_name: str, task: Task, tick: Callable[[], None], ready: Callable[[str], None] = lambda note: None) -> str:
    """Run the task. Returns the engine's note; `ready` is called with it before the first round."""
    device, module, (x, y) = torch.device(task.device), task.module(), task.data()
    config = make({"algorithm": "fedavg", "model": task.model, "lr": task.lr, "precision": task.precision})
    local = ClientOptions(epochs=task.epochs, batch_size=task.batch_size)
    problem = Problem(module, x, y, task.classes, local, device)
    method = algorithms.build("fedavg", {"lr": task.lr})
    now = problem.layout.pack(module).to(device)
    method.start(now, module, problem.layout)
    set_precision(task.precision)
    engine = engines.build(engine_name, problem, config)
    ready(engine.note)
    for t in range(task.rounds + 1):
        clients = Clients(
            engine=engine,
            t=t,
            ids=task.participants(t),
            samples=lambda client: torch.arange(client * task.samples, (client + 1) * task.samples),
            total=task.clients,
            local=local,
            seed=task.seed,
            model=now,
        )
        now = method.round(now, clients)
        tick()
    return engine.note
