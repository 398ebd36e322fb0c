"""The order of the data: sample i as a function of seed, segments and i, from config and
manifests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from foundling.config.data import DataConfig, Phase, document_parts, phases_of
from foundling.config.errors import DataError
from foundling.config.mixture import row_weights
from foundling.config.packing_spec import ALL_PARTS, PART_COUNT, PackingSpec
from foundling.data.dataset import DataSet
from foundling.data.segments import Segment, Span
from foundling.data.source_cursor import (
    Past,
    Reads,
    ScheduleSlots,
    SourceCursor,
    Unread,
    added,
    begin_track,
    extended,
    slots_of,
)

# A segment fixes what is mixed and how it is packed from one step on; segments are appended, never
# edited. Within a segment the source of a sample comes from the table of 65,536 slots, and the unit
# within that source's epoch from a keyed bijection. So resuming is one integer, seeking costs the
# same anywhere, and the number of ranks does not enter. Rejected: shuffle buffers and iterators
# with state, which must be replayed or are quietly wrong at another world size.
#
# Shuffles are keyed by the digest of a source's manifest, not by its name or folder: moving a data
# set does not change the run.

Numbers = NDArray[np.int64]
Read = dict[str, Reads]


@dataclass(frozen=True)
class UnitRef:
    """Where a sample is found."""

    source: str
    epoch: int
    unit: int


@dataclass(frozen=True)
class Located:
    """Where a run of samples is found; `sources` are indices into `names`."""

    names: tuple[str, ...]
    sources: Numbers
    epochs: Numbers
    units: Numbers


class Order:
    """The sequence of units that every rank of every world size reads from.

    It is endless, unless a source is still being built: see `steps_known`.
    """

    def __init__(self, seed: int, segments: Sequence[Segment]) -> None:
        self.seed = seed
        self.segments = tuple(segments)
        _check_chain(self.segments)
        self.names = tuple(sorted({name for s in self.segments for name in s.weights}))
        self._firsts = np.array([s.first_sample for s in self.segments], np.int64)
        self._first_steps = np.array([s.first_step for s in self.segments], np.int64)
        self._tables: list[_Table] = []
        self._reads: list[Read] = [{}]
        for segment in self.segments:
            before = self._tables[-1] if self._tables else None
            self._tables.append(_Table(segment, self.names, before))

    def before(self, step: int) -> tuple[Segment, ...]:
        """Segments that gave anything to the steps before `step`: those that cannot be changed."""
        return tuple(segment for segment in self.segments if segment.first_step < step)

    def segment_of_step(self, step: int) -> Segment:
        """The segment that a step (from 0) belongs to."""
        return self.segments[self._number_of_step(step)]

    def sample_of(self, step: int) -> int:
        """The first sample of a step, which is also how many samples were read before it."""
        segment = self.segment_of_step(step)
        return segment.first_sample + (step - segment.first_step) * segment.rows_per_step

    def steps_known(self) -> int | None:
        """Steps that can be taken before a growing source runs out; None where none is growing."""
        for table, after in zip(self._tables, [*self.segments[1:], None], strict=True):
            segment = table.segment
            for_now = [table.samples_until_out(name) for name in segment.growing]
            known = segment.first_step + min(for_now, default=0) // segment.rows_per_step
            if for_now and (after is None or known < after.first_step):
                return known
        return None

    def locate(self, sample: int) -> UnitRef:
        """Where one sample is found."""
        at = self.locate_range(sample, 1)
        return UnitRef(at.names[at.sources[0]], int(at.epochs[0]), int(at.units[0]))

    def locate_range(self, first: int, count: int) -> Located:
        """Where the samples [first, first + count) are found."""
        low, high = self._number(first), self._number(first + count - 1)
        edges = [first, *self._firsts[low + 1 : high + 1].tolist(), first + count]
        parts = [
            table.locate(np.arange(start, stop, dtype=np.int64), self.seed)
            for table, start, stop in zip(self._tables[low:], edges, edges[1:], strict=False)
        ]
        sources, epochs, units = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return Located(self.names, sources, epochs, units)

    def consumed(self, samples: int) -> dict[str, int]:
        """Units of each source among the first `samples`, by arithmetic; a ledger must agree."""
        total = np.zeros(len(self.names), np.int64)
        for table, stop in self._stretches(samples):
            total += table.units_before(stop)
        return dict(zip(self.names, total.tolist(), strict=True))

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source was read among the first `samples`; a part of its documents counts
        as that part, and a source that grows is as large as it was by then."""
        total = dict.fromkeys(self.names, 0.0)
        if samples < 1:
            return total
        for name, read in self._read(self._number(samples - 1), samples).items():
            for track, units in read:
                low, high = track.packing_spec.part
                total[name] += units / track.size * (high - low) / PART_COUNT
        return total

    def _read(self, number: int, stop: int) -> Read:
        """Units of each source by packing, up to the sample `stop` of a segment."""
        table = self._tables[number]
        before = self._read_before(number)
        given = dict(zip(self.names, table.units_before(stop).tolist(), strict=True))
        return {
            **before,
            **{n: added(before.get(n, ()), t, given[n]) for n, t in table.tracks.items()},
        }

    def _read_before(self, number: int) -> Read:
        """The same at the beginning of a segment, worked out once: a ledger asks at every step."""
        while len(self._reads) <= number:
            last = len(self._reads) - 1
            self._reads.append(self._read(last, int(self._firsts[last + 1])))
        return self._reads[number]

    def left_unread(self, samples: int | None = None) -> tuple[Unread, ...]:
        """Epochs that ended early because a source's packing changed, up to `samples`."""
        return tuple(
            unread
            for table in self._tables
            if samples is None or table.segment.first_sample <= samples
            for track in table.tracks.values()
            for unread in track.unread
        )

    def _stretches(self, samples: int) -> list[tuple["_Table", int]]:
        """Each table that gave some of the first `samples`, and where it stopped."""
        stops = [*self._firsts[1:].tolist(), samples]
        return [
            (table, min(samples, stop))
            for table, stop in zip(self._tables, stops, strict=True)
            if samples > table.segment.first_sample
        ]

    def _number(self, sample: int) -> int:
        return int(self._firsts.searchsorted(sample, side="right")) - 1

    def _number_of_step(self, step: int) -> int:
        return int(self._first_steps.searchsorted(step, side="right")) - 1


