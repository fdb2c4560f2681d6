"""The simulator and Flower's own simulation, on Ray, give the same model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs fedagg[flower]")
pytest.importorskip("ray", reason="needs fedagg[flower]")

import torch
from safetensors.torch import load_file

from fedagg.flat import Layout
from test_flower import model, simulated

HERE = Path(__file__).parent


@pytest.mark.slow
def test_agrees_with_the_simulator(tmp_path):
    out, layout = tmp_path / "weights.safetensors", Layout(model())
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    environment = {
        **os.environ,
        **quiet,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "FLWR_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "flower_ray.py"), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = load_file(out)
    assert sorted(found) == ["fedagg", "feddyn"]
    for method, weights in found.items():
        alone = layout.pack(simulated(algorithm=method).model).w
        assert torch.allclose(weights, alone, rtol=0, atol=1e-5), method
