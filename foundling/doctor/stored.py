"""Is what the run reads there and whole: its data sets, its checkpoints, the run it starts from."""

from collections.abc import Iterator
from pathlib import Path

from foundling.checkpoint import (
    Folder,
    RemotePath,
    Sighting,
    checkpoint_home,
    find_checkpoint,
    kind_of,
    list_checkpoints,
    open_source,
)
from foundling.checkpoint.survey import examine
from foundling.config.checks import horizons
from foundling.config.errors import UserError
from foundling.config.sections import RunConfig
from foundling.data import DataSet
from foundling.doctor.asked import Asked
from foundling.doctor.lines import Line, failed, passed, refused, warned
from foundling.doctor.task import Notes
from foundling.plan import check_enough_data, epochs_needed, known_sizes, plan_horizon
from foundling.plan.words import size
from foundling.runtime.rundir import RunDir
from foundling.train.stages import open_data

HASH_RATE = 300e6
"""Bytes a second that can be counted on, disk and checksum together."""


def check(asked: Asked, notes: Notes) -> Iterator[Line]:
    """Data, then checkpoints, then the parent."""
    config = asked.run_config()
    if config is None:
        return
    if notes.begins("data"):
        yield from data_lines(config, thorough=asked.thorough)
    if not asked.is_main:
        return  # one process reads what all nodes share
    if asked.run and notes.begins(f"checkpoints of {asked.run}"):
        home = checkpoint_home(RunDir(asked.run).checkpoints, config.checkpoint)
        budget = float("inf") if asked.thorough else asked.limit_s / 2 * HASH_RATE
        yield from checkpoint_lines(home, budget, every=asked.thorough)
    origin = config.train.branch or config.train.init
    if origin and notes.begins(f"parent {origin}"):
        yield parent_line(origin)


def data_lines(config: RunConfig, *, thorough: bool) -> Iterator[Line]:
    """Each data set of the mixture, and whether they are enough."""
    if not config.data.sources:
        yield warned("data", "data.sources is empty; name built data sets there before you train.")
        return
    try:
        _, datasets = open_data(config)
    except UserError as error:
        yield refused("data", error)
        return
    for name, dataset in datasets.items():
        yield _data_line(name, dataset, thorough)
    yield from _enough(config)


def _data_line(name: str, dataset: DataSet, thorough: bool) -> Line:
    manifest = dataset.manifest
    total = sum(info.file_bytes for info in (*manifest.train, *manifest.val))
    told = f"{name}: {manifest.train_tokens:,} tokens in {len(manifest.train)} shards"
    if not thorough:
        return passed("data", f"{told}, every size right (--thorough hashes {size(total)})")
    try:
        dataset.verify()
    except UserError as error:
        return refused("data", error)
    return passed("data", f"{told}, every checksum right")


def _enough(config: RunConfig) -> Iterator[Line]:
    if not horizons(config.train):
        yield warned("data", "no horizon is set; give train.steps or train.tokens.")
        return
    parallel = config.parallel
    try:
        config, sizes = known_sizes(config)
        assert sizes is not None
        ranks = (parallel.replicate or 1) * parallel.shard
        horizon = plan_horizon(config, ranks, sizes)
        epochs = epochs_needed(horizon, sizes)
        if not config.data.follow:
            check_enough_data(epochs, config)
    except UserError as error:
        yield refused("data", error)
        return
    told = ", ".join(f"{name} {times:.2f} times" for name, times in epochs.items())
    yield passed("data", f"enough for {horizon.steps:,} steps: {told}")


def checkpoint_lines(home: Folder, budget: float, *, every: bool = False) -> Iterator[Line]:
    """The newest checkpoint and, where it is damaged, whether there is one to go back to.

    Bytes are compared as long as they are fewer than `budget`; names and sizes always.
    """
    found = list_checkpoints(home) if isinstance(home, RemotePath) or home.is_dir() else []
    if not found:
        yield passed("checkpoints", f"none in {home} yet")
        return
    seen = []
    for path in reversed(found):
        sighting = _seen(path, budget)
        seen.append(sighting)
        if sighting.state != "damaged" and not every:
            break
    good = [sighting for sighting in seen if sighting.state != "damaged"]
    for sighting in seen:
        if sighting.state != "damaged":
            yield _good_line(sighting)
        elif good:
            yield warned(
                "checkpoints",
                f"{sighting.reason} Training would go on from step"
                f" {max(one.step for one in good)}; bring the newer one back if you can.",
            )
    if not good:
        first = seen[0].reason
        yield failed(
            "checkpoints",
            f"none of the {len(seen)} in {home} is whole ({first.rstrip('.')}); restore one, or"
            " give another --run.",
        )


def _seen(path: Folder, budget: float) -> Sighting:
    quick = examine(path, thorough=False)
    if quick.state == "damaged" or quick.bytes > budget:
        return quick
    return examine(path, thorough=True)


def _good_line(sighting: Sighting) -> Line:
    told = f"step {sighting.step} of {sighting.path}"
    if sighting.state == "whole":
        return passed("checkpoints", f"{told}: every byte agrees with its checksum")
    return passed(
        "checkpoints",
        f"{told}: names and sizes are right; --thorough hashes its {size(sighting.bytes)}",
    )


def parent_line(origin: str) -> Line:
    """Whether the run that this one starts from can be read."""
    try:
        if kind_of(origin) != "native":
            source = open_source(origin)
            return passed(
                "parent", f"{origin}: {len(source.places)} tensors are there ({source.kind})"
            )
        run, checkpoint = find_checkpoint(origin)
    except UserError as error:
        return refused("parent", error)
    return passed("parent", f"{run.path}: {Path(str(checkpoint)).name} is whole")
