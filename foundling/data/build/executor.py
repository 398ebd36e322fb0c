"""Executors of a build: the protocol, and worker processes on this machine."""

import ctypes
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from foundling.config.errors import DataError, UserError
from foundling.data.build.encode import (
    EncodeJob,
    Finished,
    PieceEncoder,
    Verdict,
    one_thread,
    parts_in_all,
    run_task,
)
from foundling.data.build.scheduler import BuildTask, Scheduler
from foundling.runtime.files import DISK_FULL
from foundling.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from foundling.data.readers.source import Piece, Source


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


@dataclass(frozen=True, kw_only=True)
class Specs:
    """How to open the sources again on another machine: what the user asked for."""

    specs: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    """Of ReadOptions."""
    seed: int = 1
    documents: int | None = None
    val_share: float = 0.02

    def open(self) -> "list[Source]":
        """The sources, as the user's own command opened them."""
        from foundling.data.open_source import open_source
        from foundling.data.readers.source import ReadOptions

        where = tuple(self.options.get("where", ()))
        options = ReadOptions(**{**self.options, "where": where})
        return [
            open_source(
                spec,
                seed=self.seed,
                documents=self.documents,
                val_share=self.val_share,
                options=options,
            )
            for spec in self.specs
        ]

    def to_json(self) -> dict[str, Any]:
        """As a file carries it."""
        return asdict(self)


# On this machine: in this process, or in as many workers as there are cores.
#
# A worker reads rows itself and asks before it encodes a part, so nothing but short messages passes
# between us, and several workers can share one piece: when there are fewer pieces than workers, the
# idle ones help. The first worker is a thread of this process, which has everything loaded and
# would otherwise only wait (the encoder lets go of the interpreter's lock). The others are
# processes, fresh interpreters because a fork would copy threads and GPUs that do not survive it,
# and die with us: the kernel sees to it.
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
            running = self._running.get(task.folder)
            if running is None:
                claim = self._claim(task)
                running = run_task(self._encoder, task.piece, task.folder, claim)
                self._running[task.folder] = running
            finished = next(running, None)
            if finished is None:
                del self._running[task.folder]
                task.in_all = parts_in_all(task.folder)
            else:
                task.parts[finished.number] = finished.info

    def _claim(self, task: BuildTask) -> Callable[[int], Verdict]:
        return lambda number: "skip" if task.holds(number) else "take"

    def close(self) -> None:
        """Drop what is open."""
        self._running.clear()


@dataclass(eq=False)
class _Worker:
    life: "SpawnProcess | Thread"
    pipe: Connection
    ready: bool = False
    """Whether it has what it needs to work."""
    task: BuildTask | None = None
    asked: int | None = None
    """The part it asks for and has no answer about."""


