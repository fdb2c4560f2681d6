"""A run's life, from top to bottom: configuration, data, clients, rounds, record."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import fedagg
from fedagg import algorithms, checkpoint, checks, engines, interrupt, models, partition, record, seeding
from fedagg.checkpoint import Checkpoint
from fedagg.clients import Clients, NoClients
from fedagg.config import Config
from fedagg.data import Dataset, load
from fedagg.engines.base import Local, Loss, Setting, Work, cross_entropy
from fedagg.engines.distributed import Team
from fedagg.errors import FedaggError, SettingError
from fedagg.evaluate import Evaluator
from fedagg.faults import Faults
from fedagg.flat import Layout, Model
from fedagg.memory import ClientMemory
from fedagg.quantize import Downlink

CHECKPOINT_SECONDS = 45.0
CHECKPOINT_SHARE = 0.05  # of a run's time may go into checkpoints that nobody asked for by number
MEMORY_PART = 256 << 20  # bytes of what clients remember that a checkpoint takes at a time

P = ParamSpec("P")
R = TypeVar("R")


class Callback(Protocol):
    """Watches a run: progress displays, trackers."""

    def started(self, config: Config, done: int) -> None: ...

    def round_done(self, row: dict[str, Any]) -> None: ...

    def finished(self, result: Result) -> None: ...


@dataclass
class Result:
    """What a run leaves behind."""

    config: Config
    history: list[dict[str, Any]]
    model: nn.Module
    accuracy: float
    best_accuracy: float
    loss: float
    seconds: float
    run: Path | None = None
    interrupted: bool = False
    figures: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        c = self.config
        return {
            "algorithm": c.algorithm,
            "variant": c.variant,
            "dataset": c.dataset,
            "model": c.model,
            "partition": c.partition,
            "seed": c.seed,
            **({"validation": c.validation} if c.validation else {}),
            "rounds": len(self.history),
            "accuracy": finite(self.accuracy),
            "best_accuracy": finite(self.best_accuracy),
            "loss": finite(self.loss),
            "seconds": round(self.seconds, 3),
            "run": str(self.run) if self.run else None,
            **({"interrupted": True} if self.interrupted else {}),
            **self.figures,
        }


def finite(value: float) -> float | None:
    """JSON has no infinity, and nothing that is not a number."""
    return value if math.isfinite(value) else None


def guarded(function: Callable[P, R]) -> Callable[P, R]:
    """Memory that runs out is the user's to mend, so it is one line like every other error of the kind; and torch has as many
    threads after a run as before."""

    @functools.wraps(function)
    def careful(*args: P.args, **kwargs: P.kwargs) -> R:
        threads = torch.get_num_threads()
        try:
            return function(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            # torch says so in a class of its own on a GPU, and only in words on the CPU
            if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
                raise
            folder = kwargs.get("resume") or kwargs.get("out")
            begun = folder is not None and (Path(str(folder)) / "config.toml").exists()
            again = f", then go on with --resume {shlex.quote(str(folder))}" if begun else ""
        finally:
            torch.set_num_threads(threads)
        raise FedaggError(f"out of memory; lower --chunk, --batch-size or --participation, or the model{again}")

    return careful


@guarded
def run(
    config: Config | None = None,
    *,
    data: Dataset | None = None,
    model: nn.Module | str | None = None,
    parts: Sequence[Any] | None = None,
    loss: Loss = cross_entropy,
    preset: str | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    wrap: Callable[[engines.Engine], engines.Engine] | None = None,
    **settings: Any,
) -> Result:
    """Train one federated model.

    Args:
        config: a complete configuration, which `settings` change; else `settings` and `preset` make one. Keyword names are the
            command line's options.
        data: your own data in place of a named set.
        model: a name, or your own module.
        parts: your own partition, an array of indices (or a mask) per client.
        loss: per-sample loss of (output, target), (B,); cross-entropy by default.
        out: the run folder; without one nothing is written.
        resume: a run folder to go on with.
        callbacks: watch the run.
        wrap: put an engine of yours around the run's own, to see (or change) what every client does.
    """
    if resume is not None and out is not None:
        raise SettingError("out", str(out), f"a run goes on in its own folder, {resume}; leave out away")
    if isinstance(model, str):
        settings["model"], model = model, None
    checks.followers(callbacks)
    config = checks.agreed(config, checks.given(data, model, parts), preset, settings)
    device = pick_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)

    given = data = data or load(config.dataset, config.data_dir)
    if config.validation and parts is not None:
        raise SettingError("validation", config.validation, "parts name samples of the whole training set; give one of the two")
    data = data.held_back(config.validation, config.seed)
    data = data.normalized() if config.normalize else data
    if config.augment != "none":
        checks.images(config.augment, data)
    parts = checks.indices(parts, data) if parts is not None else deal(config, data)
    module = copy.deepcopy(model) if model is not None else build_model(config, data)
    checks.try_out(config, module, loss, data, parts, device)
    layout, finished = Layout(module), copy.deepcopy(module)

    local = client_options(config)
    setting = Setting(module, data.x_train, data.y_train, data.classes, local, device, loss)
    algorithm = algorithms.build(config.method, config.model_dump())
    now = layout.pack(module).to(device)
    algorithm.start(now, module, layout)
    engine = engines.build(config.engine, setting, config)
    team: Team | None = getattr(engine, "team", None)
    follows = team is not None and team.rank > 0  # the first process of a distributed run keeps the record
    if team is not None and config.robust != "mean":
        raise SettingError("robust", config.robust, "looks at all clients together: choose an engine other than distributed")
    engine = engine if wrap is None else wrap(engine)
    evaluator = Evaluator(setting, data.x_test, data.y_test)
    samples = Samples(parts)
    memory = None
    if algorithm.remembers:
        memory = ClientMemory(len(samples), layout.d, spills(config, len(samples), layout.d), device)
    downlink = Downlink(config.downlink_bits, config.seed)
    faults = Faults(
        seed=config.seed,
        dropout=config.dropout_rate,
        straggler=config.straggler_rate,
        corrupt_rate=config.corrupt_rate,
        flip=config.flip_rate,
        scale=config.flip_scale,
    )

    def participants(t: int) -> Clients:
        return Clients(
            engine=engine,
            t=t,
            ids=seeding.participants(config.seed, t, config.clients, config.per_round),
            samples=samples,
            total=config.clients,
            local=local,
            seed=config.seed,
            model=now,
            memory=memory,
            remember=algorithm.remember,
            faults=faults,
            robust=config.robust,
            trim=config.trim,
            downlink=downlink,
            carried=algorithm.state,
            team=team,
        )

    identity = fingerprint(config, given, parts, module, loss)
    environment = record.environment(device, engine.note, fedagg.__version__)
    if follows:
        book, callbacks = record.Record(None, config, environment), ()
        book.resumed = checkpoint.latest(Path(resume) / "checkpoints") if resume is not None else None
    elif resume is not None:
        book = record.Record.resume(Path(resume), config, identity)
    else:
        book = record.Record(Path(out) if out is not None else None, config, environment)
    with book:
        begin, average = now, now.w
        settled = freeze(0, now, average, algorithm, downlink)
        done, before = 0, 0.0
        if book.resumed is not None:
            checkpoint.same_form(settled.tensors, book.resumed.tensors)
            settled, done, before = book.resumed, book.resumed.round, float(book.resumed.facts.get("seconds", 0.0))
            now, average = revive(settled, algorithm, downlink, device)
            if memory is not None:
                recall(settled, memory, len(samples))
        try:
            for callback in callbacks:
                callback.started(config, done)
        except BaseException:
            book.withdraw()
            raise

        def shown() -> Model:
            return Model(average, now.buffers) if config.average else algorithm.reported(now)

        def save() -> None:
            facts = {"seconds": before + time.perf_counter() - started, "identity": identity}
            book.checkpoint(Checkpoint(done, settled.tensors, facts, memorised(memory)))

        started, saved, took, interrupted = time.perf_counter(), time.perf_counter(), 0.0, False
        try:
            algorithm.prepare(begin, participants, config.rounds)
            for t in range(done, config.rounds):
                clock = time.perf_counter()
                clients, was, known = participants(t), now, dict(algorithm.state)
                try:
                    now = algorithm.round(now, clients)
                    unchanged = clients.outcome is None and torch.equal(was.w, now.w)
                except NoClients:
                    unchanged = True
                    algorithm.state |= known  # what an earlier pass of the round taught, too, is as it was
                average = averaged(average, now, t)
                row = describe(t, clients, algorithm, unchanged)
                if not follows and ((t + 1) % config.eval_every == 0 or t + 1 == config.rounds):
                    row["loss"], row["accuracy"] = evaluator(shown())
                row["seconds"] = round(time.perf_counter() - clock, 6)
                with interrupt.held_back():  # a round is booked whole or not at all
                    book.round(row, describe_clients(t, clients))
                    if memory is not None:
                        memory.commit()
                    done, settled = t + 1, freeze(t + 1, now, average, algorithm, downlink)
                for callback in callbacks:
                    callback.round_done(row)
                clock = time.perf_counter()
                if config.checkpoint_every:
                    due = done % config.checkpoint_every == 0
                else:
                    due = clock - saved > max(CHECKPOINT_SECONDS, took / CHECKPOINT_SHARE)
                if due and done < config.rounds:
                    save()
                    saved = time.perf_counter()
                    took = saved - clock
        except KeyboardInterrupt as stop:
            interrupted = True
            if str(stop):
                warnings.warn(str(stop), stacklevel=2)
            now, average = revive(settled, algorithm, downlink, device)  # drop what the round had begun
        except BaseException:
            if not book.history:  # there is nothing to go on with
                book.withdraw()
            raise
        seconds = before + time.perf_counter() - started
        if done:
            save()
        shown_module = layout.unpack(shown().to(torch.device("cpu")), finished)
        book.model(shown_module)
        causes = {cause for row in book.history for cause in row["causes"]} - {"dropped out"}
        if causes and all(row.get("unchanged") for row in book.history):
            words = f"not one client was valid in any round ({', '.join(sorted(causes))}): the model is as it was"
            warnings.warn(words, stacklevel=2)

        scored = [row for row in book.history if "accuracy" in row]
        if scored and not math.isfinite(scored[-1]["loss"]):
            warnings.warn("the loss of the model is not finite: lower lr, or server_lr where the method has one", stacklevel=2)

        figures: dict[str, float] = {}
        fit = algorithm.personalised()
        if fit is not None and not interrupted:
            personal = personal_accuracy(engine, participants(config.rounds), fit, now, evaluator)
            figures |= {"personal_accuracy": personal} if math.isfinite(personal) else {}
        result = Result(
            config=config,
            history=book.history,
            model=shown_module,
            accuracy=scored[-1]["accuracy"] if scored else math.nan,
            best_accuracy=max((row["accuracy"] for row in scored), default=math.nan),
            loss=scored[-1]["loss"] if scored else math.nan,
            seconds=seconds,
            run=book.folder,
            interrupted=interrupted,
            figures=figures,
        )
        book.result(result.summary())
    if team is not None and not interrupted:
        team.part()
    for callback in callbacks:
        callback.finished(result)
    return result


def client_options(config: Config) -> Local:
    """How the configuration has clients take a step."""
    return Local(
        epochs=config.epochs,
        batch_size=config.batch_size,
        optimizer=config.client_optimizer,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        clip=config.clip,
        augment=config.augment,
    )


class Samples:
    """A client's sample indices as a tensor, made when asked for: a million clients cost their arrays and no more."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __call__(self, client: int) -> Tensor:
        return torch.as_tensor(np.asarray(self.parts[client]), dtype=torch.int64)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError("device", name, "choose auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError("device", name, "torch sees no CUDA device here; choose cpu")
    if device.type not in ("cpu", "cuda"):
        raise SettingError("device", name, "choose auto, cpu, cuda or cuda:N")
    if name == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def deal(config: Config, data: Dataset) -> Sequence[Any]:
    if config.partition == "custom":
        raise SettingError("partition", "custom", "give your own partition from Python as parts=[...]")
    return partition.partition(
        config.partition,
        data.y_train.numpy(),
        config.clients,
        config.seed,
        sigma=config.sigma,
        per_client=config.shards,
    )


def build_model(config: Config, data: Dataset) -> nn.Module:
    if config.model == "custom":
        raise SettingError("model", "custom", "give your own module from Python as model=...")
    seed = seeding.derive(config.seed, "model")
    return models.build(config.model, data.shape, data.classes, norm=config.norm, dropout=config.dropout, seed=seed)


def spills(config: Config, clients: int, d: int) -> bool:
    """Do per-client vectors live on disk? When they could take more memory than they should (4 GiB)."""
    return config.client_memory == "disk" or (config.client_memory == "auto" and clients * d * 4 > 4 << 30)


def describe(t: int, clients: Clients, algorithm: algorithms.Algorithm, unchanged: bool) -> dict[str, Any]:
    """A line of metrics.jsonl. In a round that left the model as it was, the algorithm has no figures of its own."""
    row: dict[str, Any] = {"round": t + 1}
    out = clients.outcome
    if out is not None:
        row["train_loss"] = float(out.theta @ out.loss)
        did = [clients.stragglers.get(client, clients.epochs) for client in out.clients]
        for epoch, rates in enumerate(out.rates.T.tolist()):
            made = [rate for rate, epochs in zip(rates, did, strict=True) if epoch < epochs] or [0.0]
            for name, value in (("mean", sum(made) / len(made)), ("min", min(made)), ("max", max(made))):
                row.setdefault(f"rate_{name}", []).append(value)
        row["drift"], row["drift_max"] = float(out.norm2.sqrt().mean()), float(out.norm2.sqrt().max())
    figures = {name: value for name, value in algorithm.figures().items() if math.isfinite(value)}
    return row | {
        "passes": clients.passes,
        "participants": len(clients.ids),
        "left_out": len(clients.left_out),
        "causes": sorted(set(clients.left_out.values())),
        "stragglers": len(clients.stragglers),
        "samples": clients.samples_seen,
        "bytes_up": clients.bytes_up,
        "bytes_down": clients.bytes_down,
        **({"unchanged": True} if unchanged else figures),
    }


def describe_clients(t: int, clients: Clients) -> dict[str, Any]:
    """A line of clients.jsonl: what each participant did."""
    row: dict[str, Any] = {"round": t + 1, "left_out": {str(k): v for k, v in sorted(clients.left_out.items())}}
    if clients.stragglers:
        row["epochs"] = {str(k): v for k, v in sorted(clients.stragglers.items())}
    if hostile := [client for client in clients.ids if clients.faults.hostile(client)]:
        row["hostile"] = hostile
    out = clients.outcome
    if out is not None:
        row |= {
            "clients": out.clients,
            "rates": [[float(f"{r:.6g}") for r in rates] for rates in out.rates.tolist()],
            "loss": [float(f"{v:.6g}") for v in out.loss.tolist()],
            "moved": [float(f"{v:.6g}") for v in out.norm2.sqrt().tolist()],
        }
    return row


def fingerprint(config: Config, data: Dataset, parts: Sequence[Any], module: nn.Module, loss: Loss) -> dict[str, str]:
    """What the configuration does not say: the model's form, and what was given from Python."""

    def digest(pieces: Iterable[Any]) -> str:
        total = hashlib.blake2b(digest_size=16)
        for piece in pieces:
            total.update(np.ascontiguousarray(piece).data if isinstance(piece, np.ndarray) else repr(piece).encode())
        return total.hexdigest()

    layout = Layout(module)
    form: list[Any] = [layout.parameters, [(name, shape) for name, shape, _ in layout.buffers]]
    form += [p.detach().cpu().numpy() for p in module.parameters() if not p.requires_grad]  # a checkpoint does not hold these
    known = {"model": digest(form if config.model != "custom" else [*form, repr(module)]), "loss": checks.name_of(loss)}
    if config.dataset == "custom":
        samples = [data.x_train.numpy(), data.y_train.numpy(), data.x_test.numpy(), data.y_test.numpy()]
        known["data"] = digest([data.shape, *samples])
    if config.partition == "custom":
        known["parts"] = digest(piece for part in parts for piece in (len(part), np.asarray(part, dtype=np.int64)))
    return known


def freeze(done: int, now: Model, average: Tensor, algorithm: algorithms.Algorithm, downlink: Downlink) -> Checkpoint:
    """All that the server carries into the next round. Nothing is copied: rounds make new tensors and change none."""
    tensors = {"w": now.w, "buffers": now.buffers, "average": average}
    tensors |= {f"state/{name}": tensor for name, tensor in algorithm.state.items()}
    if downlink.error is not None:
        tensors["downlink"] = downlink.error
    return Checkpoint(done, tensors, {})


def revive(saved: Checkpoint, algorithm: algorithms.Algorithm, downlink: Downlink, device: torch.device) -> tuple[Model, Tensor]:
    """Back from `freeze`, onto the device. Numbers of the state in double precision stay on the CPU, where they are used."""
    t = saved.tensors
    downlink.error = t.get("downlink")
    for name, tensor in t.items():
        if name.startswith("state/"):
            algorithm.state[name.removeprefix("state/")] = tensor if tensor.dtype == torch.float64 else tensor.to(device)
    return Model(t["w"].to(device), t["buffers"].to(device)), t["average"].to(device)


def memorised(memory: ClientMemory | None) -> Iterator[dict[str, Tensor]]:
    """What the clients remember, for a checkpoint; some clients at a time, for all of it may be more than memory holds."""
    if memory is not None:
        ids, some = sorted(memory.rows), max(1, MEMORY_PART // (4 * memory.d))
        for at in range(0, len(ids), some):
            yield {"ids": torch.tensor(ids[at : at + some]), "rows": memory.read(ids[at : at + some])}


def recall(saved: Checkpoint, memory: ClientMemory, clients: int) -> None:
    """Back from `memorised`."""
    for part in saved.parts:
        ids, rows = part.get("ids", torch.zeros(0)), part.get("rows", torch.zeros(0))
        if ids.ndim != 1 or rows.shape != (len(ids), memory.d) or any(not 0 <= client < clients for client in ids.tolist()):
            raise FedaggError(f"checkpoint: what its clients remember is not {memory.d} numbers for some of {clients} clients")
        for client, row in zip(ids.tolist(), rows, strict=True):
            memory.write(int(client), row)


def averaged(average: Tensor, now: Model, t: int) -> Tensor:
    """The running average of the global models with that of round t: later ones weigh more (Shamir, Zhang 2013, with η = 8)."""
    return average + 9.0 / (t + 9.0) * (now.w - average)


def personal_accuracy(engine: engines.Engine, clients: Clients, fit: Work, model: Model, evaluator: Evaluator) -> float:
    """Mean over some clients of the accuracy after fitting the model to each, weighted by the client's own labels; not a
    number where all drop out. A client whose labels are none of the test set's cannot be scored, and is left out."""
    scores = torch.zeros(2, dtype=torch.float64)  # sum and count
    for chunk in engine.run(model, fit, clients.jobs(), None):
        for job, delta, buffers in zip(chunk.jobs, chunk.delta, chunk.buffers, strict=True):
            score = evaluator.personal(Model(model.w + delta, buffers), job.samples)
            if not math.isnan(score):
                scores += torch.tensor([score, 1.0])
    total, count = (scores if clients.team is None else clients.team.sum(scores)).tolist()
    return float(total / count) if count else math.nan
