"""What a run leaves behind: read back from its folder, asked for predictions, shown, exported; and how a run ends early."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedagg
import tiny
from fedagg import loading, progress, stopping
from fedagg.cli import main
from fedagg.errors import FedaggError, MissingError, SettingError
from fedagg.measure import ACCURACY, Measure

SMALL: dict[str, Any] = {"algorithm": "fedavg", "clients": 20, "participation": 0.1, "rounds": 2, "epochs": 1, "lr": 0.1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedagg.Result:
    """With standardised inputs, so that predictions depend on them."""
    return fedagg.run(**SMALL, normalize=True, out=tmp_path_factory.mktemp("runs") / "one")


def call(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in arguments])
    return int(ended.value.code or 0)


# Reading back.


def test_a_folder_gives_the_result_that_the_run_returned(run: fedagg.Result) -> None:
    assert run.run is not None
    again = fedagg.load(str(run.run))
    assert again.config == run.config
    assert again.history == run.history
    assert again.summary() == run.summary()
    assert again.seconds == run.seconds
    assert again.timing == run.timing
    state = again.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in run.model.state_dict().items())
    assert repr(again) == repr(run)


def test_the_record_says_where_the_time_went(run: fedagg.Result) -> None:
    what = {"data", "network and engine", "checksum", "first round", "rounds", "evaluation", "record"}
    assert set(run.timing) == set(run.summary()["timing"]) == what
    assert all(taken >= 0 for taken in run.timing.values())
    assert run.timing["first round"] + run.timing["rounds"] <= run.seconds + 0.0015  # three numbers that are rounded


def test_the_names_of_classes_come_back(tmp_path: Path) -> None:
    data = fedagg.Dataset.of(
        {"a": [float(k % 3) for k in range(60)], "grade": [("poor", "fair", "good")[k % 3] for k in range(60)]}, target="grade"
    )
    result = fedagg.run(data=data, clients=3, rounds=20, lr=0.3, algorithm="fedavg", out=tmp_path / "run", progress=False)
    again = fedagg.load(tmp_path / "run")
    assert again.labels == result.labels == ("fair", "good", "poor")
    assert [again.labels[k] for k in again.predict(torch.tensor([[0.0], [2.0]]))] == ["poor", "good"]
    assert fedagg.run(rounds=1, clients=20, progress=False).labels is None


def test_predictions_and_scores_are_those_of_the_run(run: fedagg.Result) -> None:
    """On the test set as it is stored: bytes are scaled, and the run's own standardisation is applied."""
    digits = fedagg.data.load("mnist-mini")
    again = fedagg.load(run.run or "")
    scores = again.evaluate(digits.x_test, digits.y_test)
    assert scores["accuracy"] == pytest.approx(run.accuracy, abs=1e-12)
    assert scores["loss"] == pytest.approx(run.loss, rel=1e-5)
    weight, bias = (run.model.state_dict()[name].double().numpy() for name in run.model.state_dict())
    train, x = digits.x_train.double().numpy(), digits.x_test[:50].double().numpy()
    flat = ((x - train.mean()) / train.std()).reshape(len(x), -1)
    assert again.predict(digits.x_test[:50]).tolist() == (flat @ weight.T + bias).argmax(1).tolist()
    as_bytes = (255 * digits.x_test[:50]).round().byte()
    assert torch.equal(again.predict(as_bytes.numpy()), again.predict(digits.x_test[:50]))


def test_what_does_not_fit_the_run_is_refused(run: fedagg.Result) -> None:
    x = np.zeros((3, 1, 28, 28), dtype=np.float32)
    with pytest.raises(SettingError, match=re.escape("x = (28, 28): the run's samples have the shape (1, 28, 28)")):
        run.predict(x[:, 0])
    with pytest.raises(SettingError, match="the run's samples are real numbers"):
        run.predict(x.astype(np.int64))
    with pytest.raises(SettingError, match="the two must agree"):
        run.evaluate(x, np.zeros(2, dtype=np.int64))
    with pytest.raises(SettingError, match="from 0 to 9"):
        run.evaluate(x, np.array([0, 1, 10]))


