"""The server of a federation with simulated or real clients: `fedagg.run` and the Flower strategy are two loops around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedagg import checkpoint, seeding
from fedagg.algorithms import Algorithm
from fedagg.checkpoint import Checkpoint
from fedagg.clients import Clients, NoClients, TooFew, Yardstick
from fedagg.config import Config
from fedagg.errors import FedaggError
from fedagg.flat import Layout, Model
from fedagg.quantize import Downlink
from fedagg.work import ClientOptions


class Server:
    """Holds what is carried from round to round: the model, its average, the method's state, the rounding error of the downlink,
    and the yardstick for outliers.

    Args:
        config: the settings of the run.
        algorithm: the method.
        module: the network; training starts from its weights.
        device: where the model lives.
    """

    def __init__(self, config: Config, algorithm: Algorithm, module: nn.Module, device: torch.device) -> None:
        self.config, self.algorithm, self.device = config, algorithm, device
        self.options = client_options(config)
        self.layout = Layout(module)
        self.begin = self.model = self.layout.pack(module).to(device)
        self.average = self.model.w
        self.downlink, self.yardstick = Downlink(config.downlink_bits, config.seed), Yardstick()
        self.prepared = False
        self.frozen: list[tuple[str, Tensor, int]] = []  # what was last frozen, with its versions
        algorithm.start(self.model, module, self.layout)

    def connect(self, available: Callable[[], Sequence[int]], clients: Callable[..., Clients]) -> None:
        """Set where clients come from: `available` gives those that can be asked, and `clients` makes a round's `Clients` from the
        server's half of their fields."""
        self.available, self.make = available, clients

    def participants(self, t: int) -> list[int]:
        """The clients that take part in round t, drawn by the seed from those that are available."""
        available = self.available()
        count = min(self.config.per_round, len(available))
        return [available[k] for k in seeding.participants(self.config.seed, t, len(available), count)] if count else []

    def clients(self, t: int) -> Clients:
        """The participants of round t, with the current model. Sets the method's base rate to that of the round."""
        self.algorithm.lr = self.config.rate(t)
        return self.make(
            t=t,
            ids=self.participants(t),
            total=self.config.clients,
            rounds=self.config.rounds,
            local=self.options,
            seed=self.config.seed,
            model=self.model,
            remember=self.algorithm.remember,
            weigh=self.algorithm.weigh,
            robust=self.config.robust,
            drop=self.config.drops_outliers,
            trim=self.config.trim,
            downlink=self.downlink,
            yardstick=self.yardstick,
        )

    def play(self, clients: Clients) -> bool:
        """Play one round with these clients. Is there a new model? If too few of them answered, nothing has changed."""
        before, was = self.carried_state(), self.model
        try:
            self.prepare()
            self.algorithm.lr = self.config.rate(clients.t)  # preparing may have changed it for other rounds
            before = self.carried_state()
            self.model = self.checked(self.algorithm.round(was, clients))
        except (NoClients, TooFew):
            self.restore_state(*before)
            return False
        return clients.outcome is not None or not torch.equal(was.w, self.model.w)

    def checked(self, model: Model) -> Model:
        """The method's new model, if it is one."""
        if not isinstance(model, Model):
            raise self.wrong(f"a round must end in a Model, and gave {type(model).__name__}; return one from `update`")
        return model

    def prepare(self) -> None:
        """Let the method prepare once, before training. A rehearsal has its own rounding error and yardstick, so training starts
        the same however long the rehearsal was."""
        if not self.prepared:
            _, error, length = self.carried_state()
            self.downlink.error, self.yardstick.length = None, 0.0
            self.algorithm.prepare(self.begin, self.clients, self.config.rounds)
            self.downlink.error, self.yardstick.length = error, length
            self.prepared = True

    def carried_state(self) -> tuple[dict[str, Any], Tensor | None, float]:
        return dict(self.algorithm.state), self.downlink.error, self.yardstick.length

    def restore_state(self, state: dict[str, Any], error: Tensor | None, length: float) -> None:
        self.algorithm.state, self.downlink.error, self.yardstick.length = state, error, length

    def update_average(self, t: int) -> None:
        """After round t, add its model to the running average, in which later ones weigh more (Shamir, Zhang 2013, with η = 8)."""
        self.average = self.average + 9.0 / (t + 9.0) * (self.model.w - self.average)

    @property
    def reported_model(self) -> Model:
        """The model that is evaluated and kept: the trained one, unless the method or the settings say otherwise."""
        return Model(self.average, self.model.buffers) if self.config.average else self.algorithm.reported(self.model)

    def evaluates_after(self, t: int) -> bool:
        """Is the model evaluated after round t?"""
        return (t + 1) % self.config.eval_every == 0 or t + 1 == self.config.rounds

    def freeze(self, done: int) -> Checkpoint:
        """Everything carried into the next round. Nothing is copied: rounds replace tensors and change none in place."""
        self.check_unaltered()
        tensors = {"w": self.model.w, "buffers": self.model.buffers, "average": self.average}
        tensors["yardstick"] = torch.tensor(self.yardstick.length, dtype=torch.float64)
        numbers: dict[str, float] = {}
        for name, value in self.algorithm.state.items():
            if not isinstance(name, str):
                raise self.wrong(f"state[{name!r}]: a key must be a text; it is saved under that name")
            if isinstance(value, Tensor):
                tensors[f"state/{name}"] = value
            elif isinstance(value, int | float):  # includes booleans
                numbers[name] = value
            else:
                raise self.wrong(f"state[{name!r}] is a {type(value).__name__}; keep tensors and numbers there")
        self.frozen = [(name, tensor, version(tensor)) for name, tensor in tensors.items()]
        if self.downlink.error is not None:
            tensors["downlink"] = self.downlink.error
        return Checkpoint(done, tensors, {"numbers": numbers})

    def check_unaltered(self) -> None:
        """Check that nothing frozen was changed in place: it is needed to undo a round, or to save it later."""
        for name, tensor, before in self.frozen:
            if version(tensor) != before:
                what = f"state[{name.removeprefix('state/')!r}]" if name.startswith("state/") else f"the model's {name}"
                raise self.wrong(f"{what} was changed in place; make a new tensor instead")

    def wrong(self, words: str) -> FedaggError:
        return FedaggError(f"algorithm {self.algorithm.name or type(self.algorithm).__name__}: {words}")

    def revive(self, saved: Checkpoint) -> None:
        """Restore what `freeze` returned. Double-precision numbers of the state stay on the CPU, where they are used."""
        self.check_unaltered()
        t = saved.tensors
        self.model = Model(t["w"].to(self.device), t["buffers"].to(self.device))
        self.average = t["average"].to(self.device)
        state = {name.removeprefix("state/"): tensor for name, tensor in t.items() if name.startswith("state/")}
        state = {name: tensor if tensor.dtype == torch.float64 else tensor.to(self.device) for name, tensor in state.items()}
        self.restore_state(state | saved.facts.get("numbers", {}), t.get("downlink"), float(t["yardstick"]))

    def resume(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint of another process, which must belong to this server."""
        fresh = self.freeze(0)
        checkpoint.check_form(fresh.tensors, saved.tensors)
        for name in fresh.facts["numbers"]:
            if name not in saved.facts.get("numbers", {}):
                raise self.wrong(f"state[{name!r}] is not in the checkpoint; resume with the method the run began with")
        self.revive(saved)


def version(tensor: Tensor) -> int:
    """How often torch has counted an in-place change of this tensor."""
    return 0 if tensor.is_inference() else tensor._version


def client_options(config: Config) -> ClientOptions:
    """The clients' optimiser options in this configuration."""
    return ClientOptions(
        epochs=config.epochs,
        batch_size=config.batch_size,
        optimizer=config.client_optimizer,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        clip=config.clip,
        augment=config.augment,
    )
