"""What goes into the engine and what comes out of it: requests, outputs, completions, scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from foundling.config.errors import ConfigError
from foundling.generate.grammar import Grammar
from foundling.generate.sampling import Sampling

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and how to go on after it."""

    prompt: Sequence[int]
    max_tokens: int
    """New tokens at most."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; they are not part of it."""
    min_tokens: int = 0
    """New tokens before which no stop token is drawn."""
    logprobs: int | None = None
    """With each token its log-probability and those of the n likeliest; None: neither."""
    prompt_logprobs: int | None = None
    """The same for the prompt's own tokens, from the second on."""
    grammar: Grammar | None = None
    """What the answer has to look like."""


@dataclass(frozen=True)
class TokenScores:
    """What the model thinks of tokens after all that stands before them."""

    logprobs: list[float]
    """Natural logarithm of each one's probability."""
    likeliest: list[bool]
    """Whether each was the likeliest one."""
    top: list[dict[int, float]]
    """Of each, the likeliest tokens with their log-probabilities, where asked for."""

    @property
    def nats(self) -> float:
        """The loss of all of them."""
        return -sum(self.logprobs)

    @property
    def exact(self) -> bool:
        """Whether greedy decoding would say just this."""
        return all(self.likeliest)


class Output(NamedTuple):
    """One new token of one request, or its end."""

    number: int
    """Which request, as `submit` numbered it."""
    id: int | None = None
    """The token; None for an end without one."""
    logprob: float | None = None
    top: Mapping[int, float] | None = None
    finish: Finish | None = None
    """Why it ends here: the answer is complete, as long as it may be, or it failed."""
    stop_id: int | None = None
    """The stop token that came, which is no part of the answer."""
    error: str = ""


@dataclass(frozen=True)
class Completion:
    """What the model wrote after one prompt."""

    ids: list[int]
    """The new tokens, without the one that stopped it."""
    finish: Finish
    logprobs: list[float] = field(default_factory=list)
    """Of each token, where asked for."""
    stop_id: int | None = None
    """The stop token, if one came."""


def check_request(request: Request, vocabulary: int, limit: int) -> None:
    """Refuse what can never be answered; `limit` is the model's number of positions (0: none)."""
    length = len(request.prompt)
    if not length:
        raise ConfigError(
            "the prompt is empty, and a model needs a token to continue; begin it with the"
            " tokenizer's BOS."
        )
    if request.max_tokens < 1:
        raise ConfigError(f"max_tokens is {request.max_tokens} and must be above zero.")
    check_ids(request.prompt, vocabulary)
    for token in request.sampling.logit_bias:
        if not 0 <= token < vocabulary:
            raise ConfigError(
                f"logit_bias names token {token}, and the model has {vocabulary:,} tokens."
            )
    if limit and length >= limit:
        raise ConfigError(
            f"a prompt has {length:,} tokens and the model has {limit:,} positions, none of which"
            " is left to write at; shorten the prompt."
        )
    if limit and length + request.max_tokens > limit:
        raise ConfigError(
            f"{length:,} tokens of prompt and {request.max_tokens:,} new ones are more than the"
            f" model's {limit:,} positions; ask for {limit - length:,} or fewer."
        )


def check_ids(ids: ArrayLike, vocabulary: int, positions: int | None = None) -> None:
    """Refuse tokens that the model does not have, and texts longer than its positions."""
    ids = np.asarray(ids)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise ConfigError(
            f"token {low if low < 0 else high} is none of the model's {vocabulary:,}."
        )
    if positions and len(ids) > positions + 1:
        raise ConfigError(
            f"a text of {len(ids):,} tokens is longer than the model's {positions:,} positions."
        )
