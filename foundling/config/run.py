"""RunConfig: all sections of a run, and the rules that join sections."""

import importlib.util
import math
from dataclasses import dataclass, field, fields
from typing import Literal

from foundling.config.base import _is_set, _no_effect, _require
from foundling.config.data import DataConfig, TokenizerConfig, check_data
from foundling.config.errors import ConfigError, IdleError
from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig, check_optim
from foundling.config.parallel import (
    AUTO,
    ParallelConfig,
    _check_layout,
    check_recompute,
    check_tensor,
)
from foundling.config.train import HORIZONS, TrainConfig, check_speed, horizons


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved and what is kept."""

    every: int = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """How many of the newest complete checkpoints to keep."""
    keep_every: int = 0
    """Keep every checkpoint whose step is a multiple of this, too; 0: none."""
    keep_best: int = 0
    """Keep the checkpoints with the best held-out scores on the evaluation clock, too: this many;
    by bits per byte, and by the loss where a source holds conversations."""
    best: Literal["lowest", "highest"] = "lowest"
    """keep_best: which scores are the best ones."""
    folder: str = ""
    """Where checkpoints go, in a folder named after the run: another disk, or an address such as
    s3://bucket/runs (extra: remote); empty: into the run directory."""
    background: bool = True
    """Write behind the training, from a copy in the host's memory; off waits for every save."""
    timeout_s: int = 600
    """Seconds that ranks wait for each other in a save, and a save for the one before it."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is measured on a clock while training."""

    every: int = 200
    """Steps between evaluations on held-out data; 0 switches them off."""
    tokens: int = 65536
    """Held-out tokens of each source that an evaluation reads, always the same ones; the last step
    scores all of them as well, as full_bpb and full_loss."""
    sample_every: int = 200
    """Steps between samples from the fixed prompts; 0 switches them off."""
    sample_tokens: int = 48
    """Tokens per sample."""
    prompts: tuple[str, ...] = ()
    """Fixed prompts that are continued on the sampling clock."""
    tasks: tuple[str, ...] = ()
    """Tasks that are scored on a clock of their own, such as core=eval_bundle.zip or gsm8k=FILE;
    `foundling eval RUN list` names them."""
    tasks_every: int = 0
    """Steps between scores of the tasks; 0 switches them off. The last step is scored too."""
    tasks_limit: int = 200
    """Examples a task; 0: all."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is said while training."""

    every: int = 1
    """Steps between lines on the screen; metrics.jsonl has every step."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Send metrics to Weights & Biases (extra: wandb)."""
    project: str = "foundling"
    """Name of the W&B project."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What is done when a step, a rank or the memory misbehaves."""

    spike_loss: float = 10.0
    """A loss this many spreads (1.48 x median absolute deviation) above the median of the window,
    and above all of it, is a spike: back to the last good checkpoint, its rows left out; 0: off."""
    spike_norm: float = 30.0
    """The same for the logarithm of the gradient norm; 0: off."""
    window: int = 128
    """Steps that a spike is measured against; none is looked for before half of them are there."""
    skip_before: int = 1
    """Batches before a spike that are left out with it: the update before may have caused it."""
    nonfinite: int = 3
    """Batches in a row whose loss or gradient is not finite: fewer are left out one by one, so many
    send the run back to its last good checkpoint."""
    limit: int = 6
    """Batches left out and rollbacks within limit_steps steps; one more ends the run."""
    limit_steps: int = 1000
    """Steps over which they are counted."""
    hash_every: int = 100
    """Steps between comparisons of the replicas' weights, bit for bit; 0: off."""
    hang_s: float = 600.0
    """Seconds without progress after which the watchdog tells who is stuck and ends the job, to be
    started again; 0: off."""
    hang_slow_s: float = 1800.0
    """The same for what takes longer: set-up, the first step, a save, an evaluation, a rollback."""
    memory_every: int = 10
    """Steps between looks at memory in use; a steady rise over 64 looks is told once; 0: off."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything one run is made of."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)


# Settings of the guard that cannot work, or would have no effect, each refused in one sentence.

AT_LEAST: dict[str, float] = {
    "spike_loss": 0,
    "spike_norm": 0,
    "window": 8,
    "skip_before": 0,
    "nonfinite": 1,
    "limit": 0,
    "limit_steps": 1,
    "hash_every": 0,
    "hang_s": 0,
    "hang_slow_s": 0,
    "memory_every": 0,
}


def check_guard(guard: "GuardConfig") -> None:
    """Refuse what is out of range or idle."""
    for name, least in AT_LEAST.items():
        value = getattr(guard, name)
        if not least <= value < float("inf"):
            raise ConfigError(f"guard.{name} must be {least:g} or more (it is {value}).")
    if guard.hang_slow_s < guard.hang_s:
        raise ConfigError(
            f"guard.hang_slow_s is {guard.hang_slow_s:g} and guard.hang_s {guard.hang_s:g}; what"
            " takes longer needs at least as much time."
        )
    looks_for_spikes = guard.spike_loss or guard.spike_norm
    for name, when, works in (
        ("window", "while spike_loss and spike_norm are 0", looks_for_spikes),
        ("limit_steps", "while guard.limit is 0", guard.limit),
        ("hang_slow_s", "while guard.hang_s is 0", guard.hang_s),
    ):
        default = next(field.default for field in fields(guard) if field.name == name)
        if getattr(guard, name) != default and not works:
            raise IdleError(f"guard.{name}", when, "remove it")


# Combinations that cannot work, or would have no effect, each refused in one sentence.
#
# A field counts as set when it differs from its default: a resolved config states every field, and
# must stay valid when it is given back.
"""Whatever a file says: their parameters are listed one by one before anything is looked at."""
"""Of every other size: the bytes of a matrix of two such sides are still a number to torch."""
MOST_SEQ_LEN = 2**31 - 1
"""Positions are kept in 32 bits."""
MOST_THREADS = 1024
"""Of one process; with a hundred thousand, no other thread can be started."""
LEAST_EPS = 1.17e-38
"""What is smaller is no normal number of fp32's, and a GPU may take it for 0."""


