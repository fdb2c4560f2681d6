"""`fedagg flower`: the template and the keys."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import stat
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.proto.control_pb2 import ListNodesResponse, ListRunsResponse, StartRunResponse, StreamLogsResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.run_pb2 import Run as ProtoRun
from flwr.proto.run_pb2 import RunStatus
from flwr.supercore.error import ApiErrorCode
from typer.testing import CliRunner

from fedagg.cli.flower import app
from fedagg.errors import FedaggError
from fedagg.flower.server import split


def call(*words: str) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=True)
    if isinstance(result.exception, FedaggError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


packs = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in Flower's own use of pathspec


@pytest.fixture
def project(tmp_path: Path) -> Path:
    call("new", str(tmp_path / "project"))
    return tmp_path / "project"


def test_the_template_is_a_flower_app_whose_settings_are_ours(project):
    _, warnings = load_and_validate(project / "pyproject.toml", check_module=True)
    assert warnings == []
    told = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config, own = split(told)
    assert config.algorithm == "fedagg"
    assert sorted(own) == ["close_at", "fewer_epochs", "patience", "quorum", "timeout", "track", "wait"]
    assert all((project / name).stat().st_mode & stat.S_IXUSR for name in ("superlink.sh", "proxy.sh", "supernode.sh"))


def test_the_template_goes_into_an_empty_folder_only(project):
    with pytest.raises(FedaggError, match="not empty"):
        call("new", str(project))


def test_keys_fit_together_and_stay_private(project):
    call("keys", str(project), "--nodes", "2", "--host", "fed.example.org", "--host", "192.0.2.7")
    keys = project / "keys"
    authority = x509.load_pem_x509_certificate((keys / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((keys / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    private = load_pem_private_key((keys / "server.key").read_bytes(), None)
    assert private.public_key() == server.public_key()
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "127.0.0.1", "::1"]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    ssl.create_default_context(cafile=str(keys / "ca.crt"))

    nodes = [load_ssh_private_key((keys / f"node-{n}").read_bytes(), None) for n in range(2)]
    assert all(isinstance(key.curve, ec.SECP384R1) for key in nodes)
    assert nodes[0].public_key() != nodes[1].public_key()
    assert load_ssh_public_key((keys / "node-0.pub").read_bytes()) == nodes[0].public_key()
    for name in ("server.key", "node-0", "node-1"):
        assert stat.S_IMODE((keys / name).stat().st_mode) == 0o600
    with pytest.raises(FedaggError, match="already has keys"):
        call("keys", str(project))


@packs
def test_keys_are_not_sent_along_with_the_app(project):
    call("keys", str(project))
    secrets = [path.read_bytes() for path in (project / "keys").iterdir()]
    bundle = build_fab_from_disk(project)
    (project / "bundle.zip").write_bytes(bundle)
    with zipfile.ZipFile(project / "bundle.zip") as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    assert "federation/task.py" in held
    assert not any(name.startswith(("keys/", ".flwr/")) for name in held)
    assert not set(secrets) & set(held.values())


def test_nothing_starts_without_keys_unless_asked_explicitly(project):
    for script in ("superlink.sh", "supernode.sh"):
        text = (project / script).read_text()
        before, after = text.split("exec flower-", 1)
        assert 'INSECURE_ANYONE_CAN_JOIN_AND_READ:-no}" = yes' in before
        assert text.count("--insecure") == 1
        assert after.startswith(("superlink --insecure", "supernode --insecure"))


def test_the_superlink_is_reached_from_its_own_machine_only(project):
    """Whoever reaches it can register keys and start runs: nodes connect to the proxy."""
    hosts = re.findall(r"--host (\S+)", (project / "superlink.sh").read_text())
    assert hosts == ["127.0.0.1"] * 2
    paths = re.findall(r"location (.*) \{", (project / "nginx.conf").read_text())
    assert [path for path in paths if "control" in path or "runtime" in path] == []


@pytest.mark.parametrize("host", ["", "fed.example.org:8000", "[::1]:8000", "https://fed.example.org", "fed example", "dömäne.org"])
def test_a_host_is_a_name_without_a_port(project, host):
    with pytest.raises(FedaggError, match=r"^host = .*without a port$"):
        call("keys", str(project), "--host", host)
    assert not (project / "keys").exists()


class FakeLink:
    """A SuperLink that knows node-0 and, until told otherwise, does not like node-1."""

    def __init__(self) -> None:
        self.keys: dict[bytes, str] = {}
        self.picky = True
        self.statuses: dict[int, list[str]] = {}  # of runs, in turn
        self.stopped: list[int] = []

    def close(self) -> None:
        """There is no connection to close."""

    def refuse(self, code: int, words: str) -> None:
        request = httpx.Request("POST", "https://link")
        response = httpx.Response(409, json={"code": code, "detail": words}, request=request)
        raise httpx.HTTPStatusError("409", request=request, response=response)

    def RegisterNode(self, request):
        if request.name == "node-0" or request.public_key in self.keys:
            self.refuse(ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE, "Public key already in use.")
        if request.name == "node-1" and self.picky:
            self.refuse(7, "no such\ncurve")
        self.keys[request.public_key] = request.name

    def ListNodes(self, request):
        rows = [NodeInfo(node_id=10 + k, name=name, status="online") for k, name in enumerate(self.keys.values())]
        return ListNodesResponse(nodes_info=[*rows, NodeInfo(node_id=9, name="node-9", status="unregistered")])

    def UnregisterNode(self, request):
        self.keys = {key: name for k, (key, name) in enumerate(self.keys.items()) if 10 + k != request.node_id}

    def StartRun(self, request):
        return StartRunResponse(run_id=max(self.statuses, default=0) + 1)

    def StreamLogs(self, request):
        run = request.run_id
        self.statuses.setdefault(run, [self.outcomes.pop(0)])
        yield StreamLogsResponse(log_output=f"log of {run}\n")
        if self.statuses[run] == ["down"]:
            self.statuses[run] = ["running"]
            raise httpx.ConnectError("refused")

    def ListRuns(self, request):
        def status(name):
            over = name in ("completed", "failed", "stopped")
            return RunStatus(status="finished" if over else name, sub_status=name if over else "", details="Lost\nHeartbeat" * over)

        return ListRunsResponse(run_dict={run: ProtoRun(run_id=run, status=status(s[-1])) for run, s in self.statuses.items()})

    def StopRun(self, request):
        self.stopped.append(request.run_id)
        self.statuses[request.run_id].append("stopped")


@pytest.fixture
def superlink(project, monkeypatch):
    call("keys", str(project), "--nodes", "3")
    link = FakeLink()
    monkeypatch.setattr("fedagg.flower.control.ControlHttpClient.from_server_address", lambda *args, **options: link)
    return project, link


def test_registering_tries_all_keys_and_tells_what_failed_at_the_end(superlink):
    project, link = superlink
    with pytest.raises(FedaggError, match=r"^1 of 3 keys were not registered: .*refuses: no such curve$"):
        call("register", str(project))
    assert list(link.keys.values()) == ["node-2"]


def test_registering_again_adds_the_new_nodes(superlink):
    project, link = superlink
    link.picky = False
    keys = project / "keys"
    told = call("register", str(project)).splitlines()
    assert told == [f"registered already: {keys / 'node-0.pub'}", *(f"registered {keys / f'node-{k}.pub'}" for k in (1, 2))]
    assert [line.split()[:2] for line in call("nodes", str(project)).splitlines()] == [["node-1", "online"], ["node-2", "online"]]


def test_a_node_that_is_revoked_is_not_registered_again(superlink):
    project, link = superlink
    link.picky = False
    call("register", str(project))
    with pytest.raises(FedaggError, match=r"NODE = 'node-7': is not registered; there are: node-1, node-2$"):
        call("revoke", str(project), "node-7")
    assert call("revoke", str(project), "node-2") == "revoked node-2\n"
    call("register", str(project))
    assert list(link.keys.values()) == ["node-1"]
    assert json.loads(call("status", str(project), "--json")) == {"runs": [], "nodes": 1, "online": 1}


def runs(superlink, outcomes, *words):
    project, link = superlink
    link.outcomes = list(outcomes)
    result = CliRunner().invoke(app, ["run", str(project), *words])
    return result, link


@packs
@pytest.mark.parametrize("first", ["failed", "down"])
def test_a_run_that_fails_is_started_again(superlink, first):
    """Its server application is killed, or the SuperLink is: then what is left of the run is stopped first."""
    result, link = runs(superlink, [first, "completed"], "--restarts", "1")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "run 2 is complete"
    assert "log of 1\n" in result.output
    assert link.stopped == ([1] if first == "down" else [])


@packs
@pytest.mark.parametrize(
    ("outcomes", "restarts", "words"),
    [
        (["failed"], 0, r"^run 1: failed \(Lost Heartbeat\); the same command resumes"),
        (["failed", "failed"], 1, r"^run 2: failed"),
        (["down"], 0, r"^run 1: its SuperLink went down; the same command resumes"),
        (["stopped"], 1, r"^run 1: stopped .*; the same command resumes"),  # by an operator, who wants no other
    ],
)
def test_a_run_that_does_not_come_to_its_end_ends_in_an_error(superlink, outcomes, restarts, words):
    result, _ = runs(superlink, outcomes, "--restarts", str(restarts))
    assert isinstance(result.exception, FedaggError)
    assert re.match(words, str(result.exception)), result.exception


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("roundz=3", r"^roundz = 3: is not in \[tool.flwr.app.config\]"),
        ("rounds=-1", r"^rounds = -1"),
        ("timeout='x'", r"^timeout = 'x': give a number"),
        ("rounds", r"^run-config = 'rounds'"),
    ],
)
def test_a_setting_that_is_wrong_is_named_before_anything_starts(superlink, given, words):
    result, link = runs(superlink, [], "--run-config", given)
    assert isinstance(result.exception, FedaggError)
    assert re.match(words, str(result.exception)), result.exception
    assert link.statuses == {}


def test_a_missing_superlink_is_one_line(project):
    call("keys", str(project), "--port", "9")
    for command in ("register", "status", "nodes", "log", "stop"):
        with pytest.raises(FedaggError, match=r"^no SuperLink answers at 127.0.0.1:9 .*superlink.sh$"):
            call(command, str(project))


def test_registering_needs_keys(project):
    with pytest.raises(FedaggError, match="fedagg flower keys"):
        call("register", str(project))


# Files for those who run it, held against their own tools.


def test_compose_opens_only_the_proxys_port(project):
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((project / "compose.yaml").read_text())
    services = found["services"]
    assert {name: service["ports"] for name, service in services.items() if "ports" in service} == {"superlink": ["8443:8443"]}
    for name in ("proxy", "register", "run"):
        assert services[name]["network_mode"] == "service:superlink"
    for number in range(3):
        node = services[f"node-{number}"]
        keys = [volume for volume in node["volumes"] if "keys" in volume]
        assert [key.split(":")[0] for key in keys] == ["./keys/ca.crt", f"./keys/node-{number}"]
        assert f"node-{number}" in found["volumes"]
        assert f"./supernode.sh {number} 3 " in node["command"][2]
    for name in ("superlink", "proxy"):
        assert (project / services[name]["command"][0]).exists()
    assert all(service["restart"] for service in services.values())


def compose_is_there() -> bool:
    words = ["docker", "compose", "version"]
    return shutil.which("docker") is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not compose_is_there(), reason="needs docker compose, of which no engine has to run")
def test_compose_accepts_its_file(project):
    done = subprocess.run(["docker", "compose", "--profile", "*", "config", "-q"], cwd=project, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_nginx_accepts_the_configuration_that_the_script_writes(project, tmp_path):
    """The script itself, with an nginx in front that adds `-t`."""
    call("keys", str(project), "--nodes", "1")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nginx").write_text(f'#!/bin/sh\nexec {shutil.which("nginx")} -t "$@"\n')
    (tmp_path / "bin" / "nginx").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    words, env = [str(project / "proxy.sh"), "127.0.0.1", "8443"], {**os.environ, "PATH": path}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "test is successful" in done.stderr
    assert "[warn]" not in done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(project):
    units = sorted((project / "deploy").glob("*.service"))
    assert [unit.name for unit in units] == [f"fedagg-{name}.service" for name in ("node@", "proxy", "run", "superlink")]
    here = project.parent / "units"
    here.mkdir()
    for unit in units:
        text = unit.read_text().replace("/srv/federation", str(project)).replace("/srv/venv/bin/fedagg", "/bin/true")
        assert "Restart=" in text
        (here / unit.name.replace("@", "@0")).write_text(text.replace("User=fedagg", "User=root"))
    words = ["systemd-analyze", "verify", "--recursive-errors=no", *map(str, here.iterdir())]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    ours = [line for line in done.stderr.splitlines() if "fedagg-" in line or str(here) in line]
    assert (done.returncode, ours) == (0, [])


def test_kubernetes_opens_only_the_proxys_port(project):
    yaml = pytest.importorskip("yaml")
    service, server, node = yaml.safe_load_all((project / "deploy" / "kubernetes.yaml").read_text())
    assert [port["targetPort"] for port in service["spec"]["ports"]] == [8443]
    for kind in (server, node):
        spec = kind["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in kind["spec"]["volumeClaimTemplates"]}
        containers = spec["containers"] + spec.get("initContainers", [])
        assert {mount["name"] for container in containers for mount in container["volumeMounts"]} == volumes
        assert kind["spec"]["selector"]["matchLabels"] == kind["spec"]["template"]["metadata"]["labels"]
    ports = [port for container in server["spec"]["template"]["spec"]["containers"] for port in container.get("ports", [])]
    assert ports == [{"containerPort": 8443}]


def test_kubernetes_accepts_its_file(project):
    """By its own schema, in which nothing may stand that it does not know."""
    yaml, validator = pytest.importorskip("yaml"), pytest.importorskip("kubernetes_validate")
    found = list(yaml.safe_load_all((project / "deploy" / "kubernetes.yaml").read_text()))
    assert [thing["kind"] for thing in found] == ["Service", "StatefulSet", "StatefulSet"]
    for thing in found:
        validator.validate(thing, "1.30", strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate({**found[0], "spce": {}}, "1.30", strict=True)
