"""`--what-if train.seq-len=4096,8192`: the same run with one thing changed, side by side."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foundling.config.errors import ConfigError
from foundling.config.sections import RunConfig
from foundling.plan.describe import table
from foundling.plan.forecast import forecast
from foundling.plan.params import count_params
from foundling.plan.study import Asked, study
from foundling.plan.supply import known_sizes

Row = dict[str, Any]


def parse_what_if(text: str) -> tuple[str, list[str]]:
    """ "train.seq-len=4096,8192" as the setting and its values."""
    name, equals, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or "." not in name or not found:
        raise ConfigError(
            f"--what-if {text} compares nothing; write it as train.seq-len=4096,8192."
        )
    return name.strip().removeprefix("--"), found


def what_if(
    resolved: Callable[[Mapping[str, str]], RunConfig],
    changes: Sequence[str],
    gpu: str | None,
    asked: Asked,
) -> list[Row]:
    """One row for the run as it is and one for every combination of the values."""
    parsed = [parse_what_if(text) for text in changes]
    names = [name for name, _ in parsed]
    rows = [_row("as it is", resolved({}), gpu, asked)]
    for values in itertools.product(*(found for _, found in parsed)):
        told = " ".join(f"{n}={v}" for n, v in zip(names, values, strict=True))
        rows.append(_row(told, resolved(dict(zip(names, values, strict=True))), gpu, asked))
    return rows


def _row(told: str, config: RunConfig, gpu: str | None, asked: Asked) -> Row:
    config, sizes = known_sizes(config)
    if gpu is None:
        ranks = (config.parallel.replicate or 1) * config.parallel.shard
        plan = forecast(config, ranks, sizes)
        horizon = plan.horizon
        row: Row = {"what": told, "params": plan.params.all, "flops": plan.flops_per_token}
    else:
        found = study(config, gpu, asked, sizes)
        horizon, speed = found.horizon, found.choice.speed
        row = {
            "what": told,
            "params": count_params(config.model).all,
            "batch_size": found.config.train.batch_size,
            "recompute": found.config.parallel.recompute,
            "needed_bytes": found.choice.memory.needed,
            "fits": found.choice.memory.fits,
            "step_s": speed.step_s,
            "tokens_per_s": speed.tokens_per_s,
            "mfu": speed.mfu,
            "hours": found.hours,
            "dollars": found.dollars,
        }
    if horizon is not None:
        row |= {"positions_per_step": horizon.positions_per_step, "steps": horizon.steps}
    return row


def what_if_table(rows: Sequence[Row]) -> list[str]:
    """The rows as text; only columns that some row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = [[name.replace("_", " ") for name in names]]
    shown += [[_cell(name, row.get(name)) for name in names] for row in rows]
    return table(shown)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "needed_bytes":
        return f"{value / 1e9:,.1f} GB"
    if name == "mfu":
        return f"{value:.1%}"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.3f}"
