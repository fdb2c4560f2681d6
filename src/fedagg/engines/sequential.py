"""The plain engine: one client after another, one mini-batch after another. The others are tested against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedagg import seeding
from fedagg.augment import augmented
from fedagg.engines.base import Setting, Stepper, class_means
from fedagg.flat import Model, Workspace
from fedagg.work import Chunk, Job, Memory, Work


class Sequential:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.space = Workspace(setting.module, setting.layout, setting.device)
        self.note = "one client at a time"

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]:
        for job in jobs:
            own = memory.read([job.client])[0].to(self.setting.device) if memory and work.memory else None
            with seeding.seeded_global(job.seed, self.setting.device):
                yield self.client(model, work, job, own)

    def client(self, model: Model, work: Work, job: Job, own: Tensor | None) -> Chunk:
        s, space, local = self.setting, self.space, self.setting.local
        space.load(model)
        space.module.train()
        stepper = Stepper(local, space.w)
        high = work.high[job.position] if isinstance(work.high, Tensor) else work.high
        rates, losses = torch.zeros(local.epochs, device=s.device), torch.zeros((), device=s.device)
        first = torch.zeros((), device=s.device)
        gradients = torch.zeros(local.epochs, s.layout.d, device=s.device) if work.trace else None
        path = torch.zeros(local.epochs + 1, s.layout.d, device=s.device) if work.trace else None
        order, steps = job.order().to(s.device), 0
        drawn = job.drawn(local.augment).to(s.device) if local.augment != "none" else None

        for epoch in range(job.epochs):
            rate = rates[epoch] = work.rates(epoch, space.w[None], model.w, high)[0]
            shift = work.shift(epoch)
            batches = order[epoch].split(local.batch_size)
            draws = drawn[epoch].split(local.batch_size) if drawn is not None else [None] * len(batches)
            for batch, draw in zip(batches, draws, strict=True):
                space.g.zero_()
                x = s.x[batch] if draw is None else augmented(s.x[batch], draw)
                with s.rounding():
                    loss = s.loss(space.module(x), s.y[batch]).mean()
                loss.backward()
                losses += loss.detach()
                first = losses.clone() if steps == 0 else first
                with torch.no_grad():
                    if gradients is not None:
                        gradients[epoch] += space.g / len(batches)
                    g = stepper.gradient(space.g, space.w)
                    d = work.own * g
                    if shift is not None:
                        d = d + shift
                    if work.prox:
                        d = d + work.prox * (space.w - model.w)
                    if own is not None:
                        d = d - own
                    d = stepper.direction(d)
                    if work.mask is not None:
                        d = d * work.mask
                    space.w -= rate * d
                steps += 1
            if path is not None:
                path[epoch + 1 :] = space.w - model.w
        if gradients is not None:
            gradients[job.epochs :] = gradients[job.epochs - 1]  # where a straggler stops, it stays

        means = counts = None
        if work.represent:
            means, counts = class_means(space, s, work.represent, job.samples.to(s.device), batch=512)
        return Chunk(
            jobs=[job],
            delta=(space.w - model.w)[None],
            buffers=space.statistics()[None],
            loss=losses[None] / max(steps, 1),
            first=first[None],
            rates=rates[None],
            steps=torch.tensor([steps], device=s.device),
            local=local,
            memory=None if own is None else own[None],
            gradients=None if gradients is None else gradients[None],
            path=None if path is None else path[None],
            classes=None if means is None else means[None],
            counts=None if counts is None else counts[None],
        )
