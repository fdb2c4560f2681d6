"""The report page: what is in it, and that it needs nothing from outside."""

from __future__ import annotations

import json
import os
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedagg
from fedagg import plots, runs
from fedagg.algorithms import REGISTRY
from fedagg.cli import main
from fedagg.config import Config
from fedagg.errors import FedaggError, SettingError
from fedagg.report import charts, content, page, tables
from fedagg.reproduce.results import Store
from fedagg.work import cross_entropy

SETTINGS: dict[str, Any] = {"clients": 12, "participation": 0.5, "epochs": 2, "rounds": 3, "partition": "shards"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAgg with two seeds and FedAvg with one."""
    where = tmp_path_factory.mktemp("runs")
    for algorithm, seed in (("fedagg", 0), ("fedagg", 1), ("fedavg", 0)):
        config = Config(algorithm=algorithm, seed=seed, engine="batched", **SETTINGS)
        fedagg.run(config, out=where / f"{algorithm}-{seed}")
    return where


@pytest.fixture(scope="module")
def html(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = page.write([folder], tmp_path_factory.mktemp("page") / "report.html")
    return out.read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Every tag with its attributes, and the text of each element by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.text.setdefault(self.inside[-1], []).append(data)


def cut_short(whole: Path, folder: Path, rounds: int) -> None:
    """The run as it was after some rounds."""
    folder.mkdir()
    for name in ("config.toml", "environment.json"):
        (folder / name).write_text((whole / name).read_text())
    for name in ("metrics.jsonl", "clients.jsonl"):
        lines = (whole / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:rounds]) + lines[rounds][:20])


def data_of(html: str) -> dict[str, Any]:
    start = html.index('id="data">') + len('id="data">')
    found: dict[str, Any] = json.loads(html[start : html.index("</script>", start)])
    return found


def test_means_over_seeds(folder: Path) -> None:
    gathered = content.gather([folder])
    (group,) = gathered.groups
    assert set(group.series) == {"FedAgg", "FedAvg"}
    two = [runs.load(folder / f"fedagg-{seed}") for seed in (0, 1)]
    a, b = ([row["accuracy"] for row in run.history] for run in two)
    mean, spread = group.series["FedAgg"].curve("accuracy")
    assert mean == pytest.approx([(x + y) / 2 for x, y in zip(a, b, strict=True)])
    # Of two values the sample standard deviation is their distance over the root of 2.
    assert spread == pytest.approx([abs(x - y) / 2**0.5 for x, y in zip(a, b, strict=True)])
    assert group.series["FedAvg"].curve("accuracy")[1] == [None] * 3


def test_progress_adds_up(folder: Path) -> None:
    trial = content.from_run(runs.load(folder / "fedavg-0"))
    # 6 of 12 clients with 500 samples each, 2 epochs.
    assert trial.progress("work") == [6000, 12000, 18000]
    assert trial.progress("rounds") == [1, 2, 3]
    sent = [row["bytes_up"] + row["bytes_down"] for row in trial.run.history] if trial.run else []
    assert trial.progress("bytes") == [sent[0], sent[0] + sent[1], sum(sent)]


def test_runs_that_differ_in_a_setting_are_told_apart(tmp_path: Path) -> None:
    for alpha in (0.1, 0.5):
        config = Config(theorem=True, alpha=alpha, **SETTINGS | {"rounds": 1}, engine="batched")
        fedagg.run(config, out=tmp_path / f"a{alpha}")
    (group,) = content.gather([tmp_path]).groups
    assert set(group.series) == {"FedAgg alpha 0.1", "FedAgg alpha 0.5"}


def test_an_unfinished_run_is_not_averaged_with_finished_ones(folder: Path, tmp_path: Path) -> None:
    cut_short(folder / "fedagg-1", tmp_path / "stopped", 2)
    made = content.gather([folder / "fedagg-0", tmp_path / "stopped"])
    (group,) = made.groups
    assert {name: len(one.trials) for name, one in group.series.items()} == {"FedAgg": 1, "FedAgg (2 of 3 rounds)": 1}
    whole, part = (runs.load(where).history for where in (folder / "fedagg-0", tmp_path / "stopped"))
    text = Tags(tables.results(made)).text
    assert f"{100 * whole[-1]['accuracy']:.2f}" in text["strong"]
    assert f"{100 * part[-1]['accuracy']:.2f}" in text["td"]  # not bold: it is at no end
    assert "unfinished runs" in text["p"][0]


def test_different_tasks_are_different_settings(tmp_path: Path) -> None:
    for number, more in enumerate(({}, {"shards": 10}, {"validation": 0.3}, {"normalize": True})):
        fedagg.run(Config(**SETTINGS | {"rounds": 1}, engine="batched", **more), out=tmp_path / str(number))
    made = content.gather([tmp_path])
    common = "mnist-mini, linear, shards {}, 50 % of 12 clients, 1 rounds"
    assert [group.name for group in made.groups] == [
        common.format(2),
        common.format(10),
        f"{common.format(2)}, scored on 30 % of the training data held back",
        f"{common.format(2)}, inputs standardised",
    ]
    drawn = charts.build(made)
    assert [one["name"] for one in drawn["rates"]] == [
        "fedagg shards 2 seed 0",
        "fedagg shards 10 seed 0",
        "fedagg shards 2 scored on 30 % of the training data held back seed 0",
        "fedagg shards 2 inputs standardised seed 0",
    ]
    assert len({one["name"] for one in drawn["partitions"]}) == len(drawn["partitions"]) == 3


def test_what_was_given_from_python_is_told_apart(tmp_path: Path) -> None:
    def run(name: str, scale: float, seed: int) -> None:
        x, y = scale * torch.arange(80.0).reshape(40, 2), torch.arange(40) % 2
        own = fedagg.Dataset(x, y, x, y, classes=2)
        settings = {"clients": 4, "participation": 1.0, "rounds": 1, "epochs": 1, "engine": "batched"}
        fedagg.run(data=own, model=nn.Linear(2, 2), seed=seed, out=tmp_path / name, **settings)

    for name, scale, seed in (("a0", 1.0, 0), ("a1", 1.0, 1), ("b0", 2.0, 0), ("lost", 1.0, 2)):
        run(name, scale, seed)
    (tmp_path / "a1" / "checkpoints" / "round-000002.json").write_text("{")  # a torn one is passed over
    (group,) = content.gather([tmp_path / "a0", tmp_path / "a1"]).groups
    assert group.name == "custom, custom, iid, 100 % of 4 clients, 1 rounds"
    for path in (tmp_path / "lost" / "checkpoints").iterdir():
        path.unlink()
    groups = content.gather([tmp_path]).groups
    assert [each.name for each in groups] == [f"{group.name}, as in {name}" for name in ("a0", "b0", "lost")]
    assert [len(each.series["FedAgg"].trials) for each in groups] == [2, 1, 1]


def test_a_method_registered_in_a_script_is_shown_beside_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(REGISTRY, "mine", REGISTRY["fedavg"])
    fedagg.run(algorithm="mine", engine="batched", out=tmp_path / "mine", **SETTINGS)
    monkeypatch.delitem(REGISTRY, "mine")  # what the command line sees
    (group,) = content.gather([folder, tmp_path / "mine"]).groups
    assert list(group.series) == ["FedAgg", "FedAvg", "mine"]
    mine = tmp_path / "mine"
    for status, command in ((0, ["plot", str(mine), "-o", str(tmp_path)]), (2, ["run", str(mine / "config.toml")])):
        with pytest.raises(SystemExit) as stop:
            main(command)
        assert stop.value.code == status
    assert "algorithm = 'mine'" in capsys.readouterr().err


def test_a_custom_loss_is_a_separate_setting(folder: Path, tmp_path: Path) -> None:
    config = Config(algorithm="fedavg", engine="batched", **SETTINGS)
    fedagg.run(config, loss=lambda output, target: 2 * cross_entropy(output, target), out=tmp_path / "doubled")
    first, second = content.gather([folder / "fedavg-0", tmp_path / "doubled"]).groups
    assert second.name == f"{first.name}, as in doubled"


def test_no_run_is_dropped_without_a_note(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "fedagg-0", tmp_path / "again")
    (tmp_path / "begun").mkdir()
    shutil.copy(folder / "fedavg-0" / "config.toml", tmp_path / "begun")
    made = content.gather([folder, folder / "fedagg-0", tmp_path])  # a folder that is named twice is one run
    assert len(made.trials) == 4
    assert [len(one.trials) for one in made.groups[0].series.values()] == [2, 1]
    told = [
        "Not shown, because they have no finished round: fedavg seed 0 (begun).",
        "Left out of means and curves, as repeats of runs with the same settings and seed: fedagg seed 0 (again).",
    ]
    assert made.notes == told
    assert set(told) < set(Tags(page.build(made)).text["p"])


def test_runs_are_named_by_what_differs(tmp_path: Path) -> None:
    def name_all(*configs: Config) -> list[str]:
        made = [runs.Run("", tmp_path / str(n) / "run", config, [], [], {}, {}) for n, config in enumerate(configs)]
        return runs.names(made)

    agg, avg = Config(), Config(algorithm="fedavg", lr=0.1)
    assert name_all(agg, avg) == ["fedagg seed 0", "fedavg seed 0"]
    assert name_all(agg, agg.changed(lr=0.1), avg) == ["fedagg lr 0.01 seed 0", "fedagg lr 0.1 seed 0", "fedavg seed 0"]
    apart = avg.changed(partition="dirichlet", sigma=0.3, seed=1)
    assert name_all(agg, apart) == ["fedagg iid seed 0", "fedavg dirichlet 0.3 seed 1"]
    assert name_all(agg, avg, agg) == ["fedagg seed 0 (0/run)", "fedavg seed 0", "fedagg seed 0 (2/run)"]
    assert name_all() == []


def test_a_curve_of_one_point_can_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure) or path)
    plots.score_curves({"a": [[{"round": 1, "accuracy": 0.5}]]}, tmp_path / "a.png", "", "accuracy")
    lines = [plots.Series("one", [1, 2], [0.5, float("nan")]), plots.Series("two", [1, 2], [0.5, 0.6])]
    plots.panels([[plots.Panel("", "", "", lines)]], [tmp_path / "b.png"], "")
    marks = [line.get_marker() for figure in drawn for line in figure.axes[0].lines]
    assert marks == ["o", "o", ""]


def test_a_legend_of_long_names_fits_the_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure) or path)
    lines = [plots.Series(f"fedagg dirichlet 0.3 inputs standardised lr {n} seed 0", [1], [n], index=n) for n in range(5)]
    plots.panels([[plots.Panel("", "", "", lines)]], [tmp_path / "a.png"], "")
    (figure,) = drawn
    figure.draw_without_rendering()
    assert 0 < figure.legends[0].get_window_extent().width < figure.bbox.width


def test_learning_rates_by_client_epoch_and_round(folder: Path) -> None:
    run = runs.load(folder / "fedagg-0")
    drawn = charts.rates(run)
    assert drawn["epochs"] == 2
    assert drawn["rounds"] == [1, 2, 3]
    assert drawn["clients"] == sorted({client for row in run.clients for client in row["clients"]})
    for number, row in enumerate(run.clients):
        for at, client in enumerate(drawn["clients"]):
            cells = [drawn["tables"][epoch][at][number] for epoch in range(2)]
            took_part = client in row["clients"]
            assert cells == (row["rates"][row["clients"].index(client)] if took_part else [None, None])
    first = run.clients[0]["rates"]
    assert drawn["bands"][1]["high"][0] == max(rates[1] for rates in first)
    assert drawn["bands"][1]["mean"][0] == pytest.approx(sum(rates[1] for rates in first) / len(first))


def test_the_partition_is_the_runs_own(folder: Path) -> None:
    (split,) = charts.partitions(content.gather([folder]).trials)
    by_client = list(zip(*split["table"], strict=True))
    assert len(split["table"]) == 10
    assert [sum(client) for client in by_client] == [500] * 12
    assert all(sum(1 for count in client if count) <= 4 for client in by_client)  # two shards of 250 a client
    assert "Wasserstein" in split["text"]


def test_the_partition_is_of_what_the_run_trained_on(tmp_path: Path) -> None:
    fedagg.run(**{**SETTINGS, "rounds": 1}, validation=0.5, straggler_rate=0.5, out=tmp_path / "run")
    found = content.gather([tmp_path / "run"]).trials
    (split,) = charts.partitions(found)
    assert sum(sum(label) for label in split["table"]) == 3000
    drawn = charts.rates(runs.load(tmp_path / "run"))
    first, second = drawn["tables"]
    assert [None] not in first
    assert 0 < second.count([None]) < 6  # stragglers made one epoch
    assert drawn["bands"][1]["low"][0] > 0


def test_the_page_needs_nothing_from_outside(html: str) -> None:
    for tag, attributes in Tags(html).tags:
        for name in ("src", "href", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
        assert not any(name.startswith("on") for name in attributes)
    assert "default-src 'none'" in html
    assert "plotly.js v" in html


def test_the_page_can_be_read_without_seeing_it(html: str) -> None:
    tags = Tags(html)
    figures = [a for tag, a in tags.tags if tag == "figure"]
    ids = {a["id"] for _, a in tags.tags if "id" in a}
    assert figures
    assert all(a["aria-labelledby"] in ids for a in figures)
    heads = [a for tag, a in tags.tags if tag == "th"]
    assert heads
    assert all(a.get("scope") == "col" for a in heads)
    count = [tag for tag, _ in tags.tags]
    assert count.count("caption") == count.count("table") > 0
    assert count.count("h1") == 1
    assert ("html", {"lang": "en"}) in tags.tags
    (group,) = data_of(html)["groups"]
    assert group["texts"]["accuracy"].startswith("Line chart of test accuracy (%) over rounds: FedAgg from ")


def test_curves_say_which_data_they_are_of(tmp_path: Path) -> None:
    fedagg.run(rounds=1, clients=10, validation=0.2, out=tmp_path / "held")
    names = data_of(page.write([tmp_path / "held"], tmp_path / "r.html").read_text())["groups"][0]["names"]
    assert (names["accuracy"], names["loss"]) == ("validation accuracy (%)", "validation loss")
    both = [fedagg.Config(), fedagg.Config(validation=0.2)]
    assert runs.metric_name("accuracy", both[:1]) == "test accuracy"
    assert runs.metric_name("accuracy", both) == "accuracy"


def test_the_numbers_of_the_page(html: str, folder: Path) -> None:
    (group,) = data_of(html)["groups"]
    avg = next(line for line in group["series"] if line["name"] == "FedAvg")
    history = runs.load(folder / "fedavg-0").history
    assert avg["accuracy"] == pytest.approx([100 * row["accuracy"] for row in history])
    cells = Tags(html).text["td"] + Tags(html).text["strong"]
    assert f"{100 * history[-1]['accuracy']:.2f}" in cells
    assert any("±" in cell for cell in cells)
    assert "shards" in cells
    assert "commit" in cells or "torch" in cells


def test_names_cannot_break_out_of_the_page(folder: Path, tmp_path: Path) -> None:
    nasty = tmp_path / "<script>alert(1)<"
    nasty.mkdir()
    (nasty / "run").symlink_to(folder / "fedavg-0", target_is_directory=True)
    made = page.write([nasty / "run"], tmp_path / "r.html").read_text()
    assert "<script>alert" not in made
    gathered = content.gather([folder / "fedavg-0"])
    gathered.title = "</title><script>alert(1)</script>"
    gathered.groups[0].name = "</script><b>"
    made = page.build(gathered)
    assert "<script>alert" not in made
    assert "</script><b>" not in made
    assert data_of(made)["groups"][0]["name"] == "</script><b>"


def test_a_run_that_is_still_going(folder: Path, tmp_path: Path) -> None:
    going = tmp_path / "going"
    cut_short(folder / "fedagg-0", going, 2)
    run = runs.load(going)
    assert len(run.history) == len(run.clients) == 2
    assert data_of(page.build(content.gather([going])))["rates"][0]["rounds"] == [1, 2]
    (going / "metrics.jsonl").write_text("{\n")
    with pytest.raises(FedaggError, match="line 1 is damaged"):
        runs.load(going)


GOOD = '{"round": 1, "accuracy": 0.5, "rate_mean": [0.1]}'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", GOOD.encode() + b"\n\xff\xfe{\n", "line 2 is damaged"),
        ("metrics.jsonl", b"5\n", "line 1 is damaged"),
        ("metrics.jsonl", b"[" * 100_000 + b"\n", "line 1 is damaged"),
        ("metrics.jsonl", b'{"accuracy": 0.5}\n', "line 1 is damaged"),
        ("metrics.jsonl", GOOD.replace("0.5", '"high"').encode() + b"\n", "line 1 is damaged"),
        ("metrics.jsonl", GOOD.replace("0.5", "[0.5]").encode() + b"\n", "line 1 is damaged"),
        ("metrics.jsonl", GOOD.replace("[0.1]", "0.1").encode() + b"\n", "line 1 is damaged"),
        ("clients.jsonl", b'{"round": 1, "clients": [1, 2], "rates": [[0.1]], "moved": [1, 2]}\n', "line 1 is damaged"),
        ("clients.jsonl", b'{"round": 1, "clients": [1], "rates": [0.1], "moved": [1]}\n', "line 1 is damaged"),
        ("result.json", b"[1]", "is damaged; delete it"),
        ("result.json", b'{"accuracy": "high"}', "is damaged; delete it"),
        ("environment.json", b"5", "is damaged; delete it"),
        ("environment.json", b"", "is damaged; delete it"),
        ("environment.json", None, "cannot be read"),
    ],
)
@pytest.mark.parametrize("command", ["report", "plot"])
def test_a_damaged_file_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str, content: bytes | None, words: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "fedagg-0", run)
    (run / name).unlink()
    if content is None:
        (run / name).mkdir()
    else:
        (run / name).write_bytes(content)
    with pytest.raises(SystemExit) as exit_:
        main([command, str(run), "-o", str(tmp_path / "out")])
    assert exit_.value.code == 2
    told = capsys.readouterr().err
    assert str(run / name) in told
    assert words in told
    assert told.count("\n") == 1


def test_a_loss_that_is_no_number_is_left_out() -> None:
    series = content.Series("x", "x")
    config = Config()
    columns: dict[str, content.Column] = {name: [1.0, float("nan")] for name in content.FIGURES}
    series.trials.append(content.Entry(config, 2, columns, 0.5, 0.5, float("nan"), {}))
    drawn = charts.series(series)
    assert drawn["loss"] == [1.0, None]
    assert tables.spread(series, [float("nan")]) == ("", None, False)


def test_a_report_of_a_grid(tmp_path: Path) -> None:
    from fedagg.reproduce import grid

    spec = grid.load("table-accuracy")
    store = Store(tmp_path / "results")
    for method, accuracy in (("fedavg", 0.8), ("fedagg", 0.9)):
        config = spec.config(spec.rows[0], method, 0.2, 0).changed(data_dir=str(tmp_path))
        history = [{"round": 1, "accuracy": accuracy, "loss": 1.0, "seconds": 2.0}]
        result = fedagg.Result(config, history, None, accuracy, accuracy, 1.0, 2.0)  # type: ignore[arg-type]
        store.put(result, {"device": "a fast one"})
    made = page.build(content.gather([store.folder]))
    text = Tags(made).text
    assert "Beside the paper: Accuracy with 20 % and 100 % of the clients in a round" in text["h2"]
    assert "90.00" in text["strong"]
    assert "88.23 -8.23" in text["td"]
    assert "a fast one" in text["td"]
    assert any("25 settings of the paper were not run here" in caption for caption in text["span"])
    assert data_of(made)["rates"] == []


def test_a_column_of_words_is_set_as_words() -> None:
    made = tables.html(
        "", ["method", "loss", "setting"], [[tables.text_cell("FedAgg"), ("0.5", 0.5, False), tables.text_cell("mnist")]]
    )
    assert made.count("<td class=number") == made.count("class=number><button") == 1


def test_many_settings_that_differ_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for algorithm in ("fedagg", "fedavg"):
        fedagg.run(Config(algorithm=algorithm, **SETTINGS | {"rounds": 1}, engine="batched"), out=tmp_path / algorithm)
    made = content.gather([tmp_path])
    assert "settings that differ</summary>" not in tables.configuration(made)
    monkeypatch.setattr(tables, "MOST_ROWS", 1)
    assert "<summary>2 combinations of settings that differ</summary>" in tables.configuration(made)


def test_pictures_of_runs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plot", str(folder / "fedagg-0"), str(folder / "fedavg-0"), "-o", str(tmp_path), "--format", "png,pdf"])
    assert exit_.value.code == 0
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "runs.pdf").read_bytes().startswith(b"%PDF")


def test_the_same_numbers_give_the_same_picture(tmp_path: Path) -> None:
    history = {"fedagg": [[{"round": 1, "accuracy": 0.5}, {"round": 2, "accuracy": 0.6}]]}
    for ending in plots.FORMATS:
        one = plots.score_curves(history, tmp_path / f"one.{ending}", "t", "accuracy").read_bytes()
        if ending != "svg":  # whose element names are random
            assert plots.score_curves(history, tmp_path / f"two.{ending}", "t", "accuracy").read_bytes() == one


def test_a_page_cannot_be_written_to_a_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^out = '.*': is a folder; give the page a name, .*report.html"):
        page.write([folder], tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_folder_whose_name_is_not_valid_text(folder: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(folder / "fedavg-0", tmp_path / os.fsdecode(b"run-\xff")))
    assert "<title>fedagg: run-?</title>" in page.write([odd], tmp_path / "page.html").read_text(encoding="utf-8")


def test_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingError, match="contains no runs and no results"):
        content.gather([tmp_path])
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")])
    assert exit_.value.code == 2
    assert "contains no run" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "r.html").exists()
