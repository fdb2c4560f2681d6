"""`fedagg watch`, and `--watch` of other commands."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedagg.cli.process import leads
from fedagg.cli.report import WHAT
from fedagg.cli.show import err, out
from fedagg.errors import SettingError

if TYPE_CHECKING:
    from fedagg.report.follow import Server

LOOK = 0.5  # seconds between checks whether all runs have ended
NEXT = 10.0  # seconds to wait for another run in a folder of runs
SHOWN = 3.0  # seconds for an open page to fetch the end

PAGE = "follow the training in a web page, and save the page as report.html in the run's folder at the end"
Watch = Annotated[bool, typer.Option("--watch", help=PAGE)]


def watch(
    what: Annotated[list[Path], typer.Argument(help=WHAT)],
    *,
    port: Annotated[int, typer.Option(help="the page's port; 0 for any free one")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open the page in a browser")] = True,
    path: Annotated[
        Path | None, typer.Option("--out", "-o", help="end when all runs have ended, and write the page there", show_default=False)
    ] = None,
    piped: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
) -> None:
    """Follow runs in a web page while they train: the page of `fedagg report`, kept up to date.

    It is served on this machine only, until Ctrl-C.
    """
    from fedagg.report import write
    from fedagg.report.follow import serve

    missing = [folder for folder in what if not folder.is_dir()]
    if missing and not piped:
        raise SettingError("what", str(missing[0]), "is not a folder; give a run folder, or a folder for runs")
    over = threading.Event()
    if piped:
        threading.Thread(target=wait_for_end, args=(over,), daemon=True).start()
    with suppress(KeyboardInterrupt), serve(what, port) as server:
        say(f"watch at {server.address}{'' if piped else ' (Ctrl-C ends it)'}")
        if browser and graphical():
            webbrowser.open(server.address)
        one_by_one = not all((folder / "config.toml").exists() for folder in what)
        wait(server, over, None if piped or path is None else NEXT * one_by_one)
        if server.watch.has_readers():
            time.sleep(SHOWN)
    if path is not None:
        with suppress(*((SettingError,) if piped else ())):  # a run that could not begin has already reported it
            say(f"report: {write(what, path)}")


def say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def graphical() -> bool:
    """Is there a window system for a browser? In a plain terminal, a browser such as lynx would take it over."""
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def wait_for_end(over: threading.Event) -> None:
    sys.stdin.read()
    over.set()


def wait(server: Server, over: threading.Event, settle: float | None) -> None:
    """Wait until `over` is set, or until all runs have been finished for `settle` seconds."""
    running = time.monotonic()
    while not over.wait(LOOK):
        if settle is not None and server.watch.ended():
            if time.monotonic() - running >= settle:
                return
        else:
            running = time.monotonic()


@contextmanager
def watched(folder: Path, wanted: bool) -> Iterator[None]:
    """Follow `folder` during the block. A separate process does this, so that a run is the same with and without a page."""
    if not wanted or not leads():
        yield
        return
    words = [sys.executable, "-m", "fedagg", "watch", str(folder), "--out", str(folder / "report.html"), "--until-input-ends"]
    # In its own session, because otherwise Ctrl-C would end the page before the run.
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if not (address := child.stdout.readline()):
            raise typer.Exit(child.wait())  # it has reported why
        err.print(address.strip(), markup=False, highlight=False, soft_wrap=True)
        try:
            yield
        finally:
            child.stdin.close()
            if report := child.stdout.read().strip():
                err.print(report, markup=False, highlight=False, soft_wrap=True)
