"""`fedagg watch`: what it reads of a run that grows, what it shows, and to whom."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedagg import files, runs
from fedagg.cli import main
from fedagg.errors import FedaggError, SettingError
from fedagg.report import state
from fedagg.report.follow import Server, serve
from growing import Growing


@pytest.fixture
def run(tmp_path: Path) -> Growing:
    return Growing(tmp_path / "run", rounds=4)


@pytest.fixture
def server(run: Growing) -> Iterator[Server]:
    run.grow()
    with serve([run.folder]) as started:
        yield started


def ask(server: Server, path: str, host: str = "", method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    link = http.client.HTTPConnection(*server.server_address[:2], timeout=300)
    link.putrequest(method, path, skip_host=True)
    link.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
    link.endheaders()
    answer = link.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    link.close()
    return found


def test_a_growing_file_is_read_from_where_it_was_left(tmp_path: Path) -> None:
    path, lines = tmp_path / "metrics.jsonl", runs.Lines()
    assert lines(path, runs.is_round) == []
    path.write_text('{"round": 1}\n{"rou')
    assert lines(path, runs.is_round) == [{"round": 1}]
    path.write_text('{"rOUND": 1}\n{"round": 2}\n')  # what was read is not looked at again, but for its last line
    with pytest.raises(FedaggError, match="line 1 is damaged"):
        lines(path, runs.is_round)
    path.write_text('{"round": 1}\n{"round": 2}\n')
    first = lines(path, runs.is_round)
    path.write_text('{"rOUND": 1}\n{"round": 2}\n{"round": 3}\n')
    assert lines(path, runs.is_round) == [{"round": 1}, {"round": 2}, {"round": 3}]
    assert len(first) == 2
    path.write_text('{"round": 1}\n{"round": 2, "loss": 1.5}\n')  # a run that went on from a checkpoint
    assert lines(path, runs.is_round) == [{"round": 1}, {"round": 2, "loss": 1.5}]


def test_what_is_said_of_a_run(run: Growing) -> None:
    def said() -> str:
        return state.status([runs.load(run.folder)])["text"]

    assert state.status([])["text"] == "waiting for a run to begin"
    assert said() == "stopped after 0 of 4 rounds"
    claim = files.Claim(run.folder, "out")
    assert said() == "running, round 1 of 4"
    run.grow(seconds=20.0)
    os.utime(run.folder / "metrics.jsonl", (1, 1))  # long ago: the second round should be at its end, and two are to come
    assert said() == "running, round 2 of 4, about 40 s left"
    claim.release()
    assert said() == "stopped after 1 of 4 rounds"
    for _ in range(3):
        run.grow()
    run.finish()
    assert said() == "finished, 4 rounds"
    two = [runs.load(run.folder), runs.load(Growing(run.folder.parent / "other", rounds=2).folder)]
    assert state.status(two) == {
        "word": "stopped",
        "text": "1 finished, 1 stopped",
        "lines": ["fedagg seed 0: stopped after 0 of 2 rounds"],
    }
    assert [state.duration(s) for s in (0.2, 31, 100, 5000, 7200, 40_000)] == ["1 s", "30 s", "2 min", "83 min", "2.0 h", "11 h"]


def test_watching_does_not_block_a_run(tmp_path: Path) -> None:
    assert files.is_claimed(tmp_path) is False
    held = files.Claim(tmp_path, "out")
    assert files.is_claimed(tmp_path) is True
    with pytest.raises(SettingError, match="in use by another process"):
        files.Claim(tmp_path, "out")
    held.release()
    files.Claim(tmp_path, "out").release()


def test_the_page_and_what_has_changed(server: Server, run: Growing) -> None:
    status, headers, page = ask(server, "/")
    assert status == 200
    assert b"stopped after 1 of 4 rounds" in page
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    version = int(page.split(b'"version":')[1].split(b"}")[0])
    nothing = json.loads(ask(server, f"/data?since={version}")[2])
    assert nothing["version"] == version
    assert all(part is None for parts in nothing["changes"].values() for part in parts)
    run.grow(left_out={"7": "dropped out"})
    news = json.loads(ask(server, f"/data?since={version}")[2])
    changes = news["changes"]
    assert news["version"] > version
    assert changes["groups"][0]["series"][0]["accuracy"] == [50.0, 60.0]
    assert changes["progress"] == changes["partitions"] == [None]  # these are as they were
    assert changes["left_out"][0]["counts"] == {"dropped out": [0, 1]}
    assert any("7 in 1" in part for part in changes["sections"] if part)
    everything = json.loads(ask(server, "/data?since=x")[2])["changes"]
    assert all(part is not None for parts in everything.values() for part in parts)


def test_a_damaged_file_is_reported_and_the_page_stays(server: Server, run: Growing) -> None:
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write("nonsense\n")
    news = json.loads(ask(server, "/data")[2])
    assert "line 2 is damaged" in news["status"]["text"]
    assert news["changes"]["groups"][0]["series"][0]["accuracy"] == [50.0]


def test_it_answers_only_this_machine(server: Server, run: Growing) -> None:
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    for name in ("localhost", f"localhost:{port}", "127.0.0.1:1"):  # a tunnel may end at another port
        assert ask(server, "/", name)[0] == 200
    for name in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", f"[::1]:{port}", "10.0.0.1"):
        for path in ("/", "/data"):
            assert ask(server, path, name)[0] == 403
    for path in ("/config.toml", "/../config.toml", "//etc/passwd", "/data/x"):
        assert ask(server, path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert ask(server, "/", method=method)[0] == 501


def test_a_grid_is_followed_cell_by_cell(tmp_path: Path) -> None:
    """A results folder holds the runs of unfinished cells aside."""
    cell = Growing(tmp_path / ".partial" / "cell", rounds=4)
    with serve([tmp_path]) as server:
        assert json.loads(ask(server, "/data")[2])["changes"]["groups"] == []
        cell.grow()
        (group,) = json.loads(ask(server, "/data")[2])["changes"]["groups"]
        assert group["series"][0]["name"] == "FedAgg (1 of 4 rounds)"


def test_what_cannot_be_watched(run: Growing, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, said in (
            ([str(run.folder / "none")], "is not a folder"),
            ([str(run.folder), "--port", str(port)], f"port = {port}: "),
            ([str(run.folder), "--port", "70000"], "port = 70000: there is no such port"),
        ):
            with pytest.raises(SystemExit) as stop:
                main(["watch", *words, "--no-browser"])
            assert stop.value.code == 2
            told = capsys.readouterr().err
            assert said in told
            assert told.count("\n") == 1


@pytest.mark.slow
def test_it_ends_with_the_runs_and_leaves_the_report(run: Growing, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(4):
        run.grow()
    run.finish()
    page = run.folder / "report.html"
    with pytest.raises(SystemExit) as stop:
        main(["watch", str(run.folder), "--no-browser", "-o", str(page)])
    assert stop.value.code == 0
    assert "watch at http://127.0.0.1:" in capsys.readouterr().out
    assert "finished, 4 rounds" in page.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are another matter there")
def test_ctrl_c_ends_it(run: Growing) -> None:
    words = [sys.executable, "-m", "fedagg", "watch", str(run.folder), "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("watch at http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=300)
    assert (process.returncode, rest, complaints) == (0, "", "")


@pytest.mark.slow
def test_a_run_with_a_page_beside_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        main(["run", "--rounds", "1", "--clients", "10", "--out", str(folder), "--watch", "--json"])
    assert stop.value.code == 0
    told = capfd.readouterr()
    assert json.loads(told.out)["rounds"] == 1
    assert "watch at http://127.0.0.1:" in told.err
    assert "finished, 1 round" in (folder / "report.html").read_text(encoding="utf-8")
