"""FedAgg's guard: a rate that a run finds for itself is sometimes too high. That must cost a round, not the run.

It uses losses that clients report anyway. The loss of a client's first mini-batch is measured at the global model, before any step,
and also at the last global model, so that the two can be compared on the same samples. A rise is compared with the loss at the
start: losses near zero often double, which means little.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fedagg import meanfield
from fedagg.clients import Clients, Outcome
from fedagg.flat import Model

MUCH = 0.25  # a share that is no accident: of the loss at the start, if the loss rises by it; of the clients, if they diverge
DOUBT = 3.0  # standard errors that may be chance
FEW = 4  # fewer of many clients say nothing about the others
KEPT = ("phi1", "known", "agreement", "back")  # what led to a model, and is restored with it


def enough(count: int, clients: Clients) -> bool:
    """Do that many clients say something about all? Half of them do."""
    return count >= min(FEW, clients.total / 2)


def worse(loss: float, start: float = 0.0, share: float = MUCH) -> float:
    """The lowest loss that counts as worse than this one, in a run that began with the loss `start`, if that is known. A user's own
    loss may be negative: then it grows in size as it falls."""
    return loss + share * max(abs(loss), abs(start))


def doubt(values: Tensor) -> float:
    """`DOUBT` standard errors of the mean; infinite for a single value."""
    return DOUBT * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def unruly(out: Outcome, start: float = 0.0) -> bool:
    """Did the clients' own training make the loss worse than at its start? Then the rate is too high for them, and their updates
    are useless. No client's loss counts for more than twice the first, or one could tell any story."""
    loss = out.loss.minimum(out.first + out.first.abs().clamp_min(abs(start)))
    first = out.trusted(out.first)
    return float(out.trusted(loss).mean()) > worse(float(first.mean()) + doubt(first), start)


def broken(out: Outcome, start: float = 0.0) -> bool:
    """Did the last step break the model? Its loss has jumped, on the same samples as before the step."""
    first, behind = out.trusted(out.first).mean(), out.trusted(out.behind).mean()
    return float(first) - doubt(out.trusted(out.first - out.behind)) > worse(float(behind), start)


def rising(trend: float, out: Outcome, clients: Clients, start: float = 0.0) -> bool:
    """Does the loss rise, by `trend` in a mean round? If fewer than half of the clients take part, other clients were asked in the
    round before, and a rise may be theirs."""
    loss = float(out.trusted(out.first).mean())
    return 2 * len(out.clients) >= clients.total and loss + trend > worse(loss, start, meanfield.LITTLE)


def blown_up(clients: Clients) -> bool:
    """Did many clients diverge in training: left out, with a loss to match? A client that was left out with a usual loss trained
    well. Its answer was damaged on the way, which says nothing about the model."""

    lost = [c for c, report in clients.reported.items() if c in clients.left_out and not report.loss < worse(report.first)]
    return len(lost) > MUCH * len(clients.reported)


def keep(state: dict[str, Any], model: Model, usual: float) -> None:
    """Remember a model that was not broken, the field that led to it, and the usual length of a step before clients trained on
    it: in a round that breaks the model, most lengths may be outliers."""
    state |= {"good/w": model.w, "good/buffers": model.buffers, "good/yardstick": usual}
    state |= {f"good/{name}": state[name] for name in KEPT}


def slow_down(state: dict[str, Any], clients: Clients, usual: float) -> None:
    """Do not count this round, and halve the rate."""
    clients.yardstick.length = usual
    state["rate"] /= 2


def undo(state: dict[str, Any], clients: Clients) -> Model:
    """Go back to the last good model, at half the rate. The rounding error belongs to the broken field, and is dropped too."""
    clients.forget()
    slow_down(state, clients, state["good/yardstick"])
    state |= {name: state[f"good/{name}"] for name in KEPT}
    return Model(state["good/w"], state["good/buffers"])
