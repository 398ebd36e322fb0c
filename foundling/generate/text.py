"""From text to text: prompts or conversations in, answers out, and how likely texts are.

`TextEngine` is the engine with a tokenizer around it: the terminal, the server and the Python API
read its pieces of text. `TextModel` is what `foundling.load` gives.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from foundling.config.errors import CheckpointError, ConfigError
from foundling.generate.detokenize import TextStream, check_stops
from foundling.generate.engine import Engine
from foundling.generate.grammar import Grammar, compile_grammar
from foundling.generate.prepare import Weights, prepare
from foundling.generate.request import Finish, Output, Request
from foundling.generate.sampling import NOT_FINITE, Sampling, derived_seed
from foundling.model.transformer import Transformer
from foundling.runtime.console import warn
from foundling.runtime.device import missing_for_compile
from foundling.tokenizer.chat import Message
from foundling.tokenizer.tokenizer import Tokenizer

MOST_TOKENS = 2**31 - 1
"""New tokens that may be asked for: of more, the bytes of their keys are no number to torch."""


class TextPiece(NamedTuple):
    """What one step brought to one request."""

    number: int
    """Which request, as `submit` numbered it."""
    text: str
    """Text that has become certain; may be empty."""
    output: Output | None = None
    """The token behind it."""
    finish: Finish | None = None
    stop: str | None = None
    """The stop string that ended it."""
    error: str = ""


class TextEngine:
    """An engine and its tokenizer: requests in, pieces of text out."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self._streams: dict[int, TextStream] = {}

    def submit(self, request: Request, stops: Sequence[str] = ()) -> int:
        """Take a request, whose text ends before any of the `stops`; its number."""
        stream = TextStream(
            self.tokenizer, stops, prompt=request.prompt, min_tokens=request.min_tokens
        )
        number = self.engine.submit(request)
        self._streams[number] = stream
        return number

    def cancel(self, number: int) -> None:
        """Nobody wants this request any more."""
        self._streams.pop(number, None)
        self.engine.cancel(number)

    def step(self) -> list[TextPiece]:
        """One step of all requests."""
        return [piece for output in self.engine.step() if (piece := self._piece(output))]

    def stream(self, requests: Sequence[tuple[Request, Sequence[str]]]) -> Iterator[TextPiece]:
        """The pieces of these requests as they come, numbered by their place; whoever stops
        listening cancels the rest."""
        places: dict[int, int] = {}
        try:
            for place, (request, stops) in enumerate(requests):
                places[self.submit(request, stops)] = place
            with self.engine.in_use():
                while places:
                    for output in self.engine.outputs_of(places):
                        if (piece := self._piece(output)) is None:
                            continue
                        place = places[piece.number]
                        if piece.finish:
                            del places[piece.number]
                        yield TextPiece(place, *piece[1:])
        finally:
            for number in places:
                self.cancel(number)

    def _piece(self, output: Output) -> TextPiece | None:
        stream = self._streams.get(output.number)
        if stream is None:  # ended by a stop string in the same step
            return None
        text = stream.push(output.id) if output.id is not None else ""
        finish = output.finish
        if stream.stop is not None and finish is None:
            self.engine.cancel(output.number)
        if stream.stop is not None and finish != "error":
            finish = "stop"
        if finish:
            text += stream.close()
            del self._streams[output.number]
        return TextPiece(output.number, text, output, finish, stream.stop, output.error)


COMPILED_FROM = 30_000_000
"""Weights of a model whose blocks are compiled where nobody says: a smaller one has answered before
its kernels would be there, and decodes in graphs all the same."""


def open_engine(
    model: Transformer,
    *,
    weights: Weights | None = None,
    compiled: bool | None = None,
    **limits: Any,
) -> Engine:
    """An engine of its own for a model that nobody else uses, which is changed for it: weights in
    bf16 on CUDA and fp32 elsewhere unless said, blocks `compiled` on CUDA (None: where the model is
    large enough to wait for it); `limits` as of Engine."""
    device = next(model.parameters()).device
    on_cuda = device.type == "cuda"
    weights = weights or ("bf16" if on_cuda and torch.cuda.is_bf16_supported() else "fp32")
    if compiled is None:
        compiled = on_cuda and _pays_to_compile(model)
    return Engine(prepare(model, weights, compiled=compiled and on_cuda), graphs=True, **limits)


