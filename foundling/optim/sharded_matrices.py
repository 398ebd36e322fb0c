"""Whole matrices out of parts, and parts out of whole ones, with the work dealt out over ranks.

Every layout of the project leaves each rank a rectangle of each matrix: rows under FSDP, rows or
columns under tensor parallelism, both, or everything under DDP. A matrix has one owner; the ranks
send their rectangles there, the owner does the work, and each gets its rectangle of the result
back: one all-to-all each way for many matrices. So a result is that of the whole matrix under every
layout, and N ranks do 1/N of the work each. Rejected: gathering everything everywhere (N times the
traffic and the memory), and orthogonalising the parts (another mathematics for each layout).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from foundling.config.errors import RunError
from foundling.runtime.progress import collective


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a matrix."""

    top: int
    left: int
    height: int
    width: int

    @property
    def size(self) -> int:
        """Its numbers."""
        return self.height * self.width

    def of(self, matrix: Tensor) -> Tensor:
        """The rectangle in a whole matrix, as a view."""
        rows = slice(self.top, self.top + self.height)
        return matrix[rows, self.left : self.left + self.width]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box_of(matrix: Tensor) -> Rectangle:
    """What of a matrix this rank holds."""
    if not isinstance(matrix, DTensor):
        return Rectangle(0, 0, matrix.shape[0], matrix.shape[1])
    # DTensor tells no rank publicly where its part begins.
    shape, offset = compute_local_shape_and_global_offset(
        matrix.shape, matrix.device_mesh, matrix.placements
    )
    return Rectangle(offset[0], offset[1], shape[0], shape[1])


class MatrixOwners:
    """Who holds which part of some matrices of one shape, and who owns them."""

    def __init__(
        self, matrices: Sequence[Tensor], first_owner: int, group: dist.ProcessGroup
    ) -> None:
        """Collective: the ranks tell each other what they hold."""
        self._group = group
        self.ranks, self.me = dist.get_world_size(group), dist.get_rank(group)
        self.shape = tuple(matrices[0].shape)
        boxes: list[list[Rectangle]] = [[] for _ in range(self.ranks)]
        with collective("muon's matrices"):
            dist.all_gather_object(boxes, [box_of(matrix) for matrix in matrices], group=group)
        self._boxes = boxes
        self._owners = [(first_owner + number) % self.ranks for number in range(len(matrices))]
        self._senders = [self._senders_of(number) for number in range(len(matrices))]
        pairs = zip(self._senders, self._owners, strict=True)
        self._is_whole = all(senders == {owner} for senders, owner in pairs)

    def owned(self, numbers: Sequence[int]) -> list[int]:
        """Those of some matrices that this rank owns."""
        return [number for number in numbers if self._owners[number] == self.me]

    def gather_whole(self, numbers: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
        """Give the own parts of `numbers` to their owners; whole matrices [K, rows, columns] of
        those owned here. Collective."""
        mine, like = self.owned(numbers), parts[0]
        stack = torch.empty((len(mine), *self.shape), dtype=like.dtype, device=like.device)
        if self._is_whole:  # owners have what they need: nothing has to travel
            for row, number in zip(stack, mine, strict=True):
                row.copy_(parts[numbers.index(number)])
            return stack
        out = [
            [
                parts[place]
                for place, number in enumerate(numbers)
                if self._owners[number] == rank and self.me in self._senders[number]
            ]
            for rank in range(self.ranks)
        ]
        wanted = [
            [self._boxes[rank][number] for number in mine if rank in self._senders[number]]
            for rank in range(self.ranks)
        ]
        pieces = self._exchange(out, wanted, like)
        for rank in range(self.ranks):
            given = [number for number in mine if rank in self._senders[number]]
            for number, box, piece in zip(given, wanted[rank], pieces[rank], strict=True):
                box.of(stack[mine.index(number)]).copy_(piece)
        return stack

    def scatter_parts(self, numbers: Sequence[int], stack: Tensor) -> list[Tensor]:
        """Give each rank its part of the matrices owned here; the own parts of all of `numbers`, in
        their order. Collective."""
        mine = self.owned(numbers)
        out = [
            [
                self._boxes[rank][number].of(row)
                for number, row in zip(mine, stack, strict=True)
                if rank != self.me
            ]
            for rank in range(self.ranks)
        ]
        theirs = [
            [number for number in numbers if self._owners[number] == rank != self.me]
            for rank in range(self.ranks)
        ]
        wanted = [[self._boxes[self.me][number] for number in owned] for owned in theirs]
        pieces = self._exchange(out, wanted, stack)
        found = {
            number: self._boxes[self.me][number].of(row)
            for number, row in zip(mine, stack, strict=True)
        }
        for owned, given in zip(theirs, pieces, strict=True):
            found |= dict(zip(owned, given, strict=True))
        return [found[number] for number in numbers]

    def _senders_of(self, number: int) -> frozenset[int]:
        """One rank for each rectangle of a matrix: the owner if it has it, else one of those that
        do, another for another owner."""
        owner = self._owners[number]
        holders: dict[Rectangle, list[int]] = {}
        for rank, boxes in enumerate(self._boxes):
            holders.setdefault(boxes[number], []).append(rank)
        parts = [box for box in holders if box.size]
        if sum(box.size for box in parts) != self.shape[0] * self.shape[1]:
            raise RunError(
                f"the ranks' parts of a {self.shape[0]} x {self.shape[1]} matrix do not make it up,"
                " so that Muon cannot work on it; use another layout, or optim.name adamw."
            )
        return frozenset(
            owner if owner in holders[box] else holders[box][owner % len(holders[box])]
            for box in parts
        )

    def _exchange(
        self, out: list[list[Tensor]], wanted: list[list[Rectangle]], like: Tensor
    ) -> list[list[Tensor]]:
        """Send lists of pieces to each rank, and receive pieces of the wanted shapes from each."""
        sizes = [sum(piece.numel() for piece in pieces) for pieces in out]
        awaited = [sum(box.size for box in boxes) for boxes in wanted]
        sent = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
        place = 0
        for piece in (piece for pieces in out for piece in pieces):
            sent[place : place + piece.numel()].view(piece.shape).copy_(piece)
            place += piece.numel()
        received = torch.empty(sum(awaited), dtype=like.dtype, device=like.device)
        with collective("muon's matrices"):
            dist.all_to_all_single(received, sent, awaited, sizes, group=self._group)
        found: list[list[Tensor]] = []
        place = 0
        for boxes in wanted:
            found.append([])
            for box in boxes:
                piece = received[place : place + box.size]
                found[-1].append(piece.view(box.height, box.width))
                place += box.size
        return found
