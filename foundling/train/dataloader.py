"""DataLoader of a run: the order of the data, this rank's part, waiting for data that grow."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from foundling.config.data import DataConfig
from foundling.config.data_manifest import MANIFEST_NAME, Manifest
from foundling.config.errors import DataError, RunError
from foundling.config.train import TrainConfig
from foundling.data.batch import Batch
from foundling.data.batch_reader import BatchReader
from foundling.data.dataset import DataSet
from foundling.data.order import Order, reopen_order
from foundling.data.segments import Segment, Skips
from foundling.plan.supply import allowed_repeats, check_enough_data
from foundling.runtime.console import say
from foundling.runtime.dist import World, on_main
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.processes import deferring_signals, stop_requested, stop_requested_here
from foundling.runtime.progress import PROGRESS, WAITING
from foundling.runtime.run_dir import RunDir
from foundling.train.faults.anomaly import AnomalyGuard
from foundling.train.start_point import DATA_FIELDS

# `data` of run.json: the segments a run reads by, and the settings they were made from.
#
# A checkpoint holds its segments too; run.json also holds those that began after it. So a run that
# was killed between a new segment and its next checkpoint takes up the same segment again, although
# the manifest that it follows has grown since.


@dataclass(frozen=True)
class DataOrderState:
    """The `data` of run.json: the settings and segments that a run reads by."""

    settings: dict[str, Any]
    segments: tuple[Segment, ...]


def data_order_json(settings: Mapping[str, Any], segments: Sequence[Segment]) -> dict[str, Any]:
    """The `data` of run.json, written to disk before any unit of a new segment is read."""
    return {
        "settings": dict(settings),
        "segments": [segment.to_json() for segment in segments],
    }


def read_data_order(
    run: RunDir, meta: Mapping[str, Any] | None, batch: int | None = None
) -> DataOrderState | None:
    """The data order of a run, or what its checkpoint says where it has not begun (a branch); None
    if it has read nothing yet. `batch` is where the run stands, if not at the checkpoint's step."""
    saved = _segments_from_json(meta["segments"]) if meta else ()
    if not run.exists:
        return DataOrderState(_recorded_settings(meta["config"]), saved) if meta else None
    try:
        data = run.read_info()["data"]
        record = DataOrderState(data["settings"], _segments_from_json(data["segments"]))
    except (ValueError, KeyError, TypeError):
        raise RunError(
            f"{run.info_path} does not say what was read; bring it back from a copy."
        ) from None
    if meta is None:  # nothing was saved yet that it could differ from
        return record
    step = meta["step"] if batch is None else batch
    if _before(record.segments, step) != _before(saved, step):
        raise RunError(
            f"{run.info_path} and the checkpoint of step {step} tell of other data; the run"
            " directory mixes two runs."
        )
    return record


def _segments_from_json(data: Sequence[Mapping[str, Any]]) -> tuple[Segment, ...]:
    return tuple(Segment.from_json(segment) for segment in data)


def _before(segments: Sequence[Segment], step: int) -> list[Segment]:
    return [segment for segment in segments if segment.first_step < step]


# The order of the data and this rank's reading of it, for the whole life of a run.
#
# A fresh run's segments come from its config. A resumed one takes up the segments it recorded;
# where the data settings have changed, new ones begin at the current step and what was read stays
# read. While a build is followed, a segment is appended each time its shards are used up. Rank 0
# looks at the disk and decides, and every rank reads by the segments that it recorded: two ranks
# that looked at a growing folder themselves would see different things.

T = TypeVar("T")
POLL_INTERVAL_S = 2.0
POLL_ROUND_S = 10.0
"""While rank 0 waits, the ranks synchronise at least this often and agree whether to stop."""
VISIBILITY_TIMEOUT_S = 60.0
"""How long a rank waits for its file system to show the shards that rank 0 sees."""


def continue_order(
    data: DataConfig,
    train: TrainConfig,
    steps: int,
    saved: tuple[Segment, ...],
    datasets: Mapping[str, DataSet],
    step: int,
) -> Order:
    """The order of a run of `steps` steps: from `step` on as the settings and the disk say now, and
    before it as it was saved."""
    return reopen_order(
        saved,
        datasets,
        data,
        seed=train.seed,
        seq_len=train.seq_len,
        steps=steps,
        global_batch_tokens=train.global_batch_tokens,
        step=step,
    )


