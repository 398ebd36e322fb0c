"""Comparison of a converted model with its source: tensors, config, and logits."""

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundling.checkpoint.convert.hf import CONFIG, REMOTE_CODE
from foundling.checkpoint.convert.hf_config import read_json, same_shape, unknown_key
from foundling.checkpoint.convert.model_source import (
    ConvertPlan,
    ModelSource,
    StoredTensors,
    check_finite,
)
from foundling.config.errors import CheckpointError, UserError
from foundling.config.model import ModelConfig
from foundling.model.initialization import empty_model
from foundling.model.layers import Embedding
from foundling.model.loss import cap
from foundling.tokenizer.chat import CHAT_TEMPLATE
from foundling.tokenizer.tokenizer import Tokenizer

# Logits of a Hugging Face folder through transformers: its config class, model class and names.
# Nothing of ours takes part but the hooks that read the file.


def has_transformers() -> bool:
    """Whether transformers is installed; it is not imported for the question."""
    return importlib.util.find_spec("transformers") is not None


def hf_logits(
    folder: Path,
    stored: StoredTensors,
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

    if (folder / REMOTE_CODE).is_file():
        from foundling.checkpoint.convert import modeling_foundling

        code: Any = modeling_foundling
        if (folder / REMOTE_CODE).read_bytes() != Path(code.__file__).read_bytes():
            raise CheckpointError(f"{REMOTE_CODE} in {folder} is not as it was written.")
        config = code.FoundlingConfig.from_pretrained(folder)
        with _without_weights():
            return code.FoundlingForCausalLM(config).eval()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    auto: Any = AutoModelForCausalLM
    with _without_weights():
        return auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Modules made in it have parameters on the meta device, and buffers, which follow from the
    config, as they are."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        empty = value if value is None else nn.Parameter(value.to("meta"), requires_grad=False)
        plain(module, name, empty)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of transformers, and of what it imports."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# Who runs a model for the comparison of logits.
#
# A Hugging Face folder is run by transformers' own classes where transformers is installed, and
# otherwise by our model, as every other layout is. Code that lies in a source is never run; in a
# result it is ours, and is.

Rounded = Callable[[Tensor], Tensor]
"""What is done to each tensor that was read."""


def run_model(
    source: ModelSource, tokens: Tensor, rounded: Rounded = lambda tensor: tensor, *, is_ours: bool
) -> tuple[Tensor, str]:
    """Logits [T, V] of tokens [1, T], and whose code computed them. `is_ours` if all that lies
    there was written by us just now: its code is run, and none of its tensors may be left aside."""
    through = "foundling"
    if source.kind == "hf":
        if not has_transformers():
            if key := unknown_key(read_json(source.path / CONFIG)):
                raise CheckpointError(
                    f"{source.path} has {key} in its config.json, which only transformers can"
                    " judge; pip install 'foundling[hf]'."
                )
            through = "foundling, since transformers is not installed"
        elif is_ours or not (source.path / REMOTE_CODE).is_file():
            # With its version, since releases differ.
            through = f"transformers {version('transformers')}"
            return _by_transformers(source, tokens, rounded, through, is_ours), through
    return our_logits(source.model, lambda name: rounded(source.read(name)), tokens), through


def _by_transformers(
    source: ModelSource, tokens: Tensor, rounded: Rounded, through: str, is_ours: bool
) -> Tensor:
    try:
        found, used = hf_logits(source.path, source.stored, tokens, rounded)
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is, transformers' users would meet it too
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"transformers cannot run {source.path.name} ({what}).") from error
    if is_ours and (unused := source.stored.specs.keys() - used):
        raise CheckpointError(f"the result holds {min(unused)}, unused by {through}.")
    return found


def same_tokenizer(result: ModelSource, expected: Tokenizer, text: str) -> None:
    """See that the tokenizer, as it was written, makes the same ids of a text and of a chat."""
    try:
        found = result.tokenizer()
    except UserError as error:
        raise CheckpointError(f"its tokenizer cannot be read: {error}") from None
    if found is None:
        raise CheckpointError("its tokenizer is missing.")
    if found.encode(text) != expected.encode(text):
        raise CheckpointError("its tokenizer makes other ids of a text than the source's.")
    if _chat_ids(found, text) != _chat_ids(expected, text):
        raise CheckpointError("its chat template makes other ids than the source's.")
    if result.kind == "hf" and has_transformers():
        check_tokenizer(result.path, expected, text)


