"""The server's side: every method of the package as a Flower strategy, with the simulator's own code.

A round is `algorithm.round(model, clients)`, as in the simulator; only the engine under `clients` is another one: it
sends a message to each node and makes of the replies what an engine makes of its own training.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

import fedagg
from fedagg import algorithms, files, record, wire
from fedagg.checkpoint import Checkpoint
from fedagg.clients import Clients, TooFew
from fedagg.config import Config
from fedagg.errors import FedaggError, SettingError
from fedagg.federation import describe, describe_clients
from fedagg.flat import Layout, Model
from fedagg.flower import messages
from fedagg.flower.closing import Closing
from fedagg.flower.conversation import Conversation
from fedagg.flower.ledger import Enough, Ledger
from fedagg.flower.members import Lonely, Members
from fedagg.flower.messages import BadAnswer, Order
from fedagg.flower.monitor import exposition
from fedagg.flower.privacy import Privacy, PrivateClients
from fedagg.server import Server
from fedagg.work import Chunk, Job, Memory, Work

log = getLogger("flwr").log
NEVER = (-1, -1)
FIGURES = "metrics.prom"  # for Prometheus, after every round
LEDGER = "ledger.jsonl"  # the run's own account of noisy sums
# Settings of the configuration that nothing here would heed.
SIMULATED = (
    *("task", "metric", "normalize", "validation", "per_client", "client_test", "personal"),
    *("dropout_rate", "straggler_rate", "corrupt_rate", "flip_rate"),
)
MOST_VEILED = 1024  # more would run over the modulus of SecAgg+
GREETING = 120.0  # seconds at least that a node has to say who it is: nobody waits for it
LATE, GONE = "no answer in time", "left during the round"
# What Flower itself answers for a node, in the record's words.
CAUSES = {ErrorCode.MESSAGE_UNAVAILABLE: LATE, ErrorCode.NODE_UNAVAILABLE: GONE}
ABSENT = (LATE, GONE)
Ask = Callable[[list[Message]], list[Message]]


@dataclass
class Remote:
    """An engine whose clients are elsewhere."""

    strategy: FedAggStrategy
    t: int
    left_out: dict[int, str]
    step: int = 0
    note: str = "Flower nodes"

    def run(self, model: Model, work: Work, jobs: Sequence[Job], memory: Memory | None) -> Iterator[Chunk]:
        strategy, chunks = self.strategy, dict[int, Chunk]()
        orders = {job.client: strategy.order(model, work, job, self.t, self.step) for job in jobs}
        replies = strategy.ask(list(orders.values()))
        self.step += 1
        # An error that Flower reports for a node does not always come from the node: what it is a reply to says whom
        # it is about.
        sent = {order.metadata.message_id: client for client, order in orders.items()}
        wanted = {job.client: job for job in jobs}
        head = strategy.head(work.represent)
        for client in wanted:
            self.left_out[client] = LATE
        for reply in replies:
            if reply.metadata.reply_to_message_id not in sent:
                strategy.stray(reply)
                continue
            client = sent[reply.metadata.reply_to_message_id]
            if client in chunks:
                strategy.remark(client, "answered twice; the first answer counts")
                continue
            try:
                if reply.has_error():
                    reason = " ".join(str(reply.error.reason).split())[-300:]
                    raise BadAnswer(CAUSES.get(reply.error.code, f"failed: {reason}"))
                job = wanted[client]
                chunk = messages.read_answer(reply.content, job, model, work, strategy.server.options, strategy.layout, head)
                if work.mask is not None:
                    chunk.delta *= work.mask  # noise that a node adds to all of its answer must not move what is frozen
                chunks[client] = chunk
                del self.left_out[client]
            except BadAnswer as bad:
                self.left_out[client] = str(bad)
        # Under privacy a round must not tell how many answered: what is missing counts as zero.
        if len(chunks) < strategy.quorum and strategy.privacy is None:
            raise TooFew
        for job in jobs:
            if job.client in chunks:
                yield chunks[job.client]


@dataclass
class Turn:
    """One round under way."""

    t: int
    clients: Clients
    began: float
    talk: Conversation[list[Message], list[Message], bool] | None = None
    remarks: dict[int, str] = field(default_factory=dict)
    tests: list[Message] = field(default_factory=list)  # the questions of the evaluation
    skipped: bool = True  # until there is a new model
    kept: bool = False  # nobody answered: it is to be done again


class FedAggStrategy(Strategy):
    """FedAgg, or any other method of the package, as a Flower strategy.

    Args:
        module: the global network; training starts from its weights.
        config: the settings of the run; `clients` is the size of the federation.
        out: the run folder on the server. One that holds a run already is gone on with.
        timeout: seconds that a node has for its answer.
        quorum: usable answers that a round needs; with fewer it is skipped.
        patience: seconds to wait for nodes when fewer than the quorum are there, or none answers. Then the run ends with an error,
            and the same command goes on with the same round.
        close_at: share of those asked whose answers end a round; the rest are left out of it.
        secure: aggregate under Flower's SecAgg+, so that the server sees the sum of all updates and nobody's own.
        privacy: clip updates and add noise to their sum, before the method makes anything of it.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        *,
        out: str | Path | None = None,
        timeout: float = 3600.0,
        quorum: int = 1,
        patience: float = 600.0,
        close_at: float = 1.0,
        secure: bool = False,
        privacy: Privacy | None = None,
    ) -> None:
        self.module, self.config, self.timeout, self.quorum = module, config, timeout, quorum
        self.secure, self.privacy, self.patience, self.close_at = secure, privacy, patience, close_at
        self.layout = Layout(module)
        if self.layout.d == 0:
            raise SettingError("model", type(module).__name__, "has no trainable parameters")
        if secure and self.layout.b:
            raise SettingError("secure", True, "needs a model without buffers; use group instead of batch normalisation")
        if secure and config.per_round > MOST_VEILED:
            raise SettingError(
                "secure", True, f"takes up to {MOST_VEILED} clients a round, not {config.per_round}; lower participation"
            )
        if privacy is not None and (self.layout.b or config.robust != "mean"):
            raise SettingError("privacy", True, "needs a model without buffers, and robust = 'mean'")
        if privacy is not None and quorum != 1:
            raise SettingError("quorum", quorum, "under privacy no round may depend on who answers; leave it out")
        if not 1 <= quorum <= config.per_round:
            raise SettingError("quorum", quorum, f"choose 1 to {config.per_round}, the clients that a round asks")
        if not 0 < close_at <= 1:
            raise SettingError("close-at", close_at, "choose a share above 0 and up to 1")
        if close_at < 1 and (secure or privacy is not None):
            raise SettingError("close-at", close_at, "secure aggregation and privacy need all answers there are; leave it out")
        for name in SIMULATED:
            if (value := getattr(config, name)) != Config.model_fields[name].default:
                raise SettingError(name, value, "is for simulations: nodes have their own data and faults; leave it out")
        for name in ("stop_at", "patience"):
            if (value := getattr(config, name)) != Config.model_fields[name].default:
                raise SettingError(name, value, "ends simulated runs; a federation makes all its rounds, leave it out")
        self.members = Members(self.layout, max(timeout, GREETING))
        algorithm = algorithms.build(config.method, config.flat())
        self.options = algorithms.options(config.method, config.flat())
        if (secure or privacy is not None) and type(algorithm).weigh is not algorithms.Algorithm.weigh:
            words = "sums clients by sample count or plainly; choose a method that does not weigh them itself"
            raise SettingError("secure" if secure else "privacy", True, words)
        self.server = Server(config, algorithm, module, torch.device("cpu"))
        self.server.connect(lambda: sorted(self.members.nodes), self.enlist)
        self.accepted: dict[int, tuple[int, int]] = {}
        self.done, self.seconds = 0, 0.0
        self.token = secrets.randbits(62)  # of this run, so that nodes do not take what they remember of another for it
        self.turn: Turn | None = None
        self.silent: float | None = None  # since when nobody has answered
        self.grid: Grid | None = None
        self.extra = ConfigRecord()
        self.ask: Ask = list
        self.heads: dict[str, nn.Module] = {}
        self.about: list[dict[str, Any]] = []  # this process's lines of clients.jsonl
        form = repr((self.layout.parameters, self.layout.buffers))
        self.identity = {"model": hashlib.blake2b(form.encode(), digest_size=16).hexdigest(), "privacy": repr(privacy)}
        folder = Path(out) if out is not None else None
        environment = record.environment(torch.device("cpu"), Remote.note, fedagg.__version__)
        if folder is not None and (folder / "config.toml").exists():
            self.book = record.Record.resume(folder, config, self.identity, environment)
        else:
            self.book = record.Record(folder, config, environment)
        if self.book.resumed is not None:
            self.restore(self.book.resumed)
        self.ledger: Ledger | None = None
        if privacy is not None:
            path = folder / LEDGER if folder is not None else None
            self.ledger = Ledger(privacy, Path(privacy.ledger) if privacy.ledger else path)

    # What Flower asks of a strategy, in the order it asks.

    def run(self, grid: Grid, wait: float = 600.0) -> Result:
        """All rounds that are still to be done."""
        grid = Closing(grid, self.close_at) if self.close_at < 1 else grid
        with self.book:
            self.members.wait(grid, self.config.clients, wait)
            try:
                result = self.start(grid, self.arrays(), num_rounds=self.config.rounds - self.done, timeout=self.timeout)
                while self.done < self.config.rounds:  # rounds that nobody answered are still to be done
                    result = self.start(grid, self.arrays(), num_rounds=self.config.rounds - self.done, timeout=self.timeout)
            except Lonely as why:
                raise FedaggError(f"round {self.done + 1}: {why}; {self.advice()}") from None
            except Enough:
                result = Result()
                log(WARNING, "the run ends after %s of %s rounds: one more would pass epsilon-max", self.done, self.config.rounds)
            self.finish(result.arrays if result.arrays else self.arrays())
        return result

    def advice(self) -> str:
        if self.book.folder is None:
            return "nothing was kept: with `out` the next run could go on from here"
        return "nothing is lost: when they are back, run the same command again, and it goes on with this round"

    def summary(self) -> None:
        c = self.config
        log(INFO, "\t├──> %s, %s of %s rounds done", c.method, self.done, c.rounds)
        log(INFO, "\t├──> %s of %s clients a round, at least %s must answer", c.per_round, c.clients, self.quorum)
        log(INFO, "\t└──> %s weights, mean field at %s bits", self.layout.d, c.downlink_bits)

    def arrays(self) -> ArrayRecord:
        """The global model as it stands."""
        return messages.arrays(self.server.model)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        began = time.perf_counter()
        if self.ledger is not None and self.ledger.exhausted():
            raise Enough
        self.grid, self.extra = grid, config
        self.members.gather(grid, self.quorum, self.patience)
        self.server.model = messages.read_model(arrays, self.layout)  # a wrapper may have added its noise
        clients = self.server.clients(self.done)
        self.turn = Turn(self.done, clients, began)
        self.turn.talk = Conversation(self.play)
        self.turn.talk.start()
        return self.turn.talk.question or []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert self.turn is not None
        assert self.grid is not None
        turn, talk = self.turn, self.turn.talk
        if talk is not None and talk.question is not None:
            talk.answer(list(replies))
            while talk.question is not None:  # a method that asks more than once a round
                talk.answer(list(self.grid.send_and_receive(talk.question, timeout=self.timeout)))
        turn.skipped = talk is None or not talk.result
        if turn.skipped:
            causes = ", ".join(f"client {k}: {v}" for k, v in sorted(turn.clients.left_out.items()))
            log(WARNING, "round %s leaves the model as it was: under %s usable answers (%s)", turn.t + 1, self.quorum, causes)
            self.hear(turn)
            return None, None
        for client, why in sorted(turn.clients.left_out.items()):
            log(WARNING, "round %s goes on without client %s: %s", turn.t + 1, client, why)
        out = turn.clients.outcome
        if out is not None:
            self.accepted |= dict.fromkeys(out.clients, (turn.t, turn.clients.passes - 1))
        metrics = MetricRecord()
        if out is not None:
            metrics["clients"], metrics["train_loss"] = len(out.clients), float(out.theta @ out.loss)
        return self.arrays(), metrics

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        assert self.turn is not None
        turn = self.turn
        if turn.kept:
            return []
        self.server.model = messages.read_model(arrays, self.layout)
        self.server.settle(turn.t)
        if not self.server.due(turn.t):
            return []
        content = RecordDict({"arrays": messages.arrays(self.server.shown), "config": config})
        turn.tests = [self.message(content, client, MessageType.EVALUATE) for client in sorted(self.members.nodes)]
        return turn.tests

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The nodes' own test results, weighted by their test samples; and the round's end: record, checkpoint."""
        assert self.turn is not None
        turn = self.turn
        if turn.kept:
            self.turn = None
            return None
        self.silent = None
        row = describe(turn.t, turn.clients, self.server.algorithm, turn.skipped)
        scores: dict[int, tuple[int, float, float]] = {}
        asked = {test.metadata.message_id: self.members.client(test.metadata.dst_node_id) for test in turn.tests}
        for reply in replies:
            if reply.metadata.reply_to_message_id not in asked:
                self.stray(reply)
                continue
            client = asked[reply.metadata.reply_to_message_id]
            if client is None or client in scores or reply.has_error():
                continue
            try:
                if (score := messages.read_scores(reply.content)) is not None:
                    scores[client] = score
            except BadAnswer as bad:
                self.remark(client, f"{bad}; not used")
        total = sum(size for size, _, _ in scores.values())
        if total:
            row["loss"] = sum(size * loss for size, loss, _ in scores.values()) / total
            row["accuracy"] = sum(size * accuracy for size, _, accuracy in scores.values()) / total
            row["tested"] = len(scores)
        if turn.tests:
            row["bytes_tests"] = wire.tested(self.server.model, len(turn.tests), len(scores))
        if self.ledger is not None:
            row |= self.ledger.spent()
            log(INFO, "ε is %.4g, %.4g for a node whose data are exchanged", row["epsilon"], row["epsilon_replaced"])
        row["seconds"] = round(time.perf_counter() - turn.began, 6)
        about = describe_clients(turn.t, turn.clients) | {"nodes": self.members.names(turn.clients.ids)}
        if turn.remarks:
            about["remarks"] = {str(client): text for client, text in sorted(turn.remarks.items())}
        self.about.append(about)
        self.book.round(row, about)
        if self.book.folder is not None:
            files.write(self.book.folder / FIGURES, exposition(self.book.history, about, self.config.rounds))
        self.done, self.seconds = turn.t + 1, self.seconds + row["seconds"]
        self.book.checkpoint(self.snapshot())
        self.turn = None
        return MetricRecord({"loss": row["loss"], "accuracy": row["accuracy"]}) if total else None

    def finish(self, arrays: ArrayRecord) -> None:
        """The final model and figures, once all rounds are done."""
        self.server.model = messages.read_model(arrays, self.layout)
        self.book.model(self.layout.unpack(self.server.shown, self.module))
        scored = [row for row in self.book.history if "accuracy" in row]
        last = {key: scored[-1][key] for key in ("accuracy", "loss")} if scored else {}
        best = {"best_accuracy": max(row["accuracy"] for row in scored)} if scored else {}
        facts = {"algorithm": self.config.algorithm, "seed": self.config.seed, "rounds": self.done}
        facts |= {"left_out": left_out} if (left_out := self.book.unheard()) else {}
        spent = self.ledger.spent() if self.ledger is not None else {}
        self.book.result(facts | last | best | spent | {"seconds": round(self.seconds, 3)})

    # The parts of a round.

    def hear(self, turn: Turn) -> None:
        """A round that was skipped because nobody answered is no round: it is done again. How long has this been going on?"""
        causes = turn.clients.left_out
        if not all(causes.get(client) in ABSENT for client in turn.clients.ids):
            return
        turn.kept = True
        self.silent = self.silent or turn.began
        log(WARNING, "round %s is done again: nobody answered", turn.t + 1)
        if time.perf_counter() - self.silent > self.patience:
            raise Lonely(f"nobody has answered for {self.patience:g} seconds")

    def enlist(self, t: int, **shared: Any) -> Clients:
        """The participants of round t; `shared` is what the server knows of them."""
        left_out: dict[int, str] = {}
        kind: Callable[..., Clients] = Clients
        private: dict[str, Any] = {}
        if self.ledger is not None:
            private = {"privacy": self.privacy, "release": partial(self.ledger.book, self.token, t)}
        if self.secure:
            # It stands on the older half of Flower, which nothing else should need.
            from fedagg.flower.secagg import VeiledClients, VeiledPrivateClients

            veiled = partial(VeiledPrivateClients, **private) if private else VeiledClients
            kind = partial(veiled, strategy=self)
        elif private:
            kind = partial(PrivateClients, **private)
        return kind(
            engine=Remote(self, t, left_out),
            t=t,
            # Only their number counts here: whatever it is, they take no memory.
            samples=lambda client: torch.zeros(1, dtype=torch.int64).expand(self.members.sizes[client]),
            quorum=self.quorum,
            left_out=left_out,
            **shared,
        )

    def play(self, ask: Ask) -> bool:
        """The round as the algorithm tells it."""
        assert self.turn is not None
        self.ask = ask
        return self.server.play(self.turn.clients)

    def head(self, name: str | None) -> nn.Module | None:
        """The layer of that name in evaluation mode, to hold answers against; a copy, for the network is the user's."""
        if name is not None and name not in self.heads:
            self.heads[name] = copy.deepcopy(self.module.get_submodule(name)).eval()
        return None if name is None else self.heads[name]

    def order(self, model: Model, work: Work, job: Job, t: int, step: int) -> Message:
        """The message to one node; its own bound of the rate and its own last answer are in it."""
        order = Order(
            model=model,
            work=messages.for_one(work, job.position),
            local=self.server.options,
            round=t,
            step=step,
            seed=job.seed,
            run=self.token,
            accepted=self.accepted.get(job.client, NEVER),
            method=self.config.method,
            options=self.options,
        )
        arrays, config = messages.write_order(order, self.server.downlink.packed)
        config.update(self.extra)
        return self.message(RecordDict({"arrays": arrays, "config": config}), job.client, MessageType.TRAIN)

    def message(self, content: RecordDict, client: int, kind: str) -> Message:
        return Message(content, self.members.nodes[client], kind, ttl=self.timeout, group_id=str(self.done + 1))

    def remark(self, client: int, text: str) -> None:
        assert self.turn is not None
        self.turn.remarks[client] = text
        log(WARNING, "round %s: client %s %s", self.turn.t + 1, client, text)

    def stray(self, reply: Message) -> None:
        """An answer to a question whose time is over. It is about a model that is no more: it counts for nothing."""
        client = self.members.client(reply.metadata.src_node_id)
        if client is not None:
            self.remark(client, "answered too late; not used")

    def snapshot(self) -> Checkpoint:
        saved = self.server.freeze(self.done)
        rows = [(client, *tag) for client, tag in sorted(self.accepted.items())]
        saved.tensors["accepted"] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        saved.facts |= {"seconds": self.seconds, "identity": self.identity, "token": self.token}
        return saved

    def restore(self, saved: Checkpoint) -> None:
        self.done, self.seconds = saved.round, float(saved.facts["seconds"])
        self.server.resume(saved)
        self.token = int(saved.facts["token"])
        self.accepted = {client: (t, step) for client, t, step in saved.tensors["accepted"].tolist()}
        log(INFO, "going on after round %s", self.done)
