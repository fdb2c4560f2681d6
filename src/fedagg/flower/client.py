"""The node's side: a Flower ClientApp that does a round's work on the node's own data.

The work is done by the simulator's reference engine, so a node trains exactly as a simulated client does. What clients of a method
remember (FedDyn, SCAFFOLD) stays on the node, in the run's `context.state` and, if the node has a `state-dir`, on its disk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import fedagg
from fedagg import algorithms, checks, files, plugins
from fedagg.engines.base import Problem
from fedagg.engines.sequential import Sequential
from fedagg.errors import SettingError
from fedagg.evaluate import Evaluator
from fedagg.flat import Layout, Model
from fedagg.flower import messages, scores
from fedagg.flower.data import NodeData, node_data
from fedagg.flower.kinds import redact_errors
from fedagg.flower.privacy import planned_rates, require_updates_only
from fedagg.flower.scores import OwnMetric, Scores
from fedagg.from_config import pick_device
from fedagg.memory import ClientMemory
from fedagg.tasks import CLASSIFICATION, Task
from fedagg.work import Chunk, ClientOptions, Job, Loss, Report, Work


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[Context], Any],
    *,
    loss: Loss | None = None,
    metric: OwnMetric | None = None,
    mods: Sequence[Any] = (),
    quiet: bool = False,
) -> ClientApp:
    """A ClientApp from two of your functions.

    Args:
        model: makes the network; the server makes the same one.
        data: returns the node's own samples; `context.node_config["partition-id"]` says which node it is.
        loss: per-sample loss of (output, target), (B,); by default the task's, e.g. cross-entropy for class labels.
        metric: your own metric, if the server was given one; it must be the same.
        mods: Flower mods around training, such as `LocalDpMod`; not SecAgg+, which is built in and started by the server.
        quiet: besides the update, send nothing that the server does not know: no losses, rates or test results of the node. With
            `LocalDpMod`, everything that leaves the node is then covered by its noise.
    """
    if any(mod.__module__.startswith("flwr.client.mod.secure_aggregation") for mod in mods if hasattr(mod, "__module__")):
        raise SettingError("mods", "SecAgg+ of Flower", "its masks can be guessed; leave it out, because `secure = true` is enough")
    app = ClientApp()

    def task_and_data(message: Message, context: Context) -> tuple[Task, NodeData]:
        config: Any = message.content.config_records.get("config", {})
        return scores.message_task(config, metric), node_data(data(context), config.get("task"))

    @app.query(mods=[redact_errors])
    def hello(message: Message, context: Context) -> Message:
        """Say who this node is: its partition, the number of samples, the task, the model's size and the version. Nothing else
        about the data is sent."""
        module, (task, node) = model(), task_and_data(message, context)
        layout = Layout(module)
        check_output(module, task, node)
        record = MetricRecord(
            {"client": client_of(context), "num-examples": len(node.data), "weights": layout.d, "buffers": layout.b}
        )
        version = ConfigRecord({"fedagg": fedagg.__version__, "task": node.data.task})
        return Message(RecordDict({"metrics": record, "version": version}), reply_to=message)

    @app.train(mods=[redact_errors, secure_aggregation, *mods])
    def train(message: Message, context: Context) -> Message:
        module, (task, node), client = model(), task_and_data(message, context), client_of(context)
        order = messages.read_order(message.content, Layout(module))
        problem = problem_of(module, node, order.local, context, task, loss, order.work.represent)
        samples = torch.arange(len(node.data))
        job = Job(client=client, samples=samples, epochs=order.epochs, seed=order.seed)
        at, work = order.model.to(problem.device), messages.to_device(order.work, problem.device)
        method = method_of(order, context) if work.memory or order.custom else None
        work = replace(work, **{name: getattr(method, name) for name in order.custom})
        if quiet:
            require_updates_only(work, "quiet")
        found = score_model(problem, node, at, task) if order.test and not quiet else None
        tests = found.as_record(scores.ALONG) if found is not None else {}
        memory = ClientMemory(problem.layout.d)
        if work.memory:
            memory.write(client, recall(context, order, problem.layout.d))
        (chunk,) = Sequential(problem).run(at, work, [job], memory)
        if method is not None and work.memory:
            keep(context, memory.read([client])[0], method.remember(chunk, work)[0], order)
        if quiet:
            chunk = without_private_numbers(chunk, work)
            # LocalDpMod draws from numpy's global generator, and model() or data() may have seeded it.
            np.random.seed()  # noqa: NPY002
        if order.secure:
            # It needs the older half of Flower, which nothing else should import.
            from fedagg.flower.secagg import masked_answer, private_answer

            longest = order.longest
            answer = masked_answer(chunk, work, len(samples), tests) if longest is None else private_answer(chunk, longest, tests)
            return Message(answer, reply_to=message)
        update = not work.trial or bool(mods)  # a mod may expect one
        return Message(messages.write_answer(chunk, at, len(samples), tests, update), reply_to=message)

    @app.evaluate(mods=[redact_errors])
    def evaluate(message: Message, context: Context) -> Message:
        module, (task, node) = model(), task_and_data(message, context)
        found = None
        if not quiet:
            at = messages.read_model(messages.one(message.content.array_records), Layout(module))
            problem = problem_of(module, node, ClientOptions(epochs=1, batch_size=1), context, task, loss)
            found = score_model(problem, node, at.to(problem.device), task)
        record = MetricRecord({"num-examples": 0, **(found.as_record() if found is not None else {})})
        return Message(RecordDict({"metrics": record}), reply_to=message)

    return app


def score_model(problem: Problem, node: NodeData, model: Model, task: Task) -> Scores | None:
    """The model's scores on the node's own test samples, if it has any."""
    if not node.tests:
        return None
    losses, tallies = Evaluator(problem, node.data.x_test, node.data.y_test, task).samples(model)
    sums = {metric.key: tally.sum(1).tolist() for metric, tally in zip(task.metrics, tallies, strict=True)}
    return Scores(len(losses), float(losses.double().mean()), sums)


@torch.no_grad()
def check_output(module: nn.Module, task: Task, node: NodeData) -> None:
    """Check that the model's output fits the node's targets. Otherwise a wrong shape could go unnoticed. Class labels need no
    check, because their loss refuses what does not fit."""
    if task.name == CLASSIFICATION.name or node.data.task != task.name:
        return
    x, y = node.data.x_train[:2].to(next(module.parameters()).device, copy=True), node.data.y_train[:2]
    output = copy.deepcopy(module).eval()(x)
    if words := checks.misfit(output, y, task, node.data):
        form = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise SettingError("model()", form, f"for {len(x)} samples of {task.name} it must return {words}")


def secure_aggregation(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Run SecAgg+ if the message is part of it."""
    if "secaggplus_configs" not in message.content.config_records:
        return call_next(message, context)
    # It needs the older half of Flower, which nothing else should import.
    from fedagg.flower.masks import secagg_mod

    return secagg_mod(message, context, call_next)


