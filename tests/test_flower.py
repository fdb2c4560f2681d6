"""FedAgg on Flower: the same numbers as the simulator, whatever the nodes do."""

from __future__ import annotations

import io
import time

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

import numpy as np
import torch
from flwr.app import Array, Error, Message, MetricRecord
from flwr.common.constant import ErrorCode
from torch.utils.data import DataLoader, TensorDataset

import fedagg
from fedagg import models, plugins, seeding
from fedagg.algorithms import REGISTRY
from fedagg.config import Config, make
from fedagg.errors import FedaggError, SettingError
from fedagg.flower import FedAggStrategy, cached, client_app
from fedagg.flower.data import node_data
from fedagg.flower.server import CUSTOM, split
from flower_grid import HereGrid, PowerCut, dies_in_round_3

NODES = 4
DATA = fedagg.data.load("mnist-mini")
# Nodes of 30, 50, 70 and 90 samples, sorted by class: no two have the same mixture.
PARTS = np.split(np.argsort(DATA.y_train.numpy()[:240], kind="stable"), [30, 80, 150])


def model(name: str = "linear") -> torch.nn.Module:
    return models.build(name, DATA.shape, DATA.classes, seed=seeding.derive(0, "model"))


def node(context):
    part = torch.as_tensor(PARTS[context.node_config["partition-id"]])
    return fedagg.Dataset(DATA.x_train[part], DATA.y_train[part], DATA.x_test[:100], DATA.y_test[:100], classes=10)


def settings(**changes) -> Config:
    return make(CUSTOM | {"clients": NODES, "participation": 0.5, "rounds": 3, "epochs": 2, "lr": 0.05} | changes)


def simulated(name="linear", out=None, resume=None, **changes):
    data = fedagg.Dataset(DATA.x_train[:240], DATA.y_train[:240], DATA.x_test[:100], DATA.y_test[:100])
    return fedagg.run(settings(**changes), data=data, model=model(name), parts=PARTS, out=out, resume=resume)


def federated(name="linear", tamper=None, out=None, quorum=1, test_apart=False, **changes):
    grid = HereGrid(client_app(lambda: model(name), node), NODES, tamper)
    strategy = FedAggStrategy(model(name), settings(**changes), out=out, quorum=quorum, test_apart=test_apart)
    strategy.run(grid, wait=0)
    return strategy, grid


@pytest.mark.parametrize("method", ["fedavg", "fedagg", "fedadam", "feddyn", "scaffold", "fedbabu", "fedgh", "paper"])
def test_agrees_with_the_simulator(method):
    name = "lenet5" if method in ("fedbabu", "fedgh") else "linear"
    # The paper's own version asks twice a round, with a trace; its rehearsal asks for all rounds before the first.
    changes = {"variant": "paper", "estimator": "pretrain"} if method == "paper" else {"algorithm": method}
    alone = simulated(name, **changes)
    strategy, _ = federated(name, test_apart=True, **changes)
    w = strategy.layout.pack(alone.model).w
    assert torch.allclose(strategy.server.algorithm.reported(strategy.server.model).w, w, rtol=0, atol=1e-5)
    assert (w - strategy.layout.pack(model(name)).w).norm() > 0.01
    for here, there in zip(strategy.record.history, alone.history, strict=True):
        for key in ("participants", "bytes_up", "bytes_down", "samples", "passes", "left_out"):
            assert here[key] == there[key], key
        for key in ("train_loss", "drift", "loss", "accuracy"):
            assert here[key] == pytest.approx(there[key], abs=1e-4), key


CARRIED = [
    ("linear", {"algorithm": "fedavg"}),
    ("linear", {"algorithm": "fedagg"}),
    ("linear", {"algorithm": "fedagg", "downlink_bits": 3}),
    ("linear", {"algorithm": "fedagg", "variant": "paper", "estimator": "history", "downlink_bits": 2}),
    ("linear", {"algorithm": "scaffold", "downlink_bits": 2}),
    ("lenet5", {"algorithm": "fedbabu"}),
    ("lenet5", {"algorithm": "fedgh"}),
]


def payload(content):
    """Bytes of the numbers in a message, as `fedagg.wire` counts them: without names, text and framing."""
    total = sum(array.numpy().nbytes for record in content.array_records.values() for array in record.values())
    for records in (content.config_records, content.metric_records):
        for value in (value for record in records.values() for value in record.values()):
            for item in value if isinstance(value, list) else [value]:
                total += (
                    len(item) if isinstance(item, bytes) else 0 if isinstance(item, str) else 1 if isinstance(item, bool) else 8
                )
    return total


@pytest.mark.parametrize(("name", "changes"), CARRIED)
def test_the_record_counts_what_the_wire_carries(name, changes):
    strategy, grid = federated(name, participation=1.0, rounds=2, test_apart=True, **changes)
    for kind, ledger in (("bytes_down", grid.sent), ("bytes_up", grid.received)):
        for row in strategy.record.history:
            here = [(m, size) for m, size in ledger if m.metadata.group_id == str(row["round"]) and trains(m)]
            assert len(here) == NODES * row["passes"]
            assert row[kind] == sum(payload(message.content) for message, _ in here)
            tests = [m for ledger in (grid.sent, grid.received) for m, _ in ledger if m.metadata.message_type == "evaluate"]
            mine = [m for m in tests if m.metadata.group_id == str(row["round"])]
            assert row["bytes_tests"] == sum(payload(message.content) for message in mine)
            # What Flower puts around a message does not grow with the model.
            assert all(payload(message.content) < size < payload(message.content) + 2500 for message, size in here)
    strategy, grid = federated(name, participation=1.0, rounds=2, **changes)
    carried = [message for message, _ in grid.sent + grid.received if message.metadata.message_type != "query"]
    counted = sum(row[kind] for row in strategy.record.history for kind in ("bytes_down", "bytes_up", "bytes_tests"))
    assert counted == sum(payload(message.content) for message in carried)


@pytest.mark.parametrize("mods", [[], [lambda message, context, call_next: call_next(message, context)]])
def test_nodes_that_try_rates_send_no_update(mods):
    """Only the training itself does; but where a node has mods, which may expect an update, every answer has one."""
    strategy = FedAggStrategy(model(), settings(algorithm="fedagg", participation=1.0, rounds=1))
    grid = HereGrid(client_app(model, node, mods=mods), NODES)
    strategy.run(grid, wait=0)
    passes = strategy.record.history[0]["passes"]
    assert passes > 5
    updates = [bool(m.content.array_records) for m, _ in grid.received if trains(m)]
    assert updates == [bool(mods)] * NODES * (passes - 1) + [True] * NODES


