"""One table of verbs. Each imports its room when it runs, so that `--help` and `plan` are instant.

    foundling VERB TARGET [--section.field value ...]

Options of a verb are parsed by argparse; everything with a dot is a setting and goes to
config/load.py. A user's mistake ends as one sentence on stderr and exit code 2.
"""

import argparse
import contextlib
import difflib
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from foundling.cli import bench, data, doctor, eval, model, plan, runs, tokenizer, train
from foundling.cli.options import (
    METAVARS,
    Option,
    Options,
    Verb,
    free_text,
    print_duration_hint,
    refuse_idle,
)
from foundling.config.errors import ConfigError, UserError
from foundling.runtime.versions import __version__

_DEMO_OPTIONS = (
    Option("--scale", "tiny takes a minute", ("full", "tiny"), "full"),
    Option("--seed", "seed of the village and the training", int, 1),
    Option("--folder", "where (default: runs/demo-[tiny-]SEED)", Path),
    Option("--serve", "then open the page to talk to it", bool),
)


def _demo(options: Options) -> None:
    from foundling.cli.demo import walk

    name = f"demo-{options.seed}" if options.scale == "full" else f"demo-tiny-{options.seed}"
    folder = options.folder or Path("runs") / name
    walk(folder, options.scale, options.seed, run_verb)
    if options.serve:
        run_verb(["serve", str(folder / "finetune"), "--open"])