_warn_once = lru_cache(warn)


def _pays_to_compile(model: Transformer) -> bool:
    """Whether a model on CUDA is compiled, and a word to the user on what that means."""
    if sum(parameter.numel() for parameter in model.parameters()) < COMPILED_FROM:
        return False
    if lacks := missing_for_compile("cuda"):
        _warn_once(f"compiled blocks would be faster, and need {lacks}.")
        return False
    _warn_once(
        "the first answers wait until kernels are compiled: up to a minute, less the next time."
    )
    return True


@dataclass(frozen=True)
class TextScores:
    """How likely a model finds a text, token by token."""

    tokens: list[str]
    logprobs: list[float]
    """Natural logarithm of each token's probability after those before it."""
    text_bytes: int

    @property
    def nats(self) -> float:
        """The loss of the whole text."""
        return -sum(self.logprobs)

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits, by the bytes of the text."""
        return self.nats / 0.6931471805599453 / max(1, self.text_bytes)


class TextModel:
    """A trained model and its tokenizer: texts in, texts out. `foundling.load` opens one."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        context: int,
        *,
        weights: Weights | None = None,
    ) -> None:
        self._text = TextEngine(open_engine(model, weights=weights), tokenizer)
        self._tokenizer, self._context = tokenizer, context

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_tokens: int = 100,
        temperature: float = 0.8,
        stop: Sequence[str] = (),
        n: int = 1,
        **more: Any,
    ) -> list[str]:
        """What the model writes after each prompt (list of str, without the prompts); of one str a
        list of one.

        max_tokens (int): the longest continuation; temperature (float): 0 is greedy; stop (list of
        str): text that ends it; n (int): samples of each prompt, which follow each other in the
        list.
        min_tokens (int): tokens before which neither a stop token nor a stop text ends it;
        ignore_eos (bool): no stop token ends it at all.
        json_schema (dict or str), regex (str) or choice (list of str): the form of the answer,
        which is over when it is complete (extra `grammar`).
        top_k (int), top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty (float),
        logit_bias (dict) and seed (int): how tokens are picked.
        """
        if n < 1:
            raise ConfigError(f"n is {n} and must be above zero.")
        if n > 1 and not temperature:
            raise ConfigError(f"{n} samples at temperature 0 are all the same; raise temperature.")
        texts = [prompts] if isinstance(prompts, str) else prompts
        ids = [[self._tokenizer.bos_id, *self._tokenizer.encode(text)] for text in texts]
        how = self._manner(temperature, stop, more)
        return self._texts([prompt for prompt in ids for _ in range(n)], max_tokens, how)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        stop: Sequence[str] = (),
        **more: Any,
    ) -> str:
        """The assistant's next message (str) in a conversation: a list of {"role": str, "content":
        str}, or one str, which is the user's first message.

        max_tokens (int): the longest reply; None: what fits into the rows that the model was
        trained on. All else as of `generate`, but for n.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt = self._tokenizer.prompt(messages)
        most = self._room(prompt) if max_tokens is None else max_tokens
        [reply] = self._texts([prompt], most, self._manner(temperature, stop, more))
        return reply

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int = 100,
        temperature: float = 0.8,
        stop: Sequence[str] = (),
        **more: Any,
    ) -> Iterator[str]:
        """The text after a prompt (str), or the next message of a conversation (list), piece by
        piece as it comes; all else as of `generate`, but for n."""
        if isinstance(prompt, str):
            ids = [self._tokenizer.bos_id, *self._tokenizer.encode(prompt)]
        else:
            ids = self._tokenizer.prompt(prompt)
        for piece in self._pieces([ids], max_tokens, self._manner(temperature, stop, more)):
            if piece.text:
                yield piece.text

    def score(self, texts: str | Sequence[str]) -> list[TextScores]:
        """How likely each text is as the beginning of a document, token by token."""
        texts = [texts] if isinstance(texts, str) else texts
        ids = [[self._tokenizer.bos_id, *self._tokenizer.encode(text)] for text in texts]
        found: list[TextScores | None] = [None] * len(texts)
        for place, scores in self._text.engine.score(ids, [1] * len(ids)):
            tokens = [self._tokenizer.decode([id]) for id in ids[place][1:]]
            found[place] = TextScores(tokens, scores.logprobs, len(texts[place].encode()))
        return [scores for scores in found if scores is not None]

    def _room(self, prompt: Sequence[int]) -> int:
        context = min(self._context, self._text.engine.longest)
        room = context - len(prompt)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(prompt):,} tokens and the model was trained on rows of"
                f" {context:,}; leave out the oldest messages, or give max_tokens."
            )
        return room

    def _manner(self, temperature: float, stop: Sequence[str], more: dict[str, Any]) -> "_Manner":
        """What `generate` and its like take beside a length; `more` by its keywords."""
        check_stops(stop)
        named: dict[str, Any] = {
            name: more.pop(name) for name in ("min_tokens", "ignore_eos") if name in more
        }
        forms = {
            name: more.pop(name) for name in ("json_schema", "regex", "choice") if name in more
        }
        if len(forms) > 1:
            raise ConfigError(f"an answer has one form, and {' and '.join(forms)} are given.")
        for kind, form in forms.items():
            text = json.dumps(form) if isinstance(form, dict) else form
            named["grammar"] = compile_grammar(self._tokenizer, kind, text)
        return _Manner(Sampling(temperature=temperature, **more), tuple(stop), **named)

    def _pieces(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, how: "_Manner"
    ) -> Iterator[TextPiece]:
        _warn_of_length(max(map(len, prompts), default=0), self._context)
        requests = [
            (self._request(ids, max_tokens, how, number), how.stop)
            for number, ids in enumerate(prompts)
        ]
        for piece in self._text.stream(requests):
            if piece.error:
                raise (CheckpointError if piece.error == NOT_FINITE else ConfigError)(piece.error)
            yield piece

    def _texts(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, how: "_Manner"
    ) -> list[str]:
        found = [""] * len(prompts)
        for piece in self._pieces(prompts, max_tokens, how):
            found[piece.number] += piece.text
        return found

    def _request(self, ids: Sequence[int], max_tokens: int, how: "_Manner", number: int) -> Request:
        """A request that the model has room for: warned of where it stops short."""
        if max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens} and must be above zero.")
        if max_tokens > MOST_TOKENS:
            raise ConfigError(
                f"at most {MOST_TOKENS:,} new tokens can be asked for (--max-tokens)."
            )
        limit = self._text.engine.max_length
        if limit and len(ids) < limit < len(ids) + max_tokens:
            warn(f"the model ends at position {limit:,}, before {max_tokens:,} new tokens.")
            max_tokens = limit - len(ids)
        # Each prompt of a list has randomness of its own, or equal prompts would go on equally.
        return Request(
            prompt=ids,
            max_tokens=max_tokens,
            sampling=replace(how.sampling, seed=derived_seed(how.sampling.seed, number)),
            stop_ids=frozenset() if how.ignore_eos else self._tokenizer.stop_ids,
            min_tokens=how.min_tokens,
            grammar=how.grammar,
        )


class _Manner(NamedTuple):
    """How an answer is written."""

    sampling: Sampling
    stop: tuple[str, ...]
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None


def _warn_of_length(longest: int, context: int) -> None:
    """Say that a prompt is longer than the rows that the model was trained on (0: unknown)."""
    if context and longest > context:
        warn(
            f"a prompt has {longest:,} tokens and the model was trained on rows of {context:,}:"
            " beyond those it cannot be trusted."
        )
