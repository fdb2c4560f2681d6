"""FedAgg to the letter: Algorithm 1 for the mean-field terms, Theorem 1 for the rates, Algorithm 2 for training.

This is `--variant paper`. The gradient of an epoch is the mean gradient of F_i, as in Definition 1: here, the mean over the epoch's
mini-batches. The documentation of the mathematics says what follows from this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, NoClients, Outcome
from fedagg.flat import Layout, Model
from fedagg.meanfield import MeanField, departure
from fedagg.work import Work

UNKNOWN = (float("inf"), float("inf"))  # the distance between two passes before there are two


@register("fedagg-paper")
@dataclass
class FedAggPaper(Algorithm):
    alpha: float = option(0.1, "α, the weight of the rate against the deviation", gt=0, lt=1)
    estimator: Literal["history", "probe", "pretrain"] = option("probe", "where the mean-field terms come from")
    direction: Literal["mixed", "local", "aggregated"] = option("local", "what a client steps along")
    tolerance: float = option(1e-3, "the tolerance of Algorithm 1", gt=0)
    # Algorithm 1 run to its limit gives rates of zero. A few passes from a positive rate work better.
    passes: int = option(1, "largest number of passes of Algorithm 1", ge=1, le=1000)
    cap: float = option(1.0, "rates stay below cap divided by the client's own smoothness", gt=0)

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        self.epsilon, self.departure = UNKNOWN, float("nan")

    def prepare(self, model: Model, clients: Callable[[int], Clients], rounds: int) -> None:
        """For `pretrain`: run Algorithm 1 for every round of a rehearsal, before the actual training."""
        if self.estimator != "pretrain" or len(self.state.get("rehearsed1", ())) >= rounds:
            return
        phi1: list[Tensor] = []
        phi2: list[Tensor] = []
        betas: list[Tensor] = []  # rows of round, client, β: the participants of a round may differ when it is trained
        accounts: list[Tensor] = []
        for t in range(rounds):
            now, self.epsilon = replace(clients(t), model=model), UNKNOWN
            try:
                out, field = self.estimate(now)
            except NoClients:  # nobody to learn from: use the last round's terms, or at first zeros, which give a rate of zero
                zero = model.w.new_zeros(now.epochs + 1, len(model.w))
                field = MeanField(phi1[-1], phi2[-1]) if phi1 else MeanField(zero[1:], zero)
                beta = torch.full((len(now.ids),), float(betas[-1][:, 2].max()) if betas else 1.0)
            else:
                beta = self.smoothness(out, now)
                model = model.moved(out.mean, out.buffers)
            phi1.append(field.phi1)
            phi2.append(field.phi2)
            ids = torch.tensor(now.ids)
            betas.append(torch.stack([torch.full_like(ids, t), ids, beta], 1).double())
            account = (now.passes, now.samples_seen, now.bytes_up, now.bytes_down, *self.epsilon)
            accounts.append(torch.tensor(account, dtype=torch.float64))
        self.state["rehearsed_account"] = torch.stack(accounts)
        self.state |= {"rehearsed1": torch.stack(phi1), "rehearsed2": torch.stack(phi2)}
        self.state["rehearsed_beta"] = torch.cat(betas)

    def estimate(self, clients: Clients) -> tuple[Outcome, MeanField]:
        """Algorithm 1 at this round's w̄: passes from the base rate until φ1 and φ2 no longer change, at most `passes`."""
        work = replace(super().work(clients), trace=True)
        out = clients.train(work)
        assert out.field is not None
        field = out.field
        for _ in range(self.passes - 1):
            out = clients.train(replace(self.plan(field, self.smoothness(out, clients), clients), trace=True))
            assert out.field is not None
            self.epsilon = field.gap(out.field)
            field = out.field
            if min(self.epsilon) <= self.tolerance:
                break
        return out, field

    def smoothness(self, out: Outcome, clients: Clients) -> Tensor:
        """β_i by participant; the round's largest for those that did not answer, or whose training was too short to tell."""
        assert out.beta is not None
        known = {client: beta for client, beta in zip(out.clients, out.beta.tolist(), strict=True) if beta > 0}
        return by_participant(known, clients)

    def plan(self, field: MeanField, beta: Tensor, clients: Clients) -> Work:
        """Theorem 1 around these mean-field terms, with β_i by participant, and the direction of the step."""
        high = (self.cap / beta.clamp_min(1e-12)).clamp(max=0.999)
        rate, slope = field.rates(self.alpha)
        own = {"local": 1.0, "mixed": 0.5, "aggregated": 0.0}[self.direction]
        return Work(
            rate=rate,
            slope=slope,
            high=high,
            own=own,
            field=field.phi1,
            mix=None if own == 1.0 else (1.0 - own) * torch.eye(clients.epochs),
        )

    def round(self, model: Model, clients: Clients) -> Model:
        self.epsilon, self.departure = UNKNOWN, float("nan")
        if self.estimator == "pretrain":
            self.charge(clients)
            field = MeanField(self.state["rehearsed1"][clients.t], self.state["rehearsed2"][clients.t])
            work = self.plan(field, self.rehearsed(clients), clients)
        elif self.estimator == "history":
            work = self.remembered(clients)
        else:
            out, field = self.estimate(clients)
            work = self.plan(field, self.smoothness(out, clients), clients)
        out = clients.train(work)
        if out.sent is not None:
            gram = (out.sent.double() @ out.sent.double().T).cpu()
            self.departure = departure(out.norm2, out.along, gram, out.rates)
        return self.update(model, out, clients)

    def rehearsed(self, clients: Clients) -> Tensor:
        """β_i by participant, from the rehearsal of this round."""
        rows = self.state["rehearsed_beta"]
        known = {int(client): beta for _, client, beta in rows[rows[:, 0] == clients.t].tolist()}
        return by_participant(known, clients)

    def charge(self, clients: Clients) -> None:
        """Add the cost of this round's rehearsal to the cost of the round."""
        passes, samples, up, down, epsilon1, epsilon2 = self.state["rehearsed_account"][clients.t].tolist()
        self.epsilon = (epsilon1, epsilon2)
        clients.passes += int(passes)
        clients.samples_seen += int(samples)
        clients.bytes_up += int(up)
        clients.bytes_down += int(down)

    def remembered(self, clients: Clients) -> Work:
        """For `history` (Remark 1): the last round's terms, re-centred on the new w̄. The first round uses the base rate."""
        if "phi1" not in self.state:
            return replace(super().work(clients), trace=True)
        field = MeanField(self.state["phi1"], self.state["phi2"])
        beta = self.state["beta"].expand(len(clients.ids))
        return replace(self.plan(field, beta, clients), trace=True)

    def update(self, model: Model, out: Outcome, clients: Clients) -> Model:
        if out.field is not None and out.beta is not None:
            known = out.beta[out.beta > 0]
            beta = known.median().float() if len(known) else self.state.get("beta", torch.ones(()))
            self.state |= {"phi1": out.field.phi1, "phi2": out.field.phi2, "beta": beta}
        return super().update(model, out, clients)

    def figures(self) -> dict[str, float]:
        passes = {"epsilon1": self.epsilon[0], "epsilon2": self.epsilon[1]} if self.passes > 1 else {}
        return passes | {"departure": self.departure}


def by_participant(known: dict[int, float], clients: Clients) -> Tensor:
    """A value for every participant: its own, else the largest known one, or 1 if none is known."""
    most = max(known.values(), default=1.0)
    return torch.tensor([known.get(client, most) for client in clients.ids])
