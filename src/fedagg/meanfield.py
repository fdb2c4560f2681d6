r"""The paper's mathematics: the closed-form rate (Theorem 1) and what the default version feeds it.

Notation is the paper's. A round starts with every client at $\bar w$; client i stands at $w_{i,l}$ at local epoch l of L;
$\phi_{1,l}$ and $\phi_{2,l}$ are the averages over clients of gradients and parameters; $\alpha$ weighs the rate against
the deviation, $c = (1-\alpha)/\alpha$.

Minimising $\sum_l \alpha\eta_l^2 + (1-\alpha)|w_l - \phi_{2,l}|^2$ subject to $w_{l+1} = w_l - \eta_l\phi_{1,l}$ (Eqs. 13-14) is a
least-squares problem in the rates. Written out, Eq. (15) for all epochs is one small linear system:

$$(I + cM)\,\eta = c\,b, \quad M_{pq} = (L-\max(p,q))\,\phi_{1,p}\cdot\phi_{1,q}, \quad
b_p = \phi_{1,p}\cdot\sum_{k>p}(w-\phi_{2,k}).$$

M is the Hadamard product of two positive semi-definite matrices (a Gram matrix and the kernel min(L-p, L-q)), so the system
is positive definite: it always has exactly one solution. Only inner products enter, so the cost is L dot products a client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedagg.errors import SettingError

LITTLE = 0.01  # a share that counts for nothing: of a loss that changes, of gradients that agree
SPARE = 0.07  # a share of the best rate's gain that a much lower rate may miss, where few clients take part


def weight_ratio(alpha: float) -> float:
    """c = (1-α)/α. A smaller α puts more weight on the deviation from the average, and gives bolder rates."""
    if not 0.0 < alpha < 1.0:
        raise SettingError("alpha", alpha, "choose a number strictly between 0 and 1, e.g. 0.1")
    return (1.0 - alpha) / alpha


def system(gram: Tensor, alpha: float) -> Tensor:
    """The matrix I + cM of Theorem 1 from the Gram matrix of φ1 over the epochs still to come."""
    left = torch.arange(len(gram), 0, -1, dtype=torch.float64, device=gram.device)  # L - p
    kernel = torch.minimum(left[:, None], left[None, :])
    return torch.eye(len(gram), dtype=torch.float64, device=gram.device) + weight_ratio(alpha) * kernel * gram


def learning_rates(phi1: Tensor, phi2: Tensor, w: Tensor, alpha: float, epoch: int = 0) -> Tensor:
    """Theorem 1: the optimal rates of epochs `epoch`..L-1 for a client (or a stack of clients) that stands at w.

    Args:
        phi1: mean gradients, (L, d).
        phi2: mean parameters, (L+1, d).
        w: where the client stands at the start of `epoch`, (d,) or (N, d).
        alpha: the paper's aggregation weight, in (0, 1).
        epoch: the first epoch to plan for.

    Returns:
        The planned rates, (L-epoch,) or (N, L-epoch), in float64. The client uses the first and plans again.
    """
    phi1, phi2, w = phi1.double(), phi2.double(), w.double()
    if phi2.shape != (len(phi1) + 1, *phi1.shape[1:]):
        raise SettingError("phi2", tuple(phi2.shape), f"give one row more than phi1: {(len(phi1) + 1, *phi1.shape[1:])}")
    if not 0 <= epoch < len(phi1):
        raise SettingError("epoch", epoch, f"choose one of the {len(phi1)} local epochs, 0 to {len(phi1) - 1}")
    phi1 = phi1[epoch:]
    # Σ_{k>p} (w - φ2[k]), as differences: w and φ2 are large and nearly equal.
    ahead = phi2[epoch + 1 :].flip(0)
    deviation = (w[..., None, :] - ahead).cumsum(-2).flip(-2)
    b = (deviation * phi1).sum(-1)
    factor = torch.linalg.cholesky(system(phi1 @ phi1.T, alpha))
    rates: Tensor = torch.cholesky_solve(weight_ratio(alpha) * b[..., None], factor).squeeze(-1)
    return rates


def affine_rates(gram: Tensor, drift: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Theorem 1, solved once for all clients: the rate of an epoch is affine in how far a client has moved.

    With everything measured from the round's start, a client displaced by Δ uses ``rate[l] + slope[l] @ (phi1 @ Δ)``.
    So the server solves L small systems a round, and a client adds one dot product an epoch.

    Args:
        gram: phi1 @ phi1.T, (L, L).
        drift: phi1[p] · Σ_{k>p} (phi2[k] - w̄), (L,): all that is needed of φ2.

    Returns:
        rate (L,) and slope (L, L), in float64; slope is upper triangular.
    """
    gram, drift, c = gram.double(), drift.double(), weight_ratio(alpha)
    epochs = len(gram)
    rate, slope = torch.zeros(epochs, dtype=torch.float64), torch.zeros(epochs, epochs, dtype=torch.float64)
    left = torch.arange(epochs, 0, -1, dtype=torch.float64)
    for l in range(epochs):
        first = torch.zeros(epochs - l, dtype=torch.float64)
        first[0] = 1.0
        u = c * torch.linalg.solve(system(gram[l:, l:], alpha), first)  # symmetric: the inverse's first row
        rate[l] = -(u @ drift[l:])
        slope[l, l:] = u * left[l:]
    return rate, slope


