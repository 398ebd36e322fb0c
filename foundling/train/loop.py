"""The loop: set up, then for each step take it, write it down, and once in a while save and measure
the model. Every clock counts steps; nothing depends on the time of day.

Rejected: a trainer class with callbacks. Saves and evaluations are plain calls in sight.
"""

from foundling.checkpoint.remote import Folder
from foundling.config.errors import CheckpointError, RunError
from foundling.config.run import RunConfig
from foundling.plan.forecast import compare
from foundling.runtime.console import counted, say
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.run_dir import RunDir
from foundling.train.faults.anomaly import RefusedStepError
from foundling.train.faults.rollback import handle_refused_step
from foundling.train.run_metadata import PROBE_STEPS, measured_figures, tokens_read
from foundling.train.setup import Trainer, set_up
from foundling.train.step import manual_gc, train_step
from foundling.train.token_ledger import check_agreement


def train(config: RunConfig, run: RunDir) -> None:
    """Train until the horizon, from the last complete checkpoint if there is one."""
    with set_up(config, run) as t, manual_gc() as gc:
        t.evaluation.run_if_due(t.state)  # what was due at the checkpoint and cut off by a kill
        while not t.stop.agreed() and (t.loader.has_step(t.state.step) or t.save_and_wait()):
            try:
                for batches in t.loader.steps_from(t.state.step):
                    result = train_step(t.state, batches, t.step_options(), t.guard)
                    t.metrics.write(result, t.state, t.loader)
                    t.guard.watch(t.state)  # memory, replicas
                    t.saver.save_if_due(t.state)
                    t.evaluation.run_if_due(t.state)
                    gc.step()
                    if t.stop.agreed():
                        break
            except RefusedStepError as refused:  # raised before anything changed
                roll_back(t, refused)
        end = finish(t)
    if end is not None:  # outside, so that every rank has left in order
        raise end


def roll_back(t: Trainer, refused: RefusedStepError) -> None:
    """Leave out what the guard refused, perhaps from an earlier checkpoint on."""
    done = handle_refused_step(
        refused, t.guard, t.state, t.spec.run, t.saver.manager, t.loader.order
    )
    t.loader.restart_from(t.state.step)
    if done.back_to is not None:
        t.metrics.rewind(t.state.step)


def finish(t: Trainer) -> EndOfRun | None:
    """How the run ends: finished, with predicted and measured figures; or saved, to be
    continued. The last checkpoint must verify in either case."""
    run, step, last = t.spec.run, t.state.step, t.spec.horizon.steps
    try:
        newest = t.saver.finish(t.state)
    except CheckpointError as error:
        return EndOfRun(Exit.UNSAVED, str(error))
    finally:
        t.saver.report(t.state)
    if step < last and t.stop.reason is None:
        raise RunError(
            f"{run.path} is saved at step {step} of {last}: the data is used up and"
            f" data.allow_repeat is {t.spec.config.data.allow_repeat:g}; raise it or add sources,"
            " and train again."
        )
    if step < last or (t.stop.reason and t.evaluation.last_score_is_missing(step)):
        if t.state.world.is_main:
            run.event("stopped", step=step, reason=t.stop.reason)
        left = "the last score is missing"
        if step < last:
            left = f"{counted(last - step, 'step')} {'is' if last - step == 1 else 'are'} left"
        reason = f"saved at step {step} after {t.stop.reason}; {left}; the same command goes on"
        return EndOfRun(Exit.REQUEUE, reason)
    if t.state.world.is_main:
        assert newest is not None
        try:
            mark_finished(t, newest)
        except OSError as error:
            return EndOfRun(Exit.UNSAVED, f"{run.path} cannot be marked finished: {error}")
    return None


def mark_finished(t: Trainer, newest: Folder) -> None:
    """Say in run.json that the run is finished, when everything written down about it agrees."""
    run, step, config = t.spec.run, t.state.step, t.spec.config
    check_agreement(t.state.ledger, t.loader.order, step, run, t.loader.skips)
    if (error := run.sync()) is not None:
        raise error
    plan = run.read_info()["plan"]
    plan["measured"] = measured_figures(run, t.state, t.metrics.seconds_outside_steps, newest)
    if step < PROBE_STEPS and t.metrics.has_steps:
        # Too short to have been held to it on the way.
        t.metrics.compare_with_plan(plan["predicted"], step, plan["measured"]["memory_peak"])
    run.update_info(status="finished", plan=plan)
    run.event("finished", step=step)
    say(f"finished: {run.path} at step {step}, {t.state.ledger.total.tokens:,} tokens")
    read = tokens_read("chat" if t.evaluation.is_chat else "text", config.data, t.state, t.loader)
    for line in (*read, *compare(plan)):
        say(f"  {line}")
