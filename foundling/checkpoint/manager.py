"""Background saves: `save` returns when the tensors are copied, a thread writes them.

What stops training is waiting for the last save (normally over long ago), one number exchanged
between the ranks, and the copy to the host; the seconds are returned. The rest happens in a thread
that synchronises with the other ranks over a gloo group of its own, with its own time limit:
collectives of the training go on undisturbed. What is called from the training's thread (`latest`,
`finish`) uses the job's own group.

Nothing that a disk does ends training: `poll` tells of what was written and what failed. Only
`finish` raises, because a run must not end well without its last checkpoint. Rejected: a process
instead of the thread (a second copy of the state, or shared memory to clean up after a kill; the
heavy parts release Python's lock anyway), and DCP's async_save, which copies all that a rank has.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from foundling.checkpoint import folders
from foundling.checkpoint.manifest import read_manifest
from foundling.checkpoint.paths import checkpoint_root
from foundling.checkpoint.remote import Folder
from foundling.checkpoint.retention import (
    VerifiedCache,
    abandon_after,
    forget_scores,
    latest_together,
    note_score,
    retain,
    verify_together,
)
from foundling.checkpoint.writer import (
    CommitToken,
    HostStaging,
    Planner,
    Sight,
    StagedSave,
    WriteShare,
    checked_meta,
    write,
)
from foundling.config.errors import CheckpointError, UserError
from foundling.config.run import CheckpointConfig
from foundling.runtime.console import warn
from foundling.runtime.dist import (
    LostRankError,
    World,
    has_ranks,
    is_main,
    max_over_ranks,
    new_gloo_group,
    on_main,
)
from foundling.runtime.progress import PROGRESS

READY, NEW_PLAN, NEW_GROUP, BUSY, HINDERED = range(5)
"""How a rank stands before a save; the worst of all ranks decides what all do."""
NICENESS = 10


@dataclass(frozen=True)
class SaveResult:
    """What became of one save."""

    step: int
    stall_s: float
    """Seconds that training stood still for it."""
    write_s: float = 0.0
    """Seconds that it took in the background."""
    path: Folder | None = None
    """The checkpoint; None if there is none."""
    bytes: int = 0
    """Size of the whole checkpoint."""
    error: str = ""
    """Why there is none, in a sentence."""
    note: str = ""
    """Something else the owner should know."""


TIMEOUT_S = 600
"""Seconds that ranks wait for each other in a save, and a save for the one before it."""


class CheckpointManager:
    """Saves a run's state in the background. Every rank makes one and calls the same methods."""

    def __init__(
        self,
        run_checkpoints: Path,
        config: CheckpointConfig,
        world: World,
        timeout_s: float | None = None,
    ) -> None:
        """`timeout_s`: seconds that ranks wait for each other in a save (None: TIMEOUT_S)."""
        if world.size > 1 and not has_ranks():
            raise RuntimeError(
                "a CheckpointManager of several ranks needs the process group to be there"
            )
        self.folder = checkpoint_root(run_checkpoints, config)
        self._config = config
        self._timeout_s = timeout_s or TIMEOUT_S
        self._group = new_gloo_group(self._timeout_s)
        self._is_broken = False
        self._planner = Planner()
        self._stage = HostStaging()
        self._known = VerifiedCache()
        self._thread: threading.Thread | None = None
        self._permit: tuple[int, CommitToken] | None = None
        """The step that is being written, and whether it may become a checkpoint."""
        self._done: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()
        self._number = 0
        self._last: SaveResult | None = None
        """What came of the save that was asked for last; one that ends late does not count."""

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        score: float | None = None,
        wait: bool = False,
        hindrance: str = "",
    ) -> float:
        """Stage the checkpoint of `step`, have it written, and return the seconds training stood.

        `tensors` may be changed as soon as this returns. `wait` stays until it is written, for the
        last save before an end; its outcome comes from `poll` and `finish` in any case. A
        `hindrance` on any rank is why all leave this save out.
        """
        began = time.perf_counter()
        content = checked_meta(step, tensors, meta)
        self._number, self._last = self._number + 1, None
        sight = self._planner.look(tensors)
        if not self._is_free(sight, step, began, hindrance):
            return time.perf_counter() - began
        staged = self._staged(step, content, sight)
        self._permit = (step, staged.permit)
        stall = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._work,
            args=(staged, score, stall, self._number),
            name=f"save-{step}",
            daemon=True,
        )
        self._thread.start()
        if wait or not self._config.background:
            self._wait()
        return time.perf_counter() - began

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Agree on who writes what and get the memory for it, before the first step has to wait."""
        sight = self._planner.look(tensors)
        if max_over_ranks(int(sight.is_new)):
            self._planner.agree(sight, self._group)
        with contextlib.suppress(Exception):  # too little memory: a save will say so
            self._stage.reserve({i.index: sight.piece(i) for i in self._planner.agreed.items})

    def score(self, step: int, value: float) -> None:
        """Note how good the checkpoint of `step` turned out, for checkpoint.keep_best."""
        if is_main():
            note_score(self.folder, step, value)

    def forget_scores(self) -> None:
        """What was noted before was measured in another way: checkpoint.keep_best ranks by none."""
        if is_main():
            forget_scores(self.folder)

    def poll(self) -> list[SaveResult]:
        """Saves that ended since the last call; failures are reported as results, none is
        raised."""
        results = [self._done.get() for _ in range(self._done.qsize())]
        for result in results:
            for sentence in filter(None, (result.error, result.note)):
                warn(sentence)
        return results

    def has_saved(self, step: int) -> bool:
        """Whether the last save was of `step` and ended well on every rank; waits for it."""
        self._wait()
        last = self._last
        return not max_over_ranks(int(last is None or last.step != step or bool(last.error)))

    def finish(self, step: int | None = None) -> Folder | None:
        """Wait for the last save and see that it verifies; CheckpointError if it does not, or if
        it is not the one of `step`.

        Without a save in this process it is the newest one there is that counts.
        """
        self._wait()
        last = self._last
        error = last.error if last is not None else ""
        if self._is_writing():
            error = (
                f"the last save is still being written after {self._timeout_s:g} s; look at"
                f" the disk of {self.folder}."
            )
        # A lost rank may be known to some only, and none waits alone.
        if max_over_ranks(int(bool(error))):
            raise CheckpointError(error or "the last save failed on another rank; see its log.")
        path = last.path if last is not None else None
        if path is None:
            path = self.latest()
        else:
            verify_together(path)
        if step is not None and (path is None or folders.step_of(path) != step):
            raise CheckpointError(f"step {step} was not saved; train again from what is there.")
        return path

    def latest(self, at_most: int | None = None) -> Folder | None:
        """The newest whole checkpoint (up to a step); every rank calls it, each hashes a part."""
        path = latest_together(self.folder, at_most)
        if path is not None and is_main():
            with contextlib.suppress(CheckpointError, OSError):  # then it is hashed again
                self._known.note(path)
        return path

    def abandon_after(self, step: int) -> None:
        """Take checkpoints after `step` off the list, before a rollback takes another course."""
        self._wait()

        def abandon() -> int:
            late, permit = (self._permit or (0, None)) if self._is_writing() else (0, None)
            # One that hangs must not come to its end later, as a checkpoint of the old course.
            if permit and late > step and not permit.withdraw(self._timeout_s):
                raise RuntimeError(
                    f"the save of step {late} hangs and cannot be called off; the job must start"
                    " again to go back behind it"
                )
            return len(abandon_after(self.folder, step))

        on_main(abandon)

    def close(self) -> None:
        """Let a save that is under way end (it is good data) and give the memory back."""
        self._wait()
        self.poll()
        if not self._is_writing():
            self._stage.release()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Before a save

    def _is_free(self, sight: Sight, step: int, began: float, hindrance: str) -> bool:
        """Whether all ranks can begin; the plan and the group are renewed where one needs it.

        A save waits for the one before it: overlapping would need a second copy of the state, and
        leaving this one out would cost what was trained since. Only when the old one hangs beyond
        the time limit is the new one left out, with a result that says so: training with an old
        checkpoint is better than no training."""
        self._wait()
        mine = NEW_PLAN if sight.is_new else READY
        if self._is_broken:
            mine = NEW_GROUP
        if self._is_writing():
            mine = BUSY
        if hindrance:
            mine = HINDERED
        all_of_us = max_over_ranks(mine)
        if all_of_us >= BUSY:
            why = (
                f"the save before it is still being written after {self._timeout_s:g} s; look"
                f" at the disk of {self.folder}."
            )
            if all_of_us == HINDERED:
                why = hindrance or "another rank was hindered; see its log."
            error = f"step {step} was not saved: {why}"
            self._report(SaveResult(step, time.perf_counter() - began, error=error), self._number)
            return False
        if all_of_us == NEW_GROUP:
            self._group, self._is_broken = new_gloo_group(self._timeout_s), False
        if all_of_us >= NEW_PLAN:
            self._planner.agree(sight, self._group)
        return True

    def _staged(self, step: int, content: bytes, sight: Sight) -> StagedSave:
        share = self._planner.agreed
        try:
            copies = self._stage.fill({item.index: sight.piece(item) for item in share.items})
        except Exception as error:  # too little memory on one host: the other ranks must know
            return StagedSave(step, content, WriteShare({}, share.index), {}, failure=error)
        return StagedSave(step, content, share, copies)

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wait(self) -> None:
        if self._thread is not None and self._is_writing():
            with PROGRESS.during("save"):  # the watchdog must not come before our own limit
                self._thread.join(self._timeout_s)

    # Behind the training

    def _work(self, staged: StagedSave, score: float | None, stall_s: float, number: int) -> None:
        _stand_back()
        began = time.perf_counter()
        fields: dict[str, Any] = {}
        try:
            path = write(self.folder, staged, self._group)
            fields = {"path": path, "bytes": read_manifest(path).size}
            fields["note"] = self._tidy(path, score)
        except BaseException as error:
            self._is_broken = isinstance(error, LostRankError)
            fields["error"] = _sentence(staged.step, error)
        self._report(
            SaveResult(staged.step, stall_s, time.perf_counter() - began, **fields), number
        )

    def _tidy(self, path: Folder, score: float | None) -> str:
        """Note the score and delete what no rule keeps (rank 0); trouble costs no checkpoint."""
        if not is_main():
            return ""
        try:
            self._known.note(path)
            if score is not None:
                note_score(self.folder, folders.step_of(path) or 0, score)
            retain(self.folder, self._config, self._known)
        except Exception as error:
            return f"old checkpoints in {self.folder} could not be tidied up: {error}."
        return ""

    def _report(self, result: SaveResult, number: int) -> None:
        if number == self._number:
            self._last = result
        self._done.put(result)


def _stand_back() -> None:
    """Lower this thread's priority (Linux has one for each): training goes first on a full CPU."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _sentence(step: int, error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    what = f"{error}" if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    return f"the checkpoint of step {step} could not be written: {what.rstrip('.')}."
