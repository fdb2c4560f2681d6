"""The clients of one round as the server sees them: they are given work, and return sums and a few numbers each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedagg import seeding, wire
from fedagg.aggregate import Combiner, combiner, judge, trusted, usual_length
from fedagg.errors import FedaggError, SettingError
from fedagg.faults import Faults
from fedagg.flat import Model
from fedagg.meanfield import MeanField
from fedagg.memory import ClientMemory
from fedagg.quantize import Downlink
from fedagg.work import Chunk, ClientOptions, Engine, Job, Report, Team, Work

SMALL_STEP = 0.01  # of the model's length


class ClientReport(NamedTuple):
    """What a participant reports about its training, whether or not it is left out."""

    first: float  # the loss before any step
    loss: float  # the mean over its training
    behind: float  # of the first mini-batch, some way along the field; 0 if the work did not ask
    norm: float  # mean norm of its mini-batch gradients; 0 if the work did not ask


class NoClients(Exception):
    """No valid client came back, or fewer than the quorum: the round leaves the model unchanged."""


class TooFew(Exception):
    """Fewer clients than the quorum gave a usable answer: the round is skipped, and nothing is learnt from it."""


@dataclass(kw_only=True)
class Numbers(Report):
    """All numbers known about n clients, on the CPU. To add one, add a line here and one in `Gathered.add`."""

    size: Tensor  # samples, (n,)
    weight: Tensor  # weight of the client in the mean, (n,): its samples, unless the method weighs otherwise
    travel: Tensor  # Σ over steps of the rate, times the gain by momentum, (n,)
    norm2: Tensor  # |Δ_i|², (n,)
    along: Tensor  # Δ_i · field, (n, m)
    beta: Tensor | None = None  # secant smoothness along the client's path, (n,), where the work asked for a trace
    classes: Tensor | None = None  # per-class mean representations, (n, classes, features)
    counts: Tensor | None = None  # samples per class, (n, classes)

    def columns(self) -> dict[str, Tensor]:
        """The numbers by name, without those that were not asked for."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(kw_only=True)
class Answers(Numbers):
    """The same numbers, with those by which the server judges an answer."""

    length: Tensor  # how far the client moved per step, (n,); infinite where anything it sent is not finite
    fits: Tensor  # does its update have the model's size? (n,), 1 or 0


@dataclass(kw_only=True)
class Outcome(Numbers):
    """A round's work, summed over the valid clients. Vectors are on the engine's device, numbers per client on the CPU."""

    clients: list[int]
    theta: Tensor  # θ_i = weight_i / Σ weight_j, (n,)
    mean: Tensor  # Σ θ_i Δ_i
    plain: Tensor  # (1/n) Σ Δ_i
    velocity: Tensor  # (1/n) Σ Δ_i / travel_i: minus the mean direction of a client's steps
    flow: Tensor  # Σ θ_i Δ_i / travel_i: the same, by weight
    buffers: Tensor
    sent: Tensor | None = None  # the work's field as the clients saw it, (m, d): rounded, if the downlink rounds
    field: MeanField | None = None  # the averages of Definition 1, when the work asked for a trace
    robust: str = "mean"  # the rule that combined them

    def trusted(self, values: Tensor) -> Tensor:
        """Numbers per client, (n,), of which with a robust rule none is far from the others'."""
        return trusted(values, self.robust)


@dataclass
class Yardstick:
    """The longest step that was usual in any round so far. Shorter steps are never outliers."""

    length: float = 0.0


