"""Set-up of a run: ranks, data, config, start and everything that the loop needs."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foundling.checkpoint.folders import lock_folder
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.paths import checkpoint_home
from foundling.checkpoint.reader import load_tensors
from foundling.checkpoint.remote import Folder
from foundling.config.data import every_source, mixes_of
from foundling.config.data_manifest import Manifest
from foundling.config.errors import ConfigError, LostError, RunError
from foundling.config.load import Change, load_run_config
from foundling.config.run import RunConfig, check_trainable, check_world
from foundling.data.dataset import DataSet
from foundling.parallel.mesh import Mesh, make_mesh
from foundling.plan.horizon import Horizon, Sizes, SourceSize, batch_tokens, in_steps, plan_horizon
from foundling.plan.params import count_params
from foundling.plan.supply import check_enough_data, epochs_needed
from foundling.runtime.console import say
from foundling.runtime.device import DeviceChoice, prepare
from foundling.runtime.dist import World, barrier, joined, on_main, world_from_environment
from foundling.runtime.lock import RunLock
from foundling.runtime.processes import StopSign
from foundling.runtime.run_dir import RunDir, cut_lines
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train.autotune.present_machine import autotune, report_choices
from foundling.train.dataloader import DataLoader, open_feed, wait_for_shards
from foundling.train.evaluation import NonFatal, check_tasks
from foundling.train.faults.anomaly import AnomalyGuard, open_guard, read_interventions
from foundling.train.faults.memory_leak import MemoryTrend
from foundling.train.faults.replicas import check_replicas
from foundling.train.faults.rollback import drop_abandoned
from foundling.train.faults.watchdog import Watchdog
from foundling.train.metrics import Gauge, Metrics
from foundling.train.run_metadata import Beginning, begin, peaks_of
from foundling.train.start_point import (
    allowed_changes,
    build_state,
    newest_whole,
    origin,
    planned_steps,
    record_changes,
    refuse_converted,
    refuse_finished,
)
from foundling.train.state import SMALL_MODEL, TrainState, fix_ddp_buckets
from foundling.train.token_ledger import LedgerFile, check_agreement, how_to_go_on

# Everything a run needs before its first step. A stage is data plus settings: initial weights,
# batch source, objective, schedule. There is one loop.
#
# `set_up` reads like a list: who are we, what do we eat, how long, may we continue, from which
# weights, from which checkpoint.
"""What it calls a run that holds a converted model; see checkpoint/convert/dcp.py."""


@dataclass(frozen=True)
class Trainer:
    """A run that is ready to take its next step."""

    config: RunConfig
    run: RunDir
    state: TrainState
    tokenizer: Tokenizer
    feed: DataLoader
    horizon: Horizon
    metrics: Metrics
    book: LedgerFile
    saver: CheckpointManager
    guard: AnomalyGuard
    attempts: NonFatal
    together: NonFatal
    """The same for work that all ranks share, whether or not each has the whole model."""
    trend: MemoryTrend
    stop: StopSign
    parent: dict[str, Any] | None

    @property
    def manner(self) -> dict[str, Any]:
        """How the next step is taken, as train_step's options."""
        config, step = self.config, self.state.step
        # Update ratios cost a copy of the weights: every step while that is small change.
        is_small = count_params(config.model).all < SMALL_MODEL
        return {
            "clip": config.optim.clip,
            "sources": self.feed.order.names,
            "document_mask": config.data.document_mask,
            "measure_update": is_small or (step + 1) % config.log.every == 0,
        }


