"""What saving costs: how long training stands still for a checkpoint, and how long it is written.

Every rank copies and writes its own part, replicas share theirs, so both shrink with the ranks; the
writing goes on behind the training, from all ranks of a node to that node's disk or way to a store.
"""

from dataclasses import dataclass

from foundling.config.sections import RunConfig
from foundling.plan.memory import checkpoint_bytes
from foundling.plan.work import kind_of

COPY_RATE = 53e9
"""Bytes a second from a GPU to locked memory: 14.9 GB in 0.28 s on an H200."""
WRITE_RATE = 0.75e9
"""Bytes a second of one node, hashed, written, forced to the disk and read back, on the same
machine: 14.9 GB in 17 to 23 s."""
AGREE_S = 0.02
"""The ranks agree before they begin."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One save, and what all of them add."""

    checkpoint_bytes: int
    rank_bytes: int
    stall_s: float
    """Training stands still."""
    write_s: float
    """Behind the training."""
    share: float
    """Of the training time that the stalls add."""
    interval_s: float
    """Between two saves."""


def plan_saving(
    config: RunConfig, *, ranks: int, nodes: int, step_s: float, optimizer: str = ""
) -> Saving:
    """What a save costs on so many ranks and nodes."""
    whole = checkpoint_bytes(config.model, optimizer or kind_of(config.optim))
    stall = whole / ranks / COPY_RATE + (AGREE_S if ranks > 1 else 0.0)
    interval = config.checkpoint.every * step_s
    return Saving(
        checkpoint_bytes=whole,
        rank_bytes=-(-whole // ranks),
        stall_s=stall,
        write_s=whole / nodes / WRITE_RATE,
        share=stall / interval,
        interval_s=interval,
    )
