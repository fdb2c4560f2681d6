"""Secure aggregation: rounds in which the server learns sums of updates, but no node's own update.

Under Flower's SecAgg+ the nodes mask their vectors so that only the sum can be read. It is a single sum, weighted by sample counts.
A second one with other weights, such as the plain mean, would be a second equation: if one node's sample count differs from all
others, its update could be computed from the two. Whatever else a method needs is made from this sum and a few numbers of each
node. Flower's protocol expects one of its older strategies; `LegacyStrategy` takes that part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp import Grid
from torch import Tensor

from fedagg import wire
from fedagg.aggregate import judge
from fedagg.clients import Clients, Numbers, Outcome, TooFew
from fedagg.errors import SettingError
from fedagg.flat import Model
from fedagg.flower.masks import mask, unpack, with_names
from fedagg.flower.members import Members
from fedagg.flower.messages import BadAnswer, number, numbers, read_report, reported
from fedagg.flower.privacy import PrivateClients, clip_update
from fedagg.work import Chunk, ClientOptions, Job, Work

CLIP = 8.0  # larger numbers are cut off before masking
LEVELS = 2**22  # levels to which a number is rounded
NO_SUM = "secure aggregation gave an impossible sum"
MODULUS = 2**32  # of the masks: a sum over more than MODULUS / LEVELS nodes would overflow


def masked_answer(chunk: Chunk, work: Work, samples: int, tests: Mapping[str, Any]) -> RecordDict:
    """On the node: the vector to be masked, and the numbers sent in the clear. SecAgg+ averages by sample counts."""
    delta = chunk.delta[0]
    along = chunk.delta @ work.field.T if work.field is not None else chunk.delta[:, :0]
    in_clear = {
        **reported(chunk),
        "norm2": float(delta.double().square().sum()),
        "along": along[0].tolist(),
        **tests,
    }
    return answer(delta, samples, in_clear)


def private_answer(chunk: Chunk, longest: float, tests: Mapping[str, Any]) -> RecordDict:
    """The same with noise to hide the node: no longer than allowed, and without numbers about its training. Masking rounds each
    number by up to one level; the length leaves room for that."""
    delta = chunk.delta[0].cpu().double()
    if not bool(torch.isfinite(delta).all()):
        delta = torch.zeros_like(delta)
    room = 1.0 - 2.0 * math.sqrt(len(delta)) / LEVELS
    return answer(clip_update(delta, room * longest), 1, tests)


def answer(delta: Tensor, weight: int, in_clear: Mapping[str, Any]) -> RecordDict:
    parameters = ndarrays_to_parameters([delta.cpu().double().numpy()])
    metrics = {name: json.dumps(value) if isinstance(value, list) else value for name, value in in_clear.items()}
    return fitres_to_recorddict(FitRes(Status(Code.OK, ""), parameters, weight, metrics), keep_input=False)


def clear_numbers(metrics: Any, job: Job, work: Work, local: ClientOptions) -> dict[str, Any]:
    """On the server: the same numbers, by name. Raises BadAnswer if they are impossible."""
    found = read_report({**metrics, "rates": numbers(metrics.get("rates"))}, job, work, local)
    norm2, along = number(metrics.get("norm2")), numbers(metrics.get("along"))
    if len(along) != (0 if work.field is None else len(work.field)):
        raise BadAnswer("sent an incomplete answer")
    if not all(math.isfinite(part) for part in (found["loss"], norm2, *along)):
        raise BadAnswer("not finite")
    return found | {"norm2": norm2, "along": along}


def majority(nodes: int) -> int:
    """The number of shares that open a node's mask. For every other node, a node reveals a share either of its mask or of its key:
    if more than half of all shares are needed, nobody can get both."""
    return nodes // 2 + 1


def require_summable(work: Work) -> None:
    """Refuse work that asks for more than an update and the numbers."""
    if work.trace or work.represent is not None:
        fix = "the server sees no node's own vectors; choose a method other than fedgh and the paper's variant of fedagg"
        raise SettingError("secure", True, fix)


@dataclass(frozen=True)
class Proxy:
    node_id: int


@dataclass
class LegacyStrategy:
    """What the protocol expects of a strategy: whom to ask, and where to put the result."""

    orders: dict[int, RecordDict]  # by node
    answers: dict[int, FitRes] = field(default_factory=dict)

    def configure_fit(self, *_: Any) -> list[tuple[Proxy, FitIns]]:
        return [(Proxy(node), FitIns(Parameters([], ""), {})) for node in self.orders]

    def aggregate_fit(self, _: int, results: list[tuple[Proxy, FitRes]], failures: Any) -> tuple[None, dict[str, Any]]:
        self.answers = {proxy.node_id: answer for proxy, answer in results}
        return None, {}


class Workflow(SecAggPlusWorkflow):
    """Flower's SecAgg+ with our messages in place of its own, and with our masks on the nodes."""

    collect_masked_vectors_stage = with_names(SecAggPlusWorkflow.collect_masked_vectors_stage, bytes_to_ndarray=unpack)
    unmask_stage = with_names(SecAggPlusWorkflow.unmask_stage, pseudo_rand_gen=mask)

    def setup_stage(self, grid: Any, context: Any, state: Any) -> bool:
        ready = bool(super().setup_stage(grid, context, state))
        state.nid_to_fitins = dict(context.strategy.orders)
        return ready