def method_of(order: messages.Order, context: Context) -> algorithms.Algorithm:
    """The node's own copy of the method: losses, steps and what clients remember are code, which is not sent."""
    plugins.load(plugins.parse_names(context.run_config.get("plugin")))
    if not algorithms.REGISTRY.has(order.method):
        words = "is not known on this node; import the module that registers it where the ClientApp is made, or name it as `plugin`"
        raise SettingError("algorithm", order.method, words)
    return algorithms.build(order.method, order.options)


def without_private_numbers(chunk: Chunk, work: Work) -> Chunk:
    """The same update, with only those numbers that follow from the work."""
    silent: dict[str, Any] = {f.name: torch.zeros_like(getattr(chunk, f.name)) for f in fields(Report)}
    rates = planned_rates(work, torch.zeros_like(chunk.delta[0]))
    rates[chunk.jobs[0].epochs :] = 0.0
    known = {"steps": chunk.steps, "rates": rates[None]}
    return replace(chunk, **(silent | known))


def client_of(context: Context) -> int:
    number = context.node_config.get("partition-id")
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise SettingError(
            "partition-id", number, "start the SuperNode with --node-config 'partition-id=0', a different one for each node"
        )
    return number


def problem_of(
    module: nn.Module,
    node: NodeData,
    local: ClientOptions,
    context: Context,
    task: Task,
    loss: Loss | None,
    head: str | None = None,
) -> Problem:
    """The engine's problem for this node. `head` is the layer whose input is averaged per class, if the work asks for it."""
    if node.data.task != task.name:
        raise SettingError("data(context)", node.data.task, f"the run's task is {task.name}; set another `task` in its settings")
    device = pick_device(str(context.node_config.get("device", "auto")))
    classes = node.data.classes if head is None else class_count(module, head, node)
    return Problem(module, node.data.x_train, node.data.y_train, classes, local, device, loss or task.loss)


@torch.no_grad()
def class_count(module: nn.Module, head: str, node: NodeData) -> int:
    """The number of classes: that of the head's outputs. The node's labels cannot tell, because the last ones may be missing."""
    seen: list[int] = []
    probe = copy.deepcopy(module).eval()
    probe.get_submodule(head).register_forward_hook(lambda _, args, output: seen.append(int(output.shape[-1])))
    probe(node.data.x_train[:1].clone())
    if (highest := int(node.data.y_train.max())) >= seen[0]:
        raise SettingError("data(context)", f"label {highest}", f"the model's head {head!r} distinguishes {seen[0]} classes")
    return seen[0]


def recall(context: Context, order: messages.Order, d: int) -> Tensor:
    """What the node remembers. Answers that the server did not accept, or never received, are ignored."""
    found = from_context(context) or from_disk(context, order.run)
    if found is not None and found["kept"].numel() == d:
        for name, tag in zip(("kept", "staged"), found["tags"].tolist(), strict=True):
            if tuple(tag) == order.accepted:
                return found[name]
    return torch.zeros(d)


def keep(context: Context, kept: Tensor, staged: Tensor, order: messages.Order) -> None:
    """Save what was remembered before and what this round adds. Which of them counts is known when the server calls again."""
    tags = torch.tensor([order.accepted, (order.round, order.step)])
    rows = {"kept": kept.cpu(), "staged": staged.cpu(), "tags": tags}
    context.state["memory"] = ArrayRecord({name: Array(row.numpy()) for name, row in rows.items()})
    if (path := state_file(context, order.run)) is not None:
        files.write(files.folder(path.parent, "state-dir") / path.name, save_tensors(rows))


def from_context(context: Context) -> dict[str, Tensor] | None:
    record = context.state.array_records.get("memory")
    return None if record is None else {name: torch.from_numpy(row.numpy().copy()) for name, row in record.items()}


def from_disk(context: Context, run: int) -> dict[str, Tensor] | None:
    """The memory on disk. To Flower a restarted server is a new run, with an empty `context.state`."""
    path = state_file(context, run)
    return load_tensors(path.read_bytes()) if path is not None and path.exists() else None


def state_file(context: Context, run: int) -> Path | None:
    where = context.node_config.get("state-dir")
    return None if where is None else Path(str(where)) / f"client-{client_of(context)}-run-{run:016x}.safetensors"
