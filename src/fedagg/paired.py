"""Statistics over seeds: mean and deviation, and differences between methods that had the same clients, seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

# Student's t at 97.5 %, by degrees of freedom from 1. SciPy has it too, but is an extra.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def student(freedom: int) -> float:
    """The half-width of a 95 % interval in standard errors. Beyond the table, by Cornish and Fisher's expansion around 1.96."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.95996 + 2.3723 / freedom + 2.8226 / freedom**2


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation; NaN for a single value."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, float]:
    """The mean of `one` minus `other` over the seeds that both have, and the half-width of its 95 % interval (nan for fewer than
    two seeds). With the same seed both have the same clients, batches and initial weights, so these do not widen the interval."""
    pairs = [one[seed] - other[seed] for seed in one if seed in other]
    if not pairs:
        return math.nan, math.nan
    width = student(len(pairs) - 1) * deviation(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
    return statistics.fmean(pairs), width
