"""Work that one rank does for all, so that its failure is everybody's and none waits alone."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def has_ranks() -> bool:
    """Whether a process group was started."""
    return dist.is_available() and dist.is_initialized()


def is_main() -> bool:
    """Whether this process is the one that names and deletes folders."""
    return not has_ranks() or dist.get_rank() == 0


def on_main(work: Callable[[], T]) -> T:
    """Do `work` on rank 0; its result or exception is every rank's, so that none waits alone."""
    if not has_ranks():
        return work()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return cast(T, outcome[0])