@pytest.mark.parametrize(("bits", "most"), [(2, 1.05), (3, 1.05), (32, 1.51)])
def test_fedagg_costs_what_fedavg_costs(bits, most):
    """At 2 and 3 bits, FedAgg's messages are at most 1.05 times FedAvg's, framing included."""
    totals = {}
    for method in ("fedavg", "fedagg"):
        more = {"pace": "base"} if method == "fedagg" else {}  # what a first round asks to find a rate is not looked at here
        _, grid = federated("lenet5", algorithm=method, downlink_bits=bits, participation=1.0, rounds=2, epochs=1, **more)
        late = [size for m, size in grid.sent + grid.received if trains(m) and m.metadata.group_id == "2"]
        totals[method] = sum(late)
    assert totals["fedagg"] <= most * totals["fedavg"]
    assert totals["fedagg"] > totals["fedavg"]


def trains(message) -> bool:
    return message.metadata.message_type == "train"


def spoil(client: int, how):
    """Tamper with what one node answers in the second round."""

    def tamper(sent, reply):
        if reply.metadata.src_node_id != 1000 + client or reply.metadata.group_id != "2":
            return [reply]
        return how(sent, reply)

    return tamper


def with_weights(change):
    def how(sent, reply):
        record = reply.content["arrays"]
        record["weights"] = Array(change(record["weights"].numpy().copy()))
        return [reply]

    return how


def without(record):
    def how(sent, reply):
        del reply.content[record]
        return [reply]

    return how


def with_metric(name, value):
    def how(sent, reply):
        reply.content["metrics"][name] = value
        return [reply]

    return how


def archive(sent, reply):
    """NumPy reads it without an error, but it is not an array."""
    held = io.BytesIO()
    np.savez(held, weights=reply.content["arrays"]["weights"].numpy())
    reply.content["arrays"]["weights"].data = held.getvalue()
    return [reply]


def far_in_many_steps(sent, reply):
    """A step is as long as the others', if there are enough of them."""
    return with_metric("steps", 2**50)(sent, *with_weights(lambda w: w + np.float32(1e6))(sent, reply))


def garbage(sent, reply):
    reply.content["arrays"]["weights"].data = b"\x93NUMPY\x01\x00 no such thing"
    return [reply]


BAD = {
    "missing": (lambda sent, reply: [], "no answer in time"),
    "error": (lambda sent, reply: [Message(Error(1, "disk\nfull"), reply_to=sent)], "failed: disk full"),
    "not a number": (with_weights(lambda w: np.full_like(w, np.nan)), "not finite"),
    "infinite": (with_weights(lambda w: w + np.float32(np.inf)), "not finite"),
    "far": (with_weights(lambda w: w + np.float32(1e6)), "moved absurdly far"),
    "short": (with_weights(lambda w: w[:-1]), "sent weights of the wrong shape"),
    "square": (with_weights(lambda w: w[None]), "sent weights of the wrong shape"),
    "text": (with_weights(lambda w: np.array(["x"] * len(w))), "sent weights of the wrong shape"),
    "garbage": (garbage, "sent weights that cannot be read"),
    "no arrays": (without("arrays"), "sent an incomplete answer"),
    "no metrics": (without("metrics"), "sent an incomplete answer"),
    "loss": (with_metric("loss", float("nan")), "not finite"),
    "rates": (with_metric("rates", [0.1]), "sent an incomplete answer"),
    "negative": (with_metric("rates", [-0.1, 0.1]), "sent impossible rates"),
    "no rates": (with_metric("rates", [0.0, 0.0]), "sent impossible rates"),
    "other rates": (with_metric("rates", [0.05, 0.06]), "sent impossible rates"),
    "steps": (with_metric("steps", 0), "made 0 steps, but its 70 samples take 6"),
    "endless steps": (with_metric("steps", float("inf")), "made inf steps, but its 70 samples take 6"),
    "many steps": (far_in_many_steps, "made 1.1259e+15 steps, but its 70 samples take 6"),
    "first": (with_metric("first", float("nan")), "sent an impossible first loss"),
    "huge first": (with_metric("first", 1e300), "sent an impossible first loss"),
    "archive": (archive, "sent weights of the wrong shape"),
}


def in_turn(client: int, kinds):
    """Tamper with what one node answers, in another way each round: the first kind in the second round."""

    def tamper(sent, reply):
        number = int(reply.metadata.group_id) - 2
        if reply.metadata.src_node_id != 1000 + client or not 0 <= number < len(kinds):
            return [reply]
        return BAD[kinds[number]][0](sent, reply)

    return tamper


@pytest.fixture(scope="module")
def spoiled():
    """A run in which client 2 sends all of them, one a round."""
    strategy, _ = federated(tamper=in_turn(2, list(BAD)), algorithm="fedavg", participation=1.0, rounds=len(BAD) + 2)
    return strategy


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_costs_one_client_one_round(spoiled, kind):
    number = 1 + list(BAD).index(kind)
    row, about = spoiled.record.history[number], spoiled.about[number]
    assert row["left_out"] == 1
    assert about["left_out"] == {"2": BAD[kind][1]}
    assert about["clients"] == [0, 1, 3]
    assert about["nodes"]["2"] == "1002"


def test_a_node_that_sends_nonsense_is_back_with_its_next_good_answer(spoiled):
    rows = spoiled.record.history
    assert (rows[0]["left_out"], rows[-1]["left_out"]) == (0, 0)
    assert torch.isfinite(spoiled.server.model.w).all()
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("kind", ["missing", "error", "short", "no metrics"])
def test_fedagg_does_not_take_a_bad_answer_as_a_sign_of_a_broken_model(kind):
    strategy, _ = federated(tamper=spoil(2, BAD[kind][0]), algorithm="fedagg", participation=1.0)
    rates = [row["own_rate"] for row in strategy.record.history]
    assert rates == sorted(rates)  # the guard would have halved it
    assert strategy.about[1]["clients"] == [0, 1, 3]


