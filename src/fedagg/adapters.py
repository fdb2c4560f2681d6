"""Low-rank adapters: the user's network stays frozen, and clients train small matrices beside its linear layers.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022). Frozen weights are not sent: a run's vectors, bytes
and checkpoints cover only the adapters.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from fedagg.errors import SettingError, unknown


class LowRank(nn.Module):
    """A frozen linear layer with a trainable low-rank term: y = W x + c + (alpha / rank) B A x, with B = 0 at first."""

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale, self.turned = base, alpha / rank, not isinstance(base, nn.Linear)
        weight: Tensor = base.weight  # type: ignore[assignment]
        outputs, inputs = reversed(weight.shape) if self.turned else weight.shape
        self.a = nn.Parameter(torch.empty(rank, inputs, device=weight.device))
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=weight.device))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + (self.scale * F.linear(F.linear(x.to(self.a.dtype), self.a), self.b)).to(y.dtype)

    @property
    def weight(self) -> Tensor:
        """W + (alpha / rank) B A in the layer's own orientation, for code that reads the weight instead of calling the layer."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        learnt = self.scale * (self.b @ self.a)
        return weight + (learnt.mT if self.turned else learnt).to(weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]

    def merged(self) -> nn.Module:
        """The original layer, with the learnt term added to its weight."""
        with torch.no_grad():
            self.base.weight.copy_(self.weight)  # type: ignore[operator]
        return self.base


class Adapted(nn.Module):
    """A frozen network with adapters. Its state holds only what is trained. If outputs have logits, it returns the logits."""

    frozen_buffers = True

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_state_dict_post_hook(only_trained)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(without_frozen)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.network(*args, **kwargs)
        return getattr(output, "logits", output)

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        for part in self.modules():
            if isinstance(part, _NormBase):
                part.eval()  # running statistics are frozen too
        return self


def only_trained(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    trained = {prefix + name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    for name in [name for name in state if name.startswith(prefix) and name not in trained]:
        del state[name]


def without_frozen(module: nn.Module, keys: Any) -> None:
    """Do not report frozen entries as missing when a state is loaded."""
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    frozen = tuple(name for name, value in every if not value.requires_grad)
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(frozen)]


def lora(
    module: nn.Module,
    rank: int = 8,
    targets: str | Sequence[str] | None = None,
    alpha: float | None = None,
    *,
    train: str | Sequence[str] = (),
    seed: int = 0,
) -> Adapted:
    """A copy of a network in which only low-rank adapters are trained. At first it computes the same as the network.

    Args:
        module: your network. It may come from `transformers`, and its frozen weights may be of any type.
        rank: columns of B and rows of A.
        targets: the linear layers that get an adapter, by name (`encoder.fc1`) or the end of a name (`q_proj`); by default all
            except those that share their weights with another layer.
        alpha: the learnt term is multiplied by alpha / rank; by default this factor is 1.
        train: modules that are trained in full, such as a new head, by name or the end of a name.
        seed: for the initial A. No random state outside this call is read or changed.
    """
    if not isinstance(module, nn.Module):
        raise SettingError("module", type(module).__name__, "give a torch module")
    if any(isinstance(part, LowRank) for part in module.modules()):
        raise SettingError("module", type(module).__name__, "has adapters already; merge them first, with fedagg.merge_lora")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise SettingError("rank", rank, "give a whole number from 1 up")
    alpha = rank if alpha is None else alpha
    if not 0 < alpha < math.inf:
        raise SettingError("alpha", alpha, "give a number above 0")
    adapted = Adapted(copy.deepcopy(module).requires_grad_(False))
    network = adapted.network
    whole = dict(chosen("train", train, dict(network.named_modules())))
    within = {id(part) for found in whole.values() for part in found.modules()}
    layers = {name: layer for name, layer in network.named_modules() if linear(layer) and id(layer) not in within}
    uses = Counter(id(p) for p in (p for _, p in network.named_parameters(remove_duplicate=False)))
    alone = {name: layer for name, layer in layers.items() if uses[id(layer.weight)] == 1}
    found = alone if targets is None else dict(chosen("targets", targets, layers))
    for name in found.keys() - alone.keys():
        raise SettingError("targets", name, "shares its weight with another layer, which would change with it; leave it out")
    if not found:
        raise SettingError("targets", targets, f"{type(module).__name__} has no linear layers of its own to adapt")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for name, layer in found.items():
            replace(adapted, name, LowRank(layer, rank, alpha))
    for part in whole.values():
        part.requires_grad_()
    return adapted.train(module.training)


def merge_lora(module: nn.Module) -> nn.Module:
    """A copy of the network that `lora` was given, with the adapters merged into its weights: to keep, share or export."""
    if not isinstance(module, Adapted):
        raise SettingError("module", type(module).__name__, "give what fedagg.lora made, or a run's result.model of it")
    adapted = copy.deepcopy(module)
    for name, part in list(adapted.network.named_modules()):
        if isinstance(part, LowRank):
            replace(adapted, name, part.merged())
    return adapted.network.requires_grad_().train(module.training)


def linear(layer: nn.Module) -> bool:
    """Is this a linear layer? The one of GPT-2 in `transformers`, which stores its weight transposed, counts too."""
    return isinstance(layer, nn.Linear) or (type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"))


def chosen(setting: str, names: str | Sequence[str], among: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for wanted in [names] if isinstance(names, str) else names:
        found = {name: part for name, part in among.items() if name and (name == wanted or name.endswith(f".{wanted}"))}
        if not found:
            raise unknown(setting, wanted, sorted({name.rpartition(".")[2] for name in among if name}))
        yield from found.items()


def replace(adapted: Adapted, name: str, layer: nn.Module) -> None:
    """Replace the layer of this name in the network; "" is the network itself."""
    parent, _, child = f"network.{name}".rstrip(".").rpartition(".")
    setattr(adapted.get_submodule(parent), child, layer)
