"""Whether a result is the model that was converted: its tensors, its config, its logits on text.

Tensors are read back from what was written and must be the source's bit for bit, so that no row of
a rare token can be wrong. Logits must agree too, because a config can be wrong while every tensor
is right: 000 exported models whose positions turned otherwise than in training. running.py says who
runs what.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from foundling.checkpoint.convert.hf_config import same_shape
from foundling.checkpoint.convert.running import runner_of
from foundling.checkpoint.convert.source import Source, check_finite
from foundling.checkpoint.convert.writing import Plan
from foundling.config import CheckpointError
from foundling.tokenizer import Tokenizer

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

    @property
    def agrees(self) -> bool:
        """Whether they are the same function as far as fp32 can tell."""
        return self.largest <= LIMIT * max(1.0, self.scale)


def text_tokens(source: Source, tokenizer: Tokenizer | None) -> Tensor:
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

    def __init__(self, plan: Plan) -> None:
        runner = runner_of(plan.source, is_ours=False)
        self.through = runner.name
        self.tokenizer = plan.source.tokenizer()
        self.tokens = text_tokens(plan.source, self.tokenizer)

        def rounded(tensor: Tensor) -> Tensor:
            return tensor if plan.dtype is None else tensor.to(plan.dtype)

        self.logits = runner.logits(rounded, self.tokens)


def compare(plan: Plan, result: Source, tell: Tell, expected: Expected) -> Comparison:
    """Compare a result on the disk with its source; CheckpointError names what differs."""
    source = plan.source
    if differing := same_shape(source.model, result.model):
        raise CheckpointError(
            f"the result's config differs from the source's in model.{differing[0]}."
        )
    tell(f"comparing logits of {expected.tokens.shape[1]} tokens of text")
    same_tensors(plan, result)
    runner = runner_of(result, is_ours=True)
    wanted, found = expected.logits, runner.logits(lambda tensor: tensor, expected.tokens)
    runner.all_used()
    if expected.tokenizer is not None:
        runner.same_tokenizer(expected.tokenizer, TEXT)
    if found.shape != wanted.shape or not bool(torch.isfinite(found).all()):
        raise CheckpointError("the result's logits have another shape, or are not numbers.")
    return Comparison(
        largest=float((found - wanted).abs().max()),
        scale=float(wanted.abs().max()),
        tokens=expected.tokens.shape[1],
        tensors=len(plan.specs),
        source_through=expected.through,
        result_through=runner.name,
    )


def same_tensors(plan: Plan, result: Source) -> None:
    """Read every tensor of the result from its files and compare it with the source's, which is
    read anew: what the writers were given may be what is wrong."""
    source = replace(plan.source)
    for name in plan.specs:
        one, other = source.read(name), result.read(name)
        check_finite(source.path, source.places[name].name, one)
        one = one if plan.dtype is None else _narrowed(one, plan.dtype, name)
        if one.dtype != other.dtype or not same_bits(one, other):
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
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    # As bytes, and of these eight at once where they lie so: nothing is made fp32.
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    whole = left.numel() // 8 * 8
    if left.storage_offset() % 8 or right.storage_offset() % 8:
        return torch.equal(left, right)
    eights = (side[:whole].view(torch.int64) for side in (left, right))
    return torch.equal(*eights) and torch.equal(left[whole:], right[whole:])