def check_run(config: "RunConfig") -> None:
    """Refuse what contradicts itself or would be ignored."""
    given = horizons(config.train)
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join('train.' + name for name in given)} are both horizons; give one."
        )
    _check_finite(config)
    _check_ranges(config)
    _check_no_effect(config)
    check_guard(config.guard)
    longest = config.model.max_positions
    if longest and config.train.seq_len > longest:
        raise ConfigError(
            f"train.seq_len is {config.train.seq_len} and the model has {longest} positions;"
            " shorten the rows or raise model.max_positions."
        )
    check_data(config)
    _check_layout(config.parallel)
    check_optim(config.optim, config.parallel)
    check_recompute(config.parallel.recompute, config.model.layers)
    check_tensor(config.model, config.parallel.tensor)
    check_speed(config)


def check_trainable(config: "RunConfig") -> None:
    """Refuse what can be planned and not trained: a choice left open, or missing W&B."""
    if config.log.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb is {config.log.wandb} and wandb is not installed; pip install"
            " 'foundling[wandb]' or set log.wandb off."
        )
    left = {
        "train.batch_size": not config.train.batch_size,
        "parallel.recompute": config.parallel.recompute == AUTO,
        "train.hours": bool(config.train.hours),
        "train.dollars": bool(config.train.dollars),
    }
    for name in (name for name, is_open in left.items() if is_open):
        raise ConfigError(
            f"{name} is left to the plan; write it down with `foundling plan TARGET --gpu NAME"
            " -o run.yaml` and train that file."
        )


def check_world(config: "RunConfig", size: int) -> None:
    """Refuse what only several processes could obey, once their number is known to be one."""
    for name in ("grad_dtype", "bucket_mb"):
        if size == 1 and _is_set(config.parallel, name):
            _no_effect(f"parallel.{name}", "with one process", "more of them")