class Messenger(Protocol):
    """What a secure round needs from the strategy."""

    grid: Grid | None
    members: Members
    timeout: float
    quorum: int
    ask: Callable[[list[Message]], list[Message]]

    def order(self, model: Model, work: Work, job: Job, t: int, step: int) -> Message: ...

    def hear_scores(self, client: int, metrics: Any) -> None: ...


def collect(clients: Clients, strategy: Messenger, model: Model, work: Work, longest: float | None = None) -> dict[int, FitRes]:
    """Ask all participants under SecAgg+. Each answer received holds the mean of the updates, weighted by sample counts, or the
    plain mean if updates are clipped to `longest`. Empty if the protocol failed."""
    assert strategy.grid is not None
    strategy.ask([])  # the protocol has its own four rounds of messages: wait until the strategy may receive
    jobs = clients.jobs()
    orders: dict[int, RecordDict] = {}
    for job in jobs:
        content = strategy.order(model, work, job, clients.t, clients.passes).content
        content.config_records["config"]["veil"] = True
        if longest is not None:
            content.config_records["config"]["longest"] = longest
        orders[strategy.members.nodes[job.client]] = content
    legacy = LegacyStrategy(orders)
    state = RecordDict({"config": ConfigRecord({"current_round": clients.t + 1}), "parameters": ArrayRecord()})
    context = LegacyContext(Context(0, 0, {}, state, {}), strategy=legacy)  # type: ignore[arg-type]
    flow = Workflow(
        1.0,
        majority(len(jobs)),
        max_weight=1.0 if longest is not None else float(max(len(job.samples) for job in jobs)),
        clipping_range=CLIP if longest is None else longest,
        quantization_range=LEVELS,
        modulus_range=MODULUS,
        timeout=strategy.timeout,
    )
    clients.bytes_down += len(jobs) * wire.down(work, model, clients.downlink.bits)
    try:
        flow(strategy.grid, context)
    except (LookupError, TypeError, ValueError) as error:
        # Flower's protocol trusts what nodes send, and does not say whose message it could not read.
        clients.left_out.update({job.client: f"secure aggregation broke off: {type(error).__name__}" for job in jobs})
        return {}
    answers = {job.client: legacy.answers.get(strategy.members.nodes[job.client]) for job in jobs}
    given = {client: answer for client, answer in answers.items() if answer is not None}
    for client, answer in given.items():
        strategy.hear_scores(client, answer.metrics)
    clients.left_out.update({job.client: "no answer in time" for job in jobs if job.client not in given})
    clients.bytes_up += len(given) * 4 * len(model.w)  # masked numbers are sent as 32-bit integers
    clients.samples_seen += sum(len(job.samples) for job in jobs if job.client in given) * clients.epochs
    return given


