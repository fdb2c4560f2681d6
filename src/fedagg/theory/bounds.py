r"""The paper's analysis as functions of its constants: Propositions 2 to 5 and Theorems 3 to 5.

Every function returns a `Bound`: a number, or the reason why the result says nothing for these constants. By default it
is the statement that can be proved (derived in docs/theory.md and checked on random federations in the tests).
``as_printed=True`` gives the paper's own formula for comparison, including its mistakes.

Everything here is about rounds in which client i starts at $\bar w$ and makes L steps

$$w_{i,k+1} = w_{i,k} - \eta_{i,k}\, d_{i,k}, \qquad \bar w^+ = \textstyle\sum_i \theta_i w_{i,L},$$

along $d_{i,k} = \phi_{1,k} = \frac1N\sum_j \nabla F_j(w_{j,k})$ (Eq. 9), along the client's own $\nabla F_i(w_{i,k})$
(Algorithm 2), or along a mix of the two. The whole analysis is based on one way to split the step of a round,

$$\bar w - \bar w^+ = s\,\nabla F(\bar w) + e, \qquad
s = \textstyle\sum_{i,k}\theta_i\eta_{i,k} \in [L\delta_l, L\delta_h], \qquad \|e\| \le E,$$

with E from `step_error`. Gradients are full gradients, as in the paper's proofs: these bounds do not include sampling
noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedagg.errors import SettingError
from fedagg.meanfield import weight_ratio


@dataclass(frozen=True)
class Bound:
    """What a result says: either a finite number, or the reason why it says nothing here. Never both, never neither."""

    value: float | None
    reason: str = ""

    @property
    def applies(self) -> bool:
        """Is there a number?"""
        return self.value is not None

    @staticmethod
    def of(value: float) -> Bound:
        """A bound with this number, unless the number overflowed."""
        return Bound(value) if math.isfinite(value) else Bound.none(f"comes out as {value}: constants too large")

    @staticmethod
    def none(reason: str) -> Bound:
        """A bound without a number, and the reason."""
        return Bound(None, reason)

    def __str__(self) -> str:
        return f"{self.value:.6g}" if self.value is not None else f"does not apply: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of the paper's assumptions. An unknown one is None, and the bounds that need it say so.

    Attributes:
        L: local steps per round. The paper's epochs are one full-gradient step each; with S mini-batch steps per epoch,
            a client moves S times as often, so give S times the epochs.
        N: participating clients.
        delta_l: the smallest rate used (it can be negative: Theorem 1 does not rule that out).
        delta_h: the largest rate used, in absolute value.
        beta: smoothness of every client's loss (Assumption 1).
        P: bound on the norm of every client's gradient, on the clients' paths (Assumption 2) and at w*.
        Q: bound on the norm of every client's parameters (Assumption 5).
        U: bound on |w_{i,l} - φ2_k| for k > l. The paper defines it with k = l, but its proof needs this.
        alpha: the weight of Eq. (10).
        mu: the Polyak-Łojasiewicz constant of the global loss (Lemma 1).
        psi: the strong convexity or quadratic growth constant of the global loss (Assumption 3).
        g_norm: the norm of the subgradient of Assumption 4; only the printed non-convex bound uses it.
        imbalance: Σ_i |θ_i - 1/N|, zero if all clients have the same number of samples.
        local: the share of a step that follows the client's own gradient: 0 is Eq. (9), 1 is Algorithm 2.
        probed: True if φ1 comes from a pass along the clients' own gradients from the same w̄, at rates of at most δ_h
            (Algorithm 1); False if it comes from the clients' current positions (Eq. 9).
    """

    L: int
    N: int
    delta_l: float
    delta_h: float
    beta: float | None = None
    P: float | None = None
    Q: float | None = None
    U: float | None = None
    alpha: float | None = None
    mu: float | None = None
    psi: float | None = None
    g_norm: float | None = None
    imbalance: float = 0.0
    local: float = 0.0
    probed: bool = False

    def __post_init__(self) -> None:
        for name in ("L", "N"):
            if getattr(self, name) < 1:
                raise SettingError(name, getattr(self, name), "must be at least 1")
        for name in ("beta", "P", "Q", "U", "mu", "psi", "g_norm", "imbalance"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0.0):
                raise SettingError(name, value, "must be a finite number, 0 or above; leave it out if it is not known")
        if not (math.isfinite(self.delta_h) and abs(self.delta_l) <= self.delta_h):
            raise SettingError("delta_h", self.delta_h, f"must be finite and at least |delta_l| = {abs(self.delta_l)}")
        if not 0.0 <= self.local <= 1.0:
            raise SettingError("local", self.local, "must be between 0 (Eq. 9) and 1 (Algorithm 2)")

    def lacks(self, *names: str) -> str:
        """Why a bound that needs these constants does not apply; empty if all of them are known."""
        missing = [name for name in names if getattr(self, name) is None]
        return f"{', '.join(missing)} not known" if missing else ""

    def get(self, *names: str) -> list[float]:
        """The values of constants that are known; check with `lacks` first."""
        return [float(getattr(self, name)) for name in names]

    @property
    def deviation(self) -> float | None:
        """U if it is known, otherwise 2Q, which bounds it: |w - φ2| ≤ |w| + |φ2| ≤ 2Q (Appendix C, first lemma)."""
        return self.U if self.U is not None else None if self.Q is None else 2.0 * self.Q