def _check_chain(segments: Sequence[Segment]) -> None:
    firsts = [segment.first_sample for segment in segments]
    if not firsts or firsts[0] != 0 or sorted(set(firsts)) != firsts:
        raise DataError(
            f"the data order's segments start at samples {firsts}; the first must start at 0"
            " and each later one after the one before it."
        )
    for segment, after in pairwise(segments):
        steps = after.first_step - segment.first_step
        if segment.first_sample + steps * segment.rows_per_step != after.first_sample:
            raise DataError(
                f"the data order's segment at step {after.first_step} starts at sample"
                f" {after.first_sample}, which is not where {steps} steps of"
                f" {segment.rows_per_step} units end; give the checkpoint's own segments."
            )
    if any(segment.rows_per_step < 1 for segment in segments):
        raise DataError("a segment of the data order has no units per step; give them.")


class _Table:
    """One segment's slots, with the place of each slot among those of its source.

    A source's *turn* counts its units from the beginning of time: turn // size is the epoch and
    turn % size the place in that epoch's shuffle.
    """

    def __init__(self, segment: Segment, names: tuple[str, ...], before: "_Table | None") -> None:
        self.segment, self.names = segment, names
        self.table: ScheduleSlots = slots_of(tuple(sorted(segment.weights.items())))
        self.number_of = np.array([names.index(name) for name in self.table.names], np.int64)
        self.past = before.past_at(segment.first_sample) if before else {}
        self.tracks: dict[str, SourceCursor] = {
            name: begin_track(segment, name, self.past.get(name, ())) for name in self.table.names
        }

    def past_at(self, sample: int) -> dict[str, Past]:
        """What there is to know of every source when the next segment begins at `sample`."""
        turns = self.units_before(sample)
        reached = {
            name: extended(
                self.past.get(name, ()), track, track.start + int(turns[self.names.index(name)])
            )
            for name, track in self.tracks.items()
        }
        return {**self.past, **reached}

    def units_before(self, sample: int) -> Numbers:
        """Units that each source gives to this segment before `sample`."""
        given = np.zeros(len(self.names), np.int64)
        given[self.number_of] = self.table.given(sample - self.segment.first_sample)
        return given

    def samples_until_out(self, name: str) -> int:
        """Samples of this segment before one would be a unit that the source does not have yet."""
        track = self.tracks[name]
        return self.table.when(self.table.names.index(name), track.size - track.start)

    def locate(self, samples: Numbers, seed: int) -> tuple[Numbers, Numbers, Numbers]:
        """Source, epoch and unit of each sample."""
        sources, given = self.table.turns(samples - self.segment.first_sample)
        epochs, units = np.empty_like(given), np.empty_like(given)
        for source, name in enumerate(self.table.names):
            mine = np.flatnonzero(sources == source)
            if not len(mine):
                continue
            track = self.tracks[name]
            epochs[mine], units[mine] = track.locate(given[mine], seed)
        return self.number_of[sources], epochs, units