def wait_for_shards(names: Sequence[str], minutes: float, world: World) -> None:
    """Wait until the build of every source has brought its first shards. Rank 0 looks, in rounds
    between which the ranks agree whether to stop."""
    deadline = time.monotonic() + 60 * minutes
    for name in names:
        folder = Path(name)
        if on_main(lambda: _has_begun(folder)):  # noqa: B023 - called at once
            continue
        say(f"waiting for the first shards of {name}")
        overdue = DataError(
            f"{name} has no shards after {minutes:g} minutes; look after its build, or raise"
            " data.follow."
        )
        with PROGRESS.during(WAITING), deferring_signals():
            while not on_main(lambda: _poll(lambda: _has_begun(folder), deadline, overdue)):  # noqa: B023
                if reason := stop_requested(world):
                    raise EndOfRun(
                        Exit.REQUEUE, f"{reason} while waiting for {name}; nothing was begun"
                    )
        seen = time.monotonic() + VISIBILITY_TIMEOUT_S
        while not _has_begun(folder) and time.monotonic() < seen:
            time.sleep(0.1)  # another rank's file system may show it later


def _poll(look: Callable[[], T], deadline: float, overdue: Exception) -> T:
    """Rank 0's part of a wait, for one round: what it finds, if anything; raises `overdue` when it
    is too late."""
    until = min(time.monotonic() + POLL_ROUND_S, deadline)
    while not (found := look()) and time.monotonic() < until and not stop_requested_here():
        time.sleep(POLL_INTERVAL_S)
    if not found and time.monotonic() >= deadline:
        raise overdue
    return found


