"""The corridor: set up, then for each step take it, write it down, and once in a while save, score
and sample. Every clock counts steps; nothing depends on the time of day.

Rejected: a trainer class with callbacks. Saves and evaluations are plain calls in sight.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict

from foundling.checkpoint import retain, save
from foundling.config.errors import RunError
from foundling.config.sections import RunConfig
from foundling.optim import lr_at
from foundling.plan import compare
from foundling.runtime.dist import barrier
from foundling.runtime.log import say, warn
from foundling.runtime.rundir import RunDir
from foundling.train.clock import evaluate_if_due, sample_if_due
from foundling.train.foresee import beside_plan, overruns
from foundling.train.ledger import check_agreement, check_position
from foundling.train.metrics import memory_now
from foundling.train.papers import measured, what_was_read
from foundling.train.stages import Job, open_job
from foundling.train.step import StepResult, take_step

PROBE_STEPS = 30
"""Steps after which the duration is predicted; the first third warms caches up and is left out."""


def train(config: RunConfig, run: RunDir) -> None:
    """Train until the horizon, from the last complete checkpoint if there is one."""
    with open_job(config, run) as job:
        once_in_a_while(job)  # what was due at the checkpoint and was cut off by a kill
        while has_data(job):
            last = time.perf_counter()
            for batches in job.feed.batches(job.state.step):
                waited = time.perf_counter() - last
                lr = lr_at(job.state.step, job.horizon.steps, job.config.optim)
                result = take_step(
                    job.state,
                    batches,
                    lr=lr,
                    clip=job.config.optim.clip,
                    sources=job.feed.order.names,
                    document_mask=job.config.data.document_mask,
                    measure_update=job.measures_every_step
                    or (job.state.step + 1) % job.config.log.every == 0,
                )
                seconds = time.perf_counter() - last
                write_down(job, result, lr=lr, step_s=seconds, wait_s=waited)
                predict_duration(job)
                once_in_a_while(job)
                last = time.perf_counter()
        finish(job)


def has_data(job: Job) -> bool:
    """Whether there is a step to take; where a build is followed, wait for its shards, saved."""
    step = job.state.step
    if step < job.feed.end and job.feed.known(step) <= step and not job.feed.look(step):
        save_checkpoint(job)
        job.feed.wait(step)
    return step < job.feed.end


def write_down(job: Job, result: StepResult, *, lr: float, step_s: float, wait_s: float) -> None:
    """The step's line in metrics.jsonl and in ledger.jsonl."""
    step, order = job.state.step, job.feed.order
    job.metrics.record(
        step,
        result,
        lr=lr,
        total_tokens=job.state.ledger.total.tokens,
        step_s=step_s,
        wait_s=wait_s,
        memory=memory_now(job.state.device),
    )
    job.book.append(step, result.eaten, order.epochs(order.sample_of(step)))


def once_in_a_while(job: Job) -> None:
    """What is due at this step: save first, so that no evaluation can cost a checkpoint."""
    step, last = job.state.step, job.horizon.steps
    if step and (step % job.config.checkpoint.every == 0 or step == last):
        save_checkpoint(job)
    evaluate_if_due(job)
    sample_if_due(job)


def save_checkpoint(job: Job) -> None:
    """Write the whole state; on return the checkpoint is complete and verified."""
    check_position(job.state.ledger, job.feed.order, job.state.step)
    meta = job.state.meta(
        segments=[segment.to_json() for segment in job.feed.order.segments],
        parent=job.parent,
        config=asdict(job.config),
    )
    job.metrics.sync()
    job.book.sync()
    save(job.run.checkpoints, job.state.step, job.state.tensors(), meta)
    if job.state.world.is_main:
        retain(job.run.checkpoints, job.config.checkpoint.keep)
    barrier()


def predict_duration(job: Job) -> None:
    """After a few steps, say once how long the run will take, so that it can be held to it."""
    if job.state.step != PROBE_STEPS or not job.state.world.is_main:
        return
    plan = job.run.read_info()["plan"]
    if "train_s" not in plan["predicted"]:
        settled = job.metrics.median_step_s(skip=PROBE_STEPS // 3)
        plan["predicted"]["train_s"] = settled * job.horizon.steps
        job.run.update_info(plan=plan)
        hold_to_plan(job, plan["predicted"], memory_now(job.state.device)["memory_peak"])


def hold_to_plan(job: Job, predicted: Mapping[str, float], peak: float) -> None:
    """Say what a step takes and holds beside what was planned, and warn where that is more."""
    taken = min(job.state.step, PROBE_STEPS)
    found = {"step_s": job.metrics.median_step_s(skip=taken // 3), "memory_peak": peak}
    for line in beside_plan(predicted, found):
        job.metrics.note(f"  after {job.state.step} steps: {line}")
    for sentence in overruns(predicted, found):
        warn(sentence)


def finish(job: Job) -> None:
    """Mark the run finished and put what was measured beside what was predicted."""
    if job.state.step < job.horizon.steps:
        save_checkpoint(job)
        raise RunError(
            f"{job.run.path} is saved at step {job.state.step} of {job.horizon.steps}: the data is"
            f" used up and data.allow_repeat is {job.config.data.allow_repeat:g}; raise it or add"
            " sources, and train again."
        )
    if not job.state.world.is_main:
        return
    check_agreement(job.state.ledger, job.feed.order, job.state.step, job.run)
    plan = job.run.read_info()["plan"]
    plan["measured"] = measured(job)
    if job.state.step < PROBE_STEPS:  # too short to have been held to it on the way
        hold_to_plan(job, plan["predicted"], plan["measured"]["memory_peak"])
    job.run.update_info(status="finished", plan=plan)
    job.run.event("finished", step=job.state.step)
    tokens = job.state.ledger.total.tokens
    say(f"finished: {job.run.path} at step {job.state.step}, {tokens:,} tokens")
    for line in (*what_was_read(job), *compare(plan)):
        say(f"  {line}")