@pytest.mark.parametrize("method", ["fedagg", "fedcm", "scaffold"])
def test_numbers_beside_the_update_cannot_spoil_what_a_method_remembers(method):
    kinds = ["no rates", "many steps", "first", "huge first"]
    options = {"algorithm": method, "participation": 1.0, "rounds": 6}
    strategy, _ = federated(tamper=in_turn(2, kinds), **options)
    missing, _ = federated(tamper=in_turn(2, ["missing"] * 4), **options)
    assert [row["left_out"] for row in strategy.about] == [{}, *({"2": BAD[kind][1]} for kind in kinds), {}]
    assert torch.equal(strategy.server.model.w, missing.server.model.w)


@pytest.mark.parametrize("times", [1.5, 1e-3])
def test_fedagg_leaves_out_rates_beyond_its_bounds(times):
    def how(sent, reply):
        asked = sent.content["config"]
        assert asked["low"] < asked["high"]
        end = asked["high"] if times > 1 else asked["low"]
        return with_metric("rates", [times * end] * 2)(sent, reply)

    strategy, _ = federated(tamper=spoil(2, how), algorithm="fedagg", participation=1.0)
    assert strategy.about[1]["left_out"] == {"2": "sent impossible rates"}


HONEST = [{"algorithm": name} for name in ("fedavg", "fedprox", "feddyn", "scaffold", "fedcm", "fedexp", "fedadam", "fedagg")]
HONEST += [{"variant": "paper", "estimator": name, "passes": 2} for name in ("probe", "history", "pretrain")]
HONEST += [{"algorithm": "fedagg", "downlink_bits": 3, "rounds": 8}]


@pytest.mark.parametrize("changes", HONEST)
def test_honest_nodes_are_not_left_out(changes):
    strategy, _ = federated(**changes)
    assert [row["left_out"] for row in strategy.record.history] == [0] * strategy.done


@pytest.mark.filterwarnings("ignore:left out")
def test_training_that_diverges_is_judged_as_in_the_simulator():
    """Its losses and rates are not numbers, and FedAgg must learn of it."""
    options = {"algorithm": "fedagg", "participation": 1.0, "lr": 1e3, "pace": "base", "rounds": 2}
    alone = simulated("lenet5", **options)
    strategy, _ = federated("lenet5", **options)
    assert [row["left_out"] for row in strategy.record.history] == [row["left_out"] for row in alone.history] == [3, 3]
    assert strategy.about[0]["left_out"]["2"] == "not finite"
    assert torch.allclose(strategy.server.model.w, strategy.layout.pack(alone.model).w, rtol=0, atol=1e-5)


class LyingGrid(HereGrid):
    """Node 1002 gives made-up answers to questions of one kind: always the same one, or another one each round."""

    kind: str
    lies: list[dict]

    def send_and_receive(self, messages, *, timeout=None):
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if (reply.metadata.message_type, reply.metadata.src_node_id) == (self.kind, 1002):
                lies = self.lies[0] if len(self.lies) == 1 else self.lies[int(reply.metadata.group_id) - 1]
                reply.content["metrics"] = MetricRecord(dict(reply.content["metrics"]) | lies)
        return replies


def lied_to(kind, *lies, test_apart=True, **changes):
    grid = LyingGrid(client_app(model, node), NODES)
    grid.kind, grid.lies = kind, list(lies)
    strategy = FedAggStrategy(model(), settings(algorithm="fedavg", participation=1.0, **changes), test_apart=test_apart)
    strategy.run(grid, wait=0)
    return strategy


@pytest.mark.parametrize(("samples", "refused"), [(10**12, False), (2**62, True)])
def test_a_node_that_claims_too_many_samples_takes_no_memory_and_no_part(samples, refused):
    strategy = lied_to("query", {"num-examples": samples})
    assert [row["clients"] for row in strategy.about] == [[0, 1, 3]] * 3
    assert strategy.members.refused == ({1002: f"it claims {samples} samples, more than a node can hold"} if refused else {})


SCORES = [
    {"accuracy": [1e9, 100.0]},
    {"accuracy": [-1.0, 100.0]},
    {"accuracy": [float("nan"), 100.0]},
    {"accuracy": 0.5},
    {"accuracy": [50.5, 100.0]},
    {"accuracy": [50.0, 90.0]},
    {"accuracy": [50.0]},
    {"accuracy": [50.0, 100.0, 0.0]},
    {"loss": 1e300},
    {"loss": float("nan")},
    {"num-examples": 2**62},
    {"num-examples": 10.5},
    {"num-examples": -1},
]


@pytest.fixture(scope="module")
def scores():
    """A run in which a node sends all of these, one per round, and a run in which no node does."""
    honest, _ = federated(algorithm="fedavg", participation=1.0, rounds=len(SCORES), test_apart=True)
    return lied_to("evaluate", *SCORES, rounds=len(SCORES)), honest


@pytest.mark.parametrize("number", range(len(SCORES)))
def test_impossible_test_results_are_not_used(scores, number):
    here, there = (strategy.record.history[number] for strategy in scores)
    assert (here["tested"], there["tested"]) == (3, 4)  # all nodes have the same test samples
    assert (here["loss"], here["accuracy"]) == pytest.approx((there["loss"], there["accuracy"]))
    what = "an incomplete answer" if isinstance(SCORES[number].get("accuracy"), float) else "impossible test results"
    assert scores[0].about[number]["remarks"] == {"2": f"sent {what}; not used"}


def test_impossible_test_results_do_not_invalidate_their_update():
    strategy = lied_to("train", {"test-accuracy": [101.0, 100.0]}, test_apart=False)
    assert [row["tested"] for row in strategy.record.history] == [3, 3, 4]  # of the last, it tells the truth
    assert [row["clients"] for row in strategy.about] == [[0, 1, 2, 3]] * 3
    remark = {"2": "sent impossible test results; not used"}
    assert [row.get("remarks") for row in strategy.about] == [None, remark, remark]  # in round 1 nobody asked


def test_a_node_whose_first_hello_fails_is_asked_again():
    hellos = []

    def late(context):
        number = context.node_config["partition-id"]
        hellos.append(number)
        if number == 3 and hellos.count(3) < 3:  # the first two times
            raise OSError("share not mounted yet")
        return node(context)

    strategy = FedAggStrategy(model(), settings(algorithm="fedavg", participation=1.0))
    strategy.run(HereGrid(client_app(model, late), NODES), wait=0)
    assert [row["clients"] for row in strategy.about] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert strategy.members.refused == strategy.members.failed == {}


