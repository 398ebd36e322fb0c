"""Checks in a child process: `python -m foundling.doctor.task NAMES...`, the question on stdin.

A task is a module with `check(asked, notes)`, which gives lines. Before each thing that may hang or
die it calls `notes.begins(what)`, so that its parent knows what it died of, tells that in a line,
and starts another child for the rest.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence

from foundling.config.errors import UserError
from foundling.doctor.asked import Asked
from foundling.doctor.lines import Line, failed, refused
from foundling.runtime.children import Ended, run_child, tie_to_parent

ABOUT_THE_MACHINE = ("kernels", "health")
"""A child that dies in one of these says something about the machine and nothing about settings."""
BEGINS, SAYS = "@begins ", "@says "
MOST_CHILDREN = 12
Start = Callable[[Asked], Ended]


class Notes:
    """What a child tells its parent while it works."""

    def __init__(self, asked: Asked, out: Callable[[str], object], task: str = "") -> None:
        self._skip, self._out, self._task = asked.skip, out, task

    def begins(self, what: str) -> bool:
        """Say what comes next; False if another child has done it already, or died of it."""
        what = f"{self._task}: {what}"
        if what in self._skip:
            return False
        self._out(BEGINS + what)
        return True

    def says(self, line: Line) -> None:
        """A finding."""
        self._out(SAYS + json.dumps(line.to_json()))


def examined(
    names: Sequence[str], asked: Asked, env: Mapping[str, str] | None = None
) -> Iterator[Line]:
    """The lines of some tasks, and one for each thing that their child did not survive."""

    def start(question: Asked) -> Ended:
        return run_child(
            ["-m", "foundling.doctor.task", *names],
            limit_s=asked.limit_s,
            env=env,
            given=question.to_json(),
            talks=True,
        )

    yield from tried(asked, start)


def tried(asked: Asked, start: Start) -> Iterator[Line]:
    """As `examined`, whoever starts the children."""
    for _ in range(MOST_CHILDREN):
        ended = start(asked)
        begun, lines = read_notes(ended.out)
        yield from lines
        if ended.is_good:
            return
        name, _, what = (begun[-1] if begun else "doctor: its start").partition(": ")
        yield failed(
            name,
            f"{what}: {ended.reason}; {_remedy(name, ended)}",
            of_node=name in ABOUT_THE_MACHINE,
        )
        if not begun:
            return
        asked = asked.without(*begun)


def _remedy(name: str, ended: Ended) -> str:
    if ended.code is None:
        return "raise --limit if it is only slow, or look at the machine's log (dmesg)."
    if name in ABOUT_THE_MACHINE:
        return "install the torch build that fits this driver and processor, or leave the node out."
    return "read the lines above it on stderr with `python -X faulthandler`."


def read_notes(text: str) -> tuple[list[str], list[Line]]:
    """What a child has begun, and what it has found; everything else on its stdout is noise."""
    begun, lines = [], []
    for word in text.splitlines():
        if word.startswith(BEGINS):
            begun.append(word.removeprefix(BEGINS))
        elif word.startswith(SAYS):
            lines.append(Line.from_json(json.loads(word.removeprefix(SAYS))))
    return begun, lines


def main() -> None:
    """Be the child."""
    tie_to_parent()
    asked = Asked.from_json(sys.stdin.read())
    for name in sys.argv[1:]:
        _work(name, asked, Notes(asked, lambda text: print(text, flush=True), name))


def _work(name: str, asked: Asked, notes: Notes) -> None:
    module = importlib.import_module(f"foundling.doctor.{name}")
    try:
        for line in module.check(asked, notes):
            notes.says(line)
    except UserError as error:
        notes.says(refused(name, error))
    except Exception as error:
        traceback.print_exc()
        notes.says(failed(name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}."))


if __name__ == "__main__":
    main()
