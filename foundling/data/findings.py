"""What a check looked at, what it could not look at, and what is wrong: a sentence each."""

from dataclasses import asdict, dataclass, field
from typing import Any

from foundling.config.errors import DataError


@dataclass
class Findings:
    """Filled by the checks of `data verify`, one after another."""

    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """What was left out and why; a check that is skipped in silence is a lie."""
    wrong: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {"whole": not self.wrong, **asdict(self)}

    def refuse(self) -> None:
        """Raise what is wrong, if anything is: the first finding, and how many more there are."""
        if not self.wrong:
            return
        more = len(self.wrong) - 1
        also = f" ({more} more finding{'s' * (more > 1)} listed above)" if more else ""
        raise DataError(self.wrong[0].removesuffix(".") + also + ".")
