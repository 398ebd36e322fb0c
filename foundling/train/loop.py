"""The corridor: set up, then for each step take it, write it down, and once in a while save, score
and sample. Every clock counts steps; nothing depends on the time of day.

Rejected: a trainer class with callbacks. Saves and evaluations are plain calls in sight.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from foundling.checkpoint.remote import Folder
from foundling.config.errors import CheckpointError, RunError
from foundling.config.run import RunConfig
from foundling.optim.schedule import lr_at
from foundling.plan.forecast import compare
from foundling.runtime.console import say, warn
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.files import NO_ROOM
from foundling.runtime.processes import heed
from foundling.runtime.progress import PULSE, WAITING, process_age
from foundling.runtime.run_dir import RunDir
from foundling.train.evaluation import (
    evaluate_if_due,
    evaluation_is_due,
    last_score_is_missing,
    sample_if_due,
    score_tasks_if_due,
    tasks_are_due,
)
from foundling.train.faults.anomaly import RefusedStepError
from foundling.train.faults.replicas import check_replicas
from foundling.train.faults.rollback import recover
from foundling.train.metrics import Done
from foundling.train.oom import outgrown_if
from foundling.train.run_metadata import (
    beside_plan,
    measured,
    overruns,
    seconds_by_part,
    what_was_read,
)
from foundling.train.setup import Trainer, set_up
from foundling.train.step import GcControl, collector_held, train_step
from foundling.train.token_ledger import check_agreement, check_position

PROBE_STEPS = 30
"""Steps after which the duration is predicted; the first third warms caches up and is left out."""


def train(config: RunConfig, run: RunDir) -> None:
    """Train until the horizon, from the last complete checkpoint if there is one."""
    with set_up(config, run) as job, begun(job), collector_held() as litter:
        job.metrics.spent("start_s", process_age())
        score_and_sample(job)  # what was due at the checkpoint and was cut off by a kill
        while goes_on(job):
            try:
                take_steps(job, litter)
            except RefusedStepError as refused:
                go_back(job, refused)  # the feed begins again behind what is left out
        end = finish(job)
    if end is not None:  # outside, so that every rank has left in order
        raise end


def take_steps(job: Trainer, litter: GcControl) -> None:
    """To the end of the data, or a stop; RefusedStepError where the guard refuses a step."""
    last = time.perf_counter()
    for batches in job.feed.batches(job.state.step):
        waited = time.perf_counter() - last
        PULSE.next_step(job.state.step)
        lr = lr_at(job.state.step, job.horizon.steps, job.config.optim)
        result = train_step(job.state, batches, lr=lr, guard=job.guard, **job.manner)
        done = Done(result=result, lr=lr, step_s=time.perf_counter() - last, wait_s=waited)
        write_down(job, done)
        predict_duration(job)
        once_in_a_while(job)
        litter.step(worked=evaluation_is_due(job))
        if job.stop.is_up():
            break
        last = time.perf_counter()


class DiskFailedError(RuntimeError):
    """A file failed a run that had begun: no mistake of the user's, and a restart may cure it."""


@contextlib.contextmanager
def begun(job: Trainer) -> Iterator[None]:
    """From here on an error of the system is a crash, which the launcher starts again after (but
    not a full disk, which would be as full again); so is memory that runs out once steps have
    fitted, here or before a resume: somebody else may have taken it."""
    resumed = job.state.step > 0
    heed()
    try:
        with outgrown_if(lambda: resumed or job.metrics.has_steps):
            yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise DiskFailedError(f"{type(error).__name__}: {error}") from error


def goes_on(job: Trainer) -> bool:
    """Whether there is a step to take; where a build is followed, wait for its shards, saved."""
    step = job.state.step
    if job.stop.is_up():
        return False
    if step < job.feed.end and job.feed.known(step) <= step and not job.feed.look(step):
        save_checkpoint(job)
        with PULSE.during(WAITING):
            return job.feed.wait(step, job.stop.is_up)
    return step < job.feed.end


def go_back(job: Trainer, refused: RefusedStepError) -> None:
    """Leave out what the guard refused, perhaps from an earlier checkpoint on."""
    done = recover(refused, job.guard, job.state, job.run, job.saver, job.feed.order)
    job.feed.go_on_from(job.state.step)
    if done.back_to is not None:
        job.metrics.rewind(job.state.step)
        job.book.rewind()
        job.run.rewind()


def write_down(job: Trainer, done: Done) -> None:
    """A step's lines in metrics.jsonl and in ledger.jsonl."""
    step, order = done.result.step, job.feed.order
    job.metrics.record(done, memory=job.state.memory())
    epochs = order.epochs(order.sample_of(job.feed.position(step)))
    skipped = job.feed.skips.units_ahead_of(order, step - 1)
    job.book.append(step, done.result.eaten, epochs, skipped)


def once_in_a_while(job: Trainer) -> None:
    """What is due at this step: save first, so that no evaluation can cost a checkpoint."""
    step, every = job.state.step, job.config.checkpoint.every
    look_after(job)
    if (
        step % every == 0
        or step == job.horizon.steps
        or evaluation_is_due(job)
        or tasks_are_due(job)
    ):
        save_checkpoint(job)
    if not job.stop.is_up():
        score_and_sample(job)


def score_and_sample(job: Trainer) -> None:
    """The three clocks that measure the model."""
    evaluate_if_due(job)
    sample_if_due(job)
    score_tasks_if_due(job)


