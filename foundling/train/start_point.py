"""Where a run starts: fresh, from other weights, resumed, or as a branch; settings that may
change."""

import json
import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from foundling.checkpoint.bundle import load_bundle
from foundling.checkpoint.convert.dcp import CONVERTED
from foundling.checkpoint.convert.detect import kind_of
from foundling.checkpoint.folders import MANIFEST, list_checkpoints, step_of
from foundling.checkpoint.manager import CheckpointManager
from foundling.checkpoint.manifest import load_meta, read_manifest
from foundling.checkpoint.manifest import verify as verify_checkpoint
from foundling.checkpoint.paths import checkpoint_root, find_checkpoint
from foundling.checkpoint.reader import check_fit
from foundling.checkpoint.remote import Folder, RemotePath
from foundling.config.errors import CheckpointError, ConfigError, MissingOrDamagedError, RunError
from foundling.config.load import Change, differences, load_run_config
from foundling.config.run import RunConfig
from foundling.model.initialization import empty_model, grow_vocabulary, init_weights
from foundling.model.transformer import Transformer
from foundling.optim.optimizer import build_optimizer, ensure_state
from foundling.parallel.mesh import Mesh
from foundling.runtime.console import say
from foundling.runtime.device import DeviceChoice
from foundling.runtime.dist import on_main
from foundling.runtime.files import fsync_dir, write_text_atomic
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import read_events, step_lines
from foundling.tokenizer.tokenizer import Tokenizer
from foundling.train.state import TrainState, make_state, named_tensors


def refuse_converted(run: RunDir) -> None:
    """Refuse to resume a converted model: it has no optimizer state."""
    if run.exists and run.read_info()["status"] == CONVERTED:
        raise RunError(
            f"{run.path} is a converted model without an optimizer's state; start a new run from"
            " it with --start and another --run."
        )


def resume_checkpoint(run: RunDir, checkpoints: CheckpointManager) -> Folder | None:
    """The newest whole checkpoint; a run that has saved and has none is refused, not begun anew."""
    newest = checkpoints.latest()
    if newest is None and on_main(lambda: bool(list_checkpoints(checkpoints.folder))):
        raise MissingOrDamagedError(
            f"{run.path} has saved before and none of its checkpoints is whole now; restore one, or"
            " give another --run to begin again."
        )
    return newest


def planned_steps(run: RunDir) -> int:
    """Steps that the run was planned for when it began: other data later does not move its end, or
    the learning rate would jump."""
    return int(run.read_info()["plan"]["predicted"]["steps"])


# Whether a run may go on with the settings it is given now.
#
# A setting that changes the mathematics is refused by name; intervals, logging and layout may
# change, and the change is recorded. The data may change too: from the current step on, as a
# segment of the data order, with everything that was read before still accounted for. Rejected: a
# list of the forbidden fields, because a new field would be allowed by default.

FREE_FIELDS = (
    *("log.*", "eval.*", "checkpoint.*", "guard.*", "data.allow_repeat"),
    # How the work is laid out, and numbers kept or made again; not how they are rounded on the way.
    *("parallel.replicate", "parallel.shard", "parallel.tensor", "parallel.fsdp1"),
    *("parallel.recompute", "parallel.reshard", "parallel.offload"),
    "train.batch_size",  # the global batch is compared; how it is cut up is not the mathematics
    # How the same numbers are computed; a resume that does not name them keeps to its choice.
    *("train.device", "train.kernels.*", "train.compile", "train.threads", "train.stop_after"),
)
FIXED_FIELDS = ("checkpoint.folder",)  # elsewhere there is nothing to go on from
DATA_FIELDS = (
    "data.sources",
    "data.weights_by",
    "data.packing",
    "data.buckets",
    "data.bucket_tokens",
    "data.phases",
    "data.follow",
    "train.seq_len",
)
"""What the segments of the data order are made from."""


def allowed_changes(old: RunConfig, new: RunConfig, where: str) -> list[Change]:
    """The changes between a run's config and the one given now; refuses those that matter."""
    changes = differences(old, new)
    refused = [change for change in changes if not _may_change(change.field)]
    if refused:
        text = " and ".join(f"another {c.field} ({c.old!r}, now {c.new!r})" for c in refused)
        again = " ".join(f"--{c.field.replace('_', '-')} '{c.new}'" for c in refused)
        raise RunError(
            f"{where} cannot go on with {text}; repeat what it was, or branch: foundling train"
            f" --from {where}@STEP {again} --run NEW."
        )
    return changes


def _may_change(field: str) -> bool:
    is_free = field in DATA_FIELDS or any(fnmatchcase(field, free) for free in FREE_FIELDS)
    return is_free and field not in FIXED_FIELDS


