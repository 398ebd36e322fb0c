"""Documents laid end to end, as flash kernels take them: where each begins in the flattened rows.

A kernel of this kind is given [B x T, H, D] and the first position of every document, and computes
nothing between two of them. How many there are is part of a compiled graph's shapes, so the list is
filled up to a power of two with documents of no length, which cost a kernel next to nothing. The
number itself is known where batches are made, on the host, and travels with the tensor: to ask the
device for it would make every micro-step wait. Rejected: torch.nn.attention.varlen, which is the
same operator behind a wrapper that older versions lack.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FEWEST = 4
"""Documents of a row that are planned for at least: fewer shapes to compile."""
_NOTE = "_at_most"


class Packed(NamedTuple):
    """What stands for a mask of documents; a tuple, because compilers look into those."""

    starts: Tensor
    """[N + 1] first position of each document in the flattened rows, int32; the last is the end."""
    window: int
    """Positions that are seen, the own one included; 0: all before."""


def note_count(documents: Tensor, at_most: int) -> Tensor:
    """Say how many documents a tensor [B, T] holds at most, padding counted as one in each row."""
    setattr(documents, _NOTE, at_most)
    return documents


def document_begins(documents: Tensor) -> Tensor:
    """True where a document of [B, T] has its first position in the row."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins


def packed(documents: Tensor, window: int) -> Packed:
    """The documents [B, T] of a micro-batch; padding at a row's end is one more of them."""
    rows, width = documents.shape
    begins = document_begins(documents)
    at_most = getattr(documents, _NOTE, None)
    if at_most is None:  # a probe or an evaluation: nothing is lost by waiting
        at_most = int(begins.sum())
    places = 1 << (max(at_most, FEWEST * rows) - 1).bit_length()
    total = rows * width
    positions = torch.arange(total, dtype=torch.int32, device=documents.device)
    starts = positions.masked_fill(~begins.flatten(), total).sort().values[:places]
    ends = starts.new_full((places + 1 - len(starts),), total)
    return Packed(torch.cat((starts, ends)), window)


def laid_out(x: Tensor) -> Tensor:
    """[B, H, T, D] to [B x T, H, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def put_back(mixed: Tensor, rows: int) -> Tensor:
    """[B x T, H, D] to [B, H, T, D]."""
    return mixed.view(rows, -1, *mixed.shape[1:]).transpose(1, 2)
