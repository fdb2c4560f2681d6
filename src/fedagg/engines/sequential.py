"""The plain engine: one client after another, one mini-batch after another. The others are tested against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedagg import seeding
from fedagg.augment import augmented
from fedagg.engines.base import Problem, Stepper, class_means
from fedagg.flat import Model, Workspace
from fedagg.work import Chunk, Client, Job, Learner, Memory, State, Work


class Sequential:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.space = Workspace(problem.module, problem.layout, problem.device)
        self.note = "one client at a time"

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]:
        for job in jobs:
            own = memory.read([job.client])[0].to(self.problem.device) if memory and work.memory else None
            with seeding.seeded_global(job.seed, self.problem.device):
                yield self.client(model, work, job, own)

    @torch.no_grad()
    def client(self, model: Model, work: Work, job: Job, own: Tensor | None) -> Chunk:
        s, space, local = self.problem, self.space, self.problem.local
        space.load(model)
        space.module.train()
        stepper = Stepper(local, space.w, work.clip)
        work = work.of([job.position])
        own = None if own is None else work.memory * own
        rates, losses = torch.zeros(local.epochs, device=s.device), torch.zeros((), device=s.device)
        first = behind = torch.zeros((), device=s.device)
        gradients = torch.zeros(local.epochs, s.layout.d, device=s.device) if work.trace else None
        path = torch.zeros(local.epochs + 1, s.layout.d, device=s.device) if work.trace else None
        order, steps, state = job.order().to(s.device), 0, State()
        drawn = job.drawn(local.augment).to(s.device) if local.augment != "none" else None

        if work.behind and work.field is not None:
            with torch.random.fork_rng(devices=[s.device.index or 0] if s.device.type == "cuda" else []):  # repeat the same dropout
                space.w += work.behind * work.field[0]
                batch = order[0, : local.batch_size]
                x = s.x[batch] if drawn is None else augmented(s.x[batch], drawn[0, : local.batch_size])
                with s.rounding():
                    behind = s.loss(space.module(x), s.y[batch]).mean()
                space.load(model)

        planned = torch.tensor(job.epochs * local.steps(len(job.samples)), device=s.device)
        for epoch in range(job.epochs):
            rate = rates[epoch] = work.rates(epoch, space.w[None], model.w)[0]
            shift = work.shift(epoch)
            batches = order[epoch].split(local.batch_size)
            draws = drawn[epoch].split(local.batch_size) if drawn is not None else [None] * len(batches)
            for batch, draw in zip(batches, draws, strict=True):
                x = s.x[batch] if draw is None else augmented(s.x[batch], draw)
                gradient = MiniBatch(s, space, stepper, work, Client(model.w, own, shift, planned), x, s.y[batch])
                if work.step is not None:
                    w, state = gradient.walk(rate, state)
                    space.w.copy_(w)
                else:
                    d = work.own * gradient(space.w)
                    if shift is not None:
                        d = d + shift
                    if work.prox:
                        d = d + work.prox * (space.w - model.w)
                    if own is not None and work.subtracts:
                        d = d - own
                    d = stepper.direction(d)
                    if work.mask is not None:
                        d = d * work.mask
                    space.w -= rate * d
                losses += gradient.loss
                if steps == 0:
                    first = losses.clone()
                if gradients is not None:
                    gradients[epoch] += gradient.first / len(batches)
                steps += 1
            if path is not None:
                path[epoch + 1 :] = space.w - model.w
        if gradients is not None:
            gradients[job.epochs :] = gradients[job.epochs - 1]  # a straggler stays where it stopped

        means = counts = None
        if work.represent:
            means, counts = class_means(space, s, work.represent, job.samples.to(s.device), batch=512)
        return Chunk(
            jobs=[job],
            start=model.w,
            delta=(space.w - model.w)[None],
            buffers=space.statistics()[None],
            loss=losses[None] / max(steps, 1),
            first=first[None],
            behind=behind[None],
            norm=stepper.norm / max(steps, 1),
            rates=rates[None],
            steps=torch.tensor([steps], device=s.device),
            local=local,
            memory=None if own is None else own[None],
            gradients=None if gradients is None else gradients[None],
            path=None if path is None else path[None],
            classes=None if means is None else means[None],
            counts=None if counts is None else counts[None],
        )


class MiniBatch:
    """One mini-batch of one client: called with weights (d,), it returns the gradient there."""

    def __init__(
        self, problem: Problem, space: Workspace, stepper: Stepper, work: Work, client: Client, x: Tensor, y: Tensor
    ) -> None:
        self.problem, self.space, self.stepper, self.work, self.client, self.x, self.y = problem, space, stepper, work, client, x, y
        self.called = False

    def __call__(self, w: Tensor) -> Tensor:
        space, again = self.space, self.called
        statistics = space.statistics() if again else None
        if w is not space.w:
            space.w.copy_(w)
        loss = self.client.loss = self.backward()
        if statistics is not None:  # a second gradient on the batch must not change statistics
            space.layout.restore(statistics, dict(space.module.named_buffers()))
        if not again:  # the client reports the first loss and gradient
            self.called, self.loss, self.first = True, loss, space.g.clone() if self.work.trace else space.g
        return self.stepper.gradient(space.g, space.w)

    @torch.enable_grad()
    def backward(self) -> Tensor:
        """Compute the gradient of the mean loss at the workspace's weights."""
        s, space = self.problem, self.space
        if self.work.loss is None:
            space.g.zero_()
            with s.rounding():
                loss = s.loss(space.module(self.x), self.y).mean()
            loss.backward()
            return loss.detach()
        w = space.w.detach().requires_grad_()
        buffers = dict(space.module.named_buffers())
        learner = Learner(**vars(self.client), module=space.module, layout=s.layout, w=w, buffers=buffers, criterion=s.loss)
        with s.rounding():
            loss = learner.losses(self.work.loss, self.x, self.y).mean()
        space.g.copy_(torch.autograd.grad(loss, w)[0])
        return loss.detach()

    def walk(self, rate: Tensor, state: State) -> tuple[Tensor, State]:
        """Make the method's own step; masked weights do not move."""
        assert self.work.step is not None
        before = self.space.w.clone()
        w, state = self.work.step(self.client, before, lambda at: self(at).clone(), rate, state)
        return (w if self.work.mask is None else torch.where(self.work.mask > 0, w, before)), state
