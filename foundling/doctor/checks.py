"""Checks of the doctor: the request, the results, and the child process in which they run."""

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from foundling.config.errors import UserError
from foundling.config.run import RunConfig
from foundling.runtime.exits import Exit
from foundling.runtime.processes import ChildResult, run_child, tie_to_parent

LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """One question to the doctor."""

    config: str = ""
    """The resolved config as JSON; empty: only the machine is looked at."""
    run: str = ""
    """Run directory, which need not exist; empty: none is known."""
    device: str = "auto"
    dtype: str = "auto"
    local_rank: int = 0
    neighbours: int = 1
    """Processes of the job on this machine."""
    thorough: bool = False
    """Hash every shard and every checkpoint."""
    is_main: bool = True
    """Whether this process looks at what all nodes share."""
    limit_s: float = LIMIT_S
    """Seconds for each check that may hang."""
    skip: tuple[str, ...] = ()
    """What a child is not to try again, because the one before died of it."""

    def run_config(self) -> RunConfig | None:
        """The target's config, if there is a target."""
        return RunConfig.model_validate_json(self.config) if self.config else None

    def without(self, *done: str) -> "DoctorRequest":
        """The same question but for what is done."""
        return replace(self, skip=(*self.skip, *done))

    def to_json(self) -> str:
        """For a child's standard input."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "DoctorRequest":
        """The inverse of to_json."""
        tree = json.loads(text)
        return cls(**{**tree, "skip": tuple(tree["skip"])})


def asked_about(config: RunConfig | None, run: Path | None = None, **more: object) -> DoctorRequest:
    """A question about a target, or about the machine alone."""
    train = config.train if config else None
    fields = {
        "config": config.model_dump_json() if config else "",
        "run": str(run) if run else "",
        "device": train.device if train else "auto",
        "dtype": train.dtype if train else "auto",
        **more,
    }
    return DoctorRequest(**fields)  # type: ignore[arg-type]


# What the doctor says: a line a finding, each with its level and, unless it passes, the remedy.

Level = Literal["pass", "warn", "fail"]
Facts = Mapping[str, Any]
NONE: Facts = {}
LEVELS: tuple[Level, ...] = ("pass", "warn", "fail")


@dataclass(frozen=True)
class CheckResult:
    """One finding."""

    check: str
    """What was looked at, in a word or two."""
    level: Level
    text: str
    """What was found; of a warning or a failure also what to do."""
    of_node: bool = False
    """A failure of this machine, which no setting repairs: a job is better off without it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The measured numbers, for scripts."""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.check:<14} {self.text}"


def passed(check: str, text: str, facts: Facts = NONE) -> CheckResult:
    """Nothing to do."""
    return CheckResult(check, "pass", text, facts=dict(facts))


def warned(check: str, text: str, facts: Facts = NONE) -> CheckResult:
    """It will work, and the owner would want to know."""
    return CheckResult(check, "warn", text, facts=dict(facts))


def failed(check: str, text: str, facts: Facts = NONE, *, of_node: bool = False) -> CheckResult:
    """It will not work."""
    return CheckResult(check, "fail", text, of_node=of_node, facts=dict(facts))


def refused(check: str, error: UserError) -> CheckResult:
    """A refusal in its own words."""
    return failed(check, str(error))


def worst(lines: Iterable[CheckResult]) -> Level:
    """The highest level among them."""
    return max((line.level for line in lines), key=LEVELS.index, default="pass")


def gathered(by_rank: Sequence[tuple[str, Sequence[CheckResult]]]) -> list[str]:
    """The lines of all ranks, each with its ranks; lines that all have are printed once.

    `by_rank` has a name for each rank ("rank 3 on n17") and its lines.
    """
    whose: dict[tuple[str, Level, str], list[str]] = {}
    for name, lines in by_rank:
        for line in lines:
            whose.setdefault((line.check, line.level, line.text), []).append(name)
    found = []
    for (check, level, text), names in whose.items():
        if len(names) == len(by_rank):
            suffix = f" (all {len(names)} ranks)" if len(names) > 1 else ""
        else:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            suffix = f" ({', '.join(names[:3])}{more})" if len(by_rank) > 1 else ""
        found.append(str(CheckResult(check, level, text + suffix)))
    return found


def results_json(by_rank: Sequence[tuple[str, Sequence[CheckResult]]]) -> dict[str, Any]:
    """The lines of all ranks and the worst level, for scripts."""
    return {
        "level": worst(line for _, lines in by_rank for line in lines),
        "ranks": [
            {"who": who, "lines": [asdict(line) for line in lines]} for who, lines in by_rank
        ],
    }


def verdict_of(lines: Sequence[CheckResult], *, is_job: bool) -> tuple[int, str]:
    """Exit code and last sentence: 71 where a machine of a job is unfit, 2 for the rest."""
    bad = [line for line in lines if line.level == "fail"]
    if not bad:
        return Exit.OK, ""
    plural = "s" if len(bad) > 1 else ""
    sentence = f"{len(bad)} check{plural} failed: {', '.join(dict.fromkeys(b.check for b in bad))}."
    of_node = is_job and any(line.of_node for line in bad)
    return Exit.NODE if of_node else Exit.USER, sentence


# Checks in a child process: `python -m foundling.doctor.checks NAMES...`, the question on stdin.
#
# A task is a module with `check(asked, notes)`, which gives lines. Before each thing that may hang
# or die it calls `notes.begins(what)`, so that its parent knows what it died of, tells that in a
# line, and starts another child for the rest.

ABOUT_THE_MACHINE = ("kernels", "health")
"""A child that dies in one of these says something about the machine and nothing about settings."""
BEGINS, SAYS = "@begins ", "@says "
MOST_CHILDREN = 12
Start = Callable[[DoctorRequest], ChildResult]


class Notes:
    """What a child tells its parent while it works."""

    def __init__(self, asked: DoctorRequest, out: Callable[[str], object], task: str = "") -> None:
        self._skip, self._out, self._task = asked.skip, out, task

    def begins(self, what: str) -> bool:
        """Say what comes next; False if another child has done it already, or died of it."""
        what = f"{self._task}: {what}"
        if what in self._skip:
            return False
        self._out(BEGINS + what)
        return True

    def says(self, line: CheckResult) -> None:
        """A finding."""
        self._out(SAYS + json.dumps(asdict(line)))


def examined(
    names: Sequence[str], asked: DoctorRequest, env: Mapping[str, str] | None = None
) -> Iterator[CheckResult]:
    """The lines of some tasks, and one for each thing that their child did not survive."""

    def start(question: DoctorRequest) -> ChildResult:
        return run_child(
            ["-m", "foundling.doctor.checks", *names],
            limit_s=asked.limit_s,
            env=env,
            stdin=question.to_json(),
            output_extends_limit=True,
        )

    yield from tried(asked, start)


def tried(asked: DoctorRequest, start: Start) -> Iterator[CheckResult]:
    """As `examined`, with any way of starting the children."""
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


def _remedy(name: str, ended: ChildResult) -> str:
    if ended.code is None:
        return "raise --limit if it is only slow, or look at the machine's log (dmesg)."
    if name in ABOUT_THE_MACHINE:
        return "install the torch build that fits this driver and processor, or leave the node out."
    return "read the lines above it on stderr with `python -X faulthandler`."


def read_notes(text: str) -> tuple[list[str], list[CheckResult]]:
    """What a child has begun, and what it has found; everything else on its stdout is noise."""
    begun, lines = [], []
    for word in text.splitlines():
        if word.startswith(BEGINS):
            begun.append(word.removeprefix(BEGINS))
        elif word.startswith(SAYS):
            lines.append(CheckResult(**json.loads(word.removeprefix(SAYS))))
    return begun, lines


def main() -> None:
    """Be the child."""
    tie_to_parent()
    asked = DoctorRequest.from_json(sys.stdin.read())
    for name in sys.argv[1:]:
        _work(name, asked, Notes(asked, lambda text: print(text, flush=True), name))


CHECKS = {
    "kernels": ("foundling.doctor.gpu_checks", "check_kernels"),
    "health": ("foundling.doctor.gpu_checks", "check_health"),
    "disk": ("foundling.doctor.storage", "check_disk"),
    "stored": ("foundling.doctor.storage", "check_stored"),
    "trial": ("foundling.doctor.short_run", "check"),
}
"""Where each check is; imported in the child, so that a crash at import is the child's."""


def _work(name: str, asked: DoctorRequest, notes: Notes) -> None:
    module, function = CHECKS[name]
    check = getattr(importlib.import_module(module), function)
    try:
        for line in check(asked, notes):
            notes.says(line)
    except UserError as error:
        notes.says(refused(name, error))
    except Exception as error:
        traceback.print_exc()
        notes.says(failed(name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}."))


if __name__ == "__main__":
    main()
