"""What the server need not see: secure aggregation, clipping and noise with Flower's own tools."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

import numpy as np
import torch
from flwr.client.mod import secaggplus_mod
from flwr.client.mod.secure_aggregation.secaggplus_mod import SecAggPlusState, _collect_masked_vectors
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

import fedagg
from fedagg.errors import SettingError
from fedagg.flower import FedAggStrategy, Privacy, client_app
from fedagg.flower.masks import mask, with_names
from fedagg.flower.privacy import epsilon
from fedagg.flower.secagg import LEVELS, private_answer
from fedagg.flower.server import split
from flower_grid import HereGrid, PowerCut, dies_in_round_3
from test_flower import BAD, DATA, NODES, PARTS, federated, model, node, settings, spoil, trains, with_weights


def even(context):
    """Nodes of 60 samples, sorted by class."""
    part = torch.as_tensor(np.split(np.concatenate(PARTS), NODES)[context.node_config["partition-id"]])
    return fedagg.Dataset(DATA.x_train[part], DATA.y_train[part], DATA.x_test[:100], DATA.y_test[:100], classes=10)


def secured(grid=None, data=node, **changes):
    grid = grid or HereGrid(client_app(model, data), NODES)
    strategy = FedAggStrategy(model(), settings(participation=1.0, **changes), secure=True)
    strategy.run(grid, wait=0)
    return strategy, grid


@pytest.mark.parametrize(("method", "data"), [("fedavg", node), ("fedagg", even), ("feddyn", even)])
def test_secure_aggregation_gives_the_same_model(method, data):
    """Within what SecAgg+ rounds: numbers in [-8, 8] to 22 bits. Methods that average plainly do so where nodes are of one size."""
    rate = {"pace": "base"} if method == "fedagg" else {}  # masked nodes are not asked to try rates
    clear = FedAggStrategy(model(), settings(algorithm=method, participation=1.0, **rate))
    clear.run(HereGrid(client_app(model, data), NODES), wait=0)
    strategy, _ = secured(algorithm=method, data=data, **rate)
    start = clear.layout.pack(model()).w
    gone = (clear.server.model.w - start).norm()
    assert (strategy.server.model.w - clear.server.model.w).norm() < 0.02 * gone
    assert [row["clients"] for row in strategy.about] == [list(range(NODES))] * 3
    assert strategy.record.history[-1]["accuracy"] == pytest.approx(clear.record.history[-1]["accuracy"], abs=0.03)


def test_under_secure_aggregation_no_message_holds_an_update():
    """The one vector that leaves a node is masked: uniform over the modulus, and uncorrelated with the node's update. There is no
    second one: from two sums with different weights the update of a node of another size than the rest could be worked out."""
    clear, seen = federated(algorithm="fedagg", participation=1.0, rounds=1)
    updates = {
        m.metadata.src_node_id: m.content["arrays"]["weights"].numpy() - clear.layout.pack(model()).w.numpy()
        for m, _ in seen.received
        if trains(m) and m.content.array_records  # those of the search hold none
    }
    strategy, grid = secured(algorithm="fedagg", rounds=1)
    masked = {}
    for message, _ in grid.received:
        if trains(message):
            assert all(len(record) == 0 for record in message.content.array_records.values())
            for record in message.content.config_records.values():
                if "masked_params" in record:
                    weight, vector = (bytes_to_ndarray(part) for part in record["masked_params"])
                    assert weight.shape == (1,)
                    masked[message.metadata.src_node_id] = vector
    assert sorted(masked) == sorted(updates)
    assert strategy.record.history[0]["bytes_up"] == sum(vector.nbytes for vector in masked.values())
    for sender, vector in masked.items():
        assert vector.shape == updates[sender].shape
        share = vector / 2.0**32
        assert abs(share.mean() - 0.5) < 0.02
        assert abs(share.std() - 12**-0.5) < 0.02
        assert abs(np.corrcoef(share, updates[sender])[0, 1]) < 0.06


def test_a_mask_depends_on_the_whole_secret():
    """Secrets that Flower folds into the same 32 bits give masks that have nothing in common."""
    one = bytes(range(32))
    two = one[4:] + one[:4]  # the same words in another order
    assert np.array_equal(*(pseudo_rand_gen(secret, 2**32, [(50,)])[0] for secret in (one, two)))
    first, second = (mask(secret, 2**32, [(1,), (4999,)]) for secret in (one, two))
    assert [part.shape for part in first] == [(1,), (4999,)]
    a, b = np.concatenate(first) / 2.0**32, np.concatenate(second) / 2.0**32
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.06
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.06
    assert max(part.max() for part in mask(one, 2**10, [(9999,)])) == 2**10 - 1
    assert all(np.array_equal(x, y) for x, y in zip(first, mask(one, 2**32, [(1,), (4999,)]), strict=True))


def unmasked(vector, own, folded):
    """The attack: the server opens a node's own mask, as it should; of the mask that two nodes share it tries 32-bit seeds."""
    for seed in folded:
        for generator in (pseudo_rand_gen, mask):
            private = generator(own, 2**32, [(1,), vector.shape])[1]
            shared = generator(int(seed).to_bytes(4, "little"), 2**32, [(1,), vector.shape])[1]
            for guess in ((vector - private + shared) % 2**32, (vector - private - shared) % 2**32):
                if guess.max() < 2**23:  # an update is near the middle of 2^22 levels, what is still masked is anywhere
                    return guess
    return None