@dataclass
class Clients:
    """The participants of round t. An algorithm calls `train` once or more often; everything else is kept for the record."""

    engine: Engine
    t: int
    ids: list[int]
    samples: Callable[[int], Tensor]
    total: int  # clients in the federation
    local: ClientOptions
    seed: int
    model: Model
    rounds: int = 0  # rounds of the run; 0 if no end is set
    memory: ClientMemory | None = None
    remember: Callable[[Chunk, Work], Tensor] | None = None
    weigh: Callable[[Chunk], Tensor] | None = None  # by default the sample count
    faults: Faults = field(default_factory=Faults)
    robust: str = "mean"
    drop: bool = True  # leave out clients that moved far more than the others
    trim: float = 0.2
    downlink: Downlink = field(default_factory=Downlink)
    quorum: int = 1  # valid answers that a round needs
    yardstick: Yardstick = field(default_factory=Yardstick)
    team: Team | None = None  # the processes that share the clients of a distributed run

    passes: int = 0
    left_out: dict[int, str] = field(default_factory=dict)
    reported: dict[int, ClientReport] = field(default_factory=dict)  # all that answered in the last pass
    stragglers: dict[int, int] = field(default_factory=dict)  # epochs done by those too slow to finish
    bytes_up: int = 0
    bytes_down: int = 0
    samples_seen: int = 0
    outcome: Outcome | None = None
    rehearsed: Outcome | None = None  # of the last rehearsal

    reports_numbers: ClassVar[bool] = True  # does a client report its own numbers besides its update?

    @property
    def epochs(self) -> int:
        return self.local.epochs

    @property
    def batches(self) -> list[int]:
        """Mini-batches per epoch, of each participant."""
        return [self.local.steps(len(self.samples(i))) for i in self.ids]

    @property
    def steps(self) -> float:
        """S: mini-batches per epoch, averaged over the participants."""
        return sum(self.batches) / len(self.ids)

    @property
    def effective_steps(self) -> float:
        """S again, with steps as long as momentum makes them."""
        each = torch.tensor(self.batches, dtype=torch.float64)
        return float((each * self.local.gains(each).mean(1)).sum()) / len(self.ids)

    def constant(self, rate: float) -> Tensor:
        return torch.full((self.epochs,), rate, dtype=torch.float64)

    def jobs(self) -> list[Job]:
        return [
            Job(
                client=client,
                samples=self.samples(client),
                epochs=self.faults.epochs(self.t, client, self.epochs),
                seed=seeding.derive(self.seed, "client", self.t, self.passes, client),
                position=position,
            )
            for position, client in enumerate(self.ids)
            if not self.faults.drops(self.t, client)
        ]

    def forget(self) -> None:
        """Drop the rounding error carried over: a method that goes back to an earlier model no longer uses that field."""
        self.downlink.error = None

    def rehearse(self, work: Work) -> dict[int, ClientReport]:
        """Let every participant do the work and report how it went. Nothing is kept except `rehearsed`, what they computed."""
        left_out, length, outcome, error = dict(self.left_out), self.yardstick.length, self.outcome, self.downlink.error
        self.outcome = None
        with suppress(NoClients):
            self.train(work)
        self.rehearsed = self.outcome
        self.left_out, self.yardstick.length, self.outcome, self.downlink.error = left_out, length, outcome, error
        return self.reported

    def train(self, work: Work) -> Outcome:
        """Let every participant do the work from the global model, and sum the results."""
        own_steps(work, self.local)
        work.check(len(self.ids), self.epochs, len(self.model.w))
        model, work = self.model, self.downlink.send(work, self.t, self.passes)
        jobs = self.jobs()
        self.left_out.update({client: "dropped out" for client in self.ids if self.faults.drops(self.t, client)})
        gathered = Gathered(self.robust, self.trim, self.team)
        for chunk in self.engine.run(model, work, jobs, self.memory):
            if self.memory is not None and self.remember is not None and work.memory:
                self.memory.stage([job.client for job in chunk.jobs], kept(self.remember(chunk, work), chunk))
            self.faults.corrupt(self.t, chunk)  # on the way to the server: what a client remembers stays intact
            if work.trial:
                chunk = replace(chunk, delta=torch.zeros_like(chunk.delta), buffers=model.buffers.expand_as(chunk.buffers))
            gathered.add(chunk, work, model, None if self.weigh is None else self.weigh(chunk))
        gathered.pool(jobs)
        if self.memory is not None and gathered.team is not None and work.memory:
            self.memory.share([job.client for job in gathered.jobs], gathered.team)
        self.samples_seen += sum(len(job.samples) * job.epochs for job in gathered.jobs)
        self.stragglers.update({job.client: job.epochs for job in gathered.jobs if job.epochs < self.epochs})
        self.passes += 1
        lengths = gathered.column("length")
        # A step that is small compared with the model is never an outlier, however little the others moved.
        usual = max(self.yardstick.length, SMALL_STEP * float(torch.linalg.vector_norm(model.w)))
        causes = judge(lengths, [bool(fit) for fit in gathered.column("fits")], usual, self.drop)
        self.left_out.update({j.client: why for j, why in zip(gathered.jobs, causes, strict=True) if why})
        reports = map(ClientReport, *(gathered.column(name) for name in ClientReport._fields))
        self.reported = dict(zip((job.client for job in gathered.jobs), reports, strict=True))
        self.bytes_down += len(self.ids) * wire.down(work, model, self.downlink.bits)
        self.bytes_up += len(gathered.jobs) * wire.up(work, model, self.epochs, gathered.represented())
        valid = [why is None for why in causes]
        self.yardstick.length = max(self.yardstick.length, usual_length(lengths, valid))
        enough = sum(valid) >= self.quorum
        if self.memory is not None:
            self.memory.keep(job.client for job, ok in zip(gathered.jobs, valid, strict=True) if ok and enough)
        if not enough:
            raise NoClients
        self.outcome = replace(gathered.outcome(valid, model), sent=work.field)
        return self.outcome


