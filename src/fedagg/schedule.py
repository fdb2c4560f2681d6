"""How the base rate changes over the rounds of a run: warm-up, then a schedule, times a decay."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "cosine", "step"]
SETTINGS = ("lr_decay", "lr_schedule", "warmup")  # settings that change the rate over a run

LEAST = 1e-30  # smallest rate: results cannot be divided by anything below


def share(t: int, rounds: int, decay: float = 1.0, schedule: Schedule = "constant", warmup: int = 0) -> float:
    """The rate of round t = 0, 1, ... as a share of the base rate.

    During the warm-up it grows in equal steps; the round after it is the first at the full rate. From there, s rounds later and S
    in all, it is decay^s times 1 (constant), (1 + cos(π s/S))/2 (cosine, Loshchilov, Hutter 2017), or 1, then 1/10 from half of S
    on and 1/100 from three quarters on (step, He et al. 2016).
    """
    if t < warmup:
        return (t + 1) / (warmup + 1)
    s, left = t - warmup, rounds - warmup
    form = {
        "constant": 1.0,
        "cosine": (1 + math.cos(math.pi * s / left)) / 2,
        "step": 0.1 ** ((2 * s >= left) + (4 * s >= 3 * left)),
    }[schedule]
    return float(form * decay**s)
