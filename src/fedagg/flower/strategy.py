"""The server's side: every method of the package as a Flower strategy, with the simulator's own code.

A round is `algorithm.round(model, clients)`, as in the simulator. Only the engine behind `clients` differs: it sends a message to
each node and turns the replies into what other engines make by training.
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
from fedagg import algorithms, checks, files, record, wire
from fedagg import result as results
from fedagg.callbacks import Callback, tell
from fedagg.checkpoint import Checkpoint
from fedagg.clients import Clients, TooFew
from fedagg.config import Config
from fedagg.errors import FedaggError, SettingError
from fedagg.faults import Faults
from fedagg.flat import Layout, Model
from fedagg.flower import messages, scores
from fedagg.flower.closing import Closing
from fedagg.flower.conversation import Conversation
from fedagg.flower.ledger import BudgetSpent, Ledger
from fedagg.flower.members import Members, NoNodes
from fedagg.flower.messages import BadAnswer, Order
from fedagg.flower.monitor import exposition
from fedagg.flower.pace import Pace, Slow
from fedagg.flower.privacy import Privacy, PrivateClients
from fedagg.flower.scores import OwnMetric, Scores
from fedagg.measure import Measure
from fedagg.server import Server
from fedagg.tasks import CLASSIFICATION
from fedagg.work import Chunk, Job, Memory, Work

log = getLogger("flwr").log
NEVER = (-1, -1)
FIGURES = "metrics.prom"  # for Prometheus, after every round
LEDGER = "ledger.jsonl"  # the run's own account of noisy sums
# Settings that have no effect here.
SIMULATED = (
    *("normalize", "validation", "per_client", "client_test", "personal"),
    *("dropout_rate", "straggler_rate", "corrupt_rate", "flip_rate"),
)
MOST_SECURE = 1024  # more would overflow the modulus of SecAgg+
GREETING = 120.0  # minimum of seconds for a node to say who it is: nothing waits for it
LATE, GONE = "no answer in time", "left during the round"
# Flower's own error codes for a node, as causes in the record.
CAUSES = {ErrorCode.MESSAGE_UNAVAILABLE: LATE, ErrorCode.NODE_UNAVAILABLE: GONE}
ABSENT = (LATE, GONE)
Ask = Callable[[list[Message]], list[Message]]


@dataclass
class Remote:
    """An engine whose clients are remote."""

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
        # An error that Flower reports may not come from the node it concerns: the message it replies to tells which node that is.
        sent = {order.metadata.message_id: client for client, order in orders.items()}
        wanted = {job.client: job for job in jobs}
        head = strategy.head(work.represent)
        for client in wanted:
            self.left_out[client] = LATE
        for reply in replies:
            if reply.metadata.reply_to_message_id not in sent:
                strategy.note_late_answer(reply)
                continue
            client = sent[reply.metadata.reply_to_message_id]
            if client in chunks:
                strategy.remark(client, "answered twice; the first answer counts")
                continue
            try:
                if reply.has_error():
                    reason = " ".join(str(reply.error.reason).split())[-300:]
                    raise BadAnswer(CAUSES.get(reply.error.code, f"failed: {reason}"))
                strategy.hear_scores(client, next(iter(reply.content.metric_records.values()), {}))
                job = wanted[client]
                chunk = messages.read_answer(reply.content, job, model, work, strategy.server.options, strategy.layout, head)
                if work.mask is not None:
                    chunk.delta *= work.mask  # noise that a node adds to its whole answer must not move frozen weights
                chunks[client] = chunk
                del self.left_out[client]
            except BadAnswer as bad:
                self.left_out[client] = str(bad)
        # Under privacy a round must not reveal how many answered: missing answers count as zero.
        if len(chunks) < strategy.quorum and strategy.privacy is None:
            raise TooFew
        for job in jobs:
            if job.client in chunks:
                yield chunks[job.client]


@dataclass
class Turn:
    """One round in progress."""

    t: int
    clients: Clients
    began: float
    talk: Conversation[list[Message], list[Message], bool] | None = None
    remarks: dict[int, str] = field(default_factory=dict)
    testers: set[int] = field(default_factory=set)  # who is asked to test the last round's model, with which training begins
    before: dict[int, Scores] = field(default_factory=dict)  # and their results
    tests: list[Message] = field(default_factory=list)  # the questions of an evaluation in separate messages
    skipped: bool = True  # no new model yet
    repeat: bool = False  # nobody answered: repeat the round


class FedAggStrategy(Strategy):
    """FedAgg, or any other method of the package, as a Flower strategy.

    Args:
        module: the global network; training starts from its weights.
        config: the settings of the run; `clients` is the size of the federation.
        out: the run folder on the server. If it holds a run already, that run is continued.
        timeout: seconds that a node has for its answer.
        quorum: usable answers that a round needs; with fewer it is skipped.
        patience: seconds to wait for nodes when fewer than the quorum are there, or none answers. Then the run ends with an error,
            and the same command continues with the same round.
        close_at: share of those asked whose answers end a round; the others are left out of it.
        fewer_epochs: give nodes that are too slow for `timeout` or `close_at` fewer epochs, by the time of their last answers.
        test_apart: test the model that would be kept, in separate messages to all nodes. By default, a round's participants test
            the model that they are sent to train, and it is sent once.
        secure: aggregate under Flower's SecAgg+, so that the server sees the sum of all updates but no single one.
        privacy: clip updates and add noise to their sum, before the method uses it.
        metric: your own metric for the run, as in `fedagg.run`; the nodes' `client_app` must have the same.
        callbacks: watch the run, as in `fedagg.run`; one whose `round_done` returns True stops it.
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
        fewer_epochs: bool = False,
        test_apart: bool = False,
        secure: bool = False,
        privacy: Privacy | None = None,
        metric: OwnMetric | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.module, self.config, self.timeout, self.quorum = module, config, timeout, quorum
        self.secure, self.privacy, self.patience, self.close_at = secure, privacy, patience, close_at
        self.test_apart, self.callbacks = test_apart, callbacks
        checks.check_callbacks(callbacks)
        self.layout = Layout(module)
        if self.layout.d == 0:
            raise SettingError("model", type(module).__name__, "has no trainable parameters")
        if secure and self.layout.b:
            raise SettingError("secure", True, "needs a model without buffers; use group instead of batch normalisation")
        if secure and config.per_round > MOST_SECURE:
            raise SettingError(
                "secure", True, f"takes up to {MOST_SECURE} clients per round, not {config.per_round}; lower participation"
            )
        if privacy is not None and (self.layout.b or config.robust != "mean"):
            raise SettingError("privacy", True, "needs a model without buffers, and robust = 'mean'")
        if privacy is not None and quorum != 1:
            raise SettingError("quorum", quorum, "with privacy, no round may depend on who answers; leave it out")
        if not 1 <= quorum <= config.per_round:
            raise SettingError("quorum", quorum, f"choose 1 to {config.per_round}, the clients that a round asks")
        if not 0 < close_at <= 1:
            raise SettingError("close-at", close_at, "choose a share above 0 and up to 1")
        if close_at < 1 and (secure or privacy is not None):
            raise SettingError("close-at", close_at, "secure aggregation and privacy need every answer; leave it out")
        if fewer_epochs and (secure or privacy is not None):
            raise SettingError("fewer-epochs", True, "secure aggregation and privacy treat all nodes alike; leave it out")
        for name in SIMULATED:
            if (value := getattr(config, name)) != Config.model_fields[name].default:
                raise SettingError(name, value, "is for simulations: nodes have their own data and faults; leave it out")
        for name in ("stop_at", "patience"):
            if (value := getattr(config, name)) != Config.model_fields[name].default:
                raise SettingError(name, value, "ends simulated runs, but a federation runs all its rounds; leave it out")
        self.task = scores.run_task(config.task, config.metric, metric)
        self.subject = scores.subject(self.task, config.task)
        self.members = Members(self.layout, self.task.name, self.subject, max(timeout, GREETING))
        self.pace = Pace(config.epochs, timeout, close_at, self.members.client) if fewer_epochs else None
        algorithm = algorithms.build(config.method, config.flat())
        checks.check_method(config, algorithm, self.task)
        self.options = algorithms.options(config.method, config.flat())
        if (secure or privacy is not None) and type(algorithm).weigh is not algorithms.Algorithm.weigh:
            words = "sums clients by sample count or equally; choose a method that does not weigh them itself"
            raise SettingError("secure" if secure else "privacy", True, words)
        self.server = Server(config, algorithm, module, torch.device("cpu"))
        self.server.connect(lambda: sorted(self.members.nodes), self.enlist)
        self.accepted: dict[int, tuple[int, int]] = {}
        self.done, self.seconds = 0, 0.0
        self.token = secrets.randbits(62)  # identifies this run, so that nodes do not use what they remember of another
        self.turn: Turn | None = None
        self.silent: float | None = None  # since when nobody has answered
        self.grid: Grid | None = None
        self.extra = ConfigRecord()
        self.ask: Ask = list
        self.result: results.Result | None = None  # set when all rounds are done
        self.stopped = False  # by a callback
        self.heads: dict[str, nn.Module] = {}
        self.about: list[dict[str, Any]] = []  # this process's lines of clients.jsonl
        form = repr((self.layout.parameters, self.layout.buffers))
        digest = hashlib.blake2b(form.encode(), digest_size=16).hexdigest()
        self.identity = {"model": digest, "privacy": repr(privacy), "metric": self.task.metric.key}
        folder = Path(out) if out is not None else None
        environment = record.environment(torch.device("cpu"), Remote.note, fedagg.__version__)
        environment |= {} if self.task is CLASSIFICATION else {"metric": self.task.metric.facts()}
        if folder is not None and (folder / "config.toml").exists():
            self.record = record.Record.resume(folder, config, self.identity, environment)
        else:
            self.record = record.Record(folder, config, environment)
        if self.record.resumed is not None:
            self.restore(self.record.resumed)
        self.announced = self.done - self.untested  # rounds that callbacks know of
        self.ledger: Ledger | None = None
        if privacy is not None:
            path = folder / LEDGER if folder is not None else None
            self.ledger = Ledger(privacy, Path(privacy.ledger) if privacy.ledger else path)

    # What Flower calls in a strategy, in this order.

    def run(self, grid: Grid, wait: float = 600.0) -> Result:
        """Play all remaining rounds."""
        grid = Closing(grid, self.close_at, self.pace) if self.close_at < 1 or self.pace is not None else grid
        with self.record:
            try:
                tell(self.callbacks, "judged", self.task.metric)
                tell(self.callbacks, "started", self.config, self.announced)
            except BaseException:
                self.record.withdraw()
                raise
            self.members.wait(grid, self.config.clients, wait)
            try:
                result = self.start(grid, self.arrays(), num_rounds=self.config.rounds - self.done, timeout=self.timeout)
                while self.done < self.config.rounds:  # includes rounds that nobody answered
                    result = self.start(grid, self.arrays(), num_rounds=self.config.rounds - self.done, timeout=self.timeout)
            except NoNodes as why:
                raise FedaggError(f"round {self.done + 1}: {why}; {self.advice()}") from None
            except BudgetSpent:
                result, cause = Result(), "a callback says so" if self.stopped else "one more round would exceed epsilon-max"
                log(WARNING, "the run ends after %s of %s rounds: %s", self.done, self.config.rounds, cause)
                self.test_last(grid)
            self.finish(result.arrays if result.arrays else self.arrays())
        tell(self.callbacks, "finished", self.result)
        return result

    def advice(self) -> str:
        if self.record.folder is None:
            return "nothing was kept: with `out` the next run could resume from here"
        return "nothing is lost: when they are back, run the same command again, and it resumes with this round"

    def summary(self) -> None:
        c = self.config
        log(INFO, "\t├──> %s, %s of %s rounds done", c.method, self.done, c.rounds)
        log(INFO, "\t├──> %s of %s clients per round, at least %s must answer", c.per_round, c.clients, self.quorum)
        log(INFO, "\t└──> %s weights, mean field at %s bits", self.layout.d, c.downlink_bits)

    def arrays(self) -> ArrayRecord:
        """The current global model."""
        return messages.arrays(self.server.model)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        began = time.perf_counter()
        if self.stopped or (self.ledger is not None and self.ledger.exhausted()):
            raise BudgetSpent
        self.grid, self.extra = grid, config
        self.members.gather(grid, self.quorum, self.patience)
        self.server.model = messages.read_model(arrays, self.layout)  # a wrapper may have added noise
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
            while talk.question is not None:  # a method may ask more than once a round
                talk.answer(list(self.grid.send_and_receive(talk.question, timeout=self.timeout)))
        turn.skipped = talk is None or not talk.result
        self.record_tests(turn)
        if turn.skipped:
            causes = ", ".join(f"client {k}: {v}" for k, v in sorted(turn.clients.left_out.items()))
            log(WARNING, "round %s leaves the model as it was: fewer than %s usable answers (%s)", turn.t + 1, self.quorum, causes)
            self.check_silence(turn)
            return None, None
        for client, why in sorted(turn.clients.left_out.items()):
            log(WARNING, "round %s continues without client %s: %s", turn.t + 1, client, why)
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
        if turn.repeat:
            return []
        self.server.model = messages.read_model(arrays, self.layout)
        self.server.update_average(turn.t)
        last = turn.t + 1 == self.config.rounds
        if last or (self.test_apart and self.server.evaluates_after(turn.t)):
            turn.tests = self.questions(config)
        return turn.tests

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pool the nodes' test results and end the round: record, checkpoint."""
        assert self.turn is not None
        turn = self.turn
        if turn.repeat:
            self.turn = None
            return None
        self.silent = None
        self.announce()  # the round before is now complete
        row = record.describe(turn.t, turn.clients, self.server.algorithm, turn.skipped)
        found = self.scores(turn.tests, replies)
        row |= scores.pool(found, self.task)
        if turn.tests:
            row["bytes_tests"] = wire.tested(self.server.model, len(turn.tests), numbers(found))
        if self.ledger is not None:
            row |= self.ledger.spent()
            log(INFO, "ε is %.4g, or %.4g for a node whose data are replaced", row["epsilon"], row["epsilon_replaced"])
        row["seconds"] = round(time.perf_counter() - turn.began, 6)
        about = record.describe_clients(turn.t, turn.clients) | {"nodes": self.members.names(turn.clients.ids)}
        if self.privacy is None:  # under privacy the record holds nothing about a single node
            made = ((turn.t, turn.before), (turn.t + 1, found))
            tests = [scores.one_by_one(number, each, self.task) for number, each in made if each]
            about |= {"tests": tests} if tests else {}
        if turn.remarks:
            about["remarks"] = {str(client): text for client, text in sorted(turn.remarks.items())}
        self.about.append(about)
        self.record.round(row, about)
        if self.record.folder is not None:
            files.write(self.record.folder / FIGURES, exposition(self.record.history, about, self.config.rounds, self.task.metrics))
        self.done, self.seconds = turn.t + 1, self.seconds + row["seconds"]
        self.record.checkpoint(self.snapshot())
        self.turn = None
        if not self.untested:
            self.announce()
        return MetricRecord({name: row[name] for name in ("loss", *(m.key for m in self.task.metrics))}) if found else None

    def finish(self, arrays: ArrayRecord) -> None:
        """Save the final model and figures, when all rounds are done."""
        self.server.model = messages.read_model(arrays, self.layout)
        self.announce()
        score, best, loss = results.scores(self.record.history, self.task.metric)
        self.result = results.Result(
            config=self.config,
            history=self.record.history,
            model=self.layout.unpack(self.server.reported_model, self.module),
            score=score,
            best=best,
            loss=loss,
            seconds=self.seconds,
            run=self.record.folder,
            left_out=self.record.left_out_clients(),
            figures=self.ledger.spent() if self.ledger is not None else {},
            metric=Measure(**self.task.metric.facts()),
            criterion=self.task.loss,
            task=self.task,
        )
        self.record.model(self.result.model)
        self.record.result(self.result.summary())

    # Test results.

    @property
    def untested(self) -> bool:
        """Is the last round's model not tested yet? The next round's participants test it when they are sent it to train."""
        due = self.done > 0 and self.server.evaluates_after(self.done - 1)
        return due and not self.test_apart and self.task.metric.key not in self.record.history[-1]

    def record_tests(self, turn: Turn) -> None:
        """Record the participants' test results for the model they began with, in the line of the round that made it."""
        turn.before = self.addable_scores(turn.before)
        if turn.before:
            row = self.record.history[-1]
            known = row.get("bytes_tests", 0) + wire.tested_along(len(turn.testers), numbers(turn.before))
            self.record.amend(scores.pool(turn.before, self.task) | {"bytes_tests": known})
            figures = ", ".join(f"{metric.label} {row[metric.key]:.4f}" for metric in self.task.metrics)
            log(INFO, "after round %s: %s, loss %.4f", row["round"], figures, row["loss"])

    def addable_scores(self, found: dict[int, Scores]) -> dict[int, Scores]:
        """The results that can be added."""
        for client in (odd := scores.odd_clients(found)):
            self.remark(client, "sent test results of another length than most; not used")
        return {client: each for client, each in found.items() if client not in odd}

    def hear_scores(self, client: int, metrics: Any) -> None:
        """Read test results sent along with an answer, if they were asked for. They may be usable even if the answer is not."""
        assert self.turn is not None
        if client in self.turn.testers and client not in self.turn.before:
            try:
                if (found := scores.read(metrics, self.task.metrics, scores.ALONG)) is not None:
                    self.turn.before[client] = found
            except BadAnswer as bad:
                self.remark(client, f"{bad}; not used")

    def questions(self, config: ConfigRecord) -> list[Message]:
        """Messages that ask all nodes to test the model."""
        config = ConfigRecord({**config, **self.subject})
        content = RecordDict({"arrays": messages.arrays(self.server.reported_model), "config": config})
        return [self.message(content, client, MessageType.EVALUATE) for client in sorted(self.members.nodes)]

    def scores(self, questions: list[Message], replies: Iterable[Message]) -> dict[int, Scores]:
        found: dict[int, Scores] = {}
        asked = {test.metadata.message_id: self.members.client(test.metadata.dst_node_id) for test in questions}
        for reply in replies:
            if reply.metadata.reply_to_message_id not in asked:
                self.note_late_answer(reply)
                continue
            client = asked[reply.metadata.reply_to_message_id]
            if client is None or client in found or reply.has_error():
                continue
            try:
                if (score := scores.read(messages.one(reply.content.metric_records), self.task.metrics)) is not None:
                    found[client] = score
            except BadAnswer as bad:
                self.remark(client, f"{bad}; not used")
        return self.addable_scores(found)

    def test_last(self, grid: Grid) -> None:
        """Test the last model if a run ends early, because no later round will."""
        if self.untested:
            questions = self.questions(ConfigRecord())
            found = self.scores(questions, grid.send_and_receive(questions, timeout=self.timeout))
            sent = wire.tested(self.server.model, len(questions), numbers(found))
            self.record.amend(scores.pool(found, self.task) | {"bytes_tests": sent})

    def announce(self) -> None:
        """Tell callbacks about the rounds that they do not know yet."""
        for row in self.record.history[self.announced :]:
            self.stopped |= tell(self.callbacks, "round_done", row) is not None
        self.announced = len(self.record.history)

    # The parts of a round.

    def check_silence(self, turn: Turn) -> None:
        """If nobody answered, mark the round for repetition. Raises NoNodes if this has lasted too long."""
        causes = turn.clients.left_out
        if not all(causes.get(client) in ABSENT for client in turn.clients.ids):
            return
        turn.repeat = True
        self.silent = self.silent or turn.began
        log(WARNING, "round %s is repeated: nobody answered", turn.t + 1)
        if time.perf_counter() - self.silent > self.patience:
            raise NoNodes(f"nobody has answered for {self.patience:g} seconds")

    def enlist(self, t: int, **shared: Any) -> Clients:
        """The participants of round t; `shared` is what the server knows about them."""
        left_out: dict[int, str] = {}
        kind: Callable[..., Clients] = Clients
        private: dict[str, Any] = {}
        if self.ledger is not None:
            private = {"privacy": self.privacy, "release": partial(self.ledger.record, self.token, t)}
        if self.secure:
            # It needs the older half of Flower, which nothing else should import.
            from fedagg.flower.secagg import SecureClients, SecurePrivateClients

            secure = partial(SecurePrivateClients, **private) if private else SecureClients
            kind = partial(secure, strategy=self)
        elif private:
            kind = partial(PrivateClients, **private)
        return kind(
            engine=Remote(self, t, left_out),
            t=t,
            # Only the number of samples counts here, and expanded zeros take no memory.
            samples=lambda client: torch.zeros(1, dtype=torch.int64).expand(self.members.sizes[client]),
            quorum=self.quorum,
            left_out=left_out,
            faults=Faults() if self.pace is None else Slow(allotted=self.pace.allot(shared["ids"])),
            **shared,
        )

    def play(self, ask: Ask) -> bool:
        """Play the round with the algorithm's code."""
        assert self.turn is not None
        self.ask = ask
        return self.server.play(self.turn.clients)

    def head(self, name: str | None) -> nn.Module | None:
        """The layer of that name in evaluation mode, to check answers against; a copy, because the network is the user's."""
        if name is not None and name not in self.heads:
            self.heads[name] = copy.deepcopy(self.module.get_submodule(name)).eval()
        return None if name is None else self.heads[name]

    def order(self, model: Model, work: Work, job: Job, t: int, step: int) -> Message:
        """The message to one node, with its own bound of the rate and its last accepted answer."""
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
            epochs=job.epochs,
            test=self.untested and step == 0 and model is self.server.model,
        )
        if order.test and self.turn is not None:
            self.turn.testers.add(job.client)
        arrays, config = messages.write_order(order, self.server.downlink.packed)
        config.update(self.subject)
        config.update(self.extra)
        return self.message(RecordDict({"arrays": arrays, "config": config}), job.client, MessageType.TRAIN)

    def message(self, content: RecordDict, client: int, kind: str) -> Message:
        return Message(content, self.members.nodes[client], kind, ttl=self.timeout, group_id=str(self.done + 1))

    def remark(self, client: int, text: str) -> None:
        if self.turn is not None:
            self.turn.remarks[client] = text
        log(WARNING, "round %s: client %s %s", self.done + 1, client, text)

    def note_late_answer(self, reply: Message) -> None:
        """Note an answer that came too late. It is not used, because its model is outdated."""
        client = self.members.client(reply.metadata.src_node_id)
        if client is not None:
            self.remark(client, "answered too late; not used")

    def snapshot(self) -> Checkpoint:
        saved = self.server.freeze(self.done)
        rows = [(client, *tag) for client, tag in sorted(self.accepted.items())]
        saved.tensors["accepted"] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        saved.facts |= {"seconds": self.seconds, "identity": self.identity, "token": self.token}
        if self.pace is not None:
            saved.facts["pace"] = {str(client): each for client, each in self.pace.each.items()}
        return saved

    def restore(self, saved: Checkpoint) -> None:
        self.done, self.seconds = saved.round, float(saved.facts["seconds"])
        self.server.resume(saved)
        self.token = int(saved.facts["token"])
        self.accepted = {client: (t, step) for client, t, step in saved.tensors["accepted"].tolist()}
        if self.pace is not None:
            self.pace.each = {int(client): float(each) for client, each in saved.facts.get("pace", {}).items()}
        log(INFO, "continuing after round %s", self.done)


def numbers(found: dict[int, Scores]) -> int:
    """How many numbers the test results took on the wire."""

    return sum(each.numbers for each in found.values())