# `train --from RUN@STEP`: a child that goes on where its parent stood, with changed settings.
#
# It differs from a start with the weights alone, which begins at step 0: here optimizer, data
# position, ledger and everything written up to that step go on, as if the parent had been trained
# with the child's settings from there. So the checkpoint and the lines up to its step are put into
# the child's folder before it is opened, and from then on it is a run like any other. The files of
# a checkpoint never change, so on one disk they are linked and take no room.

KIND = "branch"
"""The parent's kind in run.json; a parent whose weights alone are taken has none."""
CHANGEABLE_ON_BRANCH = ("rope_", "window", "dropout", "logit_softcap", "init")
"""Settings of the model that a child may change: the weights mean the same without them."""
FIXED_ON_BRANCH = ("optim.name", "optim.wide_embedding")
"""Settings on which the saved optimizer state depends."""


def begin_branch(
    config: RunConfig, run: RunDir, tokenizer: Tokenizer, steps: int
) -> dict[str, Any]:
    """Copy the parent's state into a new run's folder (rank 0); returns run.json's `parent`.

    Interrupted, it can be repeated: nothing of it counts before run.json is written.
    """
    parent, checkpoint = find_checkpoint(config.train.start)
    step = step_of(checkpoint)
    assert step is not None
    if steps <= step:
        raise ConfigError(
            f"--from {config.train.start} stands at step {step} and the horizon is {steps} steps;"
            " give a longer one with --train.horizon."
        )
    if Tokenizer.load(parent.tokenizer).fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"--from {config.train.start} was trained with another tokenizer than the data; build"
            f" the data with {parent.tokenizer}."
        )
    check_shape(config, parent, checkpoint)
    copy_checkpoint(checkpoint, checkpoint_root(run.checkpoints, config.checkpoint))
    copy_lines(parent, run, step, len(load_meta(checkpoint)["guard"]["record"]))
    say(f"branching off {parent.path} at step {step}")
    return {"path": str(parent.path), "step": step, "kind": KIND}


def check_shape(config: RunConfig, parent: RunDir, checkpoint: Folder) -> None:
    """Refuse a model that does not fit the parent's weights and moments, before anything is copied.

    By settings first, because heads can be cut otherwise without any tensor changing its shape.
    """
    for change in differences(load_run_config(parent.config_path), config):
        section, _, name = change.field.partition(".")
        if section == "model" and not name.startswith(CHANGEABLE_ON_BRANCH):
            raise ConfigError(
                f"--from {config.train.start} has {change.field} {change.old} and not"
                f" {change.new}; a branch keeps its parent's shape."
            )
        if change.field in FIXED_ON_BRANCH:
            raise ConfigError(
                f"--from {config.train.start} has {change.field} {change.old} and not"
                f" {change.new}; a branch goes on with its parent's moments, so keep it, or take"
                " the weights alone with --start."
            )
    shapes = dict(empty_model(config.model, "meta").named_parameters())
    optimizer = build_optimizer(shapes.items(), config.optim)
    ensure_state(optimizer)
    check_fit(checkpoint, named_tensors(shapes.items(), optimizer))


def copy_checkpoint(checkpoint: Folder, root: Folder) -> Folder:
    """The same checkpoint in another run's folder, whole or not there."""
    final = root / checkpoint.name
    _refuse_others(checkpoint, root)
    if final.is_dir():
        verify_checkpoint(final)  # of an earlier try of the same command
        return final
    if isinstance(checkpoint, Path) and isinstance(root, Path):
        root.mkdir(parents=True, exist_ok=True)
        working = root / f"{checkpoint.name}.tmp-{os.getpid()}"
        shutil.rmtree(working, ignore_errors=True)
        shutil.copytree(checkpoint, working, copy_function=_link_or_copy)
        fsync_dir(working)
        os.rename(working, root / checkpoint.name)
        fsync_dir(root)
    else:
        _copy_by_bytes(checkpoint, root / checkpoint.name)
    verify_checkpoint(final)
    return final


