"""Before a GPU is rented: parameters, FLOPs, horizon, memory, speed, hours, money. No torch."""

from foundling.plan.describe import describe
from foundling.plan.forecast import Forecast, compare, first_loss, forecast
from foundling.plan.horizon import (
    Horizon,
    PhasePlan,
    Sizes,
    SourceSize,
    batch_tokens,
    in_steps,
    micro_rows,
    plan_horizon,
    rows_per_step,
    warmup_steps,
)
from foundling.plan.params import (
    ParamCounts,
    count_params,
    flops_per_token,
    head_std,
    keys_seen,
    parameter_shapes,
)
from foundling.plan.supply import check_enough_data, epochs_needed, known_sizes

__all__ = [
    "Forecast",
    "Horizon",
    "ParamCounts",
    "PhasePlan",
    "Sizes",
    "SourceSize",
    "batch_tokens",
    "check_enough_data",
    "compare",
    "count_params",
    "describe",
    "epochs_needed",
    "first_loss",
    "flops_per_token",
    "forecast",
    "head_std",
    "in_steps",
    "keys_seen",
    "known_sizes",
    "micro_rows",
    "parameter_shapes",
    "plan_horizon",
    "rows_per_step",
    "warmup_steps",
]
