"""A page that follows runs: it is served to this machine only, and changes as the run folders grow."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedagg import files, runs
from fedagg.errors import FedaggError, SettingError, need
from fedagg.report import page
from fedagg.report.content import Content, Reader, look
from fedagg.reproduce.results import Store
from fedagg.runs import Lines, Run

HOST = "127.0.0.1"
OURS = {HOST, "localhost"}  # our names in a browser on this machine: another name would be another site's
READ = ("config.toml", "environment.json", "metrics.jsonl", "clients.jsonl", "result.json")
Stamp = tuple[tuple[int, int, int] | None, ...]


class Follower(Reader):
    """Reads runs repeatedly: only those that have changed, and only the new part of files that have grown."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths, self.lines = paths, Lines()
        self.stores = {path: Store(path) for path in paths}
        self.known: dict[Path, tuple[Stamp, Run]] = {}
        self.content: Content = look(paths, self)
        self.seen: object = None

    def run(self, folder: Path) -> Run:
        now = stamp(folder / name for name in READ)
        if folder not in self.known or self.known[folder][0] != now:
            self.known[folder] = now, runs.load(folder, self.lines)
        return self.known[folder][1]

    def store(self, path: Path) -> Store:
        return self.stores[path]

    def unfinished(self, path: Path) -> list[Path]:
        return runs.find(path / ".partial")

    def changed(self) -> bool:
        """Look again; False if nothing has changed."""
        folders = [folder for path in self.paths for folder in (*runs.find(path), *self.unfinished(path))]
        read = [*(folder / name for folder in folders for name in READ), *(f for s in self.stores.values() for f in s.files())]
        now = read, stamp(read)
        if now == self.seen:
            return False
        self.content, self.seen = look(self.paths, self), now
        return True


def stamp(paths: Iterable[Path]) -> Stamp:
    """A value that changes when one of the files changes."""

    def one(path: Path) -> tuple[int, int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    return tuple(map(one, paths))


@dataclass(frozen=True)
class Piece:
    """A part of the page's data as JSON, with its version."""

    text: str
    version: int


class Watch:
    """What the server sends: the page, and what has changed since a version of it. Handlers run in separate threads."""

    def __init__(self, paths: Sequence[Path]) -> None:
        need("a page that follows runs", "plotly", "analysis")
        self.lock, self.follower = threading.Lock(), Follower(paths)
        self.version = time.time_ns() // 1_000_000  # later than the versions of an earlier server's pages
        self.pieces: dict[str, list[Piece]] = {}
        self.trouble = ""
        self.asked = -math.inf  # when a page last asked for news
        self.look()

    def look(self) -> None:
        try:
            if self.follower.changed():
                self.update(page.pieces(self.follower.content))
            self.trouble = ""
        except FedaggError as error:  # a file is being replaced, or is damaged: keep the last content
            self.trouble = str(error)

    def update(self, made: dict[str, Any]) -> None:
        self.version += 1
        for key, value in made.items():
            values = value if isinstance(value, list) else [value]
            before, texts = self.pieces.get(key, []), [json.dumps(one, allow_nan=False) for one in values]
            same = [i < len(before) and before[i].text == text for i, text in enumerate(texts)]
            self.pieces[key] = [before[i] if same[i] else Piece(text, self.version) for i, text in enumerate(texts)]

    def status(self) -> dict[str, Any]:
        found = page.status(self.follower.content)
        return found | {"word": "trouble", "text": self.trouble} if self.trouble else found

    def html(self) -> bytes:
        with self.lock:
            self.look()
            return page.build(self.follower.content, self.version).encode(errors="replace")

    def changes(self, since: int) -> bytes:
        """The changes as JSON; null stands for a part that the page already has."""
        with self.lock:
            self.look()
            self.asked = time.monotonic()
            parts = [
                f"{json.dumps(key)}:[{','.join(one.text if one.version > since else 'null' for one in found)}]"
                for key, found in self.pieces.items()
            ]
            status = json.dumps(self.status())
            return f'{{"version":{self.version},"status":{status},"changes":{{{",".join(parts)}}}}}'.encode()

    def has_readers(self) -> bool:
        return time.monotonic() - self.asked < 10

    def ended(self) -> bool:
        """Is there something to show, and nothing running?"""
        with self.lock:
            self.look()
            return bool(self.follower.content.trials) and self.status()["word"] in ("finished", "stopped")


class Handler(BaseHTTPRequestHandler):
    """Serves two addresses for reading. The base class refuses methods other than GET."""

    server: Server
    server_version, sys_version = "fedagg", ""
    timeout = 30

    def do_GET(self) -> None:
        name = self.headers.get("Host", "").rsplit(":", 1)[0]
        asked = urlsplit(self.path)
        if name not in OURS:
            self.send_error(HTTPStatus.FORBIDDEN, "Not under this name")
        elif asked.path == "/":
            self.answer("text/html; charset=utf-8", self.server.watch.html())
        elif asked.path == "/data":
            since = parse_qs(asked.query).get("since", ["0"])[0]
            self.answer("application/json", self.server.watch.changes(int(since) if since.isdecimal() else 0))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def answer(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", f"{page.POLICY}; {page.LIVE}; frame-ancestors 'none'"),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, watch: Watch, port: int) -> None:
        self.watch = watch
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            why = files.reason(error) if isinstance(error, OSError) else "there is no such port"
            raise SettingError("port", port, f"{why}; choose another, or 0 for a free one") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, *_: object) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # from a page that was closed
            super().handle_error(*_)  # type: ignore[arg-type]


@contextmanager
def serve(paths: Sequence[Path], port: int = 0) -> Iterator[Server]:
    """Serve the page in the background."""
    with Server(Watch(paths), port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
