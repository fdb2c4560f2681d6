"""Write files so that nobody ever sees a partial one: to a temporary file, flushed, then moved into place."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedagg.errors import FedaggError, SettingError


def write(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content` in one step. On failure the old file stays, and a one-line error is raised."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as handle:
            handle.write(content.encode() if isinstance(content, str) else content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, path)
        flush(path.parent)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        fix = "free some space and repeat the command, with --resume if a run had begun, or choose another --out"
        raise FedaggError(f"{path}: cannot be written ({reason(error)}); {fix}") from None


def append(path: Path, line: str) -> None:
    """Add a line. If only a part of it fits, nothing is added."""
    try:
        with open(path, "ab") as handle:
            before = handle.tell()
            try:
                handle.write(line.encode() + b"\n")
                handle.flush()
            except OSError:
                with suppress(OSError):
                    os.truncate(path, before)
                raise
    except OSError as error:
        raise FedaggError(
            f"{path}: cannot be written ({reason(error)}); make room, then continue with --resume {shlex.quote(str(path.parent))}"
        ) from None


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if path.is_dir() and sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_temporary(path: Path) -> None:
    """Remove temporary files that a killed process left behind."""
    for part in [*path.glob(".*.part"), *path.glob(".probe.*")]:
        with suppress(OSError):
            part.unlink()


def folder(path: Path, setting: str = "out") -> Path:
    """Make a folder, or raise a one-line error."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink(missing_ok=True)  # another thread may have removed it
    except OSError as error:
        raise FedaggError(f"{setting} = {str(path)!r}: {reason(error)}; choose a folder you can write to") from None
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process in at a time; the others wait. The operating system releases the lock when its process dies."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise FedaggError(f"{path}: cannot be written ({reason(error)}); choose a folder you can write to") from None
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            with suppress(OSError):  # on a file system without locks, two writers go unnoticed
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class Claim:
    """A folder that one process works in at a time. The operating system releases it when the process dies."""

    def __init__(self, path: Path, setting: str) -> None:
        self.handle: int | None = None
        if sys.platform == "win32":
            return
        import fcntl

        self.handle = os.open(path, os.O_RDONLY)
        for again in (True, False):
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if again:
                    time.sleep(0.05)  # it may only have been a short look by `claimed`
                    continue
                self.release()
                raise SettingError(setting, str(path), "is in use by another process; wait for it, or stop it") from None
            except OSError:
                self.release()  # on a file system without locks, two runs in one folder go unnoticed
                return

    def release(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


def is_claimed(path: Path) -> bool | None:
    """Is a process working in this folder? None if the system cannot tell."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)


def reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