# --- Proposition 3 and Proposition 4: rates and drift ---------------------------------------------------------------


def path_norm(epochs: int) -> float:
    r"""$\kappa_m = 1/(2\sin\frac{\pi}{4m+2})$, the norm of the m×m matrix of partial sums: from rates to positions.

    A client's displacements are $\sum_{p<k}\eta_p\phi_{1,p}$, so stacked over k they are at most $\kappa_m P\|\eta\|$
    long. $\kappa_1 = 1$, and $\kappa_m \approx 2m/\pi$ for large m.
    """
    return 1.0 / (2.0 * math.sin(math.pi / (4 * epochs + 2)))


def learning_rate(c: Constants, epoch: int, *, as_printed: bool = False, next_rate: float | None = None) -> Bound:
    r"""Proposition 3 (bounded learning rate): $|\eta_{i,l}| \le \delta_{i,l}$ for the rates of Theorem 1.

    With m = L - l epochs to go and $c = (1-\alpha)/\alpha$, the plan is the ridge regression
    $\min \|\eta\|^2 + c\,\|A\eta - y\|^2$, where $\|y\| \le U\sqrt m$ and $\|A\| \le \kappa_m P$. So

    $$\|\eta\| \le \frac{c\,\sigma}{1 + c\,\sigma^2}\,U\sqrt m, \qquad \sigma = \min(\kappa_m P,\ 1/\sqrt c),$$

    which is at most $\frac12 U\sqrt{cm}$ whatever P is, and is attained for m = 1. Neither "η > 0" nor "δ < 1" follows:
    the second needs $U\sqrt{cm} < 2$ or a small P.

    As printed (Appendix C), only l = L-1 and l = L-2 have a formula. The second uses `next_rate`, η at L-1 (by default its
    own δ). The first replaces |φ1|² by P² in a denominator. The second is the square of a difference and can be zero.
    Rates can exceed both.
    """
    if reason := c.lacks("P", "alpha") or ("" if c.deviation is not None else "U not known, nor Q, which gives U ≤ 2Q"):
        return Bound.none(reason)
    if not 0 <= epoch < c.L:
        raise SettingError("epoch", epoch, f"choose one of the {c.L} local epochs, 0 to {c.L - 1}")
    P, alpha, U = *c.get("P", "alpha"), float(c.deviation or 0.0)
    ratio, left = weight_ratio(alpha), c.L - epoch
    if not as_printed:
        sigma = min(path_norm(left) * P, 1.0 / math.sqrt(ratio))
        return Bound.of(ratio * sigma / (1.0 + ratio * sigma * sigma) * U * math.sqrt(left))
    if left > 2:
        return Bound.none("the paper has a formula for the last two epochs only")
    delta = ratio * P * U / (1.0 + ratio * P * P)
    if left == 2:
        difference = alpha * P * U - (delta if next_rate is None else next_rate) * P * P
        delta = ratio * difference * difference
    if not 0.0 < delta < 1.0:
        return Bound.none(f"the formula gives {delta:.6g}; the proposition promises a number between 0 and 1")
    return Bound.of(delta)


