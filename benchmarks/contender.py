"""What every contender of `benchmarks.data` is given and must offer: all are measured alike.

A contender is a module with

    NEEDS        the modules that it works with, as they are imported
    BUILDS       whether making tokens of text is part of what it offers
    SETTINGS     ways to run its loader that its documentation offers; the best one counts
    prepare(job) texts to whatever it reads (timed where BUILDS, else only done)
    repeat(job, long, times)    the same data `times` over in the folder of `long`, by links
    open(job, settings, state) -> Stream

and runs in a child process of its own, so that nobody inherits another's caches or threads.
"""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor

CONTENDERS = {
    "foundling": "benchmarks.ours",
    "datasets map": "benchmarks.with_datasets",
    "datasets streaming": "benchmarks.with_streaming",
    "torchdata": "benchmarks.with_torchdata",
    "grain": "benchmarks.with_grain",
    "litdata": "benchmarks.with_litdata",
}
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The same corpus, tokenizer, shapes and number of processes for everybody."""

    files: tuple[str, ...]
    """Parquet files with a `text` column."""
    tokenizer: str
    """Folder with tokenizer.json."""
    work: str
    """A folder of the contender's own."""
    workers: int
    """Processes of a build."""
    seq_len: int
    rows: int
    """Rows of a batch."""
    seed: int = 1

    @property
    def folder(self) -> Path:
        """The contender's own folder."""
        return Path(self.work)

    def to_json(self) -> dict[str, Any]:
        """For the child's standard input."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Job":
        """The inverse of to_json."""
        return cls(**{**data, "files": tuple(data["files"])})


class Stream(Protocol):
    """Batches of one epoch after another, in a shuffled order."""

    batches: int
    """Whole batches in an epoch."""

    def __iter__(self) -> "Iterator[tuple[Tensor, Tensor]]":
        """One epoch, or what is left of it: inputs and targets, int64 [rows, seq_len]."""

    def state(self) -> Any:
        """Where it is, as its documentation says to save it."""


class Contender(Protocol):
    """See the top of the file."""

    NEEDS: tuple[str, ...]
    BUILDS: bool
    SETTINGS: tuple[Settings, ...]

    def prepare(self, job: Job) -> None: ...

    def repeat(self, job: Job, long: Job, times: int) -> None: ...

    def open(self, job: Job, settings: Settings, state: Any) -> Stream: ...


def contender(name: str) -> Contender:
    """The module of a contender; importing it imports none of the package it measures."""
    return cast(Contender, importlib.import_module(CONTENDERS[name]))


def link_all(files: Sequence[Path], folder: Path, times: int) -> list[list[str]]:
    """Link files `times` over into a folder, under new names: time by time, their names there."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number in range(times):
        names.append([f"{number:04d}-{file.name}" for file in files])
        for name, file in zip(names[-1], files, strict=True):
            os.link(file, folder / name)
    return names