@contextlib.contextmanager
def set_up(config: RunConfig, run: RunDir) -> Iterator[Trainer]:
    """Set a run up, new or half done; the lock is held until the job is closed."""
    check_trainable(config)
    if run.path.exists() and not run.path.is_dir():
        raise RunError(f"{run.path} is a file; give --run a folder.")
    run.refuse_other_files()
    refuse_converted(run)
    world = world_from_environment()
    choice = prepare(config.train, world.local_rank)
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        save_s = config.checkpoint.timeout_s
        watchdog = stack.enter_context(Watchdog(run, world, config.guard, save_s=save_s))
        stack.enter_context(joined(world, choice.device))
        mesh = make_mesh(config.parallel, world, choice.device)
        tokenizer, datasets = open_data(config, world)
        config = fill_in(config, tokenizer, mesh, choice, torch.get_num_threads())
        sizes = source_sizes(config, datasets)
        horizon = on_main(lambda: settle_horizon(config, run, mesh.data, sizes))
        if world.is_main:
            refuse_finished(run)
            stack.enter_context(RunLock(run.path))
        is_new = not run.exists
        if is_new:
            check_world(config, world.size)
            check_tasks(config.eval, datasets)
        config = settled(config, run, choice, horizon)
        changes = [] if is_new else changed_settings(config, run)
        barrier()  # every rank has looked before any writes
        if not is_new:
            on_main(lambda: check_changed(datasets))
        on_main(lambda: lock_folder(run, checkpoint_home(run.checkpoints, config.checkpoint)))
        parent = on_main(lambda: origin(config, run, tokenizer, horizon.steps))
        saver = stack.enter_context(CheckpointManager(run.checkpoints, config.checkpoint, world))
        on_main(lambda: drop_abandoned(saver.folder, read_interventions(run, None)))
        checkpoint = newest_whole(run, saver)
        meta = load_meta(checkpoint) if checkpoint else None
        record = on_main(lambda: read_interventions(run, meta))
        guard = open_guard(config.guard, record, meta)
        feed = open_feed(config, horizon.steps, run, datasets, mesh.data, meta, guard)
        state = build_state(config, tokenizer, mesh, choice, None if checkpoint else parent)
        if is_new and world.is_main:
            begin(
                run,
                Beginning(
                    config=config,
                    tokenizer=tokenizer,
                    feed=feed,
                    sizes=sizes,
                    horizon=horizon,
                    choice=choice,
                    mesh=mesh,
                    parent=parent,
                ),
            )
        elif world.is_main:
            record_changes(config, run, changes)
        fix_ddp_buckets(state, config.train.seq_len)
        take_up(state, run, checkpoint, feed, horizon)
        saver.prepare(state.tensors())
        check_replicas(state.params(), mesh, run, state.step)
        metrics = Metrics(
            run,
            config.log,
            Gauge(config.model, peaks_of(run, choice, world.size)),
            total_steps=horizon.steps,
            resumed_at=state.step,
            main=world.is_main,
        )
        stack.enter_context(metrics)
        book = stack.enter_context(LedgerFile(run, main=world.is_main))
        limit_s = config.guard.hang_s or 600
        attempts = NonFatal(run, everyone=mesh.is_sharded, limit_s=limit_s)
        trend = MemoryTrend(config.guard.memory_every, choice.device)
        if world.is_main and (told := watchdog.tell_last()):
            say(told)
        yield Trainer(
            config=config,
            run=run,
            state=state,
            tokenizer=tokenizer,
            feed=feed,
            horizon=horizon,
            metrics=metrics,
            book=book,
            saver=saver,
            guard=guard,
            attempts=attempts,
            together=NonFatal(run, everyone=True, limit_s=config.guard.hang_slow_s or 1800),
            trend=trend,
            stop=StopSign(world),
            parent=parent,
        )


def settled(config: RunConfig, run: RunDir, choice: DeviceChoice, horizon: Horizon) -> RunConfig:
    """What only this device can tell, measured on rank 0 when the run begins; a run that goes on
    keeps to what it began with."""
    before = load_run_config(run.config_path) if run.exists else None
    chosen, told = on_main(lambda: autotune(config, choice, steps=horizon.steps, before=before))
    # A run that goes on has chosen nothing anew: only warnings are news.
    report_choices(told, lambda line: None if before else say(f"{'chosen':>12}  {line}"))
    return chosen


def changed_settings(config: RunConfig, run: RunDir) -> list[Change]:
    """What is asked for now and was not when the run was last heard of; refuses what matters."""
    return allowed_changes(load_run_config(run.config_path), config, str(run.path))


def check_changed(datasets: dict[str, DataSet]) -> None:
    """Hash what has changed since it was last found whole: a run goes on with the same bytes."""
    for dataset in datasets.values():
        dataset.verify(changed_only=True)


