"""The data alone, without training: the same rows in the same steps whoever reads them.

One loader per rank is made for several world sizes, and each is asked for steps at the beginning,
in the middle, at the end and around every change of segment, out of turn as a resume would ask.
Together the ranks must give exactly the rows that one process reads in turn.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from foundling.config.checks import check_trainable
from foundling.config.errors import DataError
from foundling.config.sections import RunConfig
from foundling.data import Batch, DataSet, Loader, Order
from foundling.doctor.compare import Finding
from foundling.plan import batch_tokens, check_enough_data, epochs_needed, plan_horizon
from foundling.train.feed import reopened
from foundling.train.stages import open_data, source_sizes


def data_findings(config: RunConfig, *, worlds: Sequence[int], steps: int) -> list[Finding]:
    """Open the data of a fresh run as training would, and prove its stream."""
    check_trainable(config)
    _, datasets = open_data(config)
    ranks = config.parallel.replicate or 1
    train = replace(config.train, global_batch_tokens=batch_tokens(config, ranks))
    config = replace(config, train=train)
    sizes = source_sizes(config, datasets)
    horizon = plan_horizon(config, ranks, sizes)
    check_enough_data(epochs_needed(horizon, sizes), config)
    order = reopened(config, horizon.steps, (), datasets, 0)
    known = Order(order.seed, order.segments[:1]).steps_known()
    last = horizon.steps if known is None else min(known, horizon.steps)
    if last < 1:
        raise DataError("the data has not a single step yet; wait for more shards.")
    return prove_stream(config, datasets, order, last_step=last, worlds=worlds, steps=steps)


def prove_stream(
    config: RunConfig,
    datasets: Mapping[str, DataSet],
    order: Order,
    *,
    last_step: int,
    worlds: Sequence[int],
    steps: int,
) -> list[Finding]:
    """Compare `steps` steps in each place at every world size with one process reading in turn."""
    asked = places(order, last_step, steps)
    alone = _Reader(config, datasets, order, 1)
    wanted = {step: alone.rows(step) for step in asked}
    found = [_consumption(order, alone, asked), _prefetched(config, datasets, order, wanted)]
    for world in worlds:
        reader = _Reader(config, datasets, order, world)
        wrong = [step for step in reversed(asked) if reader.rows(step) != wanted[step]]
        detail = f"step {wrong[-1]} has other rows" if wrong else f"{len(asked)} steps, out of turn"
        found.append(Finding(f"stream at world size {world}", not wrong, detail))
    return found


def places(order: Order, last_step: int, steps: int) -> list[int]:
    """Steps at the beginning, in the middle, at the end and around each change of segment."""
    middles = [0, last_step // 2, last_step]
    middles += [segment.first_step for segment in order.segments]
    near = {at + step for at in middles for step in range(-(steps // 2), steps - steps // 2)}
    return sorted(step for step in near if 0 <= step < last_step)


class _Reader:
    """All ranks of one world size, read one after the other."""

    def __init__(
        self, config: RunConfig, datasets: Mapping[str, DataSet], order: Order, world: int
    ) -> None:
        tokens = config.train.batch_size * config.train.seq_len
        self._ranks = [
            Loader(datasets, order, micro_tokens=tokens, rank=rank, world=world)
            for rank in range(world)
        ]
        self.units: dict[int, dict[str, int]] = {}
        """By step: units of each source."""

    def rows(self, step: int) -> list[str]:
        """The rows of a step in the order of the ranks, each as a checksum."""
        found: list[str] = []
        units: dict[str, int] = {}
        for loader in self._ranks:
            for batch in loader.step(step):
                found += row_sums(batch)
                for name, count in batch.units.items():
                    units[name] = units.get(name, 0) + count
        self.units[step] = units
        return found


def row_sums(batch: Batch) -> Iterator[str]:
    """A checksum of each row that holds anything, whatever it was padded to."""
    for row in np.flatnonzero(batch.bounds.filled).tolist():
        size = int(batch.bounds.filled[row])
        digest = hashlib.sha256(batch.inputs[row, :size].tobytes())
        digest.update(batch.targets[row, :size].tobytes())
        digest.update(batch.documents[row, :size].tobytes())
        yield digest.hexdigest()


def _consumption(order: Order, alone: _Reader, asked: Sequence[int]) -> Finding:
    """What each step holds, against what the order says by arithmetic."""
    for step in asked:
        before, after = (order.consumed(order.sample_of(at)) for at in (step, step + 1))
        by_arithmetic = {n: after[n] - before[n] for n in after if after[n] > before[n]}
        if alone.units[step] != by_arithmetic:
            told = f"step {step} holds {alone.units[step]} units and the ledger {by_arithmetic}"
            return Finding("units by source", False, told)
    return Finding("units by source", True, f"as counted by arithmetic in {len(asked)} steps")


def _prefetched(
    config: RunConfig,
    datasets: Mapping[str, DataSet],
    order: Order,
    wanted: Mapping[int, list[str]],
) -> Finding:
    """A loader that begins in the middle and reads ahead, as a resumed run does."""
    first = max(step for step in wanted if step <= max(wanted) // 2)
    tokens = config.train.batch_size * config.train.seq_len
    loader = Loader(datasets, order, micro_tokens=tokens, first_step=first)
    count = 0
    for step, batches in loader.prefetch(first, max(wanted) + 1, config.data.prefetch):
        if step not in wanted:
            break
        if [sums for batch in batches for sums in row_sums(batch)] != wanted[step]:
            return Finding("stream resumed", False, f"step {step} has other rows")
        count += 1
    return Finding("stream resumed", True, f"{count} steps from step {first} on, read ahead")
