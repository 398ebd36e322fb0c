"""Which checkpoints were verified on this machine, so that keeping rules need not hash them again.

A checkpoint is read back right after it was written. As long as its files keep their size, times
and inode, nobody has written to them since, and to decide which old ones may go that is enough; a
resume hashes what it loads in any case. The memory stands beside the folder of checkpoints and is
believed only by the machine that wrote it, for the disk it was written for: a copy has other inodes
and other times, and is hashed once.
"""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

from foundling.checkpoint.remote import Folder
from foundling.checkpoint.seal import check_sizes, read_seal, verify
from foundling.config import CheckpointError
from foundling.runtime import write_text_atomic

Marks = dict[str, list[Any]]


class Known:
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
    present = check_sizes(path, read_seal(path))
    return {name: [entry.size, *entry.mark] for name, entry in sorted(present.items())}
