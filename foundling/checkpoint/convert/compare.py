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
    CODE,
    check_tokenizer,
    has_transformers,
    hf_logits,
    transformers_version,
)
from foundling.checkpoint.convert.source import Source
from foundling.checkpoint.convert.writing import Plan
from foundling.config import CheckpointError
from foundling.tokenizer import Tokenizer

LIMIT = 1e-4
"""Largest difference of two logits, for logits up to 1; in proportion above."""
Tell = Callable[[str], None]
FLOPS = 8e10
"""Of one reading of the text: a few seconds of a small machine."""
LONGEST, SHORTEST = 512, 32
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


def compare(plan: Plan, written: Path, result: Source, tell: Tell) -> Comparison:
    """Compare a result on the disk with its source; CheckpointError names what differs."""
    source = plan.source
    if differing := same_shape(source.model, result.model):
        raise CheckpointError(
            f"the result's config differs from the source's in model.{differing[0]}."
        )
    tokenizer = source.tokenizer()
    tokens = text_tokens(source, tokenizer)
    checked = _Checked(plan, result)
    tell(f"comparing logits of {tokens.shape[1]} tokens of text")
    if runs_in_transformers(source):
        theirs, _ = _through_transformers(source.path, source, tokens, plan.dtype)
        expected = theirs
    else:
        expected = our_logits(source.model, checked.source, tokens)
    if result.kind == "hf" and has_transformers():
        found, used = _through_transformers(written, result, tokens, None)
        _all_used(result, used)
        if tokenizer is not None and result.tokenizer_folder is not None:
            check_tokenizer(written, tokenizer, TEXT)
    else:
        found = our_logits(result.model, checked.result, tokens)
    checked.finish()
    if found.shape != expected.shape or not bool(torch.isfinite(found).all()):
        raise CheckpointError("the result's logits have another shape, or are not numbers.")
    return Comparison(
        largest=float((found - expected).abs().max()),
        scale=float(expected.abs().max()),
        tokens=tokens.shape[1],
        tensors=len(checked.seen),
        source_through=_through(runs_in_transformers(source)),
        result_through=_through(result.kind == "hf" and has_transformers()),
    )


def runs_in_transformers(source: Source) -> bool:
    """Whether a source can be run by somebody else's code; code that lies in it is never run."""
    is_known = source.kind == "hf" and not (source.path / f"{CODE}.py").is_file()
    return is_known and has_transformers()


def _through(theirs: bool) -> str:
    return f"transformers {transformers_version()}" if theirs else "foundling"


def _all_used(result: Source, used: set[str]) -> None:
    if unused := sorted(result.stored.specs.keys() - used):
        raise CheckpointError(f"the result holds {unused[0]}, which transformers does not use.")


def _through_transformers(
    folder: Path, model: Source, tokens: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, set[str]]:
    try:
        return hf_logits(folder, model.stored, tokens, dtype)
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is, transformers' users would meet it too
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"transformers cannot run {folder.name} ({what}).") from error


class _Checked:
    """Reads tensors of the source or of the result, and sees that the other has the same ones."""

    def __init__(self, plan: Plan, result: Source) -> None:
        self._plan, self._result = plan, result
        self.seen: set[str] = set()

    def source(self, name: str) -> Tensor:
        """A tensor of the source in the precision asked for."""
        return self._checked(name, 0)

    def result(self, name: str) -> Tensor:
        """A tensor of the result."""
        return self._checked(name, 1)

    def finish(self) -> None:
        """See to what no forward pass has read."""
        for name in self._plan.specs.keys() - self.seen:
            self.source(name)

    def _checked(self, name: str, which: int) -> Tensor:
        readers = (self._plan.read, self._result.read)
        if name in self.seen:
            return readers[which](name)
        self.seen.add(name)
        both = (readers[0](name), readers[1](name))
        if both[0].dtype != both[1].dtype or not same_bits(*both):
            raise CheckpointError(f"the result's {name} is not the source's.")
        return both[which]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits; a NaN equals itself."""
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))
