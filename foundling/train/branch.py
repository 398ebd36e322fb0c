"""`train --from RUN@STEP`: a child that goes on where its parent stood, with changed settings.

It differs from `train.init`, which takes the weights alone and begins at step 0: here optimizer,
data position, ledger and everything written up to that step go on, as if the parent had been
trained with the child's settings from there. So the checkpoint and the lines up to its step are put
into the child's folder before it is opened, and from then on it is a run like any other. The files
of a checkpoint never change, so on one disk they are linked and take no room.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from foundling.checkpoint import (
    Folder,
    RemotePath,
    checkpoint_home,
    find_checkpoint,
    list_checkpoints,
    step_of,
)
from foundling.checkpoint import verify as verify_checkpoint
from foundling.checkpoint.seal import read_seal
from foundling.checkpoint.store import check_fit
from foundling.config.errors import CheckpointError, ConfigError, RunError
from foundling.config.resolve import differences, load_run_config
from foundling.config.sections import RunConfig
from foundling.model import empty_model
from foundling.optim import build_optimizer, ensure_state
from foundling.runtime.files import fsync_dir, write_text_atomic
from foundling.runtime.log import say
from foundling.runtime.rundir import RunDir, read_lines
from foundling.tokenizer import Tokenizer
from foundling.train.state import named_tensors

MANIFEST = "manifest.json"
KIND = "branch"
"""What run.json calls such a parent; one of train.init has no kind."""
SOFT = ("rope_", "window", "dropout", "logit_softcap", "init_std")
"""Settings of the model that a child may change: the weights mean the same without them."""
KEPT = ("optim.name", "optim.wide_embedding")
"""Settings that say what the optimizer has saved."""


def begin_branch(
    config: RunConfig, run: RunDir, tokenizer: Tokenizer, steps: int
) -> dict[str, Any]:
    """Put the parent's state into a new run's folder (rank 0) and say who the parent is.

    Cut off anywhere, it can be done again: nothing of it counts before run.json is written.
    """
    parent, checkpoint = find_checkpoint(config.train.branch)
    step = step_of(checkpoint)
    assert step is not None
    if steps <= step:
        raise ConfigError(
            f"--from {config.train.branch} stands at step {step} and the horizon is {steps} steps;"
            " give a longer one, such as --train.steps."
        )
    if Tokenizer.load(parent.tokenizer).fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"--from {config.train.branch} was trained with another tokenizer than the data; build"
            f" the data with {parent.tokenizer}."
        )
    check_shape(config, parent, checkpoint)
    copy_checkpoint(checkpoint, checkpoint_home(run.checkpoints, config.checkpoint))
    copy_lines(parent, run, step)
    say(f"branching off {parent.path} at step {step}")
    return {"path": str(parent.path), "step": step, "kind": KIND}


def check_shape(config: RunConfig, parent: RunDir, checkpoint: Folder) -> None:
    """Refuse a model that the parent's weights and moments are not of, before anything is copied.

    By settings first, because heads can be cut otherwise without any tensor changing its shape.
    """
    for change in differences(load_run_config(parent.config_path), config):
        section, _, name = change.field.partition(".")
        if section == "model" and not name.startswith(SOFT):
            raise ConfigError(
                f"--from {config.train.branch} has {change.field} {change.old} and not"
                f" {change.new}; a branch keeps its parent's shape."
            )
        if change.field in KEPT:
            raise ConfigError(
                f"--from {config.train.branch} has {change.field} {change.old} and not"
                f" {change.new}; a branch goes on with its parent's moments, so keep it, or take"
                " the weights alone with --train.init."
            )
    shapes = dict(empty_model(config.model, "meta").named_parameters())
    optimizer = build_optimizer(shapes.items(), config.optim)
    ensure_state(optimizer)
    check_fit(checkpoint, named_tensors(shapes.items(), optimizer))


def copy_checkpoint(checkpoint: Folder, home: Folder) -> Folder:
    """The same checkpoint in another run's folder, whole or not there."""
    final = home / checkpoint.name
    _refuse_others(checkpoint, home)
    if final.is_dir():
        verify_checkpoint(final)  # of an earlier try of the same command
        return final
    if isinstance(checkpoint, Path) and isinstance(home, Path):
        home.mkdir(parents=True, exist_ok=True)
        working = home / f"{checkpoint.name}.tmp-{os.getpid()}"
        shutil.rmtree(working, ignore_errors=True)
        shutil.copytree(checkpoint, working, copy_function=_link_or_copy)
        fsync_dir(working)
        os.rename(working, home / checkpoint.name)
        fsync_dir(home)
    else:
        _copy_by_bytes(checkpoint, home / checkpoint.name)
    verify_checkpoint(final)
    return final


def _refuse_others(checkpoint: Folder, home: Folder) -> None:
    """The child is no run yet, so what lies in its folder is of an earlier try; only the same
    checkpoint may be built on, to the byte, or the child would go on from other weights than its
    papers say."""
    for path in list_checkpoints(home):
        try:
            is_same = path.name == checkpoint.name and read_seal(path) == read_seal(checkpoint)
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


def copy_lines(parent: RunDir, run: RunDir, step: int) -> None:
    """Everything that is written down by step, up to that step; the events stay the parent's."""
    run.path.mkdir(parents=True, exist_ok=True)
    for path in sorted(parent.path.glob("*.jsonl")):
        if path == parent.events_path:
            continue
        kept = [line for line in read_lines(path) if line.get("step", 0) <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_text_atomic(run.path / path.name, text)
