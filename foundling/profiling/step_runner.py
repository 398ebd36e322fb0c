"""The trainer's own step under any layout: built as a run builds it, timed undisturbed.

Batches are drawn before the clock starts, as the loader draws them ahead of a run. On CUDA a mark
is put into the device's stream after each step and read when all are done: waiting for the device
in between would count bubbles that a run does not have. Rejected: one clock around all steps, which
tells no median. A speed counts only with the loss of a reference beside it, so losses are kept.

Rows are random and a function of their number alone, so that step 7 has the same tokens in any
micro-batches and under any layout: what is compared reads the same rows.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from foundling.config.errors import ConfigError
from foundling.config.run import RunConfig
from foundling.data.batch import IGNORE, Batch, Bounds, Counts
from foundling.model.initialization import empty_model, init_weights
from foundling.parallel.mesh import ALONE, Mesh
from foundling.runtime.device import (
    DeviceChoice,
    free_cached_memory,
    memory_usage,
    reset_peak_memory,
    synchronise,
    translate_out_of_memory,
)
from foundling.runtime.dist import on_main
from foundling.train.autotune.present_machine import autotune, report_choices
from foundling.train.state import TrainState, fix_ddp_buckets, make_state
from foundling.train.step import StepOptions, StepResult, train_step

SOURCE = "bench"
IN_DOCUMENTS = " in documents of an eighth to a half of a row"
WARM_UP = 3
Tell = Callable[[str], None]


class BenchRows(Protocol):
    """Numbered rows."""

    name: str
    """What they are, for the report."""

    def batch(self, first: int, count: int) -> Batch:
        """Rows `first` and the `count` - 1 after it."""


class RandomRows:
    """Tokens without any order, of the whole vocabulary; one document a row, or several."""

    def __init__(self, vocab: int, width: int, seed: int, *, documents: bool = False) -> None:
        self.vocab, self.width, self.seed, self.documents = vocab, width, seed, documents
        self.name = "random tokens" + (IN_DOCUMENTS if documents else "")

    def batch(self, first: int, count: int) -> Batch:
        """Each row from a generator of its own."""
        numbers = range(first, first + count)
        drawn = [np.random.default_rng((self.seed, row)) for row in numbers]
        size = self.width + 1
        tokens = np.stack([row.integers(self.vocab, size=size) for row in drawn])
        return batch_of(tokens, numbers if self.documents else None)


def random_rows(config: RunConfig) -> RandomRows:
    """Random tokens for a config's model, in documents where it masks them: a row of one document
    would be timed at the cost of plain attention."""
    train, mask = config.train, config.data.document_mask
    return RandomRows(config.model.vocab_size, train.seq_len, train.seed, documents=mask)


def batch_of(tokens: NDArray[np.int64], numbers: Sequence[int] | None = None) -> Batch:
    """Rows [B, T + 1] as inputs and the next tokens: each row one document, or several whose ends
    follow from the row's number. The last token of one has no next."""
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    documents = np.zeros(inputs.shape, dtype=np.int32)
    if numbers is not None:
        documents = np.stack([document_numbers(row, inputs.shape[1]) for row in numbers])
        targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORE
    counts = Counts(inputs.size, inputs.size, int((targets != IGNORE).sum()))
    bounds = Bounds.of(documents)
    return Batch(inputs, targets, bounds, counts, {SOURCE: counts}, {SOURCE: len(inputs)})


