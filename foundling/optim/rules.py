"""THE table that says how each parameter is optimised.

Every parameter is covered by exactly one row; none or two is an error, so a new kind of parameter
cannot be trained by accident with another's settings. A row names the optimizer that works on it
for each choice of `optim.name`, and the field of `optim` with its peak rate. Rejected: deciding by
the number of dimensions (an embedding is a matrix too, and would be decayed).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from foundling.config.errors import ConfigError
from foundling.config.optim import LrPart, OptimConfig, OptimizerName


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row: the parameters whose whole name matches the pattern, and what they get."""

    group: str
    pattern: str
    lr_scale: float = 1.0
    """Multiplies the scheduled learning rate."""
    lr_of: LrPart | None = None
    """Key of `optim.lr_of` that gives the peak rate; where it is not there, `optim.lr` does."""
    decay: bool
    """Whether `optim.weight_decay` applies."""
    large: bool = False
    """Matrices, whose moments are worth 8 bits."""
    muon: bool = False
    """Matrices of blocks, which Muon takes."""

    def optimizer_for(self, config: OptimConfig) -> OptimizerName:
        """The optimizer of these parameters."""
        if config.name == "muon" and self.muon:
            return "muon"
        if config.name == "adamw8bit" and self.large:
            is_wide = self.group == "embedding" and config.wide_embedding
            return "adamw" if is_wide else "adamw8bit"
        return "adamw"


RULES: tuple[Rule, ...] = (
    Rule(
        group="embedding",
        pattern=r"(embed|positions|value_embeds\.\d+)\.weight",
        lr_of="embedding",
        decay=False,
        large=True,
    ),
    Rule(
        group="norm",
        pattern=r"((layers\.\d+\.(attn|ffn)_|embed_)?norm|layers\.\d+\.attn\.[qk]_norm)\.weight",
        lr_of="vector",
        decay=False,
    ),
    Rule(
        group="bias",
        pattern=r"((layers\.\d+\.(attn|ffn)_|embed_)?norm"
        r"|layers\.\d+\.(attn\.([qkvo]|[qk]_norm)|ffn\.(gate|up|down)))\.bias",
        lr_of="vector",
        decay=False,
    ),
    Rule(group="scalar", pattern=r"layers\.\d+\.mix", lr_of="vector", decay=False),
    Rule(
        group="matrix",
        pattern=r"layers\.\d+\.(attn\.[qkvo]|ffn\.(gate|up|down))\.weight",
        decay=True,
        large=True,
        muon=True,
    ),
    Rule(group="gate", pattern=r"layers\.\d+\.attn\.value_gate\.weight", decay=True, muon=True),
    Rule(group="head", pattern=r"head\.weight", lr_of="head", decay=True, large=True),
)


def with_lr_scales(config: OptimConfig, rules: Sequence[Rule] = RULES) -> tuple[Rule, ...]:
    """The table with the scales that a config's peak rates make."""
    found = []
    for rule in rules:
        peak = config.lr_of.get(rule.lr_of, config.lr) if rule.lr_of else config.lr
        scale = peak / config.lr if config.lr else 1.0
        found.append(replace(rule, lr_scale=rule.lr_scale * scale))
    return tuple(found)


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
