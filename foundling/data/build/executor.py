"""Executors of a build: the protocol, and worker processes on this machine."""

import multiprocessing as mp
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, Protocol

from foundling.config.errors import DataError, UserError
from foundling.data.build.encode import (
    EncodeJob,
    Finished,
    PieceEncoder,
    one_thread,
    run_task,
)
from foundling.data.build.scheduler import BuildTask, Scheduler
from foundling.runtime.files import DISK_FULL
from foundling.runtime.processes import die_with_parent
from foundling.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess


EngineName = Literal["local", "ray", "slurm"]
ENGINES: tuple[EngineName, ...] = ("local", "ray", "slurm")


class Executor(Protocol):
    """Has the tasks of a scheduler done."""

    def run(self, scheduler: Scheduler, enough: Callable[[], bool]) -> None:
        """Work until `enough` says so or nothing is left; it may be called again for more."""
        ...

    def close(self) -> None:
        """Let go of everything; work that is not finished is dropped."""
        ...


# On this machine: in this process, or in as many workers as there are cores.
#
# Several workers can share one piece: when there are fewer pieces than workers, the idle ones help.
# Each reads all rows, and takes a part before it encodes it. Workers are fresh interpreters because
# a fork would copy threads and GPUs that do not survive it, and die with us: the kernel sees to it.
#
# Rejected: concurrent.futures (its workers outlive a killed parent, and it queues without bound).

PATIENCE_S = 0.5
"""How often progress is shown while no worker has anything to say."""


class Here:
    """In this process, a part at a time and always the one that the frontier waits for."""

    def __init__(self, encoder: PieceEncoder) -> None:
        self._encoder = encoder
        self._running: dict[Path, Iterator[Finished]] = {}

    def run(self, scheduler: Scheduler, enough: Callable[[], bool]) -> None:
        """Encode until there is enough."""
        while not enough():
            task = scheduler.wanted()
            if task is None:
                return
            if task.folder not in self._running:
                self._running[task.folder] = run_task(self._encoder, task.piece, task.folder)
            finished = next(self._running[task.folder], None)
            if finished is None:
                del self._running[task.folder]
                task.scan()
            else:
                task.parts[finished.number] = finished.info

    def close(self) -> None:
        """Drop what is open."""
        self._running.clear()


@dataclass(eq=False)
class _Worker:
    process: "SpawnProcess"
    pipe: Connection
    ready: bool = False
    """Whether it has what it needs to work."""
    task: BuildTask | None = None


class Workers:
    """In worker processes."""

    def __init__(self, job: EncodeJob, tokenizer: Tokenizer, count: int) -> None:
        """They are started when there is something to do."""
        self._job, self._tokenizer, self._count = job, tokenizer, count
        self._workers: list[_Worker] = []
        self._needs = b""
        """What a worker is sent when it is there."""
        self._first: BuildTask | None = None

    def _start(self, scheduler: Scheduler) -> None:
        context = mp.get_context("spawn")
        needs_main = any(type(source).__module__ == "__main__" for source in scheduler.sources)
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            with nullcontext() if needs_main else without_main():
                process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
        _ = self._tokenizer.fast  # made and compared once, and travels with it
        self._needs = pickle.dumps((self._job, self._tokenizer))

    def run(self, scheduler: Scheduler, enough: Callable[[], bool]) -> None:
        """Hand out pieces until there is enough."""
        while not enough():
            if not self._workers:
                self._first = scheduler.open_task()
                if self._first is None:
                    return
                self._start(scheduler)
            for worker in self._workers:
                if worker.ready and worker.task is None:
                    self._assign(worker, scheduler)
            is_idle = all(worker.task is None for worker in self._workers)
            if is_idle and any(worker.ready for worker in self._workers):
                return  # who is ready was just offered what is left; the others need not be awaited
            for pipe in wait([worker.pipe for worker in self._workers], PATIENCE_S):
                self._hear(next(w for w in self._workers if w.pipe is pipe))

    def _assign(self, worker: _Worker, scheduler: Scheduler) -> None:
        """A piece of its own, or a share in one that others are at."""
        task, self._first = self._first or scheduler.open_task(), None
        if task is None:
            busy = [w.task for w in self._workers if w.task is not None and w.task.in_all is None]
            task = min(busy, key=busy.count, default=None)
        if task is not None:
            worker.task = task
            worker.pipe.send((task.piece, task.folder))

    def _hear(self, worker: _Worker) -> None:
        """Take one message."""
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            raise DataError(
                "a worker process of the build ended with exit code"
                f" {worker.process.exitcode} (killed for memory?); start again to go on, with"
                " fewer --workers."
            ) from None
        task = worker.task
        if kind == "here":  # sent earlier, it would block us until the worker listens
            worker.pipe.send_bytes(self._needs)
            worker.ready = True
        elif kind == "refused":
            raise DataError(value)
        elif kind == "no room":
            raise value
        elif kind == "failed":
            raise RuntimeError(f"a worker of the build failed:\n{value}")
        elif kind == "part" and task is not None:
            task.parts[value.number] = value.info
        elif task is not None:
            worker.task = None
            task.scan()

    def close(self) -> None:
        """End the workers at once: what they were writing has no name yet."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []


@contextmanager
def without_main() -> Iterator[None]:
    """Keep a worker from importing the program that started it, of which it needs nothing.

    A script without the usual guard would otherwise start its own build again in every worker.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end_with_parent() -> None:
    """In a worker process first of all."""
    parent = mp.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)


def _work(pipe: Connection) -> None:
    """The life of a worker process: one task after another until it is killed."""
    end_with_parent()
    # The terminal sends its interrupt to all of us; ending is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one_thread()
    try:
        pipe.send(("here", None))
        job, tokenizer = pickle.loads(pipe.recv_bytes())
        encoder = job.open(tokenizer)
        while True:
            piece, folder = pipe.recv()
            for finished in run_task(encoder, piece, folder, shared=True):
                pipe.send(("part", finished))
            pipe.send(("end", None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except UserError as error:
        pipe.send(("refused", str(error)))
    except BaseException as error:
        full = isinstance(error, OSError) and error.errno in DISK_FULL
        pipe.send(("no room", error) if full else ("failed", traceback.format_exc()))
