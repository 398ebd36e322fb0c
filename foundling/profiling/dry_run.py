"""The trainer's own step on random tokens, under any layout: for preflights and benchmarks.

Rows are drawn by (seed, step, row of the global batch), so that every layout with the same number
of readers reads the same rows and must have the same loss: a speed only counts with the loss of
a reference beside it. `probe.py` looks into one process's step; this one takes it as it is.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foundling.config.errors import ConfigError
from foundling.config.run import RunConfig
from foundling.data.batch import Batch, Bounds, Counts
from foundling.model.initialization import empty_model, init_weights
from foundling.parallel.mesh import Mesh
from foundling.runtime.device import DeviceChoice, memory_usage, reset_peak_memory, synchronise
from foundling.runtime.dist import on_main
from foundling.train.autotune.present_machine import autotune
from foundling.train.state import TrainState, fix_ddp_buckets, make_state
from foundling.train.step import StepOptions, train_step

SOURCE = "random"


@dataclass
class DryRunResult:
    """What a few steps took, on this rank."""

    step_s: list[float] = field(default_factory=list)
    """Of the steps that were timed."""
    optimizer_s: list[float] = field(default_factory=list)
    """Of that, the update alone, in which ranks do not communicate."""
    losses: list[float] = field(default_factory=list)
    """Of every step, the warm-up's too."""
    first_step_s: float = 0.0
    positions: int = 0
    """Of a step, over all ranks."""
    memory_before: int = 0
    memory_peak: int = 0

    @property
    def memory(self) -> int:
        """Bytes that the model and its steps added at the peak."""
        return self.memory_peak - self.memory_before


class DryRun:
    """A config on a mesh, ready to take steps. Every rank of the mesh makes one."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, choice: DeviceChoice, *, watch_updates: bool = True
    ) -> None:
        """`watch_updates` waits for the device around every update to time it; a bench of the whole
        step must not."""
        if config.model.vocab_size < 1:
            raise ConfigError("model.vocab_size is 0 and there is no data to ask; give it.")
        # Rank 0 measures for all: ranks that each chose by their own clock could choose otherwise.
        config, self.chosen = on_main(lambda: autotune(config, choice))
        self.config, self.device = config, choice.device
        reset_peak_memory(self.device)
        # What graphs hold is known as reserved only: then so is what was there before.
        counted = "reserved" if config.train.compile == "graphs" else "allocated"
        self._before = memory_usage(self.device)[f"memory_{counted}"]
        self.state = _state(config, mesh, choice)
        self._update_s = 0.0
        if watch_updates:
            self._watch_updates()

    def steps(self, count: int, *, warmup: int = 1) -> DryRunResult:
        """Take `warmup` steps and then `count` that are timed."""
        taken = DryRunResult(memory_before=self._before)
        for number in range(warmup + count):
            batch = self.batch(number)
            synchronise(self.device)
            began, self._update_s = time.perf_counter(), 0.0
            result = train_step(
                self.state,
                [batch],
                StepOptions(
                    lr=self.config.optim.lr / 10, clip=self.config.optim.clip, sources=[SOURCE]
                ),
            )
            synchronise(self.device)
            seconds = time.perf_counter() - began
            taken.losses.append(result.loss)
            if number == 0:
                taken.first_step_s = seconds
            if number >= warmup:
                taken.step_s.append(seconds)
                taken.optimizer_s.append(self._update_s)
            taken.positions = result.counts.total.positions
        taken.memory_peak = self.state.memory()["memory_peak"]
        return taken

    def batch(self, step: int) -> Batch:
        """This rank's rows of a step."""
        train, readers = self.config.train, self.state.mesh.data
        rows = [
            np.random.default_rng((train.seed, step, readers.rank * train.batch_size + row))
            for row in range(train.batch_size)
        ]
        width, vocab = train.seq_len + 1, self.config.model.vocab_size
        tokens = np.stack([row.integers(vocab, size=width, dtype=np.int64) for row in rows])
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        counts = Counts(inputs.size, inputs.size, inputs.size)
        documents = np.zeros(inputs.shape, dtype=np.int32)
        return Batch(
            inputs, targets, Bounds.of(documents), counts, {SOURCE: counts}, {SOURCE: len(rows)}
        )

    def _watch_updates(self) -> None:
        began = 0.0

        def before(*_: Any) -> None:
            nonlocal began
            synchronise(self.device)
            began = time.perf_counter()

        def after(*_: Any) -> None:
            synchronise(self.device)
            self._update_s += time.perf_counter() - began

        self.state.optimizer.register_step_pre_hook(before)
        self.state.optimizer.register_step_post_hook(after)


def _state(config: RunConfig, mesh: Mesh, choice: DeviceChoice) -> TrainState:
    """As train/setup.py builds it for a run without a parent."""
    in_parts = mesh.is_sharded and not config.parallel.fsdp1
    model = empty_model(config.model, "meta" if in_parts else choice.device)
    if not in_parts:
        init_weights(model, config.train.seed)
    state = make_state(model, config.train, config.optim, config.parallel, mesh, choice)
    fix_ddp_buckets(state, config.train.seq_len)
    return state