def client_drift(c: Constants, epoch: int | None = None, *, as_printed: bool = False) -> Bound:
    r"""Proposition 4 (bounded drift): $\|w_{i,l} - \bar w\| \le l P \delta_h$, at most the printed $L P \delta_h$.

    This is true for Eq. (9), for Algorithm 2 and for any mix: every step is at most $P\delta_h$ long.
    """
    if reason := c.lacks("P"):
        return Bound.none(reason)
    steps = c.L if epoch is None or as_printed else epoch
    return Bound.of(steps * c.get("P")[0] * c.delta_h)


def mean_field_contraction(c: Constants, *, as_printed: bool = False) -> Bound:
    r"""Proposition 2: the share of the rates that a pass of Algorithm 1 leaves, $x/(1+x)$ with $x = cP^2\kappa_L^2$.

    So the rates go to zero: the only fixed point is the one where no client moves (`fedagg.theory.fixed_point`).

    As printed, $\sqrt{(\beta^2+1)\delta_h/N}$ "selected to be below 1": the factor $\delta_h/N$ enters the proof
    without a reason. With it, more clients or smaller rates would make Algorithm 1 faster. They do not.
    """
    if as_printed:
        if reason := c.lacks("beta"):
            return Bound.none(reason)
        beta = c.get("beta")[0]
        factor = math.sqrt((beta * beta + 1.0) * c.delta_h / c.N)
        return Bound.of(factor) if factor < 1.0 else Bound.none(f"sqrt((β²+1)δ_h/N) = {factor:.6g} is not below 1")
    if reason := c.lacks("P", "alpha"):
        return Bound.none(reason)
    P, alpha = c.get("P", "alpha")
    reach = P * path_norm(c.L)
    gain = weight_ratio(alpha) * reach * reach
    return Bound.of(gain / (1.0 + gain))


# --- The round's step: s ∇F + e -----------------------------------------------------------------------------------


def step_bias(c: Constants) -> Bound:
    r"""The part of E that remains without drift.

    $$B = LP\,\big[\lambda\,\tfrac{\delta_h-\delta_l}2 + (1-\lambda)\,\omega\,\delta_h\big].$$

    Along their own gradients (λ = 1, Algorithm 2), clients with different rates weigh the objectives differently.
    Along the aggregated gradient (λ = 0, Eq. 9), all clients count the same, but F weighs them by θ; ω is
    `Constants.imbalance`. The paper has neither term: its proofs hold only for equal sizes and Eq. (9).
    """
    if reason := c.lacks("P"):
        return Bound.none(reason)
    spread = 0.5 * c.local * (c.delta_h - c.delta_l) + (1.0 - c.local) * c.imbalance * c.delta_h
    return Bound.of(c.L * c.get("P")[0] * spread)


def step_error(c: Constants) -> Bound:
    r"""$E = \frac{L(L-1)}2\,\beta P\delta_h^2 + B$: how far the step of a round is from a step of gradient descent on F.

    The first part is the effect of the clients' drift on their gradients, β·kPδ_h at step k. B is `step_bias`.
    """
    if reason := c.lacks("beta", "P"):
        return Bound.none(reason)
    beta, P = c.get("beta", "P")
    bias = step_bias(c)
    if bias.value is None:
        return bias
    return Bound.of(0.5 * c.L * (c.L - 1) * beta * P * c.delta_h * c.delta_h + bias.value)


