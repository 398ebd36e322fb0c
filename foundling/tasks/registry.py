"""Tasks by name: the built-in ones, CORE's, and a user's own from a Python file."""

import contextlib
import difflib
import importlib.util
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from foundling.config.errors import ConfigError, DataError, UserError
from foundling.tasks.base import Example, Grade, Task
from foundling.tasks.core import CORE_TASKS, CoreBundle, find_bundle
from foundling.tasks.gsm8k import MathWords
from foundling.tasks.humaneval import CodeTask
from foundling.tasks.in_context import IclTask
from foundling.tasks.knowledge import Knowledge
from foundling.tasks.multiple_choice import LetterChoice
from foundling.tasks.spelling import Counting, Spelling
from foundling.tasks.task_files import find_file

# Tasks of a user's own: a Python file that holds a list `TASKS` of task objects.
#
# base.py says what a task is; an IclTask is one too. The file runs in a process of its own
# (task_file_child.py), which may take SECONDS for an answer: a file that ends its process or never
# returns ends no evaluation without a word. What it prints goes to stderr, because stdout may be
# JSON for another program. Whatever is wrong with it is one sentence.

AnyTask = Task | IclTask
SECONDS = 600.0
"""That a task file may take to load, to list its examples or to grade one reply."""
ATTRIBUTES = ("name", "max_new_tokens", "as_text", "stops", "baseline")
"""What a task may say of itself, besides its examples and grades."""
_NAME = re.compile(r"\w[\w.+-]*")
"""Names become names of files."""


def load_task_file(path: str) -> list[AnyTask]:
    """The list TASKS of a file; its code runs in a child."""
    if not Path(path).is_file():
        raise DataError(f"{path} does not exist; give a Python file with a list TASKS.")
    child = _TaskFileProcess(path)
    described = child.ask("load")
    return [
        one if isinstance(one, IclTask) else _OwnTask(child, number, one)
        for number, one in enumerate(described)
    ]


class _OwnTask:
    """A task whose code runs in the child of its file."""

    name: str

    def __init__(self, child: "_TaskFileProcess", number: int, described: dict[str, Any]) -> None:
        self._child, self._number = child, number
        if described.pop("has_text_prompt"):
            self.text_prompt = lambda example: child.ask("text_prompt", number, example.key)
        self.__dict__.update(described)

    def examples(self) -> Sequence[Example]:
        """Every example."""
        found: list[Example] = self._child.ask("examples", self._number)
        return found

    def grade(self, example: Example, reply: str) -> Grade:
        """Judge a reply."""
        grade: Grade = self._child.ask("grade", self._number, example.key, reply)
        return grade


