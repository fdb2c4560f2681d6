"""The paper's tables and figures: specifications, running a grid, and what is made of the results."""

from __future__ import annotations

import csv
import importlib.util
import io
import itertools
import json
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedagg
from fedagg.cli import main
from fedagg.cli.reproduce import choose_specs
from fedagg.config import Config
from fedagg.errors import FedaggError, SettingError
from fedagg.reproduce import figures, formats, grid, paper, results, running, table, tuned
from fedagg.reproduce.grid import Cell, Spec
from fedagg.reproduce.results import Store
from fedagg.reproduce.running import Stop
from fedagg.result import Result

ROOT = Path(__file__).resolve().parent.parent

MINI = """
title = "Small"
kind = "{kind}"
paper = "accuracy"
methods = ["fedavg", "fedbabu", "fedagg"]
participation = [0.2]

[settings]
dataset = "mnist-mini"
engine = "batched"
clients = 20
epochs = 1
rounds = 3

[[leave_out]]
method = "fedbabu"
model = "linear"

[[rows]]
name = "mnist-linear-iid"
label = "MNIST + linear"
distribution = "IID"
partition = "iid"

[[rows]]
name = "mnist-linear-shards"
label = "MNIST + linear"
distribution = "Non-IID"
partition = "shards"
"""


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    path = tmp_path / "mini.toml"
    path.write_text(MINI.format(kind="table"))
    return path


def small(mini: Path, **changes: Any) -> Spec:
    return replace(grid.load(str(mini)), seeds=1, **changes)


def run_all(spec: Spec, store: Store, stop: Stop | None = None, jobs: int = 1) -> list[running.CellResult]:
    todo = running.unfinished(list(grid.cells(spec)), store)
    (store.folder / ".partial").mkdir(parents=True, exist_ok=True)
    return list(running.run(todo, store, stop=stop or Stop(), jobs=jobs))


def put(store: Store, spec: Spec, row: int, method: str, *accuracies: float) -> None:
    """Results as if measured, one a seed."""
    for seed, accuracy in enumerate(accuracies):
        config = spec.config(spec.rows[row], method, spec.participation[0], seed)
        history = [{"round": 1, "accuracy": accuracy / 2, "loss": 2.0}, {"round": 2, "accuracy": accuracy, "loss": 1.0}]
        result = Result(config, history, nn.Identity(), accuracy, accuracy, 1.0, 3.0)
        store.put(result, {"fedagg": "0"})


# --- specifications and the paper's numbers


def test_the_papers_numbers_by_hand() -> None:
    assert paper.accuracy("accuracy", "mnist-linear-iid", 0.2, "fedavg") == 88.23
    assert paper.accuracy("accuracy", "mnist-cnn-shards", 1.0, "fedgh") == 94.67
    assert paper.accuracy("accuracy", "cifar10-cnn-dir10", 1.0, "fedagg") == 68.46
    assert paper.accuracy("accuracy", "emnist-lenet5-dir06", 0.2, "feddyn") == 91.61
    assert paper.accuracy("accuracy", "cifar100-vgg11-dir10", 0.2, "fedprox") == 45.53
    assert paper.accuracy("adaptive", "cifar10-cnn-dir06", 0.2, "fedadagrad") == 62.22
    assert paper.accuracy("architectures", "googlenet", 0.2, "fedagg") == 86.06
    assert paper.accuracy("accuracy", "mnist-linear-iid", 0.2, "fedbabu") is None
    assert paper.accuracy("accuracy", "mnist-linear-iid", 0.2, "scaffold") is None
    # Both forms of FedAgg stand beside the paper's one.
    assert paper.accuracy("accuracy", "mnist-linear-iid", 0.2, "fedagg-paper") == 90.35


def test_the_papers_tables_agree_where_they_overlap() -> None:
    numbers = paper.numbers()
    assert len(numbers["accuracy"]) == len(numbers["adaptive"]) == 13
    assert len(numbers["architectures"]) == 6
    for row, at in numbers["adaptive"].items():
        for method in ("fedavg", "fedadam", "fedagg"):
            assert at["0.2"][method] == numbers["accuracy"][row]["0.2"][method]
    counts = [len(share) for at in numbers["accuracy"].values() for share in at.values()]
    assert sum(counts) == 13 * 2 * 7 - 4  # FedBABU has no number on the linear model


