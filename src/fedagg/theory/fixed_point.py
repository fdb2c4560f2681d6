r"""The fixed point of the mean-field terms: that it exists (Theorem 2), that it is reached (Proposition 2), and where it is.

Algorithm 1 plans rates by Theorem 1 from the terms of the last pass, lets the clients move, and averages again. Let $A$
map rates to the displacements $\sum_{p<k}\eta_p\phi_{1,p}$, k = 1..L. Then a pass along Eq. (9) is

$$\eta^{(j+1)} = (I + cA^\top A)^{-1} c A^\top A\,\eta^{(j)},$$

because all clients start at $\bar w$ and take the same path, so that $\bar w - \phi_2 = A\eta^{(j)}$ is exactly what
the plan has to reproduce. The matrix has eigenvalues $c\sigma^2/(1+c\sigma^2) < 1$: each pass shrinks the rates,
and the only fixed point is η = 0, where no client moves. Algorithm 1 is useful as the paper states it, as a few passes
from a positive rate with a tolerance, but not in the limit. Everything here is in float64. The clients are quadratic, so
that each number can be checked by hand, or those of a run (`fedagg.theory.objective`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedagg.errors import unknown
from fedagg.meanfield import learning_rates, weight_ratio
from fedagg.theory.bounds import path_norm

Direction = Literal["aggregated", "local"]


class Federation(Protocol):
    """What Algorithm 1 needs from its clients."""

    @property
    def theta(self) -> Tensor:
        """Aggregation weights, (N,)."""

    @property
    def beta(self) -> float:
        """The smoothness of Assumption 1."""

    def gradients(self, w: Tensor) -> Tensor:
        """∇F_i(w_i) for a stack (N, d) of positions, or ∇F_i(w) of all clients at one w (d,)."""

    def around(self, w: Tensor) -> Federation:
        """The same clients, with positions measured from w."""


@dataclass(frozen=True)
class QuadraticClients:
    r"""Clients with losses $\frac12 (w - m_i)^\top H_i (w - m_i)$: all the paper's constants are known exactly.

    Attributes:
        hessians: H_i, symmetric, (N, d, d), float64.
        centres: m_i, (N, d), float64.
        theta: aggregation weights, (N,), float64, summing to 1.
    """

    hessians: Tensor
    centres: Tensor
    theta: Tensor

    @staticmethod
    def random(
        clients: int, dimension: int, generator: torch.Generator, spread: float = 1.0, equal_sizes: bool = True
    ) -> QuadraticClients:
        """Convex clients with curvatures between 0.1 and about 1, and minimisers `spread` apart."""
        factor = torch.randn(clients, dimension, dimension, generator=generator, dtype=torch.float64)
        hessians = factor @ factor.mT / (4.0 * dimension) + 0.1 * torch.eye(dimension, dtype=torch.float64)
        centres = spread * torch.randn(clients, dimension, generator=generator, dtype=torch.float64)
        sizes = torch.rand(clients, generator=generator, dtype=torch.float64) + 0.05
        theta = torch.full_like(sizes, 1.0 / clients) if equal_sizes else sizes / sizes.sum()
        return QuadraticClients(hessians, centres, theta)

    def gradients(self, w: Tensor) -> Tensor:
        """∇F_i(w_i) for a stack (N, d) of positions, or ∇F_i(w) of all clients at one w (d,)."""
        return torch.einsum("nij,nj->ni", self.hessians, w - self.centres)

    def around(self, w: Tensor) -> QuadraticClients:
        """The same clients, with positions measured from w."""
        return replace(self, centres=self.centres - w)

    def losses(self, w: Tensor) -> Tensor:
        """F_i(w_i) or F_i(w), (N,)."""
        return 0.5 * ((w - self.centres) * self.gradients(w)).sum(-1)

    def loss(self, w: Tensor) -> float:
        """F(w), Eq. (3)."""
        return float(self.theta @ self.losses(w))

    def gradient(self, w: Tensor) -> Tensor:
        """∇F(w)."""
        return torch.einsum("n,ni->i", self.theta, self.gradients(w))

    @property
    def hessian(self) -> Tensor:
        """The Hessian of F."""
        return torch.einsum("n,nij->ij", self.theta, self.hessians)

    @property
    def minimiser(self) -> Tensor:
        """w*, from one linear system."""
        pull = torch.einsum("n,nij,nj->i", self.theta, self.hessians, self.centres)
        found: Tensor = torch.linalg.solve(self.hessian, pull)
        return found

    @property
    def beta(self) -> float:
        """The smoothness of Assumption 1: the largest |eigenvalue| of any client's Hessian."""
        return float(torch.linalg.eigvalsh(self.hessians).abs().max())

    @property
    def psi(self) -> float:
        """The strong convexity constant of F, which for a quadratic is also its Polyak-Łojasiewicz constant."""
        return float(torch.linalg.eigvalsh(self.hessian).min())

    @property
    def imbalance(self) -> float:
        """Σ_i |θ_i - 1/N|."""
        return float((self.theta - 1.0 / len(self.theta)).abs().sum())


@dataclass(frozen=True)
class Trajectory:
    """One round of all clients: their positions (L+1, N, d) and their gradients there (L, N, d)."""

    positions: Tensor
    gradients: Tensor