class _TaskFileProcess:
    """The process of a task file; it lives as long as its tasks are used."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pipe, theirs = Pipe()
        number = theirs.fileno()
        words = ("foundling.tasks.task_file_child", path, str(number), str(os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-m", *words],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
        theirs.close()
        weakref.finalize(self, _end, self._process)

    def ask(self, what: str, *words: Any) -> Any:
        """Its answer; DataError where it has none, or none in time."""
        try:
            self._pipe.send((what, words))
            if not self._pipe.poll(SECONDS):
                _end(self._process)
                raise DataError(
                    f"{self._path} did not answer within {SECONDS:g} s and was ended; see that it"
                    " comes to an end."
                )
            kind, found = self._pipe.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise DataError(
                f"{self._path} ended the process that it runs in (exit code {code}); take out what"
                " does."
            ) from None
        except (AttributeError, ImportError) as error:  # a class of the file's own
            raise DataError(
                f"{self._path} answers with objects of its own classes ({error}); make them"
                " Example, Grade and IclTask."
            ) from None
        if kind == "refused":
            raise DataError(found)
        if kind == "failed":
            raise DataError(f"{self._path} failed ({found}); mend it and try again.")
        return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def run_task_file(path: str) -> list[AnyTask]:
    """The list TASKS of a file, which is run here."""
    place = Path(path)
    spec = importlib.util.spec_from_file_location(f"foundling_tasks_{place.stem}", place)
    if spec is None or spec.loader is None:
        raise DataError(f"{path} is no Python file; give one with a list TASKS.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with _as_data_error(f"{path} cannot be run"):
        spec.loader.exec_module(module)
    tasks = getattr(module, "TASKS", None)
    if not isinstance(tasks, list | tuple) or not tasks:
        raise DataError(f"{path} holds no list TASKS; put your task objects into one.")
    for task in tasks:
        lacking = [name for name in _needs(task) if not hasattr(task, name)]
        if lacking or isinstance(task, type):
            what = f"no {lacking[0]}" if lacking else "not been made; write its name with ()"
            raise DataError(f"a task in {path} has {what}; see docs/eval.md.")
        if not isinstance(task.name, str) or not is_file_name(task.name):
            raise DataError(
                f"a task in {path} has the name {task.name!r}; use letters, digits, - and _."
            )
    return list(tasks)


def is_file_name(name: str) -> bool:
    """Whether files can be called so without leaving their folder."""
    return _NAME.fullmatch(name) is not None


def examples_of(task: Task) -> Sequence[Example]:
    """What a task asks, each example with a key of its own."""
    with _as_data_error(f"task {task.name} could not list its examples"):
        examples = list(task.examples())
    if not examples:
        raise DataError(f"{task.name} has no examples.")
    keys: set[str] = set()
    for example in examples:
        lacking = [name for name in ("index", "messages", "key") if not hasattr(example, name)]
        if lacking:
            raise DataError(
                f"task {task.name} lists a {type(example).__name__} among its examples; make each"
                " of them an Example."
            )
        if example.key in keys:
            raise DataError(
                f"task {task.name} has two examples {example.key}; number them by index or give"
                " each an id."
            )
        keys.add(example.key)
    return examples


def graded(task: Task, example: Example, reply: str) -> Grade:
    """A task's judgement of a reply."""
    with _as_data_error(f"task {task.name} could not grade its example {example.key}"):
        grade = task.grade(example, reply)
    if not hasattr(grade, "correct"):
        raise DataError(
            f"task {task.name} graded example {example.key} by a {type(grade).__name__}; return a"
            " Grade."
        )
    return grade


@contextlib.contextmanager
def _as_data_error(what: str) -> Iterator[None]:
    """Run a user's code: its failure becomes a DataError, its print goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"{what} ({type(error).__name__}: {error}); mend it and try again."
        ) from error


def _needs(task: object) -> tuple[str, ...]:
    return ("name",) if isinstance(task, IclTask) else ("name", "examples", "grade")


# Tasks by name: the built-in ones, those of CORE, and a user's own from a file.
#
# A name may carry its file: `gsm8k=test.jsonl.gz`, `core=eval_bundle.zip`, and for a task of a
# user's own the Python file that holds it: `rhymes=my_tasks.py`.

BPB, COMPLETIONS, CORE, QUIZ = "bpb", "completions", "core", "quiz"
MEASURES = {
    BPB: "bits per byte and perplexity of held-out text, by source",
    COMPLETIONS: "open prompts continued, to read",
    CORE: "the 22 tasks of DataComp-LM's CORE, centred and averaged",
    QUIZ: "questions about the village that a Hamlet run was raised on",
}
"""What is no list of questions."""
HARNESS = "lm:"
"""How the names of lm-evaluation-harness's tasks begin."""


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
        if is_of_harness(name):
            raise ConfigError(
                f"{name} is a task of lm-evaluation-harness, which only `foundling eval SRC {name}`"
                " asks; leave it out here."
            )
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
        f"{HARNESS}NAME": "a task or group of lm-evaluation-harness; lm:nine, lm:commonsense",
    }


def is_of_harness(word: str) -> bool:
    """Whether lm-evaluation-harness asks this task."""
    return word.startswith(HARNESS)
