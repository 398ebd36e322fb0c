"""One table of verbs. Each imports its room when it runs, so that `--help` and `plan` are instant.

    foundling VERB TARGET [--section.field value ...]

cli/parser.py reads the options of a verb; everything with a dot is a setting and goes to
config/load.py. A user's mistake ends as one sentence on stderr and exit code 2.
"""

import contextlib
import difflib
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

from foundling.cli import bench, data, demo, doctor, eval, model, plan, runs, tokenizer, train
from foundling.cli.options import Verb, print_duration_hint
from foundling.cli.parser import parse
from foundling.config.errors import ConfigError, UserError
from foundling.runtime.versions import __version__

_DEMO = Verb(
    "raise a small model through its whole life",
    demo.OPTIONS,
    lambda options: demo.run(options, run_verb),
    duration_hint=lambda o: "a minute" if o.scale == "tiny" else "about seven minutes on two cores",
)
FAMILIES: tuple[Mapping[str, Verb], ...] = (
    {"demo": _DEMO, **plan.VERBS, **train.VERBS},
    tokenizer.VERBS,
    data.VERBS,
    eval.VERBS,
    model.VERBS,
    runs.VERBS,
    doctor.VERBS,
    bench.VERBS,
)
"""As `foundling --help` lists them, with an empty line between two."""
VERBS = {name: verb for family in FAMILIES for name, verb in family.items()}

_HELP = ("-h", "--help", "help")
_TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)
"""Disk or network errors that may go away: they keep their traceback and exit code 1."""


def main() -> None:
    """The entry point of the command line."""
    _set_passive_omp_wait()
    from foundling.runtime.processes import handle_signals

    is_training = sys.argv[1:2] == ["train"]
    with handle_signals() if is_training else contextlib.nullcontext():
        _end_with("foundling", *_run_and_report_exit(sys.argv[1:]))


def main_of(name: str, verb: Verb) -> None:
    """The entry point of `python -m NAME`, a program outside the package that is one verb."""
    _set_passive_omp_wait()
    run = partial(run_one, name, verb, hint=True)
    _end_with(name, *_run_and_report_exit(sys.argv[1:], run))


def _set_passive_omp_wait() -> None:
    """Set a variable that OpenMP reads when torch is loaded. Threads that spin while they wait
    starve each other as soon as anything else runs: 600 tokens/s instead of 6,900 with one other
    busy process."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _end_with(name: str, code: int, sentence: str) -> NoReturn:
    """End the process with an exit code of runtime/exits.py, and one sentence unless it is 0."""
    from foundling.runtime.exits import write_outcome

    if sentence:
        print(f"{name}: {sentence}", file=sys.stderr)
    write_outcome(code, sentence)
    sys.exit(code)


def _run_and_report_exit(
    argv: Sequence[str], run: Callable[[Sequence[str]], object] | None = None
) -> tuple[int, str]:
    """Run a command line (of a verb, or by `run`); its exit code, and a sentence unless that is 0.
    An unforeseen error keeps its traceback."""
    from foundling.runtime.exits import EndOfRun, Exit
    from foundling.runtime.files import DISK_FULL, full_disk_sentence

    try:
        run(argv) if run else run_verb(argv, hint=True)
        return Exit.OK, ""
    except UserError as error:
        return error.exit_code, str(error)
    except EndOfRun as end:
        return end.code, str(end)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; python must not complain while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK, ""
    except OSError as error:
        if error.errno in DISK_FULL:
            return Exit.UNSAVED, f"{full_disk_sentence(error)}."
        if error.filename is None or error.errno in _TRANSIENT_ERRNOS:
            raise
        return Exit.USER, f"{error.filename}: {error.strerror}."
    except KeyboardInterrupt:
        return Exit.INTERRUPTED, "interrupted; train, demo, eval and data build go on from here."


def run_verb(argv: Sequence[str], *, hint: bool = False) -> None:
    """Run one command line; also how the demo runs its steps. `hint`: print how long it takes."""
    name, rest = _find_verb(argv)
    if name is None:
        return _print_verbs()
    verb = VERBS[name]
    options = parse(verb, f"foundling {name}", rest)
    with print_duration_hint(name, verb, options, hint):
        return verb.run(options)


def run_one(name: str, verb: Verb, argv: Sequence[str], *, hint: bool = False) -> None:
    """Run `python -m NAME`, a program outside the package that is one verb."""
    options = parse(verb, f"python -m {name}", argv)
    with print_duration_hint(name, verb, options, hint):
        verb.run(options)


def _find_verb(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    if not argv or argv[0] in _HELP:
        words = [word for word in argv[1:] if word not in _HELP]
        return _find_verb([*words, "--help"]) if words else (None, [])
    if argv[0] == "--version":
        print(__version__)
        sys.exit(0)
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in VERBS:
            return name, argv[length:]
    family = [name for name in VERBS if name.startswith(argv[0] + " ")]
    if family and {"-h", "--help"} & set(argv[1:2]):
        _print_verbs(family)
        sys.exit(0)
    if family and (not argv[1:] or argv[1].startswith("-")):
        raise ConfigError(f"{argv[0]} needs one of: {', '.join(family)}.")
    from foundling.config.presets import find_preset

    if find_preset(argv[0]):
        tries = f"`foundling train {argv[0]}` or `foundling plan {argv[0]}`"
        raise ConfigError(f"{argv[0]} is a preset, not a verb; try {tries}.")
    given = " ".join(argv[:2]) if family else argv[0]
    raise ConfigError(f"unknown verb {given}; {_nearest(argv, family)}")


def _nearest(argv: Sequence[str], family: Sequence[str]) -> str:
    """Suggests a verb: one with nearly the same spelling, or the same name in another family; else
    lists those that there are."""
    near = difflib.get_close_matches(" ".join(argv[:2]), VERBS, n=1, cutoff=0.8)
    if not near and not family:
        firsts = {name.split()[0]: name for name in VERBS}
        close = difflib.get_close_matches(argv[0], firsts, n=1, cutoff=0.6)
        near = [firsts[word] for word in close]
        near = near or [name for name in VERBS if name.split()[-1:] == list(argv[1:2])]
    if near:
        return f"did you mean {' or '.join(f'`foundling {name}`' for name in near)}?"
    return f"there are {', '.join(family)}." if family else "`foundling --help` lists them."


def _print_verbs(names: Sequence[str] = ()) -> None:
    print("foundling raises a language model from nothing.\n\nusage: foundling VERB [options]")
    for family in FAMILIES:
        if shown := [name for name in family if name in (names or VERBS)]:
            print("\n" + "\n".join(f"  {name:<18} {VERBS[name].help}" for name in shown))
    print(
        "\n`foundling VERB --help` says more; `foundling train --help` lists presets and settings."
    )
