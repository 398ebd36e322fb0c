"""Settings of the guard that cannot work, or would have no effect, each refused in one sentence."""

from dataclasses import fields
from typing import TYPE_CHECKING

from foundling.config.errors import ConfigError, IdleError

if TYPE_CHECKING:
    from foundling.config.sections import GuardConfig

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