def secure_run(name="linear", evil=(), tamper=None, **changes):
    """A run under secure aggregation; from round 2 on, `evil` alters in turn what client 2 answers in the clear."""

    def mod(message, context, call_next):
        reply, number = call_next(message, context), message.content["config"].get("round", 0)
        if context.node_config["partition-id"] == 2 and 1 <= number <= len(evil):
            evil[number - 1](reply.content)
        return reply

    grid = HereGrid(client_app(lambda: model(name), node, mods=[mod]), NODES, tamper)
    strategy = FedAggStrategy(model(name), settings(participation=1.0, **changes), secure=True)
    strategy.run(grid, wait=0)
    return strategy


def saying(name, value):
    return lambda content: content.config_records["fitres.metrics"].update({name: value})


INCOMPLETE = "sent an incomplete answer"
BAD_NUMBERS = {
    "no along": (lambda content: content.config_records["fitres.metrics"].pop("along"), INCOMPLETE),
    "long along": (saying("along", "[1.0, 2.0]"), INCOMPLETE),
    "infinite along": (saying("along", "[1" + 400 * "0" + "]"), "not finite"),
    "deep along": (saying("along", 100_000 * "["), INCOMPLETE),
    "text": (saying("norm2", "x"), INCOMPLETE),
    "one rate": (saying("rates", "[0.1]"), INCOMPLETE),
    "no rates": (saying("rates", "[0.0, 0.0]"), "sent impossible rates"),
    "nan rates": (saying("rates", "[NaN, NaN]"), "sent impossible rates"),
    "first": (saying("first", float("nan")), "sent an impossible first loss"),
    "loss": (saying("loss", float("nan")), "not finite"),
    "steps": (saying("steps", 2**50), "made 1.1259e+15 steps, but its 70 samples take 6"),
}


@pytest.fixture(scope="module")
def bad_numbers_run():
    """A run in which client 2 sends all of them, one a round."""
    return secure_run(evil=[evil for evil, _ in BAD_NUMBERS.values()], algorithm="fedagg", rounds=len(BAD_NUMBERS) + 2)


@pytest.mark.parametrize("kind", BAD_NUMBERS)
def test_under_secure_aggregation_an_impossible_number_skips_the_round(bad_numbers_run, kind):
    number = 1 + list(BAD_NUMBERS).index(kind)
    assert bad_numbers_run.record.history[number]["unchanged"]
    assert bad_numbers_run.about[number]["left_out"] == {"2": BAD_NUMBERS[kind][1]}


def test_under_secure_aggregation_rounds_after_a_skipped_one_count(bad_numbers_run):
    first, *_, last = bad_numbers_run.record.history
    assert not first.get("unchanged", False)
    assert not last.get("unchanged", False)
    assert bad_numbers_run.about[-1]["clients"] == [0, 1, 2, 3]


def test_under_secure_aggregation_an_answer_that_flower_cannot_read_skips_the_round():
    def how(sent, reply):
        reply.content.config_records.pop("fitres.metrics", None)
        return [reply]

    strategy = secure_run(tamper=spoil(2, how), algorithm="fedagg")
    assert [row.get("unchanged", False) for row in strategy.record.history] == [False, True, False]
    assert strategy.about[1]["left_out"] == {str(k): "secure aggregation broke off: KeyError" for k in range(NODES)}


@pytest.mark.parametrize(
    "changes", [{"algorithm": "fedgh"}, *({"variant": "paper", "estimator": e} for e in ("probe", "history", "pretrain"))]
)
def test_secure_aggregation_refuses_methods_that_need_more_than_sums(changes):
    with pytest.raises(SettingError, match=r"^secure = True: .*fedgh"):
        secure_run("lenet5", **changes)


def few(context):
    """Twelve samples of classes that depend on the node: the first has never seen class 2."""
    number = context.node_config["partition-id"]
    generator = torch.Generator().manual_seed(number)
    return torch.randn(12, 6, generator=generator), torch.arange(12) % (2 if number == 0 else 3)


def small(outputs: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, outputs))


def represented(tamper=None, nodes=few):
    strategy = FedAggStrategy(small(), settings(algorithm="fedgh", clients=3, participation=1.0))
    strategy.run(HereGrid(client_app(small, nodes), 3, tamper), wait=0)
    return strategy


def test_a_node_that_lacks_the_last_class_takes_part_in_fedgh():
    strategy = represented()
    assert [row["left_out"] for row in strategy.record.history] == [0, 0, 0]
    given = [few(HereGrid(None, 3).contexts[1000 + k]) for k in range(3)]
    x, y = (torch.cat(parts) for parts in zip(*given, strict=True))
    alone = fedagg.run(
        strategy.config, data=fedagg.Dataset(x, y, x, y), model=small(), parts=[range(12), range(12, 24), range(24, 36)]
    )
    assert torch.allclose(strategy.server.model.w, strategy.layout.pack(alone.model).w, rtol=0, atol=1e-5)