def relative_error(c: Constants) -> Bound:
    r"""For Eq. (9) and equal client sizes, the error in terms of the gradient: $\|e\| \le \rho\,\|\nabla F(\bar w)\|$.

    $$\rho = \delta_h\textstyle\sum_{k<L}\,[(1+\beta\delta_h)^k - 1].$$

    Here $\phi_{1,0} = \nabla F(\bar w)$: where F is stationary, no client moves, and the error goes to zero with the
    gradient. That is why Eq. (9) does not have the error floors of Theorems 3 to 5. This is not true of a φ1 that was
    probed along the clients' own gradients: there, clients move apart even where F is stationary.
    """
    if reason := c.lacks("beta"):
        return Bound.none(reason)
    if c.probed and c.L > 1:
        return Bound.none("needs φ1 from where the clients are (Eq. 9), but it comes from a probe")
    if c.local > 0.0 or c.imbalance > 1e-12:
        return Bound.none("needs Eq. (9) and equal client sizes: local = 0 and imbalance = 0")
    x = c.get("beta")[0] * c.delta_h
    if x * c.L >= 2.0:
        return Bound.none(f"needs β L δ_h < 2, but it is {x * c.L:.6g}")
    return Bound.of(c.delta_h * sum((1.0 + x) ** k - 1.0 for k in range(c.L)))


# --- Proposition 5, Theorem 4, Theorem 5: the loss ----------------------------------------------------------------


def one_round_progress(c: Constants, grad_norm: float, *, as_printed: bool = False) -> Bound:
    r"""Proposition 5: $F(\bar w^+) - F(\bar w)$ is at most the larger of $f(L\delta_l)$ and $f(L\delta_h)$, where

    $$f(s) = -s\,(1-\tfrac{\beta s}{2})\,\|\nabla F\|^2 + |1-\beta s|\,E\,\|\nabla F\| + \tfrac\beta2 E^2.$$

    As printed: $(\beta L^2\delta_h^2 - L\delta_l)\|\nabla F\|^2 + L^2P^2\beta\delta_l\delta_h +
    \beta^2L^4NP^2\delta_h^4$. It is wrong for unequal client sizes and for Algorithm 2. Its last term has β² and
    should have β³. Rates are replaced by δ_l or δ_h in terms whose sign is unknown.
    """
    if reason := c.lacks("beta", "P"):
        return Bound.none(reason)
    beta, P = c.get("beta", "P")
    if grad_norm > P * (1.0 + 1e-12):
        return Bound.none(f"|∇F| = {grad_norm:.6g} is above P = {P:.6g}, which bounds every client's gradient")
    g2 = grad_norm * grad_norm
    if as_printed:
        slope, rest = _printed_descent(c, beta, P)
        return Bound.of(-slope * g2 + rest)
    error, relative = step_error(c).value, relative_error(c).value
    if error is None:
        return step_error(c)
    if relative is not None:
        error = min(error, relative * grad_norm)

    def f(s: float) -> float:
        return -s * (1.0 - 0.5 * beta * s) * g2 + abs(1.0 - beta * s) * error * grad_norm + 0.5 * beta * error * error

    return Bound.of(max(f(c.L * c.delta_l), f(c.L * c.delta_h)))


def convergence_rate(c: Constants, T: int, gap: float, *, as_printed: bool = False) -> Bound:
    r"""Theorem 4: $F(\bar w^T) - F^* \le q^T (F(\bar w^0) - F^*) + b\sum_{k=0}^{T-1} q^k$ with $q = 1 - 2\mu a$.

    This holds for each (a, b) of `descents`; the smallest bound is returned. As printed,
    $q = 1 + 2\mu(\beta L^2\delta_h^2 - L\delta_l)$ and the sum starts at k = 1, so that the error of the last round is
    missing.

    Args:
        T: rounds.
        gap: F(w̄⁰) - F*.
    """
    if reason := c.lacks("beta", "P", "mu") or _inconsistent(c, "mu"):
        return Bound.none(reason)
    beta, P, mu = c.get("beta", "P", "mu")
    if mu == 0.0:
        return Bound.none("needs μ > 0: the loss must satisfy the Polyak-Łojasiewicz condition")
    if as_printed:
        slope, rest = _printed_descent(c, beta, P)
        if slope <= 0.0:
            return Bound.none(_printed_condition(c, beta))
        q = 1.0 - 2.0 * mu * slope
        return Bound.of(q**T * gap + rest * (_geometric(q, T) - 1.0 if T > 0 else 0.0))
    pairs = descents(c)
    if not pairs:
        return step_error(c) if not step_error(c).applies else Bound.none(_descent_condition(c, beta))
    factors = [(max(0.0, 1.0 - 2.0 * mu * slope), rest) for slope, rest in pairs]
    return Bound.of(min(q**T * gap + rest * _geometric(q, T) for q, rest in factors))


