"""What a machine reads while a federation runs."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

from fedagg.errors import SettingError
from fedagg.flower.monitor import exposition, kind, log_as_json
from fedagg.flower.server import split
from fedagg.report.follow import Watch
from test_flower import federated, spoil


def parsed(text: str) -> dict[str, float]:
    """By Prometheus' grammar: comments, and lines of a name, labels and a number. A name is described once, before its values."""
    found, described = {}, []
    for line in text.splitlines():
        if match := re.fullmatch(r"# (HELP|TYPE) ([a-z_][a-z_0-9]*) (.+)", line):
            described.append(match[2])
            continue
        match = re.fullmatch(r'([a-z_][a-z_0-9]*)(\{[a-z]+="[^"\\\n]*"\})? (\S+)', line)
        assert match, line
        assert match[1] == described[-1]
        found[match[1] + (match[2] or "")] = float(match[3])
    assert len(set(described)) == len(described) / 2
    return found


def test_prometheus_and_the_live_page_show_what_is_in_the_record(tmp_path):
    strategy, _ = federated(
        tamper=spoil(2, lambda sent, reply: []), out=tmp_path, algorithm="fedavg", participation=1.0, rounds=2, eval_every=1
    )
    told = parsed((tmp_path / "metrics.prom").read_text())
    first, last = strategy.record.history
    assert told["fedagg_round"] == told["fedagg_rounds_planned"] == 2
    assert told["fedagg_accuracy"] == last["accuracy"]
    assert [told[f'fedagg_node_accuracy{{client="{k}"}}'] for k in range(4)] == strategy.about[-1]["tests"][-1]["accuracy"]
    assert told["fedagg_bytes_up_total"] == first["bytes_up"] + last["bytes_up"]
    assert (told["fedagg_nodes_asked"], told["fedagg_nodes_answered"]) == (4, 3)
    assert told['fedagg_nodes_left_out{cause="no answer in time"}'] == 1
    page = json.loads(Watch([tmp_path]).changes(since=0))
    (group,), (missing,) = page["changes"]["groups"], page["changes"]["left_out"]
    assert page["status"]["text"] == "finished, 2 rounds"
    assert group["series"][0]["accuracy"] == pytest.approx([100 * row["accuracy"] for row in (first, last)])
    assert missing["counts"] == {"no answer in time": [0, 1]}
    assert any("2 (node 1002) in 1" in section for section in page["changes"]["sections"])


def test_what_is_not_known_is_left_out():
    told = parsed(exposition([{"round": 1, "accuracy": 0.5}, {"round": 2, "train_loss": float("nan")}], {}, 3))
    assert told["fedagg_accuracy"] == 0.5  # of the last evaluation
    assert not {"fedagg_loss", "fedagg_train_loss", "fedagg_epsilon"} & set(told)


@pytest.mark.parametrize(
    ("cause", "word"),
    [("failed: OSError", "failed"), ("made 8 steps, but its 70 samples take 6", "made steps"), ('say "x"\n', "say x")],
)
def test_causes_are_few(cause, word):
    assert kind(cause) == word


def test_a_log_line_is_a_json_object(monkeypatch):
    logger, written = logging.getLogger("flwr"), io.StringIO()
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(written)])
    log_as_json()
    logger.info("")
    logger.warning("\tclient %s left", 3)
    (line,) = written.getvalue().splitlines()
    told = json.loads(line)
    assert (told["level"], told["message"]) == ("WARNING", "client 3 left")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", told["time"])
    with pytest.raises(SettingError, match="log = 'yaml'"):
        split({"clients": 2, "log": "yaml"})