TABLES = {
    "a class less": (
        lambda config: {"counts": config["counts"][:8], "classes": config["classes"][:40]},
        "vectors of the wrong shape",
    ),
    "a feature less": (lambda config: {"classes": config["classes"][:48]}, "vectors of the wrong shape"),
    "nothing": (lambda config: {"counts": b"", "classes": b""}, "vectors of the wrong shape"),
    "negative": (lambda config: {"counts": np.array([-1, 1, 1], np.float32).tobytes()}, "impossible counts"),
    "not a number": (lambda config: {"counts": np.array([np.nan, 1, 1], np.float32).tobytes()}, "impossible counts"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_class_table_of_another_shape_costs_one_client_one_round(kind):
    change, cause = TABLES[kind]

    def how(sent, reply):
        reply.content["config"].update(change(reply.content["config"]))
        return [reply]

    strategy = represented(spoil(2, how))
    assert [row["left_out"] for row in strategy.record.history] == [0, 1, 0]
    assert strategy.about[1]["left_out"] == {"2": f"sent {cause}"}


def test_labels_that_the_head_does_not_tell_apart_cost_the_node_alone():
    def more(context):
        x, y = few(context)
        return (x, y + 1) if context.node_config["partition-id"] == 1 else (x, y)

    strategy = represented(nodes=more)
    assert [row["left_out"] for row in strategy.record.history] == [1, 1, 1]
    assert strategy.about[0]["left_out"]["1"] == "failed: setting data(context)"


class PatientNumber4711(ValueError):
    """A class of the user's, whose name may say something, too."""


@pytest.mark.parametrize(
    ("where", "error", "kind"),
    [
        *((where, PatientNumber4711("patient 4711"), "ValueError") for where in ("query", "train", "evaluate")),
        ("train", Exception("4711"), "Exception"),
    ],
)
def test_only_the_kind_of_an_error_on_a_node_is_sent(where, error, kind, caplog):
    """The text, in which there may be a sample, stays in the node's own log."""

    def failing(context):
        if context.node_config["partition-id"] == 2 and len(grid.sent) > {"query": 0, "train": 4, "evaluate": 8}[where]:
            raise error
        return node(context)

    grid = HereGrid(client_app(model, failing), NODES)
    strategy = FedAggStrategy(model(), settings(algorithm="fedavg", participation=1.0, rounds=1))
    strategy.run(grid, wait=0)
    told = [reply for reply, _ in grid.received if reply.has_error()]
    assert {reply.metadata.message_type for reply in told} >= {where}
    assert {reply.error.reason for reply in told} == {kind}
    if where == "train":
        assert strategy.about[0]["left_out"] == {"2": f"failed: {kind}"}
    assert "4711" in caplog.text


def test_a_second_answer_does_not_count():
    twice = spoil(1, lambda sent, reply: [reply, reply])
    once, _ = federated(algorithm="fedagg", participation=1.0)
    strategy, _ = federated(tamper=twice, algorithm="fedagg", participation=1.0)
    assert torch.equal(once.server.model.w, strategy.server.model.w)
    assert strategy.about[1]["remarks"] == {"1": "answered twice; the first answer counts"}


class SlowGrid(HereGrid):
    """Client 2's answers of round 2 arrive after the deadline: with the next replies, or the next of their kind."""

    late: list[Message]

    def __init__(self, *args, same_kind):
        super().__init__(*args)
        self.same_kind, self.late = same_kind, []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        kinds = {m.metadata.message_type for m in messages}
        now = [m for m in self.late if not self.same_kind or m.metadata.message_type in kinds]
        self.late = [m for m in self.late if m not in now]
        for reply in super().send_and_receive(messages, timeout=timeout):
            slow = (reply.metadata.src_node_id, reply.metadata.group_id) == (1002, "2")
            (self.late if slow else now).append(reply)
        return now


class DeafGrid(SlowGrid):
    """The same answers never arrive."""

    def send_and_receive(self, messages, *, timeout=None):
        self.late = []
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize(("method", "same_kind"), [("fedagg", True), ("feddyn", True), ("feddyn", False)])
def test_an_answer_after_the_deadline_is_not_used_and_not_an_error(method, same_kind):
    runs = {}
    for kind in (SlowGrid, DeafGrid):
        grid = kind(client_app(model, node), NODES, same_kind=same_kind)
        strategy = FedAggStrategy(model(), settings(algorithm=method, participation=1.0, rounds=4))
        strategy.run(grid, wait=0)
        runs[kind] = strategy
        assert grid.late == []
    slow, deaf = runs[SlowGrid], runs[DeafGrid]
    assert torch.equal(slow.server.model.w, deaf.server.model.w)
    assert [row["clients"] for row in slow.about] == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert [row["left_out"] for row in slow.about] == [{}, {"2": "no answer in time"}, {}, {}]
    assert [row["nodes"]["2"] for row in slow.about] == ["1002"] * 4
    # Of the same kind, it comes in round 3; otherwise while round 2 ends.
    remark = {"2": "answered too late; not used"}
    assert [row.get("remarks", {}) for row in slow.about] == ([{}, {}, remark, {}] if same_kind else [{}, remark, {}, {}])
    assert [row.get("remarks") for row in deaf.about] == [None] * 4
    # The test results that should have come with it, of the model that round 2 began with, are not used either.
    assert [row["tested"] for row in slow.record.history] == [3, 4, 4, 4]
    for here, there in zip(slow.record.history, deaf.record.history, strict=True):
        assert (here["loss"], here["accuracy"]) == (there["loss"], there["accuracy"])


def test_a_question_that_expired_at_the_superlink_is_no_answer_in_time():
    """What Flower 1.41 reports for a node whose message outlived its time to live, as seen with real processes."""
    expired = Error(ErrorCode.MESSAGE_UNAVAILABLE, "Error: Message Unavailable - The requested message could not be found.")
    strategy, _ = federated(tamper=spoil(2, lambda sent, reply: [Message(expired, reply_to=sent)]), participation=1.0)
    assert strategy.about[1]["left_out"] == {"2": "no answer in time"}


def test_a_client_that_was_left_out_keeps_its_earlier_memory():
    """FedDyn: the node's memory must be as if the lost round had not been, as in the simulator."""
    lost, _ = federated(tamper=spoil(2, BAD["not a number"][0]), algorithm="feddyn", participation=1.0, rounds=4)
    missing, _ = federated(tamper=spoil(2, BAD["missing"][0]), algorithm="feddyn", participation=1.0, rounds=4)
    never, _ = federated(algorithm="feddyn", participation=1.0, rounds=4)
    assert torch.equal(lost.server.model.w, missing.server.model.w)
    assert not torch.equal(lost.server.model.w, never.server.model.w)


def test_too_few_answers_skip_the_round():
    silence = spoil(2, lambda sent, reply: [])
    strategy, _ = federated(tamper=silence, quorum=NODES, algorithm="fedagg", participation=1.0)
    shorter, _ = federated(algorithm="fedagg", participation=1.0, rounds=1)
    rows = strategy.record.history
    assert [row.get("unchanged", False) for row in rows] == [False, True, False]
    assert rows[1]["accuracy"] == rows[0]["accuracy"] == shorter.record.history[0]["accuracy"]
    assert strategy.about[1]["left_out"] == {"2": "no answer in time"}


def test_a_skipped_round_leaves_the_servers_state_alone():
    """Not even the rounding error of a field that nobody answered: the first field is sent in round 2."""
    silence = spoil(2, lambda sent, reply: [])
    options = {"algorithm": "fedagg", "downlink_bits": 2, "participation": 1.0}
    skipped, _ = federated(tamper=silence, quorum=NODES, rounds=2, **options)
    before, _ = federated(rounds=1, **options)
    assert skipped.server.downlink.error is None
    assert torch.equal(skipped.server.model.w, before.server.model.w)
    assert all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(before.server.algorithm.state[name]))
        for name, value in skipped.server.algorithm.state.items()
    )


