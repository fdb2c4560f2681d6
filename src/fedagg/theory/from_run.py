"""Compares a run with its bounds: the run is repeated from its configuration, watched, and compared with the analysis.

The constants are those of the run: its rates, its gradients, and the models it passes through. The analysis is about full
gradients, all clients in every round, and a plain average. If a run differs from this, the results that need it say so
instead of giving a number. Drift and the rates of Theorem 1 are bounded in any case.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedagg import checks, federation, from_config, runs
from fedagg.config import Config
from fedagg.data import Dataset
from fedagg.errors import FedaggWarning, SettingError
from fedagg.evaluate import held_out
from fedagg.flat import Layout
from fedagg.models import has_dropout
from fedagg.theory import bounds, constants
from fedagg.theory.bounds import Bound, Constants
from fedagg.theory.objective import Objective
from fedagg.theory.watch import Round, Watch

LIMIT = 2e11  # samples × parameters × rounds: minutes of float64 on a few cores
FLOAT32 = float(torch.finfo(torch.float32).eps)
DENSE = 4000  # the most unknowns for which the smallest curvature of the linear model is computed
ROUNDING = 1e-4  # relative: a run has float32 rounding errors, and the bounds are about exact arithmetic


@dataclass(frozen=True)
class Statement:
    """One result of the paper, compared with one run.

    Attributes:
        name: a short name for files.
        result: its name in the paper.
        what: the quantity that is bounded.
        measured: its value, round by round.
        bounds: its bound as proved, round by round.
        printed: its bound as the paper prints it; empty if the paper has no formula.
        rounding: the rounding error that float32 can add to the measured values.
    """

    name: str
    result: str
    what: str
    measured: list[float]
    bounds: list[Bound]
    printed: list[Bound] = field(default_factory=list)
    rounding: float = 0.0

    @property
    def applies(self) -> bool:
        return any(bound.applies for bound in self.bounds)

    @property
    def reason(self) -> str:
        """Why there is no number in some round; empty if every round has one."""
        return next((bound.reason for bound in self.bounds if not bound.applies), "")

    def broken(self, printed: bool = False) -> list[int]:
        """The rounds (from 1) in which the measured value is above its bound."""
        claims = self.printed if printed else self.bounds
        pairs = zip(self.measured, claims, strict=False)
        return [t for t, (value, bound) in enumerate(pairs, start=1) if not self.covers(value, bound)]

    def covers(self, value: float, bound: Bound) -> bool:
        return bound.value is None or value <= bound.value + ROUNDING * abs(bound.value) + self.rounding


@dataclass(frozen=True)
class Analysis:
    """All results for one run. `sources` says where each constant comes from; `best` is F*."""

    run: str
    config: Config
    constants: Constants
    sources: dict[str, str]
    best: float
    statements: list[Statement]
    objective: Objective
    start: Tensor

    def __getitem__(self, name: str) -> Statement:
        return next(one for one in self.statements if one.name == name)

    @property
    def rounds(self) -> int:
        return len(self.statements[0].measured)


def analyse(
    folder: Path,
    rounds: int | None = None,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    parts: Sequence[Any] | None = None,
    data_dir: str | None = None,
) -> Analysis:
    """Repeat a run and compare it with its bounds.

    Args:
        folder: the run folder.
        rounds: look only at this many rounds from the start.
        data: the data that the run was given from Python; the same for model and parts.
        data_dir: where data sets are, if not in the folder that the run used.
    """
    run = runs.load(folder)
    count = min(len(run.history), rounds or len(run.history))
    if not count:
        raise SettingError("run", str(folder), "has no finished round")
    config = repeat_config(run.config, count, data_dir)
    data = (data or from_config.chosen_data(config)).of_task(config.task).held_back(config.validation, config.seed)
    if data.task != "classification":
        raise SettingError(
            "run", str(folder), f"its task is {data.task}, but the bounds are those of cross-entropy on class labels"
        )
    seen = data.normalized() if config.normalize else data
    parts = checks.indices(parts, data) if parts is not None else from_config.deal(config, data)
    if config.client_test:
        parts, _ = held_out(parts, config.client_test, config.seed)
    module = model if model is not None else from_config.build_model(config, seen)
    objective = Objective(module, seen.x_train, seen.y_train, parts, config.weight_decay)
    check_affordable(config, objective)

    watch = Watch(config.weight_decay)
    kept = config.changed(validation=0.0, client_test=0.0)  # the samples held back are already removed from the data
    again = federation.run(kept, data=data, model=module, parts=parts, callbacks=[watch], wrap=watch.wrap, progress=False)
    compare(run.history, again.history)
    last = Layout(again.model).pack(again.model).w.double()
    models = [one.work.start for one in watch.rounds] + [last]
    return Reading(config, objective, watch.rounds, models).analysis(str(folder))


def repeat_config(config: Config, rounds: int, data_dir: str | None) -> Config:
    """The configuration of the same run on this machine, without settings that do not change its course."""
    changes: dict[str, Any] = {"rounds": rounds, "eval_every": rounds, "average": False, "stop_at": None, "patience": 0}
    if not torch.cuda.is_available():
        changes["device"] = "cpu"
    if config.engine == "distributed":
        changes["engine"] = "auto"
    return config.changed(**changes, **({"data_dir": data_dir} if data_dir else {}))


def check_affordable(config: Config, objective: Objective) -> None:
    if config.augment != "none":
        raise SettingError("augment", config.augment, "changes the loss in every epoch; the bounds hold only for a run without it")
    if objective.layout.b:
        fix = "has batch normalisation: its loss is not a function of its weights; use --norm group or none"
        raise SettingError("model", config.model, fix)
    each = len(objective.dealt) * objective.layout.d
    if each * config.rounds > LIMIT:
        most = int(LIMIT / each)
        fix = f"take only the first {most}, with --rounds {most}" if most else "use a smaller model or less data"
        size = f"{len(objective.dealt)} samples and {objective.layout.d} parameters"
        raise SettingError("rounds", config.rounds, f"full gradients of {size} would take too long; {fix}")


def compare(recorded: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]]) -> None:
    """Warn if the repeated run differs. Other hardware, or another number of threads, adds numbers in another order, and
    small differences can grow."""
    for before, now in zip(recorded, again, strict=False):
        one, other = before.get("train_loss"), now.get("train_loss")
        if one is not None and other is not None and abs(one - other) > 1e-3 * abs(one):
            words = f"when repeated, the run has a training loss of {other:.6g} in round {now['round']} and not {one:.6g}"
            warnings.warn(f"{words}: what follows is about the repeated run", FedaggWarning, stacklevel=3)
            return


class Reading:
    """Turns the measurements of a run into constants and statements."""

    def __init__(self, config: Config, objective: Objective, rounds: list[Round], models: list[Tensor]) -> None:
        self.config, self.objective, self.rounds, self.models = config, objective, rounds, models
        measured = [objective.value_and_gradient(w) for w in models]
        self.losses = [value for value, _ in measured]
        self.norms = [float(gradient.norm()) for _, gradient in measured]
        self.find_minimum()
        self.obstacle = self.find_obstacle()
        self.constants, self.sources = self.find_constants()

    def find_minimum(self) -> None:
        """Find F* and w*: exactly for the linear model; otherwise F* is set to 0, since the proofs need only a lower bound."""
        self.best, self.about_best = 0.0, "no cross-entropy is lower, and the proofs need only a lower bound"
        self.distances: list[float] = []
        self.target: Tensor | None = None
        self.no_target = "w* is not known: only the linear model can be solved"
        self.solution = None
        if (unknowns := self.objective.unknowns) is None:
            return
        if not self.config.weight_decay and unknowns > DENSE:
            self.no_target = f"w* has {unknowns} unknowns, too many to prove that it exists; a run with --weight-decay has one"
            return
        self.solution = self.objective.solve(DENSE)
        if self.solution.radius is None:
            self.no_target = self.solution.reason + ("" if self.config.weight_decay else "; with --weight-decay there is one")
            return
        # By convexity, the loss found is above F* by no more than this; the proofs need a lower bound.
        self.best = self.solution.loss - self.solution.radius * self.solution.gradient_norm - 1e-14
        self.about_best = "by a full solve, certified"
        nearest = self.solution.nearest(self.objective.as_matrix(self.models[0]))
        self.target = self.objective.as_vector(nearest)
        self.distances = [float((w - self.target).square().sum()) for w in self.models]

    # --- Is the analysis about runs like this? ---

    def find_obstacle(self) -> str:
        """Why the paper's results about F do not apply; empty if they do."""
        reason = self.setup_obstacle(len(self.rounds))
        return reason or next((reason for one in self.rounds if (reason := self.step_obstacle(one))), "")

    def setup_obstacle(self, rounds: int) -> str:
        """Why this is not a run with full gradients, all clients, and a plain average in the first rounds; empty if it is."""
        c = self.config
        largest = max(len(part) for part in self.objective.samples)
        if c.batch_size < largest:
            have = f"batches have {c.batch_size} of {largest} samples"
            return f"needs full gradients, but {have}: set --batch-size {largest}"
        if c.per_round < c.clients:
            return f"needs all clients in every round, but {c.per_round} of {c.clients} take part: set --participation 1"
        if reason := optimiser_obstacle(c):
            return reason
        if has_dropout(self.objective.module):
            return "needs full gradients, but the model has dropout: set --dropout 0"
        if any(one.row["left_out"] or one.row["stragglers"] for one in self.rounds):
            return "needs every client to do all its work, but some did not"
        if not all(self.averages(t) for t in range(rounds)):
            return "needs a server that only averages, but this one does more"
        return ""

    def averages(self, t: int) -> bool:
        work = self.rounds[t].work
        off = float((self.models[t + 1] - self.models[t] - work.moved).norm())
        return off <= 1e-3 * float(work.moved.norm()) + 8 * FLOAT32 * float(self.models[t].norm())

    def step_obstacle(self, one: Round) -> str:
        """Why clients do not step along gradients of this round, their own or aggregated; empty if they do."""
        work = one.work.work
        if reason := update_obstacle(one):
            return reason
        if work.mix is None or not bool(work.mix.any()):
            return "" if work.own == 1.0 else "needs steps along gradients, but here gradients are scaled"
        if self.config.weight_decay:
            return "needs weight decay in every direction, but here it acts only on a client's own gradient: set --weight-decay 0"
        straight = torch.allclose(work.mix.double().cpu(), (1.0 - work.own) * torch.eye(len(work.mix)).double())
        if not (straight and one.follows(work.field)):
            return "needs steps along gradients of the round, but clients mix in those of earlier rounds"
        return "" if work.own == self.rounds[0].work.work.own else "needs a constant mix of directions, but here it changes"

    def field_obstacle(self) -> str:
        """Why clients do not mix in the mean step of the last round; empty if they do, in every round but the first."""
        for t, one in enumerate(self.rounds):
            work = one.work.work
            if reason := update_obstacle(one):
                return reason
            if t == 0 and (work.own != 1.0 or work.mix is not None):
                return "needs a first round along the clients' own gradients"
            if t > 0 and (work.mix is None or work.field is None or len(work.field) != 1):
                return "is about clients that mix in the mean step of the last round, as in FedAgg's default"
            if t > 0 and work.field is not None:
                last, given = self.rounds[t - 1].work.step, work.field[0].double().cpu()
                if float((given - last).norm()) > 1e-3 * float(last.norm()):
                    return "needs the mean step of the last round as the field, but here the field is rounded or different"
        return "" if not self.config.weight_decay else "needs weight decay in every direction: set --weight-decay 0"

    # --- Constants ---

    def find_constants(self) -> tuple[Constants, dict[str, str]]:
        works = [one.work for one in self.rounds if one.work.clients]
        if not works:
            raise SettingError("run", self.config.algorithm, "had no client that trained")
        probes = [one.probe for one in self.rounds if one.probe is not None and one.probe.clients]
        probed = works[0].work.mix is not None and not self.obstacle
        rates = torch.cat([work.rates.flatten() for work in works])
        top = float(rates.abs().max())
        if probed:
            top = max([top, *(float(probe.rates.abs().max()) for probe in probes)])
        met = [work.gradient for work in (*works, *probes)] + [work.direction for work in works] + self.norms
        if self.target is not None:
            met.append(float(self.objective.gradients(self.target).norm(dim=1).max()))
        theorem = [one for one in self.rounds if one.theorem]
        beta, about_beta = self.smoothness()
        self.objective.beta = beta
        mu = constants.gradient_domination(self.norms[:-1], self.losses[:-1], self.best)
        psi = self.growth()
        found = Constants(
            L=max(work.steps for work in works),
            N=max(len(work.clients) for work in works),
            delta_l=float(rates.min()),
            delta_h=top,
            beta=beta,
            P=max(met),
            Q=max(work.size for work in (*works, *probes)),
            U=max((one.work.deviation or 0.0 for one in theorem), default=None),
            alpha=self.config.options["alpha"] if theorem else None,
            mu=None if mu.value is None else min(mu.value, beta),
            psi=None if psi.value is None else min(psi.value, beta),
            imbalance=self.objective.imbalance,
            local=works[0].work.own if not self.obstacle else 1.0,
            probed=probed,
        )
        no_theorem = "only if rates are those of Theorem 1, from a probe"
        return found, {
            "L": "steps a client makes in a round",
            "N": "clients in a round",
            "delta_l": "the smallest rate used",
            "delta_h": "the largest rate used, in absolute value",
            "beta": about_beta,
            "P": "the largest gradient that a client met" + ("" if self.target is None else ", on its way and at w*"),
            "Q": "the longest weights of a client",
            "U": "the largest deviation of a client from the mean field ahead" if theorem else no_theorem,
            "alpha": "a setting" if theorem else no_theorem,
            "mu": "the smallest ½|∇F|²/(F - F*) at the models passed" if mu.applies else mu.reason,
            "psi": "the smallest 2(F - F*)/|w - w*|² at the models passed" if psi.applies else psi.reason,
            "imbalance": "from the clients' sizes",
            "local": "from the directions of the clients' steps" if not self.obstacle else "not computed",
            "F*": self.about_best,
        }

    def smoothness(self) -> tuple[float, str]:
        everywhere = self.objective.smoothness_bound()
        if everywhere is not None:
            return everywhere, "½ λ_max(XᵀX/D) of the worst client, plus weight decay: holds everywhere"
        works = [one.work for one in self.rounds if one.work.clients]
        secant = max(works, key=lambda work: work.secant)
        client = secant.sharpest if secant.sharpest >= 0 else works[0].clients[0]
        at = [self.objective.client_smoothness(w, client) for w in (self.models[0], self.models[-1])]
        words = f"secants along the clients' paths, and power iteration at both ends for client {client}: below the true one"
        return max(secant.secant, *at), words

    def growth(self) -> Bound:
        if self.target is None:
            return Bound.none(self.no_target)
        return constants.quadratic_growth(self.losses, self.best, self.distances)

    # --- Statements ---

    def analysis(self, name: str) -> Analysis:
        statements = [self.rate(), self.drift(), self.progress(), self.loss(), self.gradient(), self.field(), *self.distance()]
        return Analysis(
            run=name,
            config=self.config,
            constants=self.constants,
            sources=self.sources,
            best=self.best,
            statements=statements,
            objective=self.objective,
            start=self.models[0],
        )

    @property
    def blur(self) -> float:
        """The largest distance, after one round, between a client in float32 and the same client in exact arithmetic."""
        return 2.0 * FLOAT32 * (self.constants.L + 1) * float(self.constants.Q or 0.0)

    def about_f(self, formula: Callable[[int], Bound]) -> list[Bound]:
        """The bounds of a result about F, for every round, or the reason why there are none."""
        none = Bound.none(self.obstacle)
        return [none if self.obstacle else formula(t) for t in range(1, len(self.rounds) + 1)]

    def proved_and_printed(self, formula: Callable[[int, bool], Bound]) -> tuple[list[Bound], list[Bound]]:
        """The same, as proved and as printed."""
        return self.about_f(lambda t: formula(t, False)), self.about_f(lambda t: formula(t, True))

    def rate(self) -> Statement:
        # Theorem 1 plans epochs, whatever the number of steps in one. The bound for the first epoch also covers the later ones.
        c = replace(self.constants, L=self.config.epochs)
        measured = [float(one.work.rates.abs().max()) if one.work.clients else 0.0 for one in self.rounds]
        none = Bound.none("needs rates of Theorem 1 around the mean field of a probe: --variant paper has them")
        claims = [bounds.learning_rate(c, 0) if one.theorem else none for one in self.rounds]
        return Statement("rate", "Proposition 3", "largest |η|", measured, claims)

    def drift(self) -> Statement:
        c = self.config
        reason = optimiser_obstacle(c) or next((reason for one in self.rounds if (reason := update_obstacle(one))), "")
        if c.weight_decay and c.batch_size < max(len(part) for part in self.objective.samples):
            reason = "needs full gradients if there is weight decay: within an epoch the clients' positions are not recorded"
        claim = Bound.none(reason) if reason else bounds.client_drift(self.constants)
        measured = [one.work.drift for one in self.rounds]
        return Statement("drift", "Proposition 4", "largest |w_i - w̄|", measured, [claim] * len(measured), [], self.blur)

    def progress(self) -> Statement:
        c = self.constants
        measured = [after - before for before, after in zip(self.losses, self.losses[1:], strict=False)]
        claims = self.proved_and_printed(lambda t, printed: bounds.one_round_progress(c, self.norms[t - 1], as_printed=printed))
        return Statement("progress", "Proposition 5", "F(w̄⁺) - F(w̄)", measured, *claims, float(c.P or 0.0) * self.blur)

    def loss(self) -> Statement:
        c, gaps = self.constants, [value - self.best for value in self.losses]
        claims = self.proved_and_printed(lambda t, printed: bounds.convergence_rate(c, t, gaps[0], as_printed=printed))
        return Statement("loss", "Theorem 4", "F(w̄) - F*", gaps[1:], *claims, float(c.P or 0.0) * self.blur)

    def gradient(self) -> Statement:
        squares, gap = [norm * norm for norm in self.norms], self.losses[0] - self.best
        means = [sum(squares[:t]) / t for t in range(1, len(squares))]
        claims = self.proved_and_printed(lambda t, printed: bounds.convergence_error(self.constants, t, gap, as_printed=printed))
        return Statement("gradient", "Theorem 5", "mean |∇F(w̄)|²", means, *claims)

    def field(self) -> Statement:
        """About the models that clients train from; the model that is reported at the end may be an average of them."""
        squares, gap = [norm * norm for norm in self.norms], self.losses[0] - self.best
        means = [sum(squares[:t]) / t for t in range(1, len(squares))]
        works = [one.work for one in self.rounds]
        if reason := self.setup_obstacle(len(works) - 1) or self.field_obstacle():
            return Statement("field", "FedAgg's default", "mean |∇F(w̄)|²", means, [Bound.none(reason)] * len(means))
        shares = [work.work.own for work in works[1:]] or [1.0]
        spread = max(float(work.rates.max() / work.rates.min()) for work in works) - 1.0
        c = replace(self.constants, local=min(shares))
        claims = [bounds.field_convergence(c, t, gap, most=max(shares), spread=spread) for t in range(1, len(means) + 1)]
        return Statement("field", "FedAgg's default", "mean |∇F(w̄)|²", means, claims)

    def distance(self) -> list[Statement]:
        solution, count = self.solution, len(self.rounds)
        if self.target is None or solution is None:
            none = [Bound.none(self.no_target)] * count
            empty = [math.nan] * count
            return [Statement("distance", "Theorem 3", "|w̄ - w*|²", empty, none, none)]
        first, measured = self.distances[0], self.distances[1:]
        strong = solution.strong_convexity(math.sqrt(max(self.distances)))
        curved = replace(self.constants, psi=strong.value)
        rounding = 2.0 * math.sqrt(max(self.distances)) * self.blur
        c = self.constants
        convex = self.proved_and_printed(lambda t, printed: bounds.optimality_gap_convex(c, t, first, as_printed=printed))
        contraction = self.about_f(lambda t: bounds.optimality_gap_contraction(curved, t, first))
        wandering = self.about_f(lambda t: bounds.optimality_gap_nonconvex(c, t, first))
        what = "|w̄ - w*|²"
        return [
            Statement("distance", "Theorem 3, convex", what, measured, *convex, rounding),
            Statement("contraction", "Theorem 3, sharper", what, measured, contraction, [], rounding),
            Statement("wandering", "Theorem 3, any loss", what, measured, wandering, [], rounding),
        ]


def update_obstacle(one: Round) -> str:
    """Why a step is not a rate times (mixed) gradients; empty if it is."""
    work = one.work.work
    if work.prox or work.memory:
        return "needs steps along gradients, but here a proximal term or a memory is added (for fedagg, set --memory off)"
    return "needs all weights to move, but here some are frozen" if work.mask is not None else ""


def optimiser_obstacle(config: Config) -> str:
    """Why a client's optimiser is not gradient descent; empty if it is."""
    if config.client_optimizer == "sgd" and not config.momentum and not config.clip:
        return ""
    return "needs plain gradient steps, but clients have Adam, momentum or clipping"
