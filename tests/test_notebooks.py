"""The notebooks in `examples/` run from top to bottom in a real kernel, and show what they should."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat", reason="needs fedagg[dev]")
nbclient: Any = pytest.importorskip("nbclient", reason="needs fedagg[dev]")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
QUIET["RAY_raylet_start_wait_time_s"] = "180"  # on a machine that is busy


def executed(folder: Path, *names: str) -> list[list[str]]:
    """What each code cell of each notebook put out, one text a cell: words, HTML and the kinds of pictures. One kernel runs them
    one after the other, for it takes longer to start than they do, and forgets all names in between."""
    books = [nbformat.read(EXAMPLES / name, as_version=4) for name in names]
    whole = nbformat.v4.new_notebook()
    for book in books:
        whole.cells += [nbformat.v4.new_code_cell("%reset -f"), *book.cells]
    environment = {**QUIET, "FLWR_HOME": str(folder / "home"), "IPYTHONDIR": str(folder / "ipython")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        where = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(whole, timeout=600, startup_timeout=300, kernel_name="python3", resources=where).execute()
    return [["\n".join(map(words, cell.outputs)) for cell in book.cells if cell.cell_type == "code"] for book in books]


def words(output: Any) -> str:
    if output.output_type == "stream":
        return f"[{output.name}] {output.text}"
    assert output.output_type != "error"
    return "\n".join(f"[{kind}] {value if kind.startswith('text') else ''}" for kind, value in output.data.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="module")
def put_out(folder: Path) -> dict[str, list[str]]:
    names = ("first-run.ipynb", "own-data.ipynb", "own-method.ipynb")
    return dict(zip(names, executed(folder, *names), strict=True))


def test_notebooks_are_stored_without_output() -> None:
    found = sorted(EXAMPLES.glob("*.ipynb"))
    assert [path.stem for path in found] == ["federation", "first-run", "own-data", "own-method"]
    for path in found:
        book = nbformat.read(path, as_version=4)
        nbformat.validate(book)
        assert not any(cell.outputs or cell.execution_count for cell in book.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_first_run(put_out: dict[str, list[str]], folder: Path) -> None:
    ran, frame, plotted, loaded, longer, exported = put_out["first-run.ipynb"]
    bar, table = ran.split("<table", 1)
    assert "10/10" in bar  # the bar, once, as it was at the end
    assert bar.count("<pre") == 1
    assert "[stderr]" not in ran
    assert "<polyline" in table
    assert "bytes_up" in frame
    assert "[image/png]" in plotted
    assert "run folder runs/first" in loaded
    assert "'accuracy': 0." in loaded
    assert re.search(r"1\d of 20 rounds|20 of 20 rounds", longer)
    assert "difference=" in exported
    assert (folder / "digits.pt").stat().st_size > 4 * 7850


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own-data.ipynb", "own-method.ipynb"])
def test_own_data_and_own_method(name: str, put_out: dict[str, list[str]]) -> None:
    shown = put_out[name]
    assert sum("<polyline" in text for text in shown) == 1
    assert not any("[stderr]" in text for text in shown)
    if name == "own-method.ipynb":
        assert "<pre" not in shown[1]  # progress=False


@pytest.mark.skipif("FEDAGG_PROCESSES" not in os.environ, reason="starts Ray, a minute; FEDAGG_PROCESSES=all runs it")
@pytest.mark.slow
def test_federation(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs fedagg[flower]")
    pytest.importorskip("ray", reason="needs fedagg[flower]")
    ((*_, shown, scores, exported),) = executed(tmp_path, "federation.ipynb")
    assert "2 of 2" in shown
    assert "<polyline" in shown
    assert "'accuracy': 0." in scores
    assert "samples=8" in exported
