"""Where the time of a run goes: its start, compilation, steps, saves and evaluations.

Steps alone are the training time that hours and dollars are told of; the rest stands beside them,
because a short run may spend more on it. Tasks (`eval.tasks`) are measured and not planned: how
long they are is in their files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foundling.config.manifest import Manifest
from foundling.config.phases import every_source
from foundling.config.sections import RunConfig
from foundling.plan.coefficients import COEFFICIENTS as K
from foundling.plan.horizon import Horizon
from foundling.plan.saving import Saving
from foundling.plan.speed import LAUNCHES


@dataclass(frozen=True, kw_only=True)
class Wall:
    """Seconds of one process that trains from the first step to the last."""

    start_s: float
    """From the start of the process to the first step: imports, data, weights, choices."""
    compile_s: float
    """What the first step takes beyond an ordinary one."""
    train_s: float
    """All steps, as ordinary ones."""
    save_s: float
    """Training stands still for a save, or the end of the run waits for the last one."""
    eval_s: float
    """Held-out scores and samples."""


def start_s(device: str) -> float:
    """Until the first step, on a device of this type."""
    return K.start_cuda_s if device == "cuda" else K.start_s


def compile_s(device: str, mode: str) -> float:
    """By train.compile as it was decided; with nothing compiled before."""
    if mode == "off":
        return 0.0
    if device != "cuda":
        return K.compile_cpu_s
    return K.compile_model_s if mode == "model" else K.compile_blocks_s


def plan_wall(
    config: RunConfig,
    horizon: Horizon,
    step_seconds: Sequence[float],
    saving: Saving,
    *,
    device: str,
) -> Wall:
    """Seconds by part; `step_seconds` has one for each phase."""
    steps, clocks = horizon.steps, config.eval
    mode = config.train.compile
    if mode == "auto":  # as plan/work.py takes it
        mode = "blocks" if device == "cuda" and config.parallel.tensor <= 1 else "off"
    assert not isinstance(mode, bool)
    saves = len(_saved_steps(config, steps))
    still = saving.stall_s + K.save_s
    at_once = saving.write_s if config.checkpoint.background else 0.0
    pairs = zip(horizon.phases, step_seconds, strict=True)
    # A forward pass is a third of a step's work, and one process scores what the ranks share.
    token_s = step_seconds[0] * horizon.data_ranks / horizon.positions_per_step / 3
    sample_s = clocks.sample_tokens * config.model.layers * LAUNCHES["eager"][0] * K.launch_s
    samples = _times(steps, clocks.sample_every) if clocks.prompts else 0
    return Wall(
        start_s=start_s(device),
        compile_s=compile_s(device, mode),
        train_s=sum(phase.steps * seconds for phase, seconds in pairs),
        save_s=saves * (still + saving.write_s - at_once) + at_once,
        eval_s=scored_tokens(config, steps) * token_s + samples * sample_s,
    )


def _times(steps: int, every: int) -> int:
    """How often a clock strikes, the last step included."""
    return math.ceil(steps / every) if every else 0


def _saved_steps(config: RunConfig, steps: int) -> set[int]:
    """A save goes before every evaluation (train/loop.py)."""
    tasks = config.eval.tasks_every if config.eval.tasks else 0
    clocks = (config.checkpoint.every, config.eval.every, tasks)
    return {steps}.union(*(range(every, steps, every) for every in clocks if every))


def scored_tokens(config: RunConfig, steps: int) -> int:
    """Held-out tokens read by all evaluations; the last one reads everything."""
    times, limit = _times(steps, config.eval.every), config.eval.tokens
    if not times:
        return 0
    manifests = [Manifest.load(Path(name)) for name in every_source(config.data)]
    held = [sum(shard.tokens for shard in manifest.val) for manifest in manifests] or [limit]
    each = sum(min(limit or tokens, tokens) for tokens in held)
    return (times - 1) * each + sum(held)
