"""The process in which a user's task file runs: it loads the file and answers for its tasks.

Started by registry.py with the file's path, the end of a pipe and the parent's process id. What the
file prints goes to stderr.
"""

import sys
from multiprocessing.connection import Connection
from typing import Any

from foundling.config.errors import UserError
from foundling.runtime.processes import die_with_parent
from foundling.tasks.base import Example, Grade
from foundling.tasks.in_context import IclTask
from foundling.tasks.registry import ATTRIBUTES, AnyTask, examples_of, graded, run_task_file


class _Tasks:
    """The tasks of one file, and the examples that they have listed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tasks: list[AnyTask] = []
        self._examples: dict[int, dict[str, Example]] = {}

    def load(self) -> list[Any]:
        """Of each task what the parent knows of it: an IclTask is data and goes as it is."""
        self._tasks = run_task_file(self._path)
        return [
            task
            if isinstance(task, IclTask)
            else {name: getattr(task, name) for name in ATTRIBUTES if hasattr(task, name)}
            | {"has_text_prompt": hasattr(task, "text_prompt")}
            for task in self._tasks
        ]

    def examples(self, number: int) -> list[Example]:
        """What a task asks."""
        found = examples_of(self._tasks[number])  # type: ignore[arg-type]
        self._examples[number] = {example.key: example for example in found}
        return list(found)

    def grade(self, number: int, key: str, reply: str) -> Grade:
        """A task's judgement of a reply."""
        return graded(self._tasks[number], self._example(number, key), reply)  # type: ignore[arg-type]

    def text_prompt(self, number: int, key: str) -> str:
        """The question as text."""
        return str(self._tasks[number].text_prompt(self._example(number, key)))  # type: ignore[union-attr]

    def _example(self, number: int, key: str) -> Example:
        if number not in self._examples:
            self.examples(number)
        return self._examples[number][key]


def main(path: str, pipe: Connection, parent: int) -> None:
    """Answer until the parent has no more questions."""
    die_with_parent(parent)
    tasks = _Tasks(path)
    while True:
        try:
            what, words = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("found", getattr(tasks, what)(*words)))
        except UserError as error:
            pipe.send(("refused", str(error)))
        except (Exception, SystemExit) as error:
            pipe.send(("failed", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(sys.argv[1], Connection(int(sys.argv[2])), int(sys.argv[3]))
