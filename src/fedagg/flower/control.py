"""An operator's control of a running SuperLink, in one process: admit and revoke nodes, start, watch and stop runs."""

from __future__ import annotations

import hashlib
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

from fedagg.errors import FedaggError, SettingError
from fedagg.flower.server import split

RESUMES = "the same command resumes after the last complete round, if the run has `out`"
LOCAL = "127.0.0.1:8000"  # the default address of superlink.sh
RETRY = 2.0  # seconds between attempts to reach a SuperLink that is down


class Unreachable(FedaggError):
    """The SuperLink does not answer: it may be restarting."""


@dataclass(frozen=True)
class NodeRow:
    node: int
    name: str  # name of its key file
    status: str  # registered, online, offline, unregistered
    since: str


@dataclass(frozen=True)
class RunRow:
    run: int
    status: str  # pending, starting, running, completed, failed, stopped
    details: str
    since: str


class Control:
    """The SuperLink of a project, with its certificate."""

    def __init__(self, folder: Path) -> None:
        try:
            certificate = (folder / "keys" / "ca.crt").read_bytes()
        except OSError:
            raise SettingError("DIR", str(folder), "has no keys/ca.crt; make keys with: fedagg flower keys DIR") from None
        self.address = address(folder)
        versions = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        self.client = ControlHttpClient.from_server_address(self.address, False, certificate, interceptors=[versions])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Turn Flower's errors into one line."""
        try:
            yield
        except httpx.TransportError as error:
            what = " ".join(str(error).split()) or type(error).__name__
            raise Unreachable(f"no SuperLink answers at {self.address} ({what}); start it with ./superlink.sh") from None
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (502, 503, 504):
                raise Unreachable(f"the SuperLink at {self.address} is not ready ({error.response.status_code})") from None
            reply = FlowerError.from_json(error.response.text)
            if reply is not None and reply.code == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                raise AlreadyRegistered from None
            words = [reply.message, reply.public_details or ""] if reply is not None else [str(error)]
            raise FedaggError(f"the SuperLink at {self.address} refuses: {' '.join(' '.join(words).split())}") from None

    # Nodes.

    def register(self, key: Path) -> bool:
        """Admit a node. Was it unknown until now?"""
        try:
            with self.one_line_errors():
                self.client.RegisterNode(RegisterNodeRequest(public_key=public_key(key), name=key.stem))
        except AlreadyRegistered:
            return False
        return True

    def nodes(self) -> list[NodeRow]:
        with self.one_line_errors():
            found = self.client.ListNodes(ListNodesRequest()).nodes_info
        rows = [NodeRow(n.node_id, n.name, n.status, n.last_activated_at or n.registered_at) for n in found]
        return sorted((row for row in rows if row.status != "unregistered"), key=lambda row: (natural_key(row.name), row.node))

    def revoke(self, which: str) -> NodeRow:
        """Revoke a node, by its id or the name of its key."""
        known = self.nodes()
        found = [row for row in known if which in (str(row.node), row.name, f"{row.name}.pub")]
        if len(found) != 1:
            names = ", ".join(row.name or str(row.node) for row in known) or "nobody"
            raise SettingError("NODE", which, f"{'is not one node' if found else 'is not registered'}; there are: {names}")
        with self.one_line_errors():
            self.client.UnregisterNode(UnregisterNodeRequest(node_id=found[0].node))
        return found[0]

    # Runs.

    def runs(self) -> list[RunRow]:
        with self.one_line_errors():
            found = self.client.ListRuns(ListRunsRequest()).run_dict.values()
        rows = [
            RunRow(
                r.run_id,
                r.status.sub_status or r.status.status,
                " ".join(r.status.details.split()),
                r.finished_at or r.running_at or r.starting_at or r.pending_at,
            )
            for r in sorted(found, key=lambda r: r.pending_at)
        ]
        return rows

    def latest(self, run: int | None) -> RunRow:
        known = self.runs()
        found = [row for row in known if run is None or row.run == run]
        if not found:
            raise SettingError("RUN", run, "the SuperLink does not know this run; `fedagg flower status DIR` lists those it knows")
        return found[-1]

    def start(self, folder: Path, overrides: dict[str, Any]) -> int:
        content = build_fab_from_disk(folder)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        with self.one_line_errors():
            answer = self.client.StartRun(
                StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(overrides), federation="")
            )
        if not answer.HasField("run_id"):
            raise FedaggError(f"the SuperLink at {self.address} did not start the run")
        return answer.run_id

    def stop(self, run: int) -> None:
        with self.one_line_errors():
            self.client.StopRun(StopRunRequest(run_id=run))

    def log(self, run: int, tell: Callable[[str], None], after: float = 0.0) -> None:
        """Pass on the log until the run or the SuperLink ends."""
        with self.one_line_errors():
            for part in self.client.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=after)):
                tell(part.log_output)

    def run_to_end(
        self, folder: Path, overrides: dict[str, Any], restarts: int, patience: float, tell: Callable[[str], None]
    ) -> RunRow:
        """Start a run and follow it to its end. If it fails, or its SuperLink goes down, it is started again up to `restarts`
        times, and continues after the last complete round. Raises FedaggError if the last attempt fails too."""
        for attempt in range(restarts + 1):
            run, down = self.retry(lambda: self.start(folder, overrides), patience), False
            tell(f"run {run} has started\n")
            try:
                self.log(run, tell)
            except Unreachable as error:
                # The server application goes down with its SuperLink. What is left of the run would block the next one.
                tell(f"{error}\n")
                self.retry(partial(self.end, run), patience)
                down = True
            ended: RunRow = self.retry(partial(self.latest, run), patience)
            if ended.status == "completed":
                return ended
            why = "its SuperLink went down" if down else f"{ended.status} ({ended.details or 'no reason given'})"
            if attempt == restarts or (ended.status == "stopped" and not down):  # a user stopped it
                raise FedaggError(f"run {run}: {why}; {RESUMES}")
            tell(f"run {run}: {why}; starting it again\n")
        raise AssertionError("the last attempt returns or raises")

    def end(self, run: int) -> None:
        if self.latest(run).status in ("pending", "starting", "running"):
            self.stop(run)

    def retry(self, ask: Callable[[], Any], patience: float) -> Any:
        """Ask a SuperLink that may be restarting, until it answers."""
        end = time.monotonic() + patience
        while True:
            try:
                return ask()
            except Unreachable:
                if time.monotonic() >= end:
                    raise
                time.sleep(RETRY)


