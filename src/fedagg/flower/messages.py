"""A round's work as a Flower message to one node, and the node's answer; written and read here.

The model is the only ArrayRecord of a message and comes back under the same keys, as Flower's own mods for clipping and noise
expect. Everything else is one ConfigRecord on the way out; on the way back it is a MetricRecord and, if a method asks for more than
the update, a ConfigRecord.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor, nn

from fedagg.flat import Layout, Model
from fedagg.meanfield import bound_rates
from fedagg.quantize import EXACT, Packed
from fedagg.work import Chunk, ClientOptions, Job, Report, Work

LOCAL = ("epochs", "batch_size", "momentum", "weight_decay", "clip")
ABSURD = 1e30  # training cannot continue from a loss this large
MOST_SAMPLES = 2**40  # no node holds as many samples
SLACK = 1e-4  # tolerance for a rate: nodes work in single precision, on various devices


class BadAnswer(Exception):
    """An answer that cannot be used, with a short reason for the record."""


@dataclass(frozen=True)
class Order:
    """What a node is asked to do."""

    model: Model
    work: Work
    local: ClientOptions
    round: int
    step: int  # the pass within the round
    seed: int
    run: int  # identifies the run, for nodes that remember
    accepted: tuple[int, int]  # round and pass of the node's last accepted answer
    method: str
    options: dict[str, Any]
    custom: tuple[str, ...] = ()  # which of `loss` and `step` are the method's own
    epochs: int = 0  # how many of the epochs in `local` the node is to do
    test: bool = False  # test the model before training it?
    secure: bool = False  # under secure aggregation?
    longest: float | None = None  # the largest length of the answer, for secure aggregation with noise


def arrays(model: Model) -> ArrayRecord:
    vectors = {"weights": model.w, "buffers": model.buffers}
    return ArrayRecord({k: Array(v.detach().cpu().float().contiguous().numpy()) for k, v in vectors.items() if v.numel()})


def read_model(record: ArrayRecord, layout: Layout) -> Model:
    """Raises BadAnswer unless the record holds vectors of this model's sizes."""
    return Model(vector(record, "weights", layout.d), vector(record, "buffers", layout.b))


def vector(record: ArrayRecord, key: str, size: int) -> Tensor:
    if size == 0:
        return torch.zeros(0)
    if key not in record:
        raise BadAnswer(f"sent no {key}")
    try:
        # `numpy()` reads the .npy format with pickling disabled; anything unreadable raises an error.
        value = record[key].numpy()
    except Exception:
        raise BadAnswer(f"sent {key} that cannot be read") from None
    # An archive of arrays is read without an error too, but is not an array.
    if not isinstance(value, np.ndarray) or value.shape != (size,) or value.dtype not in (np.float32, np.float64):
        raise BadAnswer(f"sent {key} of the wrong shape")
    with np.errstate(over="ignore"):
        return torch.from_numpy(value.astype(np.float32))


def for_one(work: Work, position: int) -> Work:
    """The work for one participant, with its own rates and its own bound for them."""
    own = work.of([position])
    return replace(own, rate=own.rate.view(-1), high=float(own.high))


def to_device(work: Work, device: torch.device) -> Work:
    """The work with its vectors on the device."""
    field, mask = (None if v is None else v.to(device) for v in (work.field, work.mask))
    return replace(work, field=field, mask=mask)


def to_bytes(value: Tensor) -> bytes:
    return value.detach().cpu().float().contiguous().numpy().tobytes()


