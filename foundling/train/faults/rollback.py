"""What is done about a refused step, and going back to a good checkpoint in the middle of a run.

Going back, everything that a step changes comes from the checkpoint, as if the steps since had not
been; metrics.jsonl is cut in place, under the handle that writes it, and readers of events.jsonl
forget what was measured since. A checkpoint of a later step than the one gone back to holds steps
that are taken anew: it is put aside, so that a restart cannot resume from it and the same step can
be saved again. Rejected: ending
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
    log_intervention,
)
from foundling.train.state import TrainState


def handle_refused_step(
    error: RefusedStepError,
    guard: AnomalyGuard,
    state: TrainState,
    run: RunDir,
    checkpoints: CheckpointManager,
    order: Order,
) -> Intervention:
    """Leave out the batch of a refused step, roll back, or end the run; collective.

    Afterwards the next step reads another batch than the refused one.
    """
    refused = error.refused
    state.optimizer.zero_grad(set_to_none=True)
    with PROGRESS.during("roll back"):
        target = _target(checkpoints, guard, error) if guard.needs_rollback(refused) else None
        done = guard.decide(refused, step_of(target) if target is not None else None)
        samples = [samples_of(order, batch) for batch in range(*done.skipped)]
        on_main(lambda: log_intervention(run, len(guard.interventions), done, samples))
        guard.record_intervention(done)
        if done.back_to is None or target is None:
            warn(f"{refused.describe()}; the update was not taken and {_left_out(done)} left out.")
        else:
            warn(f"{refused.describe()}; back to step {done.back_to}, {_left_out(done)} left out.")
            checkpoints.abandon_after(done.back_to)
            _go_back(target, guard, state, run)
    return done


def drop_abandoned_checkpoints(folder: Folder, record: Sequence[Mapping[str, Any]]) -> None:
    """Put aside checkpoints of steps that were given up (rank 0, before the newest one is looked
    for): a kill may have come between the decision and its doing."""
    for path in list_checkpoints(folder):
        try:
            known = len(load_meta(path).get("guard", {}).get("record", []))
        except CheckpointError:
            continue  # damaged: no resume will use it
        later = [one["back_to"] for one in record[known:] if one["back_to"] is not None]
        if later and min(later) < (step_of(path) or 0):
            # Nothing newer is from after going back: that would have put this one aside.
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
    checkpoints: CheckpointManager, guard: AnomalyGuard, error: RefusedStepError
) -> Folder | None:
    """The newest whole checkpoint, if possible one that was not gone back to in vain."""
    # Waits for a save that is under way: which one is the newest must not depend on the hour.
    checkpoints.abandon_after(error.refused.step)
    failed_targets = guard.rollback_steps_that_failed(error.refused)
    newest = candidate = checkpoints.latest()
    while candidate is not None and step_of(candidate) in failed_targets:
        candidate = checkpoints.latest(at_most=(step_of(candidate) or 0) - 1)
    return candidate if candidate is not None else newest


def _go_back(path: Folder, guard: AnomalyGuard, state: TrainState, run: RunDir) -> None:
    tensors, meta = state.tensors(), load_meta(path)
    load_tensors(path, tensors, check=False)
    state.restore(meta, tensors)
    guard.restore(meta)
    on_main(lambda: cut_lines(run.metrics_path, state.step))


def _left_out(done: Intervention) -> str:
    first, last = done.skipped
    return f"batch {first} is" if last == first + 1 else f"batches {first} to {last - 1} are"