def convergence_error(c: Constants, T: int, gap: float, *, as_printed: bool = False) -> Bound:
    r"""Theorem 5: $\frac1T\sum_{t<T}\|\nabla F(\bar w^t)\|^2 \le \frac{F(\bar w^0) - F^*}{aT} + \frac ba$.

    This holds for each (a, b) of `descents`; the smallest bound is returned. It does not use convexity. The printed proof
    ends with "F(w*) > F(w^T)"; it needs the opposite, which is true.
    """
    if reason := c.lacks("beta", "P"):
        return Bound.none(reason)
    if T < 1:
        return Bound.none("is an average over rounds: needs T ≥ 1")
    beta, P = c.get("beta", "P")
    if as_printed:
        slope, rest = _printed_descent(c, beta, P)
        if slope <= 0.0:
            return Bound.none(_printed_condition(c, beta))
        return Bound.of(gap / (T * slope) + rest / slope)
    pairs = descents(c)
    if not pairs:
        return step_error(c) if not step_error(c).applies else Bound.none(_descent_condition(c, beta))
    return Bound.of(min(gap / (T * slope) + rest / slope for slope, rest in pairs))


def descents(c: Constants) -> list[tuple[float, float]]:
    r"""All (a, b), a > 0, for which Proposition 5 gives $F(\bar w^+) - F(\bar w) \le -a\,\|\nabla F(\bar w)\|^2 + b$.

    With $a_0 = \min_s s(1-\beta s/2)$ and $r = \max_s|1-\beta s|$ over $s \in \{L\delta_l, L\delta_h\}$, the cross term
    $rE\|\nabla F\|$ is bounded by $rEP$, or by $\frac{a_0}2\|\nabla F\|^2 + \frac{r^2E^2}{2a_0}$, or, where
    `relative_error` applies, by $r\rho\|\nabla F\|^2$. Which one is best depends on the constants, so all are returned. The
    list is empty unless $\delta_l > 0$ and $\beta L\delta_h < 2$.
    """
    if c.lacks("beta", "P"):
        return []
    beta, P = c.get("beta", "P")
    ends = (c.L * c.delta_l, c.L * c.delta_h)
    slope = min(s * (1.0 - 0.5 * beta * s) for s in ends)
    error = step_error(c).value
    if slope <= 0.0 or error is None:
        return []
    r = max(abs(1.0 - beta * s) for s in ends)
    square = 0.5 * beta * error * error
    pairs = [(slope, r * error * P + square), (0.5 * slope, 0.5 * r * r * error * error / slope + square)]
    relative = relative_error(c).value
    if relative is not None:
        pairs.append((slope - r * relative - 0.5 * beta * relative * relative, 0.0))
    return [pair for pair in pairs if pair[0] > 0.0]


# --- FedAgg's default, and FedCM: a field of earlier rounds -----------------------------------------------------------


