"""A federation of real processes on loopback: TLS, keys, a node that dies in the middle.

Two more take two minutes each, for Flower starts a process for every message; FEDAGG_PROCESSES=all runs them.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")
if not Path("/proc/self/environ").exists():
    pytest.skip("finds its processes in /proc", allow_module_level=True)

import torch
from safetensors.torch import load as load_tensors

from fedagg import seeding
from fedagg.flower import FedAggStrategy, client_app
from fedagg.flower.keys import node_key
from fedagg.flower.server import split
from flower_grid import HereGrid

BIN = Path(sys.executable).parent
SOURCE = Path(__file__).parent.parent / "src"
NODES, ROUNDS = 3, 5
MARK = "FEDAGG_TEST_PROCESS"
TEMPLATE = SOURCE / "fedagg" / "flower" / "template"
long = pytest.mark.skipif("FEDAGG_PROCESSES" not in os.environ, reason="two minutes; FEDAGG_PROCESSES=all runs it")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def until(what: str, done: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"{what} took over {seconds} seconds"
        time.sleep(0.2)


class Federation:
    """The processes of one test. Each carries a mark in its environment, and so do its children, even detached."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tag = folder, f"{os.getpid()}-{time.monotonic_ns()}"
        self.port, *self.node_ports = free_ports(NODES + 2)
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(SOURCE),
            "FLWR_HOME": str(folder / ".flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }

    def env(self, name: str) -> dict[str, str]:
        return {**self.environment, MARK: f"{self.tag}/{name}"}

    def command(self, *words: str) -> str:
        done = subprocess.run(words, cwd=self.folder, env=self.env("command"), capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fedagg(self, *words: str) -> str:
        return self.command(sys.executable, "-m", "fedagg", "flower", *words)

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(words, cwd=self.folder, env=self.env(name), stdout=log, stderr=log)
        self.started.append(process)
        return process

    def superlink(self) -> None:
        self.start("superlink", "./superlink.sh", "127.0.0.1", str(self.port))
        until("the SuperLink", self.reachable, 60)

    def reachable(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def supernode(self, number: int, port: int) -> subprocess.Popen[bytes]:
        return self.start(f"node-{number}", "./supernode.sh", str(number), str(NODES), f"127.0.0.1:{self.port}", str(port))

    def alive(self, name: str = "") -> list[int]:
        wanted, found = f"{MARK}={self.tag}/{name}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "environ").read_bytes().find(wanted) >= 0:
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def kill(self, name: str = "", how: signal.Signals = signal.SIGKILL) -> None:
        for pid in self.alive(name):
            try:
                os.kill(pid, how)
            except ProcessLookupError:
                continue

    def stop(self) -> None:
        """Ask politely, then see to it."""
        for process in reversed(self.started):
            process.terminate()
        end = time.monotonic() + 5
        while self.alive() and time.monotonic() < end:
            for process in self.started:
                process.poll()
            time.sleep(0.2)
        self.kill()
        for process in self.started:
            process.wait(timeout=10)
        until("the end of all processes", lambda: not self.alive(), 10)

    def up(self) -> None:
        """The SuperLink, and all nodes on their way to it."""
        self.superlink()
        self.fedagg("register", ".")
        for number in range(NODES):
            self.supernode(number, self.node_ports[number])

    def submit(self, **settings: object) -> None:
        words = " ".join(f"{name.replace('_', '-')}={value}" for name, value in settings.items())
        self.command("flwr", "run", ".", "deployment", "--run-config", f"clients={NODES} {words} out='{self.folder}/runs'")

    def done(self) -> bool:
        return (self.folder / "runs" / "result.json").exists()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def rows(self, name: str) -> list[dict]:
        path = self.folder / "runs" / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    folder = tmp_path / "project"
    folder.mkdir()
    here = Federation(folder)
    here.fedagg("new", ".")
    here.fedagg("keys", ".", "--nodes", str(NODES), "--port", str(here.port))
    try:
        yield here
    finally:
        here.stop()
        assert not here.alive()


@pytest.mark.slow
def test_five_rounds_with_tls_and_keys_and_a_death_in_the_third(federation: Federation) -> None:
    f = federation
    f.up()
    stranger = unknown_node(f)

    f.submit(rounds=ROUNDS, eval_every=ROUNDS, timeout=45.0)
    until("two rounds", lambda: len(f.rows("metrics.jsonl")) >= 2, 300)
    f.kill("node-2")
    until("the run", f.done, 300)

    rows, clients = f.rows("metrics.jsonl"), f.rows("clients.jsonl")
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["clients"] for row in clients[:2]] == [[0, 1, 2]] * 2
    assert clients[-1]["clients"] == [0, 1]
    missing = {int(k): v for row in clients[2:] for k, v in row["left_out"].items()}
    assert list(missing) == [2]
    assert json.loads((f.folder / "runs" / "result.json").read_text())["accuracy"] > 0.8
    found = load_tensors((f.folder / "runs" / "model.safetensors").read_bytes())
    for name, weights in replayed(clients).items():
        assert torch.allclose(found[name], weights, rtol=0, atol=1e-5), name

    # Nobody without a registered key gets in.
    assert stranger.poll() not in (None, 0)
    assert all("3" not in row.get("nodes", {}) for row in clients)


def replayed(clients: list[dict]) -> dict[str, torch.Tensor]:
    """The same rounds in this process, without the answers that the record says were missing."""
    task = runpy.run_path(str(TEMPLATE / "federation" / "task.py"))
    settings, rounds = tomllib.loads((TEMPLATE / "pyproject.toml").read_text()), len(clients)
    config, _ = split(settings["tool"]["flwr"]["app"]["config"] | {"clients": NODES, "rounds": rounds, "eval-every": rounds})
    module = untrained(task["model"], config.seed)

    def lose(sent, reply):
        row = clients[int(reply.metadata.group_id) - 1]
        return [reply] if reply.metadata.src_node_id - 1000 in row["clients"] else []

    strategy = FedAggStrategy(module, config)
    strategy.run(HereGrid(client_app(task["model"], task["data"]), NODES, lose), wait=0)
    return module.state_dict()


def untrained(model: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    with seeding.seeded_global(seeding.derive(seed, "model"), torch.device("cpu")):
        return model()


def unknown_node(f: Federation) -> subprocess.Popen[bytes]:
    """A SuperNode with a proper key that nobody has registered."""
    node_key(f.folder / "keys", 3)
    return f.supernode(3, f.node_ports[3])


@long
def test_an_answer_after_the_deadline(federation: Federation) -> None:
    """A node is stopped when it has received the work of round 2, and goes on when the round is over without it."""
    f = federation
    f.up()
    f.submit(rounds=4, eval_every=4, timeout=30.0)
    until("the second round", lambda: "ROUND 2]" in f.log("node-2"), 120)
    f.kill("node-2", signal.SIGSTOP)
    try:
        until("its end", lambda: len(f.rows("metrics.jsonl")) >= 2, 90)
    finally:
        f.kill("node-2", signal.SIGCONT)
    until("the run", f.done, 200)

    clients = f.rows("clients.jsonl")
    assert clients[1]["left_out"] == {"2": "no answer in time"}
    assert clients[1]["nodes"]["2"] == clients[0]["nodes"]["2"]
    assert clients[-1]["clients"] == [0, 1, 2]
    # The node has done the work and sent its answer, and the SuperLink has not taken it.
    assert f.log("node-2").count("ROUND 2]") == 2
    assert "Message TTL has expired" in f.log("superlink")
    found = load_tensors((f.folder / "runs" / "model.safetensors").read_bytes())
    for name, weights in replayed(clients).items():
        assert torch.allclose(found[name], weights, rtol=0, atol=1e-5), name


@long
def test_secure_aggregation(federation: Federation) -> None:
    """Two rounds of FedAgg under SecAgg+, with the two lines that the documentation says turn it on."""
    f = federation
    app, settings = f.folder / "federation" / "app.py", f.folder / "pyproject.toml"
    code = app.read_text().replace("client_app(model, data)", "client_app(model, data, mods=[secaggplus_mod])")
    app.write_text(code.replace("from fedagg", "from flwr.client.mod import secaggplus_mod\n\nfrom fedagg", 1))
    settings.write_text(settings.read_text() + "secure = true\n")
    f.up()
    f.submit(rounds=2, eval_every=2, timeout=90.0)
    until("the run", f.done, 400)

    rows, clients = f.rows("metrics.jsonl"), f.rows("clients.jsonl")
    assert [row["clients"] for row in clients] == [[0, 1, 2]] * 2
    found = load_tensors((f.folder / "runs" / "model.safetensors").read_bytes())
    model = runpy.run_path(str(TEMPLATE / "federation" / "task.py"))["model"]
    start, clear = untrained(model, seed=0).state_dict(), replayed(clients)
    numbers = sum(weights.numel() for weights in clear.values())
    assert [row["bytes_up"] for row in rows] == [NODES * 3 * 8 * numbers] * 2
    gap, way = (sum(float((a[k] - clear[k]).square().sum()) for k in clear) ** 0.5 for a in (found, start))
    assert gap < 0.02 * way
