"""The account of what a federation has revealed about its nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

from fedagg.errors import FedaggError, SettingError
from fedagg.flower import Privacy
from fedagg.flower.ledger import BudgetSpent, Ledger
from fedagg.flower.privacy import epsilon


def test_replacing_a_node_costs_as_half_the_noise_does():
    """At z = 1 and T = 15, as in the documentation's table: 23.3 for a node that is silent, 62.2 for one with other data."""
    ledger = Ledger(Privacy(0.5, 1.0), None)
    assert ledger.spent() == {"epsilon": 0.0, "epsilon_replaced": 0.0}
    for t in range(15):
        ledger.record(7, t)
    spent = ledger.spent()
    assert spent == {"epsilon": epsilon(15, 1.0, 1e-5), "epsilon_replaced": epsilon(15, 0.5, 1e-5)}
    assert spent["epsilon"] == pytest.approx(23.3, abs=0.05)
    assert spent["epsilon_replaced"] == pytest.approx(62.2, abs=0.05)


def test_runs_on_the_same_nodes_add_up(tmp_path):
    """Four sums of multiplier 2 tell as much as one of 1: two runs, five sums of 1 between them."""
    path = tmp_path / "ledger.jsonl"
    one, two = Ledger(Privacy(0.5, 1.0), path), Ledger(Privacy(0.1, 2.0), path)
    for t in range(4):
        one.record(1, t)
        two.record(2, t)
    assert one.spent() == two.spent() == Ledger(Privacy(0.3, 9.0), path).spent()
    assert one.spent()["epsilon"] == pytest.approx(epsilon(5, 1.0, 1e-5))
    assert two.spent(more=4)["epsilon"] == pytest.approx(epsilon(6, 1.0, 1e-5))


def test_a_limit_is_seen_before_it_is_passed():
    most = epsilon(3, 0.5, 1e-5) * 1.0001
    ledger = Ledger(Privacy(0.5, 1.0, epsilon_max=most), None)
    for t in range(3):
        assert not ledger.exhausted()
        ledger.record(7, t)
    assert ledger.exhausted()
    with pytest.raises(BudgetSpent):
        ledger.record(7, 3)
    assert ledger.spent()["epsilon_replaced"] < most
    assert not Ledger(Privacy(0.5, 1e-6), None).exhausted()  # without a limit there is none
    for setting, wrong in (("epsilon-max", {"epsilon_max": 0.0}), ("ledger", {"ledger": "here.jsonl"})):
        with pytest.raises(SettingError, match=setting):
            Privacy(0.5, 1.0, **wrong)


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "{}", '{"noise_multiplier": "x"}', '{"noise_multiplier": 0}', '{"noise_multiplier": NaN}']
)
def test_a_damaged_ledger_is_not_taken_as_empty(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    path.write_text(f'{{"noise_multiplier": 1.0}}\n{line}\n')
    with pytest.raises(FedaggError, match="damaged"):
        Ledger(Privacy(0.5, 1.0), path)


def test_a_line_that_a_power_cut_left_incomplete_is_removed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"noise_multiplier": 1.0}\n{"noise_mul')
    ledger = Ledger(Privacy(0.5, 1.0), path)
    ledger.record(7, 1)
    assert ledger.spent()["epsilon"] == epsilon(2, 1.0, 1e-5)
    assert len(path.read_text().splitlines()) == 2
