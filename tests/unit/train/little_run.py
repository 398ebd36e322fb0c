"""A run in miniature around the guard: real model, optimizer, checkpoints and record; batches that
are made from their number, of which some come out bad.

What foundling/train/loop.py does, without data sets and set-up, so that kills at every step cost
little.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.reader import load_tensors
from foundling.checkpoint.retention import latest
from foundling.config.model import ModelConfig
from foundling.config.optim import OptimConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.run import CheckpointConfig, GuardConfig
from foundling.model.initialization import init_weights
from foundling.model.transformer import Transformer
from foundling.optim.gradients import clip_
from foundling.optim.optimizer import build_optimizer, set_lr
from foundling.parallel.apply import apply_parallel
from foundling.parallel.mesh import ALONE
from foundling.runtime.dist import World
from foundling.runtime.run_dir import RunDir, cut_lines
from foundling.train.faults.anomaly import RefusedStepError, open_guard, read_interventions
from foundling.train.faults.rollback import drop_abandoned_checkpoints, handle_refused_step
from foundling.train.state import TrainState
from foundling.train.token_ledger import Ledger, TokenCounts

ROWS, STEPS, SAVE_EVERY = 3, 24, 4
MODEL = ModelConfig(vocab_size=20, dim=8, layers=1, heads=1, ffn_dim=8)
GUARD = GuardConfig(spike_loss=8, spike_norm=8)


class Killed(BaseException):
    """Stands for kill -9: nothing of ours may catch it."""


@dataclass(frozen=True)
class Place:
    """Where samples are found."""

    names: tuple[str, ...]
    sources: np.ndarray
    epochs: np.ndarray
    units: np.ndarray


class Order:
    """Sample i is unit i of the only source."""

    def sample_of(self, step: int) -> int:
        return step * ROWS

    def consumed(self, samples: int) -> dict[str, int]:
        return {"text": samples}

    def locate_range(self, first: int, count: int) -> Place:
        zeros = np.zeros(count, np.int64)
        return Place(("text",), zeros, zeros, np.arange(first, first + count))


def batch(number: int) -> torch.Tensor:
    """A batch is a function of its number."""
    rng = np.random.default_rng(number)
    return torch.as_tensor((rng.integers(0, 20, (ROWS, 1)) + np.arange(9)) % 20)


@dataclass
class LittleRun:
    """Faults are factors on a batch's loss and gradients, by the batch's number."""

    folder: Path
    faults: dict[int, float] = field(default_factory=dict)
    guard: GuardConfig = GUARD

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder)

    def train(self, die_at: int | None = None) -> None:
        """From the last checkpoint to the end, or to the step in which it is killed."""
        self.folder.mkdir(exist_ok=True)
        state, run, order = new_state(), self.run, Order()
        with CheckpointManager(run.checkpoints, CheckpointConfig(keep=3), World()) as saver:
            drop_abandoned_checkpoints(saver.folder, read_interventions(run, None))
            newest = latest(run.checkpoints)
            meta = load_meta(newest) if newest else None
            if newest and meta:
                tensors = state.tensors()
                load_tensors(newest, tensors)
                state.restore(meta, tensors)
            guard = open_guard(self.guard, read_interventions(run, meta), meta)
            cut_lines(run.metrics_path, state.step)
            with open(run.metrics_path, "a") as lines:
                while state.step < STEPS:
                    number = guard.skips.batch_of(state.step)
                    loss, norm = self.gradients(state, number)
                    try:
                        guard.check(state.step, loss, norm)
                    except RefusedStepError as refused:
                        handle_refused_step(refused, guard, state, run, saver, order)
                        continue
                    update(state)
                    assert (
                        state.ledger.total.units
                        == guard.skips.units_read(order, state.step)["text"]
                    )
                    if state.step == die_at:
                        raise Killed
                    line = {"step": state.step, "batch": number, "loss": loss, "norm": norm}
                    lines.write(json.dumps(line) + "\n")
                    lines.flush()
                    if state.step % SAVE_EVERY == 0:
                        saver.save(state.step, state.tensors(), state.meta(guard=guard.to_json()))
            saver.finish()

    def gradients(self, state: TrainState, number: int) -> tuple[float, float]:
        rows, factor = batch(number), self.faults.get(number, 1.0)
        loss_sum, _ = state.module(rows[:, :-1], rows[:, 1:], None)
        (loss_sum * factor).backward()
        norm = float(clip_([param for _, param in state.params()], 0.0))
        return loss_sum.item() * factor, norm


def new_state() -> TrainState:
    torch.set_num_threads(1)
    model = Transformer(MODEL)
    init_weights(model, 1)
    optimizer = build_optimizer(model.named_parameters(), OptimConfig(lr=1e-2))
    module = apply_parallel(model, ParallelConfig(), ALONE)
    cpu = torch.device("cpu")
    return TrainState(model, module, optimizer, World(), cpu, torch.float32, seed=1)


def update(state: TrainState) -> None:
    set_lr(state.optimizer, 1e-2)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.ledger = state.ledger.plus(Ledger({"text": TokenCounts(units=ROWS)}))


FAULTS: dict[str, dict[int, float]] = {
    "one NaN": {10: math.nan},
    "three in a row": {10: math.nan, 11: math.inf, 12: math.nan},
    "a spike": {14: 60.0},
    "before the first save": {1: math.nan, 2: math.nan, 3: math.nan},
    "spikes that come again": {14: 60.0, 15: 60.0, 16: 60.0},
    "all of it": {2: math.inf, 9: 60.0, 17: math.nan, 18: math.nan, 19: math.nan},
}
