"""FedAgg, the default version: no probe, nothing to tune, FedAvg's local work and FedAvg's uplink.

Clients step along a mix of their own gradient and the aggregated one (Eq. 9 between its two ends), so that they move as the model
behind Theorem 1 says; Theorem 1 gives every client its rate for every epoch; how fast the whole federation goes is read off the
path it has travelled. The parts are small named functions, here and in `fedagg.meanfield`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedagg import meanfield
from fedagg.algorithms.base import Algorithm, option, register
from fedagg.clients import Clients, NoClients, Outcome
from fedagg.flat import Layout, Model
from fedagg.work import Work

LEAST_OWN = 0.1  # λ never falls below: a client that ignored its own gradient would teach the server nothing
RATE_BAND = (0.1, 2.0)  # rates stay within these multiples of the pace
PACE_CEILING = 0.3  # and pace and rates under this
ROUND_TRAVEL = 16.0  # and under this over the steps of a round: clients drift with every step they make on their own
PACE_PER_OWN = 2.0  # and under this multiple of λ: where clients disagree, the federation slows down
LOSS_JUMP = 1.5  # a training loss over this multiple of its running mean means the last round broke the model
LOST_SHARE = 0.2  # so do more clients than this that blew up
DOUBT = 3.0  # standard errors of a loss that are put down to chance
TRIAL_ROUNDS = 3  # after these the model must be better than untrained
STILLBORN = 1.02  # times the untrained model's loss
FADED = 0.5  # or still have this share of the gradient it began with
RECOVERY = 1.1  # the limit that a lost round puts on the pace, half of what went wrong, grows by this a round
KEPT = ("phi1", "known", "agreement", "distance", "gradients2", "weighted2")  # what an undone round gives back


@register("fedagg")
@dataclass
class FedAgg(Algorithm):
    alpha: float = option(0.1, "α, the weight of the rate against the deviation", gt=0, lt=1)
    direction: Literal["mixed", "local"] = option("mixed", "what a client steps along")
    estimator: Literal["history", "probe"] = option("history", "where the mean-field terms come from")
    pace: Literal["weighted", "distance", "base"] = option("weighted", "how the pace of the federation is set")

    def start(self, model: Model, module: nn.Module, layout: Layout) -> None:
        self.departure = self.going = self.caution = math.nan
        self.reset(model, self.lr)

    def reset(self, model: Model, base: float) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        self.state |= {
            "base": zero + base,  # the rate to begin with
            "w0": model.w,  # where training began
            "buffers0": model.buffers,
            "phi1": torch.zeros_like(model.w),  # the aggregated gradient, one for all epochs
            "known": zero.clone(),  # rounds that gave a mean field
            "agreement": zero + 1.0,
            "distance": zero.clone(),
            "gradients2": zero.clone(),
            "weighted2": zero.clone(),
            "limit": zero + math.inf,  # on the pace: half of one that went wrong
            "loss": zero + math.nan,
            "doubt": zero + math.nan,  # of that loss
            "gain": zero.clone(),  # what clients' own training took off it in the last round
            "first_loss": zero + math.nan,  # of the untrained model
            "gradient": zero.clone(),  # the length of the clients' mean gradient
            "first_gradient": zero.clone(),
        }
        self.keep(model, 0.0)

    def number(self, name: str) -> float:
        return float(self.state[name])

    def own_share(self) -> float:
        """λ, the weight of the client's own gradient: the square root of the agreement, 1 while there is no field."""
        if self.direction == "local" or not self.number("known"):
            return 1.0
        return max(LEAST_OWN, math.sqrt(self.number("agreement")))

    def reference(self) -> float:
        """η_ref, the pace of the federation: distance travelled over gradients met; the base rate at first."""
        if not self.number("gradients2") or self.pace == "base":  # a probe gives a field before anybody has travelled
            return self.number("base")
        far = self.number("distance")
        if self.pace == "weighted":
            return meanfield.distance_pace(far * far, self.number("weighted2"))
        return meanfield.distance_pace(far, self.number("gradients2"))

    def plan(self, phi1: Tensor, clients: Clients) -> Work:
        """Theorem 1 around the path that the average client is about to take: φ2[k] = w̄ - η_ref k S φ1."""
        own, steps, epochs = self.own_share(), clients.reach, clients.epochs
        known, free = self.number("known"), self.reference()
        ceiling = min(PACE_CEILING, ROUND_TRAVEL / (steps * epochs), PACE_PER_OWN * own)
        free = min(free, ceiling) if known else free
        self.going = pace = min(free, self.number("limit"))
        self.caution = pace / free if free else 1.0  # nobody has moved: every gradient was zero
        if not known:
            return Work(rate=clients.constant(pace))
        norm2 = steps * steps * float(phi1.double().square().sum())  # |S φ1|²
        ahead = torch.arange(1, epochs + 1, dtype=torch.float64).flip(0).cumsum(0).flip(0)  # Σ_{k>p} k
        rate, slope = meanfield.affine_rates(torch.full((epochs, epochs), norm2), -pace * norm2 * ahead, self.alpha)
        return Work(
            rate=rate,
            slope=steps * slope.sum(1, keepdim=True),
            low=RATE_BAND[0] * pace,
            high=min(RATE_BAND[1] * pace, ceiling, self.number("limit")),
            own=own,
            field=phi1[None],
            mix=torch.full((epochs, 1), 1.0 - own),
        )

    def round(self, model: Model, clients: Clients) -> Model:
        self.departure, usual = math.nan, clients.yardstick.length
        try:
            if self.estimator == "probe":
                self.learn(clients.train(self.plan(self.state["phi1"], clients)))
            out = clients.train(self.plan(self.state["phi1"], clients))
        except NoClients:
            if self.blown_up(clients) > LOST_SHARE:
                return self.undo(clients)
            raise
        if self.broken(out, clients):
            return self.undo(clients)
        if self.stillborn():
            return self.restart(clients)
        self.keep(model, usual)
        if self.unruly(out):
            self.slow_down()
            clients.yardstick.length = usual
            return model
        self.learn(out)
        nxt = model.moved(out.mean, out.buffers)
        self.travelled(nxt, clients)
        return nxt

    def learn(self, out: Outcome) -> None:
        """The mean field and the agreement from what the clients did: their displacement over rate and steps is their mean step,
        λ ḡ_i + (1-λ) φ1, so nothing but the update has to be sent."""
        own, phi1 = self.own_share(), self.state["phi1"] if out.sent is None else out.sent[0]
        fresh = -out.velocity
        gradient = (fresh - (1.0 - own) * phi1) / own
        norm2 = float(phi1.double().square().sum())  # |φ1|²
        along = out.along[:, 0] if out.along.shape[1] else torch.zeros_like(out.travel)
        if self.number("known"):
            self.departure = meanfield.departure(out.norm2, along[:, None], torch.tensor([[norm2]]).double(), out.travel[:, None])
        own2 = out.norm2 / out.travel**2 + 2 * (1 - own) * along / out.travel + (1 - own) ** 2 * norm2
        length2 = float(gradient.double().square().sum())
        self.state["gradient"] = torch.tensor(math.sqrt(length2), dtype=torch.float64)
        if not self.number("known"):
            self.state["first_gradient"] = self.state["gradient"]
        now = meanfield.agreement(length2, float(own2.mean()) / own**2, len(out.clients))
        before = self.number("agreement") if self.number("known") else now
        self.state["agreement"] = torch.tensor((before + now) / 2, dtype=torch.float64)
        self.state["phi1"] = fresh
        self.state["known"] = self.state["known"] + 1.0

    def travelled(self, model: Model, clients: Clients) -> None:
        """Book the round for the pace: how far from the start, against how much gradient."""
        total2 = (clients.reach * clients.epochs) ** 2 * float(self.state["phi1"].double().square().sum())
        far = max(self.number("distance"), float((model.w - self.state["w0"]).double().norm()))
        self.state["distance"] = torch.tensor(far, dtype=torch.float64)
        self.state["gradients2"] = self.state["gradients2"] + total2
        self.state["weighted2"] = self.state["weighted2"] + far * far * total2

    def broken(self, out: Outcome, clients: Clients) -> bool:
        """Did the last step break the model? The loss of the clients' first mini-batches is the model's own, and costs nothing. It
        must not jump; it must not rise by more than sampling explains after a round in which the clients' own training got nowhere;
        and clients must not blow up on it. The average of clients that did get better may be worse for a while, where their data
        differ: that passes."""
        loss, usual = float(out.first.mean()), self.number("loss")
        wide = student(len(out.clients)) * doubt(out)
        if self.blown_up(clients) > LOST_SHARE:
            return True
        if not self.number("known") or math.isnan(usual):
            usual = loss
            self.state["first_loss"] = torch.tensor(loss, dtype=torch.float64)
        else:
            stuck = self.number("gain") <= 0 and loss - usual > math.hypot(wide, self.number("doubt"))
            if stuck or not loss - doubt(out) <= worse(usual, LOSS_JUMP):
                return True
            self.state["limit"] = self.state["limit"] * RECOVERY
        self.state["loss"] = torch.tensor((usual + loss) / 2, dtype=torch.float64)
        self.state["doubt"] = torch.tensor(wide, dtype=torch.float64)
        self.state["gain"] = torch.tensor(loss - float(out.loss.mean()), dtype=torch.float64)
        return False

    def unruly(self, out: Outcome) -> bool:
        """Did the clients' own training make the loss worse than where it began? Then the rate is beyond what their losses bear,
        and what they bring back is no use. At a rate of zero both losses are the same, so this cannot go on for ever."""
        return float(out.loss.mean()) > worse(float(out.first.mean()) + doubt(out), LOSS_JUMP)

    def slow_down(self) -> None:
        self.state["limit"] = torch.tensor(self.going / 2, dtype=torch.float64)

    def stillborn(self) -> bool:
        """The first steps had no mean field and so no pace of their own. Did they kill the model? Then it is, after a few rounds,
        no better than untrained, and its gradient has faded. One that is no better but has a gradient is on its way: where clients'
        data differ, their average is worse before it gets better."""
        if self.number("known") != TRIAL_ROUNDS or self.number("loss") <= worse(self.number("first_loss"), STILLBORN):
            return False
        return self.number("gradient") < FADED * self.number("first_gradient")

    def blown_up(self, clients: Clients) -> float:
        """The share of those that answered who blew up in training: left out, with a training loss to match. A client that was left
        out with a usual loss trained well; its answer was spoilt on the way, and that says nothing about the model."""
        usual = self.number("loss")
        limit = math.inf if math.isnan(usual) else worse(usual, LOSS_JUMP)
        blown = [c for c, loss in clients.reported.items() if c in clients.left_out and not loss < limit]
        return len(blown) / max(1, len(clients.reported))

    def keep(self, model: Model, usual: float) -> None:
        """Remember a model that was not broken, with its field, its account of the path, and what was a usual length before clients
        trained on it: in a round that breaks the model, absurd ones may be most."""
        self.state |= {"good/w": model.w, "good/buffers": model.buffers}
        self.state["good/yardstick"] = torch.tensor(usual, dtype=torch.float64)
        self.state |= {f"good/{name}": self.state[name] for name in KEPT}

    def undo(self, clients: Clients) -> Model:
        """Back to the last good model, at half the pace. What rounding kept back is of the broken field, and goes with it."""
        clients.forget()
        clients.yardstick.length = self.number("good/yardstick")
        self.slow_down()
        self.state |= {name: self.state[f"good/{name}"] for name in KEPT}
        return Model(self.state["good/w"], self.state["good/buffers"])

    def restart(self, clients: Clients) -> Model:
        """Begin again from the untrained model, at a quarter of the rate."""
        clients.forget()
        clients.yardstick.length = 0.0
        model = Model(self.state["w0"], self.state["buffers0"])
        self.reset(model, self.number("base") / 4)
        return model

    def figures(self) -> dict[str, float]:
        return {"pace": self.going, "own_share": self.own_share(), "caution": self.caution, "departure": self.departure}


def worse(loss: float, times: float) -> float:
    """So many times as bad a loss. One of the user's own may be negative, and then the worse one is nearer to zero."""
    return max(times * loss, loss / times)


def doubt(out: Outcome) -> float:
    """`DOUBT` standard errors of the mean loss that the clients began with."""
    return DOUBT * float(out.first.std()) / math.sqrt(len(out.clients)) if len(out.clients) > 1 else math.inf


def student(clients: int) -> float:
    """How much wider than for a known error the same confidence is, when the error is estimated from so few: the quantile of
    Student's distribution over the normal one, expanded in the degrees of freedom."""
    free, z2 = max(clients - 1, 1), DOUBT**2
    return 1 + (z2 + 1) / (4 * free) + (5 * z2**2 + 16 * z2 + 3) / (96 * free**2)
