"""FedGH (Yi et al. 2023): the server trains the global header on what the clients' bodies make of their data.

Clients train the whole model. They upload it together with the mean representation of each class they hold. The server averages
the bodies but not the headers: it continues to train the header it broadcast, by cross-entropy on those means, each weighted by its
number of samples, and broadcasts the result. `accuracy` is that of the averaged bodies with the trained header.
"""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional

from fedagg import models
from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, Outcome
from fedagg.errors import SettingError
from fedagg.flat import Layout, Model
from fedagg.work import Work


@register("fedgh")
@dataclass
class FedGH(Algorithm):
    head: str | None = option(None, "name of the head; by default the last layer with parameters")
    head_lr: float = option(0.1, "learning rate of the header's training", gt=0)
    head_steps: int = option(50, "steps of the header's training", ge=1)
    labels: ClassVar[bool] = True

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        self.where = models.head(module, self.head)
        if not self.where:
            fix = "needs a head it can name: wrap the layer, as in nn.Sequential(layer)"
            raise SettingError("algorithm", self.name, fix)
        # A copy in evaluation mode: training the header draws no random numbers and changes no statistics.
        self.header = copy.deepcopy(module.get_submodule(self.where)).to(model.w.device).eval().requires_grad_(False)
        self.layout = layout
        self.loss_before = self.loss_after = float("nan")

    def work(self, clients: Clients) -> Work:
        return replace(super().work(clients), represent=self.where)

    def views(self, w: Tensor) -> dict[str, Tensor]:
        """The header's parameters in a weight vector, by their names in the header."""
        inside = f"{self.where}."
        return {name.removeprefix(inside): view for name, view in self.layout.weights(w) if name.startswith(inside)}

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        assert out.classes is not None
        assert out.counts is not None
        held = out.counts > 0
        features = out.classes[held].to(model.w)
        labels = held.nonzero()[:, 1].to(model.w.device)
        weights = (out.counts[held] / out.counts.sum()).to(model.w)
        header = {name: view.clone() for name, view in self.views(model.w).items()}

        def loss(header: dict[str, Tensor]) -> Tensor:
            output = functional_call(self.header, header, (features,))
            return (functional.cross_entropy(output, labels, reduction="none") * weights).sum()

        look = grad_and_value(loss)
        rate, (slopes, now) = self.head_lr, look(header)
        self.loss_before = float(now)
        for _ in range(self.head_steps):
            trial = {name: value - rate * slopes[name] for name, value in header.items()}
            ahead, then = look(trial)
            if then < now:
                header, slopes, now = trial, ahead, then
            else:  # representations may have any scale: reject a step that does not help, and make the next one shorter
                rate /= 2
        self.loss_after = float(now)
        w = model.w + out.mean
        for name, view in self.views(w).items():
            view.copy_(header[name])
        return Model(w, out.buffers)

    def figures(self) -> dict[str, float]:
        return {"header_loss_before": self.loss_before, "header_loss_after": self.loss_after}
