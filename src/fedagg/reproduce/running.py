"""Run a grid, one cell after another or several at once; stop cleanly, and continue later."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import torch

import fedagg
from fedagg import data, files, plugins
from fedagg.callbacks import Callback
from fedagg.config import Config
from fedagg.data import Dataset
from fedagg.errors import DataError, FedaggError, SettingError
from fedagg.reproduce.grid import Cell
from fedagg.reproduce.results import Store, key
from fedagg.result import Result

GPU_JOBS = 4
DIED = "its process died, perhaps because memory ran out; fewer --jobs may help"


class Flag(Protocol):
    def is_set(self) -> bool: ...

    def set(self) -> None: ...


class Stop:
    """Says when to stop: at a deadline, or when a user asks. As a callback it ends a run after the current round."""

    def __init__(self, deadline: float | None = None, flag: Flag | None = None) -> None:
        self.deadline, self.flag = deadline, flag or threading.Event()

    def now(self) -> bool:
        return self.flag.is_set() or (self.deadline is not None and time.time() >= self.deadline)

    def started(self, config: Config, done: int) -> None: ...

    def round_done(self, row: dict[str, Any]) -> None:
        if self.now():
            raise KeyboardInterrupt  # the run keeps its results and a checkpoint

    def finished(self, result: Result) -> None: ...


@dataclass(frozen=True)
class CellResult:
    """The outcome of a cell. `stopped` ones continue from their checkpoint next time."""

    cell: Cell
    status: Literal["done", "failed", "stopped", "no data"]
    seconds: float = 0.0
    figure: str | None = None  # its result, as text
    message: str = ""


def run(
    todo: Sequence[Cell],
    store: Store,
    *,
    stop: Stop,
    jobs: int = 1,
    fetch: bool = True,
    watch: Callable[[Cell], Sequence[Callback]] = lambda cell: (),
) -> Iterator[CellResult]:
    """Run the cells, and yield each outcome. If one fails, the others still run."""
    ready: list[Cell] = []
    missing: dict[tuple[str, str | None], str] = {}
    for cell in todo:
        where = (cell.config.dataset, cell.config.data_dir)
        if where not in missing:
            missing[where] = why_missing(*where) if fetch else ""
        if missing[where]:
            yield CellResult(cell, "no data", message=missing[where])
        else:
            ready.append(cell)
    yield from in_turn(ready, store, stop, watch) if jobs == 1 else at_once(ready, store, stop, jobs)


def in_turn(todo: Sequence[Cell], store: Store, stop: Stop, watch: Callable[[Cell], Sequence[Callback]]) -> Iterator[CellResult]:
    for cell in todo:
        if stop.now():
            return
        yield run_cell(cell, store, stop, watch(cell))


Runs = Callable[[Cell, Store, Stop], CellResult]


def at_once(todo: Sequence[Cell], store: Store, stop: Stop, jobs: int, runs: Runs | None = None) -> Generator[CellResult]:
    """Run cells in processes. Never more cells are submitted than there are processes, so it is known which may have died. `runs`
    is the function that runs a cell; it must be importable."""
    context = multiprocessing.get_context("spawn")
    flag = context.Event()
    left = list(todo)
    running: dict[Future[CellResult], Cell] = {}

    def pool() -> ProcessPoolExecutor:
        arguments = (store.folder, stop.deadline, flag, jobs, runs or run_cell)
        return ProcessPoolExecutor(jobs, mp_context=context, initializer=begin, initargs=arguments)

    workers = pool()
    try:
        while running or (left and not stop.now()):
            while left and len(running) < jobs and not stop.now():
                try:
                    with interrupts_held():  # this starts a process, if there are not enough yet
                        running[workers.submit(work, left[0])] = left[0]
                except BrokenProcessPool:  # a process has just died: running cells, if any, will report it
                    if running:
                        break
                    workers.shutdown()
                    workers = pool()
                else:
                    left.pop(0)
            done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            if stop.now():
                flag.set()
            died = False
            for future in done:
                cell = running.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:
                    died = True
                    yield CellResult(cell, "failed", message=DIED)
            if died:
                for cell in running.values():
                    yield CellResult(cell, "stopped", message="another process died; this run resumes next time")
                running.clear()
                workers.shutdown()
                workers = pool()
    finally:
        flag.set()
        workers.shutdown()


_mine: tuple[Runs, Store, Stop]  # of a worker process


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end of the block. Processes started in it inherit this, so that it does not end them while they are
    still importing."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(folder: Path, deadline: float | None, flag: Flag, jobs: int, runs: Runs) -> None:
    """Start a worker. Only the main process listens to Ctrl-C, and passes it on."""
    global _mine
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, cores() // jobs))
    _mine = runs, Store(folder), Stop(deadline, flag)


def end_with_parent() -> None:
    """End this process when the main one is gone, even by SIGKILL, or it would hold its memory and its run folder for ever. It may
    end in the middle of a run, because files are moved into place only when they are whole."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def work(cell: Cell) -> CellResult:
    runs, store, stop = _mine
    if stop.now():  # asked while this process was still starting
        return CellResult(cell, "stopped")
    return runs(cell, store, stop)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes(jobs: int | str, total: int) -> int:
    """How many runs train side by side: a number, or `auto` for one per core. More than a few on one GPU would block each other."""
    if jobs == "auto":
        return max(1, min(total, cores(), GPU_JOBS if torch.cuda.is_available() else cores()))
    if not str(jobs).isdecimal() or int(jobs) < 1:
        raise SettingError("jobs", jobs, "give a number of runs at once, 1 or more, or auto")
    return int(jobs)


