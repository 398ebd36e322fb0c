"""THE table that says how each parameter is optimised.

Every parameter is covered by exactly one row; none or two is an error, so a new kind of parameter
cannot be trained by accident with another's settings. Rejected: deciding by the number of
dimensions (an embedding is a matrix too, and would be decayed).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foundling.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row: the parameters whose whole name matches the pattern, and what they get."""

    group: str
    pattern: str
    lr_scale: float = 1.0
    """Multiplies the scheduled learning rate."""
    decay: bool
    """Whether `optim.weight_decay` applies."""


RULES: tuple[Rule, ...] = (
    Rule(
        group="embedding",
        pattern=r"(embed|positions|value_embeds\.\d+)\.weight",
        decay=False,
    ),
    Rule(
        group="norm",
        pattern=r"((layers\.\d+\.(attn|ffn)_|embed_)?norm|layers\.\d+\.attn\.[qk]_norm)\.weight",
        decay=False,
    ),
    Rule(
        group="bias",
        pattern=r"((layers\.\d+\.(attn|ffn)_|embed_)?norm"
        r"|layers\.\d+\.(attn\.([qkvo]|[qk]_norm)|ffn\.(gate|up|down)))\.bias",
        decay=False,
    ),
    Rule(group="scalar", pattern=r"layers\.\d+\.mix", decay=False),
    Rule(
        group="matrix",
        pattern=r"layers\.\d+\.(attn\.([qkvo]|value_gate)|ffn\.(gate|up|down))\.weight",
        decay=True,
    ),
    Rule(group="head", pattern=r"head\.weight", decay=True),
)


def assign(names: Iterable[str], rules: Sequence[Rule] = RULES) -> dict[str, list[str]]:
    """Names by group, in the table's order of groups and the given order of names."""
    groups: dict[str, list[str]] = {rule.group: [] for rule in rules}
    for name in names:
        matching = [rule for rule in rules if re.fullmatch(rule.pattern, name)]
        if len(matching) != 1:
            found = " and ".join(rule.group for rule in matching) or "no rule"
            raise ConfigError(
                f"parameter {name} is covered by {found} of the optimizer's table, and exactly one"
                " rule must cover it; mend RULES in foundling/optim/rules.py."
            )
        groups[matching[0].group].append(name)
    return {group: members for group, members in groups.items() if members}
