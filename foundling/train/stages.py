"""Everything a run needs before its first step. A stage is data plus settings: initial weights,
batch source, objective, schedule. There is one loop.

`open_job` reads like a list: who are we, what do we eat, how long, may we continue, from which
weights, from which checkpoint.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foundling.checkpoint import (
    find_checkpoint,
    latest,
    list_checkpoints,
    load_bundle,
    load_meta,
    load_tensors,
    step_of,
    tensor_specs,
)
from foundling.config.checks import check_trainable
from foundling.config.errors import ConfigError, RunError
from foundling.config.resolve import dump_yaml, load_run_config
from foundling.config.sections import RunConfig
from foundling.data import DataSet, Loader, Order, open_order
from foundling.model import Transformer, init_weights
from foundling.parallel import Mesh, make_mesh
from foundling.plan import (
    Horizon,
    SourceSize,
    check_enough_data,
    count_params,
    describe,
    epochs_needed,
    flops_per_token,
    forecast,
    plan_horizon,
    rows_per_step,
)
from foundling.runtime.device import Choice, choose, set_deterministic, set_threads
from foundling.runtime.dist import World, barrier, joined, world_from_environment
from foundling.runtime.files import write_text_atomic
from foundling.runtime.lock import RunLock
from foundling.runtime.log import say
from foundling.runtime.rundir import RunDir, cut_lines, read_lines
from foundling.tokenizer import Tokenizer
from foundling.train.foresee import foreseen
from foundling.train.ledger import check_agreement
from foundling.train.metrics import MFU_DEFINITION, Gauge, Metrics
from foundling.train.probe import matmul_peak
from foundling.train.resume import allowed_changes
from foundling.train.state import SMALL_MODEL, TrainState, make_state


@dataclass(frozen=True)
class Job:
    """A run that is ready to take its next step."""

    config: RunConfig
    run: RunDir
    state: TrainState
    tokenizer: Tokenizer
    datasets: dict[str, DataSet]
    order: Order
    loader: Loader
    horizon: Horizon
    metrics: Metrics
    parent: dict[str, Any] | None

    @property
    def measures_every_step(self) -> bool:
        """Update ratios cost a copy of the weights: every step while that is small change."""
        return count_params(self.config.model).all < SMALL_MODEL


@contextlib.contextmanager
def open_job(config: RunConfig, run: RunDir) -> Iterator[Job]:
    """Set a run up, new or half done; the lock is held until the job is closed."""
    check_trainable(config)
    world = world_from_environment()
    choice = choose(config.train.device, config.train.dtype, world.local_rank)
    threads = set_threads(config.train.threads)
    set_deterministic(config.train.deterministic)
    tokenizer, datasets = open_data(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(joined(world, choice.device))
        mesh = make_mesh(config.parallel, world, choice.device)
        config = fill_in(config, tokenizer, mesh, choice, threads)
        sizes = source_sizes(config, datasets)
        horizon = plan_horizon(config, mesh.data.size, sizes)
        check_enough_data(epochs_needed(config, horizon, sizes), config)
        if world.is_main:
            refuse_finished(run)
            stack.enter_context(RunLock(run.path))
        is_new = not run.exists
        barrier()  # every rank has looked before any writes
        order = open_order(
            datasets,
            config.data.sources,
            seed=config.train.seed,
            seq_len=config.train.seq_len,
            packing=config.data.packing,
        )
        if not is_new:
            check_settings(config, run, world)
        parent = _parent_of(config) if is_new else run.read_info()["parent"]
        checkpoint = newest_whole(run)
        state = build_state(config, tokenizer, mesh, choice, None if checkpoint else parent)
        if is_new and world.is_main:
            begin(config, run, tokenizer, datasets, sizes, choice, mesh, parent)
        take_up(state, run, checkpoint, order, horizon)
        gauge = Gauge(
            flops_per_token=flops_per_token(config.model, config.train.seq_len),
            peak_flops=run.read_info()["matmul_flops"] * world.size,
        )
        metrics = stack.enter_context(
            Metrics(
                run,
                config.log,
                gauge,
                total_steps=horizon.steps,
                resumed_at=state.step,
                main=world.is_main,
            )
        )
        loader = Loader(
            datasets,
            order,
            seq_len=config.train.seq_len,
            global_batch=horizon.rows_per_step,
            micro_batch=config.train.batch_size,
            rank=mesh.data.rank,
            world=mesh.data.size,
        )
        yield Job(config, run, state, tokenizer, datasets, order, loader, horizon, metrics, parent)


def refuse_finished(run: RunDir) -> None:
    """A finished run is never overwritten."""
    if run.exists and run.read_info()["status"] == "finished":
        raise RunError(f"{run.path} is finished; give another --run to train again.")


def open_data(config: RunConfig) -> tuple[Tokenizer, dict[str, DataSet]]:
    """The data sets of the mixture and the one tokenizer that they were all built with."""
    if not config.data.sources:
        raise ConfigError("data.sources is empty; name a built data set, such as '{data/mine: 1}'.")
    first = Path(next(iter(config.data.sources)))
    tokenizer = Tokenizer.load(config.tokenizer.path or first / "tokenizer")
    datasets = {
        name: DataSet(name, tokenizer=tokenizer.fingerprint) for name in config.data.sources
    }
    kinds = {dataset.manifest.kind for dataset in datasets.values()}
    if config.train.stage == "finetune" and "chat" not in kinds:
        raise ConfigError("train.stage finetune needs a data set of conversations in data.sources.")
    if config.train.stage == "pretrain" and "chat" in kinds:
        raise ConfigError("data.sources has conversations, which need train.stage finetune.")
    return tokenizer, datasets


def fill_in(
    config: RunConfig, tokenizer: Tokenizer, mesh: Mesh, choice: Choice, threads: int
) -> RunConfig:
    """Put what was chosen where the config left it open, so that the run records it and a resume
    on another machine is held to it."""
    vocab = config.model.vocab_size or tokenizer.vocab_size
    if vocab < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {vocab} and the tokenizer has {tokenizer.vocab_size} tokens;"
            " raise it or leave it at 0."
        )
    tokens = rows_per_step(config, mesh.data.size) * config.train.seq_len
    return replace(
        config,
        model=replace(config.model, vocab_size=vocab),
        train=replace(
            config.train,
            global_batch_tokens=tokens,
            device=choice.device.type,  # type: ignore[arg-type]
            dtype="bf16" if choice.dtype == torch.bfloat16 else "fp32",
            threads=threads,
        ),
    )


def source_sizes(config: RunConfig, datasets: dict[str, DataSet]) -> dict[str, SourceSize]:
    """What one epoch of each source amounts to under this packing."""
    seq_len, packing = config.train.seq_len, config.data.packing
    return {
        name: SourceSize(
            units=dataset.units(seq_len, packing), tokens=dataset.manifest.train_tokens
        )
        for name, dataset in datasets.items()
    }


def check_settings(config: RunConfig, run: RunDir, world: World) -> None:
    """See that an old run may go on with these settings, and record what changed."""
    changes = allowed_changes(load_run_config(run.config_path), config, str(run.path))
    barrier()  # every rank has read before the main one writes
    if world.is_main:
        run.event("resumed", changes={c.field: [str(c.old), str(c.new)] for c in changes})
        write_text_atomic(run.config_path, dump_yaml(config))


def begin(
    config: RunConfig,
    run: RunDir,
    tokenizer: Tokenizer,
    datasets: dict[str, DataSet],
    sizes: dict[str, SourceSize],
    choice: Choice,
    mesh: Mesh,
    parent: dict[str, Any] | None,
) -> None:
    """Say what is planned and write a new run's papers; run.json last, it makes it a run."""
    for dataset in datasets.values():
        dataset.verify()  # once, before the first step: a flipped byte must not be trained on
    plan = forecast(config, mesh.data.size, sizes)
    assert plan.horizon is not None
    for label, text in describe(config, plan):
        say(f"{label:>12}  {text}")
    say(f"{'device':>12}  {choice.reason}")
    tokenizer.save(run.tokenizer)
    write_text_atomic(run.config_path, dump_yaml(config))
    predicted = {
        "parameters": plan.params.all,
        "steps": plan.horizon.steps,
        "tokens": plan.horizon.tokens,
        "first_loss": None if config.train.init else plan.first_loss,
        "checkpoint_bytes": plan.checkpoint_bytes,
        **foreseen(config, choice.device, mesh.world),
    }
    run.write_info(
        {
            "stage": config.train.stage,
            "status": "running",
            "parent": parent,
            "created": time.time(),
            "device": choice.reason,
            "mfu_definition": MFU_DEFINITION,
            "matmul_flops": matmul_peak(choice.device, choice.dtype),
            "plan": {"forecast": plan.to_json(), "predicted": predicted},
        }
    )
    run.event("begun", steps=plan.horizon.steps, tokens=plan.horizon.tokens)


