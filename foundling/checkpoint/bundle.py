"""From a path to a usable model: config, tokenizer and weights, in any layout.

Evaluation, chat and fine-tuning read every source through this one door, without conversion; 001
had to convert by hand before it could evaluate. Only the weights are read, never the optimizer's
moments. Weights come in the precision they are stored in and are held in fp32.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foundling.checkpoint.convert.dcp import DcpTensors, open_native
from foundling.checkpoint.convert.detect import kind_of, open_source
from foundling.checkpoint.convert.model_source import check_finite
from foundling.checkpoint.paths import run_of
from foundling.checkpoint.remote import Folder
from foundling.config.errors import CheckpointError
from foundling.config.model import ModelConfig
from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.model.initialization import empty_model, grow_vocabulary
from foundling.model.transformer import Transformer
from foundling.runtime.console import say
from foundling.runtime.run_dir import RunDir
from foundling.tokenizer.chat_template import ForeignTokenizer
from foundling.tokenizer.tokenizer import Tokenizer


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
    """The run directory, which need not hold the checkpoints; a foreign model's own path."""
    is_chat: bool = False
    """Whether it was trained on conversations, here or (it brings a template) elsewhere."""

    @property
    def context(self) -> int:
        """Tokens of the longest rows that the weights were trained on: phases may change them."""
        segments = self.meta.get("segments", ())
        begun = [s for s in segments if s.get("first_step", 0) < max(self.step, 1)]
        return max((int(s["seq_len"]) for s in begun), default=self.config.train.seq_len)


def load_bundle(
    path: str | Path, device: str | torch.device = "cpu", *, together: bool = False
) -> Bundle:
    """The model at RUN, RUN@STEP, RUN/checkpoints/step-N, or of a Hugging Face, Meta or DCP folder
    or a torch.save file; in evaluation mode on `device`.

    `together` is for the ranks of a job, which all call it: each hashes a part of the files.
    """
    from foundling.config.load import load_run_config

    is_native = kind_of(path) == "native"
    source = open_native(path, together=together) if is_native else open_source(path)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        folder = RunDir(source.path).tokenizer if is_native else source.path
        raise CheckpointError(
            f"{source.path} has no tokenizer; put its tokenizer.json into {folder} to use it."
        )
    model = empty_model(source.model).to(device)
    with torch.no_grad():
        weights = model.state_dict()
        if is_native:
            assert isinstance(source.stored, DcpTensors)
            source.stored.fill({source.places[name].name: weights[name] for name in weights})
        for name, parameter in weights.items():
            if not is_native:
                parameter.copy_(source.read(name))
            check_finite(source.path, source.places[name].name, parameter)
    for note in source.notes:
        say(note)
    config = RunConfig(model=source.model, train=TrainConfig(seq_len=source.context))
    if is_native:
        config = load_run_config(RunDir(source.path).config_path)
    config, model = _grown(config, model, tokenizer)
    return Bundle(
        config=config,
        tokenizer=tokenizer,
        model=model.to(device).eval(),
        step=source.step,
        path=source.checkpoint or source.path,
        meta=source.meta,
        run=source.path,
        is_chat=source.is_chat or isinstance(tokenizer, ForeignTokenizer),
    )


def _grown(
    config: RunConfig, model: Transformer, tokenizer: Tokenizer
) -> tuple[RunConfig, Transformer]:
    """Rows for the chat's special tokens, where the tokenizer is another family's and had none."""
    rows = config.model.vocab_size
    if tokenizer.vocab_size <= rows:
        return config, model
    shape = config.model.replace(vocab_size=tokenizer.vocab_size)
    larger = empty_model(shape)
    weights = grow_vocabulary(model.state_dict(), used=rows, size=shape.vocab_size)
    larger.load_state_dict(weights)
    return config.replace(model=shape), larger


def model_of(path: str | Path) -> ModelConfig:
    """The shape of a run that starts from these weights: of the source, with rows for the chat's
    special tokens. No weights are read."""
    from foundling.config.load import load_run_config

    if kind_of(path) == "native":
        run = run_of(path)
        model, folder = load_run_config(run.config_path).model, run.tokenizer
    else:
        source = open_source(path)
        model, folder = source.model, source.tokenizer_folder or source.path
    rows = max(model.vocab_size, Tokenizer.load(folder).vocab_size)
    return model.replace(vocab_size=rows)
