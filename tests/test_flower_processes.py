"""A federation of real processes on loopback: TLS, keys, a SuperLink and a node that die in the middle.

Two more take two minutes each, for Flower starts a process for every message; FEDAGG_PROCESSES=all runs them.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import socket
import ssl
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

import httpx
import torch
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from safetensors.torch import load as load_tensors

from fedagg import seeding
from fedagg.cli import flower as cli
from fedagg.flower import FedAggStrategy, client_app
from fedagg.flower.keys import node_key
from fedagg.flower.server import split
from flower_grid import HereGrid

NGINX = shutil.which("nginx")
BIN = Path(sys.executable).parent
SOURCE = Path(__file__).parent.parent / "src"
PATIENCE = 1200  # seconds: only a process that hangs takes so long, however busy the machine
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


def reachable(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def until(what: str, done: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, f"{what} took over {PATIENCE} seconds"
        time.sleep(0.1)


class Federation:
    """The processes of one test. Each carries a mark in its environment, and so do its children, even detached."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes, self.tag = folder, nodes, f"{os.getpid()}-{time.monotonic_ns()}"
        self.port, self.proxy_port, *self.node_ports = free_ports(nodes + 3)
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
        done = subprocess.run(words, cwd=self.folder, env=self.env("command"), capture_output=True, text=True, timeout=PATIENCE)
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
        self.start("superlink", "./superlink.sh", str(self.port))
        until("the SuperLink", lambda: reachable(self.port))

    def proxy(self) -> None:
        self.start("proxy", "./proxy.sh", "127.0.0.1", str(self.proxy_port), str(self.port))
        until("the proxy", lambda: reachable(self.proxy_port))

    def supernode(self, number: int, port: int) -> subprocess.Popen[bytes]:
        server = self.proxy_port if NGINX else self.port
        return self.start(f"node-{number}", "./supernode.sh", str(number), str(self.nodes), f"127.0.0.1:{server}", str(port))

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
            process.wait(timeout=PATIENCE)
        until("the end of all processes", lambda: not self.alive())

    def up(self) -> None:
        """The SuperLink, and all nodes on their way to it."""
        self.superlink()
        if NGINX:
            self.proxy()
        self.fedagg("register", ".")
        for number in range(self.nodes):
            self.supernode(number, self.node_ports[number])

    def submit(self, **settings: object) -> None:
        words = " ".join(f"{name.replace('_', '-')}={value}" for name, value in settings.items())
        self.command("flwr", "run", ".", "deployment", "--run-config", f"clients={self.nodes} {words} out='{self.folder}/runs'")

    def watched(self, **settings: object) -> subprocess.Popen[bytes]:
        """A run that is started again when it fails."""
        words = " ".join(f"{name.replace('_', '-')}={value}" for name, value in settings.items())
        given = f"clients={self.nodes} {words} out='{self.folder}/runs'"
        return self.start("run", sys.executable, "-m", "fedagg", "flower", "run", ".", "--restarts", "3", "--run-config", given)

    def done(self) -> bool:
        return (self.folder / "runs" / "result.json").exists()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def rows(self, name: str) -> list[dict]:
        path = self.folder / "runs" / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def federation(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Federation]:
    """Of two nodes: every message is a process that imports torch. Some tests ask for more."""
    folder = tmp_path / "project"
    folder.mkdir()
    here = Federation(folder, getattr(request, "param", 2))
    cli.new(folder)
    cli.keys(folder, nodes=here.nodes, port=here.port)
    try:
        yield here
    finally:
        here.stop()
        assert not here.alive()


