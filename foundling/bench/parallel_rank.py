"""One rank of `bench parallel`: read what to do from stdin, print what it took."""

import gc
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from foundling.config.resolve import load_run_config
from foundling.config.sections import ParallelConfig, RunConfig
from foundling.parallel import ALONE, make_mesh
from foundling.runtime.children import tie_to_parent
from foundling.runtime.device import Choice, prepare
from foundling.runtime.dist import barrier, joined, world_from_environment
from foundling.train.trial import Taken, Trial

WARM_UP = 2


def main() -> None:
    """The layout first, because what comes second finds a memory that was used."""
    tie_to_parent()
    asked = json.loads(sys.stdin.read())
    config = config_of(asked["config"])
    world = world_from_environment()
    choice = prepare(config.train, world.local_rank)
    with joined(world, choice.device, timeout_s=int(asked["limit_s"])):
        mesh = make_mesh(config.parallel, world, choice.device)
        barrier()
        taken = Trial(config, mesh, choice).steps(asked["steps"], warmup=WARM_UP)
        gc.collect()
        barrier()
    alone = _alone(config, choice, asked["steps"])
    print(json.dumps({**_plain(taken), "alone": _plain(alone) if alone else None}), flush=True)


def config_of(text: str) -> RunConfig:
    """A config that came as YAML."""
    with tempfile.TemporaryDirectory(prefix="foundling-bench-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text)
        return load_run_config(file)


def _alone(config: RunConfig, choice: Choice, steps: int) -> Taken | None:
    """The same micro-batch by this process for itself; None where the model does not fit."""
    single = replace(ParallelConfig(), recompute=config.parallel.recompute)
    try:
        return Trial(replace(config, parallel=single), ALONE, choice).steps(steps, warmup=WARM_UP)
    except torch.OutOfMemoryError:
        return None


def _plain(taken: Taken) -> dict[str, Any]:
    return {**asdict(taken), "memory": taken.memory}


if __name__ == "__main__":
    main()
