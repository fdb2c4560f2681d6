"""What the samples of a run were like, which whoever uses its network later has to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedagg.data import Dataset


@dataclass(frozen=True)
class Inputs:
    """What a network was trained on.

    Attributes:
        shape: of one sample.
        classes: how many there are, or how many numbers the network puts out.
        task: what is learnt, e.g. `classification`.
        tokens: are samples whole numbers, such as token ids?
        mean: what was subtracted from samples, where the run standardised them.
        std: what they were divided by then.
    """

    shape: tuple[int, ...]
    classes: int
    tokens: bool = False
    mean: Tensor | None = None
    std: Tensor | None = None
    task: str = "classification"

    @classmethod
    def of(cls, seen: Dataset) -> Inputs:
        """From the data as clients see them."""
        mean, std = seen.scale if seen.scale is not None else (None, None)
        return cls(seen.shape, seen.classes, not seen.x_train.dtype.is_floating_point, mean, std, seen.task)

    def scale(self) -> dict[str, Tensor]:
        """The numbers of the standardisation, for a file of their own."""
        return {name: value for name, value in (("mean", self.mean), ("std", self.std)) if value is not None}

    def in_front(self, network: nn.Module) -> nn.Module:
        """A network as it takes samples from outside: with the standardisation of the run, if it had one, in front."""
        return network if self.mean is None or self.std is None else Standardised(network, self.mean, self.std)

    def facts(self) -> dict[str, Any]:
        """For the record: all but the numbers of the standardisation."""
        return {"shape": list(self.shape), "classes": self.classes, "tokens": self.tokens, "task": self.task}


class Standardised(nn.Module):
    """A network with what the run did to its samples in front of it: it takes them as people have them."""

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.mean, self.std = nn.Buffer(mean), nn.Buffer(std)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network((x - self.mean) / self.std)
        return output