@pytest.mark.parametrize("masks", ["Flower's", "ours"])
def test_masks_cannot_be_found_by_trial(masks, monkeypatch):
    """With Flower's generator the update of one of two nodes is found by trying seeds; with ours it is not. Of the 2^32 seeds, the
    one that Flower uses and a few more are tried."""
    if masks == "Flower's":
        names = {"pseudo_rand_gen": pseudo_rand_gen}
        collect = with_names(_collect_masked_vectors, **names)
        monkeypatch.setattr("fedagg.flower.masks._protocol", with_names(secaggplus_mod, _collect_masked_vectors=collect))
    grid = HereGrid(client_app(model, node), 2)
    FedAggStrategy(model(), settings(clients=2, participation=1.0, rounds=1, algorithm="fedavg"), secure=True).run(grid, wait=0)
    sent = {
        message.metadata.src_node_id: bytes_to_ndarray(record["masked_params"][1]).astype(np.int64)
        for message, _ in grid.received
        if trains(message)
        for record in message.content.config_records.values()
        if "masked_params" in record
    }
    state = SecAggPlusState(**grid.contexts[1000].state.config_records["secaggplus_state"])
    key = generate_shared_key(bytes_to_private_key(state.sk1), bytes_to_public_key(state.public_keys_dict[1001][0]))
    folded = int(np.bitwise_xor.reduce(np.frombuffer(key, "<u4")))
    found = unmasked(sent[1000], state.rd_seed, [0, 1, 2**31, folded])
    if masks == "ours":
        assert found is None
        return
    clear, seen = federated_pair()
    update = (
        next(m for m, _ in seen.received if trains(m)).content["arrays"]["weights"].numpy() - clear.layout.pack(model()).w.numpy()
    )
    share = 30 / 50  # of the larger node's samples, by which SecAgg+ scales
    assert np.allclose(found * 16.0 / 2**22 - 8.0, share * update, rtol=0, atol=1e-5)


def federated_pair():
    grid = HereGrid(client_app(model, node), 2)
    strategy = FedAggStrategy(model(), settings(clients=2, participation=1.0, rounds=1, algorithm="fedavg"))
    strategy.run(grid, wait=0)
    return strategy, grid


def test_flowers_own_masks_are_refused():
    with pytest.raises(SettingError, match=r"mods = .*guessed"):
        client_app(model, node, mods=[secaggplus_mod])


def test_a_version_of_flower_with_other_names_is_refused():
    with pytest.raises(SettingError, match=r"secure = True: fedagg does not know how Flower"):
        with_names(_collect_masked_vectors, another_generator=mask)


def test_secure_aggregation_survives_a_node_that_leaves():
    class Leaving(HereGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if any(trains(m) and "config" in m.content and m.metadata.group_id == "2" for m in messages):
                self.gone = {1003}  # after it has shared its keys, before it sends its vector
            return super().send_and_receive(messages, timeout=timeout)

    strategy, _ = secured(Leaving(client_app(model, node), NODES), algorithm="fedagg")
    assert strategy.about[1]["left_out"] == {"3": "no answer in time"}
    assert [row["clients"] for row in strategy.about] == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert strategy.record.history[-1]["loss"] < strategy.record.history[0]["loss"]


def test_a_sum_of_more_nodes_than_the_modulus_holds_is_refused():
    FedAggStrategy(model(), settings(clients=2048, participation=0.5), secure=True)
    with pytest.raises(SettingError, match="1024 clients per round, not 1025"):
        FedAggStrategy(model(), settings(clients=1025, participation=1.0), secure=True)


def test_secure_aggregation_needs_a_model_without_buffers():
    with pytest.raises(SettingError, match="buffers"):
        FedAggStrategy(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), settings(), secure=True)


