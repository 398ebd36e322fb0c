"""Which checkpoint to resume from, which may be deleted, and which were verified already."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator

from foundling.checkpoint import folders
from foundling.checkpoint.manifest import check_sizes, read_manifest, verify
from foundling.checkpoint.remote import F, Folder, FolderEntry, describe, write_text
from foundling.config.errors import CheckpointError
from foundling.config.run import CheckpointConfig
from foundling.runtime.console import warn
from foundling.runtime.dist import Group, combine_on_main, on_main, rank_and_size


class VerifiedCache:
    """The checkpoints that this process has verified, so that keeping rules do not hash them with
    every save. While its files keep their size, times and inode, that is enough to decide which
    old ones may go; a resume hashes what it loads in any case."""

    def __init__(self) -> None:
        self._marks: dict[Folder, dict[str, FolderEntry]] = {}

    def note(self, path: Folder) -> None:
        """This checkpoint was verified just now."""
        self._marks[path] = check_sizes(path, read_manifest(path))

    def is_whole(self, path: Folder) -> bool:
        """Whether the checkpoint verifies; hashed only if it is not as it was when it last did."""
        try:
            if self._marks.get(path) != check_sizes(path, read_manifest(path)):
                verify(path)
                self.note(path)
        except (CheckpointError, OSError):
            return False
        return True


# Which checkpoint to resume from, and which may go.
#
# Both count whole checkpoints only, by checksum: retention that counts torn folders can delete the
# last good one. Rejected: trusting a marker file alone, which says that a save once finished and
# nothing about what the disk did since.

_NOTE = re.compile(r"step-(\d+)\.(pinned|score)")


def latest(folder: F, at_most: int | None = None) -> F | None:
    """The newest whole checkpoint (up to a step); a damaged one is named and passed over.

    For a process that looks alone; the ranks of a job call `latest_together`.
    """
    return _first_whole(_newest_first(folder, at_most), verify)


def latest_together(folder: F, at_most: int | None = None, group: Group = None) -> F | None:
    """`latest` for the ranks of a job, all of which must call it: each byte is hashed once in the
    job, each rank hashing its part of the files, and all get the same answer."""
    # Rank 0's list counts: a shared disk may show another rank an older one.
    names = on_main(lambda: [path.name for path in _newest_first(folder, at_most)], group)
    return _first_whole((folder / name for name in names), lambda p: verify_together(p, group))


def _first_whole(paths: Iterable[F], check: Callable[[Folder], object]) -> F | None:
    for path in paths:
        try:
            check(path)
        except CheckpointError as error:
            warn(f"{error} Looking for the one before it.")
        else:
            return path
    return None


def verify_together(path: Folder, group: Group = None) -> None:
    """`verify`, divided among the ranks; what one finds is raised on all."""
    combine_on_main(lambda: verify(path, rank_and_size()), lambda _: None, group)


def retain(folder: F, config: CheckpointConfig, known: VerifiedCache | None = None) -> None:
    """Delete what no rule keeps; the newest whole checkpoint always stays, and pinned ones do.

    A damaged one is never counted, and goes only when `keep` whole ones are newer (one that is
    pinned or on the grid of `keep_every` stays for inspection).
    """
    known = known or VerifiedCache()
    candidates = list(_newest_first(folder))
    pins = pinned(folder)
    if len(candidates) <= config.keep:
        return
    newest: list[F] = []
    for path in candidates:
        if len(newest) < config.keep and known.is_whole(path):
            newest.append(path)
    if len(newest) < config.keep:
        return  # all were looked at and too few are whole: there is nothing to spare
    _drop_abandoned(folder, folders.step_of(newest[0]) or 0)
    good = _best(candidates, config.keep_best, known, scores(folder))
    for path in candidates:
        step = folders.step_of(path) or 0
        on_grid = config.keep_every > 0 and step % config.keep_every == 0
        is_new = step >= (folders.step_of(newest[-1]) or 0)
        if not (is_new or on_grid or path in good or step in pins):
            folders.delete(path)
            _note_path(folder, step, "score").unlink(missing_ok=True)


def _drop_abandoned(folder: Folder, step: int) -> None:
    """What a rollback set aside goes when the new course is past it and has enough of its own."""
    for name in describe(folder):
        path = folder / name
        if folders.ABANDONED.fullmatch(name) and (folders.step_of(path) or 0) <= step:
            folders.delete(path)


def _best(
    candidates: list[F], count: int, known: VerifiedCache, scored: dict[int, float]
) -> list[F]:
    """The whole checkpoints with the best scores; of equals the newer."""
    ranked = [path for path in candidates if (folders.step_of(path) or 0) in scored]
    ranked.sort(key=lambda path: scored[folders.step_of(path) or 0])
    good: list[F] = []
    for path in ranked:
        if len(good) < count and known.is_whole(path):
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
    write_text(_note_path(folder, step, "pinned"), "")


def unpin(folder: Folder, step: int) -> None:
    """Let the other rules decide again."""
    _note_path(folder, step, "pinned").unlink(missing_ok=True)


def pinned(folder: Folder) -> set[int]:
    """Steps that are pinned."""
    return {step for step, kind, _ in _notes(folder) if kind == "pinned"}


def note_score(folder: Folder, step: int, score: float) -> None:
    """How good the checkpoint of `step` is, for the rule that keeps the best."""
    if math.isfinite(score):  # what is not a number is not better than anything
        write_text(_note_path(folder, step, "score"), json.dumps(score) + "\n")


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
