"""FedGH (Yi et al. 2023): the server trains the global header on what the clients' bodies make of their data.

Clients train the whole model and upload, beside it, the mean representation of each class they hold. The server averages the
bodies. The header it does not average: it goes on training the one it broadcast, on those means by cross-entropy, each weighted
by its samples, and broadcasts the result. `accuracy` is that of the averaged bodies under the trained header.
"""

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedagg import models
from fedagg.algorithms.base import Algorithm, register
from fedagg.clients import Clients, Outcome
from fedagg.engines.base import Work
from fedagg.flat import Layout, Model


@register("fedgh")
@dataclass
class FedGH(Algorithm):
    head: str | None = None
    head_lr: float = 0.1
    head_steps: int = 50

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        self.where = models.head(module, self.head)
        # A copy in evaluation mode: training the header draws no randomness and moves no statistics.
        self.header = copy.deepcopy(module.get_submodule(self.where)).to(model.w.device).eval()
        self.layout = layout
        self.loss_before = self.loss_after = float("nan")

    def work(self, clients: Clients) -> Work:
        return replace(super().work(clients), represent=self.where)

    def views(self, w: Tensor) -> dict[str, Tensor]:
        """The header's parameters in a weight vector, by their names in the header."""
        inside = f"{self.where}." if self.where else ""
        return {name.removeprefix(inside): view for name, view in self.layout.weights(w) if name.startswith(inside)}

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        assert out.classes is not None
        assert out.counts is not None
        held = out.counts > 0
        features = out.classes[held].to(model.w)
        labels = held.nonzero()[:, 1].to(model.w.device)
        weights = (out.counts[held] / out.counts.sum()).to(model.w)
        header = {name: view.clone().requires_grad_() for name, view in self.views(model.w).items()}

        def loss() -> Tensor:
            output = functional_call(self.header, header, (features,))
            return (functional.cross_entropy(output, labels, reduction="none") * weights).sum()

        optimizer = torch.optim.SGD(header.values(), lr=self.head_lr)
        losses = []
        for _ in range(self.head_steps):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
            losses.append(value.detach())
        with torch.no_grad():
            self.loss_before, self.loss_after = torch.stack([losses[0], loss()]).tolist()
            w = model.w + out.mean
            for name, view in self.views(w).items():
                view.copy_(header[name])
        return Model(w, out.buffers)

    def figures(self) -> dict[str, float]:
        return {"header_loss_before": self.loss_before, "header_loss_after": self.loss_after}