def test_local_noise_reaches_the_server_as_the_mod_made_it():
    """LocalDpMod clips updates to norm 0.5 and adds noise of deviation σ = s √(2 ln(1.25/δ)) / ε to every weight."""
    sigma = 1e-4 * np.sqrt(2 * np.log(1.25 / 1e-5)) / 1.0
    mod = LocalDpMod(clipping_norm=0.5, sensitivity=1e-4, epsilon=1.0, delta=1e-5)
    grid = HereGrid(client_app(model, node, mods=[mod]), NODES)
    strategy = FedAggStrategy(model(), settings(algorithm="fedagg", participation=1.0, lr=0.5, pace="base"))
    strategy.run(grid, wait=0)
    clear, _ = federated(algorithm="fedagg", participation=1.0, lr=0.5, pace="base")
    d = strategy.layout.d
    assert min(clear.about[0]["moved"]) > 0.5
    for moved in strategy.about[0]["moved"]:
        assert moved == pytest.approx(np.sqrt(0.5**2 + d * sigma**2), rel=0.02)


def test_central_clipping_and_noise_wrap_the_strategy():
    grid = HereGrid(client_app(model, node, mods=[fixedclipping_mod]), NODES)
    inner = FedAggStrategy(model(), settings(algorithm="fedavg", participation=1.0, lr=0.5, rounds=2))
    outer = DifferentialPrivacyClientSideFixedClipping(inner, 0.1, 0.5, NODES)
    clear, aggregate = [], inner.aggregate_train
    inner.aggregate_train = lambda *args: (made := aggregate(*args), clear.append(made[0]["weights"].numpy()))[0]
    result = outer.start(grid, inner.arrays(), num_rounds=2, timeout=10.0)
    inner.finish(result.arrays)
    assert all(moved == pytest.approx(0.5, rel=1e-3) for row in inner.about for moved in row["moved"])
    noise = result.arrays["weights"].numpy() - clear[-1]
    assert noise.std() == pytest.approx(0.1 * 0.5 / NODES, rel=0.05)


# Differential privacy in the strategy itself.

CLIP = 0.2  # shorter than any update here


def private(privacy, tamper=None, data=node, out=None, quiet=False, secure=False, **changes):
    grid = HereGrid(client_app(model, data, quiet=quiet), NODES, tamper)
    strategy = FedAggStrategy(model(), settings(participation=1.0, **changes), privacy=privacy, out=out, secure=secure)
    strategy.run(grid, wait=0)
    return strategy, grid


def test_the_new_model_is_the_plain_mean_of_clipped_updates_and_noise():
    quiet, grid = private(Privacy(CLIP, 1e-9), algorithm="fedavg", rounds=1)
    begin = quiet.layout.pack(model()).w.double()
    updates = [torch.from_numpy(m.content["arrays"]["weights"].numpy()).double() - begin for m, _ in grid.received if trains(m)]
    assert min(update.norm() for update in updates) > CLIP
    expected = begin + sum(CLIP * update / update.norm() for update in updates) / NODES
    assert torch.allclose(quiet.server.model.w.double(), expected, rtol=0, atol=1e-6)
    noises = [private(Privacy(CLIP, 2.0), algorithm="fedavg", rounds=1)[0].server.model.w.double() - expected for _ in range(2)]
    for noise in noises:
        assert float(noise.std()) == pytest.approx(2.0 * CLIP / NODES, rel=0.03)
    # The run's seed is no secret; the noise does not come from it.
    assert abs(float(torch.corrcoef(torch.stack(noises))[0, 1])) < 0.06


@pytest.mark.parametrize("kind", ["longer", "not a number", "missing"])
def test_one_client_moves_the_model_by_at_most_its_share(kind):
    """The sum is divided by those that were asked: what one client does, or whether it answers, shows within C/n."""
    how = with_weights(lambda w: 1e4 * w) if kind == "longer" else BAD[kind][0]
    one, two = spoil(2, how), spoil(2, lambda sent, reply: [])
    moved = {}
    for name, tamper in (("spoilt", lambda s, r: one(s, as_round(r))), ("silent", lambda s, r: two(s, as_round(r)))):
        strategy, _ = private(Privacy(CLIP, 1e-9), tamper, algorithm="fedavg", rounds=1)
        moved[name] = strategy.server.model.w
    gap = float((moved["spoilt"] - moved["silent"]).norm())
    if kind == "longer":
        assert gap == pytest.approx(CLIP / NODES, rel=1e-3)
    else:
        assert gap < 1e-6