# From the config and what is on disk to the segments of a run, fresh or half done.
#
# What was read before a step cannot change; from that step on the order is what the config and the
# manifests say now. So a change of the mixture at a resume, and a source that has grown while it
# was followed, are the same thing: segments that are kept and segments that are appended.


def reopen_order(
    saved: Sequence[Segment],
    sources: Mapping[str, DataSet],
    data: DataConfig,
    *,
    seed: int,
    seq_len: int,
    steps: int,
    global_batch_tokens: int,
    step: int = 0,
) -> Order:
    """The order of a run that has taken `step` steps of the `saved` segments; of none, a fresh one.

    Where nothing has changed it is the saved one. `Order.left_unread` says what a change of cut
    has left behind.
    """
    phases = phases_of(data, seq_len, steps)
    parts = _parts(phases, data, sources, saved if step else ())
    kept = [segment for segment in saved if segment.first_step < step]
    for phase in phases:
        if phase.first_step + phase.steps <= step and kept:
            continue
        specs = {name: parts[name, phase.packing_spec] for name in phase.weights}
        segment = _segment(phase, specs, sources, data, global_batch_tokens, kept)
        first = max(step, phase.first_step)
        if kept and _says_the_same(kept[-1], segment):
            continue
        sample = Order(seed, kept).sample_of(first) if kept else 0
        kept.append(replace(segment, first_step=first, first_sample=sample))
    return Order(seed, kept)


def _parts(
    phases: Sequence[Phase],
    data: DataConfig,
    sources: Mapping[str, DataSet],
    saved: Sequence[Segment],
) -> dict[tuple[str, PackingSpec], PackingSpec]:
    """A fresh run divides documents over the packings that its phases need. Later on a packing
    keeps its part, and a new one reads all, which starts the source's next epoch."""
    wanted = document_parts(
        phases, data.weights_by, {name: d.stored for name, d in sources.items()}
    )
    if not saved:
        return wanted
    dealt = {
        (name, replace(s.packing_spec(name), part=ALL_PARTS)): s.packing_spec(name)
        for s in saved
        for name in s.weights
    }
    return {(name, spec): dealt.get((name, spec), spec) for name, spec in wanted}


def _segment(
    phase: Phase,
    specs: Mapping[str, PackingSpec],
    sources: Mapping[str, DataSet],
    data: DataConfig,
    global_batch_tokens: int,
    kept: Sequence[Segment],
) -> Segment:
    """What is on disk now, as the segment of a phase; where it begins is not said yet."""
    names = sorted(phase.weights)
    sizes = {name: sources[name].size(specs[name]) for name in names}
    spans = {
        name: _span(name, specs[name], sources[name], kept)
        for name in names
        if data.follow and (_was_followed(name, kept) or not sources[name].is_complete)
    }
    for name, size in sizes.items():
        if not size.units:
            where = "" if specs[name] == phase.packing_spec else " left for one of data.phases"
            raise DataError(f"{name} holds no units{where}; build it from more text.")
    weights = row_weights(phase.weights, data.weights_by, sizes)
    return Segment(
        first_sample=0,
        digests={name: sources[name].digest_of(spans.get(name)) for name in names},
        weights={name: weights[name] for name in phase.weights},
        units={name: sources[name].size(specs[name], spans.get(name)).units for name in names},
        seq_len=phase.packing_spec.seq_len,
        packing=phase.packing_spec.packing,
        rows_per_step=phase.packing_spec.units_per_step(global_batch_tokens),
        buckets=phase.packing_spec.edges,
        bucket_tokens=phase.packing_spec.unit_tokens,
        shards=spans,
        growing=tuple(name for name in spans if not sources[name].is_complete),
        slices={name: spec.part for name, spec in specs.items() if spec != phase.packing_spec},
    )


def _was_followed(name: str, kept: Sequence[Segment]) -> bool:
    return any(name in segment.shards for segment in kept)


def _span(name: str, spec: PackingSpec, source: DataSet, kept: Sequence[Segment]) -> Span:
    """The shards that have come since the run last looked; if none have, those it looked at."""
    spans = [s.shards[name] for s in kept if name in s.shards and s.packing_spec(name) == spec]
    there = len(source.shards)
    if not spans:
        return (0, there)
    return spans[-1] if spans[-1][1] == there else (spans[-1][1], there)


def _says_the_same(one: Segment, other: Segment) -> bool:
    place = {"first_step": 0, "first_sample": 0}
    return replace(one, **place) == replace(other, **place)  # type: ignore[arg-type]