def _parent_of(config: RunConfig) -> dict[str, Any] | None:
    if not config.train.init:
        return None
    run, checkpoint = find_checkpoint(config.train.init)
    return {"path": str(run.path), "step": step_of(checkpoint)}


def build_state(
    config: RunConfig,
    tokenizer: Tokenizer,
    mesh: Mesh,
    choice: Choice,
    parent: dict[str, Any] | None,
) -> TrainState:
    """The model with its first weights (the parent's, if given), wrapped, and its optimizer.

    A model of which each process holds a part is not built whole anywhere, but for a parent's."""
    born_in_parts = mesh.is_sharded and parent is None and not config.parallel.fsdp1
    with torch.device("meta" if born_in_parts else "cpu"):
        model = Transformer(config.model)
    if born_in_parts:
        return make_state(model, config, mesh, choice)
    if parent is not None:
        inherit(model, config, tokenizer, parent)
    else:
        init_weights(model, config.train.seed)
    model.to(choice.device)
    return make_state(model, config, mesh, choice)


def inherit(
    model: Transformer, config: RunConfig, tokenizer: Tokenizer, parent: dict[str, Any]
) -> None:
    """Start from another run's weights; shape and vocabulary must be the same."""
    bundle = load_bundle(f"{parent['path']}@{parent['step']}")
    if bundle.config.model != config.model:
        raise ConfigError(
            f"train.init {config.train.init} has another model shape; give the same model settings."
        )
    if bundle.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"train.init {config.train.init} was trained with another tokenizer than the data;"
            f" build the data with {parent['path']}/tokenizer."
        )
    model.load_state_dict(bundle.model.state_dict())


