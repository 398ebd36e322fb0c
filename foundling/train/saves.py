"""Saves of a run: when one is due, what goes into a checkpoint, what became of it."""

from dataclasses import dataclass
from typing import Any

from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.remote import Folder
from foundling.config.run import CheckpointConfig
from foundling.runtime.progress import PROGRESS
from foundling.runtime.run_dir import RunDir
from foundling.train.dataloader import DataLoader
from foundling.train.evaluation import Evaluation
from foundling.train.faults.anomaly import AnomalyGuard
from foundling.train.metrics import Metrics
from foundling.train.state import TrainState
from foundling.train.token_ledger import check_position


@dataclass(frozen=True, kw_only=True)
class RunSaver:
    """Saves the whole state in the background; no failure of a disk ends the training."""

    manager: CheckpointManager
    settings: CheckpointConfig
    run: RunDir
    last_step: int
    loader: DataLoader
    guard: AnomalyGuard
    metrics: Metrics
    evaluation: Evaluation
    parent: dict[str, Any] | None
    config: dict[str, Any]
    """Every setting, as a checkpoint keeps it."""

    def save_if_due(self, state: TrainState) -> None:
        """Save on the clock, at the end, and before every evaluation, so that none costs a
        checkpoint; and record what became of earlier saves. Collective."""
        self.report(state)
        step = state.step
        if (
            step % self.settings.every == 0
            or step == self.last_step
            or self.evaluation.held_out_is_due(step)
            or self.evaluation.tasks_are_due(step)
        ):
            self.save(state)

    def save(self, state: TrainState) -> None:
        """Copy the state, to be written while training goes on."""
        with self.metrics.timed("save_s"):
            self._save(state)

    def finish(self, state: TrainState) -> Folder | None:
        """The checkpoint of the step that the run stands at, verified; it is saved now if it was
        left out before, because an old save hung or the disk was full."""
        with self.metrics.timed("save_s"), PROGRESS.during("save"):
            if not self.manager.has_saved(state.step):
                self._save(state)
            return self.manager.finish(state.step)

    def report(self, state: TrainState) -> None:
        """Write the outcomes of background saves as events."""
        for saved in self.manager.poll():
            if not state.world.is_main:
                continue
            seconds = {"stall_s": round(saved.stall_s, 4), "write_s": round(saved.write_s, 4)}
            if saved.error:
                self.run.event("not_saved", step=saved.step, **seconds, error=saved.error)
            else:
                self.run.event("saved", step=saved.step, **seconds, bytes=saved.bytes)

    def _save(self, state: TrainState) -> None:
        loader = self.loader
        check_position(state.ledger, loader.order, state.step, loader.skips)
        self.guard.compare_replicas(state)
        meta = state.meta(
            segments=[segment.to_json() for segment in loader.order.segments],
            parent=self.parent,
            guard=self.guard.to_json(),
            config=self.config,
        )
        no_room = f"there is no room for its lines in {self.run.path}."
        hindrance = "" if self.metrics.sync() else no_room
        with PROGRESS.during("save"):
            self.manager.save(state.step, state.tensors(), meta, hindrance=hindrance)
