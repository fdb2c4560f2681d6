"""What works without the optional packages, and what the rest reports. One fresh process in which none of them can be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import contextlib, io, json, sys
for name in ("matplotlib", "plotly", "scipy", "flwr", "ray", "tensorboard", "mlflow", "wandb"):
    sys.modules[name] = None  # as if it were not installed
from fedagg.cli import main

def call(*words):
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(words))
        except SystemExit as stop:
            status = stop.code
    return [status, out.getvalue(), " ".join(err.getvalue().split())]

TINY = ["--rounds", "1", "--clients", "20", "--participation", "0.1", "--epochs", "1"]
said = {
    "compare": call("compare", "fedavg,fedagg", *TINY, "--out", "both", "--json", "--quiet"),
    "plot": call("plot", "both"),
    "report": call("report", "both"),
    "partition": call("partition", "--clients", "20"),
    "bounds": call("bounds", "both/fedavg"),
    "figure": call("reproduce", "fig-bars", "--rounds-scale", "0.01"),
    "table": call("reproduce", "table-accuracy", "--show"),
    "keys": call("flower", "keys", "federation"),
}
try:
    import fedagg.flower
except ImportError as error:
    said["flower"] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bare")
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "folder": folder}


def test_training_and_tables_need_no_extra(said: dict[str, Any]) -> None:
    status, out, err = said["compare"]
    assert status == 0
    assert json.loads(out)["plot"] is None
    assert len(json.loads(out)["runs"]) == 2
    assert err == "warning: a picture needs matplotlib, which is not installed: pip install 'fedagg[analysis]'"
    assert (said["folder"] / "both" / "fedagg" / "model.safetensors").exists()
    assert said["table"][0] == 0
    assert "MNIST + linear" in said["table"][1]


@pytest.mark.parametrize(
    ("command", "package"),
    [("plot", "matplotlib"), ("report", "plotly"), ("partition", "matplotlib"), ("bounds", "matplotlib"), ("figure", "matplotlib")],
)
def test_what_needs_an_extra_says_so_in_one_line(said: dict[str, Any], command: str, package: str) -> None:
    status, out, err = said[command]
    assert (status, out) == (2, "")
    assert err.endswith(f"needs {package}, which is not installed: pip install 'fedagg[analysis]'")
    assert not (said["folder"] / "results").exists()  # said before any work


def test_flower_is_named_with_its_extra(said: dict[str, Any]) -> None:
    assert said["flower"] == "fedagg.flower needs flwr, which is not installed: pip install 'fedagg[flower]'"
    assert said["keys"][0] == 2
    assert said["keys"][2] == f"fedagg: {said['flower']}"


def test_the_package_is_typed() -> None:
    import fedagg

    assert (Path(fedagg.__file__).parent / "py.typed").exists()
