"""What a run's samples were like, which later users of its network have to know."""

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
        classes: number of classes, or of outputs.
        task: the kind of task, e.g. `classification`.
        tokens: are samples integers, such as token ids?
        mean: what was subtracted from samples, if the run standardised them.
        std: what they were then divided by.
        labels: the names of the classes, if they have any.
    """

    shape: tuple[int, ...]
    classes: int
    tokens: bool = False
    mean: Tensor | None = None
    std: Tensor | None = None
    task: str = "classification"
    labels: tuple[str, ...] | None = None

    @classmethod
    def of(cls, seen: Dataset) -> Inputs:
        """The inputs of a data set as clients see it."""
        mean, std = seen.scale if seen.scale is not None else (None, None)
        tokens = not seen.x_train.dtype.is_floating_point
        return cls(seen.shape, seen.classes, tokens, mean, std, seen.task, seen.labels)

    def scale(self) -> dict[str, Tensor]:
        """The mean and deviation of the standardisation, for a separate file."""
        return {name: value for name, value in (("mean", self.mean), ("std", self.std)) if value is not None}

    def in_front(self, network: nn.Module) -> nn.Module:
        """The network for samples from outside: preceded by the run's standardisation, if it had one."""
        return network if self.mean is None or self.std is None else Standardised(network, self.mean, self.std)

    def facts(self) -> dict[str, Any]:
        """All fields for the record, except the numbers of the standardisation."""
        facts = {"shape": list(self.shape), "classes": self.classes, "tokens": self.tokens, "task": self.task}
        return facts | ({} if self.labels is None else {"labels": list(self.labels)})


class Standardised(nn.Module):
    """A network preceded by the run's standardisation: it takes samples as users have them."""

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.mean, self.std = nn.Buffer(mean), nn.Buffer(std)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network((x - self.mean) / self.std)
        return output
