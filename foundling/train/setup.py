"""Set-up of a run: ranks, data, config, start and everything that the loop needs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.checkpoint.folders import lock_folder, step_of
from foundling.checkpoint.manager import TIMEOUT_S, CheckpointManager
from foundling.checkpoint.manifest import load_meta
from foundling.checkpoint.paths import checkpoint_root
from foundling.checkpoint.reader import load_tensors
from foundling.checkpoint.remote import Folder
from foundling.config.data import phase_mixtures
from foundling.config.data_manifest import Manifest
from foundling.config.errors import MissingOrDamagedError
from foundling.config.load import Change, dump_yaml, load_run_config
from foundling.config.run import RunConfig, check_world
from foundling.data.dataset import DataSet
from foundling.optim.schedule import lr_at
from foundling.parallel.mesh import Mesh, make_mesh
from foundling.plan.forecast import forecast, predict_run, seconds_by_part
from foundling.plan.horizon import Horizon, Sizes, SourceSize
from foundling.plan.params import count_params
from foundling.plan.resolve import check_folder, problems, require_sources, resolve_here
from foundling.plan.summary import describe
from foundling.plan.workload import SMALL_MODEL
from foundling.runtime.console import say, warn
from foundling.runtime.device import DeviceChoice, prepare_device
from foundling.runtime.dist import World, barrier, on_main, process_group, world_from_environment
from foundling.runtime.files import DISK_FULL, write_text_atomic
from foundling.runtime.lock import RunLock
from foundling.runtime.processes import StopAgreement, defer_signals
from foundling.runtime.progress import PROGRESS, WAITING, process_age
from foundling.runtime.run_dir import RunDir, cut_lines
from foundling.runtime.versions import own_versions
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train.autotune.harness import matmul_peak, sheet_peak
from foundling.train.autotune.present_machine import PresentMachine, report_choices
from foundling.train.dataloader import (
    DataLoader,
    data_order_json,
    data_settings,
    open_loader,
    wait_for_shards,
)
from foundling.train.evaluation import Evaluation, NonFatal, check_tasks
from foundling.train.faults.anomaly import AnomalyGuard, open_guard, read_interventions
from foundling.train.faults.memory_leak import MemoryTrend
from foundling.train.faults.replicas import check_replicas
from foundling.train.faults.rollback import drop_abandoned_checkpoints
from foundling.train.faults.watchdog import Watchdog, slow_limit_s
from foundling.train.metrics import FlopRates, Metrics
from foundling.train.oom import mark_oom_after_success
from foundling.train.run_metadata import MFU_DEFINITION, PlanComparison, known_device, peaks_of
from foundling.train.saves import RunSaver
from foundling.train.start_point import (
    allowed_changes,
    build_state,
    find_parent,
    planned_steps,
    refuse_converted,
    resume_checkpoint,
)
from foundling.train.state import TrainState, fix_ddp_buckets
from foundling.train.step import StepOptions
from foundling.train.token_ledger import check_agreement, remedy_for_lost_lines

# Everything a run needs before its first step, in five phases: where it computes (Placement), what
# it reads (Corpus), what it trains and how long (RunSpec), where it stands (StartPoint), and the
# parts that the loop calls (Trainer).


@dataclass(frozen=True)
class Placement:
    """The device of this process, and its mesh of ranks."""

    world: World
    mesh: Mesh
    device: DeviceChoice


@dataclass(frozen=True)
class Corpus:
    """The data sets of the mixture and the one tokenizer that they were all built with."""

    tokenizer: Tokenizer
    datasets: dict[str, DataSet]


@dataclass(frozen=True)
class RunSpec:
    """What is trained: every setting has its value, and the length is known."""

    config: RunConfig
    run: RunDir
    horizon: Horizon
    sizes: Sizes
    is_new: bool
    changes: list[Change]
    """Settings that are not what the run was last trained with."""
    choices: Sequence[str]
    """What was chosen by measurement, each with its reason."""


@dataclass(frozen=True)
class StartPoint:
    """Where the run stands before its next step."""

    manager: CheckpointManager
    checkpoint: Folder | None
    meta: dict[str, Any] | None
    parent: dict[str, Any] | None
    """The run or model that a new one comes from."""


@dataclass(frozen=True)
class Trainer:
    """A run that is ready to take its next step."""

    spec: RunSpec
    state: TrainState
    loader: DataLoader
    saver: RunSaver
    guard: AnomalyGuard
    metrics: Metrics
    evaluation: Evaluation
    stop: StopAgreement

    def step_options(self) -> StepOptions:
        """The options of the next step: rate, clipping, what is measured."""
        config, step = self.spec.config, self.state.step
        # Update ratios cost a copy of the weights: every step while that is small change.
        is_small = count_params(config.model).all < SMALL_MODEL
        return StepOptions(
            lr=lr_at(step, self.spec.horizon.steps, config.optim),
            clip=config.optim.clip,
            sources=self.loader.order.names,
            document_mask=config.data.document_mask,
            measure_update=is_small or (step + 1) % config.log.every == 0,
        )

    def save_and_wait(self) -> bool:
        """Save and wait for shards where a followed build is used up; whether any came."""
        step = self.state.step
        if step >= self.loader.end:
            return False
        self.saver.save(self.state)
        with PROGRESS.during(WAITING):
            return self.loader.wait(step, self.stop.agreed)


@contextlib.contextmanager
def set_up(config: RunConfig, run: RunDir) -> Iterator[Trainer]:
    """Set a run up, new or half done; its lock is held and its files are open until the end."""
    refuse_converted(run)
    for problem in problems(config, run=run.path, with_data=False):
        raise problem
    world = world_from_environment()
    device = prepare_device(config.train, world.local_rank)
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        watchdog = stack.enter_context(Watchdog(run, world, config.guard, save_s=TIMEOUT_S))
        stack.enter_context(process_group(world, device.device))
        placement = Placement(world, make_mesh(config.parallel, world, device.device), device)
        corpus = open_data(config, world)
        spec = resolve_run(config, run, placement, corpus, stack)
        start = find_start(spec, placement, corpus, stack)
        trainer = build_trainer(spec, placement, corpus, start, stack)
        if world.is_main and (sentence := watchdog.report_previous_death()):
            say(sentence)
        defer_signals()
        trainer.metrics.add_seconds("start_s", process_age())
        with mark_system_errors_restartable(trainer):
            yield trainer


def resolve_run(
    config: RunConfig,
    run: RunDir,
    placement: Placement,
    corpus: Corpus,
    stack: contextlib.ExitStack,
) -> RunSpec:
    """Give every setting its value and lock the run's folder; what depends on this device is
    measured under the lock."""
    world, is_new = placement.world, not run.exists
    before = None if is_new else load_run_config(run.config_path)
    if is_new:
        check_world(config, world.size)
        check_tasks(config.eval, corpus.datasets)
    machine = PresentMachine(placement.device, before)
    sizes = source_sizes(config, corpus.datasets)
    resolved = on_main(
        lambda: resolve_here(
            config,
            machine,
            vocab_size=corpus.tokenizer.vocab_size,
            data_ranks=placement.mesh.data.size,
            sizes=sizes,
            steps=planned_steps(run) if before else 0,
        )
    )
    if world.is_main:
        check_folder(run.path)  # again: another process may have finished it since
        stack.enter_context(RunLock(run.path))
    found = on_main(lambda: resolved.measured_on(machine))
    # A run that goes on has chosen nothing anew: only warnings are news.
    report_choices(found.reasons, lambda line: None if before else say(f"{'chosen':>12}  {line}"))
    # Raises where a setting changed that a resume may not change.
    changes = allowed_changes(before, found.config, str(run.path)) if before else []
    barrier()  # every rank has looked before any writes
    return RunSpec(found.config, run, found.horizon, sizes, is_new, changes, found.reasons)


def find_start(
    spec: RunSpec, placement: Placement, corpus: Corpus, stack: contextlib.ExitStack
) -> StartPoint:
    """The newest whole checkpoint, or where the first weights come from."""
    config, run, world = spec.config, spec.run, placement.world
    if not spec.is_new:
        on_main(lambda: _verify_datasets(corpus.datasets, changed_only=True))
    on_main(lambda: lock_folder(run, checkpoint_root(run.checkpoints, config.checkpoint)))
    parent = on_main(lambda: find_parent(config, run, corpus.tokenizer, spec.horizon.steps))
    manager = stack.enter_context(CheckpointManager(run.checkpoints, config.checkpoint, world))
    on_main(lambda: drop_abandoned_checkpoints(manager.folder, read_interventions(run, None)))
    checkpoint = resume_checkpoint(run, manager)
    meta = load_meta(checkpoint) if checkpoint else None
    return StartPoint(manager, checkpoint, meta, parent)


def build_trainer(
    spec: RunSpec,
    placement: Placement,
    corpus: Corpus,
    start: StartPoint,
    stack: contextlib.ExitStack,
) -> Trainer:
    """Everything that the loop needs, and the files that say what is trained."""
    config, run, horizon = spec.config, spec.run, spec.horizon
    world, mesh, device, meta = placement.world, placement.mesh, placement.device, start.meta
    tokenizer, datasets = corpus.tokenizer, corpus.datasets
    interventions = on_main(lambda: read_interventions(run, meta))
    trend = MemoryTrend(device.device)
    guard = open_guard(config.guard, interventions, meta, run=run, trend=trend)
    loader = open_loader(
        config.data, config.train, horizon.steps, run, datasets, mesh.data, meta, guard
    )
    weights_of = None if start.checkpoint else start.parent
    state = build_state(config, tokenizer, mesh, device, weights_of)
    is_chat = on_main(lambda: has_chat_data(run, corpus, start.parent))
    if spec.is_new and world.is_main:
        write_new_run(spec, placement, tokenizer, loader, start.parent, is_chat)
    elif world.is_main:
        write_text_atomic(run.config_path, dump_yaml(config))
        if is_chat and not run.read_info().get("chat"):
            run.update_info(chat=True)
    fix_ddp_buckets(state, config.train.seq_len)
    restore(state, spec, start.checkpoint, loader)
    start.manager.prepare(state.tensors())
    check_replicas(state.params(), mesh, run, state.step)
    metrics = Metrics(
        run,
        config.log,
        FlopRates(config.model, peaks_of(run, device, world.size)),
        PlanComparison(run, _seconds_of(spec, placement)),
        total_steps=horizon.steps,
        resumed_at=state.step,
        main=world.is_main,
    )
    stack.enter_context(metrics)
    stop = StopAgreement(world)
    limit_s, slow_s = config.guard.hang_s or 600, slow_limit_s(config.guard)
    evaluation = Evaluation(
        settings=config.eval,
        train=config.train,
        data=config.data,
        run=run,
        is_chat=is_chat,
        last_step=horizon.steps,
        tokenizer=tokenizer,
        loader=loader,
        guard=guard,
        checkpoints=start.manager,
        metrics=metrics,
        stop=stop,
        nonfatal=NonFatal(run, collective=mesh.is_sharded, limit_s=limit_s),
        nonfatal_on_all_ranks=NonFatal(run, collective=True, limit_s=slow_s),
    )
    saver = RunSaver(
        manager=start.manager,
        settings=config.checkpoint,
        run=run,
        last_step=horizon.steps,
        loader=loader,
        guard=guard,
        metrics=metrics,
        evaluation=evaluation,
        parent=start.parent,
        config=config.model_dump(),
    )
    return Trainer(spec, state, loader, saver, guard, metrics, evaluation, stop)


def has_chat_data(run: RunDir, corpus: Corpus, parent: dict[str, Any] | None) -> bool:
    """Whether a source of the run or of its parent holds conversations (rank 0)."""
    if any(dataset.manifest.kind == "chat" for dataset in corpus.datasets.values()):
        return True
    homes = [run, *([RunDir(parent["path"])] if parent else [])]
    return any(home.exists and bool(home.read_info().get("chat")) for home in homes)


def write_new_run(
    spec: RunSpec,
    placement: Placement,
    tokenizer: Tokenizer,
    loader: DataLoader,
    parent: dict[str, Any] | None,
    is_chat: bool,
) -> None:
    """Say what is planned and write the metadata of a new run; run.json last, it makes it a run."""
    run, config, horizon = spec.run, spec.config, spec.horizon
    mesh, choice = placement.mesh, placement.device
    _verify_datasets(loader.datasets)  # once: a flipped byte must not be trained on
    plan = forecast(config, mesh.data.size, spec.sizes, horizon)
    for label, text in describe(config, plan):
        warn(text) if label == "warning" else say(f"{label:>12}  {text}")
    if is_chat and parent is None:
        warn(
            "data.sources has conversations and the weights are fresh: who has not read learns"
            " little from them; name weights with --start."
        )
    say(f"{'device':>12}  {choice.reason}")
    sheet, kind = sheet_peak(choice), choice.device.type
    tokenizer.save(run.tokenizer)
    write_text_atomic(run.config_path, dump_yaml(config))
    settings = data_settings(config.data, config.train)
    predicted = {
        "parameters": plan.params.all,
        "steps": horizon.steps,
        "tokens": horizon.tokens,
        "first_loss": None if parent else plan.first_loss,
        "checkpoint_bytes": plan.checkpoint_bytes,
        **predict_run(config, kind, known_device(choice.device), mesh.world.size, horizon),
    }
    run.durable_event("begun", steps=horizon.steps, tokens=horizon.tokens)
    run.write_info(
        {
            "chat": is_chat,
            "status": "running",
            "parent": parent,
            "created": time.time(),
            "versions": own_versions(),
            "device": choice.reason,
            "mfu_definition": MFU_DEFINITION,
            "matmul_flops": matmul_peak(choice.device, choice.dtype),
            **({"sheet_flops": sheet[0], "sheet": sheet[1]} if sheet else {}),
            "choices": list(spec.choices),
            "data": data_order_json(settings, loader.order.segments),
            "plan": {"forecast": plan.to_json(), "predicted": predicted},
        }
    )


def _seconds_of(spec: RunSpec, placement: Placement) -> Callable[[float], dict[str, float]]:
    """Returns seconds of each part of the run as a function of a step's."""
    device, ranks = placement.device.device, placement.world.size
    phases = len(spec.horizon.phases)
    return lambda step_s: seconds_by_part(
        spec.config, device.type, known_device(device), ranks, spec.horizon, [step_s] * phases
    )