def test_a_round_waits_for_nodes_and_is_not_lost(tmp_path):
    """All nodes leave before round 2. The run waits, says how to continue, and continues to the weights of an undisturbed run."""
    options = {"algorithm": "fedagg", "downlink_bits": 3, "participation": 1.0, "rounds": 4}
    whole, _ = federated(**options)
    grid = HereGrid(client_app(model, node), NODES)

    class Watched(FedAggStrategy):
        def configure_train(self, server_round, arrays, config, grid):
            grid.gone = set(grid.contexts) if self.done == 1 else grid.gone
            return super().configure_train(server_round, arrays, config, grid)

    strategy = Watched(model(), settings(**options), out=tmp_path, patience=0.6)
    with pytest.raises(FedaggError, match=r"^round 2: 0 nodes are online after 0.6 seconds, but 1 are needed; .* the same command"):
        strategy.run(grid, wait=0)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "result.json").exists()
    grid.gone = set()
    again = FedAggStrategy(model(), settings(**options), out=tmp_path)
    again.run(grid, wait=0)
    assert torch.equal(again.server.model.w, whole.server.model.w)
    assert [row["round"] for row in again.record.history] == [1, 2, 3, 4]


@pytest.mark.parametrize("secure", [False, True])
def test_a_round_that_nobody_answers_is_done_again(secure):
    """They come back before patience ends. The round is recorded once, and the model is that of an undisturbed run."""
    lost = []

    def silence(sent, reply):
        if reply.metadata.group_id == "2" and len(lost) < NODES:
            lost.append(1)
            return []
        return [reply]

    runs = []
    for tamper in (None, silence):
        strategy = FedAggStrategy(model(), settings(algorithm="fedavg", participation=1.0), secure=secure)
        strategy.run(HereGrid(client_app(model, node), NODES, tamper), wait=0)
        assert [row["round"] for row in strategy.record.history] == [1, 2, 3]
        assert not any(row.get("unchanged") for row in strategy.record.history)
        runs.append(strategy.server.model.w)
    assert len(lost) == NODES
    assert torch.allclose(*runs, rtol=0, atol=1e-4 if secure else 0)
    strategy = FedAggStrategy(model(), settings(participation=1.0), patience=0, secure=secure)
    with pytest.raises(FedaggError, match="round 1: nobody has answered for 0 seconds; nothing was kept"):
        strategy.run(HereGrid(client_app(model, node), NODES, lambda sent, reply: []), wait=0)


def test_a_node_that_is_slow_to_say_hello_delays_nobody(caplog):
    """Node 1003 loads for two rounds: the rounds go on without it. One that stays silent is asked again, and the log says so."""

    class Slow(HereGrid):
        def pull_messages(self, message_ids):
            done = strategy.done
            held = {1003} if done < 2 else set()
            late = [m for m in self.waiting if m.metadata.src_node_id in held]
            self.waiting = [m for m in self.waiting if m not in late]
            ready = super().pull_messages(message_ids)
            self.waiting += late
            return ready

    grid = Slow(client_app(model, node), NODES)
    strategy = FedAggStrategy(model(), settings(algorithm="fedavg", participation=1.0, rounds=4))
    strategy.run(grid, wait=0)
    assert [row["clients"] for row in strategy.about] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert sum(message.metadata.group_id == "hello" for message, _ in grid.sent) == NODES  # once each

    class Deaf(HereGrid):
        def pull_messages(self, message_ids):
            self.waiting = [m for m in self.waiting if m.metadata.src_node_id != 1003]
            return super().pull_messages(message_ids)

    grid = Deaf(client_app(model, node), NODES)
    strategy = FedAggStrategy(model(), settings(algorithm="fedavg", participation=1.0, rounds=6))
    strategy.members.timeout = 0.0
    strategy.run(grid, wait=0)
    hellos = [m for m, _ in grid.sent if m.metadata.group_id == "hello" and m.metadata.dst_node_id == 1003]
    assert len(hellos) == 3  # then there is a pause
    assert caplog.text.count("node 1003 is left out until it answers; it failed: no answer in 0 seconds") == 1


def test_a_round_closes_when_enough_have_answered():
    """Node 1003 answers neither work nor tests. At three of four answers the round is over; an error is not one of them."""

    class Slow(HereGrid):
        def pull_messages(self, message_ids):
            ready = super().pull_messages(message_ids)
            late = [m for m in ready if m.metadata.src_node_id == 1003 and m.metadata.message_type != "query"]
            self.waiting += late
            return [m for m in ready if m not in late]

    began = time.monotonic()
    strategy = FedAggStrategy(model(), settings(algorithm="fedavg", participation=1.0), timeout=60.0, close_at=0.7)
    strategy.run(Slow(client_app(model, node), NODES), wait=0)
    assert time.monotonic() - began < 30
    assert [row["left_out"] for row in strategy.about] == [{"3": "no answer in time"}] * 3
    assert [row["tested"] for row in strategy.record.history] == [3] * 3
    missing, _ = federated(
        tamper=lambda sent, reply: [] if reply.metadata.src_node_id == 1003 else [reply], algorithm="fedavg", participation=1.0
    )
    assert torch.equal(strategy.server.model.w, missing.server.model.w)

    error = spoil(0, lambda sent, reply: [Message(Error(2, "ValueError"), reply_to=sent)])
    all_heard = FedAggStrategy(model(), settings(algorithm="fedavg", participation=1.0), timeout=60.0, close_at=0.7)
    all_heard.run(HereGrid(client_app(model, node), NODES, error), wait=0)
    assert all_heard.about[1]["left_out"] == {"0": "failed: ValueError"}
    for wrong in ({"close_at": 0.0}, {"close_at": 1.1}, {"close_at": 0.5, "secure": True}):
        with pytest.raises(SettingError, match="close-at"):
            FedAggStrategy(model(), settings(), **wrong)


def test_an_unusable_answer_does_not_count_for_the_quorum():
    lost, _ = federated(tamper=spoil(2, BAD["not a number"][0]), quorum=NODES, algorithm="fedavg", participation=1.0)
    assert [row.get("unchanged", False) for row in lost.record.history] == [False, True, False]
    assert lost.about[1]["left_out"] == {"2": "not finite"}


