"""All clients of a round at once: their weights are the rows of one matrix, and a step moves every row.

The engine handles the schedule (which client makes which step on which samples), the update and the bookkeeping; a network form
(`stacked`, `vmapped`) turns rows of weights into rows of gradients. The client with most samples comes first. Clients with fewer
samples or epochs pause while others continue: their rate is zero and their samples weigh nothing. When a third of the rows pause,
those at the front go on alone. On CUDA the step is captured once as a graph that reads its batch through a cursor on the device,
and a round only replays it.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fedagg import seeding
from fedagg.augment import augmented
from fedagg.engines.base import Problem, Stepper, class_means, class_sums, exact_products
from fedagg.engines.layers import Conv, Linear
from fedagg.engines.sequential import Sequential
from fedagg.engines.vmapped import VmappedNetwork
from fedagg.errors import FedaggWarning, SettingError, first_line
from fedagg.flat import Model, Workspace, copy_module
from fedagg.work import Chunk, Client, ClientLoss, Engine, Job, LocalStep, Memory, State, Work

if TYPE_CHECKING:
    from fedagg.engines.fused import FusedStep

WITHIN = 1e-2  # relative error: rounding stays below it, real differences exceed it
SCHEDULED = 64  # steps that a captured stage has room for at least: a larger client needs a new one
NUDGE = 1e-6  # in deep networks rounding may exceed that, so the effect of so small a change of the weights counts as rounding too


class Network(Protocol):
    """n copies of the network; `gradient` fills `g` from `w` and returns the loss of each copy."""

    w: Tensor
    g: Tensor
    buffers: Tensor
    generator: torch.Generator | None  # for dropout; if None, torch's own is used

    def gradient(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor: ...

    def first(self, n: int) -> Network:
        """The first n copies as a network, on the same memory."""


@runtime_checkable
class Descending(Network, Protocol):
    """A network that can step along its gradient while computing it."""

    linear: Sequence[object]  # the layers that do; if empty, there is nothing to gain

    def descend(self, x: Tensor, y: Tensor, scale: Tensor, step: Tensor) -> Tensor: ...


@runtime_checkable
class Holding(Network, Protocol):
    """A network that can leave a part of its gradient to the step, and may keep weights in another form."""

    def hold(self, batch: int) -> list[Linear | Conv]: ...

    def refresh(self) -> None: ...


@runtime_checkable
class Feeding(Network, Protocol):
    """A network that can return the input of a layer, for all copies at once."""

    def feeds(self, head: str) -> bool: ...

    def fed(self, head: str, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Shape:
    """What a captured step depends on: sizes, and which terms the work has."""

    n: int
    batch: int
    shift: bool
    prox: bool
    memory: bool
    mask: bool
    trace: bool
    clip: bool
    loss: bool = False  # the method's own loss
    step: bool = False


def refilled(room: Tensor | None, value: Tensor) -> Tensor:
    """The value in that room, or in a new one."""
    return value.clone() if room is None or room.shape != value.shape else room.copy_(value)


@dataclass
class Custom:
    """A method's own loss and step, what its clients know, and what they keep from one step to the next."""

    client: Client
    loss: ClientLoss | None = None
    step: LocalStep | None = None
    state: State = field(default_factory=dict)
    room: State = field(default_factory=dict)  # the memory of `state`, the same in every round
    recorded: object = None  # the step that was captured

    def begin(self, work: Work, client: Client) -> None:
        """Begin a round."""
        if work.pure:  # a graph reads the same memory in every round
            for name, value in vars(client).items():
                setattr(client, name, None if value is None else refilled(getattr(self.client, name), value))
        self.client, self.loss, self.step, self.state = client, work.loss, work.step, {}

    @property
    def starts(self) -> bool:
        """Is the next step the first of a round, for a method that keeps a state? Then there is no state yet."""
        return bool(self.room) and not self.state

    def keep(self, name: str, value: Tensor, active: Tensor) -> None:
        """Keep what the first clients, as many as are in `active` (n, 1), return; those that pause keep what they had."""
        if name in self.state:
            kept = self.state[name][: len(active)]
            kept.copy_(torch.where(active.view(-1, *[1] * (value.dim() - 1)), value, kept))
        else:
            self.state[name] = self.room[name] = refilled(self.room.get(name), value)


