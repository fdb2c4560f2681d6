"""`fedagg flower`: a template project, keys for a federation, and letting its nodes in."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from fedagg import files
from fedagg.errors import FedaggError, SettingError

app = typer.Typer(help="A real federation on Flower: a project to start from, keys, nodes.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the project's folder")]
# Always in the server's certificate: Flower's own processes talk over loopback.
LOCAL = ("localhost", "127.0.0.1", "::1")
KNOWN = "Public key already in use"  # what flwr says of a key that is registered


@app.command()
def new(folder: Folder) -> None:
    """Write a project that runs at once with `flwr run`: replace its model() and data() by yours."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError("DIR", str(folder), "exists already and is not empty; choose a new folder")
    files.folder(folder, "DIR")
    copy(resources.files("fedagg.flower") / "template", folder)
    typer.echo(f"wrote {folder}: put your model and data into federation/task.py, then try it with:")
    typer.echo(f"cd {shlex.quote(str(folder))} && flwr run . --stream")


@app.command()
def keys(
    folder: Folder,
    nodes: Annotated[int, typer.Option(min=1, max=100_000, help="how many nodes")] = 3,
    host: Annotated[list[str] | None, typer.Option(help="a name or address of the server; may be repeated")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="the SuperLink's port")] = 8000,
) -> None:
    """Make the certificates of the server and a key for every node, in DIR/keys, and the connection for `flwr run`."""
    from fedagg.flower.keys import make

    hosts = [*(host or []), *LOCAL]
    written = make(folder / "keys", nodes, hosts)
    home = files.folder(folder / ".flwr", "DIR")
    certificate = (folder / "keys" / "ca.crt").resolve()
    files.write(home / "config.toml", CONNECTIONS.format(port=port, certificate=certificate.as_posix()))
    for path in written:
        typer.echo(str(path))


@app.command()
def register(folder: Folder) -> None:
    """Tell the running SuperLink which nodes may join: those with a public key in DIR/keys. To add a node, put its key there
    and say it again."""
    flwr = shutil.which("flwr", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if flwr is None:
        raise FedaggError("the command flwr was not found: pip install 'fedagg[flower]'")
    public = sorted((folder / "keys").glob("node-*.pub"))
    if not public:
        raise SettingError("DIR", str(folder), "has no keys/node-*.pub; make them with: fedagg flower keys DIR")
    home = {**os.environ, "FLWR_HOME": str((folder / ".flwr").resolve())}
    failures: dict[str, list[str]] = {}  # what flwr said -> of which keys
    for key in public:
        words = [flwr, "supernode", "register", str(key), "deployment"]
        done = subprocess.run(words, env=home, capture_output=True, text=True, check=False)
        said = " ".join(re.sub("[\u2500-\u257f]", " ", done.stdout + done.stderr).split())  # without the box around it
        if done.returncode and KNOWN not in said:
            failures.setdefault(said[-300:], []).append(key.name)
        else:
            typer.echo(f"registered {'already: ' if done.returncode else ''}{key}")
    if failures:
        causes = "; ".join(f"{', '.join(keys)}: {said}" for said, keys in failures.items())
        raise FedaggError(f"{sum(map(len, failures.values()))} of {len(public)} keys were not registered: {causes}")


def copy(source: Traversable, target: Path) -> None:
    for item in source.iterdir():
        if item.name == "__pycache__":
            continue
        path = target / {"gitignore": ".gitignore"}.get(item.name, item.name)
        if item.is_dir():
            copy(item, files.folder(path, "DIR"))
        else:
            files.write(path, item.read_bytes())
            if path.suffix == ".sh":
                path.chmod(0o755)


CONNECTIONS = """\
[superlink]
default = "local"

[superlink.local]
address = ":local:"

[superlink.deployment]
address = "127.0.0.1:{port}"
root-certificates = "{certificate}"
"""
