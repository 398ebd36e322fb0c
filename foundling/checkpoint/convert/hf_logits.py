"""Logits of a written Hugging Face folder through transformers: its config class, its model class,
its names. Nothing of ours takes part but the hooks that read the file."""

import contextlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundling.checkpoint.convert.forward import stream_weights
from foundling.checkpoint.convert.source import Stored
from foundling.config import CheckpointError
from foundling.tokenizer import CHAT_TEMPLATE, Tokenizer

CODE = "modeling_foundling"


def has_transformers() -> bool:
    """Whether transformers is installed; it is not imported for the question."""
    return importlib.util.find_spec("transformers") is not None


def transformers_version() -> str:
    """For the sentence that says through what was compared."""
    from importlib.metadata import version

    return version("transformers")


def hf_logits(
    folder: Path,
    stored: Stored,
    tokens: Tensor,
    rounded: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> tuple[Tensor, set[str]]:
    """Logits [T, V] of tokens [1, T] by transformers' own class, in fp32 from weights as
    `rounded` makes them; and the names of the tensors that it used."""
    used: set[str] = set()
    with _quiet():
        model = _empty_model(folder)
        inputs = model.get_input_embeddings()
        tied = next(name for name, part in model.named_modules() if part is inputs)
        prefix = f"{model.base_model_prefix}."

        def read(name: str) -> Tensor:
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                name = f"{tied}.weight"
            # The base model may have been saved alone, without its own name before its parts'.
            name = name if name in stored.specs else name.removeprefix(prefix)
            if name not in stored.specs:
                raise CheckpointError(f"{folder} lacks {name}, which transformers asks for.")
            used.add(name)
            return rounded(stored.read(name))

        if model.get_output_embeddings() is None:  # our own code, tied: used without a call
            inputs.weight = nn.Parameter(read(f"{tied}.weight").float(), requires_grad=False)
        stream_weights(model, read)
        with torch.inference_mode():
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0]
    return logits.float(), used


def check_tokenizer(folder: Path, ours: Tokenizer, text: str) -> None:
    """See that transformers' tokenizer of the folder makes the same ids of text and of a chat."""
    from transformers import AutoTokenizer

    with _quiet():
        try:
            theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # whatever it is, transformers' users would meet it too
            what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise CheckpointError(f"transformers cannot read the tokenizer ({what}).") from None
        found = theirs(text, add_special_tokens=False)["input_ids"]
        if list(found) != ours.encode(text):
            raise CheckpointError(f"the tokenizer in {folder} makes other ids of a text than ours.")
        if theirs.chat_template != CHAT_TEMPLATE:
            return
        chat = [{"role": "user", "content": text[:200]}]
        # As text first: releases differ in what a tokenized template is returned as.
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        found = theirs(rendered, add_special_tokens=False)["input_ids"]
    if list(found) != ours.prompt(chat):
        raise CheckpointError(f"the chat template in {folder} makes other ids than ours.")


def _empty_model(folder: Path) -> Any:
    """The class that config.json names, without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / f"{CODE}.py").is_file():
        code = _module(folder)
        config = code.FoundlingConfig.from_pretrained(folder)
        with torch.device("meta"):
            return code.FoundlingForCausalLM(config).eval()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    _make_tables(model, config)
    return model


def _module(folder: Path) -> Any:
    """The code that lies in the folder, run from there: transformers would copy it elsewhere."""
    spec = importlib.util.spec_from_file_location(CODE, folder / f"{CODE}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    kept = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # the folder is to hold the model and nothing else
    try:
        sys.modules[CODE] = module
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = kept
        del sys.modules[CODE]
    return module


def _make_tables(model: nn.Module, config: Any) -> None:
    """Buffers are computed from the config; made on the meta device they are empty."""
    for name, part in list(model.named_modules()):
        buffers = [b for _, b in part.named_buffers(recurse=False) if b.device.type == "meta"]
        if not buffers:
            continue
        parent, _, own = name.rpartition(".")
        kind: Any = type(part)
        if hasattr(part, "inv_freq"):
            setattr(model.get_submodule(parent), own, kind(config=config))
            continue
        for own_name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.dtype == torch.bool and buffer.dim() == 4:  # GPT-2's causal mask, in 4.x
                part._buffers[own_name] = torch.ones(buffer.shape, dtype=torch.bool).tril()
            else:
                part._buffers[own_name] = torch.full(buffer.shape, -1e4)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers talks about what it was not asked, and so does torchao, which it imports."""
    import transformers  # noqa: F401  # before its logger gets a level: importing it sets another

    loggers = [
        logging.getLogger(name) for name in ("transformers", "torchao", "torch.utils._pytree")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
