"""Whether a result is the model that was converted: its tensors, its config, its logits on text.

Tensors are read back from what was written and must be the source's bit for bit, so that no row of
a rare token can be wrong. Logits must agree too, because a config can be wrong while every tensor
is right: 000 exported models whose positions turned otherwise than in training. A Hugging Face
folder is run by transformers where that is installed, and else by our own reader of the folder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from foundling.checkpoint.convert.forward import our_logits
from foundling.checkpoint.convert.hf_config import same_shape
from foundling.checkpoint.convert.hf_logits import (
    check_tokenizer,
    has_transformers,
    hf_logits,
    transformers_version,
)
from foundling.checkpoint.convert.source import Source
from foundling.checkpoint.convert.writing import Plan
from foundling.config import CheckpointError, UserError
from foundling.tokenizer import Tokenizer

LIMIT = 1e-4
"""Largest difference of two logits, for logits up to 1; in proportion above."""
FLOPS = 1.6e11
LONGEST, SHORTEST = 512, 48
TEXT = """The ferry left the harbour at a quarter past six, as it had done every morning since the \
bridge was swept away in the spring of 1908. Old Marta stood at the rail with her basket of eggs \
(forty-two of them, packed in straw) and counted the lamps along the quay until the fog took them. \
"You will be late for the market," said the boy beside her. "It opens at seven, and the other side \
is 3.5 miles off." She laughed. "I have been late for better things than eggs."

A crossing takes t = d / v hours: with d = 3.5 and v = 7, half an hour, if the current is kind. It \
seldom was. In June the river ran green and slow; in November it carried whole trees, and the pilot \
steered by the sound of the bell on Kestrel Rock. def crossing(distance, speed): return distance / \
speed -- the schoolmaster had written it on the wall of the waiting room, and nobody had washed it \
off, though several people had corrected his spelling elsewhere.

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
    tensors: int
    through: str

    @property
    def agrees(self) -> bool:
        """Whether they are the same function as far as fp32 can tell."""
        return self.largest <= LIMIT * max(1.0, self.scale)


def text_tokens(source: Source, tokenizer: Tokenizer | None) -> Tensor:
    """The text as tokens [1, T], fewer for larger models."""
    rows = source.model.vocab_size
    if tokenizer is None:
        ids = [byte % rows for byte in TEXT.encode()]
    else:
        ids = [id for id in (tokenizer.bos_id, *tokenizer.encode(TEXT)) if id < rows]
    size = sum(prod(spec.shape) for spec in source.specs.values())
    most = min(LONGEST, source.model.max_positions or LONGEST)
    length = max(min(SHORTEST, most), min(most, int(FLOPS / (2 * size))))
    return torch.tensor([ids[:length]])


def compare(
    plan: Plan, written: Path, open_result: Callable[[Path], Source], *, is_hf: bool
) -> Comparison:
    """Compare a result on the disk with its source; CheckpointError names what differs."""
    source = plan.source
    result = _read_back(written, open_result)
    if differing := same_shape(source.model, result.model):
        raise CheckpointError(
            f"the result's config differs from the source's in model.{differing[0]}."
        )
    tokenizer = source.tokenizer()
    tokens = text_tokens(source, tokenizer)
    checked = _Checked(plan, result)
    expected = our_logits(source.model, checked.read, tokens)
    checked.finish()
    if is_hf and has_transformers():
        through = f"transformers {transformers_version()}"
        found = _through_transformers(written, tokens)
        if tokenizer is not None and result.tokenizer_folder is not None:
            check_tokenizer(written, tokenizer, TEXT)
    else:
        through = "foundling's own reader of the result"
        found = our_logits(result.model, result.read, tokens)
    if found.shape != expected.shape or not bool(torch.isfinite(found).all()):
        raise CheckpointError("the result's logits have another shape, or are not numbers.")
    return Comparison(
        largest=float((found - expected).abs().max()),
        scale=float(expected.abs().max()),
        tokens=tokens.shape[1],
        tensors=len(checked.seen),
        through=through,
    )


def _read_back(written: Path, open_result: Callable[[Path], Source]) -> Source:
    try:
        return open_result(written)
    except UserError as error:
        raise CheckpointError(f"the result cannot be read back: {error}") from None


def _through_transformers(folder: Path, tokens: Tensor) -> Tensor:
    try:
        return hf_logits(folder, tokens)
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is, transformers' users would meet it too
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"transformers cannot run the result ({what}).") from error


class _Checked:
    """Reads the source's tensors and sees that the result has the same ones."""

    def __init__(self, plan: Plan, result: Source) -> None:
        self._plan, self._result = plan, result
        self.seen: set[str] = set()

    def read(self, name: str) -> Tensor:
        """A tensor of the source in the precision asked for."""
        expected = self._plan.read(name)
        if name not in self.seen:
            self.seen.add(name)
            found = self._result.read(name)
            if found.dtype != expected.dtype or not same_bits(found, expected):
                raise CheckpointError(f"the result's {name} is not the source's.")
        return expected

    def finish(self) -> None:
        """The forward pass must have met every parameter."""
        for name in self._plan.specs.keys() - self.seen:
            self.read(name)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits; a NaN equals itself."""
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))
