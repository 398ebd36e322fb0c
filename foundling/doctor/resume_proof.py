"""Proof that a resumed run is the same run: train, kill, resume, compare runs and rows."""

import hashlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foundling.checkpoint.folders import list_checkpoints, step_of
from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.paths import find_checkpoint
from foundling.checkpoint.reader import load_tensors, tensor_specs
from foundling.checkpoint.retention import latest
from foundling.config.data import PhaseConfig
from foundling.config.errors import ConfigError, DataError, RunError
from foundling.config.load import dump_yaml, load_run_config
from foundling.config.run import EvalConfig, LogConfig, RunConfig, check_resolved
from foundling.data.batch import Batch
from foundling.data.batch_reader import BatchReader
from foundling.data.dataset import DataSet
from foundling.data.order import Order
from foundling.plan.horizon import batch_tokens, plan_horizon
from foundling.plan.supply import check_supply
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import step_lines
from foundling.train.dataloader import continue_order
from foundling.train.setup import open_data, source_sizes

# What "the same run" means, in findings: losses, data and weights of two run directories.
#
# Bit for bit where the device promises it. CUDA without train.deterministic does not: sums are then
# added in another order each time, so numbers are compared within a stated tolerance, and what was
# read is still compared exactly.

NUMBERS = ("loss", "grad_norm", "lr")
COUNTS = ("step", "positions", "tokens", "targets", "sources", "skipped")
TOLERANCE = 0.02
"""Relative, for numbers of a device that adds in another order each time."""


@dataclass(frozen=True)
class Finding:
    """One thing that was compared."""

    what: str
    same: bool
    detail: str


def compare_runs(one: RunDir, other: RunDir, *, exact: bool) -> list[Finding]:
    """Everything that must not depend on whether a run was stopped."""
    left, right = list(step_lines(one)), list(step_lines(other))
    return [
        _losses(left, right, exact),
        _lines("steps and what they read", left, right),
        _data_order(one, other),
        _weights(one, other, exact),
    ]


def _losses(
    left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]], exact: bool
) -> Finding:
    worst, where = 0.0, ""
    for one, other in zip(left, right, strict=False):
        for name in NUMBERS:
            a, b = one[name], other[name]
            gap = 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))
            if gap > worst:
                worst, where = gap, f"{name} of step {one['step']}"
    what = f"losses of {len(left)} steps"
    return _verdict(what, worst, where, exact, all_there=len(left) == len(right))


def _verdict(what: str, worst: float, where: str, exact: bool, all_there: bool = True) -> Finding:
    if not all_there:
        return Finding(what, False, "one run has more of them")
    if exact:
        return Finding(what, worst == 0, "bit for bit" if not worst else f"{where} by {worst:.1e}")
    detail = f"the largest difference is {worst:.1e} ({where})" if worst else "bit for bit"
    tolerated = f"{detail}; {TOLERANCE:g} is tolerated, train.deterministic is off"
    return Finding(what, worst <= TOLERANCE, tolerated)


def _lines(
    what: str, left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]
) -> Finding:
    for number, pair in enumerate(zip(left, right, strict=False), start=1):
        one, other = ({name: line.get(name) for name in COUNTS} for line in pair)
        if one != other:
            return Finding(what, False, f"line {number} is {one} and {other}")
    if len(left) != len(right):
        return Finding(what, False, f"{len(left)} lines and {len(right)}")
    return Finding(what, True, f"{len(left)} lines")


def _data_order(one: RunDir, other: RunDir) -> Finding:
    metas = [load_meta(find_checkpoint(run.path)[1]) for run in (one, other)]
    for name in ("step", "segments", "ledger"):
        if metas[0][name] != metas[1][name]:
            return Finding("data order", False, f"the checkpoints' {name} differ")
    return Finding("data order", True, f"{len(metas[0]['segments'])} segments")


def _weights(one: RunDir, other: RunDir, exact: bool) -> Finding:
    """Weights and moments of the last checkpoints, one tensor at a time in memory's order."""
    left, right = _tensors(one), _tensors(other)
    if left.keys() != right.keys():
        return Finding("weights and moments", False, "the checkpoints hold other tensors")
    worst, where = 0.0, ""
    for name, tensor in left.items():
        if torch.equal(tensor, right[name]):
            continue
        gap = float((tensor - right[name]).norm() / tensor.norm().clamp_min(1e-30))
        gap = gap if math.isfinite(gap) else math.inf
        if exact or name.startswith("model."):  # moments of a few steps are mostly noise
            worst, where = max((worst, where), (gap, name))
    count = sum(tensor.numel() for tensor in left.values())
    return _verdict(f"{count:,} weights and moments", worst, where, exact)


