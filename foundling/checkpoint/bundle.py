"""From a path to a model that can be used: config, tokenizer and weights of a run.

Evaluation, chat and fine-tuning read the native checkpoint through this one door; 001 had to
convert by hand before it could evaluate. Only the weights are read, never the optimizer's moments.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foundling.checkpoint import folders
from foundling.checkpoint.keep import latest, latest_together, verify_together
from foundling.checkpoint.remote import Folder
from foundling.checkpoint.saver import checkpoint_home
from foundling.checkpoint.seal import read_seal, verify
from foundling.checkpoint.store import load_meta, load_tensors
from foundling.config import CheckpointError, RunConfig, RunError
from foundling.model import Transformer
from foundling.runtime import RunDir
from foundling.tokenizer import Tokenizer

MODEL_PREFIX = "model."


@dataclass(frozen=True)
class Bundle:
    """A trained model with everything needed to use it."""

    config: RunConfig
    tokenizer: Tokenizer
    model: Transformer
    step: int
    path: Folder
    meta: dict[str, Any]
    run: Path
    """The run directory, which need not hold the checkpoints."""

    @property
    def context(self) -> int:
        """Tokens of the longest rows that the weights were trained on: phases may change them."""
        segments = self.meta.get("segments", ())
        begun = [s for s in segments if s.get("first_step", 0) < max(self.step, 1)]
        return max((int(s["seq_len"]) for s in begun), default=self.config.train.seq_len)


def load_bundle(
    path: str | Path, device: str | torch.device = "cpu", *, together: bool = False
) -> Bundle:
    """The model at RUN, RUN@STEP or RUN/checkpoints/step-N, in evaluation mode on `device`.

    `together` is for the ranks of a job, which all call it: see `find_checkpoint`.
    """
    run, checkpoint = find_checkpoint(path, together=together)
    config = _run_config(run)
    tokenizer = Tokenizer.load(run.tokenizer)
    model = Transformer(config.model).to(device)
    weights = {MODEL_PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    load_tensors(checkpoint, weights, prefix=MODEL_PREFIX, check=False)
    return Bundle(
        config=config,
        tokenizer=tokenizer,
        model=model.eval(),
        step=read_seal(checkpoint).step,
        path=checkpoint,
        meta=load_meta(checkpoint),
        run=run.path,
    )


def find_checkpoint(path: str | Path, *, together: bool = False) -> tuple[RunDir, Folder]:
    """The run and the verified checkpoint that RUN, RUN@STEP or RUN/checkpoints/step-N means.

    With `together` every rank of the job calls it, and each hashes its part of the files.
    """
    check = verify_together if together else verify
    place = Path(path)
    at_step = re.fullmatch(r"(.+)@(\d+)", str(path))
    if at_step and not place.exists():
        run = RunDir(at_step[1]).require()
        chosen = checkpoint_of_step(home_of(run), int(at_step[2]))
        check(chosen)
        return run, chosen
    if not place.exists():
        raise RunError(f"{path} does not exist; give a run directory or RUN@STEP.")
    if folders.step_of(place) is not None and place.resolve().parent.name == "checkpoints":
        run = RunDir(place.resolve().parent.parent).require()
        check(place)
        return run, place
    run = RunDir(place).require()
    home = home_of(run)
    newest = latest_together(home) if together else latest(home)
    if newest is None:
        raise CheckpointError(f"{path} has no whole checkpoint yet; train it first.")
    return run, newest


def home_of(run: RunDir) -> Folder:
    """Where a run keeps its checkpoints."""
    if not run.config_path.is_file():
        return run.checkpoints
    return checkpoint_home(run.checkpoints, _run_config(run).checkpoint)


def checkpoint_of_step(home: Folder, step: int) -> Folder:
    """The checkpoint of a step, as it is; the steps there are where it is not."""
    present = folders.list_checkpoints(home)
    for path in present:
        if folders.step_of(path) == step:
            return path
    steps = ", ".join(str(folders.step_of(path)) for path in present) or "none"
    raise CheckpointError(f"{home} has no checkpoint of step {step}; there are: {steps}.")


def _run_config(run: RunDir) -> RunConfig:
    # Needs jsonargparse, which training processes that never load a bundle should not pay for.
    from foundling.config.resolve import load_run_config

    return load_run_config(run.config_path)
