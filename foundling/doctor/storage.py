"""Checks of storage: room and speed of the disk, data sets and checkpoints that are stored."""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from foundling.checkpoint.convert.detect import kind_of, open_source
from foundling.checkpoint.folders import list_checkpoints
from foundling.checkpoint.manager import TIMEOUT_S
from foundling.checkpoint.paths import CheckpointEntry, checkpoint_root, examine, find_checkpoint
from foundling.checkpoint.remote import Folder, RemotePath
from foundling.config.errors import UserError
from foundling.config.run import RunConfig
from foundling.data.dataset import DataSet
from foundling.doctor.checks import (
    CheckResult,
    DoctorRequest,
    Notes,
    failed,
    passed,
    refused,
    warned,
)
from foundling.plan.forecast import forecast
from foundling.plan.horizon import plan_horizon
from foundling.plan.layout import counted_ranks
from foundling.plan.supply import check_supply, epochs_needed, known_sizes
from foundling.runtime.console import counted, size
from foundling.runtime.run_dir import RunDir
from foundling.train.setup import open_data

# Does what the run will write fit on its disk, and how fast does the disk take it.
#
# Against the plan: the size of a checkpoint and the rules by which they are kept are known before
# the first step, so a disk that would fill up on the third night is found now.

PIECE = 1 << 20
LEAST, MOST = 8 << 20, 256 << 20
"""Bytes written to measure the rate."""
SECONDS = 2.0
TIGHT = 1.2
"""Times what is needed; less is a warning."""
FreeOf = Callable[[Path], int]
"""Bytes that this user may still write to a folder."""


def check_disk(asked: DoctorRequest, notes: Notes) -> Iterator[CheckResult]:
    """Room first, so that a full disk is not written to; then the rate."""
    config = asked.run_config()
    root = _root(asked, config)
    if isinstance(root, RemotePath):
        if notes.begins(f"writing to {root}"):
            yield _remote(root)
        return
    folder = existing(root)
    if notes.begins(f"room on {folder}"):
        yield room_line(config, root, lambda folder: shutil.disk_usage(folder).free)
    if notes.begins(f"writing to {folder}"):
        yield from _written(config, folder, asked)


def _root(asked: DoctorRequest, config: RunConfig | None) -> Folder:
    """Where checkpoints would go; without a run, the folder that the command was given in."""
    run = RunDir(asked.run or ".")
    if config is None:
        return run.path
    return checkpoint_root(run.checkpoints, config.checkpoint)