@dataclass
class Stage:
    """The persistent tensors of one shape: a network, the schedule, and the terms of the update."""

    shape: Shape
    network: Network
    capacity: int  # the schedule's capacity in steps
    problem: Problem
    graph: torch.cuda.CUDAGraph | None = None

    def __post_init__(self) -> None:
        n, batch, d, device = self.shape.n, self.shape.batch, self.problem.layout.d, self.problem.device
        self.order = torch.zeros(self.capacity, n, batch, dtype=torch.int64, device=device)
        self.scale = torch.zeros(self.capacity, n, batch, device=device)
        self.drawn = torch.zeros_like(self.order) if self.problem.local.augment != "none" else None
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.x = self.problem.x.new_empty(n * batch, *self.problem.x.shape[1:])
        self.rate = torch.zeros(n, 1, device=device)
        self.loss = torch.zeros(n, device=device)
        self.own, self.prox = torch.ones(n, 1, device=device), torch.zeros((), device=device)
        self.start = torch.zeros(d, device=device)
        self.shift = torch.zeros(d, device=device) if self.shape.shift else None
        self.mask = torch.ones(d, device=device) if self.shape.mask else None
        # Rows as far apart as those of the weights: on a GPU they begin at multiples of 16 numbers.
        self.memory = torch.zeros(n, self.network.w.stride(0), device=device)[:, :d] if self.shape.memory else None
        self.mean = torch.zeros(n, d, device=device) if self.shape.trace else None
        self.custom = Custom(Client(self.start))
        self.stepper = Stepper(self.problem.local, self.network.w, float(self.shape.clip))
        self.parts: dict[int, Stage] = {}
        self.choose_forms()

    def choose_forms(self) -> None:
        """How the step is made, with fewest passes over the weights."""
        plain = self.stepper.m is None and not self.shape.step
        bare = plain and not self.stepper.limits and not self.problem.local.weight_decay
        terms = (self.shape.shift, self.shape.prox, self.shape.memory, self.shape.mask)
        self.bare = bare and not any(terms)  # plain gradient descent: one pass over the weights
        self.fused_step: FusedStep | None = None
        if plain and self.network.w.is_cuda and has_triton():
            from fedagg.engines.fused import FusedStep  # needs Triton

            held = self.network.hold(self.shape.batch) if isinstance(self.network, Holding) and not self.shape.trace else []
            self.fused_step = FusedStep(self.network.w, self.network.g, held)
        # Terms that do not depend on the client's position may be applied after a step along the gradient.
        follows = bare and not (self.shape.prox or self.shape.mask or self.shape.trace)
        self.descending = self.network if follows and isinstance(self.network, Descending) and self.network.linear else None

    def first(self, n: int) -> Stage:
        """The first n clients alone, on the same memory: the others do not make this step."""
        if n == self.shape.n:
            return self
        if n not in self.parts:
            part = self.parts[n] = copy.copy(self)
            part.shape, part.network, part.stepper = replace(self.shape, n=n), self.network.first(n), self.stepper.first(n)
            part.x, part.parts = self.x[: n * self.shape.batch], {}
            part.rate, part.loss, part.own = self.rate[:n], self.loss[:n], self.own[:n]
            part.order, part.scale = self.order[:, :n], self.scale[:, :n]
            part.drawn = None if self.drawn is None else self.drawn[:, :n]
            part.memory, part.mean = (None if rows is None else rows[:n] for rows in (self.memory, self.mean))
            part.choose_forms()
            if self.graph is not None:
                part.capture(beside=self.graph)
        return self.parts[n]

    def begin(
        self, model: Model, work: Work, own: Tensor | None, steps: Tensor, schedule: Callable[[Callable[[Job], Tensor]], Tensor]
    ) -> None:
        """Set every client to the model, before the first step; `own` is what they remember, `steps` (n, 1) how many they make, and
        `schedule` is `by_step`."""
        for state in (self.cursor, self.loss, self.mean, self.stepper.m, self.stepper.v, self.stepper.count, self.stepper.norm):
            if state is not None:
                state.zero_()
        for room, what in (
            (self.order, Job.order),
            (self.scale, lambda job: shares(len(job.samples), self.shape.batch)),
            (self.drawn, lambda job: job.drawn(self.problem.local.augment)),
        ):
            if room is not None:
                planned = schedule(what)
                room[: len(planned)].copy_(planned)
        self.own.fill_(work.own)
        self.prox.fill_(work.prox)
        if self.stepper.limit is not None:
            self.stepper.limit.fill_(work.clip)
        self.network.w.copy_(model.w.expand(self.shape.n, -1))
        self.network.buffers.copy_(model.buffers.expand(self.shape.n, -1))
        self.refresh()
        self.custom.begin(work, Client(model.w, own, steps=steps))
        for term, given in ((self.start, model.w if work.prox else None), (self.memory, own), (self.mask, work.mask)):
            if term is not None and given is not None:
                term.copy_(given)

    def refresh(self) -> None:
        if isinstance(self.network, Holding):
            self.network.refresh()

    @torch.no_grad()
    def step(self, width: int | None = None) -> None:
        """Make one step of every client, at the cursor; `width` is the number of samples that are not padding."""
        flat = self.order.index_select(0, self.cursor)[0, :, :width].reshape(-1)
        scale = self.scale.index_select(0, self.cursor)[0, :, :width]
        x = torch.index_select(self.problem.x, 0, flat, out=self.x[: len(flat)])
        if self.drawn is not None:
            x = augmented(x, self.drawn.index_select(0, self.cursor)[0, :, :width].reshape(-1))
        y = self.problem.y.index_select(0, flat)
        if self.descending is not None:
            self.loss += self.descend(self.descending, x, y, scale)
            self.cursor += 1
            return
        client = self.present() if self.shape.loss or self.shape.step else None
        if isinstance(self.network, VmappedNetwork):
            self.network.own, self.network.client = self.custom.loss, client
        if client is not None and self.custom.step is not None:
            self.walk(self.custom.step, client, x, y, scale)
            self.cursor += 1
            return
        self.loss += self.network.gradient(x, y, scale)
        if self.mean is not None:
            self.mean += self.network.g
        active = (scale[:, :1] > 0).to(scale.dtype)
        if self.fused_step is not None:
            gain = self.own * self.stepper.factor(self.fused_step.norm()) if self.stepper.limits else self.own
            pull = self.own * self.problem.local.weight_decay if self.problem.local.weight_decay else None
            prox = self.prox if self.shape.prox else None
            self.fused_step(self.rate * active, gain, pull, prox, self.start, self.shift, self.memory, self.mask)
        else:
            self.update(active)
        self.cursor += 1

    def present(self) -> Client:
        """What the clients of this stage know."""
        client, n = self.custom.client, self.shape.n
        memory, steps = (None if rows is None else rows[:n] for rows in (client.memory, client.steps))
        return replace(client, memory=memory, steps=steps, shift=self.shift)

    def walk(self, step: LocalStep, client: Client, x: Tensor, y: Tensor, scale: Tensor) -> None:
        """Make the method's own step. Paused clients and masked weights do not move."""
        network, active, called = self.network, scale[:, :1] > 0, False
        before = network.w.clone()

        def gradient(at: Tensor) -> Tensor:
            nonlocal called
            network.w.copy_(at)
            statistics = network.buffers.clone()
            loss = network.gradient(x, y, scale)
            client.loss = loss[:, None].clone()
            if called:  # a second gradient on the batch must not change statistics
                network.buffers.copy_(statistics)
            else:  # clients report the first loss and gradient
                called = True
                self.loss.add_(loss)
                if self.mean is not None:
                    self.mean.add_(network.g)
            return self.stepper.gradient(network.g, network.w).clone()

        known = {name: value[: self.shape.n].clone() for name, value in self.custom.state.items()}  # a step may change it in place
        w, state = step(client, before, gradient, self.rate, known)
        moves = active if self.mask is None else active & (self.mask > 0)
        network.w.copy_(torch.where(moves, w, before))
        for name, value in state.items():
            self.custom.keep(name, value, active)

    def descend(self, network: Descending, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        rate = self.rate * (scale[:, :1] > 0)
        loss = network.descend(x, y, scale, rate * self.own)
        if self.shift is not None:
            network.w.addcmul_(self.shift, rate, value=-1.0)
        if self.memory is not None:
            network.w.addcmul_(self.memory, rate)
        return loss

    def update(self, active: Tensor) -> None:
        w, g = self.network.w, self.network.g
        if self.bare:
            w.addcmul_(g, self.rate * active * self.own, value=-1.0)
            return
        d = self.stepper.gradient(g, w).mul_(self.own)
        if self.shift is not None:
            d += self.shift
        if self.shape.prox:
            d += self.prox * (w - self.start)
        if self.memory is not None:
            d -= self.memory
        d = self.stepper.direction(d, active)
        if self.mask is not None:
            d = d * self.mask
        w.addcmul_(d, self.rate * active, value=-1.0)

    def record(self, step: object, begin: Callable[[], None]) -> None:
        """Capture a method's own step, unless this one has been; `begin` sets what it reads. None forgets it: it may change."""
        if self.custom.recorded != step:
            self.graph, self.custom.recorded, self.custom.room = None, step, {}
            self.parts.clear()
            if step is not None:
                begin()
                try:
                    self.capture()
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    words = f"the step cannot be recorded ({first_line(error)}); leave it out, or look at no values in the step"
                    raise SettingError("pure", True, words) from error

    def capture(self, beside: torch.cuda.CUDAGraph | None = None) -> None:
        """Record the step as a CUDA graph, in the memory of another one that is never replayed at the same time. The warm-up steps
        may use any values: everything is set again afterwards."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.cursor.zero_()
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.cursor.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(self.graph, pool=None if beside is None else beside.pool()):
            self.step()


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: freeing another graph while one is captured would spoil it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Batched:
    """The engine. `network` makes the form for n clients; `chunk` is how many train together (0: all that fit)."""

    problem: Problem
    network: Callable[[Problem, int], Network]
    chunk: int = 0
    note: str = "clients in one batch"
    capture: bool = False
    # May clients of different sizes be padded to train together? None: yes, unless there are batch statistics.
    padding: bool | None = None
    strict: bool = False  # refuse work that does not train the same here, instead of training one client after another
    stages: dict[Shape, Stage] = field(default_factory=dict)
    trusted: dict[object, bool] = field(default_factory=dict)  # which of the methods' own losses and steps passed a trial
    most: int = 0  # clients that fit into memory; measured on first use

    def __post_init__(self) -> None:
        # Padded samples must not enter batch statistics: unless the network ensures this, clients in a group have equal size.
        normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.problem.module.modules())
        self.whole = normed if self.padding is None else not self.padding

    def groups(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Groups of clients that train together, with similar numbers of steps."""
        size = self.chunk or min(len(jobs), self.room())
        ordered = sorted(jobs, key=lambda job: (len(job.samples), job.epochs), reverse=True)
        while ordered:
            first = ordered[0]
            if self.whole:
                alike = [j for j in ordered if (len(j.samples), j.epochs) == (len(first.samples), first.epochs)]
            else:
                alike = ordered
            group = alike[:size]
            yield group
            taken = {job.client for job in group}
            ordered = [job for job in ordered if job.client not in taken]

    def room(self) -> int:
        """How many clients fit into their share of memory: some vectors each, and a batch of activations. Grouping decides the
        order of sums, so the currently free memory is not considered: the same seed must give the same bytes."""
        if self.most == 0:
            s = self.problem
            each = 4 * (6 * s.layout.d + 4 * min(s.local.batch_size, len(s.x)) * activations(s))
            self.most = max(1, allowance(s.device) // each)
        return self.most

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]:
        if work.custom and jobs and not self.trusts(model, work, jobs, memory):
            if self.strict:
                words = "the method's own loss or step does not train the same in a batch of clients; choose auto or sequential"
                raise SettingError("engine", "batched", words)
            yield from Sequential(self.problem).run(model, work, jobs, memory)
            return
        waiting = list(self.groups(jobs))
        while waiting:
            group = waiting.pop(0)
            try:
                chunk = self.train(model, work, group, memory)
            except torch.cuda.OutOfMemoryError:
                if len(group) == 1:
                    raise MemoryError from None
                self.stages.clear()
                torch.cuda.empty_cache()
                self.chunk = half = -(-len(group) // 2)
                words = f"memory ran out with {len(group)} clients at once, continuing with {half}"
                self.note += f"; {words}"
                warnings.warn(f"{words}, which rounds differently; --chunk {half} makes it the same every time", FedaggWarning, 2)
                waiting = [group[:half], group[half:], *waiting]
                continue
            yield chunk

    def trusts(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> bool:
        """Do the method's own loss and step train the same here as one client after another? Each is tried once."""
        key = tuple(code_of(part) for part in (work.loss, work.step))
        if key not in self.trusted:
            self.trusted[key] = self.tried(key, model, work, jobs, memory)
            if not self.trusted[key] and not self.strict:
                words = "the method's own loss or step does not train the same in a batch of clients: they train one by one"
                self.note += f"; {words}"
                warnings.warn(f"{words}, which is slower", FedaggWarning, 2)
        return self.trusted[key]

    def tried(self, key: object, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> bool:
        """Try a few steps of two clients on both engines. The second has one sample less, unless sizes must be equal. Rates
        at which training diverges would magnify rounding, so lower ones are tried, too."""
        s = self.problem
        local = replace(s.local, batch_size=min(4, s.local.batch_size))
        small = replace(s, module=without_dropout(s.module), local=local, half=False, graph=None)
        pair = [jobs[0], jobs[-1] if len(jobs) > 1 else replace(jobs[0], client=-1)]
        sizes = (6, 6 if self.whole else 5)
        few = [replace(job, samples=job.samples[:size], epochs=min(2, job.epochs)) for job, size in zip(pair, sizes, strict=True)]
        plain = Sequential(small)
        together = replace(self, problem=small, chunk=2, capture=False, stages={}, trusted={key: True})

        def moved(engine: Engine, at: Model, work: Work) -> Tensor:
            found = {j.client: delta for c in engine.run(at, work, few, memory) for j, delta in zip(c.jobs, c.delta, strict=True)}
            return torch.stack([found[job.client] for job in few])

        def alike(work: Work) -> bool:
            expected = moved(plain, model, work)
            noise = moved(plain, replace(model, w=(1 + NUDGE) * model.w), work) - expected
            try:
                apart = moved(together, model, work) - expected
            except Exception:  # a user's function may raise anything for several clients at once
                return False
            bounds = WITHIN * expected.norm(dim=1) + 10 * noise.norm(dim=1) + 1e-6 * min(1.0, float(work.rate.max()))
            return bool((apart.norm(dim=1) <= bounds).all())

        with exact_products():
            return any(alike(replace(work, rate=share * work.rate)) for share in (1.0, 0.1, 0.01))

    def stage(self, work: Work, n: int, batch: int, steps: int) -> Stage:
        """The persistent tensors for this shape, made (and captured) on first use."""
        shape = Shape(
            n, batch, work.mix is not None, work.prox != 0.0, work.subtracts, work.mask is not None, work.trace,
            work.clip != 0.0, work.loss is not None, work.step is not None,
        )  # fmt: skip
        stage = self.stages.get(shape)
        if stage is None or stage.capacity < steps:
            network = VmappedNetwork if shape.loss else self.network
            stage = Stage(shape, network(self.problem, n), max(2 * steps, SCHEDULED) if self.capture else steps, self.problem)
            if self.capture and not work.custom:
                stage.capture()
            self.stages = {shape: stage} if self.problem.device.type == "cpu" else {**self.stages, shape: stage}
        return stage

    def rows(self, jobs: list[Job], epoch: int, steps: int) -> list[int]:
        """How many clients, from the first, go through each step of the epoch: at least up to the last one that makes it. Few
        different numbers, each of which needs memory: n, two thirds of it, and so on."""
        n = len(jobs)
        sizes = [n]
        while sizes[-1] > 1 and 3 * n <= self.room():
            sizes.append(2 * sizes[-1] // 3)
        needed = torch.zeros(steps, dtype=torch.int64)
        for at, job in enumerate(jobs, start=1):
            needed[: self.problem.local.steps(len(job.samples)) if epoch < job.epochs else 0] = at
        return [min(size for size in sizes if size >= least) for least in needed.tolist()]

    def train(self, model: Model, work: Work, jobs: list[Job], memory: Memory | None) -> Chunk:
        s, local, device, n = self.problem, self.problem.local, self.problem.device, len(jobs)
        sizes = [len(job.samples) for job in jobs]
        batch = min(local.batch_size, max(sizes))
        per_epoch = -(-max(sizes) // batch)
        tail = max(sizes) - (per_epoch - 1) * batch
        epochs = max(job.epochs for job in jobs)
        schedule = functools.partial(by_step, jobs, batch, per_epoch, epochs)
        stage = self.stage(work, n, batch, epochs * per_epoch)
        network = stage.network
        # With batch statistics the short last batch needs a separate shape; all clients of the group share it.
        short = self.stage(work, n, tail, epochs) if self.whole and tail < batch else None

        own = work.memory * memory.read([job.client for job in jobs]).to(device) if work.memory and memory is not None else None
        work = work.of([job.position for job in jobs])
        made = torch.tensor([job.epochs for job in jobs], device=device)
        counts = torch.tensor([local.steps(size) for size in sizes], device=device)
        begin = functools.partial(stage.begin, work=work, own=own, steps=(counts * made)[:, None], schedule=schedule)
        if self.capture and work.step is not None and short is None:
            fixed = work.pure and work.loss is None
            stage.record((work.step, own is None) if fixed else None, functools.partial(begin, model))
        stages = [[stage.first(rows) for rows in self.rows(jobs, epoch, per_epoch)] for epoch in range(epochs)]
        behind = torch.zeros(n, device=device)
        if work.behind and work.field is not None:  # a step of length zero gives the loss there
            begin(Model(model.w + work.behind * work.field[0], model.buffers))
            stage.rate.zero_()
            with seeded(network, jobs[0].seed, device):
                self.step(stage, batch)
            behind = stage.loss.clone()
        begin(model)

        rates = torch.zeros(n, local.epochs, device=device)
        first = torch.zeros(n, device=device)
        gradients = torch.zeros(n, local.epochs, s.layout.d, device=device) if work.trace else None
        path = torch.zeros(n, local.epochs + 1, s.layout.d, device=device) if work.trace else None
        with seeded(network, jobs[0].seed, device):
            for epoch in range(epochs):
                rates[:, epoch] = work.rates(epoch, network.w, model.w) * (epoch < made)
                stage.rate.copy_(rates[:, epoch : epoch + 1])
                shift = work.shift(epoch)
                if stage.shift is not None and shift is not None:
                    stage.shift.copy_(shift)
                for step, part in enumerate(stages[epoch]):
                    if short is not None and step == per_epoch - 1:
                        self.hand_over(stage, short, epoch * per_epoch + step)
                    else:
                        self.step(part, tail if step == per_epoch - 1 else batch)
                    if epoch == 0 and step == 0:
                        first = stage.loss.clone()
                if gradients is not None and path is not None and stage.mean is not None:
                    gradients[:, epoch] = stage.mean / counts[:, None]
                    stage.mean.zero_()
                    path[:, epoch + 1 :] = (network.w - model.w)[:, None]

        if gradients is not None and min(job.epochs for job in jobs) < local.epochs:  # a straggler stays where it stopped
            last = torch.minimum(torch.arange(local.epochs, device=device), made[:, None] - 1)
            gradients = gradients[torch.arange(n, device=device)[:, None], last]
        means, held = self.represent(work.represent, network, jobs) if work.represent else (None, None)
        return Chunk(
            jobs=jobs,
            start=model.w,
            delta=network.w - model.w,
            buffers=network.buffers.clone(),
            loss=stage.loss / (counts * made).clamp_min(1),
            first=first,
            behind=behind,
            norm=stage.stepper.norm[:, 0] / (counts * made).clamp_min(1),
            rates=rates,
            steps=counts * made,
            local=local,
            memory=own,
            gradients=gradients,
            path=path,
            classes=means,
            counts=held,
        )

    def step(self, stage: Stage, width: int) -> None:
        """Make one step, replayed if it was captured; `width` is the number of samples that are not padding."""
        if stage.graph is not None and not stage.custom.starts:
            stage.graph.replay()
        else:
            stage.step(width)

    def hand_over(self, stage: Stage, short: Stage, at: int) -> None:
        """Make one step with another batch size: the short stage borrows all lasting state and returns it."""
        short.cursor.zero_()
        short.order[0].copy_(stage.order[at, :, : short.shape.batch])
        short.scale[0].fill_(1.0 / short.shape.batch)
        if stage.drawn is not None and short.drawn is not None:
            short.drawn[0].copy_(stage.drawn[at, :, : short.shape.batch])
        pairs = [
            (stage.network.w, short.network.w),
            (stage.network.buffers, short.network.buffers),
            (stage.loss, short.loss),
            (stage.mean, short.mean),
            (stage.stepper.m, short.stepper.m),
            (stage.stepper.v, short.stepper.v),
            (stage.stepper.count, short.stepper.count),
            (stage.stepper.norm, short.stepper.norm),
        ]
        fixed = [(stage.rate, short.rate), (stage.own, short.own), (stage.prox, short.prox), (stage.start, short.start),
                 (stage.stepper.limit, short.stepper.limit), (stage.shift, short.shift), (stage.mask, short.mask),
                 (stage.memory, short.memory)]  # fmt: skip
        for here, there in (*pairs, *fixed):
            if here is not None and there is not None:
                there.copy_(here)
        short.custom = stage.custom
        short.refresh()
        if short.graph is not None:
            short.graph.replay()
        else:
            short.step()
        for here, there in pairs:
            if here is not None and there is not None:
                here.copy_(there)
        stage.refresh()
        stage.cursor += 1

    @torch.no_grad()
    def represent(self, head: str, network: Network, jobs: list[Job]) -> tuple[Tensor, Tensor]:
        """Per-class means of the head's input: one forward pass, for all clients at once or for each."""
        if isinstance(network, Feeding) and network.feeds(head):
            return self.represent_all(head, network, jobs)
        s, found = self.problem, []
        space = Workspace(s.module, s.layout, s.device)
        # All indices at once: otherwise there would be a wait for the GPU for every client.
        every = torch.cat([job.samples for job in jobs]).to(s.device).split([len(job.samples) for job in jobs])
        for row, samples in enumerate(every):
            space.load(Model(network.w[row], network.buffers[row]))
            found.append(class_means(space, s, head, samples, batch=2048))
        means, counts = (torch.stack(rows) for rows in zip(*found, strict=True))
        return means, counts

    def represent_all(self, head: str, network: Feeding, jobs: list[Job]) -> tuple[Tensor, Tensor]:
        s, n = self.problem, len(jobs)
        order = torch.full((n, max(len(job.samples) for job in jobs)), -1)  # padded
        for row, job in zip(order, jobs, strict=True):
            row[: len(job.samples)] = job.samples
        sums = counts = torch.zeros((), device=s.device)
        for part in order.to(s.device).split(s.local.batch_size, 1):
            at = part.clamp_min(0)
            more, count = class_sums(network.fed(head, s.x[at.reshape(-1)]), s.y[at].where(part >= 0, -1), s.classes)
            sums, counts = sums + more, counts + count
        means = sums / counts.clamp_min(1)[..., None]
        return means.to(network.w.dtype), counts.to(network.w.dtype)


def without_dropout(module: nn.Module) -> nn.Module:
    """A copy without random draws, so that two ways of training it can be compared."""
    module = copy_module(module)
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0
    return module


def code_of(function: object) -> object:
    """What identifies a function: its code, whatever it is bound to."""
    return getattr(getattr(function, "__func__", function), "__code__", function)


def seeded(network: Network, seed: int, device: torch.device) -> AbstractContextManager[None]:
    """Seed the network's random numbers: its own generator, or torch's for a while."""
    if network.generator is None:
        return seeding.seeded_global(seed, device)
    network.generator.manual_seed(seed)
    return nullcontext()


@torch.no_grad()
def activations(problem: Problem) -> int:
    """The number of values that all layers output for one sample."""
    space = Workspace(problem.module, problem.layout, problem.device)
    space.module.eval()
    count = 0

    def add(module: nn.Module, given: object, output: object) -> None:
        nonlocal count
        count += output.numel() if isinstance(output, Tensor) else 0

    for module in space.module.modules():
        module.register_forward_hook(add)
    x = problem.x[:2].clone()  # some layers do not accept a single sample
    space.module(x)
    return count // len(x)


def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def allowance(device: torch.device) -> int:
    """Bytes that clients may take on a device: half of its memory, and at most 4 GiB on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // 2
    try:
        return min(4 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def by_step(jobs: Sequence[Job], batch: int, per_epoch: int, epochs: int, what: Callable[[Job], Tensor]) -> Tensor:
    """The values of a job's samples, (epochs, D_i) or (D_i,), in the order of the steps: (steps, n, batch), 0 for padding."""
    numbers = [what(job) for job in jobs]
    wide = torch.zeros(len(jobs), epochs, per_epoch * batch, dtype=numbers[0].dtype)
    for row, job, values in zip(wide, jobs, numbers, strict=True):
        row[: job.epochs, : len(job.samples)] = values
    return wide.view(len(jobs), epochs * per_epoch, batch).transpose(0, 1).contiguous()


def shares(size: int, batch: int) -> Tensor:
    """The weight of each of a client's samples in the mean loss of its batch; the last batch may be short."""
    weights = torch.full((size,), 1.0 / batch)
    if size % batch:
        weights[size - size % batch :] = 1.0 / (size % batch)
    return weights