def _has_begun(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file() and bool(Manifest.load(folder).train)


class DataLoader:
    """Batches of every step, from an order that may grow."""

    def __init__(
        self,
        data: DataConfig,
        train: TrainConfig,
        steps: int,
        run: RunDir,
        datasets: dict[str, DataSet],
        segments: tuple[Segment, ...],
        world: World,
        step: int,
        guard: AnomalyGuard,
    ) -> None:
        """`steps` are those of the whole run, and `step` is where it stands; what the guard leaves
        out is not read. Inside, and in the segments, steps are batches."""
        self.datasets, self._guard = datasets, guard
        self.requested_at = self.waited_s = 0.0
        self._data, self._train, self._steps = data, train, steps
        self._run, self._world = run, world
        self._use_segments(segments, step)

    def _use_segments(self, segments: tuple[Segment, ...], step: int) -> None:
        train = self._train
        self.order = Order(train.seed, segments)
        self._wait_until_visible(segments)
        self._loader = BatchReader(
            self.datasets,
            self.order,
            micro_tokens=train.batch_size * train.seq_len,
            rank=self._world.rank,
            world=self._world.size,
            first_step=self.skips.batch_of(step),
        )
        self.end = self._end(step)
        """The step at which the run ends: its horizon, or where the data may not be repeated."""

    def _wait_until_visible(self, segments: tuple[Segment, ...]) -> None:
        """Wait until this rank's file system shows the shards that rank 0 has seen."""
        wanted = {name: span[1] for segment in segments for name, span in segment.shards.items()}
        deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
        for name, count in wanted.items():
            dataset = self.datasets.get(name)
            while dataset is not None and len(dataset.shards) < count:
                if not dataset.refresh() and time.monotonic() > deadline:
                    raise RunError(
                        f"{name} has {len(dataset.shards)} shards where rank {self._world.rank}"
                        f" looks and rank 0 sees {count}; every rank must see the same folder."
                    )
                time.sleep(0.1)

    def _end(self, step: int) -> int:
        """Where the data may not be repeated further; `steps` while a source still grows, of which
        `available_until` says how far it reaches now."""
        steps = self._steps
        allowed = allowed_repeats(self._data, self._train) * (1 + 1e-9)
        if not self._data.follow or self.order.segments[-1].growing:
            return steps

        def enough(last: int) -> bool:
            passed = self.order.sample_of(self.position(last))
            return max(self.order.epochs(passed).values()) <= allowed

        low, high = step, steps
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if enough(middle) else (low, middle - 1)
        return low

    @property
    def skips(self) -> Skips:
        """The batches that are left out."""
        return self._guard.skips

    def position(self, step: int) -> int:
        """Batches that a run of `step` steps has read or left out."""
        return self.skips.batch_of(step - 1) + 1 if step else 0

    def segment(self, step: int) -> Segment:
        """The segment that a step reads from."""
        return self.order.segment_of_step(self.skips.batch_of(step))

    def mixture_digest(self, batch: int) -> str:
        """Digest of what shows in a batch's loss: row length, packing, weights of the sources."""
        segment = self.order.segment_of_step(batch)
        made_of = [segment.seq_len, segment.packing, sorted(segment.weights.items())]
        return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]

    def restart_from(self, step: int) -> None:
        """Continue from another step, which after a rollback may be of another segment."""
        self._use_segments(self.order.segments, step)

    def available_until(self, step: int) -> int:
        """Steps up to which batches can be made now."""
        if not any(segment.growing for segment in self.order.segments):
            return self.end
        batch = self.skips.batch_of(step)
        later = [s.first_step for s in self.order.segments if s.first_step > batch]
        begun = Order(self.order.seed, self.order.before(batch + 1))
        limit = begun.steps_known()
        stops = [*later[:1], *([] if limit is None else [limit])]
        return min([self.end, *map(self.skips.step_of, stops)])

    def steps_from(self, step: int) -> Iterator[list[Batch]]:
        """This rank's micro-batches of every step from `step` on, as far as they are known; what a
        step took is counted from `requested_at`, of which it waited `waited_s` for its data."""
        self.requested_at = time.perf_counter()
        for number, batches in enumerate(self._batches(step), start=step):
            self.waited_s = time.perf_counter() - self.requested_at
            PROGRESS.next_step(number)
            yield batches
            self.requested_at = time.perf_counter()

    def _batches(self, step: int) -> Iterator[list[Batch]]:
        while (stop := self.available_until(step)) > step:
            for first, last in self.skips.stretches(step, stop):
                for _, batches in self._loader.prefetch(first, last):
                    yield batches
            step = stop

    def has_step(self, step: int) -> bool:
        """Whether there is a step to take; where its data is used up, a segment is appended if the
        followed builds have added enough for another step."""
        if step >= self.end:
            return False
        if self.available_until(step) > step:
            return True
        found = on_main(lambda: self._extend_segments(self.skips.batch_of(step)))
        if found is not None:
            self._use_segments(_segments_from_json(found), step)
        return found is not None

    def wait(self, step: int, stop_agreed: Callable[[], bool]) -> bool:
        """Poll the followed builds until a step is there (True), the job is to stop (False), or
        data.follow minutes have passed (RunError)."""
        minutes = self._data.follow
        say(f"step {step}: every shard so far is used up; waiting up to {minutes:g} minutes")
        deadline = time.monotonic() + 60 * minutes
        batch = self.skips.batch_of(step)
        names = ", ".join(self.order.segment_of_step(batch).growing)
        overdue = RunError(
            f"{self._run.path} is saved at step {step}: {names} got no new shards for"
            f" {minutes:g} minutes; look after the build and train again, or raise data.follow."
        )
        while True:
            found = on_main(lambda: _poll(lambda: self._extend_segments(batch), deadline, overdue))
            if found is not None:
                self._use_segments(_segments_from_json(found), step)
                return True
            if stop_agreed():
                return False

    def _extend_segments(self, batch: int) -> list[dict[str, Any]] | None:
        """The segments with what the builds have added, on disk before any of it is read."""
        for name in self.order.segment_of_step(batch).growing:
            self.datasets[name].refresh()
        order = continue_order(
            self._data, self._train, self._steps, self.order.segments, self.datasets, batch
        )
        known = Order(order.seed, order.before(batch + 1)).steps_known()
        if known is not None and known <= batch:
            return None  # no shards, or not enough for a step
        segment = order.segment_of_step(batch)
        for name in segment.shards:
            self.datasets[name].verify(changed_only=True)  # the shards that have just come
        self._run.update_info(
            data=data_order_json(data_settings(self._data, self._train), order.segments)
        )
        step = self.skips.step_of(batch)
        shards = {name: list(span) for name, span in segment.shards.items()}
        self._run.event("data_grew", step=step, shards=shards, growing=list(segment.growing))
        ranges = ", ".join(f"{name} shards {a} to {b - 1}" for name, (a, b) in shards.items())
        ending = "" if segment.growing else "; all there"
        say(f"step {step}: reading on, {ranges}{ending}")
        return [one.to_json() for one in order.segments]


