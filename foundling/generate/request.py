"""What goes into the engine and comes out of it: requests, outputs, completions, scores."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foundling.config.errors import ConfigError
from foundling.generate.grammar import Grammar, GrammarState
from foundling.generate.sampling import Sampling
from foundling.generate.scheduler import ScheduledSequence

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
    """New tokens before which no stop token is drawn; a form that is complete ends it earlier."""
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
    scores: TokenScores | None = None
    """With the end of a text that was only scored."""


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


@dataclass(eq=False)
class LiveRequest:
    """A request on its way."""

    request: Request
    sequence: ScheduledSequence
    generated: int = 0
    grammar: GrammarState | None = None
    targets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens whose probability is wanted, the first of them at `sequence.judged_from`."""
    scores: TokenScores = field(default_factory=lambda: TokenScores([], [], []))
    """What was judged so far, in order."""
    top: int = 0
    scores_only: bool = False
    can_draw_in_graph: bool = False
    """Whether temperature and seed say all about its tokens."""


class JudgedPart(NamedTuple):
    """Targets of a request that a step has come to."""

    live: LiveRequest
    first: int
    end: int


def check_request(request: Request, vocabulary: int, limit: int) -> Request:
    """Refuse what can never be answered; `limit` is the model's number of positions (0: none).
    The request, without stop tokens that the model does not have: settings from elsewhere name
    such."""
    length = len(request.prompt)
    if not length:
        raise ConfigError(
            "the prompt is empty, and a model needs a token to continue; begin it with the"
            " tokenizer's BOS."
        )
    if request.max_tokens < 1:
        raise ConfigError(f"max_tokens is {request.max_tokens} and must be above zero.")
    for name in ("logprobs", "prompt_logprobs", "min_tokens"):
        if (getattr(request, name) or 0) < 0:
            raise ConfigError(f"{name} is {getattr(request, name)} and must be 0 or more.")
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
    known = frozenset(token for token in request.stop_ids if 0 <= token < vocabulary)
    return request if known == request.stop_ids else replace(request, stop_ids=known)


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


def in_groups(texts: Sequence[NDArray[np.int64]], starts: Sequence[int]) -> Iterator[list[int]]:
    """Places of texts that have something to judge, equal ones together; those that go on from one
    context follow each other and share its keys and values."""
    contexts: dict[bytes, dict[tuple[bytes, int], list[int]]] = {}
    for place, (text, start) in enumerate(zip(texts, starts, strict=True)):
        if start < len(text):
            copies = contexts.setdefault(text[:start].tobytes(), {})
            copies.setdefault((text.tobytes(), start), []).append(place)
    # Long ones first: what does not fit shows at once, and neighbours are of like length.
    groups = [
        sorted(copies.values(), key=lambda places: -len(texts[places[0]]))
        for copies in contexts.values()
    ]
    groups.sort(key=lambda group: -len(texts[group[0][0]]))
    for group in groups:
        yield from group
