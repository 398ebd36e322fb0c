"""What a person reads: rank 0 speaks, in colour on a terminal and in plain lines elsewhere."""

import os
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
    """Whether this process speaks for the job (torchrun and srun both set a rank)."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0


def say(text: str) -> None:
    """Tell the user something, once per job."""
    if is_rank_zero():
        console().print(text, markup=False)


def warn(text: str) -> None:
    """Tell the user something they would want to know had they not looked; goes to stderr."""
    if is_rank_zero():
        console(stderr=True).print(f"warning: {text}", style="yellow", markup=False)


def first_line(error: Exception) -> str:
    """What an error says, in one line; its name where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
