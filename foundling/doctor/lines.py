"""What the doctor says: a line a finding, each with its level and, unless it passes, the remedy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from foundling.config.errors import UserError

Level = Literal["pass", "warn", "fail"]
Facts = Mapping[str, Any]
NONE: Facts = {}
LEVELS: tuple[Level, ...] = ("pass", "warn", "fail")


@dataclass(frozen=True)
class Line:
    """One finding."""

    check: str
    """What was looked at, in a word or two."""
    level: Level
    text: str
    """What was found; of a warning or a failure also what to do."""
    of_node: bool = False
    """A failure of this machine, which no setting repairs: a job is better off without it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The numbers behind it, for scripts."""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.check:<14} {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "Line":
        """The inverse of to_json."""
        return cls(**tree)


def passed(check: str, text: str, facts: Facts = NONE) -> Line:
    """Nothing to do."""
    return Line(check, "pass", text, facts=dict(facts))


def warned(check: str, text: str, facts: Facts = NONE) -> Line:
    """It will work, and the owner would want to know."""
    return Line(check, "warn", text, facts=dict(facts))


def failed(check: str, text: str, facts: Facts = NONE, *, of_node: bool = False) -> Line:
    """It will not work."""
    return Line(check, "fail", text, of_node=of_node, facts=dict(facts))


def refused(check: str, error: UserError) -> Line:
    """A refusal in its own words."""
    return failed(check, str(error))


def worst(lines: Iterable[Line]) -> Level:
    """The highest level among them."""
    return max((line.level for line in lines), key=LEVELS.index, default="pass")


def gathered(by_rank: Sequence[tuple[str, Sequence[Line]]]) -> list[str]:
    """What all ranks said, with who said it: what everybody said alike is said once.

    `by_rank` has a name for each rank ("rank 3 on n17") and its lines.
    """
    whose: dict[tuple[str, Level, str], list[str]] = {}
    for name, lines in by_rank:
        for line in lines:
            whose.setdefault((line.check, line.level, line.text), []).append(name)
    told = []
    for (check, level, text), names in whose.items():
        if len(names) == len(by_rank):
            suffix = f" (all {len(names)} ranks)" if len(names) > 1 else ""
        else:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            suffix = f" ({', '.join(names[:3])}{more})" if len(by_rank) > 1 else ""
        told.append(str(Line(check, level, text + suffix)))
    return told
