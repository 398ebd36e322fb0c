"""Which checkpoint to resume from, which may be deleted, and which were verified already."""

import contextlib
import json
import math
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.checkpoint import folders
from foundling.checkpoint.manifest import check_sizes, read_manifest, verify
from foundling.checkpoint.remote import F, Folder, RemotePath, describe
from foundling.config.errors import CheckpointError
from foundling.runtime.console import warn
from foundling.runtime.dist import Group, combine_on_main, on_main, rank_and_size
from foundling.runtime.files import write_text_atomic

# Which checkpoints were verified on this machine, so that keeping rules need not hash them again.
#
# A checkpoint is read back right after it was written. As long as its files keep their size, times
# and inode, were not written to since, and to decide which old ones may go that is enough; a
# resume hashes what it loads in any case. The cache lies next to the folder of checkpoints and is
# read only by the machine that wrote it, for the disk it was written for: a copy has other
# inodes and other times, and is hashed once.

Marks = dict[str, list[Any]]


class VerifiedCache:
    """The memory of one folder of checkpoints; remote folders are remembered by this process."""

    def __init__(self, folder: Folder) -> None:
        self._file = None
        self._machine = ""
        if isinstance(folder, Path):
            self._file = folder.with_name(f"{folder.name}.verified.json")
            with contextlib.suppress(OSError):
                self._machine = f"{socket.gethostname()} {folder.stat().st_dev}"
        self._marks: dict[str, Marks] = self._read()

    def note(self, path: Folder) -> None:
        """This checkpoint was verified just now."""
        self._marks[path.name] = _marks(path)
        self._write()

    def forget(self, path: Folder) -> None:
        """This checkpoint is gone."""
        if self._marks.pop(path.name, None) is not None:
            self._write()

    def is_whole(self, path: Folder) -> bool:
        """Whether the checkpoint verifies; hashed only if it is not as it was when it last did."""
        try:
            if self._marks.get(path.name) == _marks(path):
                return True
            verify(path)
            self.note(path)
        except (CheckpointError, OSError):
            self.forget(path)
            return False
        return True

    def _read(self) -> dict[str, Marks]:
        """What was written here by this machine; anything unexpected is as good as nothing."""
        if self._file is None or not self._machine:
            return {}
        try:
            tree = json.loads(self._file.read_bytes())
            assert tree["machine"] == self._machine
            marks = tree["verified"]
            assert isinstance(marks, dict)
            return marks
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AssertionError):
            return {}

    def _write(self) -> None:
        if self._file is None or not self._machine:
            return
        text = json.dumps({"machine": self._machine, "verified": self._marks}, indent=1) + "\n"
        with contextlib.suppress(OSError):  # a full or read-only disk costs a hash, nothing else
            write_text_atomic(self._file, text)


def _marks(path: Folder) -> Marks:
    """Size and mark of every file, the manifest among them, as JSON gives it back."""
    present = check_sizes(path, read_manifest(path))
    return {name: [entry.size, *entry.mark] for name, entry in sorted(present.items())}


# Which checkpoint to resume from, and which may go.
#
# Both count whole checkpoints only, by checksum: retention that counts torn folders can delete the
# last good one. Rejected: trusting a marker file alone, which says that a save once finished and
# nothing about what the disk did since.

_NOTE = re.compile(r"step-(\d+)\.(pinned|score)")


@dataclass(frozen=True)
class Rules:
    """What is kept; one that no rule wants is deleted."""

    last: int = 2
    """The newest so many."""
    every: int = 0
    """Those of steps divisible by this; 0: none."""
    best: int = 0
    """Those with the so many best scores."""


def latest(folder: F, at_most: int | None = None) -> F | None:
    """The newest whole checkpoint (up to a step); a damaged one is named and passed over.

    For a process that looks alone; the ranks of a job call `latest_together`.
    """
    for path in _newest_first(folder, at_most):
        try:
            verify(path)
        except CheckpointError as error:
            warn(f"{error} Looking for the one before it.")
        else:
            return path
    return None


def latest_together(folder: F, at_most: int | None = None, group: Group = None) -> F | None:
    """`latest` for the ranks of a job, all of which must call it: each byte is hashed once in the
    job, each rank hashing its part of the files, and all get the same answer."""
    # Rank 0's list counts: a shared disk may show another rank an older one.
    names = on_main(lambda: [path.name for path in _newest_first(folder, at_most)], group)
    for path in (folder / name for name in names):
        try:
            verify_together(path, group)
        except CheckpointError as error:
            warn(f"{error} Looking for the one before it.")
        else:
            return path
    return None


def verify_together(path: Folder, group: Group = None) -> None:
    """`verify`, divided among the ranks; what one finds is raised on all."""
    combine_on_main(lambda: verify(path, rank_and_size()), lambda _: None, group)