def as_round(reply):
    """`spoil` waits for round 2; these runs have one."""
    reply.metadata.group_id = "2"
    return reply


def shuffled(context):
    """As many samples as `node` has, and others."""
    mine = node(context)
    return fedagg.Dataset(mine.x_train.flip(0) ** 2, mine.y_train * 0 + 3, mine.x_test, mine.y_test * 0, classes=10)


@pytest.mark.parametrize("method", ["fedagg", "fedcm", "fedadam", "fedexp"])
def test_nodes_and_record_learn_nothing_but_the_noisy_sum(method, monkeypatch):
    """Replace the noisy sums by the same numbers whatever the data: then nothing else may show which data it was."""

    def fixed(self, total):
        drawn.append(np.random.default_rng(len(drawn)).standard_normal(len(total)))
        return torch.from_numpy(drawn[-1])

    monkeypatch.setattr(Privacy, "noisy", fixed)
    seen = []
    for data in (node, shuffled):
        drawn: list[np.ndarray] = []
        strategy, grid = private(Privacy(CLIP, 1.0), data=data, algorithm=method, downlink_bits=3)
        assert len(drawn) == 3
        orders = [(m.metadata.dst_node_id, contents(m)) for m, _ in grid.sent if trains(m)]
        hidden = ("seconds", "loss", "accuracy")  # the time, and the nodes' own test results
        rows = [{k: v for k, v in row.items() if k not in hidden} for row in strategy.record.history]
        seen.append((orders, rows, strategy.about, strategy.server.model.w.tolist()))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 3 * NODES
    assert not {"train_loss", "drift", "rate_mean"} & set(seen[0][1][0])


def contents(message):
    def plain(value):
        return value.numpy().tobytes() if hasattr(value, "numpy") else value

    return {name: {key: plain(value) for key, value in record.items()} for name, record in message.content.items()}


def test_fedagg_learns_with_noise():
    strategy, _ = private(Privacy(1.0, 0.02), algorithm="fedagg", rounds=6)
    rows = strategy.record.history
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert rows[-1]["own_share"] == pytest.approx(1.0)
    spent = [row["epsilon"] for row in rows]
    assert spent == sorted(spent)


@pytest.mark.parametrize(("releases", "noise", "delta"), [(1, 1.0, 1e-5), (15, 2.0, 1e-5), (100, 20.0, 1e-6), (4, 0.5, 1e-3)])
def test_epsilon_is_where_delta_says(releases, noise, delta):
    """δ(ε) = E[max(0, 1 - exp(ε - L))] over the privacy loss L of `releases` independent sums, worked out numerically."""
    eps, mean = epsilon(releases, noise, delta), releases / (2 * noise**2)
    loss = mean + np.sqrt(2 * mean) * np.linspace(-12, 12, 400_001)
    density = np.exp(-((loss - mean) ** 2) / (4 * mean)) / np.sqrt(4 * np.pi * mean)
    excess = np.maximum(0, -np.expm1(eps - loss)) * density
    assert float(excess.sum() * (loss[1] - loss[0])) == pytest.approx(delta, rel=1e-3)
    assert epsilon(0, noise, delta) == 0.0
    assert epsilon(releases, 1e-12, delta) > 1e20  # hardly any noise: hardly any privacy, and no error


def test_a_restarted_server_counts_the_round_that_was_cut_off(tmp_path):
    privacy = Privacy(CLIP, 1.0)

    with pytest.raises(PowerCut):
        private(privacy, dies_in_round_3, out=tmp_path, rounds=3)
    with pytest.raises(SettingError, match="privacy"):
        private(None, out=tmp_path, rounds=3)
    again, _ = private(privacy, out=tmp_path, rounds=3)
    assert again.record.history[-1]["epsilon"] == epsilon(3, 1.0, 1e-5)  # the round was cut off before its sum was made