def newest_whole(run: RunDir) -> Path | None:
    """The checkpoint to continue from; a run that has saved and lost everything is not begun anew
    in silence."""
    newest = latest(run.checkpoints)
    if newest is None and list_checkpoints(run.checkpoints):
        raise RunError(
            f"{run.path} has saved before and none of its checkpoints is whole now; restore one, or"
            " give another --run to begin again."
        )
    return newest


def take_up(
    state: TrainState, run: RunDir, checkpoint: Path | None, order: Order, horizon: Horizon
) -> None:
    """Load the checkpoint and cut everything that was written after it."""
    if checkpoint is not None:
        meta = load_meta(checkpoint)
        if meta["segments"] != [segment.to_json() for segment in order.segments]:
            raise RunError(
                f"{run.path} was trained on other data than data.sources holds now;"
                " bring the old data back or give another --run."
            )
        tensors = state.tensors()
        load_tensors(checkpoint, tensors, check=False)
        state.restore(meta, tensors)
        say(f"continuing {run.path} from step {state.step} of {horizon.steps}")
    if state.world.is_main:
        for file in (run.metrics_path, run.evals_path, run.samples_path):
            cut_lines(file, lambda line: line["step"] <= state.step)
        check_agreement(
            state.ledger, state.step, horizon.rows_per_step, read_lines(run.metrics_path)
        )
    barrier()


def measured(job: Job) -> dict[str, float]:
    """What came of the predictions, from the run's own records."""
    lines = read_lines(job.run.metrics_path)
    newest = latest(job.run.checkpoints)
    assert newest is not None
    return {
        "parameters": sum(
            math.prod(spec.shape)
            for name, spec in tensor_specs(newest).items()
            if name.startswith("model.")
        ),
        "steps": job.state.step,
        "tokens": job.state.ledger.total.tokens,
        "first_loss": lines[0]["loss"] if lines else math.nan,
        "checkpoint_bytes": sum(f.stat().st_size for f in newest.rglob("*") if f.is_file()),
        "train_s": sum(line["step_s"] for line in lines),
        "step_s": statistics.median(line["step_s"] for line in lines) if lines else math.nan,
        "memory_peak": max((line["memory_peak"] for line in lines), default=0),
    }
