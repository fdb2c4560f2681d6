"""Every example in the README and the documentation works, and tables made from code are up to date.

Python blocks of a page share a namespace and a working directory. Console blocks are run, unless a comment
`<!-- not run: why -->` stands directly above; those, and blocks that are only there to be adapted (`sh`), must at least
be commands that exist.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import typer

import tiny
from fedagg import __version__, data, meanfield, models, partition, tasks, trackers
from fedagg.algorithms import REGISTRY, Algorithm, fedagg, guard
from fedagg.cli import app, main
from fedagg.config import SETTINGS
from fedagg.measure import CLIENTS
from fedagg.options import declared

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import config_table  # noqa: E402 - scripts, not a package
import install  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?P<skip><!-- not run: [^>]+ -->\n)?^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
SHELLS = ("console", "bash", "sh")


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    skip: bool

    @property
    def commands(self) -> list[list[str]]:
        """The `fedagg` commands of a shell block, as argument lists. With prompts in it, lines without one are output; lines that
        end with a backslash continue."""
        lines = self.code.replace("\\\n", " ").splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [shlex.split(line, comments=True)[1:] for line in prompted or lines if line.startswith("fedagg ")]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["code"], text.count("\n", 0, found.start("code")) + 1, bool(found["skip"]))
        for found in BLOCK.finditer(text)
    ]


def has_work(page: Path) -> bool:
    return any(block.language in ("python", *SHELLS) for block in blocks(page))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder to work in; what a page registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    registries = (REGISTRY, data.REGISTRY, models.ARCHITECTURES, partition.REGISTRY, trackers.TRACKERS)
    before = [dict(one) for one in registries]
    yield
    for one, known in zip(registries, before, strict=True):
        one.clear()
        one.update(known)  # type: ignore[arg-type]


def runs(arguments: list[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if has_work(page)], ids=lambda page: page.name)
@pytest.mark.usefixtures("scratch")
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if "flwr" in page.read_text(encoding="utf-8"):
        pytest.importorskip("flwr", reason="the page's examples need the flower extra")
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # dataclasses look their module up
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.language == "python" and not block.skip:
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(page), "exec", dont_inherit=True), vars(module))
        elif block.language in ("console", "bash") and not block.skip:
            for arguments in block.commands:
                assert runs(arguments) == 0, f"{where}: fedagg {shlex.join(arguments)}: {capsys.readouterr().err[-500:]}"


@pytest.mark.parametrize("page", [page for page in PAGES if has_work(page)], ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    """Also those that are not run: the command, its options and its words."""
    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    for block in blocks(page):
        for arguments in block.commands if block.language in SHELLS else ():
            command: click.Command = root
            context = click.Context(root, info_name="fedagg")
            if "--plugin" in arguments:
                continue  # its options are the plugin's; the example is run above
            while isinstance(command, click.Group):
                try:
                    name, found, arguments = command.resolve_command(context, list(arguments))
                except click.ClickException as error:
                    pytest.fail(f"{page.name}, line {block.line}: {error.format_message()}")
                assert found is not None
                command, context = found, click.Context(found, parent=context, info_name=name)
            try:
                command.parse_args(context, list(arguments))
            except click.ClickException as error:
                pytest.fail(f"{page.name}, line {block.line}: {error.format_message()}")


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        for block in blocks(page):
            if block.language in SHELLS:
                named = set(re.findall(r"^(?:\$ )?make ([a-z]+)", block.code, re.MULTILINE))
                assert named <= targets, f"{page.name}, line {block.line}"


def test_every_setting_is_documented_once() -> None:
    page = config_table.PAGE.read_text(encoding="utf-8")
    assert sorted(config_table.named(page)) == sorted(SETTINGS)
    told = {(method, name) for method, name in re.findall(r"^\| `([a-z-]+)` \| `--([a-z0-9-]+)` \|", page, re.MULTILINE)}
    assert told == {(method, name.replace("_", "-")) for method, kind in REGISTRY.items() for name in declared(kind)}
    assert config_table.updated(page) == page, "run: python tools/config_table.py"


def test_settings_table_says_what_config_says() -> None:
    assert config_table.row("participation") == (
        "| `--participation` | `0.2` | > 0, ≤ 1 | share of the clients that takes part in a round (at least one client) |"
    )
    assert config_table.allowed("client_optimizer") == "`sgd`, `adam`"


def test_pips_settings_are_handed_to_uv_or_pip_is_used() -> None:
    """Lines as `pip config list` writes them. Without its folder of wheels, uv would take another build of torch."""
    mine = [":env:.find-links='/opt/a /opt/b'", "global.index-url='https://mirror/simple'", "global.timeout='60'"]
    assert install.uv_settings(mine) == {"UV_FIND_LINKS": "/opt/a,/opt/b", "UV_DEFAULT_INDEX": "https://mirror/simple"}
    assert install.uv_settings(["site.extra-index-url='file:///opt/pypi'"]) == {}
    for more in ("global.extra-index-url='https://elsewhere/simple file:///opt/pypi'", "user.no-index='true'"):
        assert install.uv_settings([*mine, more]) is None


def test_every_constant_of_fedagg_is_explained() -> None:
    page = (ROOT / "docs" / "fedagg.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `([A-Z_]+)` \| `([^`]+)` \|", page, re.MULTILINE))
    both = {**vars(fedagg), **vars(guard), **vars(meanfield)}
    there = {name: repr(value) for name, value in both.items() if name.isupper() and name != "KEPT"}
    there["FALL"] = f"{fedagg.FALL:.3f}"
    assert told == there


def test_every_key_of_the_record_is_in_the_glossary(tmp_path: Path) -> None:
    """Of every method, with what faults add, and of federations; and the glossary explains nothing that is not written."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").split("## The keys of", 1)[1]
    told = [key for row in re.findall(r"^\| (`.+?) \|", page, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)]
    assert len(told) == len(set(told))
    own = [name for name, method in REGISTRY.items() if method.figures is not Algorithm.figures]
    written = {key for method in ("fedavg", *own) for row in tiny.job(algorithm=method, rounds=1, epochs=1).history for key in row}
    for more in ({"dropout_rate": 1.0}, {"algorithm": "fedagg", "variant": "paper", "passes": 2}):
        written |= {key for row in tiny.job(rounds=1, epochs=1, **more).history for key in row}
    federation = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "fedagg" / "flower").glob("*.py"))
    written |= {*re.findall(r'\b(?:row|figures)\["(\w+)"\] = ', federation), "tested", "epsilon", "epsilon_replaced"}
    written |= {metric.key for task in tasks.TASKS.values() for metric in task.metrics} | set(CLIENTS.values())
    assert sorted(told) == sorted(written)


