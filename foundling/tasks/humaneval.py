"""Functions to be written, in HumanEval's schema (Chen et al. 2021): prompt, test, entry_point.

A reply is right when the tests pass in the sandbox. A chat's reply may hold a fenced block, with
the whole function or its body alone.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from foundling.tasks.base import Example, Grade
from foundling.tasks.sandbox import run_program
from foundling.tasks.task_files import need, read_rows

_FENCE = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)
ENDS = ("\ndef ", "\nclass ", "\nif __name__", "\nprint(", "\n#")
"""Where a base model has finished the function and goes on to something else."""


class CodeTask:
    """Problems of a file."""

    max_new_tokens = 384

    def __init__(self, name: str, path: Path, seconds: float = 10.0) -> None:
        self.name = name
        self._seconds = seconds
        rows = read_rows(path)
        self._rows = [
            [str(value) for value in need(row, ("prompt", "test", "entry_point"), path, number)]
            for number, row in enumerate(rows)
        ]
        told = "Complete this Python function. Answer with code alone.\n\n"
        self._examples = [
            Example.asked(number, told + prompt, entry, "code", str(row.get("task_id", number)))
            for number, (row, (prompt, _, entry)) in enumerate(zip(rows, self._rows, strict=True))
        ]

    def examples(self) -> Sequence[Example]:
        """Every problem."""
        return self._examples

    def text_prompt(self, example: Example) -> str:
        """What a base model is given to go on from."""
        return self._rows[example.index][0]

    def grade(self, example: Example, reply: str) -> Grade:
        """Right when the tests pass."""
        prompt, test, entry = self._rows[example.index]
        program = f"{program_of(prompt, reply, entry)}\n\n{test}\n\ncheck({entry})\n"
        return Grade(correct=run_program(program, seconds=self._seconds).passed)


def program_of(prompt: str, reply: str, entry: str) -> str:
    """The function that a reply amounts to: on its own, or as the rest of the prompt."""
    fenced = _FENCE.search(reply)
    code = fenced[1] if fenced else reply
    if re.search(rf"^def {re.escape(entry)}\(", code, re.MULTILINE):
        # What stands above the function in the prompt (imports, helpers) stays.
        return prompt.partition(f"def {entry}(")[0] + code
    cut = min((at for end in ENDS if (at := code.find(end)) >= 0), default=len(code))
    return prompt + code[:cut]
