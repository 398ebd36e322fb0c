"""`foundling selftest resume`: train, train again with a kill -9 in between, and compare.

Both runs are ordinary `foundling train` commands in child processes, and the kill is a real one: no
part of the trainer knows that it is being tested. Rejected: an exception in place of the kill,
which runs the handlers that a lost machine never runs.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from foundling.checkpoint import latest, list_checkpoints, step_of
from foundling.config.checks import check_run
from foundling.config.errors import ConfigError, RunError
from foundling.config.resolve import dump_yaml, load_run_config
from foundling.config.sections import DataConfig, EvalConfig, LogConfig, PhaseConfig, RunConfig
from foundling.doctor.compare import Finding, compare_runs
from foundling.plan import in_steps
from foundling.runtime.rundir import RunDir, read_lines

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
    short = replace(
        in_steps(config, steps),
        data=_data(config),
        optim=replace(config.optim, warmup_steps=min(config.optim.warmup_steps, steps)),
        parallel=replace(config.parallel, replicate=0),
        eval=EvalConfig(every=0, sample_every=0),
        # In the run: elsewhere it would stay behind under a name that nobody knows.
        checkpoint=replace(config.checkpoint, every=max(1, steps // 4), keep=2, folder=""),
        log=LogConfig(every=config.log.every, tensorboard=False),
    )
    short = replace(short, train=replace(short.train, global_batch_tokens=batch))
    check_run(short)
    return short


def _data(config: RunConfig) -> DataConfig:
    """Two runs of a growing data set would see two data sets: it must be finished here."""
    phases = tuple(_shared(phase, config) for phase in config.data.phases)
    patience = DataConfig().follow_minutes
    return replace(config.data, phases=phases, follow=False, follow_minutes=patience)


def _shared(phase: PhaseConfig, config: RunConfig) -> PhaseConfig:
    """A phase that begins at a step as one that begins at the same share of the steps."""
    if phase.at < 1:
        return phase
    if not config.train.steps:
        raise ConfigError(
            f"the phase at step {phase.at:g} has no place in a shorter run; give data.phases as"
            " shares of the steps."
        )
    return replace(phase, at=phase.at / config.train.steps)


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
    say(f"training {config.train.steps} steps without a stop")
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
        return [sys.executable, "-m", "foundling.cli", *words, *many]

    def finish(self, run: RunDir) -> None:
        """Train to the end; a refusal is passed on in its own words."""
        try:
            done = subprocess.run(
                self._command(run), capture_output=True, text=True, timeout=self.limit_s
            )
        except subprocess.TimeoutExpired:
            raise RunError(
                f"the self-test's training took more than {self.limit_s:g} s; give it more time."
            ) from None
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            reason = (said or ["no word"])[-1].removeprefix("foundling: ")
            raise RunError(f"the self-test could not train: {reason}")

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
                return len(read_lines(run.metrics_path)), step_of(newest) or 0
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


def _wait_for(
    run: RunDir, step: int, child: "subprocess.Popen[bytes]", limit_s: float | None
) -> None:
    """Wait until a step is written down and a checkpoint is there, or the run is over."""
    last = time.monotonic() + (limit_s or float("inf"))
    while child.poll() is None:
        if len(read_lines(run.metrics_path)) >= step and list_checkpoints(run.checkpoints):
            return
        if time.monotonic() > last:
            raise RunError(f"no step {step} within {limit_s:g} s; give it more time.")
        time.sleep(POLL_S)
