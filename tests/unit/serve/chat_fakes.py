"""A model that says what it is told to, for the chat's tests."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foundling.config.run import RunConfig
from foundling.config.train import TrainConfig
from foundling.generate.engine import Completion
from foundling.generate.sampling import Sampling


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

    config: RunConfig = field(
        default_factory=lambda: RunConfig(train=TrainConfig(stage="finetune", init="a"))
    )
    tokenizer: Letters = field(default_factory=Letters)
    model: torch.nn.Module = field(default_factory=lambda: torch.nn.Linear(1, 1))
    step: int = 7

    @property
    def context(self) -> int:
        return self.config.train.seq_len


class Speaker:
    """An engine that says its lines one after the other, calling `before_token` on the way."""

    def __init__(self, lines: Sequence[str], before_token: Callable[[int], None]) -> None:
        self._lines, self._before = iter(lines), before_token
        self.prompts: list[str] = []
        self.rooms: list[int] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        stop_ids: Collection[int],
        on_token: Callable[[int, int], None],
    ) -> list[Completion]:
        self.prompts.append(bytes(prompts[0]).decode())
        self.rooms.append(max_new_tokens)
        ids = list(next(self._lines).encode())[:max_new_tokens]
        for place, token in enumerate(ids):
            self._before(place)
            on_token(0, token)
        return [Completion(ids, True)]