@pytest.mark.parametrize("name", grid.names())
def test_every_specification_is_the_papers_setting(name: str) -> None:
    expected = {  # dataset: learning rate, batch size, rounds
        "mnist": (0.01, 32, 30),
        "emnist-letters": (0.1, 64, 50),
        "cifar10": (0.1, 32, 100),
        "cifar100": (0.01, 64, 200),
    }
    spec = grid.load(name)
    cells = list(grid.cells(replace(spec, seeds=1)))
    assert cells or spec.kind == "partition"
    for cell in cells:
        c = cell.config
        rate = 0.001 if c.client_optimizer == "adam" else expected[c.dataset][0]
        assert (c.lr, c.batch_size, c.rounds) == (rate, *expected[c.dataset][1:])
        assert (c.clients, c.epochs) == (100, 3)
        if cell.row.endswith("shards"):
            assert (c.partition, c.shards) == ("shards", 2)
    if spec.paper:
        assert {row.name for row in spec.rows} == set(paper.numbers()[spec.paper])


def test_the_accuracy_table_is_seven_methods_on_thirteen_rows_twice() -> None:
    cells = list(grid.cells(replace(grid.load("table-accuracy"), seeds=1)))
    assert len(cells) == 7 * 13 * 2 - 4
    assert not any(c.method == "fedbabu" and c.config.model == "linear" for c in cells)


def test_seeds_are_outermost_so_that_a_cut_grid_is_whole(mini: Path) -> None:
    seeds = [cell.config.seed for cell in grid.cells(replace(grid.load(str(mini)), seeds=3))]
    assert seeds == [0] * 4 + [1] * 4 + [2] * 4


def test_narrowing() -> None:
    spec = grid.load("table-accuracy")
    part = grid.narrow(spec, rows=["mnist-linear", "cifar10-cnn-i*"], methods=["fedexp"], participation=[1.0], rounds_scale=0.1)
    assert [row.name for row in part.rows] == ["mnist-linear-iid", "mnist-linear-shards", "cifar10-cnn-iid"]
    cells = list(grid.cells(part))
    assert {(c.method, c.config.participation) for c in cells} == {("fedexp", 1.0)}
    assert {c.config.rounds for c in cells} == {3, 10}
    assert set(grid.narrow(spec, methods=["all"]).methods) == set(formats.NAMES)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": ["mnist-lineer"]}, "rows = 'mnist-lineer'"),
        ({"methods": ["fedavgg"]}, "did you mean 'fedavg'"),
        ({"rounds_scale": 0.0}, "rounds-scale = 0.0"),
    ],
)
def test_narrowing_says_what_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        grid.narrow(grid.load("table-accuracy"), **given)


def test_a_file_that_is_not_a_specification_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ("title = ", "is not TOML"),
        ("title = 'x'\nkind = 'table'", "rows"),
        ("kind = 'pie'", "kind"),
    ):
        path = tmp_path / "bad.toml"
        path.write_text(text)
        with pytest.raises(FedaggError, match=message):
            grid.load(str(path))
    with pytest.raises(FedaggError, match="table-accuracy"):
        grid.load("table-acuracy")


def test_rows_of_all_are_taken_where_they_are() -> None:
    found = {spec.name: rows for spec, rows in choose_specs("all", ["cifar10-cnn", "vgg11"])}
    assert found["table-accuracy"] == ["cifar10-cnn"]
    assert found["table-architectures"] == ["vgg11"]
    assert "fig-alpha" not in found  # MNIST only
    assert len(choose_specs("all", None)) == len(grid.names()) == 8
    with pytest.raises(SettingError, match="rows = 'vgg12'"):
        choose_specs("all", ["vgg12"])


# --- results


def test_a_cell_is_named_by_what_it_depends_on() -> None:
    config = Config(dataset="mnist", seed=1)
    same = config.changed(device="cpu", engine="sequential", data_dir="/d", threads=1, chunk=4, eval_every=5)
    assert results.key(config) == results.key(same)
    others = [
        config.changed(**change)
        for change in ({"seed": 2}, {"alpha": 0.2}, {"rounds": 29}, {"variant": "paper"}, {"partition": "shards"})
    ]
    assert len({results.key(c) for c in [config, *others]}) == 6


