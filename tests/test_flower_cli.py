"""`fedagg flower`: the template and the keys."""

from __future__ import annotations

import ssl
import stat
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
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
    assert sorted(own) == ["quorum", "timeout", "wait"]
    assert all((project / name).stat().st_mode & stat.S_IXUSR for name in ("superlink.sh", "supernode.sh"))


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
    with pytest.raises(FedaggError, match="holds keys already"):
        call("keys", str(project))


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in Flower's own use of pathspec
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


def test_nothing_starts_without_keys_unless_asked_loudly(project):
    for script in ("superlink.sh", "supernode.sh"):
        text = (project / script).read_text()
        before, after = text.split("exec flower-", 1)
        assert 'INSECURE_ANYONE_CAN_JOIN_AND_READ:-no}" = yes' in before
        assert text.count("--insecure") == 1
        assert after.startswith(("superlink --insecure", "supernode --insecure"))


@pytest.mark.parametrize("host", ["", "fed.example.org:8000", "[::1]:8000", "https://fed.example.org", "fed example", "dömäne.org"])
def test_a_host_is_a_name_without_a_port(project, host):
    with pytest.raises(FedaggError, match=r"^host = .*without a port$"):
        call("keys", str(project), "--host", host)
    assert not (project / "keys").exists()


@pytest.fixture
def superlink(project, monkeypatch):
    """A flwr that knows node-0 and does not like node-1."""
    call("keys", str(project), "--nodes", "3")
    flwr = project / "flwr"
    flwr.write_text(
        "#!/bin/sh\necho $3 >> $0.log\n"
        "case $3 in *node-0.pub) echo '[code: 23] Public key already'; echo 'in use.'; exit 1;; "
        "*node-1.pub) test -e $0.kind || { echo no such curve >&2; exit 1; };; esac\n"
    )
    flwr.chmod(0o755)
    monkeypatch.setattr("fedagg.cli.flower.shutil.which", lambda *args, **options: str(flwr))
    return project


def test_registering_tries_all_keys_and_tells_what_failed_at_the_end(superlink):
    with pytest.raises(FedaggError, match=r"^1 of 3 keys were not registered: .*node-1.pub: no such curve$"):
        call("register", str(superlink))
    assert len((superlink / "flwr.log").read_text().splitlines()) == 3


def test_registering_again_adds_the_new_nodes(superlink):
    (superlink / "flwr.kind").touch()
    keys = superlink / "keys"
    told = call("register", str(superlink)).splitlines()
    assert told == [f"registered already: {keys / 'node-0.pub'}", *(f"registered {keys / f'node-{k}.pub'}" for k in (1, 2))]


def test_registering_needs_keys(project):
    with pytest.raises(FedaggError, match="fedagg flower keys"):
        call("register", str(project))
