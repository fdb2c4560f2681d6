"""SCAFFOLD (Karimireddy et al. 2020), option II: control variates take the drift out of every local step.

The local step is y ← y - η(g - c_i + c). Afterwards c_i⁺ = c_i - c + (x - y_i)/(K η), where K is the number of steps the client
really made. The server moves by η_g mean_S(y_i - x), and c by (|S|/N) mean_S(c_i⁺ - c_i). Implementations often forget the |S|/N.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, Outcome
from fedagg.flat import Layout, Model
from fedagg.work import Chunk, Work


@register("scaffold")
@dataclass
class Scaffold(Algorithm):
    global_lr: float = option(1.0, "length of the server's step", gt=0)

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        self.state["c"] = torch.zeros_like(model.w)

    def work(self, clients: Clients) -> Work:
        ones = torch.ones(clients.epochs, 1)
        return replace(super().work(clients), field=self.state["c"][None], mix=ones, memory=True)

    def remember(self, chunk: Chunk, work: Work) -> Tensor:
        assert chunk.memory is not None
        assert work.field is not None
        return chunk.memory - work.field[0] - chunk.delta / chunk.travel[:, None]

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        # c_i⁺ - c_i = -c - Δ_i/(K_i η) with the c that was sent, so its mean needs only the mean velocity.
        assert out.sent is not None
        share = len(out.clients) / clients.total
        self.state["c"] = self.state["c"] - share * (out.sent[0] + out.velocity)
        return model.moved(self.global_lr * out.plain, out.buffers)