@dataclass
class Gathered:
    """Collects chunks: vectors into sums, numbers into rows that are read once, when all clients are done."""

    robust: str
    trim: float
    team: Team | None = None  # the other processes of a distributed run
    jobs: list[Job] = field(default_factory=list)
    rows: list[dict[str, Tensor]] = field(default_factory=list)  # the columns of `Answers`

    def __post_init__(self) -> None:
        self.sums, self.flows, self.stats, self.traces = (combiner(self.robust, self.trim) for _ in range(4))

    def add(self, chunk: Chunk, work: Work, model: Model, weight: Tensor | None = None) -> None:
        size = torch.tensor([float(len(job.samples)) for job in chunk.jobs], dtype=torch.float64)
        fits = torch.tensor([received == chunk.delta.shape[1] for received in chunk.received])
        # Buffers that a client did not change are accepted whatever they hold: an infinity or NaN there is not its fault.
        same = (chunk.buffers == model.buffers) | (chunk.buffers.isnan() & model.buffers.isnan())
        statistics = torch.where(same, 0.0, chunk.buffers - model.buffers)
        reported = {f.name: getattr(chunk, f.name).double().cpu() for f in fields(Report)}
        norm2 = torch.linalg.vector_norm(chunk.delta, dim=1).double().square().cpu()
        sound = fits & torch.isfinite(norm2) & torch.isfinite(reported["loss"])
        for sent in (statistics, chunk.gradients, chunk.path, chunk.classes):
            if sent is not None:
                sound &= torch.isfinite(sent).flatten(1).all(1).cpu()
        weight = size if weight is None else torch.as_tensor(weight).double().cpu()
        if weight.shape != size.shape or not bool((torch.isfinite(weight) & (weight >= 0))[sound].all()):
            raise FedaggError("weigh: the method must give one number per client, finite and not negative")
        weight = weight.where(sound, 0.0)  # it may come from numbers that are not finite
        length = (norm2.sqrt() / reported["steps"].clamp_min(1)).where(sound, torch.tensor(float("inf")))
        along = chunk.delta @ work.field.T if work.field is not None else chunk.delta[:, :0]
        beta = None
        if chunk.gradients is not None and chunk.path is not None:
            beta = secant_smoothness(chunk.gradients, chunk.path).double().cpu()
            trace = torch.cat([chunk.gradients.flatten(1), chunk.path.flatten(1)], 1)
            self.traces.add(trace, torch.ones(1, len(chunk.jobs)), length.tolist())
        row = Answers(
            **reported,
            size=size,
            weight=weight,
            travel=chunk.travel.double().cpu(),
            norm2=norm2,
            along=along.double().cpu(),
            beta=beta,
            classes=None if chunk.classes is None else chunk.classes.cpu(),
            counts=None if chunk.counts is None else chunk.counts.cpu(),
            length=length,
            fits=fits,
        )
        self.jobs += chunk.jobs
        self.rows.append(row.columns())
        lengths, ones = length.tolist(), torch.ones_like(size)
        # One sum by weight and one with equal votes; both are divided by their totals when those are known.
        self.sums.add(chunk.delta, torch.stack([weight, ones]), lengths)
        self.flows.add(chunk.delta, torch.stack([ones, weight]), lengths, scale=1 / row.travel.clamp_min(1e-30))
        self.stats.add(statistics, size[None], lengths)

    def pool(self, jobs: Sequence[Job]) -> None:
        """Send every client's numbers to every process of a distributed run. Vectors stay where they are until they are summed."""
        self.mine = list(range(len(self.jobs)))
        if self.team is None or not jobs:  # all processes have the same list
            return
        place = {job.position: at for at, job in enumerate(jobs)}
        self.mine = [place[job.position] for job in self.jobs]
        mine, names = self.columns(), [f.name for f in fields(Answers)]
        shapes = torch.zeros(len(names), 3, dtype=torch.int64)  # number of axes, and the lengths of those after the client's
        for at, name in enumerate(names):
            if name in mine:
                shapes[at] = torch.tensor([mine[name].dim(), *mine[name].shape[1:], *([0] * (3 - mine[name].dim()))])
        every: dict[str, Tensor] = {}
        for name, (axes, *lengths) in zip(names, self.team.most(shapes).tolist(), strict=True):
            if axes:
                wide = torch.zeros(len(jobs), *lengths[: axes - 1], dtype=torch.float64)
                if self.mine:
                    wide[self.mine] = mine[name].double()
                every[name] = self.team.sum(wide)
        self.jobs, self.rows = list(jobs), [every]

    def columns(self) -> dict[str, Tensor]:
        """The numbers of all clients by name; empty if no client answered."""
        return {name: torch.cat([row[name] for row in self.rows]) for name in (self.rows[0] if self.rows else ())}

    def column(self, name: str) -> list[float]:
        return [value for row in self.rows for value in row[name].tolist()]

    def represented(self) -> int:
        """How many numbers a client sends about its classes, if the work asks for them."""
        return sum(row[name][0].numel() for row in self.rows[:1] for name in ("classes", "counts") if name in row)

    def summed(self, combiner: Combiner, valid: Sequence[bool], empty: Tensor) -> Tensor:
        """The combination over all valid clients; `empty` is the sum over none."""
        return combiner.total(valid) if self.team is None else combiner.together(self.team, self.mine, valid, empty)

    def outcome(self, valid: Sequence[bool], model: Model) -> Outcome:
        keep, columns = torch.tensor(valid), self.columns()
        numbers = {f.name: columns[f.name][keep] for f in fields(Numbers) if f.name in columns}
        size, weight, count = numbers["size"], numbers["weight"], int(keep.sum())
        if not float(weight.sum()):
            raise NoClients  # none of them is valid
        epochs, zero = numbers["rates"].shape[1], torch.zeros_like(model.w)[None]
        weighted, plain = self.summed(self.sums, valid, zero.repeat(2, 1)).unbind()
        velocity, flow = self.summed(self.flows, valid, zero.repeat(2, 1)).unbind()
        trace = None
        if "beta" in numbers:
            trace = self.summed(self.traces, valid, zero.repeat(1, 2 * epochs + 1))[0] / count
        return Outcome(
            **numbers,
            clients=[job.client for job, ok in zip(self.jobs, valid, strict=True) if ok],
            theta=weight / weight.sum(),
            mean=weighted / float(weight.sum()),
            plain=plain / count,
            velocity=velocity / count,
            flow=flow / float(weight.sum()),
            buffers=model.buffers + self.summed(self.stats, valid, torch.zeros_like(model.buffers)[None])[0] / float(size.sum()),
            field=None if trace is None else split_trace(trace, epochs),
            robust=self.robust,
        )


