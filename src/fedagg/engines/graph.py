"""Read a network's layers and their connections from its module, by tracing it.

Only layers and joints that `stacked` has written out are accepted, and only if used in the same way; other networks are left to
vmap.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from fedagg.models.text import LSTM, CausalAttention, Last, Positions


class Sum(nn.Module):
    """Represents an addition in the graph."""


class Join(nn.Module):
    """Represents a concatenation of channels in the graph."""


@dataclass(eq=False)
class Node:
    """One layer: its module, the name of its weights, and the layers that feed it (None is the network's input)."""

    module: nn.Module
    name: str
    sources: list[Node | None]
    axes: int = 0  # axes of one sample of its output
    rows: bool = False  # is the output in rows by client, as after the first linear layer or flattening?


FUNCTIONS: dict[Any, type[nn.Module]] = {
    functional.relu: nn.ReLU, torch.relu: nn.ReLU, operator.add: Sum, torch.add: Sum, torch.cat: Join, torch.flatten: nn.Flatten
}  # fmt: skip
OURS = (LSTM, CausalAttention, Last, Positions)
METHODS: dict[Any, type[nn.Module]] = {"relu": nn.ReLU, "add": Sum, "flatten": nn.Flatten}


def traced(module: nn.Module, axes: int) -> list[Node] | None:
    """The layers in the order in which they run, for samples with this many axes; None if something is not written out."""
    if not all(p.requires_grad for p in module.parameters()) or not ordinary(module):
        return None
    module = copy.deepcopy(module).train()  # a copy, because the module may keep its input
    try:
        graph = StrictTracer().trace(module)
    except Exception:  # a user's forward may raise anything for a traced value
        return None
    if not all(part.training for part in module.modules()):
        return None  # its module keeps this layer in evaluation mode
    places: dict[fx.Node, Node | None] = {}
    nodes: list[Node] = []
    names: set[str] = set()
    for found in graph.nodes:
        if found.op == "placeholder" and not places:
            places[found] = None
            continue
        if found.op == "output":
            last = found.args[0]
            return nodes if nodes and nodes[-1].rows and isinstance(last, fx.Node) and places[last] is nodes[-1] else None
        sources = inputs(found)
        layer = layer_of(found, module)
        if sources is None or layer is None or not found.users or str(found.target) in names:
            return None
        if getattr(layer, "inplace", False) and not lone(sources[0], module):
            return None  # it would change an input that other layers read
        if layer.state_dict():
            names.add(str(found.target))  # if it were used twice, its gradients would have to be added
        node = Node(layer, str(found.target), [places[source] for source in sources])
        if not fits(node, axes):
            return None
        if isinstance(layer, nn.Identity):
            places[found] = node.sources[0]
            continue
        places[found] = node
        nodes.append(node)
    return None


def ordinary(module: nn.Module) -> bool:
    """Do the layers of a module describe its call completely? Not with hooks or overridden methods: a hook may do nothing for these
    samples, and something later."""
    every = list(module.modules())
    return not (
        hooked(module)
        or nn.modules.module._has_any_global_hook()
        or any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in every)
        or any(type(part).train is not nn.Module.train or type(part).__call__ is not nn.Module.__call__ for part in every)
    )


def hooked(module: nn.Module) -> bool:
    """Are there hooks between the loss and the gradients? `torch.func` ignores hooks of parameters completely."""
    parts = any(part._backward_hooks or part._backward_pre_hooks for part in module.modules())
    return parts or any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters())


