"""The plan of a run as one value: what `plan` prints, `--json` emits and the report compares."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foundling.config.checks import horizons
from foundling.config.sections import RunConfig
from foundling.plan.horizon import Horizon, SourceSize, epochs_needed, plan_horizon
from foundling.plan.params import ParamCounts, count_params, flops_per_token

BYTES_PER_PARAM_SAVED = 12  # fp32 weights and AdamW's two fp32 moments


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Everything that can be said before the first step."""

    params: ParamCounts
    flops_per_token: int
    first_loss: float
    """ln(vocabulary): what a model that knows nothing pays."""
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
    vocab = config.model.vocab_size
    return Forecast(
        params=params,
        flops_per_token=flops_per_token(config.model, config.train.seq_len),
        first_loss=math.log(vocab) if vocab else float("nan"),
        checkpoint_bytes=params.all * BYTES_PER_PARAM_SAVED,
        horizon=horizon,
        epochs=epochs_needed(config, horizon, sizes) if horizon and sizes else None,
    )


def describe(config: RunConfig, plan: Forecast) -> list[tuple[str, str]]:
    """The plan as label and sentence, in the order a person asks."""
    model, train = config.model, config.train
    lines = [
        ("parameters", f"{plan.params.all:,} (all)"),
        ("", f"{plan.params.no_input_embedding:,} (no-input-embedding)"),
        ("", f"{plan.params.matrices_and_head:,} (matrices-and-head)"),
        (
            "flop/token",
            f"{plan.flops_per_token:,} = 6 x {plan.params.no_input_embedding:,} +"
            f" 12 x {model.layers} x {model.heads} x {model.head_width} x {train.seq_len}",
        ),
        ("checkpoint", f"{plan.checkpoint_bytes / 1e6:,.1f} MB (weights and AdamW's moments)"),
        ("first loss", f"{plan.first_loss:.3f} = ln({model.vocab_size:,})"),
    ]
    if plan.horizon:
        lines += _describe_horizon(config, plan.horizon)
    for name, times in (plan.epochs or {}).items():
        lines.append(("data", f"{name} is read {times:.2f} times"))
    return lines


def _describe_horizon(config: RunConfig, horizon: Horizon) -> list[tuple[str, str]]:
    return [
        (
            "step",
            f"{horizon.positions_per_step:,} positions = {config.train.seq_len} seq x"
            f" {horizon.rows_per_step} rows ({config.train.batch_size} a process and micro-step,"
            f" {horizon.accumulation} micro-steps, {horizon.data_ranks} processes)",
        ),
        ("horizon", f"{horizon.basis}: {horizon.steps:,} steps, {horizon.tokens:,} tokens"),
        ("warm-up", f"{horizon.warmup_steps:,} steps"),
    ]