def local_round(clients: Federation, w: Tensor, rates: Tensor, local: float = 0.0) -> Trajectory:
    """L steps of every client from w with the given rates (N, L): along Eq. (9) at local = 0, Algorithm 2 at 1."""
    at = w.expand(len(clients.theta), -1)
    positions, gradients = [at], []
    for rate in rates.T:
        gradient = clients.gradients(at)
        at = at - rate[:, None] * (local * gradient + (1.0 - local) * gradient.mean(0))
        positions.append(at)
        gradients.append(gradient)
    return Trajectory(torch.stack(positions), torch.stack(gradients))


@dataclass(frozen=True)
class Pass:
    r"""The result of one pass of Algorithm 1.

    Attributes:
        rates: the planned rates, averaged over clients, (L,).
        step: the distance from the terms of the previous pass, in the paper's Φ: the root of |Δφ1|² + |Δφ2|².
        rate_factor: |rates| divided by |rates of the previous pass|, the measured contraction.
        step_factor: step divided by the step of the previous pass; nan in the first pass.
        limit: $c\sigma^2/(1+c\sigma^2)$ with $\sigma$ the norm of A in this pass. A pass along Eq. (9) multiplies the
            rates by this factor at most.
        paper: the paper's $\sqrt{(\beta^2+1)\delta_h/N}$ for the largest rate of this pass, even if it is not below 1.
    """

    rates: Tensor
    step: float
    rate_factor: float
    step_factor: float
    limit: float
    paper: float


def algorithm_one(
    clients: Federation,
    w: Tensor,
    alpha: float,
    epochs: int,
    rate: float = 0.1,
    passes: int = 20,
    tolerance: float = 0.0,
    direction: Direction = "aggregated",
) -> list[Pass]:
    """Run Algorithm 1 for one round that starts at w, with the rate `rate` in every epoch at first.

    Clients plan once per pass. With "aggregated" (Eq. 9) they all do the same. With "local" (Algorithm 2) their plans are
    the same, because they are made at w, and only their paths differ. In both cases the mean path is w̄ - Aη, where A is
    made from the φ1 of this pass.

    Args:
        tolerance: stop when both terms change by less than this, in norm (the printed signed sums can cancel).
        direction: "aggregated" or "local".
    """
    if direction not in ("aggregated", "local"):
        raise unknown("direction", direction, ("aggregated", "local"))
    local = 1.0 if direction == "local" else 0.0
    # Positions are measured from the start of the round: rates come from w̄ - φ2, which for small rates is lost in the digits of w̄.
    clients, w = clients.around(w), torch.zeros_like(w)
    count, beta = len(clients.theta), clients.beta
    rates = torch.full((epochs,), rate, dtype=torch.float64)
    phi1, phi2 = mean_field(local_round(clients, w, rates.expand(count, -1), local))
    record: list[Pass] = []
    for _ in range(passes):
        before, last1, last2 = rates, phi1, phi2
        limit = pass_limit(phi1, alpha)
        rates = learning_rates(phi1, phi2, w, alpha)
        phi1, phi2 = mean_field(local_round(clients, w, rates.expand(count, -1), local))
        moved1, moved2 = float((phi1 - last1).norm()), float((phi2 - last2).norm())
        step = math.hypot(moved1, moved2)
        paper = math.sqrt((beta**2 + 1.0) * float(rates.abs().max()) / count)
        shrunk = _ratio(float(rates.norm()), float(before.norm()))
        record.append(Pass(rates, step, shrunk, _ratio(step, record[-1].step) if record else math.nan, limit, paper))
        if moved1 < tolerance and moved2 < tolerance:
            break
    return record


def mean_field(path: Trajectory) -> tuple[Tensor, Tensor]:
    """Definition 1: φ1 (L, d) and φ2 (L+1, d), the averages over clients."""
    return path.gradients.mean(1), path.positions.mean(1)


def pass_limit(phi1: Tensor, alpha: float) -> float:
    r"""$c\sigma^2/(1+c\sigma^2)$, where σ is the norm of the map A from rates to displacements along these φ1."""
    left = torch.arange(len(phi1), 0, -1, dtype=torch.float64)
    gram = torch.minimum(left[:, None], left[None, :]) * (phi1 @ phi1.T)
    gain = weight_ratio(alpha) * float(torch.linalg.eigvalsh(gram).max())
    return gain / (1.0 + gain)


def asymptotic_factor(clients: Federation, w: Tensor, alpha: float, epochs: int) -> float:
    r"""The contraction in the limit: $c\kappa_L^2|g|^2/(1+c\kappa_L^2|g|^2)$, g the mean gradient at w.

    Near η = 0 all φ1 are g, so A is g times the matrix of partial sums and σ is κ_L |g| (`path_norm`).
    """
    reach = path_norm(epochs) * float(clients.gradients(w).mean(0).norm())
    gain = weight_ratio(alpha) * reach**2
    return gain / (1.0 + gain)


def exact_fixed_point(clients: Federation, w: Tensor, epochs: int) -> tuple[Tensor, Tensor]:
    r"""The fixed point, for any clients: no client moves, $\phi_{1,l} = \frac1N\sum_i\nabla F_i(w)$, $\phi_{2,l} = w$."""
    return clients.gradients(w).mean(0).expand(epochs, -1), w.expand(epochs + 1, -1)


def _ratio(value: float, before: float) -> float:
    return value / before if before > 0.0 else math.nan