class DiskFailedError(RuntimeError):
    """A file failed a run that had begun: no mistake of the user's, and a restart may cure it."""


@contextlib.contextmanager
def mark_system_errors_restartable(trainer: Trainer) -> Iterator[None]:
    """Raise system errors as crashes, after which the launcher starts again (but not a full disk,
    which would be as full again); so is memory that runs out once steps have fitted, here or before
    a resume: another process may have taken it."""
    resumed = trainer.state.step > 0
    try:
        with mark_oom_after_success(lambda: resumed or trainer.metrics.has_steps):
            yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise DiskFailedError(f"{type(error).__name__}: {error}") from error


def _verify_datasets(datasets: dict[str, DataSet], *, changed_only: bool = False) -> None:
    """Hash the shards; those alone that have changed since they were last found whole."""
    for dataset in datasets.values():
        dataset.verify(changed_only=changed_only)


def open_data(config: RunConfig, world: World | None = None) -> Corpus:
    """The data sets that data.sources and data.phases name, and their tokenizer."""
    names = require_sources(config)
    if config.data.follow:
        wait_for_shards(names, config.data.follow, world or World())
    folder = Path(config.data.tokenizer or Path(names[0]) / "tokenizer")
    if not folder.is_dir() and not config.data.tokenizer:
        Manifest.load(Path(names[0]))  # refuses by name what is no data set at all
    tokenizer = Tokenizer.load(folder)
    datasets = {
        name: DataSet(name, tokenizer=tokenizer.fingerprint, follow=bool(config.data.follow))
        for name in names
    }
    return Corpus(tokenizer, datasets)


