"""Answers in a given form: JSON schema, regular expression, choice; by llguidance (extra).

A grammar is compiled once against the tokenizer and begun anew for each request; at every step it
rules out the tokens that cannot go on. What is no grammar, or one that explodes, is refused in a
sentence before anything is generated.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from foundling.config.errors import ConfigError
from foundling.tokenizer.tokenizer import Tokenizer

Kind = Literal["json", "json_schema", "regex", "choice", "lark"]
LARGEST_GRAMMAR = 64 * 1024
"""Characters of a grammar."""
LEAST_INTEGERS = re.compile(r"-922337203685477[45]\d{3}\b")
"""The least integers of 64 bits: llguidance 1.9 ends the whole process on them."""
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON without free whitespace, of which a small model would write no end."""


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar: begin it for each request."""

    matcher: Any
    words: int
    """32-bit words of a mask over the tokenizer's vocabulary."""

    def begin(self) -> "GrammarState":
        """For one request."""
        return GrammarState(self.matcher.deep_copy(), self.words)


class GrammarState:
    """Where one request is in its grammar."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words = matcher, words

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""
        told = self._matcher.get_error()
        return f"the answer's form became too complex to follow ({_first(told)})." if told else ""

    def mask(self, logits: Tensor) -> None:
        """Rule out what cannot come next, in place, of logits [V]; all of it where the grammar
        cannot go on. The model may have rows that the tokenizer has no token for."""
        import llguidance.numpy

        bits = np.zeros((1, self._words), np.int32)
        if not self.error:
            llguidance.numpy.fill_next_token_bitmask(self._matcher, bits)
        allowed = np.zeros(len(logits), np.bool_)
        if not self.error:
            known = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(logits)]
            allowed[: len(known)] = known
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))

    def take(self, token: int) -> bool:
        """One token further; True where the answer is complete and nothing may follow."""
        self._matcher.consume_token(token)
        return not self.error and bool(self._matcher.is_stopped())


def compile_grammar(tokenizer: Tokenizer, kind: Kind, text: str | Sequence[str] = "") -> Grammar:
    """A grammar from a JSON schema, a regular expression, a list of choices or Lark's notation;
    "json" is any JSON object."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "answers in a given form need llguidance; install it: pip install 'foundling[grammar]'."
        ) from None
    size = len(text) if isinstance(text, str) else sum(map(len, text))
    if size > LARGEST_GRAMMAR:
        raise ConfigError(
            f"the {kind} has {size:,} characters; at most {LARGEST_GRAMMAR:,} are taken."
        )
    if isinstance(text, str) and kind != "regex" and (found := LEAST_INTEGERS.search(text)):
        raise ConfigError(f"the {kind} holds {found[0]}, which none may; use a larger number.")
    try:
        source = _source(llguidance.LLMatcher, kind, text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the {kind} is none: {_first(str(error))}.") from None
    vocabulary = _vocabulary(tokenizer)
    matcher = llguidance.LLMatcher(vocabulary, source, log_level=0)
    problem = matcher.get_error()
    if not problem:
        # The first mask is where a grammar that no answer meets, or that explodes, shows.
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        problem = trial.get_error()
    if problem:
        raise ConfigError(f"the {kind} cannot be used: {_first(problem)}.")
    return Grammar(matcher, -(-vocabulary.vocab_size // 32))


def _source(matcher: Any, kind: Kind, text: str | Sequence[str]) -> str:
    """The grammar as llguidance writes it; ValueError where it is none."""
    if kind == "choice":
        choices = [text] if isinstance(text, str) else list(text)
        if not choices or not all(choices):
            raise ValueError("there is no choice, or an empty one")
        found = matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
        return str(found)
    assert isinstance(text, str)
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "lark":
        return str(matcher.grammar_from_lark(text))
    schema = {"type": "object"} if kind == "json" else json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object")
    return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=ONE_LINE))


def _first(text: str) -> str:
    if text.startswith("NoExtension"):
        return "no answer can have this form"
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else "no reason is told"


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> Any:
    """The tokenizer as llguidance wants it, with all tokens that end an answer."""
    import llguidance

    ends = sorted(tokenizer.stop_ids)
    try:
        return llguidance.LLTokenizer(
            tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=ends
        )
    except ValueError as error:
        raise ConfigError(
            f"answers in a given form are not possible with this model's tokenizer:"
            f" {_first(str(error))}."
        ) from None
