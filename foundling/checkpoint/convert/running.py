"""Who runs a model for the comparison of logits.

A Hugging Face folder is run by transformers' own classes where transformers is installed, and
otherwise by our model, as every other layout is. Code that lies in a source is never run; in a
result it is ours, and is.

Rejected: transformers' and Meta's forward passes written here a second time, for conversions
without transformers. They were 500 lines that every family had to be added to.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from foundling.checkpoint.convert.forward import our_logits
from foundling.checkpoint.convert.hf_config import read_json
from foundling.checkpoint.convert.hf_logits import (
    CODE,
    check_tokenizer,
    has_transformers,
    hf_logits,
    transformers_version,
)
from foundling.checkpoint.convert.hf_read import CONFIG
from foundling.checkpoint.convert.hf_unknown import unknown_key
from foundling.checkpoint.convert.source import Source
from foundling.config import CheckpointError, UserError
from foundling.tokenizer import Tokenizer

Rounded = Callable[[Tensor], Tensor]
"""What is done to each tensor that was read."""


class Runner:
    """A model on the disk and our own code that runs it."""

    name = "foundling"

    def __init__(self, source: Source) -> None:
        self._source = replace(source)  # what it remembers of its last tensor is for one reader
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


class ReadBackRunner(Runner):
    """A Hugging Face folder where transformers is not installed."""

    name = "foundling, since transformers is not installed"


class TransformersRunner(Runner):
    """A Hugging Face folder in transformers' hands."""

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


def runner_of(source: Source, *, is_ours: bool) -> Runner:
    """Who runs it; `is_ours` if all that lies there was written by us just now."""
    if source.kind != "hf":
        return Runner(source)
    if not has_transformers():
        if key := unknown_key(read_json(source.path / CONFIG)):
            raise CheckpointError(
                f"{source.path} has {key} in its config.json, which only transformers can judge;"
                " pip install 'foundling[hf]'."
            )
        return ReadBackRunner(source)
    has_code = (source.path / f"{CODE}.py").is_file()
    return TransformersRunner(source) if is_ours or not has_code else Runner(source)