def settle_horizon(config: RunConfig, run: RunDir, world: World, sizes: Sizes) -> Horizon:
    """How long the run is: worked out when it begins, and held to when it goes on."""
    if run.exists:
        return plan_horizon(in_steps(config, planned_steps(run)), world.size, sizes)
    horizon = plan_horizon(config, world.size, sizes)
    if not config.data.follow:
        check_enough_data(epochs_needed(horizon, sizes), config)
    return horizon


def open_data(
    config: RunConfig, world: World | None = None
) -> tuple[Tokenizer, dict[str, DataSet]]:
    """The data sets of the mixture and the one tokenizer that they were all built with."""
    if not config.data.sources:
        raise ConfigError("data.sources is empty; name a built data set, such as '{data/mine: 1}'.")
    names = every_source(config.data)
    if config.data.follow:
        wait_for_shards(names, config.data.follow_minutes, world or World())
    folder = Path(config.tokenizer.path or Path(names[0]) / "tokenizer")
    if not folder.is_dir() and not config.tokenizer.path:
        Manifest.load(Path(names[0]))  # refuses by name what is no data set at all
    tokenizer = Tokenizer.load(folder)
    datasets = {
        name: DataSet(name, tokenizer=tokenizer.fingerprint, follow=config.data.follow)
        for name in names
    }
    kinds = {dataset.manifest.kind for dataset in datasets.values()}
    if config.train.stage == "finetune" and "chat" not in kinds:
        raise ConfigError("train.stage finetune needs a data set of conversations in data.sources.")
    if config.train.stage == "pretrain" and "chat" in kinds:
        raise ConfigError("data.sources has conversations, which need train.stage finetune.")
    return tokenizer, datasets


def fill_in(
    config: RunConfig, tokenizer: Tokenizer, mesh: Mesh, choice: DeviceChoice, threads: int
) -> RunConfig:
    """Put what was chosen where the config left it open, so that the run records it and a resume
    on another machine is held to it."""
    vocab = config.model.vocab_size or tokenizer.vocab_size
    if vocab < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {vocab} and the tokenizer has {tokenizer.vocab_size} tokens;"
            " raise it or leave it at 0."
        )
    tokens = batch_tokens(config, mesh.data.size)
    return replace(
        config,
        model=replace(config.model, vocab_size=vocab),
        train=replace(
            config.train,
            global_batch_tokens=tokens,
            device=choice.device.type,  # type: ignore[arg-type]
            dtype=choice.name,
            threads=threads,
        ),
    )


def source_sizes(config: RunConfig, datasets: dict[str, DataSet]) -> list[dict[str, SourceSize]]:
    """What one epoch of each source amounts to, as each phase cuts it."""
    found = []
    for sources, cut in mixes_of(config.data, config.train.seq_len):
        sizes = {name: datasets[name].size(cut) for name in sources}
        found.append(
            {
                name: SourceSize(
                    units=size.units,
                    tokens=size.tokens,
                    documents=size.documents,
                    is_exact=datasets[name].is_complete,
                )
                for name, size in sizes.items()
            }
        )
    return found


def take_up(
    state: TrainState, run: RunDir, checkpoint: Folder | None, feed: DataLoader, horizon: Horizon
) -> None:
    """Load the checkpoint and cut everything that was written after it."""
    if checkpoint is not None:
        if not run.ledger_path.is_file():
            raise LostError(f"{run.path} has no ledger.jsonl; {how_to_go_on(run, state.step)}.")
        tensors = state.tensors()
        load_tensors(checkpoint, tensors, check=False)
        state.restore(load_meta(checkpoint), tensors)
        say(f"continuing {run.path} from step {state.step} of {horizon.steps}")
    if state.world.is_main:
        # Before anything is cut: where they disagree, somebody has to see the files as they are.
        check_agreement(state.ledger, feed.order, state.step, run, feed.skips)
        files = (run.metrics_path, run.ledger_path, run.evals_path, run.samples_path)
        for file in (*files, run.task_scores_path):
            cut_lines(file, state.step)
    barrier()
