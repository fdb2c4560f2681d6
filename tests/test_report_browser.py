"""The report page in a real browser: it opens without an error, draws, hides, sorts, and fits the screen."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedagg
from fedagg import files
from fedagg.config import Config
from fedagg.report import write
from fedagg.report.follow import serve
from growing import Growing

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
if CHROMIUM is None:
    pytest.skip("no Chromium here: install it (Debian: apt-get install chromium)", allow_module_level=True)
api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install -e '.[dev]'")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, FedAgg with two seeds, on two splits."""
    where = tmp_path_factory.mktemp("runs")
    for split in ("shards", "iid"):
        for algorithm, seed in (("fedagg", 0), ("fedagg", 1), ("fedavg", 0), ("fedexp", 0)):
            config = Config(
                algorithm=algorithm, seed=seed, partition=split, clients=10, participation=0.5, epochs=2, rounds=4,
                engine="batched",
            )  # fmt: skip
            fedagg.run(config, out=where / f"{algorithm}-{split}-{seed}")
    return write([where], tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=300_000)
        yield started
        started.close()


class Opened:
    """The page with what the browser complained of, and what it asked the network for."""

    def __init__(self, browser: Any, report: Path | str, width: int = 1400, scheme: str = "light", **more: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
        self.context.set_default_timeout(300_000)  # a busy machine is no fault of the page's
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(report if isinstance(report, str) else report.as_uri())
        self.page.wait_for_selector("#chart-partition .main-svg")

    def traces(self, chart: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.page.evaluate(
            "id => document.getElementById(id)._fullData.map(t => ({name: t.name, type: t.type, visible: t.visible,"
            " y: t.y && Array.from(t.y), x: t.x && Array.from(t.x), legend: t.showlegend, group: t.legendgroup,"
            " cells: t.z && t.z.flat().filter(v => v !== null).length}))",
            chart,
        )
        return found


@pytest.fixture(scope="module")
def untouched(browser: Any, report: Path) -> Iterator[Opened]:
    """The page as it opens, for tests that only look at it."""
    tab = Opened(browser, report)
    yield tab
    tab.context.close()


@pytest.fixture(scope="module")
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    """Another, for tests that change it: each leaves it as it was."""
    tab = Opened(browser, report)
    yield tab
    tab.context.close()


def test_it_opens_without_errors_and_without_a_network(untouched: Opened, report: Path) -> None:
    assert untouched.complaints == []
    assert [url for url in untouched.asked if not url.startswith(("data:", "blob:"))] == [report.as_uri()]


def test_the_charts_have_their_data(untouched: Opened) -> None:
    for chart in ("accuracy", "loss", "train_loss", "rate", "drift"):
        lines = [t for t in untouched.traces(f"chart-{chart}") if t["legend"]]
        assert [t["name"] for t in lines] == ["FedAgg", "FedAvg", "FedExP"]
        assert all(t["x"] == [1, 2, 3, 4] and len(t["y"]) == 4 for t in lines)
    # 5 of 10 clients in each of 4 rounds.
    assert [t["cells"] for t in untouched.traces("chart-rate-map")] == [20]
    assert [t["cells"] for t in untouched.traces("chart-moved-map")] == [20]
    assert [t["cells"] for t in untouched.traces("chart-partition")] == [100]
    assert [t["name"] for t in untouched.traces("chart-rate-bands") if t["legend"]] == ["epoch 1", "epoch 2"]


def test_every_chart_says_what_it_shows(untouched: Opened) -> None:
    places = untouched.page.query_selector_all("figure:not([hidden]) .chart")
    assert len(places) == 11
    for place in places:
        assert place.get_attribute("role") == "img"
        assert len(place.get_attribute("aria-label")) > 40


def test_a_click_on_the_legend_hides_a_line_and_its_band(opened: Opened) -> None:
    before = [t["visible"] for t in opened.traces("chart-accuracy") if t["group"] == "FedAgg"]
    assert before == [True, True]  # two seeds: a line and a band
    toggle = opened.page.locator("#chart-accuracy .legend .traces", has_text="FedAgg").locator(".legendtoggle")
    toggle.click()
    opened.page.wait_for_function("() => document.getElementById('chart-accuracy')._fullData[0].visible === 'legendonly'")
    after = {(t["group"], t["visible"]) for t in opened.traces("chart-accuracy")}
    assert after == {("FedAgg", "legendonly"), ("FedAvg", True), ("FedExP", True)}
    toggle.click()
    opened.page.wait_for_function("() => document.getElementById('chart-accuracy')._fullData.every(t => t.visible === true)")


def test_a_table_sorts_by_number_and_by_word(opened: Opened) -> None:
    table = opened.page.locator("#results table").first

    def column(number: int) -> list[str]:
        return table.locator(f"td:nth-child({number})").all_inner_texts()

    def press(head: str) -> None:
        table.locator("th", has_text=head).get_by_role("button").click()

    others = opened.page.locator("#results table").nth(1).inner_text()
    press("accuracy")
    values = [float(text.split()[0]) for text in column(2)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 2
    assert table.locator("th", has_text="accuracy").get_attribute("aria-sort") == "descending"
    press("accuracy")
    assert [float(text.split()[0]) for text in column(2)] == values[::-1]
    press("method")
    assert column(1) == ["FedAgg", "FedAvg", "FedExP"]
    assert table.locator("th[aria-sort]").count() == 1
    assert opened.page.locator("#results table").nth(1).inner_text() == others


def test_choosing_a_setting_and_what_to_count_by(opened: Opened) -> None:
    first = opened.traces("chart-accuracy")[0]["y"]
    opened.page.select_option("#group", value="1")
    assert opened.traces("chart-accuracy")[0]["y"] != first
    opened.page.select_option("#progress", value="work")
    # 5 clients with 600 samples, 2 epochs, a round; in the first FedAgg has them train seven times more, to try rates.
    assert opened.traces("chart-accuracy")[0]["x"] == [48000, 54000, 60000, 66000]
    opened.page.select_option("#rate-epoch", index=1)
    assert "Shown: epoch 2." in opened.page.locator("#chart-rate-map").get_attribute("aria-label")
    for choice in ("#group", "#progress", "#rate-epoch"):
        opened.page.select_option(choice, index=0)
    assert opened.traces("chart-accuracy")[0]["y"] == first
    assert opened.complaints == []


def test_it_fits_every_screen(opened: Opened) -> None:
    fits = """() => {
        const box = document.querySelector('#chart-accuracy .main-svg').getBoundingClientRect();
        const wide = document.documentElement.scrollWidth;
        return wide <= innerWidth && box.left >= 0 && box.right <= innerWidth && box.width > 0.8 * Math.min(innerWidth, 480) - 40;
    }"""
    titled = """chart => {
        const edges = part => document.querySelector(chart + ' ' + part).getBoundingClientRect();
        return edges('.cbtitle').width > 0 && edges('.cbtitle').right <= edges('.main-svg').right;
    }"""
    for width in (360, 390, 800, 2400, 1400):
        opened.page.set_viewport_size({"width": width, "height": 900})
        opened.page.wait_for_function(fits)
        for chart in ("#chart-partition", "#chart-rate-map", "#chart-moved-map"):
            opened.page.wait_for_function(titled, arg=chart)  # the scale of a map says what it counts
    assert opened.complaints == []


def test_light_and_dark_are_readable(opened: Opened) -> None:
    """The page follows when the reader's system changes, charts included."""
    style, axis = "getComputedStyle(document.body)", "getComputedStyle(document.querySelector('#chart-accuracy .xtick text')).fill"
    shades = set()
    for scheme in ("dark", "light"):
        opened.page.emulate_media(color_scheme=scheme)
        opened.page.wait_for_function(f"() => {axis} === {style}.color")
        paper, ink = (opened.page.evaluate(f"{style}.{name}") for name in ("backgroundColor", "color"))
        assert contrast(paper, ink) >= 7.0
        shades.add(paper)
    assert len(shades) == 2
    assert opened.complaints == []


def contrast(one: str, two: str) -> float:
    """The contrast ratio of WCAG 2 between two colours as the browser gives them, rgb(r, g, b)."""

    def luminance(colour: str) -> float:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_rates_that_are_all_one_number_stand_on_a_scale_around_it(opened: Opened) -> None:
    names = opened.page.locator("#rate-run option").all_inner_texts()
    assert names[0].startswith("fedagg")  # rates worth looking at come first
    opened.page.select_option("#rate-run", index=next(i for i, name in enumerate(names) if name.startswith("fedavg")))
    made = opened.page.evaluate(
        "() => [document.getElementById('chart-rate-bands')._fullLayout.yaxis.range,"
        " ['zmin', 'zmax'].map(k => document.getElementById('chart-rate-map')._fullData[0][k])]"
    )
    assert made == [[0, 0.02], [0, 0.02]]
    opened.page.select_option("#rate-run", index=0)


def test_few_rounds_are_counted_whole(untouched: Opened) -> None:
    ticks = untouched.page.locator("#chart-accuracy .xtick text").all_text_contents()
    assert ticks == ["1", "2", "3", "4"]


TWELVE = (
    *("fedagg", "fedavg", "fedprox", "scaffold", "feddyn", "fedadam"),
    *("fedyogi", "fedavgm", "fednova", "fedsam", "mofedsam", "fedspeed"),
)


def test_twelve_methods_fit_a_phone_and_a_desktop(tmp_path: Path, browser: Any) -> None:
    for method in TWELVE:
        run = Growing(tmp_path / "runs" / method, rounds=2, algorithm=method)
        run.grow()
        run.grow(left_out={"7": "moved absurdly far, as nobody else did"})
    page = write([tmp_path / "runs"], tmp_path / "r.html")
    tab = Opened(browser, page, 390, has_touch=True, is_mobile=True)
    apart = """() => {
        const edges = name => document.querySelector('#chart-accuracy .' + name).getBoundingClientRect();
        const [plot, title, legend, bar, whole] = ['nsewdrag', 'xtitle', 'legend', 'modebar', 'main-svg'].map(edges);
        return title.bottom <= legend.top + 0.5 && legend.bottom <= whole.bottom + 0.5 && legend.right <= whole.right
            && bar.width > 100 && bar.bottom <= plot.top && document.documentElement.scrollWidth <= innerWidth;
    }"""
    tab.page.wait_for_function(apart)
    wider = "tables => tables.filter(table => table.scrollWidth > table.clientWidth).length"
    assert tab.page.eval_on_selector_all(".table", wider) == 0
    tab.page.set_viewport_size({"width": 1200, "height": 900})
    tab.page.wait_for_function("() => document.querySelector('#chart-accuracy .main-svg').getBoundingClientRect().width > 400")
    tab.page.wait_for_function(apart)
    assert tab.page.locator("#chart-accuracy .legend .traces").count() == 12
    assert "cloud" not in tab.page.locator("#chart-accuracy .modebar").inner_html().lower()
    assert tab.complaints == []
    tab.context.close()


def test_a_page_that_follows_runs(tmp_path: Path, browser: Any) -> None:
    going, other = (Growing(tmp_path / "runs" / name, rounds=4, algorithm=name) for name in ("fedagg", "fedavg"))
    claim = files.Claim(going.folder, "out")
    other.grow()
    going.grow(seconds=100.0)
    going.grow(seconds=100.0)
    with serve([tmp_path / "runs"]) as server:
        tab = Opened(browser, server.address, 1200)
        page, shown = tab.page, "() => document.getElementById('chart-accuracy')"
        assert page.inner_text("#status") == "1 running, 1 stopped"
        assert page.inner_text("#unfinished").startswith("fedagg seed 0: running, round 3 of 4, about ")
        # What the reader does: zoom, hide a line, choose what to count by, sort.
        page.select_option("#progress", value="work")
        page.locator("#results th button", has_text="accuracy").click()
        page.locator("#chart-accuracy .legend .traces", has_text="FedAvg").locator(".legendtoggle").click()
        page.wait_for_function(f"{shown}._fullData[1].visible === 'legendonly'")
        place = page.locator("#chart-accuracy .nsewdrag").bounding_box()
        page.mouse.move(place["x"] + 100, place["y"] + 100)
        page.mouse.down()
        page.mouse.move(place["x"] + 300, place["y"] + 200, steps=5)
        page.mouse.up()
        page.wait_for_function(f"{shown}._fullLayout.xaxis.autorange === false")
        zoomed = page.evaluate(f"{shown}._fullLayout.xaxis.range")
        # What the run does.
        going.grow(left_out={"7": "not finite"})
        page.wait_for_function(f"{shown}._fullData[0].x.length === 3")
        assert [(t["name"], t["visible"]) for t in tab.traces("chart-accuracy")] == [
            ("FedAgg (3 of 4 rounds)", True),
            ("FedAvg (1 of 4 rounds)", "legendonly"),
        ]
        assert page.evaluate(f"{shown}._fullLayout.xaxis.range") == zoomed
        assert page.input_value("#progress") == "work"
        assert page.locator("#results th[aria-sort=descending]").inner_text().startswith("accuracy")
        assert page.locator("#results td:nth-child(2)").all_inner_texts() == ["70.00", "50.00"]
        page.wait_for_selector("#chart-left-out .main-svg")
        assert "7 in 1" in page.inner_text("#left-out .words")
        assert page.locator("nav a[href='#left-out']").count() == 1
        assert [t["cells"] for t in tab.traces("chart-rate-map")] == [5]
        # And how it ends.
        for run in (going, other):
            while run.done < 4:
                run.grow()
            run.finish()
        claim.release()
        page.wait_for_function("() => document.getElementById('status').textContent === 'all 2 runs finished'")
        assert [t["name"] for t in tab.traces("chart-accuracy")] == ["FedAgg", "FedAvg"]
        assert page.evaluate(f"{shown}._fullLayout.xaxis.range") == zoomed
        assert tab.complaints == []
    page.wait_for_function("() => document.getElementById('status').className === 'trouble'")  # nobody is left to ask
    tab.context.close()


def test_the_numbers_can_be_saved(untouched: Opened, tmp_path: Path) -> None:
    saved = {}
    for form in ("csv", "json"):
        with untouched.page.expect_download() as download:
            untouched.page.click(f"#save-{form}")
        download.value.save_as(tmp_path / f"curves.{form}")
        saved[form] = (tmp_path / f"curves.{form}").read_text(encoding="utf-8")
    rows = list(csv.DictReader(saved["csv"].splitlines()))
    assert len(rows) == 2 * 3 * 4  # splits, methods, rounds
    assert {(row["method"], row["seeds"]) for row in rows} == {("FedAgg", "2"), ("FedAvg", "1"), ("FedExP", "1")}
    shown = untouched.traces("chart-accuracy")[0]
    mine = [row for row in rows if (row["setting"], row["method"]) == (rows[0]["setting"], shown["name"])]
    assert [float(row["accuracy"]) for row in mine] == shown["y"]
    assert [float(row["rounds"]) for row in mine] == shown["x"] == [1, 2, 3, 4]
    whole = json.loads(saved["json"])
    assert [(row["accuracy"], row["accuracy_std"]) for row in whole] == [
        (float(row["accuracy"]), float(row["accuracy_std"]) if row["accuracy_std"] else None) for row in rows
    ]
    assert untouched.complaints == []
