"""Secure aggregation: rounds in which the server learns sums of updates and nobody's own.

Every method here needs of the clients' vectors only three averages, and of each client a few numbers. Under Flower's
SecAgg+ the vectors are masked on the nodes, so that only their sums can be read. Flower's protocol is written for its
older strategies; what it asks of one, `Veil` answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import Code, FitIns, FitRes, Parameters, Scalar, Status, ndarrays_to_parameters, parameters_to_ndarrays
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
from fedagg.flower.members import Members
from fedagg.flower.messages import BadAnswer, number, read_report, reported
from fedagg.work import Chunk, ClientOptions, Job, Work

CLIP = 8.0  # numbers beyond are cut off before they are masked
VECTORS = 3


def veiled_answer(chunk: Chunk, work: Work, samples: int, typical: float) -> RecordDict:
    """On the node: the three vectors to be masked, and the numbers that go in the clear.

    SecAgg+ averages by sample counts. What is to be averaged plainly is divided by the node's own count first.
    """
    delta, share = chunk.delta[0], typical / samples
    vectors = [delta, share * delta, share * delta / chunk.travel[0]]
    along = chunk.delta @ work.field.T if work.field is not None else chunk.delta[:, :0]
    numbers: dict[str, Scalar] = {
        **reported(chunk),
        "norm2": float(delta.double().square().sum()),
        "along": json.dumps(along[0].tolist()),
        "rates": json.dumps(chunk.rates[0].tolist()),
    }
    parameters = ndarrays_to_parameters([torch.stack(vectors).cpu().double().numpy()])
    return fitres_to_recorddict(FitRes(Status(Code.OK, ""), parameters, samples, numbers), keep_input=False)


def clear_numbers(told: Any, job: Job, work: Work, local: ClientOptions) -> dict[str, Any]:
    """On the server: the same numbers, by name. Raises BadAnswer where they cannot be."""
    try:
        lists = {name: json.loads(str(told.get(name)), parse_int=float) for name in ("along", "rates")}
    except (ValueError, RecursionError):
        raise BadAnswer("sent an incomplete answer") from None
    found = read_report({**told, **lists}, job, work, local)
    norm2, along = number(told.get("norm2")), lists["along"]
    if not isinstance(along, list) or len(along) != (0 if work.field is None else len(work.field)):
        raise BadAnswer("sent an incomplete answer")
    along = [number(part) for part in along]
    if not all(math.isfinite(part) for part in (found["loss"], norm2, *along)):
        raise BadAnswer("not finite")
    return found | {"norm2": norm2, "along": along}


def summable(work: Work) -> None:
    """Refuse work whose answer is more than the three vectors and the numbers."""
    if work.trace or work.represent is not None:
        fix = "the server sees no node's own vectors; choose a method other than fedgh and the paper's variant of fedagg"
        raise SettingError("secure", True, fix)


@dataclass(frozen=True)
class Proxy:
    node_id: int


@dataclass
class Veil:
    """What the protocol wants of a strategy: whom to ask, and where to put the result."""

    orders: dict[int, RecordDict]  # by node
    answers: dict[int, FitRes] = field(default_factory=dict)

    def configure_fit(self, *_: Any) -> list[tuple[Proxy, FitIns]]:
        return [(Proxy(node), FitIns(Parameters([], ""), {})) for node in self.orders]

    def aggregate_fit(self, _: int, results: list[tuple[Proxy, FitRes]], failures: Any) -> tuple[None, dict[str, Any]]:
        self.answers = {proxy.node_id: answer for proxy, answer in results}
        return None, {}


class Workflow(SecAggPlusWorkflow):
    """Flower's SecAgg+, with our orders in the place of its own."""

    def setup_stage(self, grid: Any, context: Any, state: Any) -> bool:
        ready = bool(super().setup_stage(grid, context, state))
        state.nid_to_fitins = dict(context.strategy.orders)
        return ready


class Messenger(Protocol):
    """What a secure round needs of the strategy."""

    grid: Grid | None
    members: Members
    timeout: float
    quorum: int
    ask: Callable[[list[Message]], list[Message]]

    def order(self, model: Model, work: Work, job: Job, t: int, step: int) -> Message: ...


