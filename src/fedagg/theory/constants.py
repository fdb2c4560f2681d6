r"""The constants of the paper's assumptions, from losses, gradients and trajectories.

Most of them are defined over the whole parameter space, but can only be measured at some points. Each docstring says in
which direction the estimate errs: a β measured on a path is at most the true one, a μ measured on a path is at least the
true one. More is possible for multinomial logistic regression (the paper's MNIST-Linear): w* by a full solve, with a
certificate, and bounds on ψ that hold. See `solve_softmax`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedagg.errors import DataError, MissingError, SettingError
from fedagg.theory.bounds import Bound

try:
    import scipy.optimize
    import scipy.sparse.linalg
except ModuleNotFoundError as error:
    raise MissingError(__name__, str(error.name), "analysis") from None

_Array = npt.NDArray[np.float64]
_ROUNDING = 8.0 * float(np.finfo(np.float64).eps)  # the relative error that a sum of well-scaled terms may have


def smoothness(
    loss_fn: Callable[[Tensor], Tensor], w: Tensor, iterations: int = 20, generator: torch.Generator | None = None
) -> float:
    r"""β at w: the largest |eigenvalue| of the Hessian, by power iteration on Hessian-vector products (Assumption 1).

    The estimate $\|Hv\|$, $\|v\| = 1$, never exceeds the true value at w and rises with every iteration. It is the
    curvature at one point; the β of the assumption is the largest over all points.

    Args:
        loss_fn: the loss as a function of the flat parameters, twice differentiable.
        w: the point, (d,).
        generator: draws the first direction, on the CPU.
    """
    at = w.detach().clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss_fn(at), at, create_graph=True)
    if not gradient.requires_grad:  # a linear loss
        return 0.0
    v = torch.randn(at.shape, generator=generator, dtype=torch.float64).to(at)
    largest = 0.0
    for _ in range(iterations):
        v = v / v.norm()
        (v,) = torch.autograd.grad(gradient, at, v, retain_graph=True)
        largest = float(v.norm())
        if largest == 0.0 or not math.isfinite(largest):
            break
    return largest


def secant_smoothness(ws: Tensor, gs: Tensor) -> float:
    r"""β along a path: $\max_k \|g_{k+1} - g_k\| / \|w_{k+1} - w_k\|$ for gradients gs (K, d) at points ws (K, d).

    It costs nothing if a run's gradients are known, and never exceeds the true β. Points that did not move are skipped.
    """
    if ws.shape != gs.shape or len(ws) < 2:
        raise SettingError("gs", tuple(gs.shape), f"give a gradient for each of ws {tuple(ws.shape)}, two at least")
    moved, turned = ws.double().diff(dim=0).norm(dim=-1), gs.double().diff(dim=0).norm(dim=-1)
    if not bool((moved > 0.0).any()):
        raise DataError("secant smoothness needs two different points, and all of them are the same")
    return float((turned[moved > 0.0] / moved[moved > 0.0]).max())


def gradient_domination(grad_norms: Sequence[float], losses: Sequence[float], best: float) -> Bound:
    r"""μ along a run: the smallest $\frac12\|\nabla F(w_t)\|^2 / (F(w_t) - F^*)$ (Lemma 1, Polyak-Łojasiewicz).

    It is at least the true μ, which is the smallest over all w, and larger still if `best` is only the lowest loss seen.
    (The paper states the inequality "for any μ > 0"; it holds for one μ and all smaller ones.)
    """
    ratios = [0.5 * g * g / (f - best) for g, f in zip(grad_norms, losses, strict=True) if f > best]
    return Bound.of(min(ratios)) if ratios else Bound.none("no loss is above the best one: nothing to divide by")


def quadratic_growth(losses: Sequence[float], best: float, distances2: Sequence[float]) -> Bound:
    r"""ψ along a run: the smallest $2(F(w_t) - F^*) / \|w_t - w^*\|^2$, which is Assumption 3 as printed."""
    ratios = [2.0 * (f - best) / d for f, d in zip(losses, distances2, strict=True) if d > 0.0]
    if not ratios:
        return Bound.none("no point is away from w*: nothing to divide by")
    return Bound.of(min(ratios)) if min(ratios) >= 0.0 else Bound.none("a loss is below the best one")


@dataclass(frozen=True)
class SoftmaxSolution:
    r"""The minimiser of (regularised) softmax regression, and what is known about it.

    Without regularisation, the loss does not change if the weights of all classes shift by the same amount, nor along
    directions in which no feature points. So w* is unique only in the rest, the identifiable subspace. Gradient descent
    never leaves $w^0$ + that subspace, so the w* of a run is `nearest(w0)`.

    Attributes:
        weights: the minimiser with the smallest norm, (classes, features [+ 1 for the bias, last]).
        loss: F there.
        gradient_norm: |∇F| there, as small as float64 allows.
        curvature: the smallest eigenvalue of the Hessian there, on the identifiable subspace, minus what rounding
            can add to it; None if the Hessian is too large to compute.
        self_concordance: R with $|g'''| \le R\,g''$ for $g(t) = F(w + tu)$, |u| = 1: √2 times the norm of the longest
            sample.
        radius: the largest possible distance of the true minimiser from `weights`; None if no minimiser is certified.
        reason: why `radius` is None; empty otherwise.
        projector: onto the row space of the features, square, (features [+ 1], features [+ 1]).
        l2: the regularisation, which is a strong convexity constant everywhere.
    """

    weights: Tensor
    loss: float
    gradient_norm: float
    curvature: float | None
    self_concordance: float
    radius: float | None
    reason: str
    projector: Tensor
    l2: float

    def nearest(self, w: Tensor) -> Tensor:
        """The minimiser that gradient descent from w approaches: the part of w that is not identifiable does not change."""
        if self.l2 > 0.0:
            return self.weights
        w = w.double()
        return self.weights + w - (w - w.mean(0)) @ self.projector

    def strong_convexity(self, distance: float) -> Bound:
        r"""ψ on the ball with this radius around w*: $\max(\text{l2}, \lambda_{\min} e^{-R\,\text{distance}})$.

        Over a distance t, curvature falls by a factor of $e^{-Rt}$ at most. No better bound is possible: without
        regularisation, softmax regression is strongly convex on no unbounded set. All of this is on the identifiable
        subspace.
        """
        return self._scaled(distance, lambda x: math.exp(-x))

    def quadratic_growth(self, distance: float) -> Bound:
        r"""ψ of Assumption 3 as printed, on the same ball: $\lambda_{\min}\,2(e^{-x} - 1 + x)/x^2$ with x = R·distance.

        Quadratic growth is weaker than strong convexity and fades only like 1/x. It is enough for `optimality_gap_convex`.
        """
        return self._scaled(distance, lambda x: 2.0 * (math.expm1(-x) + x) / (x * x) if x > 1e-4 else 1.0 - x / 3.0)

    def _scaled(self, distance: float, share: Callable[[float], float]) -> Bound:
        """This share of the curvature at w*, but at least l2, which holds everywhere."""
        if self.radius is None:
            return Bound.none(self.reason)
        if self.curvature is None:
            return Bound.of(self.l2)
        # `curvature` is measured at most `radius` away from w*; on the way it falls by a factor of e^(-R·radius) at most.
        at_best = self.curvature * math.exp(-self.self_concordance * self.radius)
        return Bound.of(max(at_best * share(self.self_concordance * distance), self.l2))


def solve_softmax(
    features: Tensor,
    labels: Tensor,
    classes: int,
    l2: float = 0.0,
    bias: bool = True,
    iterations: int = 2000,
    dense_limit: int = 8000,
) -> SoftmaxSolution:
    r"""w* of multinomial logistic regression: mean cross-entropy + l2/2 |w|², solved in float64 and certified.

    The problem is written in an orthonormal basis of the identifiable subspace (class contrasts × row space of the
    features), where the Hessian is regular. L-BFGS finds the region and Newton-CG refines the result. Let λ be the
    smallest eigenvalue of the Hessian there and R the self-concordance constant. Then $R\|\nabla F\| < \lambda$ proves
    that a minimiser exists, at most $-\ln(1 - R\|\nabla F\|/\lambda)/R$ away. If the classes can be separated, there is
    none, and the solution says so.

    Args:
        features: (n, ...), flattened per sample.
        labels: (n,), from 0 to classes - 1.
        l2: weight decay on everything, bias included, as torch's optimisers do it.
        iterations: the most iterations of L-BFGS.
        dense_limit: up to this dimension, λ is computed from the full Hessian; above it, only l2 bounds λ.
    """
    problem = _Softmax(features, labels, classes, l2, bias)
    found = scipy.optimize.minimize(
        problem.value_and_gradient,
        np.zeros(problem.dimension),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": iterations, "maxfun": 2 * iterations, "maxcor": 30, "ftol": 0.0, "gtol": 1e-7},
    )
    v = _polish(problem, found.x)
    loss, gradient = problem.value_and_gradient(v)
    slack = float(np.linalg.norm(gradient))
    reach = problem.self_concordance
    curvature = problem.curvature(v) if problem.dimension <= dense_limit else None
    least = l2 if curvature is None else curvature
    off = reach * (slack + _ROUNDING * reach)
    radius, reason = None, ""
    if l2 == 0.0 and problem.separates(v):
        reason = "the classes can be separated: the loss falls towards 0 for ever longer weights and there is no w*"
    elif curvature is None and l2 == 0.0:
        reason = "the Hessian is too large to bound its smallest eigenvalue: set l2 above 0, or raise dense_limit"
    elif off >= least:
        reason = f"not certified: R |∇F| = {off:.3g} is not below the smallest curvature {least:.3g}"
    else:
        radius = -math.log1p(-off / least) / reach
    return SoftmaxSolution(
        weights=problem.weights(v),
        loss=loss,
        gradient_norm=slack,
        curvature=curvature,
        self_concordance=reach,
        radius=radius,
        reason=reason,
        projector=problem.basis @ problem.basis.T,
        l2=l2,
    )


def _polish(problem: _Softmax, v: _Array, steps: int = 20) -> _Array:
    """Newton-CG without a line search, as long as the gradient shrinks: near w* the loss cannot tell points apart."""
    _, gradient = problem.value_and_gradient(v)
    shape = (problem.dimension, problem.dimension)
    for _ in range(steps):
        at = v
        hessian = scipy.sparse.linalg.LinearOperator(shape, matvec=lambda u, at=at: problem.hessian_vector(at, u))
        step, _ = scipy.sparse.linalg.cg(hessian, -gradient, rtol=1e-3, maxiter=1000)
        _, ahead = problem.value_and_gradient(v + step)
        if not np.linalg.norm(ahead) < np.linalg.norm(gradient):
            break
        v, gradient = v + step, ahead
    return v


class _Softmax:
    """Softmax regression in coordinates v of the identifiable subspace: weights = contrasts.T @ v @ basis.T."""

    def __init__(self, features: Tensor, labels: Tensor, classes: int, l2: float, bias: bool) -> None:
        if classes < 2:
            raise SettingError("classes", classes, "needs at least 2")
        if not (l2 >= 0.0 and math.isfinite(l2)):
            raise SettingError("l2", l2, "must be a finite number, 0 or above")
        x = features.detach().flatten(1).double()
        if bias:
            x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        if len(x) == 0 or len(x) != len(labels):
            raise DataError(f"{len(x)} samples and {len(labels)} labels: give one label per sample, and at least one")
        if int(labels.min()) < 0 or int(labels.max()) >= classes:
            raise DataError(f"labels from {int(labels.min())} to {int(labels.max())}: {classes} classes are 0 to {classes - 1}")
        triangle = torch.linalg.qr(x, mode="r").R
        _, sizes, rows = torch.linalg.svd(triangle, full_matrices=False)
        kept = sizes > sizes[0] * max(x.shape) * torch.finfo(torch.float64).eps
        if not bool(kept.any()):
            raise DataError("all features are zero: there is nothing to fit")
        self.basis = rows[kept].T
        self.contrasts = _contrasts(classes).to(x.device)
        self.z = x @ self.basis
        self.labels = labels.to(x.device).long()
        self.l2 = l2
        self.shape = (classes - 1, self.z.shape[1])
        self.dimension = self.shape[0] * self.shape[1]
        self.self_concordance = math.sqrt(2.0) * float(self.z.norm(dim=1).max())

    def _from(self, v: _Array) -> Tensor:
        return torch.from_numpy(np.asarray(v)).to(self.z).reshape(self.shape)

    def weights(self, v: _Array) -> Tensor:
        found: Tensor = self.contrasts.T @ self._from(v) @ self.basis.T
        return found

    def _logits(self, v: _Array) -> Tensor:
        logits: Tensor = self.z @ self._from(v).T @ self.contrasts
        return logits

    def value_and_gradient(self, v: _Array) -> tuple[float, _Array]:
        logits = self._logits(v)
        value = torch.nn.functional.cross_entropy(logits, self.labels) + 0.5 * self.l2 * self._from(v).square().sum()
        residual = logits.softmax(1)
        residual[torch.arange(len(residual)), self.labels] -= 1.0
        gradient = self.contrasts @ (residual.T @ self.z) / len(self.z) + self.l2 * self._from(v)
        return float(value), gradient.flatten().cpu().numpy()

    def hessian_vector(self, v: _Array, direction: _Array) -> _Array:
        p, moved = self._logits(v).softmax(1), self._logits(direction)
        turned = p * (moved - (p * moved).sum(1, keepdim=True))
        product = self.contrasts @ (turned.T @ self.z) / len(self.z) + self.l2 * self._from(direction)
        return np.asarray(product.flatten().cpu().numpy())

    def hessian(self, v: _Array) -> Tensor:
        """The full Hessian of the loss without l2, computed in blocks of class contrasts."""
        p = self._logits(v).softmax(1)
        mean = p @ self.contrasts.T
        rows, width = self.shape
        full: Tensor = self.z.new_zeros(self.dimension, self.dimension)
        for a in range(rows):
            for b in range(a + 1):
                weight = p @ (self.contrasts[a] * self.contrasts[b]) - mean[:, a] * mean[:, b]
                block = self.z.T @ (weight[:, None] * self.z) / len(self.z)
                full[a * width : (a + 1) * width, b * width : (b + 1) * width] = block
                full[b * width : (b + 1) * width, a * width : (a + 1) * width] = block.T
        return full

    def curvature(self, v: _Array) -> float:
        """The smallest eigenvalue of the full Hessian, minus its rounding error, which is relative to the largest one."""
        eigenvalues = torch.linalg.eigvalsh(self.hessian(v))
        return float(eigenvalues.min() - _ROUNDING * math.sqrt(self.dimension) * eigenvalues.max()) + self.l2

    def separates(self, v: _Array) -> bool:
        """Whether every sample's own class has the strictly largest logit: then the loss has no minimum."""
        logits = self._logits(v)
        own = logits.gather(1, self.labels[:, None])
        others = logits.scatter(1, self.labels[:, None], -math.inf).amax(1, keepdim=True)
        return bool((own > others).all())


def _contrasts(classes: int) -> Tensor:
    """An orthonormal basis, (classes - 1, classes), of the space orthogonal to a shift of all classes (Helmert's)."""
    rows = torch.zeros(classes - 1, classes, dtype=torch.float64)
    for k in range(1, classes):
        rows[k - 1, :k], rows[k - 1, k] = 1.0, -float(k)
    unit: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return unit