def source_sizes(config: RunConfig, datasets: dict[str, DataSet]) -> list[dict[str, SourceSize]]:
    """The size of one epoch of each source, in each phase's packing."""
    found = []
    for sources, spec in phase_mixtures(config.data, config.train.seq_len):
        sizes = {name: datasets[name].size(spec) for name in sources}
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


def restore(
    state: TrainState, spec: RunSpec, checkpoint: Folder | None, loader: DataLoader
) -> None:
    """Load the checkpoint and cut everything that was written after it."""
    run = spec.run
    if checkpoint is not None:
        if not run.metrics_path.is_file():
            remedy = remedy_for_lost_lines(run, step_of(checkpoint) or 0)
            raise MissingOrDamagedError(f"{run.path} has no metrics.jsonl; {remedy}.")
        tensors = state.tensors()
        load_tensors(checkpoint, tensors, check=False)
        state.restore(load_meta(checkpoint), tensors)
        say(f"continuing {run.path} from step {state.step} of {spec.horizon.steps}")
    if state.world.is_main:
        # Before anything is cut: where they disagree, the user needs the files as they are.
        check_agreement(state.ledger, loader.order, state.step, run, loader.skips)
        if not spec.is_new:  # what was measured above this step is forgotten from here on
            changed = {c.field: [str(c.old), str(c.new)] for c in spec.changes}
            run.durable_event("resumed", step=state.step, changes=changed)
        cut_lines(run.metrics_path, state.step)
    barrier()
