"""RunDir: the files of one run, how they are written, and JSON lines that outlive a kill or a full
disk."""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from foundling.config.errors import RunError
from foundling.runtime.console import warn
from foundling.runtime.files import contents_at, fsync_dir, write_text_atomic

# config.yaml     the resolved config; can be given back as TARGET
# run.json        facts: chat, status, parent, versions, machine, choices, data segments, plan
# metrics.jsonl   one line a step, each step once, with what it read by source; cut at a resume
# events.jsonl    everything that happened, measurements too; never cut (see runtime/run_reader)
# evals/          step-N/: every example that was scored
# tokenizer/      the tokenizer the run was trained with
# checkpoints/    step-00000100/ and so on, step-N.score, step-N.pinned
# logs/           output of every process, by start; watchdog/ has the heartbeats
# tb/             TensorBoard
# report.html     written by `foundling report`
# lock            who trains here
# run.id          the run's number, where checkpoints are kept elsewhere
# tried.json      evaluations that failed, and how often each was tried
# bad_nodes       nodes that failed their check

RUN_SCHEMA = 2
_OF_A_START = ("lock", "lock.*", "logs", "bad_nodes", "doctor")
"""What launchers, a preflight and the lock leave in a folder before the run writes anything."""
_OF_A_RUN = (
    *("config.yaml", "run.json", "metrics.jsonl", "events.jsonl", "run.id", "tried.json"),
    *("tokenizer", "checkpoints", "tb", "evals", "report.html"),
    *("oom-rank*.pickle", "wandb", "trash.json"),
)
"""What else stands in a run directory; some of it before run.json, when a start was killed."""


def split_step(text: str | Path) -> tuple[str, int] | None:
    """Run and step of RUN@STEP; None of another text, and of a path that is there by that name."""
    found = re.fullmatch(r"(.+)@(\d+)", str(text))
    return (found[1], int(found[2])) if found and not Path(text).exists() else None


class RunDir:
    """Paths and small files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.info_path = self.path / "run.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.tokenizer = self.path / "tokenizer"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tb"
        self.report_path = self.path / "report.html"
        self._events: LineFile | None = None

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.info_path.is_file()

    def require(self) -> "RunDir":
        """This run directory, or a sentence saying that it is none."""
        if self.exists:
            return self
        if not self.path.exists():
            raise RunError(f"{self.path} does not exist; `foundling runs list` shows your runs.")
        if (self.path / "manifest.json").is_file():
            raise RunError(
                f"{self.path} is a data set and not a run; see `foundling data inspect`."
            )
        if self.path.is_file():
            kind = contents_at(self.path) or "empty"
            raise RunError(f"{self.path} is not a run but a file ({kind}); give a run directory.")
        below = sorted(path.parent.name for path in self.path.glob("*/run.json"))
        hint = f"; inside it are {', '.join(below)}" if below else ""
        raise RunError(f"{self.path} is not a run: it holds no run.json{hint}.")

    def refuse_other_files(self) -> None:
        """A run begins in a folder that is new or empty, is a run, or holds what a start left that
        was cut off before run.json: anything else would be overwritten."""
        if self.exists:
            self.read_info()  # another tool's run.json is refused
        elif others := self.other_files():
            shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
            raise RunError(
                f"{self.path} is no run and holds {shown}; give --run a new or an empty folder."
            )

    def other_files(self) -> list[str]:
        """Names in here that are not of a run. Where no start of ours has been, config.yaml or
        metrics.jsonl are another program's too."""
        if not self.path.is_dir():
            return []
        names = sorted(path.name for path in self.path.iterdir())
        known = _OF_A_START + (_OF_A_RUN if {"lock", "run.json"} & {*names} else ())
        return [n for n in names if not any(fnmatch(n.split(".tmp-")[0], k) for k in known)]

    def read_info(self) -> dict[str, Any]:
        """run.json: what kind of run this is and how far it has come."""
        self.require()
        try:
            info: dict[str, Any] = json.loads(self.info_path.read_text())
            info.get("schema")
        except (ValueError, AttributeError, RecursionError):
            raise RunError(f"{self.info_path} is damaged; bring it back from a copy.") from None
        if info.get("schema") != RUN_SCHEMA:
            raise RunError(
                f"{self.info_path} has schema {info.get('schema')} and this version reads"
                f" {RUN_SCHEMA}; use the version of foundling that wrote it."
            )
        return info

    def write_info(self, info: dict[str, Any]) -> None:
        """Replace run.json."""
        write_text_atomic(
            self.info_path, json.dumps({"schema": RUN_SCHEMA, **info}, indent=2) + "\n"
        )

    def update_info(self, **fields: Any) -> None:
        """Change some fields of run.json and keep the rest."""
        self.write_info({**self.read_info(), **fields})

    def parent(self) -> "RunDir | None":
        """The run whose weights this one started from, if it is still there; runs that were moved
        together are found in one folder."""
        stated = self.read_info().get("parent")
        if not stated:
            return None
        path, beside = Path(stated["path"]), self.path.resolve().parent
        for place in (path, beside / path, beside / path.name):
            run = RunDir(place)
            if run.exists and place.resolve() != self.path.resolve():
                return run
        return None

    def event(self, kind: str, **fields: Any) -> None:
        """Record that something happened to the run, with the time of day. A kill can tear at most
        this line, and readers skip a torn one; where the disk fails it waits: nothing that is
        written down ends a run."""
        if self._events is None:
            self._events = LineFile(self.events_path)
        self._events.append({"time": time.time(), "event": kind, **fields})

    def sync(self) -> OSError | None:
        """Bring every event to the disk: no checkpoint may be newer than they are. What is in the
        way, if anything is."""
        if self._events is None or self._events.sync():
            return None
        return self._events.error

    def durable_event(self, kind: str, **fields: Any) -> None:
        """Record what is going to be acted on: it is on the disk afterwards, or nothing is done."""
        self.event(kind, **fields)
        if (error := self.sync()) is not None:
            raise error

    def close(self) -> None:
        """Nothing is recorded for now."""
        self.sync()
        if self._events is not None:
            self._events.close()
            self._events = None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file; one that is torn by a kill or damaged is left out."""
    return [line for line in each_line(path) if line is not None]


def each_line(path: Path, last_bytes: int = 0) -> Iterator[dict[str, Any] | None]:
    """The same one after the other, and None for each damaged line; those of the last bytes only if
    so many are counted. The last one is torn if no newline ends it."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        if 0 < last_bytes < os.fstat(file.fileno()).st_size:
            file.seek(-last_bytes, os.SEEK_END)
            file.readline()  # its beginning is cut off
        for raw in file:
            line = _parsed(raw)
            if line is not None or (raw.endswith(b"\n") and raw.strip()):
                yield line


