"""Many copies of any network as one, with `torch.func.vmap`: for modules with layers that are not written out."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedagg.engines.base import Problem
from fedagg.flat import copy_module
from fedagg.work import Client, ClientLoss, Learner

# Users need not know which operations torch runs one client at a time: the result is the same.
warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented the batching rule")


class VmappedNetwork:
    """n copies of a module: weights `w` (n, d), gradients `g` (n, d), buffers (n, b). Every client draws its own dropout. `own` is
    the method's own loss in place of the run's, and `client` is what that loss may use."""

    own: ClientLoss | None = None
    client: Client | None = None

    def __init__(self, problem: Problem, n: int, within: VmappedNetwork | None = None) -> None:
        self.problem, self.n = problem, n
        self.generator: torch.Generator | None = None
        layout, device = problem.layout, problem.device
        if within is None:
            self.w, self.g, self.buffers = (torch.zeros(n, wide, device=device) for wide in (layout.d, layout.d, layout.b))
        else:
            self.w, self.g, self.buffers = within.w[:n], within.g[:n], within.buffers[:n]
        self.module = copy_module(problem.module).to(device).train()  # a copy, because its tensors are replaced while it runs
        shapes = dict(layout.parameters)
        self.weights = {name: view.view(n, *shapes[name]) for name, view in layout.weights(self.w)}
        self.grads = {name: view.view(n, *shapes[name]) for name, view in layout.weights(self.g)}
        self.step = vmap(grad_and_value(self.loss, has_aux=True), in_dims=(0, 0, 0, 0, 0), randomness="different")

    def first(self, n: int) -> VmappedNetwork:
        return VmappedNetwork(self.problem, n, within=self)

    def loss(
        self, weights: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One client's weighted loss, and the buffers as the module left them."""
        with self.problem.rounding():
            output = functional_call(self.module, (weights, buffers), (x,))
            return (self.problem.loss(output, y) * scale).sum(), buffers

    def own_loss(
        self,
        w: Tensor,
        memory: Tensor | None,
        steps: Tensor | None,
        buffers: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        scale: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `loss`, for flat weights (d,), with the method's own loss."""
        assert self.own is not None
        assert self.client is not None
        learner = Learner(
            self.client.start, memory, self.client.shift, None if steps is None else steps[0],
            module=self.module, layout=self.problem.layout, w=w, buffers=buffers, criterion=self.problem.loss,
        )  # fmt: skip
        with self.problem.rounding():
            return (learner.losses(self.own, x, y) * scale).sum(), buffers

    def gradient(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        n, batch = scale.shape
        buffers = {name: value.clone() for name, value in self.problem.layout.statistics(self.buffers)}
        x, y = x.view(n, batch, *x.shape[1:]), y.view(n, batch, *y.shape[1:])
        if self.own is not None and self.client is not None:
            memory, steps = self.client.memory, self.client.steps
            over = (0, *(None if rows is None else 0 for rows in (memory, steps)), 0, 0, 0, 0)
            step = vmap(grad_and_value(self.own_loss, has_aux=True), in_dims=over, randomness="different")
            grad, (loss, after) = step(self.w, memory, steps, buffers, x, y, scale)
            self.g.copy_(grad)
        else:
            grads, (loss, after) = self.step(self.weights, buffers, x, y, scale)
            for name, value in grads.items():
                self.grads[name].copy_(value)
        if after:
            new = torch.cat([value.reshape(n, -1).to(self.buffers.dtype) for value in after.values()], 1)
            self.buffers.copy_(torch.where(scale[:, :1] > 0, new, self.buffers))  # paused clients keep their statistics
        return loss.detach()  # type: ignore[no-any-return]
