"""Questions put in the text itself, with solved examples before them (in-context learning).

Three kinds, as the public evaluation bundles name them:

    multiple_choice     one query, several answers: the likeliest answer per token is taken
    schema              several contexts, one continuation: where is the continuation likeliest
    language_modeling   the continuation itself must be what the model would say, token for token

The solved examples of a question are drawn by a generator of its own, `Random(1234 + place)`, from
the other questions; the questions are shuffled by `Random(1337)` before a limit cuts the list. So a
score depends on nothing but the weights and the limit, and the numbers are those of the public
scorer of the nanochat project, example by example. A limit that is too small to draw the solved
examples from takes them from the questions right after it.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foundling.config.errors import DataError

Kind = Literal["multiple_choice", "schema", "language_modeling"]
KINDS: tuple[Kind, ...] = ("multiple_choice", "schema", "language_modeling")
FIELDS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
OPTIONS = {"multiple_choice": "choices", "schema": "context_options"}
"""The list that `gold` is a place in."""
SHUFFLE_SEED = 1337
SHOTS_SEED = 1234
"""Plus the question's place in the shuffled list."""
BETWEEN = "\n\n"


@dataclass(frozen=True, kw_only=True)
class InContextQuestion:
    """One question as whole texts."""

    id: str
    """Number of its row in the task's file: the same for every model, limit and order."""
    kind: Kind
    texts: tuple[str, ...]
    """A text for each choice; in language modelling the prompt alone, then prompt and answer."""
    gold: int = 0
    """Which choice is right."""


@dataclass(frozen=True, kw_only=True)
class IclTask:
    """A list of questions with what is needed to put them."""

    name: str
    kind: Kind
    rows: Sequence[tuple[int, Mapping[str, Any]]]
    """Number in the file and content, in the order of the file."""
    shots: int = 0
    delimiter: str = " "
    """Between a question and its answer."""
    baseline: float = 0.0
    """What guessing scores, from 0 to 1."""
    source: str = ""
    digest: str = ""
    """Tells these questions from others of the same name; empty: made of the rows when needed."""
    pool: Sequence[tuple[int, Mapping[str, Any]]] = ()
    """What solved examples are drawn from: the rows, and more where they are too few."""

    def __post_init__(self) -> None:
        where = self.source or f"the task {self.name}"
        if self.kind not in KINDS:
            raise DataError(f"{where} has the kind {self.kind!r}; there are: {', '.join(KINDS)}.")
        if self.shots < 0:
            raise DataError(f"{where} has {self.shots} solved examples; give 0 or more.")
        for number, row in self.rows:
            fault = _fault(row, self.kind)
            if fault:
                raise DataError(f"row {number + 1} of {where} {fault}.")

    def chosen(self, limit: int = 0) -> "IclTask":
        """The questions in the order they are put, the first `limit` of them (0: all)."""
        rows = list(self.rows)
        random.Random(SHUFFLE_SEED).shuffle(rows)
        kept = rows[:limit] if limit else rows
        if len(rows) <= self.shots:
            raise DataError(
                f"{self.name} puts {self.shots} solved examples before each question and has"
                f" {len(rows)} questions to draw them from; give fewer --shots."
            )
        pool = rows[: max(len(kept), self.shots + 1)]
        digest = self.digest or _digest(self.rows)
        return IclTask(**{**self.__dict__, "rows": kept, "pool": pool, "digest": digest})

    def __len__(self) -> int:
        return len(self.rows)

    def question(self, place: int) -> InContextQuestion:
        """The question at a place of the list as it is now, after its solved examples."""
        number, row = self.rows[place]
        before = "".join(self._solved(shot) + BETWEEN for shot in self._shots(place))
        texts = tuple(before + text for text in self._texts(row))
        if self.kind == "language_modeling":
            # A blank at the end of a prompt would be a token of its own; before a word it is none.
            texts = (texts[0].strip(), texts[1])
        return InContextQuestion(
            id=str(number), kind=self.kind, texts=texts, gold=int(row.get("gold", 0))
        )

    def own_text(self, place: int) -> str:
        """A question with its right answer and nothing before it, to look for it elsewhere."""
        return self._solved(self.rows[place][1])

    def _shots(self, place: int) -> list[Mapping[str, Any]]:
        if not self.shots:
            return []
        # Drawn from the list without the question: places after it have moved up by one.
        pool = self.pool or self.rows
        drawn = random.Random(SHOTS_SEED + place).sample(range(len(pool) - 1), self.shots)
        return [pool[other + (other >= place)][1] for other in drawn]

    def _solved(self, row: Mapping[str, Any]) -> str:
        if self.kind == "multiple_choice":
            return f"{row['query']}{self.delimiter}{row['choices'][row['gold']]}"
        if self.kind == "schema":
            right = row["context_options"][row["gold"]]
            return f"{right}{self.delimiter}{row['continuation']}"
        return f"{str(row['context']).strip()}{self.delimiter}{row['continuation']}"

    def _texts(self, row: Mapping[str, Any]) -> list[str]:
        if self.kind == "multiple_choice":
            return [f"{row['query']}{self.delimiter}{choice}" for choice in row["choices"]]
        if self.kind == "schema":
            end = row["continuation"]
            return [f"{start}{self.delimiter}{end}" for start in row["context_options"]]
        prompt = f"{str(row['context']).strip()}{self.delimiter}"
        return [prompt, f"{prompt}{row['continuation']}"]


def _fault(row: Any, kind: Kind) -> str:
    """What is wrong with a row, as the end of a sentence; empty: nothing."""
    if not isinstance(row, Mapping):
        return "is no object with fields"
    lacking = [field for field in FIELDS[kind] if field not in row]
    if lacking:
        return f"has no {lacking[0]}, which a {kind} task needs"
    if kind not in OPTIONS:
        return ""
    options, gold = row[OPTIONS[kind]], row["gold"]
    if not isinstance(options, list | tuple) or not options:
        return f"has no list of {OPTIONS[kind]}"
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(options):
        return f"has gold {gold!r}, which is no place in its {len(options)} {OPTIONS[kind]}"
    return ""


def _digest(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    content = json.dumps([[number, dict(row)] for number, row in rows], default=str, sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()[:16]
