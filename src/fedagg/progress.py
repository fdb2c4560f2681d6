"""The progress bar of a run: on standard error in a terminal, below the cell in a notebook."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedagg.measure import ACCURACY, Measure

if TYPE_CHECKING:  # slow to import, and the command line can list methods without it
    from fedagg.config import Config
    from fedagg.result import Result

err = Console(stderr=True, emoji=False)

PAGE_WIDTH = 110  # characters of the bar in a notebook
PAGE_SECONDS = 0.2  # between two updates there: each is a message to the browser


class Live:
    """A progress bar over rounds with the latest metric and loss; on standard error, so that output can be piped."""

    def __init__(self, label: str) -> None:
        self.label, self.metric = label, ACCURACY
        self.progress = Progress(
            TextColumn("[bold]{task.fields[label]:>13}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(compact=True),
            console=err,
        )

    def judged(self, metric: Measure) -> None:
        self.metric = metric

    def started(self, config: Config, done: int) -> None:
        self.task = self.progress.add_task("", total=config.rounds, completed=done, label=self.label, now="")
        self.show()

    def round_done(self, row: dict[str, Any]) -> None:
        now = ""
        if (score := row.get(self.metric.key)) is not None:
            now = f"{self.metric.label} [green]{self.metric.shown(score, 6)}[/]  loss {row['loss']:.4f}"
        if row["left_out"]:
            now += f"  [yellow]left out {row['left_out']} ({', '.join(row['causes'])})[/]"
            if row.get("unchanged"):
                now += " [red]no valid client: model unchanged[/]"
        if now:
            self.progress.update(self.task, now=now)
        self.progress.advance(self.task)

    def finished(self, result: Result) -> None:
        self.stop()

    def show(self) -> None:
        self.progress.start()

    def stop(self) -> None:
        if self.progress.live.is_started:  # otherwise stopping would print an empty line
            self.progress.stop()


class PageLive(Live):
    """The same bar in a notebook. Rich's own display needs ipywidgets there, and leaves nothing in a saved notebook."""

    def show(self) -> None:
        from IPython.display import HTML, display

        self.html: Any = HTML
        self.drawn = time.monotonic()
        self.handle: Any = display(HTML(self.drawing()), display_id=True)

    def round_done(self, row: dict[str, Any]) -> None:
        super().round_done(row)
        if time.monotonic() - self.drawn > PAGE_SECONDS:
            self.draw()

    def stop(self) -> None:
        if hasattr(self, "handle"):
            self.draw()

    def draw(self) -> None:
        self.drawn = time.monotonic()
        self.handle.update(self.html(self.drawing()))

    def drawing(self) -> str:
        console = Console(file=io.StringIO(), record=True, width=PAGE_WIDTH, force_jupyter=False, color_system="truecolor")
        console.print(self.progress.get_renderable())
        return console.export_html(inline_styles=True, code_format='<pre style="line-height: normal">{code}</pre>')


def bar(label: str) -> Live:
    """The bar for a notebook or for a terminal."""
    return PageLive(label) if err.is_jupyter else Live(label)


_up: list[Live] = []  # the bars on display


def worth_showing() -> bool:
    """Is a bar worth showing? Not if standard error is a file or a pipe, nor in a run within a run, which has a bar already."""
    return not _up and (err.is_jupyter or getattr(sys.stderr, "isatty", bool)())


@contextmanager
def show_bar(wanted: bool | None, label: str) -> Iterator[list[Live]]:
    """Show a bar during the block, or none; by default if `worth_showing`."""
    if not (worth_showing() if wanted is None else wanted):
        yield []
        return
    live = bar(label)
    _up.append(live)
    try:
        yield [live]
    finally:
        _up.remove(live)
        live.stop()