def _check_ranges(config: "RunConfig") -> None:
    for section, names in {
        "train": (
            *HORIZONS,
            "global_batch_tokens",
            "threads",
            "batch_size",
            "stop_after",
            "stop_margin",
        ),
        "optim": ("lr", "clip", "warmup_steps", "weight_decay"),
        "eval": ("every", "tokens", "sample_every", "sample_tokens"),
        "checkpoint": ("keep_every", "keep_best"),
        "parallel": ("replicate",),
    }.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            _require(value >= 0, f"{section}.{name} cannot be negative", value)
    for section, names in {
        "train": ("seq_len",),
        "checkpoint": ("every", "keep", "timeout_s"),
        "log": ("every",),
        "data": ("prefetch", "allow_repeat"),
        "optim": ("eps",),
        "parallel": ("shard", "tensor"),
    }.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            _require(value > 0, f"{section}.{name} must be positive", value)
    for name in ("warmup_share", "decay_share", "final_lr_share"):
        value = getattr(config.optim, name)
        _require(0 <= value <= 1, f"optim.{name} is a share between 0 and 1", value)
    for name in ("beta1", "beta2"):
        value = getattr(config.optim, name)
        _require(0 <= value < 1, f"optim.{name} is a share below 1", value)
    rows = max(config.train.seq_len, *(phase.seq_len for phase in config.data.phases), 0)
    _require(rows <= MOST_SEQ_LEN, f"train.seq_len is at most {MOST_SEQ_LEN:,}", f"{rows:,}")
    threads = config.train.threads
    _require(threads <= MOST_THREADS, f"train.threads is at most {MOST_THREADS:,}", threads)
    eps = config.optim.eps
    _require(eps >= LEAST_EPS, f"optim.eps is at least {LEAST_EPS:g}", eps)


def _check_finite(config: "RunConfig") -> None:
    """1e400 is a number to YAML and to Python, and infinite to both; only some limits may be."""
    for section in fields(config):
        for setting in fields(getattr(config, section.name)):
            value = getattr(getattr(config, section.name), setting.name)
            name = f"{section.name}.{setting.name}"
            may_be = section.name not in ("model", "optim") or name == "optim.clip"
            if isinstance(value, float) and not (math.isfinite(value) or (may_be and value > 0)):
                raise ConfigError(f"{name} is not finite (it is {value}).")


def _check_no_effect(config: "RunConfig") -> None:
    optim, train = config.optim, config.train
    if optim.warmup_steps and optim.warmup_share:
        raise ConfigError(
            "optim.warmup_steps and optim.warmup_share both set the warm-up; give one."
        )
    if _is_set(optim, "decay_share") and optim.schedule != "wsd":
        _no_effect("optim.decay_share", f"with optim.schedule {optim.schedule}", "wsd")
    if optim.final_lr_share and optim.schedule == "constant":
        _no_effect("optim.final_lr_share", "with optim.schedule constant", "another schedule")
    if _is_set(config.log, "project") and config.log.wandb == "off":
        _no_effect("log.project", "while log.wandb is off", "log.wandb online or offline")
    if config.eval.prompts and not config.eval.sample_every:
        _no_effect("eval.prompts", "while eval.sample_every is 0", "eval.sample_every above 0")
    if _is_set(config.checkpoint, "best") and not config.checkpoint.keep_best:
        _no_effect(
            "checkpoint.best", "while checkpoint.keep_best is 0", "checkpoint.keep_best above 0"
        )
    if _is_set(config.eval, "tokens") and not config.eval.every:
        _no_effect("eval.tokens", "while eval.every is 0", "eval.every above 0")
    if config.eval.tasks and not config.eval.tasks_every:
        _no_effect("eval.tasks", "while eval.tasks_every is 0", "eval.tasks_every above 0")
    for name in ("tasks_every", "tasks_limit"):
        if _is_set(config.eval, name) and not config.eval.tasks:
            _no_effect(f"eval.{name}", "without eval.tasks", "eval.tasks")
    if train.branch and train.init:
        raise ConfigError(
            "train.init starts from weights alone and train.branch from the whole state; give one."
        )
    if train.stage == "finetune" and not (train.init or train.branch):
        raise ConfigError(
            "train.stage finetune needs train.init, the run whose weights to start from."
        )
