"""A federation of real processes on loopback: TLS, keys, a node that dies in the middle."""

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
        done = subprocess.run(words, cwd=self.folder, env=self.env("command"), capture_output=True, text=True, timeout=60)
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

    def kill(self, name: str = "") -> None:
        for pid in self.alive(name):
            try:
                os.kill(pid, signal.SIGKILL)
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
    f.superlink()
    f.fedagg("register", ".")
    for number in range(NODES):
        f.supernode(number, f.node_ports[number])
    stranger = unknown_node(f)

    f.command(
        "flwr", "run", ".", "deployment", "--run-config",
        f"clients={NODES} rounds={ROUNDS} eval-every={ROUNDS} timeout=45.0 out='{f.folder}/runs'",
    )  # fmt: skip
    until("two rounds", lambda: len(f.rows("metrics.jsonl")) >= 2, 300)
    f.kill("node-2")
    until("the run", lambda: (f.folder / "runs" / "result.json").exists(), 300)

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
    """The same five rounds in this process, without the answers that the record says were missing."""
    task = runpy.run_path(str(SOURCE / "fedagg" / "flower" / "template" / "federation" / "task.py"))
    settings = tomllib.loads((SOURCE / "fedagg" / "flower" / "template" / "pyproject.toml").read_text())
    config, _ = split(settings["tool"]["flwr"]["app"]["config"] | {"clients": NODES, "rounds": ROUNDS, "eval-every": ROUNDS})
    with seeding.seeded_global(seeding.derive(config.seed, "model"), torch.device("cpu")):
        module = task["model"]()

    def lose(sent, reply):
        row = clients[int(reply.metadata.group_id) - 1]
        return [reply] if reply.metadata.src_node_id - 1000 in row["clients"] else []

    strategy = FedAggStrategy(module, config)
    strategy.run(HereGrid(client_app(task["model"], task["data"]), NODES, lose), wait=0)
    return module.state_dict()


def unknown_node(f: Federation) -> subprocess.Popen[bytes]:
    """A SuperNode with a proper key that nobody has registered."""
    node_key(f.folder / "keys", 3)
    return f.supernode(3, f.node_ports[3])
