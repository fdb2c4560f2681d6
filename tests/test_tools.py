"""The maintainers' scripts, as far as they run without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fedagg

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu() -> Iterator[ModuleType]:
    """`poison` changes torch for the whole process."""
    pytest.importorskip("triton")
    yield load("check_gpu")
    torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("words", "status"), [([], 2), (["--allow-missing"], 0)])
def test_without_a_gpu_the_check_says_that_it_did_not_run(
    gpu: ModuleType, words: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(words) == status
    assert capsys.readouterr().out == "GPU check: NOT RUN, for there is no CUDA device here\n"


def test_the_gpu_check_in_the_interpreter(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One part of it; a kernel that nothing has launched is a failure."""
    monkeypatch.setattr(gpu, "PARTS", (gpu.steps,))
    assert gpu.main(["--interpret", "--seed", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("step") for line in lines[2:58])
    assert not any("FAILED" in line for line in lines[2:58])
    assert lines[58].startswith("kernels launched: 4 of ")
    assert "not conv" in lines[58]
    assert lines[58].endswith("FAILED")
    assert lines[59].startswith("56 of 57 passed")


@pytest.mark.parametrize("fault", ["wrong", "not written"])
def test_the_gpu_check_finds_a_kernel_that_is_wrong(gpu: ModuleType, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedagg.engines import fused

    def step(self: fused.FusedStep, rate: torch.Tensor, gain: torch.Tensor, *rest: object) -> None:
        if fault == "wrong":
            self.w -= 1.0001 * rate * gain * self.g
        else:
            self.w[0, 0] = torch.empty(()) if torch.empty(()).isnan() else torch.inf

    gpu.poison()
    monkeypatch.setattr(fused.FusedStep, "__call__", step)
    norm, moved, *_ = gpu.steps(gpu.Bench(torch.device("cpu"), seed=1))
    assert norm.passed
    assert not moved.passed


def test_forms_are_timed_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    forms = load("bench_forms")
    monkeypatch.setattr(forms, "set_precision", lambda precision: None)  # for the whole process
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert forms.main(["--tiny", "--device", "cpu", "--models", "linear"]) == 0
    head, _, row, *_ = capsys.readouterr().out.splitlines()
    assert head == "| network | precision | plain loop | vmap | stacked | fused | plain loop / fused |"
    name, precision, plain, vmap, stacked, fused, ratio = row.strip("| ").split(" | ")
    assert (name, precision, fused, ratio) == ("linear", "tf32", "-", "-")
    assert all(0 < float(seconds) < 60 for seconds in (plain, vmap, stacked))


def test_the_study_of_the_default_knows_its_constants(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    study = load("fedagg_study")
    short = {"preset": "mnist-linear", "rounds": 1, "epochs": 1}
    mini = fedagg.data.load("mnist-mini")
    monkeypatch.setattr(study, "CELLS", {"small": short})
    monkeypatch.setattr(study.data, "load", lambda name: mini)
    study.main(["small"], [5])
    lines = capsys.readouterr().out.splitlines()
    assert [line[35:69].strip() for line in lines] == list(study.CANDIDATES)
