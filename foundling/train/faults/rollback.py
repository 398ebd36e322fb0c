"""What is done about a refused step, and going back to a good checkpoint in the middle of a run.

Going back, everything that a step changes comes from the checkpoint, as if the steps since had not
been; metrics.jsonl is cut in place, under the handle that writes it, and readers of events.jsonl
forget what was measured since. A
checkpoint that lies ahead of the one gone back to belongs to a course that is given up: it is put
aside, so that a restart cannot take it up and the same step can be saved again. Rejected: ending
the process and letting a restart do it, which costs a set-up and a compilation and works only under
a launcher.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.reader import load_tensors
from foundling.checkpoint.remote import Folder
from foundling.checkpoint.retention import abandon_after
from foundling.config.errors import CheckpointError
from foundling.data.order import Order
from foundling.runtime.console import warn
from foundling.runtime.dist import on_main
from foundling.runtime.progress import PROGRESS
from foundling.runtime.run_dir import RunDir, cut_lines
from foundling.train.faults.anomaly import (
    AnomalyGuard,
    Intervention,
    RefusedStepError,
    write_down,
)
from foundling.train.state import TrainState


def recover(
    refused: RefusedStepError,
    guard: AnomalyGuard,
    state: TrainState,
    run: RunDir,
    saver: CheckpointManager,
    order: Order,
) -> Intervention:
    """Do something about a step that was refused, or end the run; collective.

    Afterwards the state stands at some step, whose batch is another one than before.
    """
    trouble = refused.trouble
    state.optimizer.zero_grad(set_to_none=True)
    with PROGRESS.during("roll back"):
        target = _target(saver, guard, refused) if guard.goes_back(trouble) else None
        done = guard.decide(trouble, step_of(target) if target is not None else None)
        on_main(lambda: _write_down(run, guard, done, order))
        guard.adopt(done)
        if done.back_to is None or target is None:
            warn(f"{trouble.told()}; the update was not taken and {_left_out(done)} left out.")
        else:
            warn(f"{trouble.told()}; back to step {done.back_to}, {_left_out(done)} left out.")
            saver.abandon_after(done.back_to)
            _go_back(target, guard, state, run)
    return done


def drop_abandoned(folder: Folder, record: Sequence[Mapping[str, Any]]) -> None:
    """Put aside checkpoints of a course that was given up (rank 0, before the newest one is looked
    for): a kill may have come between the decision and its doing."""
    for path in list_checkpoints(folder):
        try:
            known = len(load_meta(path).get("guard", {}).get("record", []))
        except CheckpointError:
            continue  # damaged: nobody will take it up
        later = [one["back_to"] for one in record[known:] if one["back_to"] is not None]
        if later and min(later) < (step_of(path) or 0):
            # Nothing newer is of the new course: this one would have gone before its first step.
            abandon_after(folder, min(later))
            return


def samples_of(order: Order, batch: int) -> dict[str, Any]:
    """The rows of one batch, for a person to look at: source, epoch and unit numbers."""
    first, last = order.sample_of(batch), order.sample_of(batch + 1)
    at = order.locate_range(first, last - first)
    sources: dict[str, dict[str, list[int]]] = {}
    for source, epoch, unit in zip(at.sources, at.epochs, at.units, strict=True):
        by_epoch = sources.setdefault(at.names[int(source)], {})
        by_epoch.setdefault(f"epoch {int(epoch)}", []).append(int(unit))
    return {"batch": batch, "first_sample": first, "count": last - first, "units": sources}


def _target(
    saver: CheckpointManager, guard: AnomalyGuard, refused: RefusedStepError
) -> Folder | None:
    """The newest whole checkpoint, if possible one that was not gone back to in vain."""
    # Waits for a save that is under way: which one is the newest must not depend on the hour.
    saver.abandon_after(refused.trouble.step)
    did_not_help = guard.did_not_help(refused.trouble)
    newest = candidate = saver.latest()
    while candidate is not None and step_of(candidate) in did_not_help:
        candidate = saver.latest(at_most=(step_of(candidate) or 0) - 1)
    return candidate if candidate is not None else newest


def _go_back(path: Folder, guard: AnomalyGuard, state: TrainState, run: RunDir) -> None:
    tensors, meta = state.tensors(), load_meta(path)
    load_tensors(path, tensors, check=False)
    state.restore(meta, tensors)
    guard.take_up(meta)
    on_main(lambda: cut_lines(run.metrics_path, state.step))


def _write_down(run: RunDir, guard: AnomalyGuard, done: Intervention, order: Order) -> None:
    samples = [samples_of(order, batch) for batch in range(*done.skipped)]
    write_down(run, len(guard.record), done, samples)


def _left_out(done: Intervention) -> str:
    first, last = done.skipped
    return f"batch {first} is" if last == first + 1 else f"batches {first} to {last - 1} are"
