"""Which checkpoint to resume from, and which may go.

Both count whole checkpoints only, by checksum: retention that counts torn folders can delete the
last good one. Rejected: trusting a marker file alone, which says that a save once finished and
nothing about what the disk did since.
"""

from pathlib import Path

from foundling.checkpoint import folders
from foundling.checkpoint.seal import MANIFEST, is_whole, verify
from foundling.config import CheckpointError
from foundling.runtime import warn


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint; a damaged one is named in a warning and passed over."""
    for path in reversed(folders.list_checkpoints(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            warn(f"{error} Looking for the one before it.")
        else:
            return path
    return None


def retain(folder: Path, keep: int) -> None:
    """Delete what is older than the newest `keep` whole checkpoints; at least one is kept.

    A damaged one is never counted, and goes only when `keep` whole ones are newer.
    """
    keep = max(keep, 1)
    candidates = list(reversed(folders.list_checkpoints(folder)))
    if len(candidates) <= keep:
        return
    whole = 0
    for path in candidates:
        if whole == keep:
            folders.delete(path, MANIFEST)
        elif is_whole(path):
            whole += 1
