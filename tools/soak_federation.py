"""Run a federation of real processes for a while, kill parts of it at random, and see that nothing is lost.

    python tools/soak_federation.py --minutes 60 --nodes 3 --out soak.json

It makes a project of the template in a temporary folder, with TLS, keys, a SuperLink with its database, nginx in front of it, and
nodes; it starts a run that is gone on with whenever it fails, and every so often kills one part with SIGKILL (a node, the SuperLink
with its server application, the proxy, or the server application alone). What has ended is started again, as systemd would. When
the time is over, or the run complete, it looks at the record: rounds without a gap, each recorded once, all but the last with test
results, and the weights those of the same rounds in one process without the answers that the record says were missing. The result
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedagg import checkpoint, seeding
from fedagg.cli import flower as cli
from fedagg.flower import FedAggStrategy, client_app
from fedagg.flower.server import split

MARK = "FEDAGG_SOAK"
PARTS = ("node", "superlink", "proxy", "server application")
PAUSE = 5.0  # seconds before what has ended is started again, as in the units for systemd


class Soak:
    def __init__(self, folder: Path, nodes: int, rounds: int, timeout: float) -> None:
        self.folder, self.nodes, self.rounds, self.timeout = folder, nodes, rounds, timeout
        self.tag = f"{os.getpid()}-{time.monotonic_ns()}"
        self.port, self.proxy_port, *self.ports = free_ports(nodes + 2)
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **quiet, "PATH": path, "FLWR_HOME": str(folder / ".flwr")}
        cli.new(folder)
        cli.keys(folder, nodes=nodes, port=self.port)

    def commands(self) -> dict[str, list[str]]:
        settings = f"clients={self.nodes} rounds={self.rounds} timeout={self.timeout:f} out='{self.folder}/runs'"
        proxy = f"127.0.0.1:{self.proxy_port}"
        run = [sys.executable, "-m", "fedagg", "flower", "run", ".", "--restarts", "1000", "--patience", "600"]
        return {
            "superlink": ["./superlink.sh", str(self.port)],
            "proxy": ["./proxy.sh", "127.0.0.1", str(self.proxy_port), str(self.port)],
            "run": [*run, "--run-config", settings],
            **{f"node-{k}": ["./supernode.sh", str(k), str(self.nodes), proxy, str(self.ports[k])] for k in range(self.nodes)},
        }

    def start(self, name: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            mark = {MARK: f"{self.tag}/{name}/"}
            words = self.commands()[name]
            self.started[name] = subprocess.Popen(words, cwd=self.folder, env=self.environment | mark, stdout=log, stderr=log)

    def up(self) -> None:
        self.start("superlink")
        until(lambda: reachable(self.port), 120)
        self.start("proxy")
        words = [sys.executable, "-m", "fedagg", "flower", "register", "."]
        subprocess.run(words, cwd=self.folder, env=self.environment, check=True, stdout=subprocess.DEVNULL)
        for node in range(self.nodes):
            self.start(f"node-{node}")
        self.start("run")

    def alive(self, name: str = "", program: str = "") -> list[int]:
        """Processes of a part, with their children: they carry its mark in their environment, even detached. nginx writes its title
        over its own; it is known as what was started, and its workers as children of it."""
        wanted, found = f"{MARK}={self.tag}/{name}".encode(), []
        proxies = {process.pid for part, process in self.started.items() if part == "proxy" and "proxy/".startswith(name)}
        for entry in (entry for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                ours = {int(entry.name), parent} & proxies or wanted in (entry / "environ").read_bytes()
                if ours and program.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def kill(self, name: str = "", program: str = "", how: signal.Signals = signal.SIGKILL) -> int:
        pids = self.alive(name, program)
        for pid in pids:
            try:
                os.kill(pid, how)
            except ProcessLookupError:
                continue
        return len(pids)

    def strike(self, part: str, chance: random.Random) -> str | None:
        """Kill a part. The name of what was hit, if anything was there."""
        if part == "server application":
            return part if self.kill("superlink/", "flwr-serverapp") else None
        name = f"node-{chance.randrange(self.nodes)}" if part == "node" else part
        return name if self.kill(f"{name}/") else None

    def tend(self) -> int:
        """Start again what has ended, but for the run. How many parts were there?

        A SuperNode that comes back before the SuperLink has missed its heartbeat is refused, and ends by itself.
        """
        over = [name for name, process in self.started.items() if name != "run" and process.poll() is not None]
        for name in over:
            self.kill(f"{name}/")  # children of what is no more
            self.start(name)
        return len(over)

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / name
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        try:
            return [json.loads(line) for line in lines]
        except ValueError:  # the last line is just being written
            return [json.loads(line) for line in lines[:-1]]

    def down(self) -> None:
        self.kill()
        for process in self.started.values():
            process.wait(timeout=60)


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


def until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.5)


def replayed(folder: Path, nodes: int, rounds: int, clients: list[dict[str, Any]]) -> torch.Tensor:
    """The weights after the rounds of the record in this process, without the answers that it says were missing, on one thread as
    the nodes have: on two, sums are rounded otherwise, and what the guard decides on losses near zero may differ."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from flower_grid import HereGrid

    task = runpy.run_path(str(folder / "federation" / "task.py"))
    told = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    config, _ = split(told | {"clients": nodes, "rounds": rounds})
    config = config.model_copy(update={"rounds": len(clients), "eval_every": len(clients)})
    with seeding.seeded_global(seeding.derive(config.seed, "model"), torch.device("cpu")):
        module = task["model"]()

    def lose(sent: Any, reply: Any) -> list[Any]:
        row = clients[int(reply.metadata.group_id) - 1]
        return [reply] if reply.metadata.src_node_id - 1000 in row.get("clients", []) else []

    logging.getLogger("flwr").setLevel(logging.ERROR)
    strategy = FedAggStrategy(module, config)
    strategy.run(HereGrid(client_app(task["model"], task["data"]), nodes, lose), wait=0)
    return strategy.server.model.w


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100_000, help="the soak ends when they are done")
    parser.add_argument("--every", type=float, default=45.0, help="mean seconds between two kills")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a node has for its answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the result goes; the screen, if nowhere")
    parser.add_argument("--keep", type=Path, help="a new folder for the project, kept for a look at its logs")
    given = parser.parse_args()
    if shutil.which("nginx") is None:
        sys.exit("nginx is missing: install it, on Debian with: apt-get install nginx-light")
    chance = random.Random(given.seed)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="fedagg-soak-")) / "project"
    soak, kills, began = Soak(folder, given.nodes, given.rounds, given.timeout), Counter[str](), time.monotonic()
    starts = 0
    try:
        soak.up()
        until(lambda: len(soak.rows("metrics.jsonl")) > 0, max(600.0, 4 * given.timeout))
        end, run = began + 60 * given.minutes, soak.started["run"]
        while time.monotonic() < end and run.poll() is None:
            next_kill = min(time.monotonic() + chance.expovariate(1 / given.every), end)
            while time.monotonic() < next_kill:
                time.sleep(min(PAUSE, max(0.1, next_kill - time.monotonic())))
                starts += soak.tend()
            if run.poll() is None and (hit := soak.strike(chance.choice(PARTS), chance)):
                kills[hit] += 1
        # What is left goes on undisturbed for a while: was the last kill survived?
        before = len(soak.rows("metrics.jsonl"))
        while run.poll() is None and len(soak.rows("metrics.jsonl")) == before and time.monotonic() < end + 900:
            time.sleep(PAUSE)
            starts += soak.tend()
        minutes = (time.monotonic() - began) / 60
    finally:
        soak.down()

    rows, clients = soak.rows("metrics.jsonl"), soak.rows("clients.jsonl")
    done = min(len(rows), len(clients))
    complete = soak.started["run"].returncode == 0
    checked = json.loads((soak.folder / "runs" / "result.json").read_text()) if complete else {}
    result = {
        "minutes": round(minutes, 2),
        "rounds": done,
        "complete": complete,
        "without_a_gap": [row["round"] for row in rows] == list(range(1, len(rows) + 1)),
        "tested": all("accuracy" in row for row in rows[:-1]),
        "kills": dict(sorted(kills.items())),
        "started_again": starts,
        "rounds_without_somebody": sum(bool(row["left_out"]) for row in clients),
        "rounds_unchanged": sum(bool(row.get("unchanged")) for row in rows),
        "seconds_a_round": {
            "median": round(sorted(row["seconds"] for row in rows)[done // 2], 2),
            "most": round(max(row["seconds"] for row in rows), 2),
        },
        "survived": complete or len(rows) > before,  # the last kill, too
        "accuracy": checked.get("accuracy"),
    }
    if (saved := checkpoint.latest(soak.folder / "runs" / "checkpoints")) is not None:
        again = replayed(soak.folder, given.nodes, given.rounds, clients[: saved.round])
        result["furthest_weight_from_replay"] = float((saved.tensors["w"] - again).abs().max())
    text = json.dumps(result, indent=2)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    healthy = all(result[name] for name in ("without_a_gap", "tested", "survived"))
    healthy = healthy and result.get("furthest_weight_from_replay", 0.0) < 1e-6
    sys.exit(0 if healthy else 1)


if __name__ == "__main__":
    main()
