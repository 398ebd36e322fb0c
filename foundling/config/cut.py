"""How the documents of a source become units: everything that their number and content depend on.

Plain numbers, because `plan` counts units with them and must not load Arrow.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from foundling.config.errors import ConfigError
from foundling.config.sections import DataConfig, Packing

PACKING_VERSION = 1
"""Part of the name of everything kept about a cut: raise it when a policy packs differently."""
PARTS = 65536
"""Documents are dealt by hash into this many parts, for phases that must not share any."""
WHOLE = (0, PARTS)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One way to cut a source into units."""

    seq_len: int
    """Longest row, in input positions."""
    packing: Packing
    edges: tuple[int, ...] = ()
    """bucket only: row length of each bucket, rising; the last is seq_len."""
    unit_tokens: int = 0
    """bucket only: padded tokens of a unit, at most."""
    part: tuple[int, int] = WHOLE
    """Parts of the documents that are read: first, and one past the last."""

    @property
    def positions(self) -> int:
        """Input positions of a unit; of a bucket's, at most."""
        return self.unit_tokens if self.packing == "bucket" else self.seq_len

    @property
    def label(self) -> str:
        """A name for files that hold something about this cut."""
        words = [f"{self.packing}{PACKING_VERSION}", str(self.seq_len)]
        if self.packing == "bucket":
            edges = hashlib.sha256(repr(self.edges).encode()).hexdigest()[:12]
            words += [str(self.unit_tokens), edges]
        if self.part != WHOLE:
            words.append(f"p{self.part[0]}_{self.part[1]}")
        return "-".join(words)

    def units_per_step(self, global_batch_tokens: int) -> int:
        """Units of a step of so many padded tokens."""
        units, left = divmod(global_batch_tokens, self.positions)
        if left or not units:
            name = "data.bucket_tokens" if self.packing == "bucket" else "the rows' seq_len"
            raise ConfigError(
                f"train.global_batch_tokens {global_batch_tokens} is not a multiple of {name}"
                f" {self.positions}; change one of them."
            )
        return units

    def rows_in(self, edge: int) -> int:
        """Rows of a unit of the bucket with this edge."""
        return self.unit_tokens // edge


def cut_of(seq_len: int, packing: Packing, data: DataConfig | None = None) -> Cut:
    """The cut that a sequence length and a packing stand for, with the buckets of `data`."""
    if packing != "bucket":
        return Cut(seq_len=seq_len, packing=packing)
    data = data or DataConfig()
    return Cut(
        seq_len=seq_len,
        packing=packing,
        edges=bucket_edges(data.buckets, seq_len),
        unit_tokens=data.bucket_tokens,
    )


def bucket_edges(edges: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """Edges below seq_len, and seq_len."""
    return (*(edge for edge in edges if edge < seq_len), seq_len)