_DEMO = Verb(
    "raise a small model through its whole life",
    _DEMO_OPTIONS,
    _demo,
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

_PASSING_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)
"""Trouble of a disk or a network that passes, and no mistake of the user's."""


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`.")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Our own types complain in sentences that begin with the value: put the flag before it.
        Nothing may be empty but free text: as a path it would be the current folder."""
        name = action.option_strings[-1] if action.option_strings else action.dest
        if not arg_string.strip() and action.type is not free_text:
            raise ConfigError(f"{name} is empty; give it a value or leave it out.")
        try:
            return super()._get_value(action, arg_string)
        except ConfigError as error:
            raise ConfigError(f"{name} {error}") from None


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves our table of settings as it is, and says once what an option's text is called."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return (
            f"{', '.join(action.option_strings)} {self._format_args(action, str(action.metavar))}"
        )


def main() -> None:
    """The entry point of the command line."""
    _set_passive_omp_wait()
    from foundling.runtime.processes import listening

    is_training = sys.argv[1:2] == ["train"]
    with listening() if is_training else contextlib.nullcontext():
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
    from foundling.runtime.files import NO_ROOM, full_disk_sentence

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
        if error.errno in NO_ROOM:
            return Exit.UNSAVED, f"{full_disk_sentence(error)}."
        if error.filename is None or error.errno in _PASSING_ERRORS:
            raise
        return Exit.USER, f"{error.filename}: {error.strerror}."
    except KeyboardInterrupt:
        return Exit.INTERRUPTED, "interrupted; train, demo, eval and data build go on from here."


def run_verb(argv: Sequence[str], *, hint: bool = False) -> int:
    """Run one command line; also how the demo runs its steps. `hint`: print how long it takes."""
    name, rest = _find_verb(argv)
    if name is None:
        _print_verbs()
        return 0
    verb = VERBS[name]
    options = parsed(verb, f"foundling {name}", rest)
    with print_duration_hint(name, verb, options) if hint else contextlib.nullcontext():
        verb.run(options)
    return 0


def run_one(name: str, verb: Verb, argv: Sequence[str], *, hint: bool = False) -> None:
    """Run `python -m NAME`, a program outside the package that is one verb."""
    options = parsed(verb, f"python -m {name}", argv)
    with print_duration_hint(name, verb, options) if hint else contextlib.nullcontext():
        verb.run(options)


def parsed(verb: Verb, command: str, argv: Sequence[str]) -> Options:
    """The words after `command`, a name for help and errors."""
    words, settings = _split_settings(argv, command, verb)
    parser = parser_of(verb, command)
    if verb.takes_settings:
        _suggest_section(words, parser)
        if {"-h", "--help"} & set(words):
            from foundling.config.load import settings_help

            parser.epilog = settings_help(command, every="all" in words)
    # Intermixed: an option may stand between two words that can both be left out.
    options = parser.parse_intermixed_args(words, Options(settings=settings))
    options.given = frozenset(vars(options)) - {"settings"}
    for option in verb.options:
        if option.key not in options.given:
            setattr(options, option.key, option.unset)
    refuse_idle(verb, options)
    return options


def parser_of(verb: Verb, command: str) -> argparse.ArgumentParser:
    """argparse's parser of a verb; what was not typed has no value in what it finds."""
    needed = [f"{o.name.split()[0]} {_metavar(o)}" for o in verb.options if o.required]
    arguments = [_usage(option) for option in verb.options if option.is_argument]
    more = ["[--section.field VALUE ...]"] if verb.takes_settings else []
    parser = _Parser(
        prog=command,
        usage=" ".join([command, *arguments, *needed, "[options]", *more]),
        description=verb.help,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    groups = {title: parser.add_argument_group(title) for title in ("arguments", "options")}
    for option in verb.options:
        title = "arguments" if option.is_argument else "options"
        if option.needs in (one.key for one in verb.options if one.takes is not None):
            title = f"with --{option.needs.replace('_', '-')}"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(*option.name.split(), **_for_argparse(option))
    groups["options"].add_argument("-h", "--help", action="help", help="print this and end")
    return parser


def _metavar(option: Option) -> str:
    name = option.key.upper()
    return option.metavar or (name if option.is_argument else METAVARS.get(option.type, name))


def _usage(option: Option) -> str:
    name = option.key.upper()
    many = f"{name} ..." if option.nargs in ("+", "*") else name
    return f"[{many}]" if option.nargs in ("?", "*") else many


def _for_argparse(option: Option) -> dict[str, Any]:
    """The keywords of `add_argument`."""
    notes = [", ".join(option.type)] if isinstance(option.type, tuple) else []
    if option.default not in (None, ""):
        default = option.default
        notes.append(f"default: {f'{default:g}' if isinstance(default, float) else default}")
    text = f"{option.help} ({'; '.join(notes)})" if notes else option.help
    told: dict[str, Any] = {"help": text.replace("%", "%%")}
    if not option.is_argument:
        told |= {"dest": option.key, "required": option.required}
    if option.type is bool:
        return {**told, "action": "store_true"}
    if option.nargs == "append":
        told["action"] = "append"
    elif option.nargs:
        told["nargs"] = option.nargs
    if isinstance(option.type, tuple):
        told["choices"] = option.type
        told |= {"const": option.type[0]} if option.nargs == "?" else {}
    else:
        told["type"] = option.type
    return {**told, "metavar": _metavar(option)}


def _suggest_section(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse `--lr` (a setting without its section) and `--learning-rate` (one of another trainer)
    with the setting's name here."""
    own = {flag for action in parser._actions for flag in action.option_strings}
    for word, after in zip(words, [*words[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag not in own:
            from foundling.config.load import suggest_setting

            name, value = flag[2:].replace("-", "_"), value if equals else after
            if suggestion := suggest_setting("", name, value, "--"):
                raise ConfigError(f"{flag} is no option of {parser.prog}; {suggestion}")


def _find_verb(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    if not argv or argv[0] in ("-h", "--help", "help"):
        return None, []
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


def _split_settings(
    argv: Sequence[str], command: str, verb: Verb
) -> tuple[list[str], dict[str, str]]:
    """Options of the verb, and settings (--section.field value); dashes and underscores alike."""
    words: list[str] = []
    settings: dict[str, str] = {}
    rest = iter(argv)
    for word in rest:
        key, equals, value = word.partition("=")
        if not word.startswith("--"):
            words.append(word)
        elif "." not in key:
            words.append("--" + key[2:].replace("_", "-") + equals + value)
        elif not verb.takes_settings:
            raise ConfigError(f"`{command}` takes no settings, and {key} is one.")
        else:
            given = value if equals else next(rest, None)
            if given is None:
                raise ConfigError(f"{key} needs a value.")
            name = key[2:].replace("-", "_")
            if name in settings:
                raise ConfigError(f"{key} is given twice; give it once.")
            settings[name] = given
    return words, settings


def _print_verbs(names: Sequence[str] = ()) -> None:
    print("foundling raises a language model from nothing.\n\nusage: foundling VERB [options]")
    for family in FAMILIES:
        shown = [name for name in family if name in (names or VERBS)]
        print("\n" * bool(shown) + "\n".join(f"  {n:<18} {VERBS[n].help}" for n in shown))
    print("\n`foundling VERB --help` says more.")
