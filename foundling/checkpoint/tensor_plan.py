"""Who writes which tensors into which file: agreed once, and again only when the tensors change.

DCP plans with every save. Here the plan comes before the copy to the host, so that a rank copies
only what it is going to write: under data parallelism every rank holds everything, and N copies of
the state on one host would be N times the memory. The planning itself (pieces of DTensors, one
writer for each replica, the index) is DCP's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from foundling.checkpoint.ranks import Group, conclude, deal, is_main
from foundling.checkpoint.streams import FILE_BYTES


@dataclass(frozen=True)
class Share:
    """What one rank writes."""

    files: dict[str, list[WriteItem]]
    """The pieces of tensors in each of its files."""
    index: Metadata | None = None
    """Rank 0 only: all tensors and their pieces, without their places in files."""

    @property
    def items(self) -> list[WriteItem]:
        """All its pieces."""
        return [item for items in self.files.values() for item in items]


class Planner:
    """Remembers the last plan and makes a new one when the tensors are not as they were."""

    def __init__(self) -> None:
        self._last: list[WriteItem] | None = None
        self._share = Share({})

    def look(self, tensors: Mapping[str, Tensor]) -> "Sight":
        """What this rank holds of `tensors`, and whether that is new; no copy is made."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=is_main())
        plan = planner.create_local_plan()
        return Sight(planner, plan, is_new=self._last is None or plan.items != self._last)

    def agree(self, sight: "Sight", group: Group) -> Share:
        """A new plan; every rank must call it."""
        self._last = None
        made: list[Share] = []

        def make(plans: list[SavePlan]) -> None:
            made.extend(_shares(sight.planner, plans))

        conclude(lambda: sight.plan, make, group)
        self._share = deal(lambda: made, group)
        self._last = sight.plan.items
        return self._share

    @property
    def agreed(self) -> Share:
        """What this rank writes by the last plan."""
        return self._share


@dataclass(frozen=True)
class Sight:
    """This rank's view of the tensors to save."""

    planner: DefaultSavePlanner
    plan: SavePlan
    is_new: bool

    def piece(self, item: WriteItem) -> Tensor:
        """The live memory of one piece."""
        found = self.planner.resolve_data(item)
        assert isinstance(found, Tensor)
        return found.detach()


def _shares(planner: DefaultSavePlanner, plans: list[SavePlan]) -> list[Share]:
    """Every rank's share (rank 0 works this out); DCP refuses pieces that overlap or leave gaps."""
    final, index = planner.create_global_plan(plans)
    files = [_cut(rank, plan.items) for rank, plan in enumerate(final)]
    # The index of a large job is large, and only the one who writes it needs it.
    return [Share(mine, index if rank == 0 else None) for rank, mine in enumerate(files)]


def _cut(rank: int, items: list[WriteItem]) -> dict[str, list[WriteItem]]:
    """A rank's pieces in files named as DCP names them; at least one, as DCP writes it."""
    files: list[list[WriteItem]] = [[]]
    room = FILE_BYTES
    for item in items:
        size = item_bytes(item)
        if files[-1] and size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(item)
        room -= size
    return {f"__{rank}_{number}.distcp": part for number, part in enumerate(files)}


def item_bytes(item: WriteItem) -> int:
    """Bytes of the piece that an item writes."""
    data = item.tensor_data
    assert data is not None
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
