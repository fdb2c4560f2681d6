"""What the server need not see: secure aggregation, clipping and noise with Flower's own tools."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

import numpy as np
import torch
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.common import bytes_to_ndarray
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping

from fedagg.errors import SettingError
from fedagg.flower import FedAggStrategy, client_app
from flower_grid import HereGrid
from test_flower import NODES, federated, model, node, settings, trains


def secured(grid=None, **changes):
    grid = grid or HereGrid(client_app(model, node, mods=[secaggplus_mod]), NODES)
    strategy = FedAggStrategy(model(), settings(participation=1.0, **changes), secure=True)
    strategy.run(grid, wait=0)
    return strategy, grid


@pytest.mark.parametrize("method", ["fedavg", "fedagg", "fedcm", "feddyn"])
def test_secure_aggregation_gives_the_same_model(method):
    """Within what SecAgg+ rounds: numbers in [-8, 8] to 22 bits."""
    clear, _ = federated(algorithm=method, participation=1.0)
    strategy, _ = secured(algorithm=method)
    start = clear.layout.pack(model()).w
    gone = (clear.now.w - start).norm()
    assert (strategy.now.w - clear.now.w).norm() < 0.02 * gone
    assert [row["clients"] for row in strategy.about] == [list(range(NODES))] * 3
    assert strategy.book.history[-1]["accuracy"] == pytest.approx(clear.book.history[-1]["accuracy"], abs=0.03)


def test_under_secure_aggregation_no_message_holds_an_update():
    """Every vector that leaves a node is masked: uniform over the modulus, and uncorrelated with the node's update."""
    clear, seen = federated(algorithm="fedagg", participation=1.0, rounds=1)
    updates = {
        m.metadata.src_node_id: m.content["arrays"]["weights"].numpy() - clear.layout.pack(model()).w.numpy()
        for m, _ in seen.received
        if trains(m)
    }
    strategy, grid = secured(algorithm="fedagg", rounds=1)
    masked = {}
    for message, _ in grid.received:
        if trains(message):
            assert all(len(record) == 0 for record in message.content.array_records.values())
            for record in message.content.config_records.values():
                if "masked_params" in record:
                    masked[message.metadata.src_node_id] = bytes_to_ndarray(record["masked_params"][1])
    assert sorted(masked) == sorted(updates)
    assert strategy.book.history[0]["bytes_up"] == sum(vectors.nbytes for vectors in masked.values())
    for sender, vectors in masked.items():
        share = vectors.reshape(3, -1)[0] / 2.0**32
        assert abs(share.mean() - 0.5) < 0.02
        assert abs(share.std() - 12**-0.5) < 0.02
        assert abs(np.corrcoef(share, updates[sender])[0, 1]) < 0.06


def test_secure_aggregation_survives_a_node_that_leaves():
    class Leaving(HereGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if any(trains(m) and "config" in m.content and m.metadata.group_id == "2" for m in messages):
                self.gone = {1003}  # after it has shared its keys, before it sends its vector
            return super().send_and_receive(messages, timeout=timeout)

    strategy, _ = secured(Leaving(client_app(model, node, mods=[secaggplus_mod]), NODES), algorithm="fedagg")
    assert strategy.about[1]["left_out"] == {"3": "no answer in time"}
    assert [row["clients"] for row in strategy.about] == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert strategy.book.history[-1]["loss"] < strategy.book.history[0]["loss"]


def test_secure_aggregation_needs_a_model_without_buffers():
    with pytest.raises(SettingError, match="buffers"):
        FedAggStrategy(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), settings(), secure=True)


def test_local_noise_reaches_the_server_as_the_mod_made_it():
    """LocalDpMod clips updates to norm 0.5 and adds noise of deviation σ = s √(2 ln(1.25/δ)) / ε to every weight."""
    sigma = 1e-4 * np.sqrt(2 * np.log(1.25 / 1e-5)) / 1.0
    mod = LocalDpMod(clipping_norm=0.5, sensitivity=1e-4, epsilon=1.0, delta=1e-5)
    grid = HereGrid(client_app(model, node, mods=[mod]), NODES)
    strategy = FedAggStrategy(model(), settings(algorithm="fedagg", participation=1.0, lr=0.5))
    strategy.run(grid, wait=0)
    clear, _ = federated(algorithm="fedagg", participation=1.0, lr=0.5)
    d = strategy.layout.d
    assert min(clear.about[0]["moved"]) > 0.5
    for moved in strategy.about[0]["moved"]:
        assert moved == pytest.approx(np.sqrt(0.5**2 + d * sigma**2), rel=0.02)


def test_central_clipping_and_noise_wrap_the_strategy():
    grid = HereGrid(client_app(model, node, mods=[fixedclipping_mod]), NODES)
    inner = FedAggStrategy(model(), settings(algorithm="fedavg", participation=1.0, lr=0.5, rounds=2))
    outer = DifferentialPrivacyClientSideFixedClipping(inner, 0.1, 0.5, NODES)
    result = outer.start(grid, inner.arrays(), num_rounds=2, timeout=10.0)
    inner.finish(result.arrays)
    assert all(moved == pytest.approx(0.5, rel=1e-3) for row in inner.about for moved in row["moved"])
    noise = result.arrays["weights"].numpy() - inner.now.w.numpy()
    assert noise.std() == pytest.approx(0.1 * 0.5 / NODES, rel=0.05)
