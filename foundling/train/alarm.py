"""An alarm that one rank raises and every rank answers, through files that all of them see.

The alarm is a file that only one can make, with the name of a folder in it; every rank leaves its
evidence there, and when the one that raised it has told what it found, all of them end. An alarm of
an earlier life of the job is known by its age: it is older than our own first beat, by the clock of
the disk that holds both.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from foundling.runtime.dist import flight_record
from foundling.runtime.flights import flight_path
from foundling.runtime.stacks import dump_threads

DUMP_S = 3.0
"""Patience with the flight recorder: it asks the driver, which may be what hangs."""


@dataclass(frozen=True)
class Alarm:
    """What an alarm says."""

    folder: Path
    """Where the evidence goes."""
    told: str = ""
    """What was found; empty while it is being looked for."""


class Alarms:
    """The one alarm that a job can have."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._path = folder / "alarm.json"
        self._born_ns = 0

    def begin(self, first_beat: Path) -> None:
        """Know what is older than this life."""
        self._born_ns = first_beat.stat().st_mtime_ns

    def current(self) -> Alarm | None:
        """The alarm that is raised now."""
        try:
            if self._path.stat().st_mtime_ns < self._born_ns:
                return None
            said = json.loads(self._path.read_text())
            return Alarm(self._folder / str(said["folder"]), str(said["told"]))
        except (OSError, ValueError, KeyError):
            return None

    def claim(self) -> Alarm | None:
        """Raise it; None where another rank came first."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_mtime_ns < self._born_ns:
                self._path.unlink()
        name = f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{self._rank}"
        (self._folder / name).mkdir(exist_ok=True)
        draft = self._draft(name, "")
        try:
            os.link(draft, self._path)  # whole and only once, which creating and writing is not
        except FileExistsError:
            (self._folder / name).rmdir()
            return None
        finally:
            draft.unlink(missing_ok=True)
        return Alarm(self._folder / name)

    def tell(self, alarm: Alarm, told: str) -> None:
        """Say what was found: everybody ends."""
        os.replace(self._draft(alarm.folder.name, told), self._path)

    def withdraw(self, alarm: Alarm) -> None:
        """It was none."""
        self._path.unlink(missing_ok=True)
        shutil.rmtree(alarm.folder, ignore_errors=True)

    def leave_evidence(self, alarm: Alarm) -> None:
        """Every thread's stack, and what torch remembers of its collectives."""
        dump_threads(alarm.folder / f"rank-{self._rank:05d}.stacks")

        def keep() -> None:
            for name, data in flight_record().items():
                with contextlib.suppress(OSError):
                    flight_path(alarm.folder, self._rank, name).write_bytes(data)

        helper = threading.Thread(target=keep, name="flight recorder", daemon=True)
        helper.start()
        helper.join(timeout=DUMP_S)

    def _draft(self, name: str, told: str) -> Path:
        draft = self._folder / f"alarm.tmp-{self._rank}-{os.getpid()}"
        draft.write_text(json.dumps({"folder": name, "told": told}))
        return draft
