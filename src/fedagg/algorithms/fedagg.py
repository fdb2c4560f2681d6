r"""FedAgg, the default version: FedAvg's local work and FedAvg's uplink, and no rate to choose.

Clients step along a mix of their own gradient and the aggregated one (Eq. 9 between its two ends). Two measurements set how far:

- the clients' own rate: before the first round all of them try several rates, and one a little above the rate that lowers their
  loss most is used. It falls to zero at the end of the run. Gradients much longer than at the start are shortened;
- λ, their own share of the step, from how far their gradients agree. The pace of the federation is the own rate over λ, so that a
  client's own gradient always has the same weight. The less clients agree, the longer they continue in the common direction; in
  the first rounds, when little is known of it, less long.

Clients remember their gradients, which takes the drift out of the next: the last one if the model is linear, an average if it is a
network, nothing if its layers are normalised. Every sample counts the same, whichever client has it. The server pulls the weights
back a little. None of this has a unit: if the loss, or the inputs of a linear model, are multiplied by ten, the run is the same at
rates scaled to match.

All clients move at the pace. Rates by Theorem 1, one for every client and epoch, are an option. They slow down clients that run
ahead; on held-out data this gains nothing (docs/fedagg.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedagg import meanfield, models
from fedagg.aggregate import trusted
from fedagg.algorithms import guard
from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import ClientReport, Clients, NoClients, Outcome
from fedagg.errors import SettingError
from fedagg.flat import Layout, Model
from fedagg.memory import is_much
from fedagg.work import Chunk, Work

BOLD = 0.65  # the own rate is this power of two above the rate that lowers the loss most in the first round
FALL = 1 / 3  # share of the rounds that counts as the end: the own rate falls to zero in it, and later models weigh more
CLIP = 1.5  # largest norm of a mini-batch gradient, as a multiple of the usual norm at the start
DECAY = 0.003  # weight decay, as a share of the distance that gradients covered: of models with one layer, and beside dropout
BARE_DECAY = 0.017  # the same at most for other networks, which nothing else keeps from learning their samples by heart
MEMORY = 0.85  # weight of earlier rounds in the agreement and in the change of the loss
float32 = torch.finfo(torch.float32)


@register("fedagg")
@dataclass
class FedAgg(Algorithm):
    alpha: float = option(0.1, "α, the weight of the rate against the deviation, if theorem is on", gt=0, lt=1)
    direction: Literal["mixed", "local"] = option("mixed", "what a client steps along")
    pace: Literal["measured", "base"] = option("measured", "how the rate of a client's own gradient is set")
    theorem: bool = option(False, "rates by Theorem 1, for every client and epoch; else the same for all")
    memory: Literal["auto", "on", "off"] = option("auto", "do clients remember their gradients? auto: where it helps")
    scheduled: ClassVar[bool] = False

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        if self.alpha != FedAgg.alpha and not self.theorem:
            raise SettingError("alpha", self.alpha, "weighs the rates of Theorem 1; add --theorem, or choose --variant paper")
        self.departure, self.rate = math.nan, 0.0
        self.linear, self.normalised = models.is_linear(module), models.is_normalised(module)
        self.bare = models.is_deep(module) and not models.has_dropout(module)
        self.state |= {
            "rate": 0.0,  # for a client's own gradient; 0 until it is measured
            "tried": 0,  # clients that have tried rates
            "phi1": torch.zeros_like(model.w),  # the aggregated gradient, one for all epochs
            "known": 0,  # rounds that gave a mean field
            "agreement": 1.0,
            "start": 0.0,  # the loss at the start, if clients reported it
            "norm": 0.0,  # of a mini-batch gradient at the start
            "samples": 0.0,  # of all answers in all rounds, and how many answers there were
            "answers": 0,
            "back": 0.0,  # the multiple of φ1 that leads back to the last model
            "trend": 0.0,  # the mean change of the loss in a round, and of its size
            "swing": 0.0,
            "shown": model.w,  # the average of the path, with the statistics that belong to it
            "shown/buffers": model.buffers,
        }
        if self.memory == "on" or (self.memory == "auto" and not self.normalised):
            self.state |= {
                "control": torch.zeros_like(model.w),  # the mean of what all clients remember
                "heard": False,  # did all clients report the norm of their gradients?
            }
        guard.keep(self.state, model, 0.0)

    def own_share(self) -> float:
        """λ, the weight of the client's own gradient: the square root of the agreement. It is never 0: a client that ignored its
        own gradient would teach the server nothing. An average with weight λ is as noisy as the mean of 2/λ - 1 rounds. Until
        there are as many, counting the next one, λ is higher."""
        if self.direction == "local":
            return 1.0
        return max(math.sqrt(max(meanfield.LITTLE, self.state["agreement"])), 2 / (int(self.state["known"]) + 2))

    def search(self, clients: Clients) -> bool:
        """Find the own rate by trial, and say whether to train: all participants train at one rate after another, and the
        results are discarded. A single client may have samples of only one class, which it learns at any rate. So if few take
        part, those of the next rounds try rates too, and the lowest is used; a run of few rounds does not wait. If clients do
        not report their losses, the base rate is used, and gradients are not limited."""

        def mean(values: Iterable[float]) -> float:
            numbers = trusted(torch.tensor(list(values), dtype=torch.float64), clients.robust).tolist()
            return float(sum(numbers) / len(numbers))

        before = self.state["rate"] if self.state["tried"] else math.inf
        self.state["rate"] = self.state["rate"] or self.lr
        if self.pace == "base" or not clients.reports_numbers:
            self.state["tried"] = clients.total
            return True
        # A client that makes only one step reports its loss before that step, which says nothing about the rate. If too few make
        # more, the mean step of all clients is tried.
        telling = {client for client, many in zip(clients.ids, clients.batches, strict=True) if many * clients.epochs > 1}
        single = len(telling) < min(guard.FEW, len(clients.ids) / 2)
        still = self.at_rest(clients, single)
        judges = {client: report for client, report in still.items() if single or client in telling}
        if not judges:  # none of them answered; those of the next round are asked
            return True
        if not any(report.first for report in still.values()):  # none reported a loss
            self.state["tried"] = clients.total
            return True
        self.state["norm"] = max(self.state["norm"], median(report.norm for report in still.values()))
        if "heard" in self.state:
            everybody = all(report.norm for report in still.values())
            self.state["heard"] = everybody and (self.state["heard"] or not self.state["tried"])
        first = self.state["start"] = mean(report.loss for report in judges.values())
        worst = first + abs(first)  # cap for losses, also those that are not finite
        common = clients.rehearsed.flow if clients.rehearsed and single else None
        reach = self.reach(clients)
        losses, doubt = dict[int, float](), dict[int, float]()
        power: int | None = 0
        while power is not None and len(losses) < float32.bits:
            rate = self.lr * 2.0**power
            work = Work(clients.constant(rate), clip=self.limit(), trial=True)
            if common is not None:
                work = replace(work, field=common[None], mix=torch.zeros(clients.epochs, 1), behind=rate)
            answers = {client: each.loss if common is None else each.behind for client, each in clients.rehearse(work).items()}
            tried = {client: loss if loss < worst else worst for client, loss in answers.items() if client in judges}
            losses[power] = mean(tried.values()) if tried else worst
            changes = [loss - judges[client].loss for client, loss in tried.items()]
            doubt[power] = guard.doubt(trusted(torch.tensor(changes), clients.robust))
            power = meanfield.next_power(losses, first, doubt[min(losses)], reach)
        bold = BOLD if meanfield.gains(losses, first) else 0.0  # on a plateau the best rate is the highest already
        self.state["rate"] = min(before, self.lr * 2 ** (meanfield.best_power(losses, first, reach) + bold))
        self.state["tried"] += len(judges)
        return guard.enough(self.state["tried"], clients) or 0 < clients.rounds <= guard.FEW

    def reach(self, clients: Clients) -> float:
        """How far, in powers of two, the own rate may be above the lowest that gains nearly as much. Clients with few classes learn
        these at any rate, and the higher it is, the more the model depends on who takes part. This noise falls in proportion to the
        number of participants, and if all clients take part, there is none. Fewer than `FEW` say too little to set a bound."""
        count, absent = len(clients.ids), 1.0 - len(clients.ids) / clients.total
        return math.log2(count / (guard.FEW * absent)) if absent and count >= guard.FEW else math.inf

    def at_rest(self, clients: Clients, single: bool) -> dict[int, ClientReport]:
        """What participants report if they hardly move: at the base rate times √ε, where ε is the precision of a number. If inputs
        are large, even that may be too far: then they move less. A client that makes a single step reports the loss before it, and
        need not stand still."""
        still: dict[int, ClientReport] = {}
        for power in range(0 if single else 1, 5):
            work = Work(clients.constant(self.lr * float32.eps ** (power / 2)), clip=math.inf, trial=not single)
            answers = clients.rehearse(work)
            still = {client: one for client, one in answers.items() if math.isfinite(one.loss) and math.isfinite(one.norm)}
            if not answers or any(one.loss <= guard.worse(one.first) for one in still.values()):
                break
        return still

    def own_rate(self, clients: Clients) -> float:
        """The rate of a client's own gradient in this round. If clients differ, every round adds noise in proportion
        to its rate; towards the end that matters more than progress. The more of them take part, the less noise there is."""
        left = (clients.rounds - clients.t) / clients.rounds if clients.rounds and self.pace == "measured" else 1.0
        fall = FALL * (1.0 - len(clients.ids) / clients.total / 2)
        return float(self.state["rate"]) * min(1.0, left / fall)

    def limit(self) -> float:
        """The limit for the norm of a mini-batch gradient, from what was usual at the start. If gradients grow later, as in
        convolutional networks, a rate that was right for short ones would be too high."""
        return CLIP * float(self.state["norm"])

    def plan(self, clients: Clients) -> Work:
        """Theorem 1 around the expected path of the average client: φ2[k] = w̄ - η_ref k S φ1. The deviation is measured in units
        of |S φ1|, so that α has no unit.

        If clients remember, g - h_i + h̄ takes the place of a client's own gradient g, where h_i is what it remembers and h̄ the mean
        over all clients (SCAFFOLD's control variates). What is common to all clients is sent as one vector, λ h̄ + (1-λ) φ1, which
        then takes the place of φ1. A network's gradients are noisy, and are averaged over as many rounds as φ1."""
        own, phi1, steps, epochs = self.own_share(), self.state["phi1"], clients.effective_steps, clients.epochs
        memory, mix = (own, 1.0) if self.recalls(clients) else (0.0, 1.0 - own)
        field = own * self.state["control"] + (1.0 - own) * phi1 if memory else phi1
        self.rate = self.own_rate(clients)
        pace, norm2 = self.rate / own, float(field.double().square().sum())
        work = Work(clients.constant(pace), memory=memory, renew=1.0 if self.linear else own, clip=self.limit())
        if not norm2:
            return work
        work = replace(work, own=own, field=field[None], mix=torch.full((epochs, 1), mix), behind=self.state["back"])
        if not self.theorem:
            return work
        ahead = torch.arange(1, epochs + 1, dtype=torch.float64).flip(0).cumsum(0).flip(0)  # Σ_{k>p} k
        rate, slope = meanfield.affine_rates(torch.ones(epochs, epochs), -pace * ahead, self.alpha)
        slope = slope.sum(1, keepdim=True) / (steps * norm2)
        return replace(work, rate=rate, slope=slope, high=pace)

    def recalls(self, clients: Clients) -> bool:
        """Do clients remember in this round? Not if they are expected to take part at most twice: most could recall nothing. A
        client that makes one step does not drift. A client that reports nothing must not be asked to remember, and with a robust
        rule h̄ would not be the mean."""
        often = not clients.rounds or clients.rounds * len(clients.ids) / clients.total > 2
        due = self.memory == "on" or (often and not is_much(clients.total, len(self.state["phi1"])))
        return self.state.get("heard", False) and due and clients.steps * clients.epochs > 1 and clients.robust == "mean"

    def remember(self, chunk: Chunk, work: Work) -> Tensor:
        """h_i, renewed by a share of g - h_i, which a client knows from its displacement: its mean step, less what is common to all
        clients, is λ (g - h_i)."""
        assert chunk.memory is not None
        common, step = work.shift(0), -chunk.delta / chunk.travel[:, None]
        return (chunk.memory + work.renew * (step if common is None else step - common)) / work.own

    def follow(self, work: Work, out: Outcome, clients: Clients) -> None:
        """Update the mean of what clients remember, also after a round whose result is discarded: clients do not know of that."""
        self.state |= {"samples": self.state["samples"] + float(out.size.sum()), "answers": self.state["answers"] + len(out.size)}
        if work.memory:
            common = 0.0 if out.sent is None else out.sent[0]
            share = self.amount(out) * len(out.clients) / clients.total
            self.state["control"] = self.state["control"] - work.renew * share / work.own * (out.flow + common)

    def amount(self, out: Outcome) -> float:
        """The samples of a client in this round, relative to the mean of all rounds. If clients have unequal amounts of data, some
        rounds see more of it than others."""
        return float(out.size.mean()) * int(self.state["answers"]) / float(self.state["samples"])

    def round(self, model: Model, clients: Clients) -> Model:
        self.departure, usual = math.nan, clients.yardstick.length
        if not guard.enough(self.state["tried"], clients) and not self.search(clients):
            return model
        work = self.plan(clients)
        try:
            out = clients.train(work)
        except NoClients:
            if guard.blown_up(clients):
                return guard.undo(self.state, clients)
            raise
        self.follow(work, out, clients)
        looked, judged = self.state["back"] != 0.0 and out.sent is not None, guard.enough(len(out.clients), clients)
        if guard.blown_up(clients) or (looked and judged and guard.broken(out, self.state["start"])):
            return guard.undo(self.state, clients)
        if judged and guard.unruly(out, self.state["start"]):
            guard.slow_down(self.state, clients, usual)
            return model
        guard.keep(self.state, model, usual)
        if looked:
            self.look_back(out)
            if guard.rising(self.state["trend"], out, clients, self.state["start"]):
                self.state |= {"rate": self.state["rate"] / 2, "trend": 0.0}
        self.learn(work, out)
        self.state["back"] = float(out.travel.mean())
        nxt = self.decayed(model.moved(self.state["back"] * out.flow, out.buffers), out, clients)
        self.average(nxt)
        return nxt

    def learn(self, work: Work, out: Outcome) -> None:
        """Estimate the mean field and the agreement from the updates alone. A client's displacement divided by rate and steps is
        its mean step, λ ḡ_i + (1-λ) φ1, so nothing else has to be sent. If clients remember, ḡ_i is the corrected gradient."""
        fresh, momentum = -out.flow, (1.0 - self.own_share()) * self.state["phi1"]
        if out.sent is not None and work.field is not None and work.mix is not None:
            momentum = momentum + float(work.mix[0, 0]) * (out.sent[0] - work.field[0])  # the downlink may round
            gram = out.sent[:1].double() @ out.sent[:1].double().T
            self.departure = meanfield.departure(out.norm2, out.along, gram.cpu(), out.travel[:, None])
        gradient = fresh - momentum  # λ times the mean of the clients' own gradients
        each = float(out.theta @ out.trusted(out.norm2 / out.travel**2)) + float(
            (momentum.double() * (momentum - 2 * fresh).double()).sum()
        )
        now = meanfield.agreement(float(gradient.double().square().sum()), each, 1 / float(out.theta @ out.theta))
        known = self.state["known"] + 1
        share = max(1 / known, 1 - MEMORY)  # in the first rounds the mean of all, or the first would count for most
        # A round with more data counts for more. At 1/λ nothing would be left of the old field.
        phi1 = self.state["phi1"] + min(self.amount(out), 1 / self.own_share()) * (fresh - self.state["phi1"])
        self.state |= {"agreement": (1 - share) * self.state["agreement"] + share * now, "phi1": phi1, "known": known}

    def look_back(self, out: Outcome) -> None:
        """Record how the last step changed the loss, on the current samples."""
        change = float(out.trusted(out.first - out.behind).mean())
        for name, value in (("trend", change), ("swing", abs(change))):
            self.state[name] = MEMORY * self.state[name] + (1 - MEMORY) * value

    def pull(self, out: Outcome, clients: Clients) -> float:
        """The weight decay, as a share of the distance that gradients covered. If layers are normalised, the length of their
        weights has no other effect. Other networks without dropout learn samples by heart that they see often, so they are pulled
        harder with every pass. But where clients remove most of their loss on their own in a round, they have few classes, and a
        strong pull would take away what the model knows of the others."""
        if self.normalised:
            return BARE_DECAY
        if not self.bare:
            return DECAY
        passes = int(self.state["answers"]) * clients.epochs / clients.total  # over the samples of a client, so far
        first, loss = (float(out.trusted(values).mean()) for values in (out.first, out.loss))
        kept = min(1.0, max(0.0, loss / first)) if first and math.isfinite(loss / first) else 1.0
        return DECAY + (BARE_DECAY - DECAY) * kept**2 * max(0.0, 1.0 - 1.0 / passes)

    def decayed(self, model: Model, out: Outcome, clients: Clients) -> Model:
        """Weight decay without a unit: weights are pulled to zero by a share of the distance that the clients' gradients covered,
        each counted alone. Steps of constant length in changing directions make weights grow, and the larger these are, the less a
        step changes."""
        norm = out.norm.nan_to_num(0.0).clamp(0.0, self.limit())  # as reported by the client, so not trusted
        pull = self.pull(out, clients) * float((out.travel * norm).mean())
        length = float(torch.linalg.vector_norm(model.w))
        return Model(model.w * (1.0 - pull / max(length, pull)), model.buffers) if pull else model

    def average(self, model: Model) -> None:
        """Update the average of the path, in which later models weigh more (Shamir, Zhang 2013, with η = 1/FALL). If every round
        lowers the loss, this is the last model; if rounds undo each other, as with few clients whose data differ, it is not."""
        calm = self.state["trend"] / self.state["swing"] if self.state["swing"] else 1.0
        share = max((1 / FALL + 1) / (1 / FALL + self.state["known"]), calm**2)
        for name, value in (("shown", model.w), ("shown/buffers", model.buffers)):
            mean = self.state[name] + share * (value - self.state[name])
            self.state[name] = torch.where(mean.isfinite(), mean, value)  # a buffer may hold an infinity, such as a mask

    def reported(self, model: Model) -> Model:
        return Model(self.state["shown"], self.state["shown/buffers"])

    def figures(self) -> dict[str, float]:
        own = self.own_share()
        return {"pace": self.rate / own, "own_rate": self.rate, "own_share": own, "departure": self.departure}