def test_the_font_of_the_site_has_every_character_of_its_formulas() -> None:
    """The letters of variables as browsers draw them, in italics."""
    fonts = pytest.importorskip("fontTools.ttLib", reason="comes with matplotlib")
    mathml = pytest.importorskip("mathml", reason="needs latex2mathml").mathml
    font = fonts.TTFont(ROOT / "docs" / "assets" / "stix-two-math.woff")
    assert "MATH" in font  # by which bars and roots are stretched
    needed: set[str] = set()
    for page in PAGES[1:]:
        text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for formula in re.findall(r"\$\$(.+?)\$\$|(?<![\\$\w])\$([^$\n]+?)\$(?!\w)", text, re.DOTALL):
            drawn = html.unescape(mathml("".join(formula), bool(formula[0])))
            needed |= set(re.sub(r"<[^>]+>", "", drawn)) - {"\n"}
            for letter in re.findall(r"<mi>([A-Za-z])</mi>", drawn):
                start = 0x1D434 if letter.isupper() else 0x1D44E
                italic = chr(start + ord(letter) - ord("A" if letter.isupper() else "a"))
                needed.add("ℎ" if letter == "h" else italic)
    assert len(needed) > 60
    missing = {character for character in needed if ord(character) not in font.getBestCmap()}
    assert not missing


def test_the_version_is_the_same_everywhere() -> None:
    """It stands in the package; what people cite and read about must follow."""
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1] == __version__
    assert f"## [{__version__}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