def retain(folder: F, rules: Rules | int, known: VerifiedCache | None = None) -> None:
    """Delete what no rule keeps; the newest whole checkpoint always stays, and pinned ones do.

    A damaged one is never counted, and goes only when as many whole ones are newer as the first
    rule keeps (one that is pinned or on the grid of the second stays for inspection).
    """
    rules = Rules(last=rules) if isinstance(rules, int) else rules
    known = known or VerifiedCache(folder)
    candidates = list(_newest_first(folder))
    pins = pinned(folder)
    enough = max(rules.last, 1)
    if len(candidates) <= enough:
        return
    newest: list[F] = []
    for path in candidates:
        if len(newest) < enough and known.is_whole(path):
            newest.append(path)
    if len(newest) < enough:
        return  # all were looked at and too few are whole: there is nothing to spare
    _drop_abandoned(folder, folders.step_of(newest[0]) or 0)
    good = _best(candidates, rules, known, scores(folder))
    for path in candidates:
        step = folders.step_of(path) or 0
        on_grid = rules.every > 0 and step % rules.every == 0
        is_new = step >= (folders.step_of(newest[-1]) or 0)
        if not (is_new or on_grid or path in good or step in pins):
            folders.delete(path)
            known.forget(path)
            _note_path(folder, step, "score").unlink(missing_ok=True)


def _drop_abandoned(folder: Folder, step: int) -> None:
    """What a rollback set aside goes when the new course is past it and has enough of its own."""
    for name in describe(folder):
        path = folder / name
        if folders.ABANDONED.fullmatch(name) and (folders.step_of(path) or 0) <= step:
            folders.delete(path)


def _best(
    candidates: list[F], rules: Rules, known: VerifiedCache, scored: dict[int, float]
) -> list[F]:
    """The whole checkpoints with the best scores; of equals the newer."""
    ranked = [path for path in candidates if (folders.step_of(path) or 0) in scored]
    ranked.sort(key=lambda path: scored[folders.step_of(path) or 0])
    good: list[F] = []
    for path in ranked:
        if len(good) < rules.best and known.is_whole(path):
            good.append(path)
    return good


def _newest_first(folder: F, at_most: int | None = None) -> Iterator[F]:
    for path in reversed(folders.list_checkpoints(folder)):
        if at_most is None or (folders.step_of(path) or 0) <= at_most:
            yield path


# Notes about a checkpoint lie next to its folder: nothing may be added to a complete
# checkpoint.


def pin(folder: Folder, step: int) -> None:
    """Never delete the checkpoint of `step`."""
    _write_note(_note_path(folder, step, "pinned"), "")


def unpin(folder: Folder, step: int) -> None:
    """Let the other rules decide again."""
    _note_path(folder, step, "pinned").unlink(missing_ok=True)


def pinned(folder: Folder) -> set[int]:
    """Steps that are pinned."""
    return {step for step, kind, _ in _notes(folder) if kind == "pinned"}


def note_score(folder: Folder, step: int, score: float) -> None:
    """How good the checkpoint of `step` is, for the rule that keeps the best."""
    if math.isfinite(score):  # what is not a number is not better than anything
        _write_note(_note_path(folder, step, "score"), json.dumps(score) + "\n")


def scores(folder: Folder) -> dict[int, float]:
    """Scores by step; one that cannot be read is none."""
    found: dict[int, float] = {}
    for step, kind, path in _notes(folder):
        if kind == "score":
            try:
                found[step] = float(path.read_bytes()[:100])
            except (OSError, ValueError):
                continue
    return {step: score for step, score in found.items() if math.isfinite(score)}


def forget_scores(folder: Folder) -> None:
    """Drop every score: those to come cannot be compared with them."""
    for _, kind, path in list(_notes(folder)):
        if kind == "score":
            path.unlink(missing_ok=True)


def abandon_after(folder: F, step: int) -> list[F]:
    """Take checkpoints after `step` off the list: a rollback takes another course from there, and
    must not find the old course's checkpoint under its own step. `retain` deletes them when the new
    course has come as far."""
    gone = [path for path in _newest_first(folder) if (folders.step_of(path) or 0) > step]
    for path in gone:
        _note_path(folder, folders.step_of(path) or 0, "score").unlink(missing_ok=True)
    return [folders.set_aside(path, "abandoned") for path in gone]


def _notes(folder: Folder) -> Iterator[tuple[int, str, Folder]]:
    if folder.is_dir():
        for name, entry in describe(folder).items():
            if entry.kind == "file" and (match := _NOTE.fullmatch(name)):
                yield int(match[1]), match[2], folder / name


def _note_path(folder: Folder, step: int, kind: str) -> Folder:
    return folder / f"step-{step:08d}.{kind}"


def _write_note(path: Folder, text: str) -> None:
    if isinstance(path, RemotePath):
        path.write_bytes(text.encode())
    else:
        write_text_atomic(path, text)
