"""What a person reads: printing by rank 0, tables, sizes and durations in words."""

import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def console(stderr: bool = False) -> "Console":
    """The one console; plain output keeps lines whole, so that logs can be searched."""
    from rich.console import Console

    target = Console(stderr=stderr, highlight=False)
    if target.is_terminal:
        return target
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=120, no_color=True)


def is_rank_zero() -> bool:
    """Whether this process prints for the job (torchrun and srun both set a rank)."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0


def say(text: str) -> None:
    """Print a line, once per job."""
    if is_rank_zero():
        console().print(text, markup=False)


def warn(text: str) -> None:
    """Print a warning to stderr, once per job."""
    if is_rank_zero():
        console(stderr=True).print(f"warning: {text}", style="yellow", markup=False)


def first_line(error: Exception) -> str:
    """What an error says, in one line; its name where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# Numbers as people say them, and tables.


def size(count: float) -> str:
    """Bytes."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def counted(count: int, word: str) -> str:
    """1 step, 2 steps."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def duration(hours: float) -> str:
    """Days, hours, minutes or seconds, whichever reads well."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:,.2f} hours"
    return f"{hours * 60:,.1f} minutes" if hours * 60 >= 1 else f"{hours * 3600:,.1f} seconds"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