def field_convergence(c: Constants, T: int, gap: float, *, most: float | None = None, spread: float | None = None) -> Bound:
    r"""FedAgg's default: $\frac1T\sum_{t<T}\|\nabla F(\bar w^t)\|^2$, for clients that mix in the mean step of the last round.

    Clients step along $\lambda_t\nabla F_i + (1-\lambda_t)\phi_t$ with $\phi_0$ unused ($\lambda_0 = 1$) and
    $\phi_{t+1} = \frac1N\sum_i$ of their mean steps. With $\lambda \le \lambda_t$, $\gamma_l = L\delta_l$,
    $\gamma_h = L\delta_h$ and
    $\frac{\gamma_h}{\gamma_l}\,2\,\big(\tfrac{1-\lambda}\lambda\beta\gamma_h\big)^2 \le 1 - \beta\gamma_h$ it is at most

    $$\frac{2\,(F(\bar w^0) - F^*)}{\gamma_l T} + \frac{\gamma_h}{\gamma_l}\Big(\frac{b^2}{\lambda T}
    + \frac{2\hat\lambda}\lambda\,\big(b + \tfrac{1-\lambda}\lambda f\big)^2\Big), \quad
    b = P\big[\tfrac{L-1}2\beta\delta_h(1+\varsigma) + \tfrac\varsigma2\big], \quad f = P\,(\omega + \tfrac\varsigma2).$$

    Args:
        c: the constants; `local` is λ, the smallest own share of any round.
        T: rounds.
        gap: F(w̄⁰) - F*.
        most: λ̂, the largest own share after the first round; by default λ.
        spread: ς, the largest $\delta_h/\delta_l - 1$ within a round; by default that of all rounds.
    """
    if reason := c.lacks("beta", "P"):
        return Bound.none(reason)
    if T < 1:
        return Bound.none("is an average over rounds: needs T ≥ 1")
    if c.delta_l <= 0.0 or c.local <= 0.0:
        return Bound.none(f"needs δ_l > 0 and λ > 0, but they are {c.delta_l:.6g} and {c.local:.6g}")
    beta, P = c.get("beta", "P")
    own, most = c.local, c.local if most is None else most
    spread = c.delta_h / c.delta_l - 1.0 if spread is None else spread
    low, high, stale = c.L * c.delta_l, c.L * c.delta_h, (1.0 - c.local) / c.local
    if high / low * 2.0 * (stale * beta * high) ** 2 > 1.0 - beta * high:
        words = "needs 2 (δ_h/δ_l) ((1-λ)/λ · βLδ_h)² ≤ 1 - βLδ_h"
        return Bound.none(f"{words}, and λ = {own:.3g}, βLδ_h = {beta * high:.3g}, δ_h/δ_l = {high / low:.3g}")
    drift = P * (0.5 * (c.L - 1) * beta * c.delta_h * (1.0 + spread) + 0.5 * spread)
    bias = drift + stale * P * (c.imbalance + 0.5 * spread)
    floor = drift * drift / (own * T) + 2.0 * most / own * bias * bias
    return Bound.of(2.0 * gap / (low * T) + high / low * floor)


# --- Theorem 3: the distance to the optimum -----------------------------------------------------------------------


def optimality_gap_convex(c: Constants, T: int, distance2: float, *, as_printed: bool = False) -> Bound:
    r"""Theorem 3, first part: $\|\bar w^T - w^*\|^2$ when clients are convex and F grows quadratically (Assumption 3).

    $D_t = \|\bar w^t - w^*\|$ obeys, with B from `step_bias`,

    $$D_{t+1}^2 \le (1 - L\delta_l\psi)D_t^2 + 2B D_t + P^2L^2\delta_h^2 + \beta P^2\delta_h^3\tfrac{(L-1)L(2L-1)}{6}.$$

    As printed, the factor is $1 - \delta_hL\psi/N$. It has δ_h, but the inner product that it multiplies is bounded from
    below, so only δ_l can be used. Its N belongs to a sum that was dropped.

    Args:
        T: rounds.
        distance2: |w̄⁰ - w*|².
    """
    if reason := c.lacks("beta", "P", "psi") or _inconsistent(c, "psi"):
        return Bound.none(reason)
    beta, P, psi = c.get("beta", "P", "psi")
    if psi == 0.0:
        return Bound.none("needs ψ > 0: the global loss must grow quadratically around w*")
    move = P * c.L * c.delta_h
    if as_printed:
        q = 1.0 - c.delta_h * c.L * psi / c.N
        if not 0.0 < q < 1.0:
            return Bound.none(f"the factor 1 - δ_h L ψ / N = {q:.6g} is not between 0 and 1")
        return Bound.of(q**T * distance2 + move * move * (beta * c.L * c.delta_h + 1.0) * _geometric(q, T))
    if c.delta_l <= 0.0:
        return Bound.none(f"needs all rates positive, and δ_l = {c.delta_l:.6g}")
    bias = step_bias(c).value
    if bias is None:
        return step_bias(c)
    q = max(0.0, 1.0 - c.L * c.delta_l * psi)
    rest = move * move + beta * c.delta_h * P * P * c.delta_h * c.delta_h * (c.L - 1) * c.L * (2 * c.L - 1) / 6.0
    for _ in range(T):
        distance2 = q * distance2 + 2.0 * bias * math.sqrt(distance2) + rest
    return Bound.of(distance2)


