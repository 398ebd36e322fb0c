"""Grade-school mathematics in words: GSM8K (Cobbe et al. 2021) and SVAMP (Patel et al. 2021).

A reply is right when its last number is the answer's; the public answers of GSM8K end in `#### N`.
Rejected: the first number (a worked reply begins with the question's own numbers).
"""

import re
from collections.abc import Sequence
from pathlib import Path

from foundling.config.errors import DataError
from foundling.tasks.base import Example, Grade
from foundling.tasks.task_files import need, read_rows

_NUMBER = re.compile(r"(?<!\d)-?\$?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """The last number that a text names; commas between thousands are not counted."""
    marked = text.rsplit("####", 1)
    found = _NUMBER.findall(marked[-1]) or _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("$", "")) if found else None


class MathWords:
    """Questions of a file, asked as chat; GSM8K's fields or SVAMP's, whichever it has."""

    max_new_tokens = 256

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._examples = [_example(index, row, path) for index, row in enumerate(read_rows(path))]

    def examples(self) -> Sequence[Example]:
        """Every question."""
        return self._examples

    def grade(self, example: Example, reply: str) -> Grade:
        """Right when the last number is the answer."""
        said = last_number(reply)
        wanted = last_number(example.answer)
        return Grade(correct=said is not None and wanted is not None and abs(said - wanted) < 1e-6)


def _example(index: int, row: dict[str, object], path: Path) -> Example:
    if "question" in row:
        question, answer = need(row, ("question", "answer"), path, index)
    else:
        body, last, answer = need(row, ("Body", "Question", "Answer"), path, index)
        question = f"{str(body).strip().rstrip('.')}. {str(last).strip()}"
    if last_number(str(answer)) is None:
        raise DataError(f"the answer in row {index + 1} of {path} names no number.")
    return Example(
        index=index,
        messages=({"role": "user", "content": str(question)},),
        answer=str(answer),
        group="math",
        kind=str(row.get("Type", "math")),
    )
