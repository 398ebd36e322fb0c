"""A model that says what it is told to, for the chat's tests."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from foundling.config.run import RunConfig
from foundling.generate.request import Output, Request, TokenScores


class Letters:
    """One token a byte; a chat is its turns with a marker before each."""

    stop_ids = frozenset({0})

    def prompt(self, messages: Sequence[Any]) -> list[int]:
        return [b for message in messages for b in b"<" + message["content"].encode()]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@dataclass
class FakeBundle:
    """Enough of a Bundle to chat with."""

    config: RunConfig = field(default_factory=RunConfig)
    tokenizer: Letters = field(default_factory=Letters)
    model: torch.nn.Module = field(default_factory=lambda: torch.nn.Linear(1, 1))
    step: int = 7
    is_chat: bool = True

    @property
    def context(self) -> int:
        return self.config.train.seq_len


class Speaker:
    """An engine that says its lines one after the other, calling `before_token` on the way."""

    max_length = longest = 1 << 20

    def __init__(self, lines: Sequence[str], before_token: Callable[[int], None]) -> None:
        self._lines, self._before = iter(lines), before_token
        self.prompts: list[str] = []
        self.rooms: list[int] = []
        self.seeds: list[int] = []
        self.temperatures: list[float] = []
        self._ids: list[int] = []
        self._said = 0

    def submit(self, request: Request) -> int:
        self.prompts.append(bytes(request.prompt).decode())
        self.rooms.append(request.max_tokens)
        self.seeds.append(request.sampling.seed)
        self.temperatures.append(request.sampling.temperature)
        self._ids = list(next(self._lines).encode())[: request.max_tokens]
        self._said = 0
        return len(self.prompts)

    def cancel(self, number: int) -> None: ...

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def outputs_of(self, numbers: Collection[int]) -> list[Output]:
        if self._said == len(self._ids):
            return [Output(len(self.prompts), finish="stop", stop_id=0)]
        self._before(self._said)
        self._said += 1
        return [Output(len(self.prompts), self._ids[self._said - 1])]

    def score(
        self, texts: Sequence[Sequence[int]], starts: Sequence[int], top: int
    ) -> list[tuple[int, TokenScores]]:
        [text], [start] = texts, starts
        said = len(text) - start
        likely = [{id: math.log(0.5), ord("?"): math.log(0.25)} for id in text[start:]]
        return [(0, TokenScores([math.log(0.5)] * said, [True] * said, likely))]