def run_cell(cell: Cell, store: Store, stop: Stop, watch: Sequence[Callback] = ()) -> CellResult:
    """Run one cell in its own folder, from its checkpoint if it has one, and store the result."""
    clock = time.perf_counter()
    folder = store.partial(cell.config)
    try:
        result = train(cell.config, folder, [*watch, stop])
        if result.interrupted:
            return CellResult(cell, "stopped", time.perf_counter() - clock)
        store.put(result, json.loads((folder / "environment.json").read_text(encoding="utf-8")))
        store.forget(cell.config)
        return CellResult(cell, "done", time.perf_counter() - clock, result.metric.shown(result.score))
    except DataError as error:
        return CellResult(cell, "no data", message=str(error))
    except Exception as error:  # whatever it is, the other cells must run
        store.forget(cell.config)
        log = folder.with_name(f"{folder.name}.error.txt")
        files.write(log, traceback.format_exc())
        why = " ".join(str(error).split()) if isinstance(error, FedaggError) else f"{type(error).__name__}: {error}"
        return CellResult(cell, "failed", time.perf_counter() - clock, message=f"{why.splitlines()[0]} ({log})")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def train(config: Config, folder: Path, callbacks: Sequence[Callback]) -> Result:
    plugins.load(config.plugin)  # a separate process has not loaded them yet
    given = data_of(config)
    if (folder / "config.toml").exists():
        try:
            return fedagg.run(config, data=given, resume=folder, callbacks=callbacks, progress=False)
        except DataError:
            raise
        except FedaggError:
            Store(folder.parent.parent).forget(config)  # has other settings, or is damaged: begin again
    files.folder(folder, "results")
    return fedagg.run(config, data=given, out=folder, callbacks=callbacks, progress=False)


def data_of(config: Config) -> Dataset:
    """The data set that the settings name; the last one is cached."""
    return dataset(config.dataset, config.data_dir, False, config.target, config.user, config.task, config.data_memory)


dataset = lru_cache(maxsize=1)(data.load)


def why_missing(name: str, data_dir: str | None) -> str:
    """Why the data is missing; empty if it is there or can be downloaded."""
    if data.REGISTRY.has(name) or data.is_path(name):  # made by a user's function or file, not downloaded
        return ""
    try:
        data.fetch(name, data_dir)
    except (FedaggError, ImportError) as error:
        return str(error)
    return ""


@contextmanager
def interruptible(stop: Stop) -> Iterator[None]:
    """Ctrl-C stops after the current round; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        stop.flag.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def time_left(todo: Sequence[Cell], seen: Sequence[CellResult], jobs: int) -> float | None:
    """Seconds until the rest is done, by the speed of cells with the same model and method, else of similar ones."""
    if not any(o.status == "done" for o in seen):
        return None
    total = 0.0
    for cell in todo:
        for alike in (same_method, same_model, lambda a, b: True):
            near = [o for o in seen if o.status == "done" and alike(o.cell, cell)]
            if near:
                total += size(cell) * sum(o.seconds for o in near) / sum(size(o.cell) for o in near)
                break
    return total / jobs


def same_method(a: Cell, b: Cell) -> bool:
    return a.method == b.method and same_model(a, b)


def same_model(a: Cell, b: Cell) -> bool:
    return (a.config.dataset, a.config.model) == (b.config.dataset, b.config.model)


def size(cell: Cell) -> float:
    """The length of a cell, relative to others of its data set and model."""
    return cell.config.rounds * cell.config.per_round * cell.config.epochs


def unfinished(todo: Sequence[Cell], store: Store) -> list[Cell]:
    """The cells without a result, each configuration once."""
    seen: dict[str, Cell] = {}
    for cell in todo:
        seen.setdefault(key(cell.config), cell)
    return [cell for cell in seen.values() if store.get(cell.config) is None]
