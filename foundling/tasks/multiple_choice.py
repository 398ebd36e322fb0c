"""Lettered choices asked as chat: ARC (Clark et al. 2018) and MMLU (Hendrycks et al. 2021).

The reply must name the letter: the first letter that stands alone and belongs to the choices.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foundling.config.errors import DataError
from foundling.tasks.base import Example, Grade
from foundling.tasks.task_files import need, read_rows

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ALONE = re.compile(r"(?<![A-Za-z'])\(?([A-Z])\)?(?![A-Za-z'])")


def named_letter(reply: str, choices: int) -> str | None:
    """The first letter of the choices that stands alone; "A" as an article does not."""
    for found in _ALONE.finditer(reply):
        letter, behind = found[1], reply[found.end() :]
        is_article = letter in "AI" and re.match(r" [a-z]", behind) and "(" not in found[0]
        if letter in LETTERS[:choices] and not is_article:
            return letter
    return None


class LetterChoice:
    """Questions of a file in ARC's or MMLU's schema."""

    max_new_tokens = 16

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        read = [_read(row, path, index) for index, row in enumerate(read_rows(path))]
        self._counts = [len(choices) for _, choices, _, _ in read]
        self._examples = [
            Example(
                index=index,
                messages=({"role": "user", "content": _asked(question, choices)},),
                answer=LETTERS[gold],
                group="choice",
                kind=kind,
            )
            for index, (question, choices, gold, kind) in enumerate(read)
        ]
        # What guessing scores, question by question: ARC has some of three and of five choices.
        self.baseline = sum(1 / count for count in self._counts) / max(len(self._counts), 1)

    def examples(self) -> Sequence[Example]:
        """Every question."""
        return self._examples

    def grade(self, example: Example, reply: str) -> Grade:
        """Right when the letter is."""
        said = named_letter(reply, self._counts[example.index])
        return Grade(correct=said == example.answer)


def _asked(question: str, choices: Sequence[str]) -> str:
    lines = [f"{LETTERS[number]}. {choice}" for number, choice in enumerate(choices)]
    return "\n".join([question.strip(), *lines, "Answer with the letter alone."])


def _read(row: dict[str, Any], path: Path, index: int) -> tuple[str, list[str], int, str]:
    """Question, choices, which one is right, and its subject."""
    question, choices = need(row, ("question", "choices"), path, index)
    if isinstance(choices, Mapping):  # ARC: {"text": [...], "label": [...]}, answerKey
        labels, texts = (list(choices.get(field, ())) for field in ("label", "text"))
        (key,) = need(row, ("answerKey",), path, index)
    else:  # MMLU: a list, and the number of the right one
        texts = list(choices) if isinstance(choices, list | tuple) else []
        labels = list(range(len(texts)))
        (key,) = need(row, ("answer",), path, index)
        if isinstance(key, str):
            number = int(key) if key.strip().isdecimal() else -1
            key = LETTERS.find(key) if len(key) == 1 and key in LETTERS else number
    if key not in labels or len(labels) != len(texts) or len(texts) > len(LETTERS):
        raise DataError(f"the answer in row {index + 1} of {path} is none of its choices.")
    subject = str(row.get("subject", "choice"))
    return str(question), [str(text) for text in texts], labels.index(key), subject