def test_a_result_of_other_settings_is_not_used(tmp_path: Path, mini: Path) -> None:
    spec, store = small(mini), Store(tmp_path / "results")
    put(store, spec, 0, "fedavg", 0.9)
    config = spec.config(spec.rows[0], "fedavg", 0.2, 0)
    found = store.get(config)
    assert found is not None
    assert found.accuracy == 0.9
    path = store.path(config)
    changed = json.loads(path.read_text())
    changed["config"]["lr"] = 0.5
    path.write_text(json.dumps(changed))
    assert store.get(config) is None
    path.write_text(json.dumps({"cell": results.key(config), "accuracy": 1.0}))
    with pytest.raises(FedaggError, match="is not a result of fedagg"):
        store.get(config)
    path.write_text(json.dumps(changed) + "\n{\n")
    with pytest.raises(FedaggError, match="line 2 is not a result of fedagg"):
        store.get(config)


def test_a_file_holds_a_line_for_each_cell_in_order(tmp_path: Path, mini: Path) -> None:
    spec, store = small(mini), Store(tmp_path)
    put(store, spec, 1, "fedavg", 0.8, 0.7)
    put(store, spec, 0, "fedavg", 0.9)
    lines = (tmp_path / "mnist-mini_linear.jsonl").read_text().splitlines()
    assert [json.loads(line)["accuracy"] for line in lines] == [0.9, 0.8, 0.7]
    put(store, spec, 1, "fedavg", 0.6)  # measured again
    assert (tmp_path / "mnist-mini_linear.jsonl").read_text().splitlines()[::2] == lines[::2]
    # Two files end to end: the later line counts, and the next result puts them in order.
    (tmp_path / "mnist-mini_linear.jsonl").write_text("\n".join([*lines, lines[0].replace("0.9", "0.95")]) + "\n")
    found = store.get(spec.config(spec.rows[0], "fedavg", 0.2, 0))
    assert found is not None
    assert found.accuracy == 0.95
    put(store, spec, 0, "fedagg", 0.5)
    assert len((tmp_path / "mnist-mini_linear.jsonl").read_text().splitlines()) == 4


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path, mini: Path) -> None:
    """Threads with a store each stand for processes: a lock is held by an open file, not by a process."""
    spec, each = small(mini), 20

    def write(row: int) -> None:
        put(Store(tmp_path), spec, row, "fedavg", *(seed / 100 for seed in range(each)))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (0, 1)))
    store = Store(tmp_path)
    for row in spec.rows:
        found = [store.get(spec.config(row, "fedavg", 0.2, seed)) for seed in range(each)]
        assert [one.accuracy if one else None for one in found] == [seed / 100 for seed in range(each)]


def test_results_of_the_first_version_are_taken_over(tmp_path: Path, mini: Path) -> None:
    spec, new, old = small(mini), Store(tmp_path / "new"), tmp_path / "old"
    put(new, spec, 0, "fedavg", 0.9, 0.8)
    (old / "cells").mkdir(parents=True)
    for line in (new.folder / "mnist-mini_linear.jsonl").read_text().splitlines():
        cell = json.loads(line)
        (old / "cells" / f"{cell.pop('cell')}.json").write_text(json.dumps(cell, indent=1))
    assert [cell.accuracy for cell in Store(old).all()] == [0.9, 0.8]
    assert (old / "mnist-mini_linear.jsonl").read_bytes() == (new.folder / "mnist-mini_linear.jsonl").read_bytes()
    assert list((old / "cells").iterdir()) == []