def _chat_ids(tokenizer: Tokenizer, text: str) -> list[int] | str:
    """A conversation's ids, or why its template refuses it: the two must agree in that, too."""
    try:
        return tokenizer.prompt([{"role": "user", "content": text[:200]}])
    except UserError as error:
        return str(error)


# Logits of a model whose weights stay on the disk: each is read when its module runs.
#
# A module without weights (on torch's meta device) is given hooks that read a parameter before it
# is used and drop it after. So two models can be compared in the memory of one matrix, and
# transformers' own classes run this way as ours do.

Read = Callable[[str], Tensor]
BLOCK = 1 << 20
"""Numbers of a matrix that are made fp32 at once: they stay in the processor's cache."""


def our_logits(model: ModelConfig, read: Read, tokens: Tensor) -> Tensor:
    """Logits [T, V] of tokens [1, T], in fp32; every parameter is read once."""
    empty = empty_model(model, "meta").eval()
    head = "embed.weight" if model.tie_embeddings else "head.weight"
    with torch.inference_mode():
        stream_weights(empty, read)
        hidden = empty.hidden(tokens)[0]
        logits = _product(hidden, read(head))
    return cap(logits, model.logit_softcap) if model.logit_softcap else logits


def stream_weights(module: nn.Module, read: Read) -> None:
    """Let every part of a module read its own parameters when it runs."""
    for name, part in module.named_modules():
        mine = part.named_parameters(recurse=False)
        own = [own_name for own_name, value in mine if value.device.type == "meta"]
        if not own:
            continue
        prefix = f"{name}." if name else ""
        wide: Any = part
        if type(part) in (nn.Embedding, Embedding):
            wide.forward = partial(_look_up, part, read, prefix)
        elif type(part) is nn.Linear:
            wide.forward = partial(_multiply, read, prefix, part.bias is not None)
        else:
            part.register_forward_pre_hook(partial(_load, read, prefix, own))
            part.register_forward_hook(partial(_drop, own))


def _look_up(part: nn.Embedding, read: Read, prefix: str, ids: Tensor, *_: Any) -> Tensor:
    return F.embedding(ids, read(f"{prefix}weight")).float()


def _multiply(read: Read, prefix: str, has_bias: bool, x: Tensor) -> Tensor:
    product = _product(x, read(f"{prefix}weight"))
    return product + read(f"{prefix}bias").float() if has_bias else product


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in fp32, some rows of the weight at a time: a whole table of embeddings in fp32
    would be twice a shard in bf16."""
    rows = max(1, BLOCK // weight.shape[1])
    parts = (weight[start : start + rows] for start in range(0, len(weight), rows))
    return torch.cat([x @ part.float().T for part in parts], -1)


def _load(read: Read, prefix: str, own: list[str], part: nn.Module, _: Any) -> None:
    for name in own:
        wide = read(prefix + name).float()
        part._parameters[name] = nn.Parameter(wide, requires_grad=False)


def _drop(own: list[str], part: nn.Module, *_: Any) -> None:
    for name in own:
        old = part._parameters[name]
        assert old is not None
        empty = torch.empty(old.shape, device="meta")
        part._parameters[name] = nn.Parameter(empty, requires_grad=False)


# Whether a result is the model that was converted: its tensors, its config, its logits on text.
#
# Tensors are read back from what was written and must be the source's bit for bit, so that no row
# of a rare token can be wrong. Logits must agree too, because a config can be wrong while every
# tensor is right: a tutorial exported models with another rotary embedding than in training.

LIMIT = 1e-4
"""Largest difference of two logits, for logits up to 1; in proportion above."""
Tell = Callable[[str], None]
FLOPS = 4e10
"""Of one reading of the text: a few seconds of a small machine."""
LONGEST, SHORTEST = 512, 16
TEXT = """The ferry left the harbour at a quarter past six, as it had done every morning since \
the bridge was swept away in the spring of 1908. Old Marta stood at the rail with her basket of \
eggs (forty-two of them, packed in straw) and counted the lamps along the quay until the fog took \
them. "You will be late for the market," said the boy beside her. "It opens at seven, and the \
other side is 3.5 miles off." She laughed. "I have been late for better things than eggs."