def _refuse_others(checkpoint: Folder, root: Folder) -> None:
    """The child is no run yet, so what lies in its folder is of an earlier try; only the same
    checkpoint may be built on, to the byte, or the child would go on from other weights than its
    run.json says."""
    for path in list_checkpoints(root):
        try:
            is_same = path.name == checkpoint.name and read_manifest(path) == read_manifest(
                checkpoint
            )
        except CheckpointError:
            # Torn in a store without renames: it is written again, file by file.
            is_same = path.name == checkpoint.name and not (path / MANIFEST).exists()
            if is_same and isinstance(path, RemotePath):
                path.remove_all()
                continue
        if not is_same:
            raise RunError(
                f"{path} is there already and is not {checkpoint}; delete it if it was left by an"
                " earlier try, or give another --run."
            )


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def _copy_by_bytes(source: Folder, target: Folder) -> None:
    """To or from a store without renames: the manifest last."""
    if isinstance(target, RemotePath):
        target.store.makedirs(target.path, exist_ok=True)
    else:
        target.mkdir(parents=True, exist_ok=True)
    names = [path.name for path in source.iterdir()]
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
        with (source / name).open("rb") as read, (target / name).open("wb") as write:
            shutil.copyfileobj(read, write, 1 << 24)


def copy_lines(parent: RunDir, run: RunDir, step: int, interventions: int) -> None:
    """Everything that is written down by step, up to that step: lines of steps, measurements, and
    as many of the guard's events as the checkpoint knows. Other events stay the parent's."""
    run.path.mkdir(parents=True, exist_ok=True)
    story = read_events(parent)
    measured = [m for kind in story.measured.values() for m in kind if m["step"] <= step]
    measured.sort(key=lambda line: line["step"])
    events = [*story.record[:interventions], *measured]
    timeless = [{k: v for k, v in line.items() if k != "time"} for line in events]
    steps = [line for line in step_lines(parent) if line["step"] <= step]
    for path, lines in ((run.metrics_path, steps), (run.events_path, timeless)):
        write_text_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))


# Where a run's first weights come from: a seed, another run, or a model from elsewhere.

IMPORTED = "import"
"""What run.json calls a parent that is no run of ours."""


def find_parent(
    config: RunConfig, run: RunDir, tokenizer: Tokenizer, steps: int
) -> dict[str, Any] | None:
    """Which run this one comes from (rank 0); a new branch gets its parent's state here."""
    if run.exists:
        parent: dict[str, Any] | None = run.read_info()["parent"]
        return parent
    if config.train.is_branch:
        return begin_branch(config, run, tokenizer, steps)
    if not config.train.start:
        return None
    if kind_of(config.train.start) != "native":
        return {"path": config.train.start, "step": 0, "kind": IMPORTED}
    ancestor, checkpoint = find_checkpoint(config.train.start)
    return {"path": str(ancestor.path), "step": step_of(checkpoint)}


def build_state(
    config: RunConfig,
    tokenizer: Tokenizer,
    mesh: Mesh,
    choice: DeviceChoice,
    parent: dict[str, Any] | None,
) -> TrainState:
    """The model with its first weights (the parent's, if given), wrapped, and its optimizer.

    A model of which each process holds a part is not built whole anywhere, but for a parent's."""
    use_meta_init = mesh.is_sharded and parent is None and not config.parallel.fsdp1
    model = empty_model(config.model, "meta" if use_meta_init else choice.device)
    if use_meta_init:
        return make_state(model, config.train, config.optim, config.parallel, mesh, choice)
    if parent is not None:
        load_parent_weights(model, config, tokenizer, parent)
    else:
        init_weights(model, config.train.seed)
    return make_state(model, config.train, config.optim, config.parallel, mesh, choice)


def load_parent_weights(
    model: Transformer, config: RunConfig, tokenizer: Tokenizer, parent: dict[str, Any]
) -> None:
    """Load another run's weights; the shape must be the same, and so must the vocabulary but for
    special tokens that were appended to it."""
    is_foreign = parent.get("kind") == IMPORTED
    bundle = load_bundle(parent["path"] if is_foreign else f"{parent['path']}@{parent['step']}")
    before, after = bundle.config.model.vocab_size, config.model.vocab_size
    if bundle.config.model.replace(vocab_size=after) != config.model or after < before:
        theirs = bundle.config.model.replace(vocab_size=max(before, after))
        name, ours, stored = next(
            (f, getattr(config.model, f), value)
            for f, value in theirs
            if value != getattr(config.model, f)
        )
        raise ConfigError(
            f"train.start {config.train.start} has another model shape: model.{name} is {ours} and"
            f" the weights have {stored}; leave model.{name} out."
        )
    if not tokenizer.grew_from(bundle.tokenizer):
        raise ConfigError(
            f"train.start {config.train.start} was trained with another tokenizer than the data;"
            f" build the data with {parent['path']}{'' if is_foreign else '/tokenizer'}."
        )
    weights = bundle.model.state_dict()
    used = bundle.tokenizer.vocab_size
    if (used, before) != (tokenizer.vocab_size, after):
        weights = grow_vocabulary(weights, used=used, size=after)
        say(f"the vocabulary grew from {used:,} tokens to {tokenizer.vocab_size:,}")
    model.load_state_dict(weights)