def bound_rates(rates: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """The rates, kept within low ≤ η ≤ high. Proposition 3 asks for 0 < η ≤ δ, which the closed form alone does not guarantee."""
    low, high = torch.as_tensor(low).to(rates), torch.as_tensor(high).to(rates)
    return rates.clamp(min=low).minimum(high.expand_as(rates))


def agreement(mean_norm2: float, norm2_mean: float, count: float) -> float:
    r"""How far the clients' gradients agree in direction: $|\bar g|^2 / \overline{|g_i|^2}$, in [0, 1], debiased.

    N independent gradients without a common part would still give 1/N; (N r - 1)/(N - 1) removes this.
    """
    if count <= 1 or norm2_mean <= 0.0:
        return 1.0
    ratio = mean_norm2 / norm2_mean
    return min(1.0, max(0.0, (count * ratio - 1.0) / (count - 1.0)))


def departure(norm2: Tensor, along: Tensor, gram: Tensor, model: Tensor) -> float:
    r"""How far clients end from where Theorem 1's model puts them, relative to how far they moved; the mean over clients.

    The model (Eq. 14) says $\Delta_i = -\sum_l a_{i,l}\phi_{1,l}$. Only inner products are needed:
    $|\Delta_i + \sum_l a_{i,l}\phi_{1,l}|^2 = |\Delta_i|^2 + 2\sum_l a_{i,l}\,\Delta_i\cdot\phi_{1,l} + a_i^\top G a_i$.

    Args:
        norm2: squared lengths of the displacements, (n,).
        along: their inner products with the rows of φ1, (n, m).
        gram: phi1 @ phi1.T, (m, m).
        model: the multiple a of each row that the model expects, (n, m).
    """
    gap2 = norm2 + 2 * (model * along).sum(1) + (model @ gram * model).sum(1)
    return float((gap2.clamp_min(0.0) / norm2.clamp_min(1e-30)).sqrt().mean())


def gains(losses: dict[int, float], first: float) -> bool:
    """Is the lowest of these losses below the first one by more than the share `LITTLE`?"""
    return first - min(losses.values()) > LITTLE * abs(first)


def stable(losses: dict[int, float], first: float) -> dict[int, float]:
    """The rates below the lowest one that does harm although a lower one gains. Training is unstable from there on, and a higher
    rate that looks good does so by chance."""
    margin, gained = LITTLE * abs(first), False
    for power in sorted(losses):
        if gained and losses[power] - first > margin:
            return {k: loss for k, loss in losses.items() if k < power}
        gained |= first - losses[power] > margin
    return losses


def short(losses: dict[int, float], first: float, best: int) -> int | None:
    """The highest rate below the best that misses more than the share `SPARE` of the best one's gain; None if none was tried."""
    enough = losses[best] + SPARE * (first - losses[best])
    return max((k for k in losses if k < best and losses[k] > enough), default=None)


def next_power(losses: dict[int, float], first: float, doubt: float = 0.0, reach: float = math.inf) -> int | None:
    """The next rate to try, or None if `best_power` is known. Rates are powers of two; `losses` has those that clients at loss
    `first` have tried, and `doubt` is how far the loss at the lowest of them may be off by chance. The search first tries every
    other power, outwards, until the best lies between two worse ones, then its two neighbours; and then lower ones, if they may
    gain nearly as much and are out of reach. If none gains anything, as on a plateau, it goes upwards until a rate does harm."""
    steady = stable(losses, first)
    low, high, best = min(losses), max(losses), min(sorted(steady), key=lambda k: losses[k])
    harmless = losses[high] - first <= LITTLE * abs(first)
    if best == low and losses[low] - first > max(LITTLE * abs(first), doubt):
        return low - 2
    if best == high or (harmless and not gains(losses, first)):
        return high + 2
    if best == low:
        return low - 2
    wanted = [best - 1, best + 1]
    if gains(losses, first) and math.isfinite(reach):
        worse = short(losses, first, best)
        wanted += [low - 1] if worse is None else [worse + 1] if worse + reach < best else []
    return next((k for k in wanted if k not in losses), None)


def best_power(losses: dict[int, float], first: float, reach: float = math.inf) -> float:
    """The exponent of the best rate: the minimum of the parabola through the lowest loss and its two neighbours, if they were
    tried; but no further than `reach` above the lowest rate that gains nearly as much. On a plateau, where losses only tell which
    rates do harm, it is the highest that does none."""
    best = min(sorted(stable(losses, first)), key=lambda k: losses[k])
    above = min((k for k in losses if k > best and losses[k] > first), default=None)
    if not gains(losses, first) and above is not None and losses[best] <= first:
        below = max(k for k in losses if k < above)
        return below + (above - below) * (first - losses[below]) / (losses[above] - losses[below])
    if not {best - 1, best + 1} <= losses.keys():
        return best
    less, more = losses[best - 1] - losses[best], losses[best + 1] - losses[best]
    lowest = best + (0.5 * (less - more) / (less + more) if less + more else 0.0)
    worse = short(losses, first, best)
    if not gains(losses, first) or worse is None:
        return lowest
    above = min(k for k in losses if k > worse)
    missed = losses[worse] - losses[best] - SPARE * (first - losses[best])
    return min(lowest, worse + (above - worse) * missed / (losses[worse] - losses[above]) + reach)


@dataclass(frozen=True)
class MeanField:
    """The paper's two mean-field terms, measured from the round's start: phi1 (L, d) and phi2 - w̄ (L+1, d)."""

    phi1: Tensor
    phi2: Tensor

    def rates(self, alpha: float) -> tuple[Tensor, Tensor]:
        """`affine_rates` of these terms."""
        phi1, phi2 = self.phi1.double(), self.phi2.double()
        ahead = phi2[1:].flip(0).cumsum(0).flip(0)
        return affine_rates((phi1 @ phi1.T).cpu(), (phi1 * ahead).sum(-1).cpu(), alpha)

    def gap(self, other: MeanField) -> tuple[float, float]:
        """ε1 and ε2 of Algorithm 1, as norms: the signed sums printed in the paper can cancel and then mean nothing."""
        return float((self.phi1 - other.phi1).norm()), float((self.phi2 - other.phi2).norm())