def test_a_round_that_is_skipped_in_its_second_pass_leaves_the_servers_state_alone():
    asked = []

    def silence(sent, reply):
        if reply.metadata.group_id == "2" and reply.metadata.src_node_id == 1002:
            asked.append(1)
            return [] if len(asked) == 2 else [reply]
        return [reply]

    options = {"variant": "paper", "estimator": "probe", "passes": 2, "participation": 1.0}
    skipped, _ = federated(tamper=silence, quorum=NODES, rounds=2, **options)
    before, _ = federated(rounds=1, **options)
    assert skipped.record.history[1]["unchanged"] is True
    assert all(torch.equal(value, before.server.algorithm.state[name]) for name, value in skipped.server.algorithm.state.items())


@pytest.mark.parametrize(("gone", "then"), [({1003}, set()), (set(), {1000})])
def test_a_rehearsal_is_looked_up_by_client(gone, then):
    """Nodes that came after it have the largest bound of those that were there, and the others their own."""
    grid = HereGrid(client_app(model, node), NODES)
    grid.gone = gone
    orders = []

    class Watched(FedAggStrategy):
        def configure_train(self, server_round, arrays, config, grid):
            grid.gone = then if server_round == 2 else grid.gone
            return super().configure_train(server_round, arrays, config, grid)

        def order(self, model, work, job, t, step):
            orders.append((t, job.client, float(work.high[job.position]) if torch.is_tensor(work.high) else None))
            return super().order(model, work, job, t, step)

    strategy = Watched(model(), settings(variant="paper", estimator="pretrain", participation=1.0, rounds=2))
    strategy.run(grid, wait=0)
    rows = strategy.server.algorithm.state["rehearsed_beta"]
    beta = {int(client): value for t, client, value in rows.tolist() if t == 1}
    bounds = {client: high for t, client, high in orders if t == 1 and high is not None}
    assert bounds.keys() == {0, 1, 2, 3} - {node - 1000 for node in then}
    for client, high in bounds.items():
        assert high == pytest.approx(min(0.999, 1 / beta.get(client, max(beta.values()))), rel=1e-5)


def test_more_rounds_are_rehearsed_from_where_the_run_began(tmp_path):
    options = {"variant": "paper", "estimator": "pretrain", "participation": 1.0}
    federated(rounds=2, out=tmp_path / "run", **options)
    grown, _ = federated(rounds=4, out=tmp_path / "run", **options)
    simulated(rounds=2, out=tmp_path / "alone", **options)
    alone = simulated(rounds=4, resume=tmp_path / "alone", **options)
    assert torch.allclose(grown.server.model.w, grown.layout.pack(alone.model).w, rtol=0, atol=1e-5)


@pytest.mark.parametrize("setting", ["normalize", "validation", "dropout_rate", "flip_rate"])
def test_settings_that_only_a_simulation_uses_are_refused(setting):
    with pytest.raises(SettingError, match=f"{setting}.*simulations"):
        FedAggStrategy(model(), settings(**{setting: True if setting == "normalize" else 0.5}))


def test_nodes_join_late_leave_and_come_back():
    grid = HereGrid(client_app(model, node), NODES)
    grid.gone = {1002, 1003}
    comings = {2: {1003}, 3: set(), 4: {1000}}

    class Watched(FedAggStrategy):
        def configure_train(self, server_round, arrays, config, grid):
            grid.gone = comings.get(server_round, grid.gone)
            return super().configure_train(server_round, arrays, config, grid)

    strategy = Watched(model(), settings(participation=1.0, rounds=4))
    strategy.run(grid, wait=0)
    assert [row["clients"] for row in strategy.about] == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3]]


def test_two_nodes_cannot_be_the_same_client():
    grid = HereGrid(client_app(model, node), NODES)
    grid.contexts[1003].node_config["partition-id"] = 0
    strategy = FedAggStrategy(model(), settings(participation=1.0, rounds=1))
    strategy.run(grid, wait=0)
    assert strategy.about[0]["clients"] == [0, 1, 2]
    assert strategy.members.refused == {1003: "partition-id 0 is taken by node 1000; give every SuperNode its own"}