@pytest.mark.slow
def test_three_rounds_with_tls_and_keys_and_two_kills(federation: Federation) -> None:
    """The SuperLink is killed in the second round and started again, a node in the third. The run ends in the weights of one that
    was left alone, but for the answers of that node."""
    f = federation
    settings = f.folder / "pyproject.toml"
    # The base rate stands: to look for one, the first round would ask seven times.
    settings.write_text(settings.read_text() + 'pace = "base"\n')
    f.up()
    stranger = unknown_node(f)

    run = f.watched(rounds=3, eval_every=3, timeout=600.0, lr=0.5)
    until("a round", lambda: len(f.rows("metrics.jsonl")) >= 1 or run.poll() is not None)
    f.kill("superlink")  # and the server application with it
    f.superlink()
    until("two rounds", lambda: len(f.rows("metrics.jsonl")) >= 2 or run.poll() is not None)
    f.kill("node-1")
    assert run.wait(timeout=PATIENCE) == 0, f.log("run")
    assert f.done()

    rows, clients = f.rows("metrics.jsonl"), f.rows("clients.jsonl")
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert [row["clients"] for row in clients[:2]] == [[0, 1]] * 2
    assert clients[-1]["clients"] == [0]
    missing = {int(k): v for row in clients[2:] for k, v in row["left_out"].items()}
    assert list(missing) == [1]
    assert json.loads((f.folder / "runs" / "result.json").read_text())["accuracy"] > 0.8
    found = load_tensors((f.folder / "runs" / "model.safetensors").read_bytes())
    for name, weights in replayed(f.nodes, clients, pace="base", lr=0.5).items():
        assert torch.allclose(found[name], weights, rtol=0, atol=1e-5), name

    # Nobody without a registered key gets in.
    assert stranger.poll() not in (None, 0)
    assert all("2" not in row.get("nodes", {}) for row in clients)


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="needs nginx in front of the SuperLink; on Debian: apt-get install nginx-light")
def test_a_stranger_cannot_get_in(federation: Federation) -> None:
    """A stranger who has only ca.crt cannot get in; on the server the same commands work."""
    f = federation
    f.superlink()
    f.proxy()

    # Flower's own commands, and a SuperNode that does not encrypt.
    home = f.folder.parent / "stranger"
    home.mkdir()
    node_key(home, 7)
    certificate = f.folder / "keys" / "ca.crt"
    (home / "config.toml").write_text(
        f'[superlink.deployment]\naddress = "127.0.0.1:{f.proxy_port}"\nroot-certificates = "{certificate}"\n'
    )
    commands = {
        "register": ("flwr", "supernode", "register", str(home / "node-7.pub"), "deployment"),
        "run": ("flwr", "run", ".", "deployment"),
        "list": ("flwr", "list", "deployment"),
        "plain": ("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{f.proxy_port}", "--port", str(f.node_ports[-1])),
    }
    tries = {}
    for name, words in commands.items():
        with open(home / f"{name}.log", "wb") as log:
            env = {**f.env("stranger"), "FLWR_HOME": str(home)}
            tries[name] = subprocess.Popen(words, cwd=f.folder, env=env, stdout=log, stderr=log)
    f.started += tries.values()

    # Every path that Flower serves, and some ways of writing them.
    trust = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(verify=trust, timeout=PATIENCE, headers={"content-type": PROTOBUF_MEDIA_TYPE}) as client:

        def asked(port: int, path: str) -> int:
            return client.post(f"https://127.0.0.1:{port}{path}", content=b"").status_code

        passed = {path for path in PATHS if asked(f.proxy_port, path) != 403}
        assert passed == {path for path in PATHS if path.startswith("/v1/fleet/") and not path.endswith("/unregister-node")}
        # Without a registered key, what passes leads nowhere.
        assert {asked(f.proxy_port, path) for path in passed} <= {400, 401}
        assert asked(f.port, "/v1/control/list-runs") == 200
        for path in TRICKS:
            assert asked(f.proxy_port, path) in (400, 403), path

    for name, process in tries.items():
        assert process.wait(timeout=PATIENCE) != 0, name
    assert "only what nodes need is served here" in " ".join((home / "list.log").read_text().split())
    assert "this federation speaks TLS only" in (home / "plain.log").read_text()
    runs = json.loads(f.command("flwr", "list", "deployment", "--format", "json"))
    nodes = json.loads(f.command("flwr", "supernode", "list", "deployment", "--format", "json"))
    assert (runs["runs"], nodes["nodes"]) == ([], [])


PATHS = sorted({path for _, path in PROTOBUF_REQUEST_TYPES} | {"/", "/docs", "/openapi.json", "/v1/health", "/health"})
TRICKS = [
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "//v1/control/list-runs",
    "/v1/control/list-runs/../../fleet/pull-messages%00",
    "/V1/CONTROL/list-runs",
    "/v1/fleet/pull-messages/../../control/list-runs",
]


