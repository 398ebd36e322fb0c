"""Processes that stay: a world of ranks is started once and then trains one run after another.

What `foundling train` does in a rank is called as a function, because the start of a process costs
more than fifty steps of a tiny model. Within a world the process group lives as long as the world;
meshes, wrappers, savers and everything else are made anew for each run.
"""

import contextlib
import multiprocessing
import os
import resource
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import ready_to_fork

from foundling.runtime.processes import free_port
from foundling.runtime.dist import process_group
from foundling.runtime.dist import world_from_environment
from tests.quick import measure_peak_once

LIMIT_S = 120.0
"""Patience with one piece of work; then a rank is stuck."""


class World:
    """The ranks of one world, each waiting for work."""

    def __init__(self, size: int, log: Path) -> None:
        self.size, self._log = size, log
        context = multiprocessing.get_context("forkserver")
        port = free_port()
        self._ranks: list[Any] = []
        self._lines: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port, log))
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._lines.append(ours)

    def run(self, work: Callable[..., Any], *args: object) -> list[Any]:
        """Have every rank call `work(*args)`; what each returned, or AssertionError with what went
        wrong first."""
        for line in self._lines:
            line.send((work, args))
        answers = [self._answer(rank) for rank in range(self.size)]
        failed = [told for told, _ in answers if told]
        assert not failed, f"{work.__name__}{args}: {failed[0]}"
        return [result for _, result in answers]

    def _answer(self, rank: int) -> tuple[str, Any]:
        if not self._lines[rank].poll(LIMIT_S):
            return f"rank {rank} of {self.size} is stuck; see {self._log}", None
        try:
            told, result = self._lines[rank].recv()
        except EOFError:
            return f"rank {rank} of {self.size} is gone; see {self._log}", None
        return told, result

    def close(self) -> None:
        """End the ranks."""
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.send(None)
        for rank in self._ranks:
            rank.join(10)
            rank.kill()
            rank.join()


@contextlib.contextmanager
def worlds(sizes: Sequence[int], folder: Path) -> Iterator[dict[int, World]]:
    """Worlds of these sizes, side by side, each with a log in `folder`."""
    opened: dict[int, World] = {}
    try:
        with ready_to_fork():
            for size in sizes:
                opened[size] = World(size, folder / f"world-{size}.log")
        yield opened
    finally:
        for world in opened.values():
            world.close()


def _serve(line: Connection, rank: int, size: int, port: int, log: Path) -> None:
    """A rank: join the others, then do what is asked until nothing more is."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    measure_peak_once(patch)
    # Every run makes groups of its own, and a group is some sockets.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with process_group(world_from_environment(), torch.device("cpu"), timeout_s=int(LIMIT_S)):
        while (order := line.recv()) is not None:
            work, args = order
            try:
                line.send(("", work(*args)))
            except BaseException:
                line.send((traceback.format_exc()[-3000:], None))