@dataclass
class SecureClients(Clients):
    """Participants whose updates the server sees only as sums. A bad update cannot be taken out again, so it spoils the round."""

    reports_numbers: ClassVar[bool] = False
    strategy: Messenger | None = None

    def train(self, work: Work) -> Outcome:
        assert self.strategy is not None
        require_summable(work)
        model, work = self.model, self.downlink.send(work, self.t, self.passes)
        jobs = {job.client: job for job in self.jobs()}
        given = collect(self, self.strategy, model, work)
        self.passes += 1
        if len(given) < max(self.strategy.quorum, 2):
            raise TooFew
        self.outcome = replace(self.outcome_from(given, jobs, model, work), sent=work.field)
        return self.outcome

    def numbers(self, given: dict[int, FitRes], jobs: dict[int, Job], work: Work) -> list[dict[str, Any]]:
        """The numbers of all participants. If any are bad the round is skipped, because their update is already in the sum."""
        rows: list[dict[str, Any]] = []
        for client, answer in given.items():
            try:
                rows.append(clear_numbers(answer.metrics, jobs[client], work, self.local))
            except BadAnswer as bad:
                self.left_out[client] = str(bad)
        if len(rows) < len(given):
            raise TooFew
        return rows

    def outcome_from(self, given: dict[int, FitRes], jobs: dict[int, Job], model: Model, work: Work) -> Outcome:
        rows = self.numbers(given, jobs, work)

        def column(name: str) -> Tensor:
            return torch.tensor([row[name] for row in rows], dtype=torch.float64)

        columns: dict[str, Any] = {f.name: column(f.name) for f in fields(Numbers) if f.name in rows[0]}
        steps, rates = columns["steps"], columns["rates"]
        causes = judge((columns["norm2"].sqrt() / steps).tolist(), [True] * len(rows))
        if any(causes):
            self.left_out.update({client: why for client, why in zip(given, causes, strict=True) if why})
            raise TooFew
        if (mean := mean_of(given, model)) is None:
            self.left_out.update(dict.fromkeys(given, NO_SUM))
            raise TooFew
        mean = mean.to(model.w)
        size = torch.tensor([float(len(jobs[client].samples)) for client in given], dtype=torch.float64)
        theta = size / size.sum()
        travel = (rates * self.local.gains(steps / self.epochs)).sum(1) * steps / self.epochs
        step = mean / float(theta @ travel)
        columns["along"] = columns["along"].view(len(given), -1)
        return Outcome(
            **columns,
            clients=list(given),
            mean=mean,
            plain=mean,
            velocity=step,
            flow=step,
            buffers=model.buffers,
            size=size,
            weight=size,
            theta=theta,
            travel=travel,
        )


@dataclass
class SecurePrivateClients(PrivateClients):
    """Participants whose updates the server sees only as sums, and everyone else as noisy sums. Nodes clip their own updates,
    because nobody else sees these. Whatever fails, the round releases a sum: then it is noise alone."""

    strategy: Messenger | None = None

    def sum_updates(self, model: Model, work: Work, longest: float) -> Tensor:
        assert self.strategy is not None
        given = collect(self, self.strategy, model, work, longest)
        if given and (mean := mean_of(given, model)) is not None:
            return mean * len(given)
        self.left_out.update(dict.fromkeys(given, NO_SUM))
        return torch.zeros(len(model.w), dtype=torch.float64)


def mean_of(given: dict[int, FitRes], model: Model) -> Tensor | None:
    """The mean that the protocol put into every answer; None if it is impossible."""
    (mean,) = parameters_to_ndarrays(next(iter(given.values())).parameters)
    fits = mean.shape == model.w.shape and np.isfinite(mean).all()
    return torch.from_numpy(np.ascontiguousarray(mean, dtype=np.float64)) if fits else None
