"""Anomaly guard: steps with NaN, infinity or a spike are judged before they change the weights."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from foundling.config.errors import RunError
from foundling.config.run import GuardConfig
from foundling.data.segments import Skips
from foundling.runtime.console import warn
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import read_events
from foundling.train.faults.memory_leak import MemoryTrend
from foundling.train.faults.replicas import check_replicas

if TYPE_CHECKING:
    from foundling.train.state import TrainState

# How unusual a loss or a gradient norm is, against the steps before it.
#
# The robust z-score: distance from the median in units of 1.4826 x the median absolute deviation,
# which is the standard deviation where values are normal and does not move when a few are wild
# (Iglewicz and Hoaglin 1993). Norms are compared by their logarithm, because they scatter by
# factors. A value must also lie above the whole window: rows of a rare and difficult source come
# again and again and are no spike. Rejected: mean and standard deviation, which the spike itself
# moves.

WINDOW = 128
"""Steps that a spike is measured against; none is looked for before half of them are there."""
SKIP_BEFORE = 1
"""Batches before a spike that are left out with it: the update before may have caused it."""
LIMIT_STEPS = 1000
"""Steps over which interventions are counted."""
MAD_TO_STD = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""
LEAST_SHARE = 0.01
"""Least spread of losses, as a share of their median: on a flat stretch a ripple is no spike."""
LEAST_LOG = 0.05
"""Least spread of logarithms: five per cent."""


def robust_z(
    value: float, window: Sequence[float], *, least: float = 0.0, least_share: float = 0.0
) -> float:
    """Spreads that `value` lies above the median of `window`; 0 where it is not above all of it.

    A spread is no smaller than `least`, nor than `least_share` of the median.
    """
    if not window or value <= max(window):
        return 0.0
    middle = median(window)
    spread = MAD_TO_STD * median(abs(past - middle) for past in window)
    return (value - middle) / max(spread, least, least_share * abs(middle), 1e-12)


class SpikeDetector:
    """Losses and gradient norms of the last steps that were taken, on one mixture of data."""

    def __init__(
        self, size: int, pairs: Iterable[tuple[float, float]] = (), mixture_digest: str = ""
    ) -> None:
        self.size, self.mixture_digest = size, mixture_digest
        self._pairs: deque[tuple[float, float]] = deque(pairs, maxlen=size)

    def __len__(self) -> int:
        return len(self._pairs)

    def reset_if_data_changed(self, mixture_digest: str) -> None:
        """Clear the history where the mixture of data changes: its losses are other ones."""
        if mixture_digest != self.mixture_digest:
            self.mixture_digest = mixture_digest
            self._pairs.clear()

    def add(self, loss: float, norm: float) -> None:
        """Add the loss and norm of a step that was taken."""
        self._pairs.append((loss, norm))

    def z(self, loss: float, norm: float) -> tuple[float, float]:
        """Robust z-scores of a loss and of a norm's logarithm; 0 while too few steps are known."""
        if len(self._pairs) < self.size // 2:
            return 0.0, 0.0
        losses, norms = zip(*self._pairs, strict=True)
        return (
            robust_z(loss, losses, least_share=LEAST_SHARE),
            robust_z(_log(norm), [_log(past) for past in norms], least=LEAST_LOG),
        )

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it; floats come back to the last bit."""
        return {
            "mixture_digest": self.mixture_digest,
            "pairs": [list(pair) for pair in self._pairs],
        }

    @classmethod
    def from_json(cls, size: int, data: Mapping[str, Any]) -> "SpikeDetector":
        """The inverse of to_json; a smaller window keeps the newest."""
        return cls(size, [(loss, norm) for loss, norm in data["pairs"]], data["mixture_digest"])


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))


# What is done about a step that must not be taken: leave its batch out, go back, or stop.
#
# A loss or gradient that is not finite never reaches weights or moments, and its batch is left out;
# several in a row, or a spike, send the run back to a good checkpoint with the batches at fault
# left out. What is done is an event, on the disk before it is done, and every decision is made by
# those events and the history in the checkpoint: killed at any moment, the run takes the same steps
# again. Every rank decides the same, because loss and norm are global.
#
# Rejected: a count of failures in memory (a restart would forget it and decide otherwise).

Kind = Literal["nonfinite", "spike"]


@dataclass(frozen=True, kw_only=True)
class RefusedStep:
    """A step that must not be taken, and why."""

    what: Kind
    step: int
    """Completed steps: the number of the refused one, from 0."""
    batch: int
    loss: float
    grad_norm: float
    z_loss: float = 0.0
    z_norm: float = 0.0

    def describe(self) -> str:
        """In words."""
        seen = f"loss {self.loss:.6g} and gradient norm {self.grad_norm:.6g}"
        if self.what == "nonfinite":
            return f"step {self.step + 1} (batch {self.batch}) has {seen}"
        return (
            f"step {self.step + 1} (batch {self.batch}) is a spike: {seen}, {self.z_loss:.1f} and"
            f" {self.z_norm:.1f} spreads above what came before"
        )


class RefusedStepError(Exception):
    """The update was not taken; weights and moments are unchanged."""

    def __init__(self, refused: RefusedStep) -> None:
        super().__init__(refused.describe())
        self.refused = refused


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """What was done about one refused step."""

    what: Kind
    step: int
    batch: int
    loss: str
    """As text, which JSON can hold whatever it is."""
    grad_norm: str
    skipped: tuple[int, int]
    """Batches [first, last) that are left out from now on."""
    back_to: int | None = None
    """Step of the checkpoint that the run went back to; None where it only went on."""

    def to_json(self) -> dict[str, Any]:
        """As its event and a checkpoint keep it."""
        return {**asdict(self), "skipped": list(self.skipped)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Intervention":
        """The inverse of to_json, of an event too."""
        first, last = data["skipped"]
        own = {field.name: data[field.name] for field in fields(cls)}
        return cls(**{**own, "skipped": (first, last)})


class AnomalyGuard:
    """Judges every step by what came before it; the list of what was done is append-only."""

    def __init__(
        self,
        config: GuardConfig,
        interventions: Sequence[Intervention] = (),
        *,
        run: RunDir | None = None,
        trend: MemoryTrend | None = None,
    ) -> None:
        """`run` and `trend` are for `watch`."""
        self._run, self._trend = run, trend
        self.config, self.interventions = config, tuple(interventions)
        self.mixture_digest: Callable[[int], str] = lambda batch: ""
        """Of a batch; where it changes, losses are compared anew."""
        self.history = SpikeDetector(WINDOW)
        self.skips = skips_of(self.interventions)

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        """Raise RefusedStepError for a step that must not be taken."""
        batch = self.skips.batch_of(step)
        seen: dict[str, Any] = {
            "step": step,
            "batch": batch,
            "loss": loss,
            "grad_norm": grad_norm,
        }
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RefusedStepError(RefusedStep(what="nonfinite", **seen))
        self.history.reset_if_data_changed(self.mixture_digest(batch))
        z_loss, z_norm = self.history.z(loss, grad_norm)
        if _exceeds(z_loss, self.config.spike_loss) or _exceeds(z_norm, self.config.spike_norm):
            raise RefusedStepError(RefusedStep(what="spike", **seen, z_loss=z_loss, z_norm=z_norm))
        self.history.add(loss, grad_norm)

    def watch(self, state: "TrainState") -> None:
        """After a step: warn of memory that rises, end the job where replicas differ."""
        step, every = state.step, self.config.hash_every
        if self._run is not None and self._trend is not None:
            for sentence in self._trend.measure(step):
                warn(sentence)
                rank = state.world.rank
                self._run.event("memory_rises", step=step, rank=rank, told=sentence)
        if every and step % every == 0:
            self.compare_replicas(state)

    def compare_replicas(self, state: "TrainState") -> None:
        """End the job where replicas differ; before a save too, so that none is made of them."""
        if self._run is not None and self.config.hash_every:
            check_replicas(state.params(), state.mesh, self._run, state.step)

    def needs_rollback(self, refused: RefusedStep) -> bool:
        """Whether leaving the batch out is not enough."""
        return refused.what == "spike" or len(self._in_a_row(refused)) + 1 >= self.config.nonfinite

    def rollback_steps_that_failed(self, refused: RefusedStep) -> set[int]:
        """Steps of checkpoints to which the run went back and met the same anomaly again: they may
        be at fault themselves."""
        near = refused.step - WINDOW // 4
        return {i.back_to for i in self.interventions if i.back_to is not None and i.step >= near}

    def decide(self, refused: RefusedStep, target: int | None) -> Intervention:
        """What to do, given the step of the checkpoint to go back to (None: there is none, and the
        batch is only left out); ends the run when too much was done already."""
        recent = [i for i in self.interventions if i.step > refused.step - LIMIT_STEPS]
        if len(recent) >= self.config.limit:
            raise EndOfRun(
                Exit.NONFINITE,
                f"{refused.describe()}, and within {LIMIT_STEPS} steps the guard has"
                f" stepped in {len(recent)} times; what was saved is intact: look at the data"
                " that events.jsonl names, begin another --run with a lower optim.lr, or raise"
                " guard.limit.",
            )
        first = refused.batch
        if self.needs_rollback(refused) and target is not None:
            # The update before the first bad batch may have done the harm.
            row = self._in_a_row(refused)
            first = (row[0].batch if row else first) - SKIP_BEFORE
            first = max(first, self.skips.batch_of(target))
        return Intervention(
            what=refused.what,
            step=refused.step,
            batch=refused.batch,
            loss=repr(refused.loss),
            grad_norm=repr(refused.grad_norm),
            skipped=(first, refused.batch + 1),
            back_to=target if self.needs_rollback(refused) else None,
        )

    def record_intervention(self, done: Intervention) -> None:
        """Add an intervention and leave its batches out from now on."""
        self.interventions = (*self.interventions, done)
        self.skips = skips_of(self.interventions)

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return {
            "record": [one.to_json() for one in self.interventions],
            "skips": self.skips.to_json(),
            "history": self.history.to_json(),
        }

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Load the history of the checkpoint that the run stands at now; interventions stay."""
        self.history = SpikeDetector(WINDOW)
        if saved := meta.get("guard"):
            self.history = SpikeDetector.from_json(WINDOW, saved["history"])

    def _in_a_row(self, refused: RefusedStep) -> list[Intervention]:
        """Batches that were left out at this very step, the first one first."""

        def same(one: Intervention) -> bool:
            return (one.what, one.step, one.back_to) == ("nonfinite", refused.step, None)

        return list(takewhile(same, reversed(self.interventions)))[::-1]


