"""The plan of a run as one value: what `plan` prints, `--json` emits and the report compares."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foundling.config.checks import horizons
from foundling.config.sections import ModelConfig, RunConfig
from foundling.plan.horizon import Horizon, SourceSize, epochs_needed, plan_horizon
from foundling.plan.params import ParamCounts, count_params, flops_per_token

BYTES_PER_PARAM_SAVED = 12  # fp32 weights and AdamW's two fp32 moments


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Everything that can be said before the first step."""

    params: ParamCounts
    flops_per_token: int
    first_loss: float | None
    """What the fresh model pays; None while the vocabulary is not known."""
    checkpoint_bytes: int
    horizon: Horizon | None
    epochs: dict[str, float] | None

    def to_json(self) -> dict[str, Any]:
        """Plain values, for --json and run.json."""
        return asdict(self)


def forecast(
    config: RunConfig, data_ranks: int, sizes: Mapping[str, SourceSize] | None = None
) -> Forecast:
    """Plan a run; a config without a horizon still has a shape worth printing."""
    params = count_params(config.model)
    horizon = plan_horizon(config, data_ranks, sizes) if horizons(config.train) else None
    return Forecast(
        params=params,
        flops_per_token=flops_per_token(config.model, config.train.seq_len),
        first_loss=first_loss(config.model),
        checkpoint_bytes=params.all * BYTES_PER_PARAM_SAVED,
        horizon=horizon,
        epochs=epochs_needed(config, horizon, sizes) if horizon and sizes else None,
    )


def first_loss(model: ModelConfig) -> float | None:
    """ln V + s^2 / 2: the final norm leaves a mean square of one, so fresh logits are normal with
    variance s^2 = dim * std(head)^2, and their log-sum-exp is that much above ln V."""
    if not model.vocab_size:
        return None
    head_variance = model.init_std**2 if model.tie_embeddings else 1 / model.dim
    return math.log(model.vocab_size) + model.dim * head_variance / 2


def compare(plan: Mapping[str, Any]) -> list[str]:
    """What was predicted, what came of it and how far off it was, a line a figure."""
    measured = plan.get("measured", {})
    return [
        f"{name}: planned {value:,.6g}, was {measured[name]:,.6g}"
        f" ({(measured[name] - value) / value:+.1%})"
        for name, value in plan.get("predicted", {}).items()
        if value and name in measured
    ]


def describe(config: RunConfig, plan: Forecast) -> list[tuple[str, str]]:
    """The plan as label and sentence, in the order a person asks."""
    model, train = config.model, config.train
    lines = [
        ("parameters", f"{plan.params.all:,} (all)"),
        (
            "",
            f"{plan.params.no_input_embedding:,} (no-input-embedding"
            f"{'; tied, so it is the head and stays' if model.tie_embeddings else ''})",
        ),
        ("", f"{plan.params.matrices_and_head:,} (matrices-and-head)"),
        (
            "flop/token",
            f"{plan.flops_per_token:,} = 6 x {plan.params.no_input_embedding:,} +"
            f" 12 x {model.layers} x {model.heads} x {model.head_width} x {train.seq_len}",
        ),
        ("checkpoint", f"{_bytes(plan.checkpoint_bytes)} (weights and AdamW's moments)"),
    ]
    if not train.init:
        lines.append(("first loss", _describe_first_loss(model, plan)))
    if plan.horizon:
        lines += _describe_horizon(config, plan.horizon)
    allowed = max(config.data.allow_repeat, config.train.epochs)
    for name, times in (plan.epochs or {}).items():
        refused = (
            f"; train will refuse: data.allow_repeat is {allowed:g}" if times > allowed else ""
        )
        lines.append(("data", f"{name} is read {times:.2f} times{refused}"))
    return lines


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _describe_first_loss(model: ModelConfig, plan: Forecast) -> str:
    if plan.first_loss is None:
        return "known with the vocabulary: model.vocab_size is 0 until a tokenizer is there"
    extra = plan.first_loss - math.log(model.vocab_size)
    return f"{plan.first_loss:.3f} = ln({model.vocab_size:,}) + {extra:.3f}"


def _describe_horizon(config: RunConfig, horizon: Horizon) -> list[tuple[str, str]]:
    return [
        (
            "step",
            f"{horizon.positions_per_step:,} positions = {config.train.seq_len} seq x"
            f" {horizon.rows_per_step} rows (at most {config.train.batch_size} a process and"
            f" micro-step; micro-steps {horizon.accumulation}, processes {horizon.data_ranks})",
        ),
        (
            "horizon",
            f"{horizon.basis}: {'' if horizon.is_exact else 'about '}{horizon.steps:,} steps,"
            f" {horizon.tokens:,} tokens{'' if horizon.is_exact else ' (rows not packed yet)'}",
        ),
        ("warm-up", f"{horizon.warmup_steps:,} steps"),
    ]
