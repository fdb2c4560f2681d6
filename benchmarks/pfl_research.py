"""pfl-research: its simulated backend, FederatedAveraging and PyTorchModel, on tensors in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedagg.bench.task import Task

NEEDS, PACKAGE = ("pfl",), "pfl"


class Scored(nn.Module):
    """A module as pfl-research wants it: with its loss, and metrics for the evaluation in the first iteration."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return functional.cross_entropy(self.module(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        self.eval()
        return {"loss": Weighted(functional.cross_entropy(self.module(x), y, reduction="sum").item(), len(y))}


def run(task: Task, tick: Callable[[], None]) -> None:
    os.environ["PFL_PYTORCH_DEVICE"] = task.device  # read when its modules are imported
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Ticking(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
            tick()
            return False, Metrics()

    module = Scored(task.module())
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    clients = [Dataset([tensor.to(task.device) for tensor in task.client(i)]) for i in range(task.clients)]
    users = FederatedDataset(clients.__getitem__, get_user_sampler("random", list(range(task.clients))))
    rounds = NNAlgorithmParams(
        central_num_iterations=task.rounds + 1,
        evaluation_frequency=task.rounds + 2,  # in the first iteration, and never again
        train_cohort_size=task.per_round,
        val_cohort_size=0,
    )
    local = NNTrainHyperParams(local_batch_size=task.batch_size, local_num_epochs=task.epochs, local_learning_rate=task.lr)
    FederatedAveraging().run(
        algorithm_params=rounds,
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=model,
        model_train_params=local,
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Ticking()],
        send_metrics_to_platform=False,
    )
