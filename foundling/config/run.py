"""RunConfig: all sections of a run, and the rules that join sections."""

import importlib.util
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from foundling.config.base import Section
from foundling.config.data import DataConfig, phase_mixtures
from foundling.config.errors import ConfigError
from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig
from foundling.config.parallel import (
    AUTO,
    ParallelConfig,
    budget_share,
    check_recompute,
    check_tensor,
)
from foundling.config.train import FLOAT8_MULTIPLE, TrainConfig


class CheckpointConfig(Section):
    """When the run is saved and what is kept."""

    section_name: ClassVar[str] = "checkpoint"

    every: PositiveInt = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 2
    """How many of the newest complete checkpoints to keep."""
    keep_every: NonNegativeInt = 0
    """Keep every checkpoint whose step is a multiple of this, too; 0: none."""
    keep_best: NonNegativeInt = 0
    """Keep the checkpoints with the best held-out scores on the evaluation clock, too: this many;
    by bits per byte, and by the loss where a source holds conversations."""
    folder: str = ""
    """Where checkpoints go, in a folder named after the run: another disk, or an address such as
    s3://bucket/runs (extra: remote); empty: into the run directory."""
    background: bool = True
    """Write in the background, from a copy in the host's memory; off waits for every save."""


SAMPLE_TOKENS = 48
"""Tokens generated per prompt."""


class EvalConfig(Section):
    """What is measured on a clock while training."""

    section_name: ClassVar[str] = "eval"

    every: NonNegativeInt = 200
    """Steps between evaluations on held-out data; 0 switches them off."""
    tokens: NonNegativeInt = 65536
    """Held-out tokens of each source that an evaluation reads, always the same ones; the last step
    scores all of them as well, as full_bpb and full_loss."""
    prompts: tuple[str, ...] = ()
    """Fixed prompts that are continued on the same clock."""
    tasks: tuple[str, ...] = ()
    """Tasks that are scored on a clock of their own, such as core=eval_bundle.zip or gsm8k=FILE;
    `foundling eval RUN list` names them."""
    tasks_every: NonNegativeInt = 0
    """Steps between scores of the tasks; 0 switches them off. The last step is scored too."""
    tasks_limit: NonNegativeInt = 200
    """Examples a task; 0: all."""

    @field_validator("prompts", mode="before")
    @classmethod
    def _read_prompt(cls, value: Any) -> Any:
        """One prompt needs no brackets, and may have commas."""
        is_text = isinstance(value, str) and not value.lstrip().startswith("[")
        return (value,) if is_text else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.every:
            for name in ("tokens", "prompts"):
                self.refuse_unused(name, "while eval.every is 0", "eval.every above 0")
        if not self.tasks_every:
            self.refuse_unused("tasks", "while eval.tasks_every is 0", "eval.tasks_every above 0")
        if not self.tasks:
            for name in ("tasks_every", "tasks_limit"):
                self.refuse_unused(name, "without eval.tasks", "eval.tasks")
        return self


class LogConfig(Section):
    """What is said while training."""

    section_name: ClassVar[str] = "log"

    every: PositiveInt = 1
    """Steps between lines on the screen; metrics.jsonl has every step."""
    tensorboard: bool = True
    """Write TensorBoard events, in addition to metrics.jsonl."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Send metrics to Weights & Biases (extra: wandb)."""
    project: str = "foundling"
    """Name of the W&B project."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.wandb == "off":
            self.refuse_unused("project", "while log.wandb is off", "log.wandb online or offline")
        return self


class GuardConfig(Section):
    """What is done when a step, a rank or the memory misbehaves."""

    section_name: ClassVar[str] = "guard"

    spike_loss: NonNegativeFloat = 10.0
    """A loss this many spreads (1.48 x median absolute deviation) above the median of the last 128
    and above all is a spike: back to the last good checkpoint, its rows left out; 0: off."""
    spike_norm: NonNegativeFloat = 30.0
    """The same for the logarithm of the gradient norm; 0: off."""
    nonfinite: PositiveInt = 3
    """Batches in a row whose loss or gradient is not finite: fewer are left out one by one, so many
    send the run back to its last good checkpoint."""
    limit: NonNegativeInt = 6
    """Batches left out and rollbacks within 1,000 steps; one more ends the run."""
    hash_every: NonNegativeInt = 100
    """Steps between comparisons of the replicas' weights, bit for bit; 0: off."""
    hang_s: NonNegativeFloat = 600.0
    """Seconds without progress after which the watchdog names the rank that is stuck and ends the
    job, to be started again (at least 1,800 for set-up, a first step, a save, an evaluation); 0:
    off."""


