"""Which examples of which tasks stand in a data set: shared runs of 13 words.

The words of an example are its question and the right answer, without the solved examples before
it. An example is contaminated when one run of 13 words of it stands in some document; one that is
shorter cannot be found this way, and is counted as such. What was found can be kept, and an
evaluation given it scores the examples apart.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundling.config.errors import DataError
from foundling.data.build.decontaminate import WORDS, Owned, evaluation_texts, normalised
from foundling.data.dataset import TOKENIZER_FOLDER
from foundling.eval.results import EVERY_S
from foundling.runtime.files import write_text_atomic
from foundling.tasks.base import Task
from foundling.tasks.in_context import IclTask

SCHEMA = 1


@dataclass(frozen=True)
class TaskOverlap:
    """One task's examples."""

    n: int
    short: int
    """Fewer than 13 words: cannot be found."""
    found: tuple[str, ...]
    """Ids of those that stand in the data."""

    @property
    def share(self) -> float:
        """Of the examples that can be found."""
        return len(self.found) / max(self.n - self.short, 1)


@dataclass(frozen=True)
class Contamination:
    """What a look through a data set found."""

    tasks: Mapping[str, TaskOverlap]
    documents: int
    dirty: int
    """Documents that hold a run of some example."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "words": WORDS,
            "documents": self.documents,
            "contaminated_documents": self.dirty,
            "tasks": {
                name: {
                    "n": one.n,
                    "too_short": one.short,
                    "contaminated": len(one.found),
                    "share": one.share,
                    "ids": list(one.found),
                }
                for name, one in self.tasks.items()
            },
        }

    def lines(self) -> list[str]:
        """For a person."""
        head = f"{'task':<34} {'examples':>9} {'too short':>9} {'in the data':>11}"
        rows = [
            f"{name:<34} {one.n:>9,} {one.short:>9,} {len(one.found):>11,} ({one.share:.2%})"
            for name, one in self.tasks.items()
        ]
        last = f"{self.dirty:,} of {self.documents:,} documents share {WORDS} words with an example"
        return [head, *rows, last]


def look_for(
    tasks: Mapping[str, IclTask | Task | None],
    texts: Iterable[str],
    tell: Callable[[str], None] | None = None,
) -> Contamination:
    """Look through `texts` for the examples of tasks; measures without examples are left out."""
    asked = {name: dict(_own_texts(task)) for name, task in tasks.items() if task is not None}
    if not asked:
        raise DataError("none of these tasks has examples to look for; name one such as core.")
    keys = [(name, id) for name, examples in asked.items() for id in examples]
    every = [text for examples in asked.values() for text in examples.values()]
    owned = Owned.of(every)
    hit: set[int] = set()
    documents = dirty = 0
    told = time.monotonic()
    for text in texts:
        documents += 1
        repeated = owned.repeated(text)
        hit |= repeated
        dirty += bool(repeated)
        if tell and time.monotonic() - told > EVERY_S:
            told = time.monotonic()
            tell(f"  {documents:,} documents, {len(hit):,} examples found")
    if not documents:
        raise DataError("the data set holds no text to look through.")
    found: dict[str, list[str]] = {name: [] for name in asked}
    for number in sorted(hit):
        name, id = keys[number]
        found[name].append(id)
    return Contamination(
        {
            name: TaskOverlap(
                n=len(examples),
                short=sum(len(normalised(text).split()) < WORDS for text in examples.values()),
                found=tuple(found[name]),
            )
            for name, examples in asked.items()
        },
        documents,
        dirty,
    )


def _own_texts(task: IclTask | Task) -> Iterator[tuple[str, str]]:
    if isinstance(task, IclTask):
        for place, (number, _) in enumerate(task.rows):
            yield str(number), task.own_text(place)
        return
    for example in task.examples():
        yield example.key, f"{example.messages[-1]['content']} {example.answer}"


def texts_of(data: str, tokenizer: str | None = None) -> Iterator[str]:
    """The texts of a data set: a built one, whose tokens its tokenizer reads (by default the one
    that the build left in it), or files as they are."""
    folder = Path(data)
    if not (folder / "manifest.json").is_file():
        if not folder.exists():
            raise DataError(f"{data} does not exist; give a built data set or files of text.")
        return evaluation_texts([data])
    own = folder / TOKENIZER_FOLDER
    if tokenizer is None and not own.is_dir():
        raise DataError(f"{data} holds tokens; name the tokenizer that reads them: --tokenizer.")
    return _decoded(folder, tokenizer or str(own))


def _decoded(folder: Path, tokenizer: str) -> Iterator[str]:
    from foundling.data.dataset import DataSet
    from foundling.tokenizer.tokenizer import Tokenizer

    reader = Tokenizer.load(tokenizer)
    data = DataSet(str(folder), tokenizer=reader.fingerprint)
    for number in range(len(data.shards)):
        shard = data.shard(number)
        for index in range(len(shard)):
            start, stop = int(shard.offsets[index]), int(shard.offsets[index + 1])
            yield reader.decode(shard.tokens[start:stop].tolist(), skip_special=True)


def write_contaminated(path: Path, data: str, found: Contamination) -> None:
    """Keep what was found, for `eval --contaminated`."""
    value = {"schema": SCHEMA, "data": data, **found.to_json()}
    write_text_atomic(path, json.dumps(value, indent=2) + "\n")


def read_contaminated(path: Path) -> dict[str, frozenset[str]]:
    """Ids by task."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}")
        return {name: frozenset(task["ids"]) for name, task in found["tasks"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is nothing that `data verify --against -o` wrote ({error}); write it again."
        ) from None
