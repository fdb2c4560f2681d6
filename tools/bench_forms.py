"""Time a round of the README's networks and the text models in every form that the batched engine has, beside a strong plain loop.

vmap: `torch.func.vmap` over clients. stacked: layers written out, with torch's kernels alone. fused: the same with Triton's.
The plain loop trains client after client with the data on the device, cuDNN's search for the fastest convolution, the faster
of the two orders of memory, and the faster of tf32 and the row's precision. On a GPU our forms are captured as graphs.

    python tools/bench_forms.py            # on a GPU, about 80 seconds
    python tools/bench_forms.py --tiny     # anywhere: shows that it works, and no more

One Markdown table on standard output: seconds of a round, the median after one round to warm up.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedagg.bench import ours
from fedagg.bench.task import TEXT, Task
from fedagg.engines import batched, choose
from fedagg.engines.base import set_precision
from fedagg.errors import first_line

# The README's jobs: model, samples of a client, precision.
JOBS = (
    ("linear", 600, "tf32"), ("mnist-cnn", 600, "tf32"), ("cifar10-cnn", 500, "tf32"), ("resnet18", 500, "bf16"),
    ("char-lstm", 96, "tf32"), ("char-transformer", 96, "tf32"),
)  # fmt: skip
FORMS = ("plain loop", "vmap", "stacked", "fused")
ENOUGH = 3.0  # seconds of timed rounds, after which no further one is begun


class Enough(Exception):
    """Timed for long enough."""


class Clock:
    """Hears of every round's end. The first round is for warming up: it compiles, captures and searches."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds, self.ends = device, rounds, list[float]()

    def tick(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ends.append(time.perf_counter())
        if len(self.ends) > self.rounds or (len(self.ends) > 1 and self.ends[-1] - self.ends[0] > ENOUGH):
            raise Enough

    @property
    def seconds(self) -> float:
        return statistics.median(b - a for a, b in zip(self.ends, self.ends[1:], strict=False))


def plain(task: Task, tick: Callable[[], None]) -> None:
    """A loop over clients as a careful engineer writes it."""
    device = torch.device(task.device)
    torch.backends.cudnn.benchmark = True
    set_precision(task.precision)
    clients = {i: tuple(part.to(device) for part in task.client(i)) for t in range(task.rounds + 1) for i in task.participants(t)}
    model = task.module().to(device).train()
    start = [p.detach().clone() for p in (*model.parameters(), *model.buffers())]
    orders = [torch.contiguous_format, torch.channels_last] if task.model not in ("linear", *TEXT) else [torch.contiguous_format]
    taken = {}
    for order in orders:
        for precision in dict.fromkeys(["tf32", task.precision]):
            model, x, y = model.to(memory_format=order), *next(iter(clients.values()))
            for _ in range(2):  # the first time cuDNN searches
                begun = time.perf_counter()
                train(model, x.to(memory_format=order), y, replace(task, epochs=1, precision=precision))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                taken[order, precision] = time.perf_counter() - begun
    best, precision = min(taken, key=lambda form: taken[form])
    task, model = replace(task, precision=precision), model.to(memory_format=best)
    clients = {i: (x.to(memory_format=best), y) for i, (x, y) in clients.items()}
    held = (*model.parameters(), *model.buffers())
    with torch.no_grad():
        for t in range(task.rounds + 1):
            sums = [torch.zeros_like(s, dtype=torch.float32) for s in start]
            for i in task.participants(t):
                for tensor, value in zip(held, start, strict=True):
                    tensor.copy_(value)
                with torch.enable_grad():
                    train(model, *clients[i], task)
                for total, tensor in zip(sums, held, strict=True):
                    total.add_(tensor)
            start = [total.div_(task.per_round).to(s.dtype) for total, s in zip(sums, start, strict=True)]
            tick()


def train(model: nn.Module, x: Tensor, y: Tensor, task: Task) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, foreach=True)
    for _ in range(task.epochs):
        for batch in torch.randperm(len(x), device=x.device).split(task.batch_size):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=task.precision == "bf16"):
                loss = functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()


@contextlib.contextmanager
def form(name: str) -> Iterator[None]:
    """Have the batched engine take this form, whatever it would pick."""
    with contextlib.ExitStack() as stack:
        if name == "vmap":
            stack.enter_context(mock.patch.object(choose, "written", return_value=False))
        if name != "fused":
            for module in (choose, batched):
                stack.enter_context(mock.patch.object(module, "has_triton", return_value=False))
        yield


def timed(name: str, task: Task) -> str:
    """Seconds of a round, or why there are none."""
    device = torch.device(task.device)
    if name == "fused" and (device.type != "cuda" or not batched.has_triton()):
        return "-"
    clock = Clock(device, task.rounds)
    try:
        with form(name), contextlib.suppress(Enough):
            if name == "plain loop":
                plain(task, clock.tick)
            else:
                ours.run("batched", task, clock.tick)
    except (RuntimeError, MemoryError) as error:  # torch's vmap does not know every layer in every precision
        print(f"{task.model}, {name}: {first_line(error)}", file=sys.stderr)
        return "fails"
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return f"{clock.seconds:.4g}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a few clients with a few samples: shows that it works")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds at most")
    parser.add_argument("--models", default=",".join(dict.fromkeys(model for model, *_ in JOBS)))
    given = parser.parse_args(arguments)
    print(f"| network | precision | {' | '.join(FORMS)} | plain loop / fused |")
    print("|---|---|" + "---:|" * (len(FORMS) + 1))
    begun = time.perf_counter()
    for model, samples, precision in JOBS:
        if model not in given.models.split(","):
            continue
        task = Task(model=model, samples=samples, rounds=given.rounds, device=given.device, precision=precision)
        if given.tiny:
            task = replace(task, clients=4, participation=0.5, samples=8, epochs=1, batch_size=4, rounds=1)
        found = {name: timed(name, task) for name in FORMS}
        try:
            ratio = f"{float(found['plain loop']) / float(found['fused']):.1f}"
        except ValueError:
            ratio = "-"
        print(f"| {model} | {precision} | {' | '.join(found.values())} | {ratio} |", flush=True)
    where = torch.cuda.get_device_name(given.device) if given.device.startswith("cuda") else "CPU"
    size = "tiny" if given.tiny else "20 of 100 clients, 3 epochs in batches of 32"
    print(f"\nSeconds of a round; {size}; {where}, torch {torch.__version__}; {time.perf_counter() - begun:.0f} s in all.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