class RunConfig(Section):
    """Everything one run is made of."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    guard: GuardConfig = GuardConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse what contradicts itself or would be ignored, across sections."""
        _check_rows(self)
        if self.data.follow and self.train.horizon_in("epochs"):
            raise ConfigError(
                f"train.horizon {self.train.horizon} counts data that data.follow has not seen yet;"
                " give it in steps or tokens."
            )
        check_recompute(self.parallel.recompute, self.model.layers)
        check_tensor(self.model, self.parallel.tensor)
        _check_layout(self)
        return self


def _check_rows(config: RunConfig) -> None:
    """Every phase's rows must fit the model, and its units the global batch."""
    train, longest = config.train, config.model.max_positions
    for number, (_, spec) in enumerate(phase_mixtures(config.data, train.seq_len)):
        if longest and spec.seq_len > longest:
            said = f"a phase of data.phases has rows of {spec.seq_len} tokens"
            said = said if number else f"train.seq_len is {spec.seq_len}"
            raise ConfigError(
                f"{said} and the model has {longest} positions; shorten the rows or raise"
                " model.positions."
            )
        if spec.packing == "bucket" and spec.unit_tokens < spec.seq_len:
            raise ConfigError(
                f"data.bucket_tokens {spec.unit_tokens} does not hold one row of {spec.seq_len}"
                " tokens; raise it or shorten the rows."
            )
        if train.global_batch_tokens:
            spec.units_per_step(train.global_batch_tokens)


def _check_layout(config: RunConfig) -> None:
    """Refuse layouts that a kernel, a loss or torch.compile cannot run. What depends on the device
    (a missing GPU, `auto`) is refused once the device is known."""
    model, train, parallel = config.model, config.train, config.parallel
    is_sharded = parallel.shard > 1 or parallel.tensor > 1
    if parallel.fsdp1 and config.optim.name != "adamw":
        raise ConfigError(
            f"parallel.fsdp1 flattens the weights, and optim.name {config.optim.name} needs their"
            " rows and columns; leave parallel.fsdp1 off."
        )
    if budget_share(parallel.recompute) is not None and train.compile == "off":
        raise ConfigError(
            f"parallel.recompute {parallel.recompute} has no effect while train.compile is off; use"
            " train.compile blocks, or per-op."
        )
    if train.head_float8 and model.dim % FLOAT8_MULTIPLE:
        raise ConfigError(
            "train.float8_skip without head needs model.dim to be a multiple of"
            f" {FLOAT8_MULTIPLE}, and it is {model.dim}; skip head."
        )
    if train.float8 != "none" and (parallel.tensor > 1 or parallel.fsdp1):
        name = "parallel.tensor" if parallel.tensor > 1 else "parallel.fsdp1"
        raise ConfigError(
            f"train.float8 {train.float8} is not built for {name}; use parallel.shard without it,"
            " or train.float8 none."
        )
    if train.kernels.loss == "torch" and (model.logit_softcap or train.z_loss):
        raise ConfigError(
            "train.kernels.loss torch knows neither model.logit_softcap nor train.z_loss; use"
            " fused."
        )
    if train.kernels.loss in ("torch", "liger") and is_sharded:
        name = "shard" if parallel.shard > 1 else "tensor"
        raise ConfigError(
            f"train.kernels.loss {train.kernels.loss} needs the whole head, and parallel.{name}"
            " cuts it; use fused."
        )
    if train.compile in ("model", "graphs") and is_sharded:
        raise ConfigError(
            f"train.compile {train.compile} knows neither parallel.shard nor parallel.tensor, whose"
            " ranks talk between the blocks; use train.compile blocks."
        )


def check_resolved(config: RunConfig) -> None:
    """Refuse what can be planned and not trained: an unresolved setting, or missing W&B."""
    if config.log.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb is {config.log.wandb} and wandb is not installed; pip install"
            " 'foundling[wandb]' or set log.wandb off."
        )
    for setting in unresolved_settings(config):
        raise ConfigError(
            f"{setting} is left to the plan; write it down with `foundling plan TARGET --gpu NAME"
            " -o run.yaml` and train that file."
        )


def unresolved_settings(config: RunConfig) -> list[str]:
    """Settings that only a plan for named hardware can fill in."""
    left = {
        "train.batch_size auto": not config.train.batch_size,
        "parallel.recompute auto": config.parallel.recompute == AUTO,
        f"train.horizon {config.train.horizon}": config.train.is_timed,
    }
    return [setting for setting, is_open in left.items() if is_open]


def check_world(config: RunConfig, size: int) -> None:
    """Refuse settings for several processes, once the number of processes is known to be one."""
    if size == 1:
        config.parallel.refuse_unused("reduce_dtype", "with one process", "more of them")