def test_your_own_network_is_given_again(tmp_path: Path) -> None:
    def doubled(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2 * nn.functional.cross_entropy(output, y, reduction="none")

    made = tiny.job(rounds=1, out=tmp_path / "run", loss=doubled)
    with pytest.raises(SettingError, match=re.escape(f"fedagg.load({str(tmp_path / 'run')!r}, model=...)")):
        fedagg.load(tmp_path / "run")
    with pytest.raises(FedaggError, match="holds the weights of another model"):
        fedagg.load(tmp_path / "run", model=nn.Linear(6, 3))
    mine = tiny.network()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    again = fedagg.load(tmp_path / "run", model=mine)
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())  # a copy got the weights
    data = tiny.dataset()
    assert torch.equal(again.predict(data.x_test), made.predict(data.x_test))
    with pytest.raises(SettingError, match=r"the run's loss came from Python; .*loss=\.\.\."):
        again.evaluate(data.x_test, data.y_test)
    known = fedagg.load(tmp_path / "run", model=mine, loss=doubled)
    assert known.evaluate(data.x_test, data.y_test)["loss"] == pytest.approx(made.loss, rel=1e-5)


def test_folders_that_cannot_be_loaded(run: fedagg.Result, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"is not a run folder: it has no config\.toml"):
        fedagg.load(tmp_path)
    assert run.run is not None
    for name in ("config.toml", "environment.json"):
        shutil.copy(run.run / name, tmp_path / name)
    with pytest.raises(FedaggError, match="is missing or damaged, but is needed because the run standardised its samples"):
        fedagg.load(tmp_path)
    (tmp_path / "config.toml").write_text(fedagg.Config(**SMALL).toml(), encoding="utf-8")
    with pytest.raises(SettingError, match=r"has no model\.safetensors"):
        fedagg.load(tmp_path)


def test_an_earlier_folder_is_read_by_way_of_its_data(run: fedagg.Result, tmp_path: Path) -> None:
    """It does not say what samples are like, and the data set does."""
    kept = loading.runs.load(run.run or tmp_path)
    assert loading.rebuild_network(kept.config, None, kept.folder).state_dict().keys() == run.model.state_dict().keys()


# Showing.


def test_a_result_in_three_lines_and_as_a_table_with_a_curve(run: fedagg.Result) -> None:
    lines = repr(run).splitlines()
    assert len(lines) == 3
    assert lines[0] == "fedavg, seed 0: mnist-mini, linear, iid, 10 % of 20 clients, 2 rounds, inputs standardised"
    assert lines[1].startswith(f"accuracy {100 * run.accuracy:.2f} % (best")
    assert "2 of 2 rounds" in lines[1]
    assert lines[2] == f"run folder {run.run}"
    page = run._repr_html_()
    assert page.count("<svg") == page.count("<polyline") == 1
    assert len(re.findall(r"[\d.]+,[\d.]+", re.findall(r'points="([^"]+)"', page)[0])) == 2
    assert "test accuracy" in page


def test_names_in_the_table_are_text() -> None:
    config = fedagg.Config().model_copy(update={"dataset": "<script>"})
    hostile = fedagg.Result(config, [], nn.Identity(), math.nan, math.nan, math.nan, 0.0)
    assert "<script>" not in hostile._repr_html_()
    assert "accuracy - (best -)" in repr(hostile)


