"""A segment: what is mixed and how it is cut, from one step on. Plain JSON in a checkpoint.

Segments are appended, never edited. Version 1 had neither steps nor parts; it is migrated when it
is read.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from foundling.config.cut import WHOLE, Cut
from foundling.config.sections import Packing

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What is mixed, from `first_sample` on, which is where step `first_step` begins."""

    first_sample: int
    digests: dict[str, str]
    """Digest of each source's manifest; of a source in `shards`, of those shards."""
    weights: dict[str, float]
    """Share of each source in the units, relative to the others."""
    units: dict[str, int]
    """Units in an epoch of each source under this cut; of a source in `shards`, in those shards."""
    seq_len: int
    packing: Packing
    rows_per_step: int
    """Units of an optimizer step, over all ranks."""
    first_step: int = 0
    buckets: tuple[int, ...] = ()
    """Packing by bucket: row length of each bucket."""
    bucket_tokens: int = 0
    """Packing by bucket: padded tokens of a unit."""
    shards: dict[str, Span] = field(default_factory=dict)
    """Shards of a followed source that came last: first, and one past the last. Where an earlier
    segment ended at the first, the two are one epoch and none of either is lost or repeated."""
    growing: tuple[str, ...] = ()
    """Followed sources that may still get shards: no unit is read twice while they may."""
    slices: dict[str, Span] = field(default_factory=dict)
    """Parts of 65,536 of a source's documents, by hash, where phases cut it differently."""

    def cut(self, name: str) -> Cut:
        """How one source becomes units here."""
        return Cut(
            seq_len=self.seq_len,
            packing=self.packing,
            edges=self.buckets,
            unit_tokens=self.bucket_tokens,
            part=self.slices.get(name, WHOLE),
        )

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        spans = {
            name: {source: list(span) for source, span in getattr(self, name).items()}
            for name in ("shards", "slices")
        }
        lists = {"buckets": list(self.buckets), "growing": list(self.growing)}
        return {**asdict(self), **spans, **lists}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, rows_per_step: int = 0) -> "Segment":
        """The inverse of to_json; an old segment takes `rows_per_step` from its run."""
        spans = {
            name: {source: tuple(span) for source, span in data.get(name, {}).items()}
            for name in ("shards", "slices")
        }
        return cls(
            **{
                "rows_per_step": rows_per_step,
                **data,
                **spans,
                "buckets": tuple(data.get("buckets", ())),
                "growing": tuple(data.get("growing", ())),
            }
        )
