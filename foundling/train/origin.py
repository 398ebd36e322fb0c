"""Where a run's first weights come from: a seed, another run, or a model from elsewhere."""

from dataclasses import replace
from typing import Any

from foundling.checkpoint import find_checkpoint, kind_of, load_bundle, step_of
from foundling.config.errors import ConfigError
from foundling.config.sections import RunConfig
from foundling.model import Transformer, empty_model, grow_vocabulary, init_weights
from foundling.parallel import Mesh
from foundling.runtime.device import Choice
from foundling.runtime.log import say
from foundling.runtime.rundir import RunDir
from foundling.tokenizer import Tokenizer
from foundling.train.branch import begin_branch
from foundling.train.state import TrainState, make_state

IMPORTED = "import"
"""What run.json calls a parent that is no run of ours."""


def origin(
    config: RunConfig, run: RunDir, tokenizer: Tokenizer, steps: int
) -> dict[str, Any] | None:
    """Which run this one comes from (rank 0); a new branch gets its parent's state here."""
    if run.exists:
        parent: dict[str, Any] | None = run.read_info()["parent"]
        return parent
    if config.train.branch:
        return begin_branch(config, run, tokenizer, steps)
    if not config.train.init:
        return None
    if kind_of(config.train.init) != "native":
        return {"path": config.train.init, "step": 0, "kind": IMPORTED}
    ancestor, checkpoint = find_checkpoint(config.train.init)
    return {"path": str(ancestor.path), "step": step_of(checkpoint)}


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
    model = empty_model(config.model, "meta" if born_in_parts else choice.device)
    if born_in_parts:
        return make_state(model, config, mesh, choice)
    if parent is not None:
        inherit(model, config, tokenizer, parent)
    else:
        init_weights(model, config.train.seed)
    return make_state(model, config, mesh, choice)


def inherit(
    model: Transformer, config: RunConfig, tokenizer: Tokenizer, parent: dict[str, Any]
) -> None:
    """Start from another run's weights; the shape must be the same, and so must the vocabulary but
    for special tokens that were appended to it."""
    is_foreign = parent.get("kind") == IMPORTED
    bundle = load_bundle(parent["path"] if is_foreign else f"{parent['path']}@{parent['step']}")
    before, after = bundle.config.model.vocab_size, config.model.vocab_size
    if replace(bundle.config.model, vocab_size=after) != config.model or after < before:
        raise ConfigError(
            f"train.init {config.train.init} has another model shape; give the same model settings."
        )
    if not tokenizer.grew_from(bundle.tokenizer):
        raise ConfigError(
            f"train.init {config.train.init} was trained with another tokenizer than the data;"
            f" build the data with {parent['path']}{'' if is_foreign else '/tokenizer'}."
        )
    weights = bundle.model.state_dict()
    used = bundle.tokenizer.vocab_size
    if (used, before) != (tokenizer.vocab_size, after):
        weights = grow_vocabulary(weights, used=used, size=after)
        say(f"the vocabulary grew from {used:,} tokens to {tokenizer.vocab_size:,}")
    model.load_state_dict(weights)
