"""`foundling bench optimizer`: the update alone, on a model's own parameters with random gradients.

AdamW as a loop, in multi-tensor calls and fused, and every optimizer that `optim.name` offers, made
by the trainer's own builder. State is counted in bytes of what the optimizer keeps.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from foundling.bench.early import refuse_unknown
from foundling.bench.steps import alone, free
from foundling.config.errors import UserError
from foundling.config.sections import OptimConfig, RunConfig
from foundling.model import Transformer
from foundling.optim import build_optimizer, set_lr
from foundling.plan.words import size, table
from foundling.runtime.device import Choice, choose, prepare
from foundling.train.ceilings import device_name, time_of

Make = Callable[[Transformer], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One optimizer."""

    name: str
    refusal: str = ""
    seconds: float = 0.0
    state_bytes: int = 0
    state_per_param: float = 0.0
    ns_per_param: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def optimizers(config: RunConfig) -> dict[str, Make]:
    """Every optimizer by name."""
    optim = config.optim

    def adamw(**how: bool) -> Make:
        return lambda model: torch.optim.AdamW(
            model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            **how,
        )

    found = {
        "adamw loop": adamw(foreach=False, fused=False),
        "adamw foreach": adamw(foreach=True),
        "adamw fused": adamw(fused=True),
    }
    for name in names_offered():
        found[f"optim.name {name}"] = _built(replace(optim, **_named(name)))
    return found


def names_offered() -> tuple[str, ...]:
    """What `optim.name` can be; without that field there is only the default."""
    if "name" not in {item.name for item in fields(OptimConfig)}:
        return ("",)
    return tuple(str(name) for name in get_args(get_type_hints(OptimConfig)["name"]))


def _named(name: str) -> dict[str, Any]:
    return {"name": name} if name else {}


def _built(optim: OptimConfig) -> Make:
    return lambda model: build_optimizer(model.named_parameters(), optim)


def bench_optimizer(
    config: RunConfig, *, only: tuple[str, ...] = (), seconds: float = 0.5
) -> Iterator[Row]:
    """Measure each; one that cannot be built says why."""
    alone(config, rows=False)
    choice = prepare(config.train)
    there = optimizers(config)
    refuse_unknown((word for word in only if not any(word in name for name in there)), there)
    for name, make in there.items():
        if only and not any(word in name for word in only):
            continue
        refusal = ""
        try:
            yield _measured(config, choice, name, make, seconds)
        except (UserError, RuntimeError, ImportError) as error:
            refusal = str(error).splitlines()[0][:160]
        if refusal:
            yield Row(name=name, refusal=refusal)
        free(choice.device)


def _measured(config: RunConfig, choice: Choice, name: str, make: Make, seconds: float) -> Row:
    with torch.device(choice.device):
        model = Transformer(config.model)
    count = 0
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter).mul_(1e-3)
        count += parameter.numel()
    optimizer = make(model)
    if "lr_scale" in optimizer.param_groups[0]:
        set_lr(optimizer, config.optim.lr)
    took = time_of(optimizer.step, choice.device, seconds)
    held = sum(_bytes(state) for state in optimizer.state.values())
    return Row(
        name=name,
        seconds=took,
        state_bytes=held,
        state_per_param=held / count,
        ns_per_param=took / count * 1e9,
    )


def _bytes(state: Any) -> int:
    """Of everything in an optimizer's state, inside of a quantised tensor too."""
    if isinstance(state, Tensor):
        if hasattr(state, "__tensor_flatten__"):
            names, _ = state.__tensor_flatten__()
            return sum(_bytes(getattr(state, name)) for name in names)
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(_bytes(value) for value in state.values())
    return 0


def describe_optimizer(rows: list[Row], config: RunConfig) -> list[str]:
    """The table as text."""
    choice = choose(config.train.device, config.train.dtype)
    lines = [["optimizer", "ms", "ns a parameter", "state", "bytes a parameter"]]
    for row in rows:
        if not row.refusal:
            state = [size(row.state_bytes), f"{row.state_per_param:.2f}"]
            times = [f"{row.seconds * 1e3:.2f}", f"{row.ns_per_param:.4f}"]
            lines.append([row.name, *times, *state])
    return [
        f"{device_name(choice.device)}: one update of every parameter",
        *table(lines),
        *(f"{row.name}: {row.refusal}" for row in rows if row.refusal),
    ]