@dataclass
class VeiledClients(Clients):
    """Participants whose updates the server sees in sums only. One bad update cannot be taken out again: it spoils
    the round."""

    open: ClassVar[bool] = False
    strategy: Messenger | None = None

    def train(self, work: Work) -> Outcome:
        strategy = self.strategy
        assert strategy is not None
        assert strategy.grid is not None
        summable(work)
        strategy.ask([])  # the protocol has its own four rounds of messages: wait for the strategy's turn to receive
        model, work = self.model, self.downlink.send(work, self.t, self.passes)
        jobs = {job.client: job for job in self.jobs()}
        sizes = {client: len(job.samples) for client, job in jobs.items()}
        typical = sum(sizes.values()) / len(sizes)
        orders: dict[int, RecordDict] = {}
        for job in jobs.values():
            content = strategy.order(model, work, job, self.t, self.passes).content
            content.config_records["config"]["veil"] = typical
            orders[strategy.members.nodes[job.client]] = content
        self.passes += 1
        veil = Veil(orders)
        state = RecordDict({"config": ConfigRecord({"current_round": self.t + 1}), "parameters": ArrayRecord()})
        context = LegacyContext(Context(0, 0, {}, state, {}), strategy=veil)  # type: ignore[arg-type]
        flow = Workflow(1.0, 0.5, max_weight=float(max(sizes.values())), clipping_range=CLIP, timeout=strategy.timeout)
        try:
            flow(strategy.grid, context)
        except (LookupError, TypeError, ValueError) as error:
            # Flower's protocol takes what nodes send on trust, and does not say whose message it could not read.
            self.left_out.update(dict.fromkeys(sizes, f"secure aggregation broke off: {type(error).__name__}"))
            raise TooFew from None

        answers = {client: veil.answers.get(strategy.members.nodes[client]) for client in sizes}
        self.left_out.update({client: "no answer in time" for client, answer in answers.items() if answer is None})
        given = {client: answer for client, answer in answers.items() if answer is not None}
        self.bytes_down += len(sizes) * wire.down(work, model, self.downlink.bits)
        self.bytes_up += len(given) * 8 * VECTORS * len(model.w)  # masked numbers travel as 64-bit integers
        if len(given) < max(strategy.quorum, 2):
            raise TooFew
        self.samples_seen += sum(sizes[client] for client in given) * self.epochs
        self.outcome = replace(self.summed(given, jobs, typical, model, work), sent=work.field)
        return self.outcome

    def numbers(self, given: dict[int, FitRes], jobs: dict[int, Job], work: Work) -> list[dict[str, Any]]:
        """Everybody's, or the round is skipped: whose numbers are no good is in the sum all the same."""
        rows: list[dict[str, Any]] = []
        for client, answer in given.items():
            try:
                rows.append(clear_numbers(answer.metrics, jobs[client], work, self.local))
            except BadAnswer as bad:
                self.left_out[client] = str(bad)
        if len(rows) < len(given):
            raise TooFew
        return rows

    def summed(self, given: dict[int, FitRes], jobs: dict[int, Job], typical: float, model: Model, work: Work) -> Outcome:
        rows = self.numbers(given, jobs, work)

        def column(name: str) -> Tensor:
            return torch.tensor([row[name] for row in rows], dtype=torch.float64)

        told: dict[str, Any] = {f.name: column(f.name) for f in fields(Numbers) if f.name in rows[0]}
        steps, rates = told["steps"], told["rates"]
        causes = judge((told["norm2"].sqrt() / steps).tolist(), [True] * len(rows))
        if any(causes):
            self.left_out.update({client: why for client, why in zip(given, causes, strict=True) if why})
            raise TooFew
        sums = parameters_to_ndarrays(next(iter(given.values())).parameters)[0]
        if sums.shape != (VECTORS, len(model.w)) or not np.isfinite(sums).all():
            self.left_out.update(dict.fromkeys(given, "secure aggregation gave a sum that cannot be"))
            raise TooFew
        mean, plain, velocity = torch.from_numpy(np.ascontiguousarray(sums, dtype=np.float32)).to(model.w).unbind()
        size = torch.tensor([float(len(jobs[client].samples)) for client in given], dtype=torch.float64)
        evenly = float(size.sum()) / (typical * len(given))
        told["along"] = told["along"].view(len(given), -1)
        return Outcome(
            **told,
            clients=list(given),
            mean=mean,
            plain=evenly * plain,
            velocity=evenly * velocity,
            buffers=model.buffers,
            size=size,
            weight=size,
            theta=size / size.sum(),
            travel=(rates * self.local.gains(steps / self.epochs)).sum(1) * steps / self.epochs,
        )