def existing(path: Path) -> Path:
    """The nearest folder above that is there: a run directory is made when it begins."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def needed_bytes(config: RunConfig, root: Path) -> tuple[int, int, int]:
    """Bytes that checkpoints will still take, of how many checkpoints, of what size each."""
    config, sizes = known_sizes(config)
    plan = forecast(config, counted_ranks(config.parallel, None, None), sizes)
    rules, each = config.checkpoint, plan.checkpoint_bytes
    # Those that are kept, the best ones, and one that is being written.
    count = rules.keep + rules.keep_best + 1
    if rules.keep_every and plan.horizon:
        count += plan.horizon.steps // rules.keep_every
    already = len(list_checkpoints(root)) if root.is_dir() else 0
    return max(0, count - already) * each, count, each


def room_line(config: RunConfig | None, root: Path, free: FreeOf) -> CheckResult:
    """Free bytes against what the plan says."""
    folder = existing(root)
    there = free(folder)
    if config is None:
        return passed("disk", f"{size(there)} free in {folder}", {"free": there})
    if not config.train.horizon and config.checkpoint.keep_every:
        config = config.replace(checkpoint={"keep_every": 0})
    try:
        needed, count, each = needed_bytes(config, root)
    except UserError as error:
        return warned(
            "disk", f"{size(there)} free in {folder}; what is needed is not known: {error}"
        )
    text = (
        f"{size(there)} free in {folder}, and {count} checkpoints of {size(each)} need"
        f" {size(needed)} more"
    )
    facts = {"free": there, "needed": needed, "checkpoint": each}
    if there < needed:
        return failed(
            "disk",
            f"{text}; make room, lower checkpoint.keep or keep_best, raise keep_every where it is"
            " set, or set checkpoint.folder to another disk.",
            facts,
        )
    if there < TIGHT * needed:
        return warned("disk", f"{text}; that leaves little for logs: make some room.", facts)
    return passed("disk", text, facts)


def _written(config: RunConfig | None, folder: Path, asked: DoctorRequest) -> Iterator[CheckResult]:
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
    each = 0
    if config is not None:
        with contextlib.suppress(UserError):  # the room's line has told it
            _, _, each = needed_bytes(config, folder)
    yield rate_line(f"{size(rate)} a second written to {folder}, on disk", rate, each)


def rate_line(text: str, rate: float, each: int) -> CheckResult:
    """How long a checkpoint of `each` bytes (0: not known) takes at this rate, against the time
    that ranks wait for one."""
    if not each:
        return passed("disk", text, {"rate": rate})
    seconds = each / rate
    text = f"{text}: a checkpoint in {seconds:,.1f} s from one process"
    if seconds > TIMEOUT_S:
        return warned(
            "disk",
            f"{text}, and ranks wait {TIMEOUT_S} s for a save; set checkpoint.folder to a faster"
            " disk.",
            {"rate": rate},
        )
    return passed("disk", text, {"rate": rate})


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


def _remote(root: RemotePath) -> CheckResult:
    """A small object there and back; a store has no room that could be asked for."""
    place = root / f"doctor-{uuid.uuid4().hex}"
    content = os.urandom(PIECE)
    try:
        began = time.perf_counter()
        place.write_bytes(content)
        seconds = time.perf_counter() - began
        same = place.read_bytes() == content
        place.unlink()
    except Exception as error:
        return failed("disk", f"{root} cannot be written: {error}; see its address and your keys.")
    if not same:
        return failed("disk", f"{root} gave back other bytes; set another checkpoint.folder.")
    return passed("disk", f"{root} takes and gives back a megabyte in {seconds:.2f} s")


# Is what the run reads there and whole: its data sets, its checkpoints, the run it starts from.

HASH_RATE = 300e6
"""Bytes a second that can be counted on, disk and checksum together."""


def check_stored(asked: DoctorRequest, notes: Notes) -> Iterator[CheckResult]:
    """Data, then checkpoints, then the parent."""
    config = asked.run_config()
    if config is None:
        return
    if notes.begins("data"):
        yield from data_lines(config, thorough=asked.thorough)
    if not asked.is_main:
        return  # one process reads what all nodes share
    if asked.run and notes.begins(f"checkpoints of {asked.run}"):
        root = checkpoint_root(RunDir(asked.run).checkpoints, config.checkpoint)
        budget = float("inf") if asked.thorough else asked.limit_s / 2 * HASH_RATE
        yield from checkpoint_lines(root, budget, every=asked.thorough)
    start = config.train.start
    if start and notes.begins(f"parent {start}"):
        yield parent_line(start)


def data_lines(config: RunConfig, *, thorough: bool) -> Iterator[CheckResult]:
    """Each data set of the mixture, and whether they are enough."""
    if not config.data.sources:
        yield warned("data", "data.sources is empty; name built data sets there before you train.")
        return
    try:
        datasets = open_data(config).datasets
    except UserError as error:
        yield refused("data", error)
        return
    for name, dataset in datasets.items():
        yield _data_line(name, dataset, thorough)
    yield from _enough(config)


def _data_line(name: str, dataset: DataSet, thorough: bool) -> CheckResult:
    manifest = dataset.manifest
    total = sum(info.file_bytes for info in (*manifest.train, *manifest.val))
    text = f"{name}: {manifest.train_tokens:,} tokens in {counted(len(manifest.train), 'shard')}"
    if not thorough:
        return passed("data", f"{text}, every size right (--thorough hashes {size(total)})")
    try:
        dataset.verify()
    except UserError as error:
        return refused("data", error)
    return passed("data", f"{text}, every checksum right")


def _enough(config: RunConfig) -> Iterator[CheckResult]:
    if not config.train.horizon:
        yield warned("data", "no horizon is set; give train.horizon, such as 20B tokens.")
        return
    try:
        config, sizes = known_sizes(config)
        assert sizes is not None
        horizon = plan_horizon(config, counted_ranks(config.parallel, None, None), sizes)
        epochs = epochs_needed(horizon, sizes)
        check_supply(config, horizon, sizes)
    except UserError as error:
        yield refused("data", error)
        return
    text = ", ".join(f"{name} {times:.2f} times" for name, times in epochs.items())
    yield passed("data", f"enough for {horizon.steps:,} steps: {text}")


def checkpoint_lines(root: Folder, budget: float, *, every: bool = False) -> Iterator[CheckResult]:
    """The newest checkpoint and, where it is damaged, whether there is one to go back to.

    Bytes are compared as long as they are fewer than `budget`; names and sizes always.
    """
    found = list_checkpoints(root) if isinstance(root, RemotePath) or root.is_dir() else []
    if not found:
        yield passed("checkpoints", f"none in {root} yet")
        return
    seen = []
    for path in reversed(found):
        entry = _seen(path, budget)
        seen.append(entry)
        if entry.state != "damaged" and not every:
            break
    good = [entry for entry in seen if entry.state != "damaged"]
    for entry in seen:
        if entry.state != "damaged":
            yield _good_line(entry)
        elif good:
            yield warned(
                "checkpoints",
                f"{entry.reason} Training would go on from step"
                f" {max(one.step for one in good)}; bring the newer one back if you can.",
            )
    if not good:
        first = seen[0].reason
        yield failed(
            "checkpoints",
            f"none of the {len(seen)} in {root} is whole ({first.rstrip('.')}); restore one, or"
            " give another --run.",
        )


def _seen(path: Folder, budget: float) -> CheckpointEntry:
    quick = examine(path, thorough=False)
    if quick.state == "damaged" or quick.bytes > budget:
        return quick
    return examine(path, thorough=True)


def _good_line(entry: CheckpointEntry) -> CheckResult:
    text = f"step {entry.step} of {entry.path}"
    if entry.state == "whole":
        return passed("checkpoints", f"{text}: every byte agrees with its checksum")
    return passed(
        "checkpoints",
        f"{text}: names and sizes are right; --thorough hashes its {size(entry.bytes)}",
    )


def parent_line(start: str) -> CheckResult:
    """Whether the run that this one starts from can be read."""
    try:
        if kind_of(start) != "native":
            source = open_source(start)
            return passed(
                "parent", f"{start}: {len(source.places)} tensors are there ({source.kind})"
            )
        run, checkpoint = find_checkpoint(start)
    except UserError as error:
        return refused("parent", error)
    return passed("parent", f"{run.path}: {Path(str(checkpoint)).name} is whole")
