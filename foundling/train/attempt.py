"""Work beside the training that may fail without ending it: evaluations and samples.

On one rank a failure is told and training goes on. Where every rank takes part, all must come to
the same end: what can fail outside the model (a file, a text) goes through `agreed`, which makes
one rank's failure everybody's before the next collective; a rank that fails inside the model leaves
the others in a collective that nobody can call off, so the job ends and starts again. What has
ended the job twice is not tried a third time.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from foundling.checkpoint.ranks import Group, has_ranks, on_main, own_group
from foundling.runtime.files import write_text_atomic
from foundling.runtime.log import say, warn
from foundling.runtime.pulse import PULSE, collective
from foundling.runtime.rundir import RunDir
from foundling.runtime.signals import is_told

TRIES = 2
T = TypeVar("T")


class PeerFailedError(RuntimeError):
    """Another rank could not do its part, and this one did not begin what would need it."""


class GivenUpError(Exception):
    """The job was told to stop, and this work is done by the next start."""


class Attempts:
    """What is tried, how often, and whether all ranks came through."""

    def __init__(self, run: RunDir, *, everyone: bool, limit_s: float = 600.0) -> None:
        """`everyone`: all ranks take part, as where none has the whole model; otherwise only rank
        0 calls this. A rank that waits for the others longer than `limit_s` ends the job."""
        self._run, self._everyone, self._limit_s = run, everyone and has_ranks(), limit_s
        self._group: Group = None
        self._path = run.path / "tried.json"

    def attempt(self, what: str, step: int, action: Callable[[], None]) -> bool:
        """Do `action`; whether it was done, which is the same on every rank."""
        if not self._on_main(lambda: self._may_try(what, step)):
            return False
        error: Exception | None = None
        given_up = False
        with PULSE.during("evaluate"):
            try:
                action()
            except GivenUpError:
                given_up = True
            except Exception as failure:
                error = failure
            failed = self._worst(int(error is not None))
        if given_up:
            say(f"{what} at step {step} is left for the next start")
        if failed:
            told = str(error) if error is not None else "another rank failed"
            warn(f"{what} at step {step} failed ({told}); training goes on.")
            self._on_main(lambda: self._run.event("failed", what=what, step=step, error=told))
        self._on_main(lambda: self._forget(what, step))
        return not failed and not given_up

    def go_on(self) -> None:
        """GivenUpError if the job was told to stop: called now and then by work that takes long,
        which would otherwise be killed when the grace time is over. The same on every rank that
        takes part; where rank 0 works alone it hears what it was told itself."""
        if self._worst(int(is_told())):
            raise GivenUpError

    def agreed(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; where one cannot be made on any rank, no rank goes on with it."""
        iterator, ended = iter(items), object()
        while True:
            error: Exception | None = None
            item: Any = ended
            try:
                item = next(iterator, ended)
            except Exception as failure:
                error = failure
            if self._worst(int(error is not None)):
                raise error or PeerFailedError("another rank failed")
            if item is ended:
                return
            yield item

    def _worst(self, value: int) -> int:
        """The largest of all ranks' numbers, on a group of its own: it cannot meet a collective of
        the model that another rank is still in."""
        if not self._everyone:
            return value
        if self._group is None:
            self._group = own_group(self._limit_s)
        number = torch.tensor(value)
        with collective("agreement on an attempt"):
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
        return int(number)

    def _on_main(self, work: Callable[[], T]) -> T:
        return on_main(work) if self._everyone else work()

    def _may_try(self, what: str, step: int) -> bool:
        tried = self._read()
        times = tried.get(f"{what}@{step}", 0)
        if times >= TRIES:
            warn(f"{what} at step {step} has ended the job {times} times and is left out.")
            self._run.event("failed", what=what, step=step, error=f"it ended the job {times} times")
            return False
        self._write({**tried, f"{what}@{step}": times + 1})
        return True

    def _forget(self, what: str, step: int) -> None:
        tried = self._read()
        self._write({name: times for name, times in tried.items() if name != f"{what}@{step}"})

    def _read(self) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def _write(self, tried: dict[str, int]) -> None:
        with contextlib.suppress(OSError):  # on a full disk it is not counted
            if tried:
                write_text_atomic(self._path, json.dumps(tried) + "\n")
            else:
                self._path.unlink(missing_ok=True)