def _tensors(run: RunDir) -> dict[str, torch.Tensor]:
    _, checkpoint = find_checkpoint(run.path)
    tensors = {
        name: torch.empty(spec.shape, dtype=spec.dtype)
        for name, spec in tensor_specs(checkpoint).items()
    }
    load_tensors(checkpoint, tensors, check=False)
    return tensors


# `foundling rehearse --only resume`: train, train again with a kill -9 in between, and compare.
#
# Both runs are ordinary `foundling train` commands in child processes, and the kill is a real one:
# no part of the trainer knows that it is being tested. Rejected: an exception in place of the kill,
# which runs the handlers that a lost machine never runs.

LEAST_STEPS = 4
POLL_S = 0.002
TRIES = 5
Say = Callable[[str], None]


def check_steps(steps: int) -> None:
    """There must be a step before the kill, a checkpoint, and a step after it."""
    if steps < LEAST_STEPS:
        raise ConfigError(f"--steps {steps} is too few to be stopped in between; give 4 or more.")


def rehearsal(config: RunConfig, steps: int) -> RunConfig:
    """The same run with another horizon and other clocks; what a step does is left as it is."""
    check_steps(steps)
    train, batch = config.train, config.train.global_batch_tokens
    if not batch and config.parallel.replicate > 1:
        batch = train.batch_size * train.seq_len * config.parallel.replicate
    # Two runs of a growing data set would see two data sets: it must be finished here.
    phases = tuple(_shared(phase, config) for phase in config.data.phases)
    return config.replace(
        train={"horizon": steps, "global_batch_tokens": batch},
        data=config.data.replace(phases=phases, follow=0.0),
        optim={"warmup": min(config.optim.warmup, steps)},
        parallel={"replicate": 0},
        eval=EvalConfig(every=0),
        # In the run: elsewhere it would be left under an unknown name.
        checkpoint={"every": max(1, steps // 4), "keep": 2, "folder": ""},
        log=LogConfig(every=config.log.every, tensorboard=False),
    )


def _shared(phase: PhaseConfig, config: RunConfig) -> PhaseConfig:
    """A phase that begins at a step as one that begins at the same share of the steps."""
    if phase.at < 1:
        return phase
    steps = config.train.horizon_in("steps")
    if not steps:
        raise ConfigError(
            f"the phase at step {phase.at:g} has no place in a shorter run; give data.phases as"
            " shares of the steps."
        )
    return phase.replace(at=phase.at / steps)


def prove_resume(
    config: RunConfig,
    folder: Path,
    say: Say,
    *,
    processes: int | None = None,
    limit_s: float | None = None,
) -> list[Finding]:
    """Train `config` twice in `folder`, the second time killed and resumed; what was compared.

    `processes` is what `train --nproc` is given, and `limit_s` the most that a training may take.
    """
    file = folder / "config.yaml"
    file.write_text(dump_yaml(config))
    trainer = _Trainer(file, processes, limit_s)
    whole, stopped = RunDir(folder / "whole"), RunDir(folder / "stopped")
    say(f"training {config.train.horizon} without a stop")
    trainer.finish(whole)
    written, saved = trainer.kill_in_between(stopped, config)
    say(
        f"training again: killed (SIGKILL) after step {written}, going on from the checkpoint of"
        f" step {saved}"
    )
    trainer.finish(stopped)
    # The run's own config says where it was trained; the one given may say auto.
    train = load_run_config(whole.config_path).train
    return compare_runs(whole, stopped, exact=train.device == "cpu" or train.deterministic)


@dataclass(frozen=True)
class _Trainer:
    """Starts `foundling train` on one config."""

    file: Path
    processes: int | None
    limit_s: float | None

    def _command(self, run: RunDir) -> list[str]:
        words = ["train", str(self.file), "--run", str(run.path)]
        many = ["--nproc", str(self.processes)] if self.processes else []
        return [sys.executable, "-m", "foundling", *words, *many]

    def finish(self, run: RunDir) -> None:
        """Train to the end; a refusal is passed on in its own words."""
        try:
            done = subprocess.run(
                self._command(run), capture_output=True, text=True, timeout=self.limit_s
            )
        except subprocess.TimeoutExpired:
            raise RunError(
                f"the rehearsal's training took more than {self.limit_s:g} s; raise --limit."
            ) from None
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            reason = (said or ["no word"])[-1].removeprefix("foundling: ")
            raise RunError(f"the rehearsal could not train: {reason}")

    def kill_in_between(self, run: RunDir, config: RunConfig) -> tuple[int, int]:
        """Start a run and kill it between two checkpoints: the last step it wrote, and saved.

        A run that has saved nothing yet would begin anew, and the comparison prove nothing."""
        every = config.checkpoint.every
        for attempt in range(TRIES):
            # Later tries aim earlier, for steps so short that the first kill came too late.
            aim = every + max(1, every // 2) if attempt < TRIES // 2 else 1
            code = self._killed_after(run, aim)
            newest = latest(run.checkpoints) if run.checkpoints.is_dir() else None
            if code == -signal.SIGKILL and newest is not None:
                return _steps(run), step_of(newest) or 0
            if code not in (0, -signal.SIGKILL):
                self.finish(run)  # it will say why
            shutil.rmtree(run.path, ignore_errors=True)
        raise RunError(
            "the run was over before it could be killed after a save; give more --steps."
        )

    def _killed_after(self, run: RunDir, step: int) -> int:
        """Kill a run, launcher and ranks alike, when a step is written down; how it ended."""
        with open(run.path.with_suffix(".log"), "w") as log:
            child = subprocess.Popen(
                self._command(run), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                _wait_for(run, step, child, self.limit_s)
            finally:
                if child.poll() is None:
                    # Ranks have a session of their own and die with their launcher.
                    os.killpg(child.pid, signal.SIGKILL)
            return child.wait()


def _steps(run: RunDir) -> int:
    return sum(1 for _ in step_lines(run))


def _wait_for(
    run: RunDir, step: int, child: "subprocess.Popen[bytes]", limit_s: float | None
) -> None:
    """Wait until a step is written down and a checkpoint is there, or the run is over."""
    last = time.monotonic() + (limit_s or float("inf"))
    while child.poll() is None:
        if _steps(run) >= step and list_checkpoints(run.checkpoints):
            return
        if time.monotonic() > last:
            raise RunError(f"no step {step} within {limit_s:g} s; raise --limit.")
        time.sleep(POLL_S)


# The data alone, without training: the same rows in the same steps for any number of ranks.
#
# One loader per rank is made for several world sizes, and each is asked for steps at the beginning,
# in the middle, at the end and around every change of segment, out of turn as a resume would ask.
# Together the ranks must give exactly the rows that one process reads in turn.


def data_findings(config: RunConfig, *, worlds: Sequence[int], steps: int) -> list[Finding]:
    """Open the data of a fresh run as training would, and prove its stream."""
    check_resolved(config)
    datasets = open_data(config).datasets
    ranks = config.parallel.replicate or 1
    train = config.train.replace(global_batch_tokens=batch_tokens(config, ranks))
    config = config.replace(train=train)
    sizes = source_sizes(config, datasets)
    horizon = plan_horizon(config, ranks, sizes)
    check_supply(config, horizon, sizes)
    order = continue_order(config.data, config.train, horizon.steps, (), datasets, 0)
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
    alone = _RankReader(config, datasets, order, 1)
    wanted = {step: alone.rows(step) for step in asked}
    found = [_consumption(order, alone, asked), _prefetched(config, datasets, order, wanted)]
    for world in worlds:
        reader = _RankReader(config, datasets, order, world)
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


class _RankReader:
    """All ranks of one world size, read one after the other."""

    def __init__(
        self, config: RunConfig, datasets: Mapping[str, DataSet], order: Order, world: int
    ) -> None:
        tokens = config.train.batch_size * config.train.seq_len
        self._ranks = [
            BatchReader(datasets, order, micro_tokens=tokens, rank=rank, world=world)
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


def _consumption(order: Order, alone: _RankReader, asked: Sequence[int]) -> Finding:
    """What each step holds, against what the order says by arithmetic."""
    for step in asked:
        before, after = (order.consumed(order.sample_of(at)) for at in (step, step + 1))
        by_arithmetic = {n: after[n] - before[n] for n in after if after[n] > before[n]}
        if alone.units[step] != by_arithmetic:
            text = f"step {step} holds {alone.units[step]} units and the ledger {by_arithmetic}"
            return Finding("units by source", False, text)
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
    loader = BatchReader(datasets, order, micro_tokens=tokens, first_step=first)
    count = 0
    for step, batches in loader.prefetch(first, max(wanted) + 1):
        if step not in wanted:
            break
        if [sums for batch in batches for sums in row_sums(batch)] != wanted[step]:
            return Finding("stream resumed", False, f"step {step} has other rows")
        count += 1
    return Finding("stream resumed", True, f"{count} steps from step {first} on, read ahead")
