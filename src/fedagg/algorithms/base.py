"""What an algorithm is: a plan for the clients, and what the server makes of their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedagg.clients import Clients, Outcome
from fedagg.errors import SettingError
from fedagg.flat import Layout, Model
from fedagg.options import declared, option
from fedagg.registry import Registry, origin
from fedagg.work import Chunk, Client, Gradient, Learner, State, Work

__all__ = ["REGISTRY", "Algorithm", "build", "option", "options", "register"]

LR = 0.01  # the base rate where nobody says otherwise


@dataclass
class Algorithm:
    """FedAvg is the default of every method here; an algorithm overrides what differs.

    Dataclass fields are the algorithm's options, best declared with `fedagg.option`. `lr`, the base rate, is every run's.
    `state` is all that the server carries from round to round, tensors and numbers; it is saved with every checkpoint. A round puts
    new tensors there and changes none in place: it may have to be taken back.
    """

    lr: float = LR
    state: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    name: ClassVar[str] = ""
    remembers: ClassVar[bool] = False  # do clients keep a vector from round to round?
    labels: ClassVar[bool] = False  # does it look at class labels? Then it is for classification alone
    scheduled: ClassVar[bool] = True  # does it read `lr` in every round? The run's schedule changes it from round to round

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        """Before the first round: make the state. Raises `SettingError` where the method does not apply."""

    def prepare(self, model: Model, clients: Callable[[int], Clients], rounds: int) -> None:
        """Work before training, given the participants of any round (the paper's Algorithm 1 needs it)."""

    def work(self, clients: Clients) -> Work:
        """The client's side of a round."""
        return Work(rate=clients.constant(self.lr))

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        """The server's side: the next global model."""
        return model.moved(out.mean, out.buffers)

    def round(self, model: Model, clients: Clients) -> Model:
        return self.update(model, clients.train(self.work(clients)), clients)

    def loss(self, learner: Learner, x: Tensor, y: Tensor) -> Tensor:
        """A client's loss of every sample, (B,), for work that asks for it with `Work(loss=self.loss)`."""
        raise AssertionError("only algorithms with a loss of their own are asked")

    def step(self, client: Client, w: Tensor, gradient: Gradient, rate: Tensor, state: State) -> tuple[Tensor, State]:
        """A local step, for work that asks for it with `Work(step=self.step)`: the next weights, and what the client keeps until
        the next step of the round (nothing before the first). `gradient(w)` is the mini-batch's gradient anywhere. It is written
        for one client, (d,), and many, (n, d), alike: with norms over the last axis."""
        raise AssertionError("only algorithms with steps of their own are asked")

    def weigh(self, chunk: Chunk) -> Tensor:
        """How much each client counts in `Outcome.mean`, (n,): as many times as it has samples."""
        return torch.tensor([float(len(job.samples)) for job in chunk.jobs], dtype=torch.float64)

    def remember(self, chunk: Chunk, work: Work) -> Tensor:
        """What clients keep for next time, (n, d). Runs on the client: it sees its work, not the server's state."""
        raise AssertionError("only algorithms whose clients remember are asked")

    def reported(self, model: Model) -> Model:
        """The model whose accuracy is shown; most methods show the one they train."""
        return model

    def figures(self) -> dict[str, float]:
        """Numbers of this round for the record, beside those that every method has."""
        return {}

    def personalised(self, clients: Clients) -> Work | None:
        """Work that fits the final model to a client, for methods that are judged after it (FedBABU)."""
        return None


class Methods(Registry[type[Algorithm]]):
    """The algorithms by name. A class that is registered knows its name."""

    def add(self, name: str, thing: type[Algorithm]) -> None:
        if not (isinstance(thing, type) and issubclass(thing, Algorithm)):
            raise SettingError(self.setting, name, f"{origin(thing)} is not a subclass of fedagg.Algorithm")
        sound(name, thing)
        super().add(name, thing)
        thing.name = name


REGISTRY = Methods("algorithm", "fedagg.algorithms")
register = REGISTRY.register


def sound(name: str, method: type[Algorithm]) -> None:
    """Refuse a method whose options cannot be told from settings of the run, or cannot be left out."""
    from fedagg.settings import Settings  # not above: methods need torch alone, their registration more

    declared(method)
    for one in fields(method):
        if one.name == "lr" and one.default != LR:
            words = f"{origin(method)}.lr is a setting of every run, {LR:g} by default; scale it by an option of another name"
            raise SettingError("algorithm", name, words)
        if one.init and one.name in {"options", *Settings.model_fields} and one.name != "lr":
            words = f"{origin(method)}.{one.name} has the name of a setting of every run; choose another name for the field"
            raise SettingError("algorithm", name, words)
        if one.init and one.default is MISSING and one.default_factory is MISSING:
            raise SettingError("algorithm", name, f"{origin(method)}.{one.name} has no default; give it one")


def options(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Of these settings, the options of an algorithm; those left at None keep the method's own default."""
    known = {"lr", *declared(REGISTRY.find(name))}
    return {k: v for k, v in settings.items() if k in known and v is not None}


def build(method: str | Algorithm, settings: dict[str, Any]) -> Algorithm:
    """An algorithm from its name, with those of the settings that are its options; or a fresh copy of one that was made."""
    if isinstance(method, Algorithm):
        known = {"lr", *declared(type(method))}
        return replace(method, **{k: v for k, v in settings.items() if k in known})
    return REGISTRY.find(method)(**options(method, settings))
