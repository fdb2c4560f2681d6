"""The paper's analysis in numbers: its bounds, its constants, its fixed point, and how much the clients differ."""

from __future__ import annotations

from fedagg.theory.bounds import (
    Bound,
    Constants,
    client_drift,
    convergence_error,
    convergence_rate,
    field_convergence,
    learning_rate,
    mean_field_contraction,
    one_round_progress,
    optimality_gap_contraction,
    optimality_gap_convex,
    optimality_gap_nonconvex,
)

__all__ = [
    "Bound",
    "Constants",
    "client_drift",
    "convergence_error",
    "convergence_rate",
    "field_convergence",
    "learning_rate",
    "mean_field_contraction",
    "one_round_progress",
    "optimality_gap_contraction",
    "optimality_gap_convex",
    "optimality_gap_nonconvex",
]