def replayed(nodes: int, clients: list[dict], **more: object) -> dict[str, torch.Tensor]:
    """The same rounds in this process, without the answers that the record says were missing."""
    task = runpy.run_path(str(TEMPLATE / "federation" / "task.py"))
    settings, rounds = tomllib.loads((TEMPLATE / "pyproject.toml").read_text()), len(clients)
    config, _ = split(
        settings["tool"]["flwr"]["app"]["config"] | {"clients": nodes, "rounds": rounds, "eval-every": rounds, **more}
    )
    module = untrained(task["model"], config.seed)

    def lose(sent, reply):
        row = clients[int(reply.metadata.group_id) - 1]
        return [reply] if reply.metadata.src_node_id - 1000 in row["clients"] else []

    strategy = FedAggStrategy(module, config)
    strategy.run(HereGrid(client_app(task["model"], task["data"]), nodes, lose), wait=0)
    return module.state_dict()


def untrained(model: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    with seeding.seeded_global(seeding.derive(seed, "model"), torch.device("cpu")):
        return model()


def unknown_node(f: Federation) -> subprocess.Popen[bytes]:
    """A SuperNode with a proper key that nobody has registered."""
    node_key(f.folder / "keys", f.nodes)
    return f.supernode(f.nodes, f.node_ports[-1])


@long
@pytest.mark.parametrize("federation", [3], indirect=True)
def test_an_answer_after_the_deadline(federation: Federation) -> None:
    """A node is stopped when it has received the work of round 2, and continues when the round is over without it."""
    f = federation
    f.up()
    f.submit(rounds=4, eval_every=4, timeout=30.0)
    until("the second round", lambda: "ROUND 2]" in f.log("node-2"))
    f.kill("node-2", signal.SIGSTOP)
    try:
        until("its end", lambda: len(f.rows("metrics.jsonl")) >= 2)
    finally:
        f.kill("node-2", signal.SIGCONT)
    until("the run", f.done)

    clients = f.rows("clients.jsonl")
    assert clients[1]["left_out"] == {"2": "no answer in time"}
    assert clients[1]["nodes"]["2"] == clients[0]["nodes"]["2"]
    assert clients[-1]["clients"] == [0, 1, 2]
    # The node has done the work and sent its answer, and the SuperLink has not taken it.
    assert f.log("node-2").count("ROUND 2]") == 2
    assert "Message TTL has expired" in f.log("superlink")
    found = load_tensors((f.folder / "runs" / "model.safetensors").read_bytes())
    for name, weights in replayed(f.nodes, clients).items():
        assert torch.allclose(found[name], weights, rtol=0, atol=1e-5), name


@long
@pytest.mark.parametrize("federation", [3], indirect=True)
def test_secure_aggregation(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of FedAgg under SecAgg+, with the line that the documentation says turns it on. Nodes then tell neither losses nor
    norms: the base rate stands, and no gradient is shortened."""
    monkeypatch.setattr("fedagg.algorithms.fedagg.CLIP", 1e9)
    f = federation
    settings = f.folder / "pyproject.toml"
    settings.write_text(settings.read_text() + "secure = true\n")
    f.up()
    f.submit(rounds=2, eval_every=2, timeout=90.0)
    until("the run", f.done)

    rows, clients = f.rows("metrics.jsonl"), f.rows("clients.jsonl")
    assert [row["clients"] for row in clients] == [[0, 1, 2]] * 2
    found = load_tensors((f.folder / "runs" / "model.safetensors").read_bytes())
    model = runpy.run_path(str(TEMPLATE / "federation" / "task.py"))["model"]
    start, clear = untrained(model, seed=0).state_dict(), replayed(f.nodes, clients, pace="base")
    numbers = sum(weights.numel() for weights in clear.values())
    assert [row["bytes_up"] for row in rows] == [f.nodes * 4 * numbers] * 2
    gap, way = (sum(float((a[k] - clear[k]).square().sum()) for k in clear) ** 0.5 for a in (found, start))
    assert gap < 0.02 * way