def address(folder: Path) -> str:
    """The address of the project's SuperLink on this machine."""
    path = folder / ".flwr" / "config.toml"
    if not path.exists():
        return LOCAL
    try:
        return str(tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]["deployment"]["address"])
    except (OSError, ValueError, KeyError, TypeError):
        raise FedaggError(
            f"{path}: has no address in [superlink.deployment]; remove it to look for the SuperLink at {LOCAL}"
        ) from None


class AlreadyRegistered(Exception):
    """The key is already registered."""


def settings(folder: Path, given: Sequence[str]) -> dict[str, Any]:
    """A run's settings as `flwr run --run-config` takes them, checked first, so that errors name the setting before the start."""
    path = folder / "pyproject.toml"
    try:
        held = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"].get("config", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise SettingError(
            "DIR", str(folder), "has no pyproject.toml of a Flower app; make one with: fedagg flower new DIR"
        ) from None
    try:
        overrides = dict(parse_config_args(list(given)))
    except ValueError as error:
        raise SettingError("run-config", " ".join(given), " ".join(str(error).split())) from None
    if any(given) and not overrides:
        raise SettingError("run-config", " ".join(given), "write settings as in \"rounds=10 algorithm='fedavg'\"")
    for name, value in overrides.items():
        if name not in held:
            raise SettingError(name, value, "is not in [tool.flwr.app.config] of pyproject.toml, where Flower requires it to be")
    split({**held, **overrides})
    return overrides


def public_key(path: Path) -> bytes:
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise FedaggError(f"{path}: is not a public key in the form that ssh-keygen writes ({type(error).__name__})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not uses_nist_ec_curve(key):
        raise FedaggError(f"{path}: Flower takes keys on a NIST curve, such as P-384; make one with: ssh-keygen -t ecdsa -b 384")
    return public_key_to_bytes(key)


def natural_key(name: str) -> tuple[str, int]:
    """A sort key that puts node-10 after node-9."""
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isdecimal() else (name, -1)
