"""The base class of algorithms: a plan for the clients, and the server's update from their answers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
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

LR = 0.01  # default base rate
# Names that `fedagg.run` and its command use for something else; an option of that name could not be given.
RESERVED = {"config", "data", "parts", "loss", "preset", "out", "resume", "callbacks", "progress", "wrap", "options"}
RESERVED |= {"track", "watch", "quiet", "json"}


@dataclass
class Algorithm:
    """The base class of all methods. It is FedAvg; an algorithm overrides what differs.

    Dataclass fields are the algorithm's options, best declared with `fedagg.option`. `lr`, the base rate, belongs to every run.
    `state` is everything that the server carries from round to round, tensors and numbers; it is saved with every checkpoint. A
    round must replace tensors there, not change them in place, because it may have to be undone.
    """

    lr: float = LR
    state: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    name: ClassVar[str] = ""
    labels: ClassVar[bool] = False  # does it use class labels? Then it is for classification only
    scheduled: ClassVar[bool] = True  # does it read `lr` in every round? The run's schedule changes it

    @property
    def remembers(self) -> bool:
        """Do clients keep a vector from round to round?"""
        return type(self).remember is not Algorithm.remember

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        """Make the state, before the first round. Raises `SettingError` if the method does not apply."""

    def prepare(self, model: Model, clients: Callable[[int], Clients], rounds: int) -> None:
        """Work before training, with access to the participants of any round (the paper's Algorithm 1 needs it). A resumed run does
        it again before it continues, so the result must depend on nothing else."""

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
        raise AssertionError("only algorithms with their own loss are asked")

    def step(self, client: Client, w: Tensor, gradient: Gradient, rate: Tensor, state: State) -> tuple[Tensor, State]:
        """A local step, for work that asks for it with `Work(step=self.step)`: the next weights, and what the client keeps until
        the next step of the round (at first nothing). `gradient(w)` is the mini-batch's gradient at any w. The code must work for
        one client, (d,), and for many, (n, d): take norms over the last axis."""
        raise AssertionError("only algorithms with their own steps are asked")

    def weigh(self, chunk: Chunk) -> Tensor:
        """The weight of each client in `Outcome.mean`, (n,): by default its number of samples."""
        return torch.tensor([float(len(job.samples)) for job in chunk.jobs], dtype=torch.float64)

    def remember(self, chunk: Chunk, work: Work) -> Tensor:
        """What clients keep for the next time, (n, d). Runs on the client, which sees its work but not the server's state."""
        raise AssertionError("only algorithms whose clients remember are asked")

    def reported(self, model: Model) -> Model:
        """The model whose accuracy is reported; by default the trained one."""
        return model

    def figures(self) -> dict[str, float]:
        """Numbers of this round for the record, besides those that every method has."""
        return {}

    def personalised(self, clients: Clients) -> Work | None:
        """Work that fits the final model to a client, for methods that are judged after such a fit (FedBABU)."""
        return None


class Methods(Registry[type[Algorithm]]):
    """The algorithms by name. A registered class knows its name."""

    def add(self, name: str, thing: type[Algorithm]) -> None:
        if not (isinstance(thing, type) and issubclass(thing, Algorithm)):
            raise SettingError(self.setting, name, f"{origin(thing)} is not a subclass of fedagg.Algorithm")
        check_class(name, thing)
        super().add(name, thing)
        thing.name = name


REGISTRY = Methods("algorithm", "fedagg.algorithms")
register = REGISTRY.register


def check_class(name: str, method: type[Algorithm]) -> None:
    """Refuse a method with another default for `lr`, or with an option that is named like a setting or has no default."""
    check_names(name, method)
    if lost := undeclared(method):
        words = f"{origin(method)}.{lost[0]} is no option: the class is no dataclass yet; write @dataclass right above it"
        raise SettingError("algorithm", name, words)
    for one in fields(method):
        if one.name == "lr" and one.default != LR:
            words = f"{origin(method)}.lr is a setting of every run, {LR:g} by default; scale it by an option of another name"
            raise SettingError("algorithm", name, words)
        if one.init and one.default is MISSING and one.default_factory is MISSING:
            raise SettingError("algorithm", name, f"{origin(method)}.{one.name} has no default; give it one")


def undeclared(method: type[Algorithm]) -> list[str]:
    """Annotated names with a value that are no fields, because the class was no dataclass when it was registered."""
    known = {one.name for one in fields(method)}
    kinds = {name: str(kind) for name, kind in inspect.get_annotations(method).items() if name not in known}
    return [name for name, kind in kinds.items() if hasattr(method, name) and not ("ClassVar" in kind or "InitVar" in kind)]


def check_names(name: str, method: type[Algorithm]) -> None:
    """Refuse an option that is named like a setting: giving one would change the other."""
    from fedagg.settings import Settings  # imported here: methods need only torch, registering them needs more

    declared(method)
    for one in fields(method):
        if one.init and one.name in RESERVED | Settings.model_fields.keys() and one.name != "lr":
            words = f"{origin(method)}.{one.name} has the name of a setting of every run; choose another name for the field"
            raise SettingError("algorithm", name, words)
        if hasattr(Algorithm, one.name) and one.name not in Algorithm.__dataclass_fields__:
            words = f"{origin(method)}.{one.name} hides what a method does under that name; choose another name for the field"
            raise SettingError("algorithm", name, words)


def options(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The options of an algorithm among these settings; options that are None keep the method's default."""
    known = {"lr", *declared(REGISTRY.find(name))}
    return {k: v for k, v in settings.items() if k in known and v is not None}


def build(method: str | Algorithm, settings: dict[str, Any]) -> Algorithm:
    """An algorithm from its name, with its options taken from the settings; or a fresh copy of a given one."""
    if isinstance(method, Algorithm):
        own, known = copy.copy(method), {"lr", *declared(type(method))}  # whatever else the user has set on it stays
        own.state = {}
        for name in known & settings.keys():
            setattr(own, name, settings[name])
        getattr(own, "__post_init__", lambda: None)()  # it may work out something from the options
        return own
    return REGISTRY.find(method)(**options(method, settings))