def open_loader(
    data: DataConfig,
    train: TrainConfig,
    steps: int,
    run: RunDir,
    datasets: dict[str, DataSet],
    world: World,
    meta: Mapping[str, Any] | None,
    guard: AnomalyGuard,
) -> DataLoader:
    """The loader of a resumed run, or of a new one; `meta` is its checkpoint's, if it has one."""
    step, skips = int(meta["step"]) if meta else 0, guard.skips
    segments = on_main(lambda: _segments_of(data, train, steps, run, datasets, meta, skips))
    loader = DataLoader(data, train, steps, run, datasets, segments, world, step, guard)
    guard.mixture_digest = loader.mixture_digest
    return loader


def _segments_of(
    data: DataConfig,
    train: TrainConfig,
    steps: int,
    run: RunDir,
    datasets: Mapping[str, DataSet],
    meta: Mapping[str, Any] | None,
    skips: Skips,
) -> tuple[Segment, ...]:
    """The segments to read by (rank 0); a change is recorded before anything is read by it."""
    batch = skips.batch_of(int(meta["step"]) if meta else 0)
    settings = data_settings(data, train)
    record = read_data_order(run, meta, batch) if run.exists or meta else None
    saved = record.segments if record else ()
    check_sources(saved, datasets, str(run.path))
    unchanged = record is not None and record.settings == settings
    order = Order(train.seed, saved) if unchanged else None
    order = order or continue_order(data, train, steps, saved, datasets, batch)
    if not data.follow:
        epochs = order.epochs(order.sample_of(steps))
        check_enough_data(epochs, allowed_repeats(data, train))
    if record is not None and not unchanged:
        _record_change(run, record, settings, order, batch, skips)
    if run.exists and not unchanged:
        run.update_info(data=data_order_json(settings, order.segments))
    return order.segments


def _record_change(
    run: RunDir,
    record: DataOrderState,
    settings: Mapping[str, Any],
    order: Order,
    batch: int,
    skips: Skips,
) -> None:
    """Write the event of a change of data, with the epochs that it leaves unread."""
    changes = {
        name: [record.settings.get(name), value]
        for name, value in settings.items()
        if record.settings.get(name) != value
    }
    unread = [u for u in order.left_unread(order.sample_of(batch)) if u.step == batch]
    later = [segment for segment in order.segments if segment.first_step >= batch]
    step = skips.step_of(batch)
    run.event(
        "data_changed",
        step=step,
        changes=changes,
        from_step={skips.step_of(segment.first_step): segment.weights for segment in later},
        left_unread=[{**vars(u), "step": step} for u in unread],
    )
    say(f"from step {step} on the data changes: {', '.join(changes)}")
    for u in unread:
        say(f"  {u.source}: {u.units} of {u.of} units of epoch {u.epoch} are left unread")


def data_settings(data: DataConfig, train: TrainConfig) -> dict[str, Any]:
    """The settings that the data order is made from, as JSON keeps them."""
    return _recorded_settings({"data": data.model_dump(), "train": train.model_dump()})


def _recorded_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings of a config that was read back as a mapping."""
    fields = (field.partition(".") for field in DATA_FIELDS)
    found = {f"{section}.{name}": config[section][name] for section, _, name in fields}
    found["data.follow"] = bool(found["data.follow"])  # how long is waited changes no order
    settings: dict[str, Any] = json.loads(json.dumps(found))
    return settings


def check_sources(segments: Sequence[Segment], datasets: Mapping[str, DataSet], where: str) -> None:
    """Refuse data that is not what the run has read under the same name, or that it has read under
    another: places in it would mean nothing, or would be read twice."""
    was = {name: segment for segment in segments for name in segment.digests}
    known = {segment.digests[name]: name for segment in segments for name in segment.digests}
    for name, dataset in datasets.items():
        if name in was:
            _check_digest(name, dataset, was[name], where)
            continue
        moved = known.get(dataset.digest)
        if moved is not None and moved not in datasets:
            raise RunError(
                f"{name} is the data set that {where} has read as {moved}; give it its old name (a"
                " symbolic link will do), so that nothing is read twice."
            )


def _check_digest(name: str, dataset: DataSet, segment: Segment, where: str) -> None:
    span = segment.shards.get(name)
    if span is not None and span[1] > len(dataset.shards):
        raise RunError(
            f"{name} has {len(dataset.shards)} shards and {where} has read from {span[1]}; bring"
            " the others back or give another --run."
        )
    found, wanted = dataset.digest_of(span), segment.digests[name]
    if found != wanted:
        raise RunError(
            f"{name} holds other data than {where} has read (digest {found[:12]}, was"
            f" {wanted[:12]}); bring the old data back, or give the new another folder and name it"
            " in data.sources."
        )