def test_every_result_is_asked_for_by_some_grid() -> None:
    def kind(config: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(config[name] for name in ("dataset", "model", "algorithm", "partition", "participation"))

    lines = [line for path in (ROOT / "results").glob("*.jsonl") for line in path.read_text().splitlines()]
    assert lines
    stored = {cell["cell"]: cell["config"] for cell in map(json.loads, lines)}
    methods = sorted({"fedagg-paper" if c.get("variant") == "paper" else c["algorithm"] for c in stored.values()})
    asked: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for path in sorted((ROOT / "src/fedagg/experiments").rglob("*.toml")):
        spec = grid.load(str(path))
        if spec.kind != "partition":
            if spec.tuning is not None:
                # Settings may be chosen with one seed, and with short runs first.
                once = [grid.narrow(spec, seeds=1, tuning_seeds=spec.tuning.seeds[:1], halving=short) for short in (False, True)]
                cells = itertools.chain.from_iterable(tuned.finals(each, tuned.trial_store(ROOT / "results")) for each in once)
            else:
                cells = grid.cells(grid.narrow(spec, methods=methods, participation=[0.2, 1.0], seeds=1))
            for cell in cells:
                wanted = results.settings(cell.config)
                asked.setdefault(kind(wanted), []).append(wanted)

    def fits(config: dict[str, Any], wanted: dict[str, Any]) -> bool:
        """As a store compares them, whatever the seed."""
        return all(
            wanted[name] == value for name, value in config.items() if name in wanted.keys() - {"seed"} and value is not None
        )

    assert [
        name for name, config in stored.items() if not any(fits(config, wanted) for wanted in asked.get(kind(config), []))
    ] == []


def test_constant_columns_are_kept_once() -> None:
    assert results.compact([3, 3, 3]) == 3
    assert results.compact([3, 4]) == [3, 4]
    assert results.compact([]) == []
    assert results.number(float("nan")) is None
    assert results.number(0.123456789) == 0.12346


# --- running


def test_a_grid_runs_once(tmp_path: Path, mini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, store = small(mini), Store(tmp_path / "results")
    seen = run_all(spec, store)
    assert [o.status for o in seen] == ["done"] * 4
    config = spec.config(spec.rows[1], "fedagg", 0.2, 0)
    found = store.get(config)
    direct = fedagg.run(config)
    assert found is not None
    assert found.accuracy == direct.accuracy == found.column("accuracy")[-1]
    assert found.rounds == 3
    assert found.environment["torch"]
    assert [path.name for path in (store.folder / ".partial").iterdir()] == ["lock"]
    monkeypatch.setattr(running, "train", lambda *_: pytest.fail("nothing was left to run"))
    assert run_all(spec, store) == []


def test_one_configuration_is_run_once_for_all_tables(tmp_path: Path) -> None:
    cells = [
        cell
        for name in ("table-accuracy", "table-adaptive", "fig-bars", "fig-curves")
        for cell in grid.cells(grid.narrow(grid.load(name), participation=[0.2], seeds=1))
    ]
    todo = running.unfinished(cells, Store(tmp_path))
    assert len(cells) > len(todo) == 13 * 7 - 2 + 13 * 2  # the accuracy table's, and FedAdagrad and FedYogi


def test_a_failed_cell_does_not_stop_the_rest(tmp_path: Path, mini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = running.train

    def broken(config: Config, *rest: Any) -> Result:
        if config.algorithm == "fedavg" and config.partition == "iid":
            raise RuntimeError("no luck")
        return train(config, *rest)

    monkeypatch.setattr(running, "train", broken)
    spec, store = small(mini), Store(tmp_path / "results")
    seen = run_all(spec, store)
    assert [o.status for o in seen] == ["failed", "done", "done", "done"]
    assert "RuntimeError: no luck" in seen[0].message
    log = next((store.folder / ".partial").glob("*.error.txt"))
    assert "Traceback" in log.read_text()
    monkeypatch.setattr(running, "train", train)
    assert [o.status for o in run_all(spec, store)] == ["done"]


class After(Stop):
    """Stops after some rounds, as a time limit or Ctrl-C would."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.left = rounds

    def round_done(self, row: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            self.flag.set()
        super().round_done(row)


def test_a_stopped_grid_continues_where_it_was(tmp_path: Path, mini: Path) -> None:
    spec, store, whole = small(mini), Store(tmp_path / "results"), Store(tmp_path / "whole")
    seen = run_all(spec, store, After(5))  # one cell of 3 rounds, and 2 rounds of the next
    assert [o.status for o in seen] == ["done", "stopped"]
    kept = store.partial(seen[1].cell.config)
    assert len((kept / "metrics.jsonl").read_text().splitlines()) == 2
    assert [o.status for o in run_all(spec, store)] == ["done"] * 3
    assert not kept.exists()
    run_all(spec, whole)
    for cell in grid.cells(spec):
        one, two = store.get(cell.config), whole.get(cell.config)
        assert one is not None
        assert two is not None
        assert one.column("accuracy") == two.column("accuracy")
        assert one.column("loss") == two.column("loss")


def test_no_cell_is_begun_after_the_deadline(tmp_path: Path, mini: Path) -> None:
    assert run_all(small(mini), Store(tmp_path / "results"), Stop(deadline=0.0)) == []


def test_a_partial_run_of_other_settings_is_begun_again(tmp_path: Path, mini: Path) -> None:
    spec, store = small(mini), Store(tmp_path / "results")
    cell = next(grid.cells(spec))
    fedagg.run(cell.config.changed(lr=0.5, rounds=1), out=store.partial(cell.config))
    assert running.run_cell(cell, store, Stop()).status == "done"
    assert results.settings(cell.config)["lr"] == 0.01


class Frail:
    """A pool of processes that breaks while one cell runs, and then again when nothing does."""

    asked = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, work: object, cell: grid.Cell) -> Future[running.CellResult]:
        Frail.asked += 1
        if Frail.asked in (2, 3):
            raise BrokenProcessPool
        future: Future[running.CellResult] = Future()
        if Frail.asked == 1:
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(running.CellResult(cell, "done"))
        return future

    def shutdown(self) -> None: ...


def test_a_pool_that_breaks_between_two_cells_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "ProcessPoolExecutor", Frail)
    todo = list(grid.cells(grid.narrow(grid.load("quick"), seeds=2)))[:4]
    seen = list(running.at_once(todo, Store(tmp_path), running.Stop(), jobs=2))
    assert {outcome.cell: outcome.status for outcome in seen} == dict(zip(todo, ["failed", "done", "done", "done"], strict=True))


def test_several_at_once_give_the_same(tmp_path: Path, mini: Path) -> None:
    spec = small(mini)
    one, two = Store(tmp_path / "one"), Store(tmp_path / "two")
    assert [o.status for o in run_all(spec, one)] == ["done"] * 4
    seen = run_all(spec, two, jobs=2)
    assert [o.status for o in seen] == ["done"] * 4
    assert {o.cell for o in seen} == set(grid.cells(spec))
    for cell in grid.cells(spec):
        a, b = one.get(cell.config), two.get(cell.config)
        assert a is not None
        assert b is not None
        assert (a.column("accuracy"), a.config) == (b.column("accuracy"), b.config)


def test_missing_data_is_marked_and_is_no_failure(tmp_path: Path) -> None:
    spec = grid.narrow(
        grid.load("table-accuracy"),
        rows=["emnist-lenet5-iid"],
        participation=[0.2],
        seeds=1,
        overrides={"data_dir": str(tmp_path / "none")},
    )
    store = Store(tmp_path / "results")
    seen = list(running.run(list(grid.cells(spec)), store, stop=Stop(), fetch=False))
    assert {o.status for o in seen} == {"no data"}
    assert "fedagg data fetch emnist-letters" in seen[0].message
    built = table.build(spec, store)
    assert {entry.state for entry in built.lines[0].entries.values()} == {"not run"}
    assert "| not run<br><sub>94.11</sub> |" in formats.markdown(built)


def test_time_left_goes_by_cells_of_the_same_kind(mini: Path) -> None:
    spec = small(mini)
    cells = list(grid.cells(spec))
    assert running.time_left(cells, [], 1) is None
    big = Cell(cells[0].row, "fedavg", cells[0].config.changed(rounds=6))
    seen = [running.CellResult(cells[0], "done", seconds=10.0), running.CellResult(cells[1], "failed", seconds=99.0)]
    assert running.time_left([big], seen, 1) == pytest.approx(20.0)
    assert running.time_left([big, big], seen, 2) == pytest.approx(20.0)


# --- tables


@pytest.fixture
def filled(tmp_path: Path, mini: Path) -> tuple[Spec, Store]:
    """FedAvg 88, 90 and FedAgg 91, 92, 93 on the first row; FedAvg better than FedAgg on the second."""
    spec, store = replace(grid.load(str(mini)), seeds=3), Store(tmp_path / "results")
    put(store, spec, 0, "fedavg", 0.88, 0.90)
    put(store, spec, 0, "fedagg", 0.91, 0.92, 0.93)
    put(store, spec, 0, "fedadam", 0.89)
    put(store, spec, 1, "fedavg", 0.80)
    put(store, spec, 1, "fedagg", 0.70)
    return spec, store


def test_a_table_by_hand(filled: tuple[Spec, Store]) -> None:
    built = table.build(*filled, also=grid.every_method())
    assert built.methods == ("fedavg", "fedbabu", "fedadam", "fedagg")
    first, second = built.lines
    avg, agg = first.entries["fedavg"], first.entries["fedagg"]
    assert avg.mean == pytest.approx(89.0)
    assert avg.std == pytest.approx(2**0.5)
    assert avg.difference == pytest.approx(89.0 - 88.23)
    assert agg.std == pytest.approx(1.0)
    assert first.entries["fedadam"].std is None
    assert first.entries["fedbabu"].state == "does not apply"
    assert second.entries["fedadam"].state == "not run"
    assert (first.best, second.best) == ("fedagg", "fedavg")
    # The paper: FedAvg 88.23 < FedAdam 89.85 < FedAgg 90.35. Ours: FedAvg 89 = FedAdam 89 < FedAgg 92.
    assert first.order == (2, 3)
    assert second.order == (0, 1)
    notes = " ".join(built.notes())
    assert "holds in 2 of 4 pairs" in notes
    assert "over 1 to 3 seeds" in notes


def test_a_partly_measured_row_does_not_count_as_won(filled: tuple[Spec, Store]) -> None:
    spec, store = filled
    built = table.build(spec, store, also=grid.every_method())
    assert [line.whole for line in built.lines] == [True, False]  # FedAdam was not measured on the second row
    assert "Of these methods FedAgg is best in 1 of 1 settings here, in 1 in the paper." in built.notes()


def test_two_forms_of_fedagg_do_not_win_for_each_other(filled: tuple[Spec, Store]) -> None:
    spec, store = filled
    put(store, spec, 0, "fedagg-paper", 0.99)
    built = table.build(spec, store, also=grid.every_method())
    assert built.lines[0].best == "fedagg-paper"
    assert "Of these methods FedAgg is best in 0 of 1 settings here, in 1 in the paper." in built.notes()


def test_formats(filled: tuple[Spec, Store]) -> None:
    built = table.build(*filled)
    marked = formats.markdown(built).splitlines()
    assert marked[0] == "| setting | split | clients | FedAvg | FedBABU | FedAgg | paper's order |"
    assert marked[2] == (
        "| MNIST + linear | IID | 20 % | 89.00 ±1.41<br><sub>88.23 +0.77</sub> | - | "
        "**92.00 ±1.00**<br><sub>90.35 +1.65</sub> | holds |"
    )
    set_in_tex = formats.latex(built)
    assert r"\toprule" in set_in_tex
    assert r"20 \% & 89.00 $\pm$1.41 & - & \textbf{92.00 $\pm$1.00} & holds \\" in set_in_tex
    rows = list(csv.DictReader(io.StringIO(formats.as_csv(built))))
    assert len(rows) == 6
    assert rows[2] | {"mean": "92", "std": "1", "paper": "90.35", "difference": "1.65", "best": "1"} == rows[2]
    assert (rows[1]["state"], rows[1]["mean"]) == ("does not apply", "")
    text = formats.render(built, "text")
    assert "92.00 ±1.00" in text
    assert "80.00" in text


def test_a_narrow_terminal_gets_every_method_in_blocks(filled: tuple[Spec, Store]) -> None:
    from rich.console import Console

    console = Console(width=70, file=io.StringIO())
    console.print(formats.text(table.build(*filled), 70))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in said for name in ("FedAvg", "FedBABU", "FedAgg", "92.00 ±1.00"))
    assert "…" not in said


def test_nothing_measured_says_so(tmp_path: Path, mini: Path) -> None:
    assert table.build(small(mini), Store(tmp_path)).notes() == ["Nothing of this was run yet."]


# --- figures


SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("kind", ["curves", "bars"])
def test_figures_are_drawn(kind: str, filled: tuple[Spec, Store], tmp_path: Path) -> None:
    spec, store = filled
    drawn = figures.draw(replace(spec, kind=kind), store, tmp_path / "f", ("png", "svg", "pdf"))
    assert [path.name for path in drawn] == [f"mini_mnist-linear.{ending}" for ending in ("png", "svg", "pdf")]
    for path in drawn:
        assert path.read_bytes().startswith(SIGNATURES[path.suffix])


def test_a_figure_without_results_is_not_drawn(tmp_path: Path, mini: Path) -> None:
    for kind in ("curves", "bars"):
        assert figures.draw(small(mini, kind=kind), Store(tmp_path / "none"), tmp_path / "f", ("png",)) == []


def test_the_lines_of_a_figure_are_means_over_seeds(filled: tuple[Spec, Store]) -> None:
    spec, store = filled
    found = {label: cells for _, label, cells in figures.measured(spec, store, spec.rows[0], 0.2)}
    line = figures.line("FedAgg", "accuracy", found["FedAgg"], 0, 100.0)
    assert line.x == [1.0, 2.0]
    assert line.y == pytest.approx([46.0, 92.0])
    assert line.spread == pytest.approx([0.5, 1.0])
    assert figures.line("FedAvg", "loss", found["FedAvg"], 0).spread == [0.0, 0.0]


def test_the_partition_figure(tmp_path: Path, mini: Path) -> None:
    drawn = figures.draw(small(mini, kind="partition"), Store(tmp_path), tmp_path / "f", ("png",))
    assert [path.name for path in drawn] == ["mini.png"]


# --- command line and documentation


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main([*arguments])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def test_the_command_runs_shows_and_plots(tmp_path: Path, mini: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--results", str(tmp_path / "results"), "--seeds", "1")
    status, said, _ = call(capsys, "reproduce", str(mini), *where, "--rows", "mnist-linear-iid", "--format", "csv")
    assert status == 0
    assert [row["state"] for row in csv.DictReader(io.StringIO(said))] == ["measured", "does not apply", "measured"]
    again = call(capsys, "reproduce", str(mini), *where, "--no-run", "--format", "csv")
    assert said.splitlines()[1:] == again[1].splitlines()[1:4]  # the first row; the second was not run
    figure = mini.with_name("curves.toml")
    figure.write_text(MINI.format(kind="curves"))
    status, said, _ = call(capsys, "plot", str(figure), *where, "-o", str(tmp_path / "f"), "--format", "svg")
    assert (status, said.split()) == (0, [str(tmp_path / "f" / "curves_mnist-linear.svg")])


def test_the_command_stops_at_its_time_limit(tmp_path: Path, mini: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--results", str(tmp_path / "results"), "--seeds", "1", "--time-limit", "0")
    status, said, heard = call(capsys, "reproduce", str(mini), *where, "--format", "markdown")
    assert status == 0
    assert "0 of 4 cells done" in " ".join(heard.split())
    assert "not run" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "table-acuracy"], "did you mean"),
        (["reproduce", "table-accuracy", "--show", "--participation", "two"], "participation = 'two'"),
        (["reproduce", "table-accuracy", "--show", "--participation", "1.5"], "participation = '1.5'"),
        (["reproduce", "table-accuracy", "--show", "--format", "html"], "format = 'html'"),
        (["plot", "table-accuracy"], "is a table"),
        (["plot", "fig-bars", "--format", "gif"], "format = 'gif'"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, heard = call(capsys, *arguments)
    assert status == 2
    assert message in " ".join(heard.split())


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "tools" / "readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_in_the_documentation_are_those_of_the_results() -> None:
    assert tool().main(check=True) == 0


def test_tables_between_marks_are_replaced(filled: tuple[Spec, Store], tmp_path: Path, mini: Path) -> None:
    store = filled[1]
    text = f"before\n<!-- results: {mini} --algorithms fedagg -->\nstale\n<!-- /results -->\nafter\n"
    made = tool().updated(text, store.folder)
    assert "stale" not in made
    assert "FedAgg is best" not in made  # of one method alone that would say nothing
    assert "**92.00 ±1.00**" in made
    assert made.startswith(f"before\n<!-- results: {mini}")
    assert made.endswith("<!-- /results -->\nafter\n")
    assert tool().updated(made, store.folder) == made


def test_a_table_shows_every_variant(tmp_path: Path, mini: Path) -> None:
    variants = ({"name": "slow", "lr": 0.01}, {"name": "fast", "lr": 0.1})
    spec, store = small(mini, variants=variants), Store(tmp_path / "results")
    put(store, spec, 0, "fedavg", 0.5)
    put(store, replace(spec, variants=variants[1:]), 0, "fedavg", 0.9)
    built = table.build(spec, store)
    assert [(line.split, line.entries["fedavg"].ours) for line in built.lines[:2]] == [
        ("IID, slow", (50.0,)),
        ("IID, fast", (90.0,)),
    ]
    assert [line.entries["fedavg"].theirs for line in built.lines[:2]] == [88.23, None]
    assert "| MNIST + linear | IID, fast | 20 % | **90.00** |" in formats.markdown(built)