def from_bytes(value: object, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(value, bytes) or len(value) != 4 * int(np.prod(shape)):
        raise BadAnswer("sent vectors of the wrong shape")
    return torch.from_numpy(np.frombuffer(value, np.float32).reshape(shape).copy())


def write_order(order: Order, packed: Packed | None) -> tuple[ArrayRecord, ConfigRecord]:
    """The order as records. `packed` is the field as the downlink rounded it; without it the field is sent unchanged."""
    work, config = order.work, ConfigRecord()
    config["round"], config["pass"], config["seed"] = order.round, order.step, order.seed
    config["accepted"] = list(order.accepted)
    for name, value in asdict(order.local).items():
        if name in LOCAL:
            config[name.replace("_", "-")] = value
    config["epochs"] = order.epochs  # the rates say how many there could be
    if order.test:
        config["test"] = True
    config["optimizer"], config["augment"] = order.local.optimizer, order.local.augment
    config["low"], config["high"], config["own"], config["prox"] = work.low, float(work.high), work.own, work.prox
    config["trace"], config["behind"], config["limit"] = work.trace, work.behind, work.clip
    config["memory"], config["renew"] = float(work.memory), work.renew
    if work.trial:
        config["trial"] = True
    for name, part in (("rate", work.rate), ("slope", work.slope), ("mix", work.mix)):
        if part is not None:
            config[name] = [float(v) for v in part.flatten().tolist()]
    config["field-rows"] = 0 if work.field is None else len(work.field)
    config["field-bits"] = packed.bits if packed else EXACT
    if packed is not None:
        config["field"], config["field-scales"] = packed.codes, packed.scales
    elif work.field is not None:
        config["field"] = to_bytes(work.field)
    if work.mask is not None:
        config["mask"] = np.packbits(work.mask.cpu().numpy() > 0).tobytes()
    if work.represent is not None:
        config["represent"] = work.represent
    if work.custom:  # functions are not sent: the node's own copy of the method has them
        config["custom"] = [name for name in ("loss", "step") if getattr(work, name) is not None]
    if work.memory or work.custom:
        config["run"], config["method"], config["options"] = f"{order.run:x}", order.method, json.dumps(order.options)
    return arrays(order.model), config


def read_order(content: RecordDict, layout: Layout) -> Order:
    model = read_model(one(content.array_records), layout)
    config: Any = content.config_records["config"]
    epochs, rows, bits = len(config["rate"]), int(config["field-rows"]), int(config["field-bits"])
    field = None
    if rows and bits < EXACT:
        field = Packed((rows, layout.d), bits, config["field"], config["field-scales"]).tensor()
    elif rows:
        field = from_bytes(config["field"], (rows, layout.d))
    mask = None
    if "mask" in config:
        mask = torch.from_numpy(np.unpackbits(np.frombuffer(config["mask"], np.uint8), count=layout.d)).float()
    plan: dict[str, Any] = {
        k: torch.tensor(config[k], dtype=torch.float64).view(epochs, rows) for k in ("slope", "mix") if k in config
    }
    work = Work(
        rate=torch.tensor(config["rate"], dtype=torch.float64),
        low=float(config["low"]),
        high=float(config["high"]),
        own=float(config["own"]),
        field=field,
        prox=float(config["prox"]),
        memory=float(config["memory"]),
        renew=float(config["renew"]),
        mask=mask,
        trace=bool(config["trace"]),
        trial=bool(config.get("trial", False)),
        behind=float(config["behind"]),
        clip=float(config["limit"]),
        represent=config.get("represent"),
        **plan,
    )
    return Order(
        model=model,
        work=work,
        local=ClientOptions(
            optimizer=str(config["optimizer"]),
            augment=str(config["augment"]),
            **{name: config[name.replace("_", "-")] for name in LOCAL} | {"epochs": epochs},
        ),
        round=int(config["round"]),
        step=int(config["pass"]),
        seed=int(config["seed"]),
        run=int(config.get("run", "0"), 16),
        accepted=(int(config["accepted"][0]), int(config["accepted"][1])),
        method=str(config.get("method", "")),
        options=json.loads(config.get("options", "{}")),
        custom=tuple(str(name) for name in config.get("custom", ()) if name in ("loss", "step")),
        epochs=int(config["epochs"]),
        test=bool(config.get("test", False)),
        secure=bool(config.get("veil", False)),
        longest=config.get("longest"),
    )


def write_answer(chunk: Chunk, model: Model, samples: int, tests: Mapping[str, Any], update: bool = True) -> RecordDict:
    """The answer as a record, with or without the update. `tests` are test results to send along."""
    content = RecordDict({"metrics": MetricRecord({**reported(chunk), "num-examples": samples, **tests})})
    if update:
        content["arrays"] = arrays(Model(model.w + chunk.delta[0], chunk.buffers[0]))
    extra = {"gradients": chunk.gradients, "path": chunk.path, "classes": chunk.classes, "counts": chunk.counts}
    if any(part is not None for part in extra.values()):
        content["config"] = ConfigRecord({k: to_bytes(v) for k, v in extra.items() if v is not None})
    return content


def reported(chunk: Chunk) -> dict[str, Any]:
    """The numbers that the chunk's only client reports about its training, by name: one each, and a list of rates."""
    return {f.name: getattr(chunk, f.name)[0].tolist() for f in fields(Report)}


def read_answer(
    content: RecordDict, job: Job, model: Model, work: Work, local: ClientOptions, layout: Layout, head: nn.Module | None = None
) -> Chunk:
    """One node's answer as a chunk of one client. Non-finite and overlong updates are judged later, together with all others.
    `head` is the layer whose input the work asks to represent."""
    mine = model if work.trial else read_model(one(content.array_records), layout)
    report = read_report(one(content.metric_records), job, work, local)
    extra: Any = content.config_records.get("config", {})
    trace: dict[str, Tensor] = {}
    if work.trace:
        trace["gradients"] = from_bytes(extra.get("gradients"), (1, local.epochs, layout.d))
        trace["path"] = from_bytes(extra.get("path"), (1, local.epochs + 1, layout.d))
    if work.represent is not None:
        assert head is not None
        trace["classes"], trace["counts"] = class_table(extra.get("classes"), extra.get("counts"), head)
    return Chunk(
        **{name: torch.tensor([value]) for name, value in report.items()},
        jobs=[job],
        start=model.w,
        delta=(mine.w.to(model.w) - model.w)[None],
        buffers=mine.buffers.to(model.w)[None],
        local=local,
        **{name: part.to(model.w.device) for name, part in trace.items()},
    )


def read_report(metrics: Any, job: Job, work: Work, local: ClientOptions) -> dict[str, Any]:
    """A node's own numbers, by name. Methods divide by steps and rates, so these are not trusted: the work and the node's samples
    determine the number of steps and the possible rates.

    Training that diverged may give a loss that is not finite, and any other numbers. It is judged later, together with all others,
    and the method learns of it.
    """
    found: dict[str, Any] = {f.name: number(metrics.get(f.name)) for f in fields(Report) if f.name != "rates"}
    rates = metrics.get("rates")
    if not isinstance(rates, list) or len(rates) != local.epochs:
        raise BadAnswer("sent an incomplete answer")
    found["rates"] = [number(rate) for rate in rates]
    due = job.epochs * local.steps(len(job.samples))
    if found["steps"] != due:
        raise BadAnswer(f"made {found['steps']:g} steps, but its {len(job.samples)} samples take {due}")
    found["steps"] = due
    if not abs(found["loss"]) < ABSURD:
        return found | {"loss": math.nan}
    if not (abs(found["first"]) < ABSURD and abs(found["behind"]) < ABSURD):
        raise BadAnswer("sent an impossible first loss")
    if not 0 <= found["norm"] < ABSURD:
        raise BadAnswer("sent an impossible norm")
    made, rest = found["rates"][: job.epochs], found["rates"][job.epochs :]
    if any(rest) or not possible(torch.tensor(made, dtype=torch.float64), work, job.position):
        raise BadAnswer("sent impossible rates")
    return found


def possible(rates: Tensor, work: Work, position: int) -> bool:
    """Can a node that did the work have these rates?"""
    work = for_one(work, position)
    low = high = work.rate[: len(rates)]
    if work.slope is not None and work.field is not None:
        ends = torch.tensor([-math.inf, math.inf], dtype=torch.float64)
        low, high = bound_rates(ends, work.low, work.high).unbind()
    tiny = torch.finfo(torch.float32).tiny  # smaller values may arrive as zero
    return bool(((rates >= low * (1 - SLACK) - tiny) & (rates <= high * (1 + SLACK) + tiny)).all())


def class_table(classes: object, counts: object, head: nn.Module) -> tuple[Tensor, Tensor]:
    """Means and counts by class. There must be as many rows as the head has classes, each as long as the head's input."""
    if not isinstance(counts, bytes) or not isinstance(classes, bytes) or not counts or len(classes) % len(counts):
        raise BadAnswer("sent vectors of the wrong shape")
    rows, features = len(counts) // 4, len(classes) // len(counts)
    if outputs(head, features) != rows:
        raise BadAnswer("sent vectors of the wrong shape")
    held = from_bytes(counts, (1, rows))
    if not bool((torch.isfinite(held) & (held >= 0)).all()):
        raise BadAnswer("sent impossible counts")
    return from_bytes(classes, (1, rows, features)), held


@torch.no_grad()
def outputs(head: nn.Module, features: int) -> int | None:
    """How many outputs a head in evaluation mode has for this many features; None if it does not accept them."""
    try:
        return int(head(next(head.parameters()).new_zeros(1, features)).shape[-1])
    except Exception:  # a user's module may raise anything for input that does not fit
        return None


def number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadAnswer("sent an incomplete answer")
    return float(value)


def numbers(value: object) -> list[float]:
    """A list of numbers, or the JSON text of one, because lists cannot be sent together with masked vectors."""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_int=float)
        except (ValueError, RecursionError):
            raise BadAnswer("sent an incomplete answer") from None
    if not isinstance(value, list):
        raise BadAnswer("sent an incomplete answer")
    return [number(item) for item in value]


def one(records: Any) -> Any:
    if len(records) != 1:
        raise BadAnswer("sent an incomplete answer")
    return next(iter(records.values()))
