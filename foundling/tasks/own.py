"""Tasks of a user's own: a Python file that holds a list `TASKS` of task objects.

base.py says what a task is; an IclTask is one too. The file runs as any program of theirs would,
and what it prints goes to stderr, because stdout may be JSON for another program. Whatever is wrong
with it is one sentence.
"""

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from foundling.config.errors import DataError, UserError
from foundling.tasks.base import Example, Grade, Task
from foundling.tasks.icl import IclTask

AnyTask = Task | IclTask
_NAME = re.compile(r"\w[\w.+-]*")
"""Names become names of files."""


def load_task_file(path: str) -> list[AnyTask]:
    """The list TASKS of a file."""
    place = Path(path)
    if not place.is_file():
        raise DataError(f"{path} does not exist; give a Python file with a list TASKS.")
    spec = importlib.util.spec_from_file_location(f"foundling_tasks_{place.stem}", place)
    if spec is None or spec.loader is None:
        raise DataError(f"{path} is no Python file; give one with a list TASKS.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with _told(f"{path} cannot be run"):
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
    with _told(f"task {task.name} could not list its examples"):
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
    with _told(f"task {task.name} could not grade its example {example.key}"):
        grade = task.grade(example, reply)
    if not hasattr(grade, "correct"):
        raise DataError(
            f"task {task.name} graded example {example.key} by a {type(grade).__name__}; return a"
            " Grade."
        )
    return grade


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Somebody's own code: its failure is a sentence, its print is no result."""
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