class Workers:
    """In workers, of which all but one are processes."""

    def __init__(self, job: EncodeJob, tokenizer: Tokenizer, count: int) -> None:
        """They are started when there is something to do."""
        self._job, self._tokenizer, self._count = job, tokenizer, count
        self._workers: list[_Worker] = []
        self._needs = b""
        """What a process is sent when it is there."""
        self._taken: dict[BuildTask, set[int]] = {}

    def _start(self, scheduler: Scheduler, first: BuildTask) -> None:
        """Begin with the first task here, while the processes are on their way."""
        context = mp.get_context("spawn")
        needs_main = any(type(source).__module__ == "__main__" for source in scheduler.sources)
        processes = []
        for _ in range(self._count - 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            with nullcontext() if needs_main else without_main():
                process.start()
            theirs.close()
            processes.append(_Worker(process, ours))
        own = self._tokenizer.for_another_thread()  # the encoder is made once and travels with it
        ours, theirs = context.Pipe()
        thread = Thread(target=_serve, args=(theirs, self._job.open(own)), daemon=True)
        thread.start()
        self._workers = [_Worker(thread, ours, ready=True), *processes]
        self._give(self._workers[0], first)
        # Packed for all of them while they start, so that none has to wait for it.
        self._needs = pickle.dumps((self._job, self._tokenizer))

    def run(self, scheduler: Scheduler, enough: Callable[[], bool]) -> None:
        """Hand out pieces and answer questions until there is enough."""
        for worker in self._workers:  # those that were left without an answer last time
            self._answer(worker)
        while not enough():
            if not self._workers:
                first = scheduler.open_task()
                if first is None:
                    return
                self._start(scheduler, first)
            for worker in self._workers:
                if worker.ready and worker.task is None:
                    self._assign(worker, scheduler)
            if all(worker.task is None for worker in self._workers):
                return
            for pipe in wait([worker.pipe for worker in self._workers], PATIENCE_S):
                worker = next(w for w in self._workers if w.pipe is pipe)
                self._hear(worker)
                self._answer(worker)

    def _assign(self, worker: _Worker, scheduler: Scheduler) -> None:
        """A piece of its own, or a share in one that others are at."""
        task = scheduler.open_task()
        if task is None:
            busy = [w.task for w in self._workers if w.task is not None and w.task.in_all is None]
            task = min(busy, key=busy.count, default=None)
        if task is not None:
            self._give(worker, task)

    def _give(self, worker: _Worker, task: BuildTask) -> None:
        worker.task = task
        worker.pipe.send((task.piece, task.folder))

    def _hear(self, worker: _Worker) -> None:
        """Take one message."""
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError):
            raise self._lost(worker) from None
        task = worker.task
        if kind == "here":  # it takes what we send at once, so that we never wait for it
            worker.pipe.send_bytes(self._needs)
            worker.ready = True
            return
        if kind == "refused":
            raise DataError(value)
        if kind == "no room":
            raise value
        if kind == "failed":
            raise RuntimeError(f"a worker of the build failed:\n{value}")
        assert task is not None
        if kind == "ask":
            worker.asked = value
        elif kind == "part":
            finished: Finished = value
            task.parts[finished.number] = finished.info
        else:
            worker.task = None
            task.in_all = value if value is not None else task.in_all

    def _lost(self, worker: _Worker) -> DataError:
        worker.life.join()
        return DataError(
            "a worker process of the build ended with exit code"
            f" {getattr(worker.life, 'exitcode', None)} (killed for memory?); start again to go"
            " on, with fewer --workers."
        )

    def _answer(self, worker: _Worker) -> None:
        if worker.asked is None or worker.task is None:
            return
        taken = self._taken.setdefault(worker.task, set())
        free = worker.asked not in taken and not worker.task.holds(worker.asked)
        if free:
            taken.add(worker.asked)
        worker.asked = None
        worker.pipe.send("take" if free else "skip")

    def close(self) -> None:
        """End the processes at once: what they were writing has no name yet. The thread is waited
        for: it ends when it asks for a task and the pipe is closed."""
        for worker in self._workers:
            worker.pipe.close()
            if not isinstance(worker.life, Thread):
                worker.life.kill()
        for worker in self._workers:
            worker.life.join()
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


def _work(pipe: Connection) -> None:
    """The life of a worker process."""
    die_with_parent()
    one_thread()
    # The terminal sends its interrupt to all of us; ending is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pipe.send(("here", None))
        job, tokenizer = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return
    gc.freeze()  # what is here stays; the collector need not walk it over and over
    _serve(pipe, job.open(tokenizer))


def _serve(pipe: Connection, encoder: PieceEncoder) -> None:
    """Do one task after another until the pipe is closed."""
    try:
        while True:
            piece, folder = pipe.recv()
            _one_task(pipe, encoder, piece, folder)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except UserError as error:
        _send(pipe, ("refused", str(error)))
    except BaseException as error:
        full = isinstance(error, OSError) and error.errno in DISK_FULL
        _send(pipe, ("no room", error) if full else ("failed", traceback.format_exc()))
    finally:
        pipe.close()


def _one_task(pipe: Connection, encoder: PieceEncoder, piece: "Piece", folder: Path) -> None:
    def claim(number: int) -> Verdict:
        pipe.send(("ask", number))
        verdict: Verdict = pipe.recv()
        return verdict

    for finished in run_task(encoder, piece, folder, claim):
        pipe.send(("part", finished))
    pipe.send(("end", parts_in_all(folder)))


def _send(pipe: Connection, message: Any) -> None:
    with suppress(OSError):
        pipe.send(message)


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends (Linux only).

    Elsewhere a worker ends at its next question, when it finds the pipe closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:  # the parent has died before
            os._exit(1)
