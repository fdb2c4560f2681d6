"""Central differential privacy: updates are clipped, and noise is added to their sum before it is used.

More leaves the server than the next model: a mean field, rates, an optimiser's moments. Here the algorithm receives only one noisy
sum and public knowledge, so everything it computes from them is as private as the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedagg import wire
from fedagg.clients import Clients, Outcome
from fedagg.errors import SettingError
from fedagg.flat import Model
from fedagg.work import Report, Work


@dataclass(frozen=True)
class Privacy:
    """How a client's part in the run is hidden.

    Args:
        clipping_norm: the largest length of a client's update; longer ones are shortened to it.
        noise_multiplier: deviation of the noise in the sum of updates, as a multiple of `clipping_norm`.
        delta: the δ for which the record reports ε.
        ledger: the file in which all runs on the same nodes keep account; by default each run has its own in its folder.
        epsilon_max: the run ends before ε, for a node whose data are replaced by others, exceeds this.
    """

    clipping_norm: float
    noise_multiplier: float
    delta: float = 1e-5
    ledger: str | None = None
    epsilon_max: float | None = field(default=None, repr=False)  # it may change when a run continues

    def __post_init__(self) -> None:
        for name in ("clipping_norm", "noise_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                raise SettingError(name.replace("_", "-"), getattr(self, name), "give a number above 0")
        if not 0 < self.delta < 1:
            raise SettingError("delta", self.delta, "choose a number strictly between 0 and 1, e.g. 1e-5")
        if self.ledger and not Path(self.ledger).is_absolute():
            raise SettingError("ledger", self.ledger, "give an absolute path: the server does not run in your folder")
        if self.epsilon_max is not None and not 0 < self.epsilon_max < math.inf:
            raise SettingError("epsilon-max", self.epsilon_max, "give a number above 0, or leave it out")

    def noisy(self, total: Tensor) -> Tensor:
        """The sum with noise from the system's generator, not the run's: knowing the run's seed must not reveal the noise."""
        noise = torch.from_numpy(np.random.default_rng().standard_normal(len(total)))
        return total + self.noise_multiplier * self.clipping_norm * noise


def epsilon(releases: int, noise_multiplier: float, delta: float) -> float:
    """The exact ε of this many noisy sums together: T of multiplier z are equivalent to one of z/√T (Dong, Roth, Su 2019)."""
    return epsilon_of(math.sqrt(releases) / noise_multiplier, delta)


def epsilon_of(mu: float, delta: float) -> float:
    r"""The ε of Gaussian noise with deviation 1/μ of what one client can move the sum.

    It has $\delta = \Phi(-ε/μ + μ/2) - e^ε\,\Phi(-ε/μ - μ/2)$ (Balle, Wang 2018). For several sums with different noise, μ is the
    root of the sum of their μ² (Dong, Roth, Su 2019). The gain from asking only some of the clients in a round is not counted.
    """

    def exceeds(eps: float) -> bool:
        upper, lower = torch.special.log_ndtr(torch.tensor([-eps / mu + mu / 2, -eps / mu - mu / 2], dtype=torch.float64)).tolist()
        return math.exp(upper) - math.exp(min(upper, eps + lower)) > delta  # rounding must not lift the second above the first

    if mu == 0 or not exceeds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while exceeds(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return high


def planned_rates(work: Work, moved: Tensor) -> Tensor:
    """The rates of a client that moves evenly by `moved`, (L,): they follow from the work, not from any client's training."""
    high, epochs = float(torch.as_tensor(work.high).double().mean()), work.rate.shape[-1]
    work = replace(work, rate=work.rate.view(-1, epochs).mean(0), high=high)
    path = [(epoch / epochs * moved)[None] for epoch in range(epochs)]
    return torch.cat([work.rates(epoch, w, torch.zeros_like(moved)) for epoch, w in enumerate(path)])


def require_updates_only(work: Work, who: str) -> None:
    """Refuse work that asks for more than an update."""
    if work.trace or work.represent is not None or work.memory:
        raise SettingError(who, True, "needs a method that asks for updates alone, such as fedavg, fedadam, fedcm or fedagg")


def clip_update(delta: Tensor, longest: float) -> Tensor:
    return delta * min(1.0, longest / max(float(delta.norm()), 1e-30))


@dataclass
class PrivateClients(Clients):
    """Participants of whom the algorithm, the record and the nodes learn only one noisy sum.

    A missing or non-finite answer counts as an update of zero: the divisor of the sum must not depend on who answered well. No
    client is judged by comparison with others, because that would make one client's part depend on another's. `outcome` stays
    empty, so that the record holds nothing about a single client.
    """

    reports_numbers: ClassVar[bool] = False
    privacy: Privacy | None = None
    release: Callable[[], None] = lambda: None  # called before a noisy sum is used

    def train(self, work: Work) -> Outcome:
        assert self.privacy is not None
        require_updates_only(work, "privacy")
        model, work = self.model, self.downlink.send(work, self.t, self.passes)
        total = self.sum_updates(model, work, self.privacy.clipping_norm)
        self.release()
        self.passes += 1
        mean = (self.privacy.noisy(total) / len(self.ids)).to(model.w)
        # Frozen weights are known not to move.
        return self.outcome_from(mean if work.mask is None else mean * work.mask, work, model)

    def sum_updates(self, model: Model, work: Work, longest: float) -> Tensor:
        """The sum of the updates, each clipped to the largest allowed length."""
        total, answered = torch.zeros(len(model.w), dtype=torch.float64), 0
        for chunk in self.engine.run(model, work, self.jobs(), None):
            for job, delta in zip(chunk.jobs, chunk.delta.double(), strict=True):
                answered += 1
                self.samples_seen += len(job.samples) * self.epochs
                if not math.isfinite(float(delta.norm())):
                    self.left_out[job.client] = "not finite"
                    continue
                total += clip_update(delta, longest)
        self.bytes_down += len(self.ids) * wire.down(work, model, self.downlink.bits)
        self.bytes_up += answered * wire.up(work, model, self.epochs)
        return total

    def outcome_from(self, mean: Tensor, work: Work, model: Model) -> Outcome:
        """The noisy mean update as an outcome in which every client did the same as the mean."""
        n, rates = len(self.ids), planned_rates(work, mean)
        travel = float(rates.double().sum()) * self.effective_steps
        along = mean @ work.field.T if work.field is not None else mean[:0]
        ones = torch.ones(n, dtype=torch.float64)
        # No client's own numbers are known, but for those that the work determines.
        report: dict[str, Any] = {one.name: 0 * ones for one in fields(Report)}
        report |= {"steps": ones * self.steps * self.epochs, "rates": rates.double().expand(n, -1)}
        return Outcome(
            **report,
            clients=list(self.ids),
            mean=mean,
            plain=mean,
            velocity=mean / travel,
            flow=mean / travel,
            buffers=model.buffers,
            theta=ones / n,
            size=ones,
            weight=ones,
            travel=ones * travel,
            norm2=ones * float(mean.double().square().sum()),
            along=ones[:, None] * along.double(),
            sent=work.field,
        )
