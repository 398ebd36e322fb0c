"""Keys of a config.json, each asked for by name, and what they say of rotary positions."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foundling.config import CheckpointError

PLAIN_ROPE = ("default", None)
ROPE_KEYS = ("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
             "original_max_position_embeddings")  # fmt: skip
Json = Mapping[str, Any]


class Keys:
    """Their keys, each asked for by name; a value that must be another is refused."""

    def __init__(self, tree: Json, where: Path) -> None:
        self.tree, self.where = tree, where

    def need(self, name: str, kind: Callable[[Any], Any] = int) -> Any:
        """A key that must be there."""
        value = self.tree.get(name)
        if value is None:
            raise CheckpointError(f"{self.where} has no {name} in its config.json.")
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if kind is int and (not is_whole or isinstance(value, bool)):
            raise CheckpointError(f"{self.where} has {name} {value!r}, which is no whole number.")
        return kind(value)

    def get(self, name: str, default: Any) -> Any:
        """A key, or what they take where it is missing."""
        value = self.tree.get(name)
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        """A key that may be missing and not null: their classes would fail at it."""
        value = self.tree.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.where} has {name} {value!r}, which is no number.")
        return float(value)

    def either(self, name: str, alias: str, default: Any) -> Any:
        """A key that has a second name; stated twice it must be the same."""
        if self.tree.get(name) is not None:
            self.only(alias, self.tree[name])
        return self.get(name, self.get(alias, default))

    def only(self, name: str, *allowed: Any) -> None:
        """The first of `allowed` is what they take where the key is missing."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise CheckpointError(
                f"{self.where} has {name} {value!r} in its config, and the model here knows only"
                f" {' or '.join(map(repr, allowed))}."
            )


def rope_of(keys: Keys) -> dict[str, Any]:
    """Our fields of the rotary positions, in the spelling of transformers 4 or 5."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(keys.get(name, {}), dict):
            raise CheckpointError(f"{keys.where} has {name} that are no fields with values.")
    stated = (dict(keys.get(name, {})) for name in ("rope_parameters", "rope_scaling"))
    new, old = ({n: v for n, v in one.items() if v is not None} for one in stated)
    if new.get("partial_rotary_factor") == 1:
        del new["partial_rotary_factor"]
    rope = new or old
    theta = float(rope["rope_theta"] if "rope_theta" in rope else keys.number("rope_theta", 1e4))
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in (*PLAIN_ROPE, "llama3"):
        raise CheckpointError(
            f"{keys.where} scales its rotary positions by {kind!r}, and only llama3's way is known"
            " here; another would be another function."
        )
    # Also tables by kind of layer, and rotations of a part of a head.
    if unknown := sorted((new.keys() | old.keys()) - set(ROPE_KEYS)):
        raise CheckpointError(f"{keys.where} has {unknown[0]} in its rotary positions, which is not"
                              " known here; without it they would be others.")  # fmt: skip
    both = [_spelled(one) for one in (new, old)]
    thetas = {float(one["rope_theta"]) for one in (keys.tree, new, old) if one.get("rope_theta")}
    if (new and old and both[0] != both[1]) or len(thetas) > 1:
        raise CheckpointError(f"{keys.where} states its rotary positions twice, and not alike.")
    if kind in PLAIN_ROPE:
        return {"rope_theta": theta}
    if missing := [name for name in ROPE_KEYS[3:] if name not in rope]:
        raise CheckpointError(f"{keys.where} has no {missing[0]} in its rotary positions.")
    # Beside them it goes before theirs in transformers 5, and is not looked at in 4.
    keys.only(ROPE_KEYS[-1], rope[ROPE_KEYS[-1]])
    return {
        "rope_theta": theta,
        "rope_scaling": float(rope["factor"]),
        "rope_low": float(rope["low_freq_factor"]),
        "rope_high": float(rope["high_freq_factor"]),
        "rope_original": int(rope["original_max_position_embeddings"]),
    }


def _spelled(rope: Json) -> dict[str, Any]:
    """One of two statements, so that it can be compared with the other."""
    kind = rope.get("rope_type", rope.get("type"))
    left_out = ("type", "rope_type", "rope_theta")
    named = {"kind": "default" if kind in PLAIN_ROPE else kind}
    return named | {name: value for name, value in rope.items() if name not in left_out}