def own_steps(work: Work, local: ClientOptions) -> None:
    """Refuse options of the client's optimiser that the method's own step would ignore."""
    if work.step is not None and (local.momentum or local.optimizer != "sgd"):
        name, value = ("momentum", local.momentum) if local.optimizer == "sgd" else ("client_optimizer", local.optimizer)
        raise SettingError(name, value, "the method takes its own local steps; leave it out")


def kept(vectors: Tensor, chunk: Chunk) -> Tensor:
    """What clients keep, with its shape checked."""
    if not isinstance(vectors, Tensor) or vectors.shape != chunk.delta.shape:
        found = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        raise FedaggError(f"remember: the method must give a row for each client, {tuple(chunk.delta.shape)}, and gave {found}")
    return vectors


def split_trace(trace: Tensor, epochs: int) -> MeanField:
    rows = trace.view(2 * epochs + 1, -1)
    return MeanField(phi1=rows[:epochs], phi2=rows[epochs:])


def secant_smoothness(gradients: Tensor, path: Tensor) -> Tensor:
    """β_i = max_l |ḡ_l - ḡ_{l-1}| / |w_l - w_{l-1}| along a client's own path, (n,); 0 if nothing is known. Epochs in which the
    client did not move are ignored: their gradients differ only by noise."""
    if gradients.shape[1] < 2:
        return torch.ones(len(gradients))
    change: Tensor = (gradients[:, 1:] - gradients[:, :-1]).norm(dim=-1)
    length: Tensor = (path[:, 1:-1] - path[:, :-2]).norm(dim=-1)
    return torch.where(length > 0, change / length.clamp_min(1e-12), 0.0).amax(1)
