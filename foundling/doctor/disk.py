"""Does what the run will write fit on its disk, and how fast does the disk take it.

Against the plan: the size of a checkpoint and the rules by which they are kept are known before the
first step, so a disk that would fill up on the third night is found now.
"""

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from foundling.checkpoint import Folder, RemotePath, checkpoint_home, list_checkpoints
from foundling.config.checks import horizons
from foundling.config.errors import UserError
from foundling.config.sections import RunConfig
from foundling.doctor.asked import Asked
from foundling.doctor.lines import Line, failed, passed, warned
from foundling.doctor.task import Notes
from foundling.plan import forecast, known_sizes
from foundling.plan.words import size
from foundling.runtime.rundir import RunDir

PIECE = 1 << 20
LEAST, MOST = 8 << 20, 256 << 20
"""Bytes written to measure the rate."""
SECONDS = 2.0
TIGHT = 1.2
"""Times what is needed; less is told."""
FreeOf = Callable[[Path], int]


def free_of(folder: Path) -> int:
    """Bytes that this user may still write there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def check(asked: Asked, notes: Notes) -> Iterator[Line]:
    """Room first, so that a full disk is not written to; then the rate."""
    config = asked.run_config()
    home = _home(asked, config)
    if isinstance(home, RemotePath):
        if notes.begins(f"writing to {home}"):
            yield _remote(home)
        return
    folder = existing(home)
    if notes.begins(f"room on {folder}"):
        yield room_line(config, home, free_of)
    if notes.begins(f"writing to {folder}"):
        yield from _written(config, folder, asked)


def _home(asked: Asked, config: RunConfig | None) -> Folder:
    """Where checkpoints would go; without a run, the folder that the command was given in."""
    run = RunDir(asked.run or asked.scratch or ".")
    if config is None:
        return run.path
    return checkpoint_home(run.checkpoints, config.checkpoint)


def existing(path: Path) -> Path:
    """The nearest folder above that is there: a run directory is made when it begins."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def needed_bytes(config: RunConfig, home: Path) -> tuple[int, int, int]:
    """Bytes that checkpoints will still take, of how many checkpoints, of what size each."""
    config, sizes = known_sizes(config)
    plan = forecast(config, _ranks(config), sizes)
    rules, each = config.checkpoint, plan.checkpoint_bytes
    # Those that are kept, the best ones, and one that is being written.
    count = rules.keep + rules.keep_best + 1
    if rules.keep_every and plan.horizon:
        count += plan.horizon.steps // rules.keep_every
    already = len(list_checkpoints(home)) if home.is_dir() else 0
    return max(0, count - already) * each, count, each


def _ranks(config: RunConfig) -> int:
    return (config.parallel.replicate or 1) * config.parallel.shard


def room_line(config: RunConfig | None, home: Path, free: FreeOf) -> Line:
    """Free bytes against what the plan says."""
    folder = existing(home)
    there = free(folder)
    if config is None:
        return passed("disk", f"{size(there)} free in {folder}", {"free": there})
    if not horizons(config.train) and config.checkpoint.keep_every:
        config = _without_grid(config)
    try:
        needed, count, each = needed_bytes(config, home)
    except UserError as error:
        return warned(
            "disk", f"{size(there)} free in {folder}; what is needed is not known: {error}"
        )
    told = (
        f"{size(there)} free in {folder}, and {count} checkpoints of {size(each)} need"
        f" {size(needed)} more"
    )
    facts = {"free": there, "needed": needed, "checkpoint": each}
    if there < needed:
        return failed(
            "disk",
            f"{told}; make room, lower checkpoint.keep or keep_best, raise keep_every where it is"
            " set, or set checkpoint.folder to another disk.",
            facts,
        )
    if there < TIGHT * needed:
        return warned("disk", f"{told}; that leaves little for logs: make some room.", facts)
    return passed("disk", told, facts)


def _without_grid(config: RunConfig) -> RunConfig:
    from dataclasses import replace

    return replace(config, checkpoint=replace(config.checkpoint, keep_every=0))


def _written(config: RunConfig | None, folder: Path, asked: Asked) -> Iterator[Line]:
    try:
        rate = write_rate(folder)
    except OSError as error:
        yield failed(
            "disk",
            f"{folder} cannot be written: {error.strerror}; give another --run, or make it"
            " writable.",
            of_node=bool(asked.run),
        )
        return
    told = f"{size(rate)} a second written to {folder}, on disk"
    if config is None:
        yield passed("disk", told, {"rate": rate})
        return
    try:
        _, _, each = needed_bytes(config, folder)
    except UserError:
        yield passed("disk", told, {"rate": rate})
        return
    yield rate_line(told, rate, each, config.checkpoint.timeout_s)


def rate_line(told: str, rate: float, each: int, timeout_s: float) -> Line:
    """How long a checkpoint takes at this rate, against the time that ranks wait for one."""
    seconds = each / rate
    told = f"{told}: a checkpoint in {seconds:,.1f} s from one process"
    if seconds > timeout_s:
        return warned(
            "disk",
            f"{told}, and ranks wait {timeout_s:g} s for a save; raise checkpoint.timeout_s, or set"
            " checkpoint.folder to a faster disk.",
            {"rate": rate},
        )
    return passed("disk", told, {"rate": rate})


def write_rate(folder: Path, most: int = MOST) -> float:
    """Bytes a second, the sync to the disk included; leaves nothing behind."""
    most = max(PIECE, min(most, shutil.disk_usage(folder).free // 20))
    piece = os.urandom(PIECE)  # a disk that compresses would look fast on zeros
    path = folder / f".foundling-doctor-{uuid.uuid4().hex}"
    try:
        with open(path, "xb") as file:
            written, began = 0, time.perf_counter()
            while written < most and (written < LEAST or time.perf_counter() - began < SECONDS):
                file.write(piece)
                written += PIECE
            file.flush()
            os.fsync(file.fileno())
            return written / max(time.perf_counter() - began, 1e-9)
    finally:
        path.unlink(missing_ok=True)


def _remote(home: RemotePath) -> Line:
    """A small object there and back; a store has no room that could be asked for."""
    place = home / f"doctor-{uuid.uuid4().hex}"
    content = os.urandom(PIECE)
    try:
        began = time.perf_counter()
        place.write_bytes(content)
        seconds = time.perf_counter() - began
        same = place.read_bytes() == content
        place.unlink()
    except Exception as error:
        return failed("disk", f"{home} cannot be written: {error}; see its address and your keys.")
    if not same:
        return failed("disk", f"{home} gave back other bytes; set another checkpoint.folder.")
    return passed("disk", f"{home} takes and gives back a megabyte in {seconds:.2f} s")
