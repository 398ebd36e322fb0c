"""From the config and what is on disk to the segments of a run, fresh or half done.

What was read before a step cannot change; from that step on the order is what the config and the
manifests say now. So a change of the mixture at a resume, and a source that has grown while it was
followed, are the same thing: segments that are kept and segments that are appended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foundling.config.cut import WHOLE, Cut
from foundling.config.errors import DataError
from foundling.config.mixture import row_weights
from foundling.config.phases import Phase, parts_of, phases_of
from foundling.config.sections import DataConfig
from foundling.data.dataset import DataSet
from foundling.data.order import Order
from foundling.data.segment import Segment, Span


def open_order(
    sources: Mapping[str, DataSet],
    data: DataConfig,
    *,
    seed: int,
    seq_len: int,
    steps: int,
    global_batch_tokens: int,
) -> Order:
    """The order of a fresh run of `steps` steps: a segment for each phase."""
    return reopen_order(
        (),
        sources,
        data,
        seed=seed,
        seq_len=seq_len,
        steps=steps,
        global_batch_tokens=global_batch_tokens,
        step=0,
    )


def reopen_order(
    saved: Sequence[Segment],
    sources: Mapping[str, DataSet],
    data: DataConfig,
    *,
    seed: int,
    seq_len: int,
    steps: int,
    global_batch_tokens: int,
    step: int,
) -> Order:
    """The order of a run that has taken `step` steps of the `saved` segments.

    Where nothing has changed it is the saved one. `Order.left_unread` says what a change of cut
    has left behind.
    """
    phases = phases_of(data, seq_len, steps)
    parts = _parts(phases, data, sources, saved if step else ())
    kept = [segment for segment in saved if segment.first_step < step]
    for phase in phases:
        if phase.first_step + phase.steps <= step and kept:
            continue
        cuts = {name: parts[name, phase.cut] for name in phase.weights}
        segment = _segment(phase, cuts, sources, data, global_batch_tokens, kept)
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
) -> dict[tuple[str, Cut], Cut]:
    """A fresh run deals documents out to the cuts that its phases need. Later on a cut keeps the
    part it has, and one that nobody declared reads all, which starts the source's next epoch."""
    wanted = parts_of(phases, data.weights_by, {name: d.stored for name, d in sources.items()})
    if not saved:
        return wanted
    dealt = {
        (name, replace(s.cut(name), part=WHOLE)): s.cut(name) for s in saved for name in s.weights
    }
    return {(name, cut): dealt.get((name, cut), cut) for name, cut in wanted}


def _segment(
    phase: Phase,
    cuts: Mapping[str, Cut],
    sources: Mapping[str, DataSet],
    data: DataConfig,
    global_batch_tokens: int,
    kept: Sequence[Segment],
) -> Segment:
    """What is on disk now, as the segment of a phase; where it begins is not said yet."""
    names = sorted(phase.weights)
    sizes = {name: sources[name].size(cuts[name]) for name in names}
    spans = {
        name: _span(name, cuts[name], sources[name], kept)
        for name in names
        if data.follow and (_was_followed(name, kept) or not sources[name].is_complete)
    }
    for name, size in sizes.items():
        if not size.units:
            where = "" if cuts[name] == phase.cut else " left for one of data.phases"
            raise DataError(f"{name} holds no units{where}; build it from more text.")
    weights = row_weights(phase.weights, data.weights_by, sizes)
    return Segment(
        first_sample=0,
        digests={name: sources[name].digest_of(spans.get(name)) for name in names},
        weights={name: weights[name] for name in phase.weights},
        units={name: sources[name].size(cuts[name], spans.get(name)).units for name in names},
        seq_len=phase.cut.seq_len,
        packing=phase.cut.packing,
        rows_per_step=phase.cut.units_per_step(global_batch_tokens),
        buckets=phase.cut.edges,
        bucket_tokens=phase.cut.unit_tokens,
        shards=spans,
        growing=tuple(name for name in spans if not sources[name].is_complete),
        slices={name: cut.part for name, cut in cuts.items() if cut != phase.cut},
    )


def _was_followed(name: str, kept: Sequence[Segment]) -> bool:
    return any(name in segment.shards for segment in kept)


def _span(name: str, cut: Cut, source: DataSet, kept: Sequence[Segment]) -> Span:
    """The shards that have come since the run last looked; if none have, those it looked at."""
    spans = [s.shards[name] for s in kept if name in s.shards and s.cut(name) == cut]
    there = len(source.shards)
    if not spans:
        return (0, there)
    return spans[-1] if spans[-1][1] == there else (spans[-1][1], there)


def _says_the_same(one: Segment, other: Segment) -> bool:
    place = {"first_step": 0, "first_sample": 0}
    return replace(one, **place) == replace(other, **place)  # type: ignore[arg-type]
