"""The plan of a run as one value: what `plan` prints, `--json` emits and the report compares.

Everything here is exact and needs no hardware; `study.py` adds what does.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foundling.config.checks import horizons
from foundling.config.sections import ModelConfig, RunConfig
from foundling.plan.horizon import Horizon, Sizes, plan_horizon
from foundling.plan.memory import checkpoint_bytes
from foundling.plan.moments import OPTIMIZERS
from foundling.plan.params import ParamCounts, count_params, flops_per_token, head_std
from foundling.plan.supply import epochs_needed
from foundling.plan.work import kind_of

LEAST_FRESH_LR = 6e-5
"""Peak rate of the largest models that were trained from scratch (Brown et al. 2020, table 2.1);
smaller ones take more, and continued training takes less."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Everything that can be said before the first step."""

    params: ParamCounts
    flops_per_token: int
    flops_by_definition: dict[str, int]
    """The same by each way of counting that is in use."""
    first_loss: float | None
    """What the fresh model pays; None while the vocabulary is not known."""
    checkpoint_bytes: int
    checkpoint_holds: str
    """In words."""
    horizon: Horizon | None
    epochs: dict[str, float] | None
    warnings: tuple[str, ...]
    """Of settings that work and are likely a slip."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for --json and run.json."""
        return asdict(self)


def forecast(
    config: RunConfig,
    data_ranks: int,
    sizes: Sizes | None = None,
    horizon: Horizon | None = None,
    optimizer: str = "",
) -> Forecast:
    """Plan a run; a config without a horizon still has a shape worth printing."""
    params = count_params(config.model)
    optimizer = optimizer or kind_of(config.optim)
    if horizon is None and horizons(config.train):
        horizon = plan_horizon(config, data_ranks, sizes)
    return Forecast(
        params=params,
        flops_per_token=flops_per_token(config.model, config.train.seq_len),
        flops_by_definition=flops_by_definition(config.model, config.train.seq_len),
        first_loss=first_loss(config.model),
        checkpoint_bytes=checkpoint_bytes(config.model, optimizer),
        checkpoint_holds=f"weights and {OPTIMIZERS[optimizer]}",
        horizon=horizon,
        epochs=epochs_needed(horizon, sizes) if horizon and sizes else None,
        warnings=tuple(_warnings(config)),
    )


def _warnings(config: RunConfig) -> Iterator[str]:
    lr, train = config.optim.lr, config.train
    if 0 < lr < LEAST_FRESH_LR and not (train.init or train.branch):
        yield (
            f"optim.lr {lr:g} is a fine-tuning rate and the weights begin at random: from scratch"
            f" even GPT-3's 175B took {LEAST_FRESH_LR:g}; name weights with --init, or raise it."
        )


def flops_by_definition(model: ModelConfig, seq_len: int) -> dict[str, int]:
    """Training FLOPs of a token, so that another project's MFU can be reproduced.

    N is no-positions, what costs FLOPs, and with embeddings all; a horizon in FLOPs says its own.
    """
    return {
        "full square": flops_per_token(model, seq_len),
        "full square, with embeddings": flops_per_token(model, seq_len, embeddings=True),
        "causal": flops_per_token(model, seq_len, causal=True),
        "causal, with embeddings": flops_per_token(model, seq_len, causal=True, embeddings=True),
        "6 N, no attention": 6 * count_params(model).no_positions,
        "6 N, no attention, with embeddings": 6 * count_params(model).all,
    }


def first_loss(model: ModelConfig) -> float | None:
    """ln V + s^2 / 2: the final norm leaves a mean square of one, so fresh logits are normal with
    variance s^2 = dim * std(head)^2, and their log-sum-exp is that much above ln V."""
    if not model.vocab_size:
        return None
    return math.log(model.vocab_size) + model.dim * head_std(model) ** 2 / 2


def compare(plan: Mapping[str, Any]) -> list[str]:
    """What was predicted, what came of it and how far off it was, a line a figure; then what was
    measured and had no plan."""
    predicted, measured = plan.get("predicted", {}), plan.get("measured", {})
    planned = {n: value for n, value in predicted.items() if value is not None and n in measured}
    lines = [
        f"{name}: planned {value:,.6g}, was {measured[name]:,.6g}"
        + (f" ({(measured[name] - value) / value:+.1%})" if value else "")
        for name, value in planned.items()
    ]
    return lines + [
        f"{name}: was {value:,.6g} (not planned)"
        for name, value in measured.items()
        if value and name not in planned
    ]
