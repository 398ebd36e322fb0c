"""Brute force for the order: read everything, follow every token, count by hand."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from unique_data import write_data

from foundling.config.data import DataConfig, PhaseConfig
from foundling.config.mixture import SLOTS, slot_counts
from foundling.config.packing_spec import PackingSpec
from foundling.data.batch import Batch, Counts
from foundling.data.batch_reader import BatchReader
from foundling.data.dataset import DataSet
from foundling.data.order import Order

STEP_TOKENS = 96
"""Padded tokens of a step: every length below divides it."""
LENGTHS = (4, 6, 8, 12, 16, 24)
PACKINGS = ("concat", "bestfit", "bucket", "pad")
BUCKETS = {"buckets": (3, 6, 10), "bucket_tokens": 24}

SHAPES = {
    "short": ((2, 9), (24, 16)),
    "long": ((1, 60), (25, 1, 20)),
    "mixed": ((1, 30), (40,)),
    "chat": ((3, 20), (20, 15)),
}
"""Of each source: shortest and longest document, documents of each shard."""
worlds = st.sampled_from([1, 2, 3, 5])


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, float]:
    """Some of the sources, with weights."""
    chosen = draw(st.lists(st.sampled_from(list(SHAPES)), min_size=1, unique=True))
    return {name: draw(st.sampled_from([0.2, 0.5, 1.0, 3.0])) for name in chosen}


@st.composite
def phase_lists(draw: st.DrawFn, steps: int) -> tuple[PhaseConfig, ...]:
    """Phases at rising steps, each with a change or two."""
    starts = draw(st.lists(st.integers(2, steps - 1), max_size=2, unique=True).map(sorted))
    changes = st.fixed_dictionaries(
        {},
        optional={
            "seq_len": st.sampled_from(LENGTHS),
            "sources": mixtures(),
            "packing": st.sampled_from(PACKINGS),
        },
    ).filter(bool)
    return tuple(PhaseConfig(at=start, **draw(changes)) for start in starts)


@st.composite
def configs(draw: st.DrawFn, steps: int) -> tuple[DataConfig, int]:
    """A data section with the sequence length it begins with."""
    packing, phases = draw(st.sampled_from(PACKINGS)), draw(phase_lists(steps))
    has_buckets = "bucket" in (packing, *(phase.packing for phase in phases))
    sources = draw(mixtures())
    mixes = len(sources) > 1 or any(len(phase.sources) > 1 for phase in phases)
    by = draw(st.sampled_from(["rows", "tokens", "documents", "epochs"])) if mixes else "rows"
    config = DataConfig(
        sources=sources,
        weights_by=by,  # type: ignore[arg-type]
        packing=packing,  # type: ignore[arg-type]
        phases=phases,
        **(BUCKETS if has_buckets else {}),  # type: ignore[arg-type]
    )
    return config, draw(st.sampled_from(LENGTHS))


def write_sources(folder: Path) -> dict[str, DataSet]:
    """A source of each shape, whose tokens are all different."""
    found = {}
    for number, (name, ((low, high), shards)) in enumerate(SHAPES.items()):
        rng = np.random.default_rng(number)
        found[name] = write_data(
            folder / name,
            [rng.integers(low, high + 1, documents).tolist() for documents in shards],
            name=name,
            first_id=1 + 10_000 * number,
            mask_seed=5 if name == "chat" else None,
        )
    return found


@dataclass(frozen=True)
class Eaten:
    """One sample: where it was found and which tokens it holds."""

    source: str
    packing_spec: PackingSpec
    epoch: int
    unit: int
    tokens: tuple[int, ...]


def eat(order: Order, sources: Mapping[str, DataSet], steps: int) -> list[list[Eaten]]:
    """Every sample of every step, straight from the data sets."""
    eaten = []
    for step in range(steps):
        segment = order.segment_of_step(step)
        at = order.locate_range(order.sample_of(step), segment.rows_per_step)
        row = []
        for number, epoch, unit in zip(at.sources, at.epochs, at.units, strict=True):
            name = at.names[number]
            batch = sources[name].unit(int(unit), segment.packing_spec(name))
            tokens = tuple(batch.inputs[batch.documents >= 0].tolist())
            row.append(Eaten(name, segment.packing_spec(name), int(epoch), int(unit), tokens))
        eaten.append(row)
    return eaten


def assert_nothing_repeats(eaten: Sequence[Sequence[Eaten]]) -> None:
    """No token of a source is read twice in one epoch, whatever the cuts it is read under."""
    seen = Counter(
        (sample.source, sample.epoch, token)
        for row in eaten
        for sample in row
        for token in sample.tokens
    )
    assert not seen or max(seen.values()) == 1


def assert_nothing_is_lost(
    eaten: Sequence[Sequence[Eaten]], sources: Mapping[str, DataSet]
) -> None:
    """An epoch that a cut goes on beyond has read all of its units."""
    units: dict[tuple[str, PackingSpec], dict[int, set[int]]] = {}
    for sample in (sample for row in eaten for sample in row):
        epochs = units.setdefault((sample.source, sample.packing_spec), {})
        epochs.setdefault(sample.epoch, set()).add(sample.unit)
    for (name, spec), epochs in units.items():
        for epoch, found in epochs.items():
            if epoch + 1 in epochs and epoch == min(epochs) == 0:
                assert found == set(range(sources[name].size(spec).units))


def assert_shares(order: Order, eaten: Sequence[Sequence[Eaten]]) -> None:
    """After any step of a segment each source has its rounded share, to one sample."""
    had: Counter[str] = Counter()
    for step, row in enumerate(eaten):
        segment = order.segment_of_step(step)
        if step == segment.first_step:
            had.clear()
        had.update(sample.source for sample in row)
        slots = slot_counts({name: segment.weights[name] for name in sorted(segment.weights)})
        for name, count in slots.items():
            assert abs(had[name] - had.total() * count / SLOTS) < 1


def assert_counted(order: Order, eaten: Sequence[Sequence[Eaten]]) -> None:
    """The order's own arithmetic against counting by hand."""
    counted: Counter[str] = Counter()
    for step in range(len(eaten) + 1):
        consumed = order.consumed(order.sample_of(step))
        assert consumed == {name: counted[name] for name in order.names}
        if step < len(eaten):
            counted.update(sample.source for sample in eaten[step])


