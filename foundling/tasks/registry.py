"""Tasks by name: the built-in ones, those of CORE, and a user's own from a file.

A name may carry its file: `gsm8k=test.jsonl.gz`, `core=eval_bundle.zip`. A user's file is Python
that holds a list `TASKS` of task objects (foundling/tasks/base.py says what a task is; an IclTask
is one too).
"""

import difflib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foundling.config.errors import ConfigError, DataError
from foundling.tasks.base import Task
from foundling.tasks.code import CodeTask
from foundling.tasks.core import CORE_TASKS, CoreBundle, find_bundle
from foundling.tasks.files import find_file
from foundling.tasks.icl import IclTask
from foundling.tasks.knowledge import Knowledge
from foundling.tasks.letter_choice import LetterChoice
from foundling.tasks.letters import Counting, Spelling
from foundling.tasks.math_words import MathWords

BPB, COMPLETIONS, CORE, QUIZ = "bpb", "completions", "core", "quiz"
MEASURES = {
    BPB: "bits per byte and perplexity of held-out text, by source",
    COMPLETIONS: "open prompts continued, to read",
    CORE: "the 22 tasks of DataComp-LM's CORE, centred and averaged",
    QUIZ: "questions about the village that a Hamlet run was raised on",
}
"""What is no list of questions."""
AnyTask = Task | IclTask


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
            self.own[task.name] = task

    @property
    def core(self) -> CoreBundle:
        """The bundle, opened when it is first needed."""
        if self._core is None:
            self._core = CoreBundle(find_bundle(self.bundle))
        return self._core

    def find(self, words: Sequence[str]) -> "dict[str, AnyTask | None]":
        """Tasks by name, in order; None for a measure that is no list of questions. `core` stands
        for itself and its tasks."""
        found: dict[str, AnyTask | None] = {}
        for word in words:
            name, _, file = word.partition("=")
            if name == CORE:
                self.bundle, self._core = file or self.bundle, None
                found[CORE] = None
                found |= {task: self.core.task(task, self.shots) for task in self.core.names}
            else:
                found[name] = self._task(name, file or None)
        return found

    def _task(self, name: str, file: str | None) -> AnyTask | None:
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
            self.bundle = file or self.bundle
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


def load_task_file(path: str) -> list[AnyTask]:
    """The list TASKS of a user's Python file; it runs as any program of theirs would."""
    place = Path(path)
    if not place.is_file():
        raise DataError(f"{path} does not exist; give a Python file with a list TASKS.")
    spec = importlib.util.spec_from_file_location(f"foundling_tasks_{place.stem}", place)
    if spec is None or spec.loader is None:
        raise DataError(f"{path} is no Python file; give one with a list TASKS.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DataError(
            f"{path} cannot be run ({type(error).__name__}: {error}); mend it and try again."
        ) from error
    tasks = getattr(module, "TASKS", None)
    if not isinstance(tasks, list | tuple) or not tasks:
        raise DataError(f"{path} holds no list TASKS; put your task objects into one.")
    for task in tasks:
        lacking = [name for name in _needs(task) if not hasattr(task, name)]
        if lacking:
            raise DataError(f"a task in {path} has no {lacking[0]}; see docs/eval.md.")
    return list(tasks)


def _needs(task: object) -> tuple[str, ...]:
    return ("name",) if isinstance(task, IclTask) else ("name", "examples", "grade")
