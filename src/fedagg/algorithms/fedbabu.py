"""FedBABU (Oh, Kim, Yun 2022): clients train the body under one random head that never moves.

The optimiser does not see the head, so not even weight decay moves it. Two figures are reported. `accuracy` is that of the
global model with its untouched head. `personal_accuracy` is the mean over clients, after each has fine-tuned the whole model on its
own data, on a test set weighted by the client's labels.
"""

from dataclasses import dataclass, replace

from torch import nn

from fedagg import models
from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients
from fedagg.errors import SettingError
from fedagg.flat import Layout, Model
from fedagg.work import Work


@register("fedbabu")
@dataclass
class FedBABU(Algorithm):
    head: str | None = option(None, "name of the head; by default the last layer with parameters")

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        if not models.has_body(module, self.head):
            raise SettingError(
                "algorithm", self.name, "needs a model with a body below its head: choose --model mnist-cnn or another"
            )
        self.state["mask"] = 1.0 - layout.mask(set(models.head_parameters(module, self.head))).to(model.w.device)

    def work(self, clients: Clients) -> Work:
        return replace(super().work(clients), mask=self.state["mask"])

    def personalised(self, clients: Clients) -> Work | None:
        return Work(rate=clients.constant(self.lr))
