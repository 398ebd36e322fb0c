"""`--what-if train.seq-len=4096,8192`: the same run with one thing changed, side by side."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from foundling.config.errors import ConfigError
from foundling.config.sections import RunConfig
from foundling.plan.choices import refuse_open
from foundling.plan.forecast import forecast
from foundling.plan.layout import counted_ranks
from foundling.plan.params import count_params
from foundling.plan.study import Asked, Study, study
from foundling.plan.supply import known_sizes
from foundling.plan.words import table

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
    machines: Sequence[tuple[str | None, int | None]],
    asked: Asked,
) -> list[Row]:
    """A row for the run as it is and one for every combination of the values, on every machine (a
    GPU's name and a number of nodes)."""
    parsed = [parse_what_if(text) for text in changes]
    names = [name for name, _ in parsed]
    variants: list[tuple[str, dict[str, str]]] = [("as it is", {})]
    for values in itertools.product(*(found for _, found in parsed)):
        told = " ".join(f"{n}={v}" for n, v in zip(names, values, strict=True))
        variants.append((told, dict(zip(names, values, strict=True))))
    return [
        {"what": told, **_row(resolved(more), gpu, replace(asked, nodes=nodes))}
        for gpu, nodes in machines
        for told, more in variants
    ]


def _row(config: RunConfig, gpu: str | None, asked: Asked) -> Row:
    config, sizes = known_sizes(config)
    if gpu is None:
        refuse_open(config, "hardware to be planned on")
        ranks = counted_ranks(config.parallel, asked.gpus, asked.nodes)
        plan = forecast(config, ranks, sizes)
        horizon = plan.horizon
        row: Row = {"params": plan.params.all, "flops": plan.flops_per_token}
    else:
        found = study(config, gpu, asked, sizes)
        horizon = found.horizon
        row = {
            "gpu": found.machine.gpu.name,
            "gpus": found.machine.world,
            "params": count_params(config.model).all,
            "batch_size": found.config.train.batch_size,
            "recompute": found.config.parallel.recompute,
            "needed_bytes": found.choice.memory.needed,
            "fits": found.fits,
            **_pace(found),
            "hours": found.hours,
            "dollars": found.dollars,
        }
    if horizon is not None:
        row |= {"positions_per_step": horizon.positions_per_step, "steps": horizon.steps}
    return row


def _pace(found: Study) -> Row:
    """Nothing for a run that does not fit."""
    speed = asdict(found.choice.speed) if found.fits else {}
    return {name: speed.get(name) for name in ("step_s", "tokens_per_s", "mfu")}


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
