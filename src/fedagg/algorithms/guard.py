"""FedAgg's guard: a rate that a run finds for itself will be too bold now and then. That must cost a round, not the run.

It looks at losses that clients report anyway. That of a client's first mini-batch is the global model's own, and is taken on the
last global model, too, so that the two can be compared sample by sample. Where a loss of the user's own is negative, so many times
its value is to be read as that much worse, nearer to zero.
"""

from __future__ import annotations

import math

from torch import Tensor

from fedagg.clients import Clients, Outcome

LOSS_JUMP = 1.5  # a loss over this multiple of the one before has been broken
DOUBT = 3.0  # standard errors that are put down to chance
LOST_SHARE = 0.2  # more clients than this that blow up are the model's fault, or the rate's


def worse(loss: float, times: float = LOSS_JUMP) -> float:
    """So many times as bad a loss."""
    return max(times * loss, loss / times)


def doubt(values: Tensor) -> float:
    """`DOUBT` standard errors of the mean; without end where there is no telling."""
    return DOUBT * float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def unruly(out: Outcome) -> bool:
    """Did the clients' own training make the loss worse than where it began? Then the rate is beyond what their losses bear, and
    what they bring back is no use."""
    return float(out.loss.mean()) > worse(float(out.first.mean()) + doubt(out.first))


def broken(out: Outcome) -> bool:
    """Did the last step break the model? Its loss has jumped, on the very samples on which it was taken before the step."""
    return float(out.first.mean()) - doubt(out.first - out.behind) > worse(float(out.behind.mean()))


def blown_up(clients: Clients) -> bool:
    """Did many clients blow up in training: left out, with a loss to match? One that was left out with a usual loss trained well;
    its answer was spoilt on the way, and that says nothing about the model."""
    lost = [c for c, told in clients.reported.items() if c in clients.left_out and not told.loss < worse(told.first)]
    return len(lost) > LOST_SHARE * len(clients.reported)