def optimality_gap_contraction(c: Constants, T: int, distance2: float) -> Bound:
    r"""A sharper Theorem 3, for a strongly convex F and clients of any kind: $D_{t+1} \le q D_t + E$.

    The function returns the square of the bound after T rounds. $q = \max(|1-s\psi|, |1-s\beta|)$ over $s \in \{L\delta_l,
    L\delta_h\}$ is the factor by which a gradient step shrinks the distance. Where `relative_error` applies, $D_{t+1} \le
    (q + \beta\rho) D_t$ also holds, without a floor. This needs δ_l > 0 and β L δ_h < 2.
    """
    if reason := c.lacks("beta", "P", "psi") or _inconsistent(c, "psi"):
        return Bound.none(reason)
    beta, psi = c.get("beta", "psi")
    q = max(abs(1.0 - s * x) for s in (c.L * c.delta_l, c.L * c.delta_h) for x in (psi, beta))
    error, relative = step_error(c).value, relative_error(c).value
    if error is None:
        return step_error(c)
    if q >= 1.0:
        return Bound.none("needs ψ > 0 and " + _descent_condition(c, beta).removeprefix("needs "))
    pairs = [(q, error)]
    if relative is not None and q + beta * relative < 1.0:
        pairs.append((q + beta * relative, 0.0))
    distance = math.sqrt(distance2)
    reached = min(factor**T * distance + rest * _geometric(factor, T) for factor, rest in pairs)
    return Bound.of(reached * reached)


def optimality_gap_nonconvex(c: Constants, T: int, distance2: float, *, as_printed: bool = False) -> Bound:
    r"""Theorem 3, second part, without convexity: $\|\bar w^T - w^*\|^2 \le (\|\bar w^0 - w^*\| + TLP\delta_h)^2$.

    This is the square of the last lemma of the paper's Appendix E. The printed bound uses Assumption 4: one g with
    $F(w) - F(w') \ge g^\top(w - w')$ for all pairs. Exchanging w and w' turns it into an equality, so F is affine. Its
    proof also assumes convex clients, and uses |w̄⁰ - w*|² in place of |w̄⁰ - w*|.
    """
    if reason := c.lacks("P"):
        return Bound.none(reason)
    P = c.get("P")[0]
    if not as_printed:
        reached = math.sqrt(distance2) + T * c.L * P * c.delta_h
        return Bound.of(reached * reached)
    if reason := c.lacks("beta", "g_norm"):
        return Bound.none(reason)
    beta, g = c.get("beta", "g_norm")
    move = c.L * c.delta_h
    growth = T * (T - 1) * P * move * move * g / c.N + T * P * P * move * move * (beta * move + 1.0)
    return Bound.of(growth + (1.0 + 2.0 * move * T * g / c.N) * distance2)


def _geometric(q: float, T: int) -> float:
    """1 + q + ... + q^(T-1)."""
    return float(T) if q == 1.0 else (1.0 - q**T) / (1.0 - q)


def _printed_descent(c: Constants, beta: float, P: float) -> tuple[float, float]:
    """Eq. (difference) as -slope |∇F|² + rest."""
    low, high = c.L * c.delta_l, c.L * c.delta_h
    return low - beta * high * high, P * P * (beta * low * high + beta * beta * c.N * high * high * high * high)


def _printed_condition(c: Constants, beta: float) -> str:
    return f"needs δ_l > β L δ_h², but δ_l = {c.delta_l:.6g}, β L δ_h² = {beta * c.L * c.delta_h * c.delta_h:.6g}"


def _descent_condition(c: Constants, beta: float) -> str:
    return f"needs δ_l > 0 and β L δ_h < 2, but δ_l = {c.delta_l:.6g}, β L δ_h = {beta * c.L * c.delta_h:.6g}"


def _inconsistent(c: Constants, name: str) -> str:
    """Why these constants contradict each other: no β-smooth loss has μ or ψ above β, but an estimate can be."""
    value, beta = c.get(name, "beta")
    return f"{name} = {value:.6g} is above beta = {beta:.6g}: no loss has that" if value > beta * (1 + 1e-9) else ""