class StrictTracer(fx.Tracer):
    """A tracer that refuses parts without gradients or under autocast: the graph would not show these."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        odd = not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        if odd or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ValueError("a part of the network runs under a switch")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in OURS or super().is_leaf_module(m, module_qualified_name)


def lone(found: fx.Node, module: nn.Module) -> bool:
    """Does only one layer read this value, directly or through a view of the same memory?"""
    while len(found.users) == 1:
        if not isinstance(layer_of(found, module), nn.Identity | nn.Flatten | nn.Dropout):
            return True
        found = found.all_input_nodes[0]
    return False


def inputs(found: fx.Node) -> list[fx.Node] | None:
    """The nodes whose values are this one's only inputs; else None."""
    if found.op == "call_function" and found.target is torch.cat:
        parts = found.args[0] if found.args else None
        dim = found.args[1] if len(found.args) > 1 else found.kwargs.get("dim", 0)
        given: list[Any] = list(parts) if isinstance(parts, list | tuple) and dim == 1 else [None]
    elif found.op != "call_module" and found.target in (torch.flatten, "flatten"):
        rest = [*found.args[1:], *found.kwargs.items()]
        given = [found.args[0]] if rest in ([1], [1, -1], [("start_dim", 1)]) else [None]
    else:
        options = {k: v for k, v in found.kwargs.items() if (k, v) != ("inplace", False)}
        given = [None] if options else list(found.args)
    return given if all(isinstance(part, fx.Node) for part in given) else None


def layer_of(found: fx.Node, module: nn.Module) -> nn.Module | None:
    if found.op == "call_module":
        return module.get_submodule(str(found.target))
    known = {"call_function": FUNCTIONS, "call_method": METHODS}.get(found.op, {})
    kind = known.get(found.target)
    return kind() if kind is not None else None


def fits(node: Node, axes: int) -> bool:
    """Is the layer used in the written-out way? Also sets the form of its output."""
    kinds = [(source.axes, source.rows) if source is not None else (axes, False) for source in node.sources]
    layer, (node.axes, node.rows) = node.module, kinds[0]
    kind = type(layer)
    if kind in (Sum, Join):
        return len(set(kinds)) == 1 and (kind is Sum or node.axes == 3) and (kind is Join or len(kinds) == 2)
    if len(kinds) != 1:
        return False
    if kind is nn.Linear:
        flat, node.rows = node.axes == 1 or (node.axes == 2 and node.rows), True
        return flat
    if isinstance(layer, nn.Embedding):
        tokens, node.axes, node.rows = node.axes == 1 and not node.rows, 2, True
        odd = layer.padding_idx is not None or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
        return kind is nn.Embedding and tokens and not odd
    if kind in OURS:
        text, node.axes = node.axes == 2 and node.rows, 1 if kind is Last else node.axes
        return text
    if isinstance(layer, nn.LayerNorm):
        whole = len(layer.normalized_shape) == 1 and layer.elementwise_affine and layer.bias is not None
        return kind is nn.LayerNorm and node.rows and whole
    if isinstance(layer, nn.Flatten):
        flat, node.axes, node.rows = not node.rows, 1, True
        return flat and layer.start_dim == 1 and layer.end_dim == -1
    if kind in (nn.ReLU, nn.GELU, nn.Dropout, nn.Identity):
        return True
    return node.axes == 3 and plain(layer)


def plain(layer: nn.Module) -> bool:
    """Are all options of this image layer written out?"""
    kind = type(layer)
    if isinstance(layer, nn.Conv2d):
        square = [pair(v) for v in (layer.stride, layer.padding, layer.kernel_size) if not isinstance(v, str)]
        even = len(square) == 3 and all(v[0] == v[1] for v in square)
        return kind is nn.Conv2d and even and layer.groups == 1 and pair(layer.dilation) == [1, 1] and layer.padding_mode == "zeros"
    if isinstance(layer, nn.BatchNorm2d):
        return kind is nn.BatchNorm2d and layer.affine and layer.track_running_stats and bool(layer.momentum)
    if isinstance(layer, nn.GroupNorm):
        return kind is nn.GroupNorm and layer.affine
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        return layer.output_size in (1, (1, 1))
    if isinstance(layer, nn.AvgPool2d):
        return pair(layer.padding) == [0, 0] and not layer.ceil_mode and layer.divisor_override is None
    return kind is nn.MaxPool2d


def pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
