"""`fedagg flower`: a template project, keys for a federation, and its operation: nodes, runs, logs."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from fedagg import files
from fedagg.errors import FedaggError, SettingError

app = typer.Typer(help="A real federation on Flower: a project to start from, keys, nodes, runs.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="the project's folder")]
# Always in the server's certificate: Flower's own processes communicate over loopback.
LOCAL = ("localhost", "127.0.0.1", "::1")
Json = Annotated[bool, typer.Option("--json", help="as JSON")]
Run = Annotated[int | None, typer.Argument(metavar="[RUN]", help="its number; the newest, if none is given")]


@app.command()
def new(folder: Folder) -> None:
    """Write a project that runs immediately with `flwr run`; replace its model() and data() with your own."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError("DIR", str(folder), "already exists and is not empty; choose a new folder")
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
    """Make the server's certificates and a key for every node, in DIR/keys, and set up the connection for `flwr run`."""
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
    and run this command again."""
    from fedagg.flower.control import Control, Unreachable

    public = sorted((folder / "keys").glob("node-*.pub"))
    if not public:
        raise SettingError("DIR", str(folder), "has no keys/node-*.pub; make them with: fedagg flower keys DIR")
    failures: list[str] = []
    with Control(folder) as control:
        for key in public:
            try:
                new = control.register(key)
            except Unreachable:
                raise
            except FedaggError as error:
                failures.append(str(error))
            else:
                typer.echo(f"registered {'' if new else 'already: '}{key}")
    if failures:
        raise FedaggError(f"{len(failures)} of {len(public)} keys were not registered: {'; '.join(failures)}")


@app.command()
def run(
    folder: Folder,
    run_config: Annotated[list[str] | None, typer.Option(help='settings, such as "rounds=10 lr=0.1"; may be repeated')] = None,
    restarts: Annotated[int, typer.Option(min=0, help="how many times a failed run is restarted")] = 0,
    patience: Annotated[float, typer.Option(min=0, help="seconds to wait for a SuperLink that is down")] = 120.0,
) -> None:
    """Start a run and stay with it until it ends. The exit status says whether the run was completed."""
    from fedagg.flower.control import Control, settings

    overrides = settings(folder, run_config or [])
    with Control(folder) as control:
        ended = control.run_to_end(folder, overrides, restarts, patience, lambda text: typer.echo(text, nl=False))
    typer.echo(f"run {ended.run} is complete")


@app.command()
def status(folder: Folder, as_json: Json = False) -> None:
    """List the runs that the SuperLink knows, and say how many nodes are online."""
    from fedagg.flower.control import Control

    with Control(folder) as control:
        runs, known = control.runs(), control.nodes()
    online = sum(row.status == "online" for row in known)
    if as_json:
        typer.echo(json.dumps({"runs": [asdict(row) for row in runs], "nodes": len(known), "online": online}))
        return
    typer.echo(f"{online} of {len(known)} nodes are online")
    for row in runs:
        typer.echo(f"run {row.run}  {row.status:9}  {row.since}  {row.details}".rstrip())


@app.command()
def nodes(folder: Folder, as_json: Json = False) -> None:
    """List the nodes that may join, and say which are online."""
    from fedagg.flower.control import Control

    with Control(folder) as control:
        known = control.nodes()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in known]))
        return
    for row in known:
        typer.echo(f"{row.name or '?':12}  {row.status:10}  {row.since}  {row.node}")


@app.command()
def revoke(folder: Folder, node: Annotated[str, typer.Argument(metavar="NODE", help="the name of its key, or its id")]) -> None:
    """Shut a node out, at once and for good: its key is not accepted again."""
    from fedagg.flower.control import Control

    with Control(folder) as control:
        gone = control.revoke(node)
    key = folder / "keys" / f"{gone.name}.pub"
    if gone.name and key.exists():
        key.rename(key.with_suffix(".revoked"))  # otherwise the next `register` would admit it again
    typer.echo(f"revoked {gone.name or gone.node}")


@app.command()
def log(folder: Folder, which: Run = None) -> None:
    """Show the log of a run so far, and follow it."""
    from fedagg.flower.control import Control

    with Control(folder) as control:
        control.log(control.latest(which).run, lambda text: typer.echo(text, nl=False))


@app.command()
def stop(folder: Folder, which: Run = None) -> None:
    """Stop a run. When it is started again, it resumes after its last complete round."""
    from fedagg.flower.control import Control

    with Control(folder) as control:
        row = control.latest(which)
        if row.status in ("completed", "failed", "stopped"):
            raise SettingError("RUN", row.run, f"has already ended: {row.status}")
        control.stop(row.run)
    typer.echo(f"stopped run {row.run}")


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