def test_a_node_of_another_version_is_left_out():
    class Older(HereGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            for reply in replies:
                if reply.metadata.group_id == "hello" and reply.metadata.src_node_id == 1001:
                    reply.content["version"]["fedagg"] = "0.0.1"
            return replies

    strategy = FedAggStrategy(model(), settings(participation=1.0, rounds=1))
    strategy.run(Older(client_app(model, node), NODES), wait=0)
    assert strategy.about[0]["clients"] == [0, 2, 3]
    assert strategy.members.refused == {1001: f"it runs fedagg 0.0.1, the server {fedagg.__version__}; install the same on both"}


def test_a_node_that_introduces_itself_twice_is_one_node():
    class Echo(HereGrid):
        def send_and_receive(self, messages, *, timeout=None):
            return [copy for reply in super().send_and_receive(messages, timeout=timeout) for copy in (reply, reply)]

    strategy = FedAggStrategy(model(), settings(participation=1.0, rounds=2))
    strategy.run(Echo(client_app(model, node), NODES), wait=0)
    assert strategy.members.refused == {}
    assert [row["clients"] for row in strategy.about] == [[0, 1, 2, 3]] * 2


def test_a_node_that_returns_with_another_id_waits_until_its_old_id_has_left():
    """Without keys a restarted SuperNode has a new id, and Flower believes in the old one until its heartbeat fails."""
    grid = HereGrid(client_app(model, node), NODES)
    grid.contexts[1003].node_config["partition-id"] = 0
    absent = {1: {1003}, 2: set(), 3: {1000}}

    class Watched(FedAggStrategy):
        def configure_train(self, server_round, arrays, config, grid):
            grid.gone = absent[server_round]
            return super().configure_train(server_round, arrays, config, grid)

    strategy = Watched(model(), settings(participation=1.0, rounds=3))
    grid.gone = absent[1]
    strategy.run(grid, wait=0)
    assert [row["clients"] for row in strategy.about] == [[0, 1, 2]] * 3
    assert [row["nodes"]["0"] for row in strategy.about] == ["1000", "1000", "1003"]


@pytest.mark.parametrize("method", ["fedagg", "feddyn", "fedadam"])
def test_a_restarted_server_continues_as_if_nothing_had_happened(method, tmp_path):
    """The server is killed in the middle of round 3; a new run finishes. The nodes' state is on their disks."""
    whole, _ = federated(algorithm=method, downlink_bits=3, rounds=4, out=tmp_path / "whole")

    def nodes(tamper=None):
        grid = HereGrid(client_app(model, node), NODES, tamper)
        for context in grid.contexts.values():
            context.node_config["state-dir"] = str(tmp_path / "state")
        return grid

    config = settings(algorithm=method, downlink_bits=3, rounds=4)
    with pytest.raises(PowerCut):
        FedAggStrategy(model(), config, out=tmp_path / "cut").run(nodes(dies_in_round_3), wait=0)
    again = FedAggStrategy(model(), config, out=tmp_path / "cut")
    assert again.done == 2
    again.run(nodes(), wait=0)
    assert torch.equal(again.server.model.w, whole.server.model.w)
    files = [tmp_path / run / name for run in ("cut", "whole") for name in ("clients.jsonl", "model.safetensors")]
    assert files[0].read_text() == files[2].read_text()
    assert files[1].read_bytes() == files[3].read_bytes()


@pytest.mark.parametrize("other", ["scaffold", "feddyn"])
def test_what_nodes_remember_of_another_run_is_not_taken_for_this_one(other, tmp_path):
    whole, _ = federated(algorithm="scaffold", rounds=4)

    def nodes(tamper=None):
        grid = HereGrid(client_app(model, node), NODES, tamper)
        for context in grid.contexts.values():
            context.node_config["state-dir"] = str(tmp_path / "state")
        return grid

    config = settings(algorithm="scaffold", rounds=4)
    with pytest.raises(PowerCut):
        FedAggStrategy(model(), config, out=tmp_path / "cut").run(nodes(dies_in_round_3), wait=0)
    FedAggStrategy(model(), settings(algorithm=other, rounds=2)).run(nodes(), wait=0)
    again = FedAggStrategy(model(), config, out=tmp_path / "cut")
    again.run(nodes(), wait=0)
    assert torch.equal(again.server.model.w, whole.server.model.w)


def test_settings_come_from_the_run_configuration():
    config, own = split({"clients": 5, "lr": 0.1, "downlink-bits": 3, "timeout": 30, "out": "", "quorum": 2})
    with pytest.raises(SettingError, match="out = 'runs': give an absolute path"):
        split({"clients": 5, "out": "runs"})
    assert (config.clients, config.lr, config.downlink_bits, config.participation) == (5, 0.1, 3, 1.0)
    assert own == {"timeout": 30.0, "quorum": 2}
    _, own = split({"clients": 5, "close-at": 0.8, "patience": 60})
    assert own == {"close_at": 0.8, "patience": 60.0}
    bits = [split({"clients": 5, **given})[0].downlink_bits for given in ({}, {"algorithm": "scaffold"}, {"downlink-bits": 32})]
    assert bits == [3, 32, 32]  # FedAgg's field is rounded unless told otherwise
    for wrong, about in (
        ({}, "clients"),
        ({"clients": 2, "roundz": 1}, "roundz"),
        ({"clients": 2, "timeout": "x"}, "timeout"),
    ):
        with pytest.raises(SettingError, match=about):
            split(dict(wrong))


def test_data_in_the_forms_that_training_scripts_have():
    x, y = torch.rand(6, 1, 4, 4), torch.arange(6) % 3
    pairs = TensorDataset(x, y)
    for given in (pairs, DataLoader(pairs, batch_size=2), (x, y), (x.numpy(), y.numpy())):
        found = node_data(given)
        assert not found.tests
        assert torch.equal(found.data.x_train, x)
        assert torch.equal(found.data.y_train, y)
    for given in ((pairs, pairs), (x, y, x, y), fedagg.Dataset(x, y, x, y)):
        assert node_data(given).tests
    with pytest.raises(SettingError, match="holds the labels"):
        node_data({"x": x})


PLUGIN = """
from dataclasses import dataclass
from fedagg import option, register
from fedagg.algorithms.scaffold import Scaffold


@register("own-scaffold")
@dataclass
class Own(Scaffold):
    keep: float = option(1.0, "share of what is remembered that is kept")

    def remember(self, chunk, work):
        return self.keep * super().remember(chunk, work)
"""


def test_server_and_nodes_load_the_plugin_of_the_run_configuration(tmp_path, monkeypatch):
    path = tmp_path / "own_scaffold.py"
    path.write_text(PLUGIN)
    given = {"plugin": str(path), "algorithm": "own-scaffold", "keep": 0.5, "clients": NODES, "rounds": 3, "lr": 0.05}
    try:
        config, _ = split(dict(given))
        alone = simulated(**{key: value for key, value in config.flat().items() if value is not None})
        grid = HereGrid(client_app(model, node), NODES)
        for context in grid.contexts.values():
            context.run_config["plugin"] = str(path)
        strategy = FedAggStrategy(model(), config)
        REGISTRY.pop("own-scaffold")  # a node is another process, and has loaded nothing yet
        monkeypatch.setattr(plugins, "_loaded", {})
        strategy.run(grid, wait=0)
        assert "own-scaffold" in REGISTRY
    finally:
        REGISTRY.pop("own-scaffold", None)
    assert torch.allclose(strategy.server.model.w, strategy.layout.pack(alone.model).w, rtol=0, atol=1e-5)
    assert not any(row["left_out"] for row in strategy.record.history)


def test_data_are_made_once_and_mapped_from_the_disk(tmp_path):
    made = []

    def make():
        made.append(1)
        return np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6) % 3

    context = HereGrid(None, 3).contexts[1001]
    assert [type(part) for part in cached(context, make)] == [np.ndarray] * 2
    context.node_config["state-dir"] = str(tmp_path / "state")
    for _ in range(2):
        x, y = cached(context, make)
        assert isinstance(x, np.memmap)
        assert np.array_equal(x, np.arange(12).reshape(6, 2))
        assert np.array_equal(y, np.arange(6) % 3)
        node_data((x, y)).data.x_train.zero_()  # changes this process's pages alone
    assert len(made) == 2  # once without a folder, once with it
    cached(context, make, name="newer")
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["data-1", "newer-1"]
    assert len(made) == 3