def _parsed(line: bytes) -> dict[str, Any] | None:
    """An object from one line of JSON; None if it is none."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):  # nested as deep as only damage is
        return None
    return found if isinstance(found, dict) else None


def cut_lines(path: Path, step: int) -> None:
    """Cut off the lines of later steps and one that a kill has torn, in place: who appends to the
    file goes on. They are going to be written again, and must not stand there twice."""
    if not path.is_file():
        return
    end = 0
    with open(path, "rb+") as file:
        for raw in file:
            line = _parsed(raw) or {}  # a damaged one stays in the file
            at = line.get("step")
            if not raw.endswith(b"\n") or (isinstance(at, int) and at > step):
                break
            end += len(raw)
        file.truncate(end)
        os.fsync(file.fileno())


# A file that grows by lines and outlives a full disk.
#
# What cannot be written is kept in memory, and comes first when there is room again: no line is
# lost and none is torn. A checkpoint must not be newer than its lines, so `sync` says whether all
# of them are safe. Written without Python's buffer, which would lose track of what has reached the
# file.


class LineFile:
    """A file of JSON lines that are appended, also while the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        """Opened at the first line: where that fails, the line waits."""
        self.error: OSError | None = None
        """Why the last line or sync failed; None if it did not."""
        self._waiting = b""
        """What could not be written yet; may begin inside a line whose first part is there."""
        self._unsafe = b""
        """What was written and not forced to the disk yet."""
        self._safe = 0
        self._is_reported = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line; if there is no room it is kept for later, with one warning."""
        self._waiting += (json.dumps(line) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            self._report(error)

    def sync(self) -> bool:
        """Bring every line to the disk; whether that is so."""
        if not self._unsafe and not self._waiting:
            return True
        try:
            self._write()
            os.fsync(self._file)
            if not self._safe:  # perhaps new: its name must be on the disk too
                fsync_dir(self._path.parent)
        except OSError as error:
            self._report(error)
            self._take_back()
            return False
        self._safe, self._unsafe, self._is_reported = os.fstat(self._file).st_size, b"", False
        self.error = None
        return True

    def resume_after_cut(self) -> None:
        """Continue after the file was cut from outside: forget the lines that came after."""
        self._safe = os.fstat(self._file).st_size if self._file >= 0 else 0
        self._waiting = self._unsafe = b""

    def _open(self) -> None:
        """Find the file's end; a line that a kill has torn gets one of its own."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._safe = os.fstat(self._file).st_size
        if self._safe and os.pread(self._file, 1, self._safe - 1) != b"\n":
            self._waiting = b"\n" + self._waiting

    def _write(self) -> None:
        if self._waiting and self._file < 0:
            self._open()
        while self._waiting:
            count = os.write(self._file, self._waiting)
            self._unsafe += self._waiting[:count]
            self._waiting = self._waiting[count:]

    def _take_back(self) -> None:
        """After a failed fsync it is unknown what the disk has, and the next one may not fail:
        write everything since the last good one anew."""
        try:
            os.ftruncate(self._file, self._safe)
        except OSError:
            return
        self._waiting, self._unsafe = self._unsafe + self._waiting, b""

    def _report(self, error: OSError) -> None:
        self.error = error
        if not self._is_reported:
            self._is_reported = True
            warn(
                f"{self._path} cannot be written ({error.strerror}); its lines are kept in memory,"
                " and nothing is saved until there is room again."
            )

    def close(self) -> None:
        """The end of it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> "LineFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


COUNTS = ("units", "positions", "tokens", "targets")
