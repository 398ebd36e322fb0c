"""A conversion: read, write under a temporary name, compare, and only then give it its name.

Killed or refused at any moment, nothing is left under the name that was asked for.
"""

import contextlib
import glob
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from foundling.checkpoint.convert.compare_models import LIMIT, Comparison, Expected, Tell, compare
from foundling.checkpoint.convert.dcp import reread_native, write_dcp, write_native
from foundling.checkpoint.convert.detect import open_dcp, open_source
from foundling.checkpoint.convert.hf import open_hf, write_hf
from foundling.checkpoint.convert.hf_config import family_of, write_json
from foundling.checkpoint.convert.meta import open_meta, to_params, write_meta
from foundling.checkpoint.convert.model_source import (
    DTYPES,
    OWN,
    SHARD_BYTES,
    ConvertPlan,
    Kind,
    LayoutResult,
    ModelSource,
    copy_tokenizer,
    sidecar_of,
)
from foundling.checkpoint.convert.torch_model import open_torch, write_torch
from foundling.checkpoint.folders import is_alive
from foundling.config.errors import CheckpointError, ConfigError, UserError
from foundling.runtime.files import fsync_dir
from foundling.runtime.run_dir import RunDir

WRITERS: dict[Kind, Callable[[Path, ConvertPlan], None]] = {
    "native": write_native,
    "hf": write_hf,
    "llama": write_meta,
    "torch": write_torch,
    "dcp": lambda folder, plan: write_dcp_folder(folder, plan),
}
READERS: dict[Kind, Callable[[Path], ModelSource]] = {
    "native": reread_native,
    "hf": open_hf,
    "llama": open_meta,
    "torch": open_torch,
    "dcp": open_dcp,
}


def convert(
    path: str | Path,
    target: Path,
    to: Kind,
    *,
    dtype: str | None = None,
    shape: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    name: str = "",
    tell: Tell = lambda text: None,
) -> tuple[ModelSource, Comparison]:
    """Write the model at `path` to `target`; CheckpointError, and nothing left, if it differs."""
    for setting, value, known in (("to", to, WRITERS), ("dtype", dtype or "fp32", DTYPES)):
        if value not in known:
            raise ConfigError(f"{setting} is {value!r}; it may be {', '.join(known)}.")
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already; give a name that is free.")

    source = open_source(path, shape)
    width = DTYPES[dtype] if dtype else None
    plan = ConvertPlan(source, width, shard_bytes, name or target.name)
    return source, _write(plan, target, to, tell)


def _write(plan: ConvertPlan, target: Path, to: Kind, tell: Tell) -> Comparison:
    """Write the result under a temporary name, compare it, and rename it."""
    source = plan.source
    checkpoints = RunDir(source.path).checkpoints.resolve()
    # A checkpoint holds its own files and nothing else: one more, and it counts as damaged.
    if source.kind == "native" and checkpoints in target.resolve().parents:
        raise CheckpointError(
            f"{target} lies among the checkpoints of the source; write elsewhere."
        )
    if to == "llama":
        to_params(source.model)  # refuses what Meta's code cannot express
    with _temporary(target, is_file=to == "torch") as working:
        try:
            began = time.perf_counter()
            expected = Expected(plan)  # first: a source that cannot be run costs no disk
            prepared_s = time.perf_counter() - began
            WRITERS[to](working, plan)
            try:
                result = READERS[to](working)
            except UserError as error:
                raise CheckpointError(f"the result cannot be read back: {error}") from None
            began = time.perf_counter()
            found = compare(plan, result, tell, expected)
            found = replace(found, seconds=prepared_s + time.perf_counter() - began)
            if working.is_dir():
                fsync_dir(working)
        except OSError as error:
            raise CheckpointError(
                f"{target} could not be written: {error.strerror or error}; nothing was left."
            ) from error
        except CheckpointError as error:
            raise CheckpointError(f"{target} was not written: {error}") from None
        if not found.agrees:
            raise CheckpointError(
                f"{target} was not written: its logits differ from the source's by up to"
                f" {found.largest:.3g} (logits reach {found.scale:.3g}, allowed is {LIMIT:g} of"
                " that)."
            )
        os.rename(working, target)
        fsync_dir(target.parent)
    return found


def write_dcp_folder(folder: Path, plan: ConvertPlan) -> None:
    """{model: ...} by torchtitan's names where that has such a model, else by ours."""
    model = plan.source.model
    is_titan = family_of(model) == "llama" and model.bias == "none"
    laid = LayoutResult(plan, "meta" if is_titan else "ours")
    names = {f"model.{name}": name for name in laid.specs}
    if model.tie_embeddings and is_titan:
        names["model.output.weight"] = "tok_embeddings.weight"
    specs = {theirs: laid.specs[name] for theirs, name in names.items()}
    write_dcp(folder, specs, lambda theirs: laid.read(names[theirs]))
    write_json(folder / OWN, sidecar_of(plan.source))
    copy_tokenizer(plan.source, folder / "tokenizer")


@contextlib.contextmanager
def _temporary(target: Path, *, is_file: bool) -> Iterator[Path]:
    """A temporary name in the target's folder, deleted afterwards unless it was renamed."""
    made = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.tmp-*"):
        writer = left.name.rpartition("-")[2]
        if writer.isdecimal() and not is_alive(int(writer)):  # a conversion that was killed
            _remove(left)
    working = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    _remove(working)
    try:
        if not is_file:
            working.mkdir()
        yield working
    finally:
        _remove(working)
        with contextlib.suppress(OSError):  # one that holds something stays, and those above it
            for folder in made:
                folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