@pytest.mark.parametrize("cut_in", [1, 2])
def test_every_sum_that_was_used_is_counted_however_often_the_server_stops(tmp_path, cut_in):
    """It stops three times while the new model is out for evaluation: each time the model was there to be seen."""

    class Cut(HereGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if any(m.metadata.message_type == "evaluate" and m.metadata.group_id == str(cut_in) for m in messages):
                raise PowerCut
            return super().send_and_receive(messages, timeout=timeout)

    def begin(grid):
        config, privacy = settings(participation=1.0), Privacy(CLIP, 1.0)
        strategy = FedAggStrategy(model(), config, privacy=privacy, out=tmp_path, test_apart=True)
        strategy.run(grid(client_app(model, node), NODES), wait=0)
        return strategy

    for _ in range(3):
        with pytest.raises(PowerCut):
            begin(Cut)
    assert begin(HereGrid).record.history[-1]["epsilon"] == epsilon(6, 1.0, 1e-5)


def test_under_privacy_a_round_does_not_tell_who_answered():
    """Not even when nobody does."""
    with pytest.raises(SettingError, match="quorum"):
        FedAggStrategy(model(), settings(), privacy=Privacy(CLIP, 1.0), quorum=2)
    silent, _ = private(Privacy(CLIP, 1.0), lambda sent, reply: [], algorithm="fedavg", rounds=1)
    assert silent.record.history[0]["epsilon"] == epsilon(1, 1.0, 1e-5)
    assert not torch.equal(silent.server.model.w, silent.layout.pack(model()).w)


@pytest.mark.parametrize("method", ["fedavg", "fedagg"])
def test_noise_goes_with_secure_aggregation(method):
    """The sum is that of the clipped updates, as without masks; all that leaves a node is masked, but for its test results."""
    clear, _ = private(Privacy(CLIP, 1e-9), algorithm=method)
    secure, grid = private(Privacy(CLIP, 1e-9), algorithm=method, secure=True)
    gone = (clear.server.model.w - clear.layout.pack(model()).w).norm()
    assert (secure.server.model.w - clear.server.model.w).norm() < 1e-4 * gone
    assert [row["epsilon"] for row in secure.record.history] == [row["epsilon"] for row in clear.record.history]
    for message, _ in grid.received:
        if trains(message):
            told = {name: dict(record) for name, record in message.content.config_records.items() if len(record)}
            tests = told.pop("fitres.metrics", {})
            assert all(name.startswith("test-") for name in tests)
            assert told.keys() <= {"secaggplus_configs", "fitres.num_examples", "fitres.status"}
            assert told.get("fitres.num_examples", {"num_examples": 1}) == {"num_examples": 1}
    # However the protocol ends, there is a sum: here it is noise alone.
    silent, _ = private(Privacy(CLIP, 1.0), lambda sent, reply: [], algorithm="fedavg", rounds=1, secure=True)
    noise = (silent.server.model.w - silent.layout.pack(model()).w).double()
    assert float(noise.std()) == pytest.approx(CLIP / NODES, rel=0.05)


def test_rounding_under_the_masks_does_not_lengthen_an_update():
    """Whatever SecAgg+ makes of an update that was clipped on the node is no longer than the noise covers."""
    delta = torch.randn(7850, generator=torch.Generator().manual_seed(0)) * 100
    chunk = SimpleNamespace(delta=delta[None])
    record = private_answer(chunk, CLIP, {}).array_records["fitres.parameters"]
    (sent,) = (array.numpy() for array in record.values())
    lengths = [np.linalg.norm(dequantize(quantize([sent], CLIP, LEVELS), CLIP, LEVELS)[0]) for _ in range(5)]
    assert 0.999 * CLIP < min(lengths) <= max(lengths) <= CLIP


def test_a_run_ends_before_it_reveals_too_much(tmp_path):
    """Five sums would be over the limit."""
    rounds = 4
    most = epsilon(4, 0.5, 1e-5) * 1.001
    privacy = Privacy(CLIP, 1.0, ledger=str(tmp_path / "ledger.jsonl"), epsilon_max=most)
    first, _ = private(privacy, out=tmp_path / "first", algorithm="fedagg", rounds=9)
    assert first.done == rounds
    result = json.loads((tmp_path / "first" / "result.json").read_text())
    assert result["rounds"] == rounds
    assert result["epsilon"] == first.record.history[-1]["epsilon"] == epsilon(4, 1.0, 1e-5)
    assert result["epsilon_replaced"] == pytest.approx(epsilon(4, 0.5, 1e-5))
    # Another run on the same nodes has nothing left to tell; one that goes on with a higher limit has.
    second, grid = private(privacy, out=tmp_path / "second", algorithm="fedagg", rounds=9)
    assert second.done == 0
    assert not any(trains(message) for message, _ in grid.sent)
    more = replace(privacy, epsilon_max=2 * most)
    again, _ = private(more, out=tmp_path / "first", algorithm="fedagg", rounds=rounds + 1)
    assert again.done == rounds + 1


def test_noise_does_not_move_what_is_frozen():
    grid = HereGrid(client_app(lambda: model("lenet5"), node), NODES)
    strategy = FedAggStrategy(
        model("lenet5"), settings(algorithm="fedbabu", participation=1.0, rounds=1), privacy=Privacy(CLIP, 1.0)
    )
    strategy.run(grid, wait=0)
    moved = strategy.server.model.w - strategy.layout.pack(model("lenet5")).w
    frozen = strategy.server.algorithm.state["mask"] == 0
    assert 0 < int(frozen.sum()) < len(moved)
    assert torch.equal(moved[frozen], torch.zeros_like(moved[frozen]))
    assert moved[~frozen].norm() > 0


def test_privacy_refuses_what_it_cannot_cover():
    normalised = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for module, options in ((normalised, {}), (model(), {"robust": "median"})):
        with pytest.raises(SettingError, match="privacy"):
            FedAggStrategy(module, settings(**options), privacy=Privacy(1.0, 1.0))
    for method in ("scaffold", "feddyn"):
        with pytest.raises(SettingError, match="updates alone"):
            private(Privacy(1.0, 1.0), algorithm=method, rounds=1)
    for wrong in ((0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, 1.0, 1.0)):
        with pytest.raises(SettingError):
            Privacy(*wrong)


def test_privacy_is_a_setting():
    _, own = split({"clients": 2, "clipping-norm": 1, "noise-multiplier": 0.5})
    assert own == {"privacy": Privacy(1.0, 0.5)}
    _, own = split({"clients": 2, "clipping-norm": 1.0, "noise-multiplier": 0.5, "epsilon-max": 8, "ledger": "/srv/ledger.jsonl"})
    assert own == {"privacy": Privacy(1.0, 0.5, ledger="/srv/ledger.jsonl", epsilon_max=8.0)}
    with pytest.raises(SettingError, match="clipping-norm"):
        split({"clients": 2, "noise-multiplier": 0.5})


# Local noise, on a node that says nothing beside its update.


@pytest.mark.parametrize("method", ["fedavg", "fedagg"])
def test_a_quiet_node_tells_only_its_update(method):
    told = []
    for data in (node, shuffled):
        grid = HereGrid(client_app(model, data, quiet=True), NODES)
        strategy = FedAggStrategy(model(), settings(algorithm=method, participation=1.0, rounds=1))
        strategy.run(grid, wait=0)
        assert "accuracy" not in strategy.record.history[0]
        told.append([{k: v for k, v in contents(m).items() if k != "arrays"} for m, _ in grid.received])
    assert told[0] == told[1]


def test_fedagg_trains_quiet_nodes_as_it_trains_others():
    """In a field that asks for rates of their own they are told the plan's; the model goes the same way."""
    others, _ = federated(algorithm="fedagg", participation=1.0)
    grid = HereGrid(client_app(model, node, quiet=True), NODES)
    strategy = FedAggStrategy(model(), settings(algorithm="fedagg", participation=1.0))
    strategy.run(grid, wait=0)
    went = [s.server.model.w - s.layout.pack(model()).w for s in (strategy, others)]
    assert float(torch.cosine_similarity(*went, dim=0)) > 0.95


def test_a_seed_in_the_nodes_own_code_does_not_give_its_noise_away():
    def seeding(context):
        np.random.seed(0)  # noqa: NPY002
        return node(context)

    noise = np.random.RandomState(0).normal(0, 1, 7850)
    mod = LocalDpMod(clipping_norm=1e-6, sensitivity=1.0, epsilon=1.0, delta=1e-5)
    correlated = {}
    for quiet in (False, True):
        grid = HereGrid(client_app(model, seeding, mods=[mod], quiet=quiet), NODES)
        FedAggStrategy(model(), settings(algorithm="fedavg", rounds=1)).run(grid, wait=0)
        sent = next(m.content["arrays"]["weights"].numpy() for m, _ in grid.received if trains(m))
        correlated[quiet] = abs(np.corrcoef(sent, noise)[0, 1])
    assert correlated[False] > 0.9
    assert correlated[True] < 0.06


def test_a_quiet_node_refuses_to_send_more_than_an_update():
    strategy, _ = private(None, quiet=True, algorithm="scaffold", rounds=1)
    assert strategy.about[0]["left_out"] == {str(k): "failed: setting quiet" for k in range(NODES)}
    assert len(strategy.about[0]["left_out"]) == NODES
