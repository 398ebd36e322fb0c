"""From pieces to OpenAI's shapes: whole answers, chunks of a stream, log-probabilities, usage.

One collector for both kinds of completion and for both ways of giving it out. A chunk is written by
hand into one line, and all that came at once leaves in one write: at many streams this is where a
server's time goes.
"""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from foundling.generate.request import TokenScores
from foundling.generate.sampling import NOT_FINITE
from foundling.serve.engine_thread import STEP_FAILED, Event
from foundling.serve.protocol import (
    ApiError,
    CachedTokens,
    ChatAnswer,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from foundling.serve.tool_calls import ToolReader
from foundling.tokenizer.tokenizer import Tokenizer

Finish = Literal["stop", "length", "tool_calls"]
LEAST_LOGPROB = -9999.0
"""For a token that a grammar or a bias has ruled out: JSON knows no infinity."""


class TokenTexts:
    """How tokens are told: their text, and bytes where they are none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes = lru_cache(maxsize=1 << 16)(tokenizer.token_bytes)
        self._widths = tokenizer.token_widths

    def text(self, id: int) -> str:
        """For chats, with the bytes beside it."""
        return self.bytes(id).decode("utf-8", errors="replace")

    def length(self, id: int) -> int:
        """Characters that it adds to a text, in which special tokens are not told."""
        known = id < len(self._widths) and self._widths[id] > 0
        # Bytes that begin a character: one that is split over tokens counts with its first.
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes(id)) if known else 0

    def name(self, id: int) -> str:
        """For completions: OpenAI's spelling of what is no text by itself."""
        raw = self.bytes(id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass
class Choice:
    """One sequence of a request, as far as it has come."""

    index: int
    prompt: Sequence[int]
    begins: str = ""
    """What stands before the answer: the prompt, where it is echoed."""
    reader: ToolReader | None = None
    text: str = ""
    tokens: list[tuple[int, float, dict[int, float]]] = field(default_factory=list)
    """Token, log-probability and the likeliest ones, where asked for."""
    generated: int = 0
    reused: int = 0
    finish: Finish | None = None
    scores: TokenScores | None = None
    """Of the prompt."""
    told_calls: int = 0


@dataclass(kw_only=True)
class Answer:
    """All sequences of one request, and what kind of answer they make."""

    model: str
    texts: TokenTexts
    choices: list[Choice]
    is_chat: bool
    top: int | None
    """Log-probabilities of the tokens and of so many others; None: none."""
    prompts: int = 1
    echo: bool = False
    writes: bool = True
    """Whether the model is to write at all (a completion's max_tokens may be 0)."""
    include_usage: bool = False
    id: str = ""
    created: int = 0

    def __post_init__(self) -> None:
        kind = "chatcmpl" if self.is_chat else "cmpl"
        self.id, self.created = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        self._head = (
            f'data: {{"id":"{self.id}","object":'
            f'"{"chat.completion.chunk" if self.is_chat else "text_completion"}",'
            f'"created":{self.created},"model":{json.dumps(self.model)},"choices":['
        )
        self._tail = '],"usage":null}\n\n' if self.include_usage else "]}\n\n"

    def take(self, event: Event) -> tuple[Choice, str, int]:
        """Add a piece: its choice, the text that is new, and the first of its tokens."""
        choice, piece = self.choices[event.place], event.piece
        first = len(choice.tokens)
        if event.reused is not None:
            choice.reused, choice.scores = event.reused, event.prompt
        if piece.finish == "error":
            raise ApiError(
                piece.error, status=503 if piece.error in (NOT_FINITE, STEP_FAILED) else 400
            )
        if not self.writes:
            choice.finish = "length" if piece.finish else None
            return choice, "", first
        if piece.output is not None and piece.output.id is not None:
            choice.generated += 1
            if self.top is not None and piece.output.logprob is not None:
                chosen = (piece.output.id, piece.output.logprob, dict(piece.output.top or {}))
                choice.tokens.append(chosen)
        new = piece.text
        if choice.reader is not None:
            new = choice.reader.push(new) + (choice.reader.close() if piece.finish else "")
        choice.text += new
        if piece.finish:
            calls = choice.reader is not None and choice.reader.calls
            choice.finish = "tool_calls" if calls and piece.finish == "stop" else piece.finish
        return choice, new, first

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many answers it has."""
        each = len(self.choices) // self.prompts
        firsts = self.choices[::each]
        prompt = sum(len(choice.prompt) for choice in firsts)
        completion = sum(choice.generated for choice in self.choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(c.reused for c in firsts)),
        )

    # Whole

    def whole(self) -> ChatCompletion | TextCompletion:
        """The answer, when all of it is there."""
        common: dict[str, Any] = {"id": self.id, "created": self.created, "model": self.model}
        common["usage"] = self.usage
        if self.is_chat:
            return ChatCompletion(choices=[self._chat_choice(c) for c in self.choices], **common)
        return TextCompletion(choices=[self._text_choice(c) for c in self.choices], **common)

    def _chat_choice(self, choice: Choice) -> ChatChoice:
        calls = choice.reader.calls if choice.reader else []
        logprobs = (
            ChatLogprobs(content=self._chat_logprobs(choice, 0)) if self.top is not None else None
        )
        content = choice.text if choice.text or not calls else None
        assert choice.finish is not None
        return ChatChoice(
            index=choice.index,
            message=ChatAnswer(content=content, tool_calls=calls or None),
            logprobs=logprobs,
            finish_reason=choice.finish,
        )

    def _text_choice(self, choice: Choice) -> TextChoice:
        logprobs = None
        if self.top is not None:
            logprobs = self._text_logprobs(choice, 0, with_prompt=self.echo)
        assert choice.finish is not None
        assert choice.finish != "tool_calls"
        return TextChoice(
            index=choice.index,
            text=choice.begins + choice.text,
            logprobs=logprobs,
            finish_reason=choice.finish,
        )

    # Streamed

    def opening(self) -> str:
        """The first chunks: who speaks, or the prompt that is echoed."""
        if self.is_chat:
            delta = {"role": "assistant", "content": ""}
            return "".join(self._chunk(c, {"delta": delta}, None) for c in self.choices)
        return ""

    def chunks(self, events: Sequence[Event]) -> str:
        """What these pieces bring."""
        return "".join(self._pieces(*self.take(event)) for event in events)

    def closing(self) -> str:
        """The usage where it was asked for, and the end."""
        if not self.include_usage:
            return "data: [DONE]\n\n"
        usage = self.usage.model_dump_json()
        return f'{self._head}],"usage":{usage}}}\n\ndata: [DONE]\n\n'

    def _pieces(self, choice: Choice, new: str, first: int) -> str:
        said = ""
        if self.is_chat:
            logprobs = None
            if self.top is not None and len(choice.tokens) > first:
                told = ChatLogprobs(content=self._chat_logprobs(choice, first))
                logprobs = told.model_dump()
            if new or logprobs:
                said += self._chunk(choice, {"delta": {"content": new}}, logprobs)
            calls = choice.reader.calls[choice.told_calls :] if choice.reader else []
            for call in calls:
                told_call = {"index": choice.told_calls, **call.model_dump()}
                said += self._chunk(choice, {"delta": {"tool_calls": [told_call]}}, None)
                choice.told_calls += 1
            if choice.finish:
                said += self._chunk(choice, {"delta": {}}, None, choice.finish)
            return said
        begins, choice.begins = choice.begins, ""
        listed = None
        if self.top is not None:
            found = self._text_logprobs(choice, first, with_prompt=self.echo and bool(begins))
            listed = found.model_dump() if found.tokens else None
        if begins or new or listed or choice.finish:
            said = self._chunk(choice, {"text": begins + new}, listed, choice.finish)
        return said

    def _chunk(
        self, choice: Choice, part: dict[str, Any], logprobs: Any, finish: Finish | None = None
    ) -> str:
        inner = json.dumps(part)[1:-1]
        chances = "null" if logprobs is None else json.dumps(logprobs)
        ends = "null" if finish is None else f'"{finish}"'
        return (
            f'{self._head}{{"index":{choice.index},{inner},"logprobs":{chances},'
            f'"finish_reason":{ends}}}{self._tail}'
        )

    # Log-probabilities

    def _chat_logprobs(self, choice: Choice, first: int) -> list[TokenLogprob]:
        texts = self.texts
        return [
            TokenLogprob(
                token=texts.text(id),
                logprob=_finite(logprob),
                bytes=list(texts.bytes(id)),
                top_logprobs=[
                    TopLogprob(
                        token=texts.text(other),
                        logprob=_finite(chance),
                        bytes=list(texts.bytes(other)),
                    )
                    for other, chance in top.items()
                ],
            )
            for id, logprob, top in choice.tokens[first:]
        ]

    def _text_logprobs(self, choice: Choice, first: int, *, with_prompt: bool) -> TextLogprobs:
        rows: list[tuple[int, float | None, dict[int, float]]] = []
        if with_prompt:
            scores = choice.scores or TokenScores([], [], [])
            tops = scores.top or [{} for _ in scores.logprobs]
            judged = zip(choice.prompt[1:], scores.logprobs, tops, strict=True)
            rows = [(choice.prompt[0], None, {}), *judged]
        rows += choice.tokens[first:]
        names = [self.texts.name(id) for id, _, _ in rows]
        before = choice.prompt if self.echo and not with_prompt else []
        earlier = [*before, *(id for id, _, _ in choice.tokens[:first])]
        at, offsets = sum(map(self.texts.length, earlier)), list[int]()
        for id, _, _ in rows:
            offsets.append(at)
            at += self.texts.length(id)
        return TextLogprobs(
            tokens=names,
            token_logprobs=[None if chance is None else _finite(chance) for _, chance, _ in rows],
            top_logprobs=[self._top(*row) for row in rows] if self.top else None,
            text_offset=offsets,
        )

    def _top(
        self, id: int, logprob: float | None, top: dict[int, float]
    ) -> dict[str, float] | None:
        """The likeliest tokens by name; of two with one name the likelier. The chosen one is always
        among them."""
        if logprob is None:
            return None
        found: dict[str, float] = {}
        for other, chance in [*top.items(), (id, logprob)]:
            name = self.texts.name(other)
            found[name] = max(_finite(chance), found.get(name, LEAST_LOGPROB))
        return found


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