def skips_of(interventions: Sequence[Intervention]) -> Skips:
    """The batches that all interventions left out."""
    skips = Skips()
    for one in interventions:
        skips = skips.plus(*one.skipped)
    return skips


def read_interventions(run: RunDir, meta: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The interventions of a run as JSON (rank 0 reads and broadcasts), by events.jsonl: those of
    the checkpoint, and perhaps some that came after it."""
    saved = list((meta or {}).get("guard", {}).get("record", []))
    events = read_events(run).record
    try:
        written = [Intervention.from_json(one).to_json() for one in events]
        is_whole = [one["number"] for one in events] == list(range(len(events)))
    except (ValueError, KeyError, TypeError):
        is_whole = False
    is_begun = run.exists or bool(events)
    if not is_whole or (is_begun and written[: len(saved)] != saved):
        raise RunError(
            f"{run.events_path} lacks what the guard has done, or has it from another run; bring"
            " the file back from a copy, or begin another --run with the weights."
        )
    return written if is_begun else saved


def log_intervention(
    run: RunDir, number: int, done: Intervention, samples: Sequence[Mapping[str, Any]]
) -> None:
    """Write the event of an intervention to the disk, before the intervention is carried out."""
    kind = "batch_left_out" if done.back_to is None else "rolled_back"
    run.durable_event(kind, number=number, **done.to_json(), samples=list(samples))


def open_guard(
    config: GuardConfig,
    record: Sequence[Mapping[str, Any]],
    meta: Mapping[str, Any] | None,
    *,
    run: RunDir | None = None,
    trend: MemoryTrend | None = None,
) -> AnomalyGuard:
    """The guard of a run that begins or goes on: `record` is what `read_interventions` found, and
    `meta` the checkpoint's."""
    interventions = [Intervention.from_json(one) for one in record]
    guard = AnomalyGuard(config, interventions, run=run, trend=trend)
    guard.restore(meta or {})
    return guard


def _exceeds(z: float, threshold: float) -> bool:
    return threshold > 0 and z > threshold