def real_tokens(batch: Batch) -> list[tuple[int, ...]]:
    """The tokens of each row that holds any."""
    rows = (
        batch.inputs[row, : batch.bounds.filled[row]].tolist() for row in range(len(batch.inputs))
    )
    return [tuple(row) for row in rows if row]


def assert_loaded(
    order: Order, sources: Mapping[str, DataSet], eaten: Sequence[Sequence[Eaten]], world: int
) -> None:
    """Rank after rank the loaders give the samples of each step, in order, and their counts."""
    loaders = [
        BatchReader(sources, order, micro_tokens=STEP_TOKENS // 2, rank=rank, world=world)
        for rank in range(world)
    ]
    for step, row in enumerate(eaten):
        parts = [loader.step(step) for loader in loaders]
        assert len({len(part) for part in parts}) == 1
        batches = [batch for part in parts for batch in part]
        tokens = [token for batch in batches for row in real_tokens(batch) for token in row]
        assert tokens == [token for sample in row for token in sample.tokens]
        units: Counter[str] = Counter()
        for batch in batches:
            assert batch.inputs.size <= max(STEP_TOKENS // 2, BUCKETS["bucket_tokens"])  # type: ignore[call-overload]
            units.update(batch.units)
            assert batch.counts.tokens == sum(map(len, real_tokens(batch)))
            assert batch.counts.targets == np.count_nonzero(batch.targets >= 0)
            for name, counts in batch.by_source.items():
                assert 0 < counts.tokens <= counts.positions <= batch.inputs.size, name
            if batch.units and "bucket" in {sample.packing_spec.packing for sample in row}:
                assert batch.counts == sum(batch.by_source.values(), Counts())
        assert units == Counter(sample.source for sample in row)
