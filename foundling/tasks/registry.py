"""Tasks by name: the built-in ones, those of CORE, and a user's own from a file.

A name may carry its file: `gsm8k=test.jsonl.gz`, `core=eval_bundle.zip`, and for a task of a user's
own the Python file that holds it: `rhymes=my_tasks.py` (own.py).
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foundling.config.errors import ConfigError, DataError
from foundling.tasks.base import Task
from foundling.tasks.code import CodeTask
from foundling.tasks.core import CORE_TASKS, CoreBundle, find_bundle
from foundling.tasks.files import find_file
from foundling.tasks.knowledge import Knowledge
from foundling.tasks.letter_choice import LetterChoice
from foundling.tasks.letters import Counting, Spelling
from foundling.tasks.math_words import MathWords
from foundling.tasks.own import AnyTask, load_task_file

BPB, COMPLETIONS, CORE, QUIZ = "bpb", "completions", "core", "quiz"
MEASURES = {
    BPB: "bits per byte and perplexity of held-out text, by source",
    COMPLETIONS: "open prompts continued, to read",
    CORE: "the 22 tasks of DataComp-LM's CORE, centred and averaged",
    QUIZ: "questions about the village that a Hamlet run was raised on",
}
"""What is no list of questions."""


@dataclass(frozen=True)
class _Kind:
    """A built-in task that needs a file."""

    make: Callable[[str, Path], Task]
    files: tuple[str, ...]
    help: str


FROM_FILES: dict[str, _Kind] = {
    "gsm8k": _Kind(MathWords, ("gsm8k*test*", "gsm8k*.jsonl*"), "grade-school mathematics"),
    "svamp": _Kind(MathWords, ("svamp*",), "one-step mathematics with distractors"),
    "arc_easy_chat": _Kind(
        LetterChoice, ("ARC-Easy*", "arc*easy*chat*"), "science questions, asked as chat"
    ),
    "arc_challenge_chat": _Kind(
        LetterChoice, ("ARC-Challenge*", "arc*challenge*chat*"), "harder science questions, as chat"
    ),
    "mmlu_chat": _Kind(LetterChoice, ("mmlu*test*", "mmlu*"), "57 subjects, asked as chat"),
    "humaneval": _Kind(
        CodeTask, ("HumanEval*.jsonl*", "humaneval*"), "functions to write, run in a sandbox"
    ),
}
WITHOUT_FILES: dict[str, tuple[Callable[[], Task], str]] = {
    "knowledge": (Knowledge, "30 sentences to finish with a fact; exact match and token F1"),
    "spelling": (Spelling, "words to spell, asked as chat"),
    "counting": (Counting, "letters to count, asked as chat"),
}


@dataclass
class Registry:
    """Where names become tasks."""

    bundle: str | None = None
    """Evaluation bundle of CORE."""
    folder: str | None = None
    """Folder with the files of tasks."""
    shots: int | None = None
    """Solved examples before a question, where a task has them; None: its own number."""
    own: dict[str, AnyTask] = field(default_factory=dict)
    _core: CoreBundle | None = None

    def add_file(self, path: str) -> None:
        """Take over the tasks of a user's file."""
        for task in load_task_file(path):
            if task.name in known_tasks() or task.name in CORE_TASKS:
                raise DataError(
                    f"{path} names a task {task.name}, which is a built-in name; give another."
                )
            if task.name in self.own:
                raise DataError(f"{path} names a second task {task.name}; give another name.")
            self.own[task.name] = task

    @property
    def core(self) -> CoreBundle:
        """The bundle, opened when it is first needed."""
        if self._core is None:
            self._core = CoreBundle(find_bundle(self.bundle))
        return self._core

    def _take_bundle(self, file: str | None) -> None:
        if file and file != self.bundle:
            self.bundle, self._core = file, None

    def find(self, words: Sequence[str]) -> "dict[str, AnyTask | None]":
        """Tasks by name, in order; None for a measure that is no list of questions. `core` stands
        for itself and its tasks."""
        found: dict[str, AnyTask | None] = {}
        for word in words:
            name, _, file = word.partition("=")
            if name == CORE:
                self._take_bundle(file)
                found[CORE] = None
                found |= {task: self.core.task(task, self.shots) for task in self.core.names}
            else:
                found[name] = self._task(name, file or None)
        return found

    def _task(self, name: str, file: str | None) -> AnyTask | None:
        if name not in self.own and file and file.endswith(".py"):
            self.add_file(file)
            if name not in self.own:
                raise ConfigError(f"{file} holds no task {name}; it has: {', '.join(self.own)}.")
        if name in self.own:
            return self.own[name]
        if name in MEASURES:
            return None
        if name in WITHOUT_FILES:
            return WITHOUT_FILES[name][0]()
        if name in FROM_FILES:
            kind = FROM_FILES[name]
            return kind.make(name, find_file(name, kind.files, file, self.folder))
        if name in CORE_TASKS:
            self._take_bundle(file)
            return self.core.task(name, self.shots)
        known = [*known_tasks(), *CORE_TASKS, *self.own]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known_tasks())}."
        raise ConfigError(f"unknown task {name}; {hint}")


def known_tasks() -> Mapping[str, str]:
    """Built-in names and what they measure; CORE's tasks go by their own names too."""
    return {
        **MEASURES,
        **{name: text for name, (_, text) in WITHOUT_FILES.items()},
        **{name: kind.help for name, kind in FROM_FILES.items()},
    }