A crossing takes t = d / v hours: with d = 3.5 and v = 7, half an hour, if the current is kind. \
It seldom was. In June the river ran green and slow; in November it carried whole trees, and the \
pilot steered by the sound of the bell on Kestrel Rock. def crossing(distance, speed): return \
distance / speed -- the schoolmaster had written it on the wall of the waiting room, and nobody \
had washed it off, though several people had corrected his spelling elsewhere.

At the landing they weighed the eggs, the wool and the letters. Forty-two, said the clerk; forty, \
said Marta, who had given two away on the boat. He wrote down forty. Outside, the first sunlight \
reached the roofs, the fog rose, and one could see how short the way had been all along."""


@dataclass(frozen=True)
class Comparison:
    """How a result compares with its source."""

    largest: float
    """Largest difference between two logits."""
    scale: float
    """Largest logit."""
    tokens: int
    """Of the text that was read."""
    tensors: int
    """That were compared bit for bit."""
    source_through: str
    result_through: str
    """Whose code ran the source and the result."""
    seconds: float = 0.0
    """What running the source and comparing took, the imports of that code with it."""

    @property
    def agrees(self) -> bool:
        """Whether they are the same function as far as fp32 can tell."""
        return self.largest <= LIMIT * max(1.0, self.scale)


def text_tokens(source: ModelSource, tokenizer: Tokenizer | None) -> Tensor:
    """The text as tokens [1, T], fewer for larger models."""
    rows = source.model.vocab_size
    ids: list[int] = []
    if tokenizer is not None:
        ids = [id for id in (tokenizer.bos_id, *tokenizer.encode(TEXT)) if id < rows]
    if len(ids) < SHORTEST:  # no tokenizer, or one of another model: too few would show nothing
        ids = [byte % rows for byte in TEXT.encode()]
    size = sum(prod(spec.shape) for spec in source.specs.values())
    most = min(LONGEST, source.model.max_positions or LONGEST)
    length = max(min(SHORTEST, most), min(most, int(FLOPS / (2 * size))))
    return torch.tensor([ids[:length]])


class Expected:
    """The source's logits, from tensors that are read from itself and not as writers are given."""

    def __init__(self, plan: ConvertPlan) -> None:
        self.tokenizer = plan.source.tokenizer()
        self.tokens = text_tokens(plan.source, self.tokenizer)

        def rounded(tensor: Tensor) -> Tensor:
            return tensor if plan.dtype is None else tensor.to(plan.dtype)

        self.logits, self.through = run_model(plan.source, self.tokens, rounded, is_ours=False)


def compare(plan: ConvertPlan, result: ModelSource, tell: Tell, expected: Expected) -> Comparison:
    """Compare a result on the disk with its source; CheckpointError names what differs."""
    if differing := same_shape(plan.source.model, result.model):
        raise CheckpointError(
            f"the result's config differs from the source's in model.{differing[0]}."
        )
    tell(f"comparing logits of {expected.tokens.shape[1]} tokens of text")
    same_tensors(plan, result)
    found, through = run_model(result, expected.tokens, is_ours=True)
    if expected.tokenizer is not None:
        same_tokenizer(result, expected.tokenizer, TEXT)
    wanted = expected.logits
    if found.shape != wanted.shape or not bool(torch.isfinite(found).all()):
        raise CheckpointError("the result's logits have another shape, or are not numbers.")
    return Comparison(
        largest=float((found - wanted).abs().max()),
        scale=float(wanted.abs().max()),
        tokens=expected.tokens.shape[1],
        tensors=len(plan.specs),
        source_through=expected.through,
        result_through=through,
    )


def same_tensors(plan: ConvertPlan, result: ModelSource) -> None:
    """Read every tensor of the result from its files and compare it with the source's, which is
    read anew: what the writers were given may be what is wrong."""
    source = plan.source
    for name in plan.specs:
        one, other = source.read(name), result.read(name)
        check_finite(source.path, source.places[name].name, one)
        one = one if plan.dtype is None else _narrowed(one, plan.dtype, name)
        if not same_bits(one, other):
            raise CheckpointError(f"the result's {name} is not the source's.")


def _narrowed(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """In another precision, which must have room for every number."""
    found = tensor.to(dtype)
    if dtype == torch.float16 and bool((found.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(
            f"{name} has numbers up to {float(tensor.abs().max()):.3g}, and fp16 ends at 65504; use"
            " --dtype bf16."
        )
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits; a NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))
