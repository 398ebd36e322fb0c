"""Combinations that cannot work, or would have no effect, each refused in one sentence.

A field counts as set when it differs from its default: a resolved config states every field, and
must stay valid when it is given back.
"""

import importlib.util
import math
from dataclasses import fields
from typing import TYPE_CHECKING

from foundling.config.data_checks import check_data
from foundling.config.degrees import check_tensor
from foundling.config.errors import ConfigError, IdleError
from foundling.config.guard_checks import check_guard
from foundling.config.model import VALUE_GATE_WIDTH
from foundling.config.optim_checks import check_optim
from foundling.config.recompute import AUTO, check_recompute
from foundling.config.speed_checks import check_speed

if TYPE_CHECKING:
    from foundling.config.sections import ModelConfig, ParallelConfig, RunConfig, TrainConfig

HORIZONS = ("steps", "tokens", "epochs", "flops", "tokens_per_param", "hours", "dollars")
WHOLE = ("dim", "layers", "heads", "ffn_dim", "rope_original",
         "vocab_size", "kv_heads", "head_dim", "max_positions", "window")  # fmt: skip
MOST_LAYERS = 100_000
"""Whatever a file says: their parameters are listed one by one before anything is looked at."""
LARGEST = 2**28
"""Of every other size: the bytes of a matrix of two such sides are still a number to torch."""
MOST_SEQ_LEN = 2**31 - 1
"""Positions are kept in 32 bits."""
MOST_THREADS = 1024
"""Of one process; with a hundred thousand, no other thread can be started."""
LEAST_EPS = 1.17e-38
"""What is smaller is no normal number of fp32's, and a GPU may take it for 0."""


def check_model(model: "ModelConfig") -> None:
    """Refuse a shape that cannot be built, or a setting that the others make idle."""
    _check_model_ranges(model)
    if not model.head_dim and model.dim % model.heads:
        raise ConfigError(
            f"model.dim {model.dim} does not divide into {model.heads} heads;"
            " change one of them or set model.head_dim."
        )
    if model.heads % model.num_kv_heads:
        raise ConfigError(
            f"model.heads {model.heads} is not a multiple of model.kv_heads {model.kv_heads}."
        )
    if model.positions == "learned":
        _require(model.max_positions > 0, "learned positions need model.max_positions", 0)
    elif model.head_width % 2:
        raise ConfigError(f"a head is {model.head_width} wide and rotary positions need it even.")
    _check_model_no_effect(model)


def _check_model_ranges(model: "ModelConfig") -> None:
    for name in WHOLE:
        value = getattr(model, name)
        _require(isinstance(value, int), f"model.{name} is a whole number", value)
    for name in ("dim", "layers", "heads", "ffn_dim", "rope_original"):
        _require(getattr(model, name) > 0, f"model.{name} must be positive", getattr(model, name))
    _require(model.layers <= MOST_LAYERS, f"model.layers is at most {MOST_LAYERS:,}", model.layers)
    for name in WHOLE:
        size = getattr(model, name)
        _require(size <= LARGEST, f"model.{name} is at most {LARGEST:,}", f"{size:,}")
    for name in ("vocab_size", "kv_heads", "head_dim", "max_positions", "window", "init_head_std"):
        _require(
            getattr(model, name) >= 0, f"model.{name} cannot be negative", getattr(model, name)
        )
    for name in ("norm_eps", "rope_theta", "init_std", "rope_low"):
        _require(getattr(model, name) > 0, f"model.{name} must be positive", getattr(model, name))
    _require(model.rope_scaling >= 1, "model.rope_scaling is 1 or more", model.rope_scaling)
    _require(
        model.rope_high > model.rope_low,
        f"model.rope_high must be above model.rope_low {model.rope_low:g}",
        model.rope_high,
    )
    _require(
        model.logit_softcap >= 0, "model.logit_softcap cannot be negative", model.logit_softcap
    )
    _require(0 <= model.dropout < 1, "model.dropout is a share below 1", model.dropout)
    _require(
        bool(model.window_pattern) and set(model.window_pattern) <= {"S", "L"},
        "model.window_pattern is made of S and L",
        repr(model.window_pattern),
    )
    if model.value_embeds and model.dim < VALUE_GATE_WIDTH:
        raise ConfigError(
            f"model.value_embeds need model.dim of {VALUE_GATE_WIDTH} or more, and it is"
            f" {model.dim}."
        )


def _check_model_no_effect(model: "ModelConfig") -> None:
    rotary = ("rope_theta", "rope_scaling", "rope_low", "rope_high", "rope_original")
    if model.positions == "learned":
        for name in rotary:
            if _is_set(model, name):
                _no_effect(f"model.{name}", "with learned positions", "model.positions rotary")
    elif model.max_positions:
        _no_effect("model.max_positions", "with rotary positions", "model.positions learned")
    for name in rotary[2:]:
        if _is_set(model, name) and model.rope_scaling == 1:
            _no_effect(f"model.{name}", "while model.rope_scaling is 1", "a factor above 1")
    if _is_set(model, "window_pattern") and not model.window:
        _no_effect("model.window_pattern", "while model.window is 0", "model.window above 0")
    if model.window and not any(map(model.window_of, range(model.layers))):
        _no_effect("model.window", "while no layer is an S of model.window_pattern", "a pattern")
    if model.init_head_std and model.tie_embeddings:
        _no_effect("model.init_head_std", "with tied embeddings", "model.init_std")


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


def _check_layout(parallel: "ParallelConfig") -> None:
    for name in ("context", "pipeline"):
        if getattr(parallel, name) != 1:
            raise ConfigError(
                f"parallel.{name} is {getattr(parallel, name)} and {name} parallelism is not built"
                " yet; leave it at 1 and use parallel.shard and parallel.tensor."
            )
    for name in ("fsdp1", "reshard", "prefetch", "gather_dtype", "offload"):
        if _is_set(parallel, name) and parallel.shard == 1:
            _no_effect(f"parallel.{name}", "without shards", "parallel.shard")
    if parallel.fsdp1 and parallel.tensor > 1:
        raise ConfigError(
            "parallel.fsdp1 is for comparison and knows no parallel.tensor; leave one of them out."
        )


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
            f"{name} is left to the plan; write it down with `foundling config TARGET --gpu NAME"
            " -o run.yaml` and train that file."
        )


def check_world(config: "RunConfig", size: int) -> None:
    """Refuse what only several processes could obey, once their number is known to be one."""
    for name in ("grad_dtype", "bucket_mb"):
        if size == 1 and _is_set(config.parallel, name):
            _no_effect(f"parallel.{name}", "with one process", "more of them")


def horizons(train: "TrainConfig") -> list[str]:
    """Names of the horizons that are set."""
    return [name for name in HORIZONS if getattr(train, name)]


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
        for field in fields(getattr(config, section.name)):
            value = getattr(getattr(config, section.name), field.name)
            name = f"{section.name}.{field.name}"
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


def _is_set(section: object, name: str) -> bool:
    default = next(field.default for field in fields(section) if field.name == name)  # type: ignore[arg-type]
    return bool(getattr(section, name) != default)


def _no_effect(name: str, when: str, remedy: str) -> None:
    raise IdleError(name, when, f"remove it or use {remedy}")


def _require(condition: bool, sentence: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{sentence} (it is {value}).")
