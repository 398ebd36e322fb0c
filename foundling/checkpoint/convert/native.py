"""Our own runs and checkpoints as a source, and a run directory with one checkpoint as a result.

A result has the weights and the papers that are needed to use them, and no optimizer's moments: it
can be evaluated, talked to and started from (`train --init`), and is not a run to be continued.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from foundling.checkpoint import folders
from foundling.checkpoint.bundle_paths import MODEL_PREFIX, find_checkpoint, run_config
from foundling.checkpoint.convert.dcp_layout import DcpTensors, write_dcp
from foundling.checkpoint.convert.source import Source, find_places, tokenizer_folder
from foundling.checkpoint.convert.writing import Plan, copy_tokenizer
from foundling.checkpoint.seal import (
    META,
    Seal,
    load_meta,
    read_seal,
    write_durably,
    write_seal,
)
from foundling.config import CheckpointError, RunConfig, TrainConfig
from foundling.runtime import RunDir
from foundling.runtime.files import write_text_atomic

CONVERTED = "converted"
"""The status of a run that was never trained here."""


def open_native(path: str | Path, *, hashed: bool = True) -> Source:
    """The model of RUN, RUN@STEP or RUN/checkpoints/step-N, its files verified; with `hashed` off
    only their names and sizes."""
    run, checkpoint = find_checkpoint(path, hashed=hashed)
    if not isinstance(checkpoint, Path):
        raise CheckpointError(
            f"{checkpoint} is not on this machine; fetch the checkpoint first and convert that."
        )
    config = run_config(run)
    stored = DcpTensors(checkpoint, foreign=False)
    positions, generation = _origin(run)
    return Source(
        kind="native",
        path=run.path,
        model=config.model,
        stored=stored,
        places=find_places(checkpoint, config.model, stored, "ours", MODEL_PREFIX),
        tokenizer_folder=tokenizer_folder(run.tokenizer),
        step=read_seal(checkpoint).step,
        run=config,
        positions=positions,
        generation=generation,
        meta=load_meta(checkpoint),
    )


def _origin(run: RunDir) -> tuple[int, dict[str, Any]]:
    """Longest context and settings of generation of a model that came from elsewhere."""
    origin = run.read_info().get("origin", {})
    if isinstance(origin, dict):
        positions, generation = origin.get("positions", 0), origin.get("generation", {})
        if isinstance(positions, int) and isinstance(generation, dict):
            return positions, generation
    raise CheckpointError(
        f"{run.path} has a damaged run.json: its origin is not as it was written."
    )


def reread_native(folder: Path) -> Source:
    """What was just written; every tensor is about to be compared, so none is hashed again."""
    return open_native(folder, hashed=False)


def write_native(folder: Path, plan: Plan) -> None:
    """A run directory; run.json last, it makes it a run."""
    from foundling.config.resolve import dump_yaml

    source, run = plan.source, RunDir(folder)
    step = folders.final_path(run.checkpoints, source.step)
    step.mkdir(parents=True)
    specs = {MODEL_PREFIX + name: spec for name, spec in plan.specs.items()}

    def read(name: str) -> Tensor:
        return plan.read(name.removeprefix(MODEL_PREFIX))

    written = write_dcp(step, specs, read)
    meta = {key: source.meta[key] for key in ("segments",) if key in source.meta}
    content = json.dumps({"step": source.step, **meta}, indent=2) + "\n"
    seals = {**written, META: write_durably(step / META, content.encode())}
    write_seal(step, Seal(source.step, seals))
    copy_tokenizer(source, run.tokenizer)
    config = source.run or foreign_config(source)
    # Wherever the source keeps its checkpoints: the result's lies in the result.
    config = replace(config, checkpoint=replace(config.checkpoint, folder=""))
    write_text_atomic(run.config_path, dump_yaml(config))
    run.write_info(_info(source, config))


def foreign_config(source: Source) -> RunConfig:
    """A run config around a model that no run of ours made."""
    return RunConfig(model=source.model, train=TrainConfig(seq_len=source.context))


def _info(source: Source, config: RunConfig) -> dict[str, Any]:
    is_ours = source.kind == "native"
    origin = {
        "kind": source.kind,
        "path": str(source.path),
        "positions": source.positions,
        "generation": source.generation,
    }
    return {
        "stage": config.train.stage,
        "status": CONVERTED,
        "parent": {"path": str(source.path), "step": source.step} if is_ours else None,
        "created": time.time(),
        "origin": origin,
        "plan": {},
    }