def look_after(job: Trainer) -> None:
    """Alarms: memory that rises, replicas that differ, saves that failed."""
    step, every = job.state.step, job.config.guard.hash_every
    for sentence in job.trend.look(step):
        warn(sentence)
        job.run.event("memory_rises", step=step, rank=job.state.world.rank, told=sentence)
    if every and step % every == 0:
        check_replicas(job.state.params(), job.state.mesh, job.run, step)
    tell_saves(job)


def tell_saves(job: Trainer) -> None:
    """What became of saves behind the training, as events."""
    for saved in job.saver.poll():
        if not job.state.world.is_main:
            continue
        seconds = {"stall_s": round(saved.stall_s, 4), "write_s": round(saved.write_s, 4)}
        if saved.error:
            job.run.event("not_saved", step=saved.step, **seconds, error=saved.error)
        else:
            job.run.event("saved", step=saved.step, **seconds, bytes=saved.bytes)


def save_checkpoint(job: Trainer) -> None:
    """Have the whole state written behind the training; nothing a disk does ends it."""
    with job.metrics.timed("save_s"):
        _save(job)


def _save(job: Trainer) -> None:
    check_position(job.state.ledger, job.feed.order, job.state.step, job.feed.skips)
    if job.config.guard.hash_every:  # no checkpoint is made of replicas that differ
        check_replicas(job.state.params(), job.state.mesh, job.run, job.state.step)
    meta = job.state.meta(
        segments=[segment.to_json() for segment in job.feed.order.segments],
        parent=job.parent,
        guard=job.guard.to_json(),
        config=asdict(job.config),
    )
    is_written = job.metrics.sync() and job.book.sync() and job.run.sync() is None
    lost = "" if is_written else f"there is no room for its lines in {job.run.path}."
    with PULSE.during("save"):
        job.saver.save(job.state.step, job.state.tensors(), meta, hindrance=lost)


def predict_duration(job: Trainer) -> None:
    """After a few steps, say once how long the run will take, so that it can be held to it."""
    if job.state.step != PROBE_STEPS or not job.state.world.is_main:
        return
    plan = job.run.read_info()["plan"]
    if "train_s" not in plan["predicted"]:  # nothing was known of this device
        settled = [job.metrics.median_step_s(skip=PROBE_STEPS // 3)] * len(job.horizon.phases)
        device, world = job.state.device, job.state.world
        found = seconds_by_part(job.config, device, world, job.horizon, settled)
        plan["predicted"] |= {n: s for n, s in found.items() if n not in plan["predicted"]}
        with contextlib.suppress(OSError):  # a full disk; the last save will tell
            job.run.update_info(plan=plan)
    hold_to_plan(job, plan["predicted"], job.state.memory()["memory_peak"])


def hold_to_plan(job: Trainer, predicted: Mapping[str, float], peak: float) -> None:
    """Say what a step takes and holds beside what was planned, and warn where that is more."""
    taken = min(job.state.step, PROBE_STEPS)
    found = {"step_s": job.metrics.median_step_s(skip=taken // 3), "memory_peak": peak}
    for line in beside_plan(predicted, found):
        job.metrics.note(f"  after {job.state.step} steps: {line}")
    for sentence in overruns(predicted, found):
        warn(sentence)


def finish(job: Trainer) -> EndOfRun | None:
    """How the run ends: finished, with what was measured beside what was predicted; or saved, to be
    continued. The last checkpoint must verify in either case."""
    step, last = job.state.step, job.horizon.steps
    try:
        newest = last_checkpoint(job)
    except CheckpointError as error:
        return EndOfRun(Exit.UNSAVED, str(error))
    finally:
        tell_saves(job)
    if step < last and job.stop.reason is None:
        raise RunError(
            f"{job.run.path} is saved at step {step} of {last}: the data is used up and"
            f" data.allow_repeat is {job.config.data.allow_repeat:g}; raise it or add sources, and"
            " train again."
        )
    if step < last or (job.stop.reason and (last_score_is_missing(job) or tasks_are_due(job))):
        if job.state.world.is_main:
            job.run.event("stopped", step=step, reason=job.stop.reason)
        left = f"{last - step:,} steps are left" if step < last else "the last score is missing"
        return EndOfRun(Exit.REQUEUE, f"saved at step {step} after {job.stop.reason}; {left}")
    if job.state.world.is_main:
        assert newest is not None
        try:
            close_books(job, newest)
        except OSError as error:
            return EndOfRun(Exit.UNSAVED, f"{job.run.path} cannot be marked finished: {error}")
    return None


def last_checkpoint(job: Trainer) -> Folder | None:
    """The checkpoint of the step that the run stands at, verified; it is saved now if it was left
    out before, because an old save hung or the disk was full."""
    with job.metrics.timed("save_s"), PULSE.during("save"):
        if not job.saver.has_saved(job.state.step):
            _save(job)
        return job.saver.finish(job.state.step)


def close_books(job: Trainer, newest: Folder) -> None:
    """Mark the run finished, when everything that was written down about it agrees."""
    check_agreement(job.state.ledger, job.feed.order, job.state.step, job.run, job.feed.skips)
    if (error := job.run.sync()) is not None:
        raise error
    plan = job.run.read_info()["plan"]
    plan["measured"] = measured(job, newest)
    if job.state.step < PROBE_STEPS and job.metrics.has_steps:
        # Too short to have been held to it on the way.
        hold_to_plan(job, plan["predicted"], plan["measured"]["memory_peak"])
    job.run.update_info(status="finished", plan=plan)
    job.run.event("finished", step=job.state.step)
    tokens = job.state.ledger.total.tokens
    say(f"finished: {job.run.path} at step {job.state.step}, {tokens:,} tokens")
    for line in (*what_was_read(job), *compare(plan)):
        say(f"  {line}")