def test_a_data_frame_has_a_row_a_round(run: fedagg.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    frame = run.to_pandas()
    assert list(frame.index) == [1, 2]
    assert list(frame["accuracy"]) == [row["accuracy"] for row in run.history]
    assert list(frame["rate_mean/epoch_1"]) == [row["rate_mean"][0] for row in run.history]
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr("fedagg.errors.find_spec", lambda name: None)
    with pytest.raises(MissingError, match="to_pandas needs pandas, which is not installed"):
        run.to_pandas()


def test_a_picture_of_the_curves(run: fedagg.Result, tmp_path: Path) -> None:
    figure = run.plot(tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert [axes.get_ylabel() for axes in figure.axes] == ["test accuracy (%)", "test loss"]
    assert figure.axes[0].lines[0].get_ydata() == pytest.approx([100 * row["accuracy"] for row in run.history])
    with pytest.raises(SettingError, match="choose an ending of png, svg, pdf"):
        run.plot(tmp_path / "curves.gif")


# Export.


@pytest.mark.parametrize("to", ["torchscript", "safetensors"])
def test_an_exported_file_has_the_networks_outputs(
    to: str, run: fedagg.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "model.bin"
    assert call("export", run.run or "", "--to", to, "--out", path) == 0
    assert str(path) in capsys.readouterr().out.replace("\n", "")
    x = torch.rand(3, 1, 28, 28)
    if to == "torchscript":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of torch advise against the format
            network = torch.jit.load(path)
        assert torch.allclose(network(x), run.outputs(x), atol=1e-6)
    else:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["fedagg"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        assert all(torch.equal(tensors[name], value) for name, value in run.model.state_dict().items())
        digits = fedagg.data.load("mnist-mini").x_train.double()
        assert facts["shape"] == [1, 28, 28]
        assert facts["mean"] == pytest.approx([float(digits.mean())], rel=1e-5)
        assert facts["std"] == pytest.approx([float(digits.std(correction=0))], rel=1e-5)


@pytest.mark.slow
def test_onnx_runs_without_torch(run: fedagg.Result, tmp_path: Path) -> None:
    """A network with buffers, in batches of a size that it was not exported with."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    made = tiny.job(rounds=1, normalize=True)
    written = made.export("onnx", tmp_path / "model.onnx")
    assert written.difference < 1e-5
    x = tiny.dataset().x_test
    session = runtime.InferenceSession(written.path, providers=["CPUExecutionProvider"])
    assert np.allclose(session.run(None, {"x": x.numpy()})[0], made.outputs(x).numpy(), atol=1e-5)


class Wavering(nn.Module):
    """Outputs another number every time, which an exported file will not do."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.line(x) + self.calls  # type: ignore[no-any-return]


def test_a_file_with_other_outputs_is_not_kept(tmp_path: Path) -> None:
    made = tiny.job(rounds=1)
    made.model = Wavering()
    with pytest.raises(FedaggError, match="returns other numbers than the network"):
        made.export("torchscript", tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def test_exports_that_cannot_be_made(run: fedagg.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingError, match=r"to = 'onxx': did you mean 'onnx'"):
        run.export("onxx")
    with pytest.raises(SettingError, match="is a folder; name a file in it"):
        run.export("torchscript", tmp_path)
    with pytest.raises(SettingError, match="the run has no folder; say where the file is to go"):
        tiny.job(rounds=1).export("torchscript")
    tiny.job(rounds=1, out=tmp_path / "mine")
    (tmp_path / "task.py").write_text("import torch\ndef other():\n    return torch.nn.Linear(6, 3)\nnothing = 3\n")
    for words, told in (
        ((), "name the function that makes it, with --model FILE.py:FUNCTION"),
        (("--model", "task"), "give a Python file or module and a function in it"),
        (("--model", f"{tmp_path / 'task.py'}:nothing"), "there is no function nothing"),
        (("--model", f"{tmp_path / 'task.py'}:other"), "holds the weights of another model"),
        (("--model", f"{tmp_path / 'task.py'}:other", "--shape", "6,x"), "give whole numbers with commas"),
    ):
        assert call("export", tmp_path / "mine", "--to", "torchscript", *words) == 2
        said = capsys.readouterr().err
        assert told in said
        assert said.count("\n") == 1


def test_the_folder_of_a_federation_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server knows weights and settings; network and shape are said on the command line."""
    tiny.job(rounds=1, out=tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    del facts["inputs"]
    (tmp_path / "run" / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    (tmp_path / "task_of_two.py").write_text("import tiny\nmodel = tiny.network\n")
    words = ("export", tmp_path / "run", "--to", "torchscript", "--model", f"{tmp_path / 'task_of_two.py'}:model")
    assert call(*words) == 2
    assert call(*words, "--shape", "6") == 0
    assert (tmp_path / "run" / "export.pt").exists()


# Going on.


def test_a_run_continues_with_the_settings_of_its_folder(tmp_path: Path) -> None:
    whole = fedagg.run(**{**SMALL, "rounds": 3, "seed": 4, "batch_size": 16}, out=tmp_path / "whole")
    fedagg.run(**{**SMALL, "seed": 4, "batch_size": 16}, out=tmp_path / "run")
    again = fedagg.run(resume=tmp_path / "run", rounds=3)
    assert again.config == whole.config
    assert tiny.same_run(tmp_path / "whole", tmp_path / "run")
    with pytest.raises(FedaggError, match="batch_size was 16, now 32"):
        fedagg.run(resume=tmp_path / "run", batch_size=32)
    with pytest.raises(SettingError, match="is not a run folder"):
        fedagg.run(resume=tmp_path / "nothing")


def test_what_came_from_python_is_asked_for_again(tmp_path: Path) -> None:
    tiny.job(rounds=1, out=tmp_path / "run")
    with pytest.raises(SettingError, match=r"data and model came from Python; .* data=\.\.\., model=\.\.\.\)"):
        fedagg.run(resume=tmp_path / "run")
    again = fedagg.run(resume=tmp_path / "run", data=tiny.dataset(), model=tiny.network(), rounds=2)
    assert len(again.history) == 2
    assert again.config.clients == 6


# Other tasks.


def test_a_regression_is_judged_by_its_own_figures(tmp_path: Path) -> None:
    """R² by hand, and a rule that stops by it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 0.1 * torch.randn(120, generator=generator)
    data = fedagg.Dataset(x[:90], y[:90], x[90:], y[90:])
    settings: dict[str, Any] = {"algorithm": "fedavg", "clients": 3, "participation": 1.0, "rounds": 9, "lr": 0.05, "stop_at": 0.5}
    made = fedagg.run(data=data, model="linear", **settings, engine="sequential", out=tmp_path / "run")
    assert "R²" in str(made.stopped)
    again = fedagg.load(tmp_path / "run")
    assert repr(again).splitlines()[1].startswith("R² 0.")
    guess = again.predict(x[90:]).flatten()
    expected = 1 - float((y[90:] - guess).square().sum() / (y[90:] - y[90:].mean()).square().sum())
    assert again.evaluate(x[90:], y[90:])["r2"] == pytest.approx(expected, abs=1e-5)
    assert made.score == pytest.approx(expected, abs=1e-5)
    with pytest.raises(AttributeError, match="judged by its R²"):
        _ = again.accuracy


# Ending early.


def fed(rule: stopping.Rule, values: list[float | None], metric: Measure = ACCURACY) -> list[bool]:
    rule.judged(metric)
    rule.started(fedagg.Config(), 0)
    rows = [{"round": t, **({} if value is None else {metric.key: value})} for t, value in enumerate(values, start=1)]
    return [rule.round_done(row) for row in rows]


def test_rules_by_hand() -> None:
    assert fed(fedagg.StopAt(0.5), [0.4, None, math.nan, 0.5]) == [False, False, False, True]
    patient = fedagg.Patience(2)
    assert fed(patient, [0.4, 0.3, 0.41, None, 0.41, math.nan]) == [False, False, False, False, False, True]
    assert patient.reason == "no better accuracy than 0.41, of round 3, in 2 evaluations"
    # A figure of which less is better.
    error = Measure("error", "error", percent=False, higher=False)
    patient = fedagg.Patience(2)
    assert fed(patient, [0.4, 0.3, 0.41, 0.3, 0.2], error) == [False, False, False, True, False]
    assert fed(fedagg.StopAt(3.0), [4.0, math.nan, 3.0], error) == [False, False, True]


def test_a_run_ends_where_its_accuracy_is_reached(tmp_path: Path) -> None:
    whole = tiny.job(rounds=6)
    scores = [row["accuracy"] for row in whole.history]
    first = next(t for t, score in enumerate(scores, start=1) if score >= scores[2])
    made = tiny.job(rounds=6, stop_at=scores[2], out=tmp_path / "run")
    assert len(made.history) == first
    assert made.stopped == f"accuracy {scores[first - 1]:.4g} in round {first} reached {scores[2]:g}"
    assert not made.interrupted
    assert json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["stopped"] == made.stopped
    assert f"stopped: {made.stopped}" in repr(made)
    given: dict[str, Any] = {"data": tiny.dataset(), "model": tiny.network(), "resume": tmp_path / "run"}
    still = fedagg.run(**given)  # it has come to its end
    assert (len(still.history), still.stopped) == (first, made.stopped)
    assert fedagg.load(tmp_path / "run", model=tiny.network()).stopped == made.stopped
    on = fedagg.run(**given, stop_at=1.0)  # and goes on when asked for more
    assert on.history[first - 1] == made.history[-1]
    assert [{**row, "seconds": 0} for row in on.history] == [{**row, "seconds": 0} for row in whole.history[: len(on.history)]]
    assert len(on.history) > first


def test_a_run_ends_when_it_no_longer_gets_better(tmp_path: Path) -> None:
    """At a rate of nearly zero every accuracy is that of the first round."""
    settings: dict[str, Any] = {
        "algorithm": "fedavg",
        "lr": 1e-9,
        "rounds": 9,
        "eval_every": 2,
        "patience": 2,
        "engine": "sequential",
    }
    data, line = tiny.dataset(), nn.Linear(6, 3)
    made = fedagg.run(data=data, model=line, clients=6, epochs=1, **settings, out=tmp_path / "run")
    assert len(made.history) == 6  # evaluated in 2, 4 and 6
    assert made.stopped is not None
    assert "in 2 evaluations" in made.stopped
    given: dict[str, Any] = {"data": data, "model": line, "resume": tmp_path / "run"}
    assert len(fedagg.run(**given).history) == 6
    on = fedagg.run(**given, patience=3)  # the rounds before count
    assert (len(on.history), on.config.patience) == (8, 3)
    off = fedagg.run(**given, patience=0)
    assert (len(off.history), off.stopped) == (9, None)


def test_rules_as_callbacks_and_callbacks_that_stop() -> None:
    assert "reached 0.01" in str(tiny.job(rounds=4, callbacks=[fedagg.StopAt(0.01)]).stopped)

    class Enough:
        def round_done(self, row: dict[str, Any]) -> bool:
            return bool(row["round"] == 2)

    made = tiny.job(rounds=4, callbacks=[Enough()])
    assert (len(made.history), made.stopped) == (2, "Enough")
    assert tiny.job(rounds=2, callbacks=[Enough()]).stopped is None  # it was the last round anyway


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"stop_at": 90}, "give 0.9 for 90 %"), ({"stop_at": 0.0}, "give 0.9 for 90 %"), ({"patience": -1}, "greater than or equal")],
)
def test_rules_that_cannot_work(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=words):
        tiny.job(**settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_custom_rules_that_cannot_work() -> None:
    for wrong in (0, True, 1.5):
        with pytest.raises(SettingError, match="patience"):
            fedagg.Patience(wrong)  # type: ignore[arg-type]
    for odd in (math.inf, "much", True):
        with pytest.raises(SettingError, match="stop_at"):
            fedagg.StopAt(odd)  # type: ignore[arg-type]


def test_the_command_line_says_why_a_run_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert call("run", *words, "--rounds=5", "--stop-at", "0.05", "--out", tmp_path / "run", "--quiet") == 0
    assert "stopped after 1 of 5 rounds: accuracy" in capsys.readouterr().out


# Progress.


class Terminal:
    """Standard error as a terminal has it."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def fileno(self) -> int:
        raise OSError


def test_a_bar_in_a_terminal_and_none_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.job(rounds=1)
    assert capsys.readouterr().err == ""  # standard error is no terminal here
    tiny.job(rounds=1, progress=True)
    assert "1/1" in capsys.readouterr().err
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    tiny.job(rounds=1, progress=False)
    assert screen.text == ""

    class Within:
        def round_done(self, row: dict[str, Any]) -> None:
            tiny.job(rounds=3, seed=1)

    tiny.job(rounds=2, callbacks=[Within()])
    assert "2/2" in screen.text
    assert "3/3" not in screen.text  # a run within a run has no bar of its own
    assert not progress._up


# Threads.


def test_two_threads_do_not_draw_each_others_numbers() -> None:
    """Dropout draws from the one generator of a process: the second run is refused, and the first is what it is alone."""
    network = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    def train(**more: Any) -> fedagg.Result:
        return fedagg.run(data=tiny.dataset(), model=network, clients=6, rounds=3, epochs=1, algorithm="fedavg", **more)

    alone, begun, tried = train().model.state_dict(), threading.Event(), threading.Event()

    class Waiting:
        def round_done(self, row: dict[str, Any]) -> None:
            begun.set()
            assert tried.wait(30)

    found: list[dict[str, torch.Tensor]] = []
    first = threading.Thread(target=lambda: found.append(train(callbacks=[Waiting()]).model.state_dict()))
    first.start()
    assert begun.wait(30)
    with pytest.raises(SettingError, match="another run is in progress in this process"):
        train(seed=1)
    tried.set()
    first.join()
    assert all(torch.equal(value, found[0][name]) for name, value in alone.items())
