"""From text to text: prompts or conversations in, answers out, and how likely texts are.

`TextEngine` is the engine with a tokenizer around it: the terminal, the server and the Python API
read its pieces of text. `TextModel` is what `foundling.load` gives.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from foundling.config.errors import ConfigError
from foundling.generate.detokenize import TextStream, check_stops
from foundling.generate.engine import Engine
from foundling.generate.prepare import Weights, prepare
from foundling.generate.request import Finish, Output, Request
from foundling.generate.sampling import Sampling, derived_seed
from foundling.model.transformer import Transformer
from foundling.runtime.console import warn
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
        stream = TextStream(self.tokenizer, stops)
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
                    for piece in self.step():
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


def open_engine(
    model: Transformer, *, weights: Weights | None = None, compiled: bool = False, **limits: Any
) -> Engine:
    """An engine of its own for a model that nobody else uses, which is changed for it: weights in
    bf16 on CUDA and fp32 elsewhere unless said; `limits` as of Engine."""
    device = next(model.parameters()).device
    on_cuda = device.type == "cuda"
    weights = weights or ("bf16" if on_cuda and torch.cuda.is_bf16_supported() else "fp32")
    return Engine(prepare(model, weights, compiled=compiled and on_cuda), graphs=True, **limits)


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
        **sampling: Any,
    ) -> list[str]:
        """What the model writes after each prompt (list of str, without the prompts); of one str a
        list of one.

        max_tokens (int): the longest continuation; temperature (float): 0 is greedy; stop (list of
        str): text that ends it; `sampling`: top_k (int), top_p, min_p, repetition_penalty,
        presence_penalty, frequency_penalty (float), logit_bias (dict) and seed (int).
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        ids = [[self._tokenizer.bos_id, *self._tokenizer.encode(text)] for text in texts]
        how = Sampling(temperature=temperature, **sampling)
        return _texts(self._text, ids, max_tokens, how, stop, self._context)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> str:
        """The assistant's next message (str) in a conversation: a list of {"role": str, "content":
        str}, or one str, which is the user's first message.

        max_tokens (int): the longest reply; None: what fits into the rows that the model was
        trained on. temperature, stop and `sampling` as of `generate`.
        """
        prompt = self._tokenizer.prompt(_messages(messages))
        most = self._room(prompt) if max_tokens is None else max_tokens
        how = Sampling(temperature=temperature, **sampling)
        [reply] = _texts(self._text, [prompt], most, how, stop, self._context)
        return reply

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int = 100,
        temperature: float = 0.8,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Iterator[str]:
        """The text after a prompt (str), or the next message of a conversation (list), piece by
        piece as it comes; all else as of `generate`."""
        if isinstance(prompt, str):
            ids = [self._tokenizer.bos_id, *self._tokenizer.encode(prompt)]
        else:
            ids = self._tokenizer.prompt(prompt)
        _warn_of_length(len(ids), self._context)
        how = Sampling(temperature=temperature, **sampling)
        request = _request(self._text, ids, max_tokens, how)
        for piece in self._text.stream([(request, stop)]):
            if piece.error:
                raise ConfigError(piece.error)
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
        room = self._context - len(prompt)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(prompt):,} tokens and the model was trained on rows of"
                f" {self._context:,}; leave out the oldest messages, or give max_tokens."
            )
        return room


def _messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _texts(
    text: TextEngine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[str],
    context: int,
) -> list[str]:
    check_stops(stop)
    _warn_of_length(max(map(len, prompts), default=0), context)
    requests = [
        (_request(text, ids, max_tokens, sampling, number), stop)
        for number, ids in enumerate(prompts)
    ]
    found = [""] * len(requests)
    for piece in text.stream(requests):
        if piece.error:
            raise ConfigError(piece.error)
        found[piece.number] += piece.text
    return found


def _warn_of_length(longest: int, context: int) -> None:
    """Say that a prompt is longer than the rows that the model was trained on (0: unknown)."""
    if context and longest > context:
        warn(
            f"a prompt has {longest:,} tokens and the model was trained on rows of {context:,}:"
            " beyond those it cannot be trusted."
        )


def _request(
    text: TextEngine, ids: Sequence[int], max_tokens: int, sampling: Sampling, number: int = 0
) -> Request:
    """A request that the model has room for: warned of where it stops short."""
    if max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens} and must be above zero.")
    if max_tokens > MOST_TOKENS:
        raise ConfigError(f"at most {MOST_TOKENS:,} new tokens can be asked for (--max-tokens).")
    limit = text.engine.max_length
    if limit and len(ids) < limit < len(ids) + max_tokens:
        warn(f"the model ends at position {limit:,}, before {max_tokens:,} new tokens.")
        max_tokens = limit - len(ids)
    # Each prompt of a list has randomness of its own, or equal prompts would go on equally.
    fields = {**vars(sampling), "seed": derived_seed(sampling.seed, number)}
    return Request(
        prompt=ids,
        max_tokens=max_tokens,
        sampling=Sampling(**fields),
        stop_ids=text.tokenizer.stop_ids,
    )
