"""The conversation so far, kept within the length that the model was trained for.

Past that length a model has never seen its positions and its answers rot without a sign, so the
oldest exchanges are dropped and the user is told. Rejected: cutting tokens off the front (a turn
that begins in the middle is text the model has never seen either).
"""

from collections.abc import Sequence
from typing import Protocol

from foundling.tasks import ChatMessage


class Prompter(Protocol):
    """What is needed of a tokenizer."""

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]: ...


class History:
    """An optional system message and alternating turns."""

    def __init__(
        self,
        tokenizer: Prompter,
        window: int,
        system: str | None = None,
        *,
        longest: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._window = window
        self._longest = window if longest is None else longest
        self._system: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
        self._turns: list[ChatMessage] = []
        self.reserve = min(64, window // 4)
        """Tokens kept free for a reply."""

    @property
    def messages(self) -> list[ChatMessage]:
        """Everything the model is going to read."""
        return [*self._system, *self._turns]

    def reset(self) -> None:
        """Forget every turn and keep the system message."""
        self._turns = []

    def ask(self, text: str) -> tuple[list[int], int]:
        """Add a question; returns the prompt's ids and how many exchanges were dropped for it.

        A message that does not fit even alone is not added, and the ids are empty.
        """
        message: ChatMessage = {"role": "user", "content": text}
        turns, dropped = [*self._turns, message], 0
        while True:
            ids = self._tokenizer.prompt([*self._system, *turns])
            if len(ids) + self.reserve <= self._window:
                self._turns = turns
                return ids, dropped
            if len(turns) == 1:
                return [], 0
            turns, dropped = turns[2:], dropped + 1

    def room(self, ids: Sequence[int]) -> int:
        """Tokens that a reply to the prompt `ids` may take."""
        return min(self._window - len(ids), self._longest)

    def answer(self, text: str) -> None:
        """Add the reply to the last question; an empty one takes the question back."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()
