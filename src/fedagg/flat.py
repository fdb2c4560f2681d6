"""A model as two flat vectors: the trainable weights w, and the buffers that are only ever averaged.

All mathematics of the package (directions, distances, mean fields, server optimisers) is written for w as a vector in R^d, as in
the paper. Only this file knows how a vector becomes a module again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """The global model: weights (d,) and buffers (b,), such as the running statistics of batch normalisation."""

    w: Tensor
    buffers: Tensor

    def moved(self, step: Tensor, buffers: Tensor) -> Model:
        return Model(self.w + step, buffers)

    def to(self, device: torch.device) -> Model:
        return Model(self.w.to(device), self.buffers.to(device))


class Layout:
    """Where each parameter and buffer of a module lies in the flat vectors.

    Integer buffers (batch counters) travel as floats beside the statistics they count, are averaged like them, and are rounded when
    they are written back. Unchanged ones are left alone, because floats cannot represent every integer.

    Parameters without a gradient, and the buffers of modules with `frozen_buffers`, are not part of the vectors.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [(name, p.shape) for name, p in module.named_parameters() if p.requires_grad]
        frozen = tuple(
            f"{path}." if path else "" for path, part in module.named_modules() if getattr(part, "frozen_buffers", False)
        )
        self.buffers = [(name, b.shape, b.dtype) for name, b in module.named_buffers() if not name.startswith(frozen)]
        self.d = sum(shape.numel() for _, shape in self.parameters)
        self.b = sum(shape.numel() for _, shape, _ in self.buffers)

    def weights(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view) of every parameter in a vector (d,) or a stack (n, d): views have the stack's leading axes."""
        at = 0
        for name, shape in self.parameters:
            yield name, vector[..., at : at + shape.numel()].unflatten(-1, shape or (1,))
            at += shape.numel()

    def shaped(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view) of every parameter in a vector (d,), in the parameter's own shape."""
        for (name, view), (_, shape) in zip(self.weights(vector), self.parameters, strict=True):
            yield name, view.reshape(shape)

    def statistics(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of every buffer in a vector (b,) or a stack (n, b), in its own type and shape."""
        for (name, shape, dtype), (_, view) in zip(self.buffers, self.views(vector), strict=True):
            piece = view.reshape((*vector.shape[:-1], *shape))
            yield name, piece.to(dtype) if dtype.is_floating_point else piece.round().to(dtype)

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view) of every buffer in a vector (b,) or a stack (n, b), flat and as the vector's own numbers."""
        at = 0
        for name, shape, _ in self.buffers:
            yield name, vector[..., at : at + shape.numel()]
            at += shape.numel()

    def mask(self, names: set[str]) -> Tensor:
        """1 at the coordinates of the named parameters, 0 elsewhere."""
        mask = torch.zeros(self.d)
        for name, piece in self.weights(mask):
            if name in names:
                piece.fill_(1.0)
        return mask

    def pack(self, module: nn.Module) -> Model:
        device = next(module.parameters()).device
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        w = torch.cat([parameters[name].detach().reshape(-1).float() for name, _ in self.parameters])
        pieces = [buffers[name].detach().reshape(-1).float() for name, _, _ in self.buffers]
        return Model(w, torch.cat(pieces) if pieces else torch.zeros(0, device=device))

    def unpack(self, model: Model, module: nn.Module) -> nn.Module:
        """Write the vectors into the module's own tensors."""
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        with torch.no_grad():
            for name, value in self.weights(model.w):
                parameters[name].copy_(value.reshape(parameters[name].shape))
            self.restore(model.buffers, buffers)
        return module

    def restore(self, vector: Tensor, buffers: dict[str, Tensor]) -> None:
        """Write a vector (b,) into a module's buffers."""
        for name, value in self.statistics(vector):
            here, value = buffers[name], value.to(buffers[name].device)
            here.copy_(torch.where(here.float() == value.float(), here, value))


def copy_module(module: nn.Module) -> nn.Module:
    """A deep copy that includes the hooks of parameters, which torch drops."""
    hooks = [list((p._backward_hooks or {}).values()) for p in module.parameters()]
    twin, hooks = copy.deepcopy((module, hooks))  # together: a hook may be a method of the module
    for parameter, own in zip(twin.parameters(), hooks, strict=True):
        for hook in own:
            parameter.register_hook(hook)
    return twin


class Workspace:
    """A copy of a module whose parameters and gradients are views of two flat vectors, `w` and `g`.

    Loading a model is one copy, a step of SGD is one operation on d numbers, and nothing loops over parameters.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device) -> None:
        self.module = copy_module(module).to(device)
        self.layout = layout
        self.w = torch.zeros(layout.d, device=device)
        self.g = torch.zeros(layout.d, device=device)
        parameters = dict(self.module.named_parameters())
        for (name, view), (_, slot) in zip(layout.weights(self.w), layout.weights(self.g), strict=True):
            shape = parameters[name].shape
            parameters[name].data, parameters[name].grad = view.view(shape), slot.view(shape)

    def load(self, model: Model) -> None:
        self.w.copy_(model.w)
        self.layout.restore(model.buffers, dict(self.module.named_buffers()))

    def statistics(self) -> Tensor:
        buffers = dict(self.module.named_buffers())
        pieces = [buffers[name].reshape(-1).float() for name, _, _ in self.layout.buffers]
        return torch.cat(pieces) if pieces else self.w.new_zeros(0)