def document_numbers(row: int, width: int) -> NDArray[np.int32]:
    """[T] the document of each position: an eighth to a half of the row each, the last what is
    left."""
    least, most = max(1, width // 8), max(1, width // 2)
    lengths = np.random.default_rng((row, width)).integers(least, most + 1, size=8)
    ends = np.cumsum(lengths)
    return np.searchsorted(ends, np.arange(width), side="right").astype(np.int32)


@dataclass
class Timed:
    """What some steps took, on this rank."""

    rows: int = 0
    """Of a micro-step."""
    micro_steps: int = 1
    step_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    """Of that, the update alone, in which ranks do not communicate; where it was asked for."""
    losses: list[float] = field(default_factory=list)
    allocated: int = 0
    """Bytes at the peak of the timed steps."""
    reserved: int = 0
    memory: int = 0
    """Of the allocated bytes, what the model and its steps added to what was there before."""
    positions: int = 0
    """Of a step, over all ranks."""

    @property
    def seconds(self) -> float:
        """Of the median step."""
        return median(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Positions of a step over the median step."""
        return self.positions / self.seconds


class StepRunner:
    """A config on a mesh, ready to take steps. Every rank of the mesh makes one."""

    def __init__(self, config: RunConfig, choice: DeviceChoice, mesh: Mesh = ALONE) -> None:
        if config.model.vocab_size < 1:
            raise ConfigError("model.vocab_size is 0 and there is no data to ask; give it.")
        # Rank 0 measures for all: ranks that each chose by their own clock could choose otherwise.
        self.config, self.chosen = on_main(lambda: autotune(config, choice))
        self.device = choice.device
        reset_peak_memory(self.device)
        # What graphs hold is known as reserved only: then so is what was there before.
        counted = "reserved" if self.config.train.compile == "graphs" else "allocated"
        self._before = memory_usage(self.device)[f"memory_{counted}"]
        self.state = _state(self.config, mesh, choice)

    @property
    def timed_lr(self) -> float:
        """Random tokens must not lead the weights astray."""
        return self.config.optim.lr / 10

    def step(self, batches: Sequence[Batch], lr: float, *, measure: bool = False) -> StepResult:
        """One optimizer step, and its numbers."""
        options = StepOptions(
            lr=lr,
            clip=self.config.optim.clip,
            sources=[SOURCE],
            document_mask=self.config.data.document_mask,
            measure_update=measure,
        )
        return train_step(self.state, batches, options)

    def batches(self, rows: BenchRows, step: int, size: int, micro_steps: int) -> list[Batch]:
        """This rank's micro-batches of a step."""
        readers, each = self.state.mesh.data, size * micro_steps
        first = (step * readers.size + readers.rank) * each
        return [rows.batch(first + micro * size, size) for micro in range(micro_steps)]

    @translate_out_of_memory()
    def timed(
        self,
        rows: BenchRows,
        count: int,
        *,
        size: int,
        micro_steps: int = 1,
        warmup: int = WARM_UP,
        measure: bool = False,
        watch_updates: bool = False,
    ) -> Timed:
        """Take `warmup` steps of micro-batches of `size` rows and then `count` that are timed.
        `watch_updates` waits for the device around every update to time it."""
        drawn = [
            self.batches(rows, step, size, micro_steps) for step in range(min(warmup + count, 4))
        ]
        found = Timed(size, micro_steps)
        for number in range(warmup):
            self.step(drawn[number % len(drawn)], self.timed_lr, measure=measure)
        reset_peak_memory(self.device)
        marks = Marks(self.device)
        with _updates(self.state, found.optimizer_s) if watch_updates else contextlib.nullcontext():
            for number in range(warmup, warmup + count):
                batches = drawn[number % len(drawn)]
                result = self.step(batches, self.timed_lr, measure=measure)
                marks.mark()
                found.losses.append(result.loss)
                found.positions = result.counts.total.positions
        found.step_s = marks.seconds()
        found.allocated = self.state.memory()["memory_peak"]
        found.reserved = memory_usage(self.device)["memory_peak_reserved"]
        found.memory = found.allocated - self._before
        return found

    def recover(self) -> None:
        """After a step that did not fit: forget what it left and give the memory back."""
        forget_step(self.state.optimizer)
        free_cached_memory()


def _state(config: RunConfig, mesh: Mesh, choice: DeviceChoice) -> TrainState:
    """As train/setup.py builds it for a run without a parent."""
    in_parts = mesh.is_sharded and not config.parallel.fsdp1
    model = empty_model(config.model, "meta" if in_parts else choice.device)
    if not in_parts:
        init_weights(model, config.train.seed)
    state = make_state(model, config.train, config.optim, config.parallel, mesh, choice)
    fix_ddp_buckets(state, config.train.seq_len)
    return state


def forget_step(optimizer: torch.optim.Optimizer) -> None:
    """Drop gradients and moments: memory may have run out while a parameter's state was being made,
    and no optimizer finds out that half of it is missing. The next step makes them anew."""
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()


def tell_chosen(chosen: Sequence[str], tell: Tell) -> None:
    """Say which kernels were taken; a fallback is a warning, as in a run."""
    report_choices(chosen, lambda line: tell(f"chosen: {line}"))


@contextlib.contextmanager
def _updates(state: TrainState, seconds: list[float]) -> Iterator[None]:
    """Append the seconds of every update."""
    began = 0.0

    def before(*_: object) -> None:
        nonlocal began
        synchronise(state.device)
        began = time.perf_counter()

    def after(*_: object) -> None:
        synchronise(state.device)
        seconds.append(time.perf_counter() - began)

    optimizer = state.optimizer
    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Marks:
    """Times between marks on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        synchronise(device)
        self.mark()

    def mark(self) -> None:
        """Something is done here, once the device has come so far."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each mark to the next."""
        synchronise(self.device)
        if self.cuda:
            pairs = zip(self._events, self._events[1:], strict=False)
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
