"""Who runs a model for the comparison: the code whose opinion counts for its layout.

    Hugging Face   their formulas on their config and their names (hf_formulas.py); by transformers'
                   own classes when that is asked for, and for families and keys that are not
                   written there
    Meta's         Meta's formulas on the stored tensors (meta_logits.py)
    others         our model

Code that lies in a source is never run; in a result it is ours, and is.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from foundling.checkpoint.convert.forward import our_logits
from foundling.checkpoint.convert.hf_formulas import (
    beyond,
    formula_logits,
    has_formulas,
    is_written,
)
from foundling.checkpoint.convert.hf_logits import (
    CODE,
    check_tokenizer,
    has_transformers,
    hf_logits,
    start_import,
    transformers_version,
)
from foundling.checkpoint.convert.meta_logits import is_meta, meta_logits
from foundling.checkpoint.convert.source import Source
from foundling.config import CheckpointError, UserError
from foundling.tokenizer import Tokenizer

Rounded = Callable[[Tensor], Tensor]
"""What is done to each tensor that was read."""


class Runner:
    """A model on the disk and our own code that runs it."""

    name = "foundling"

    def __init__(self, source: Source) -> None:
        self._source = replace(source)  # what it remembers of its last tensor is for one thread
        self._used: set[str] | None = None

    def logits(self, rounded: Rounded, tokens: Tensor) -> Tensor:
        """Logits [T, V] of tokens [1, T]."""
        read = self._source.read
        return our_logits(self._source.model, lambda name: rounded(read(name)), tokens)

    def all_used(self) -> None:
        """See that no stored tensor was left aside."""
        unused = self._source.stored.specs.keys() - self._used if self._used is not None else ()
        if unused:
            raise CheckpointError(f"the result holds {min(unused)}, unused by {self.name}.")

    def same_tokenizer(self, expected: Tokenizer, text: str) -> None:
        """See that the tokenizer, as it was written, makes the same ids of a text and of a chat."""
        try:
            found = self._source.tokenizer()
        except UserError as error:
            raise CheckpointError(f"its tokenizer cannot be read: {error}") from None
        if found is None:
            raise CheckpointError("its tokenizer is missing.")
        if found.encode(text) != expected.encode(text):
            raise CheckpointError("its tokenizer makes other ids of a text than the source's.")
        if _chat_ids(found, text) != _chat_ids(expected, text):
            raise CheckpointError("its chat template makes other ids than the source's.")


def _chat_ids(tokenizer: Tokenizer, text: str) -> list[int] | str:
    """A conversation's ids, or why its template refuses it: the two must agree in that, too."""
    try:
        return tokenizer.prompt([{"role": "user", "content": text[:200]}])
    except UserError as error:
        return str(error)


class MetaRunner(Runner):
    """Tensors that lie as Meta's."""

    name = "foundling by Meta's formulas"

    def logits(self, rounded: Rounded, tokens: Tensor) -> Tensor:
        """By Meta's formulas."""
        return meta_logits(self._source, rounded, tokens)


class FormulaRunner(Runner):
    """A Hugging Face folder of a family that is written here."""

    name = "Hugging Face's formulas"

    def logits(self, rounded: Rounded, tokens: Tensor) -> Tensor:
        """By the formulas of its class."""
        source = self._source
        found, self._used = formula_logits(source.path, source.stored, rounded, tokens)
        return found


class TransformersRunner(Runner):
    """A Hugging Face folder in somebody else's hands."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        start_import()

    @property
    def name(self) -> str:  # type: ignore[override]
        """With its version, since releases differ."""
        return f"transformers {transformers_version()}"

    def logits(self, rounded: Rounded, tokens: Tensor) -> Tensor:
        """By transformers' own class."""
        folder = self._source.path
        try:
            found, self._used = hf_logits(folder, self._source.stored, tokens, rounded)
        except CheckpointError:
            raise
        except Exception as error:  # whatever it is, transformers' users would meet it too
            what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CheckpointError(f"transformers cannot run {folder.name} ({what}).") from error
        return found

    def same_tokenizer(self, expected: Tokenizer, text: str) -> None:
        """By transformers' own tokenizer, too."""
        super().same_tokenizer(expected, text)
        check_tokenizer(self._source.path, expected, text)


def runner_of(source: Source, through_transformers: bool, *, is_ours: bool) -> Runner:
    """Who runs it; `is_ours` if all that lies there was written by us just now."""
    if needs_transformers(source, through_transformers, is_ours=is_ours):
        return TransformersRunner(source)
    if has_formulas(source):
        return FormulaRunner(source)
    if source.kind == "hf" and is_written(source):
        raise CheckpointError(
            f"{source.path} has {beyond(source)} in its config.json, which only transformers can"
            " judge; pip install 'foundling[hf]'."
        )
    return MetaRunner(source) if is_meta(source) else Runner(source)


def needs_transformers(source: Source, is_asked: bool, *, is_ours: bool) -> bool:
    """Whether transformers takes part: it is asked for, or nobody else knows the family or all of
    its keys."""
    if source.kind != "hf" or not has_transformers():
        return False
    may_run = is_ours or not (source.path / f"{CODE}.py").is_file()
    return may_run and (is_asked or not has_formulas(source))
