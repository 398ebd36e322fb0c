"""The words after a verb become Options: argparse's parser, its help, and settings with a dot."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from foundling.cli.options import (
    Option,
    Options,
    Verb,
    comma_list,
    count,
    fraction,
    free_text,
    positive,
    positive_float,
    positive_ints,
)
from foundling.config.errors import ConfigError

_METAVARS: dict[Any, str] = {
    count: "N",
    positive: "N",
    positive_ints: "N,N",
    int: "N",
    float: "X",
    positive_float: "X",
    fraction: "X",
    comma_list: "A,B",
    free_text: "TEXT",
    Path: "PATH",
}
"""What the text of an option is called in the help."""


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        for theirs, ours in _ARGPARSE_SENTENCES.items():
            message = re.sub(theirs, ours.format(command=self.prog), message)
        raise ConfigError(f"{message}; see `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = ", ".join(action.choices)
            raise ConfigError(f"{_name_of(action)} must be one of {words}, not {value!r}.")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Our own types complain in sentences that begin with the value: put the flag before it.
        Nothing may be empty but free text: as a path it would be the current folder."""
        if arg_string is argparse.SUPPRESS:  # an argument that was left out
            return arg_string
        name = _name_of(action)
        if not arg_string.strip() and action.type is not free_text:
            raise ConfigError(f"{name} is empty; give it a value or leave it out.")
        try:
            return super()._get_value(action, arg_string)
        except ConfigError as error:
            raise ConfigError(f"{name} {error}") from None


_ARGPARSE_SENTENCES = {
    "the following arguments are required: ": "{command} needs ",
    "unrecognized arguments: ": "{command} does not take ",
    "argument (-. )?(--?[a-z-]+)[^:]*: expected (one|at least one) argument": r"\2 needs a value",
}
"""What argparse says, and what is said here."""


def _name_of(action: argparse.Action) -> str:
    """The option as most people type it, or the argument."""
    return next((o for o in action.option_strings if o.startswith("--")), action.dest)


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


def parse(verb: Verb, command: str, argv: Sequence[str]) -> Options:
    """The words after `command`, a name for help and errors."""
    words, settings = _split_settings(argv, command, verb)
    parser = _parser_of(verb, command)
    if verb.takes_settings:
        _suggest_section(words, verb, command)
        if {"-h", "--help"} & set(words):
            from foundling.config.load import settings_help

            parser.epilog = settings_help(command, every="all" in words)
    try:
        # Intermixed: an option may stand between two words that can both be left out.
        options = parser.parse_intermixed_args(words, Options(settings=settings))
    except ConfigError:
        _refuse_blank(argv, verb)
        raise
    options.given = frozenset(vars(options)) - {"settings"}
    for option in verb.options:
        if option.key not in options.given:
            setattr(options, option.key, option.default_value)
    _refuse_unused(verb, options)
    return options


def _parser_of(verb: Verb, command: str) -> argparse.ArgumentParser:
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
    by_key = {option.key: option for option in verb.options}
    groups = {title: parser.add_argument_group(title) for title in ("arguments", "options")}
    for option in verb.options:
        title = "arguments" if option.is_argument else "options"
        if option.requires and by_key[option.requires].name.startswith("--"):
            title = f"with {by_key[option.requires].name}"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(*option.name.split(), **_for_argparse(option))
    groups["options"].add_argument("-h", "--help", action="help", help="print this and end")
    return parser


def _metavar(option: Option) -> str:
    name = option.key.upper()
    return option.metavar or (name if option.is_argument else _METAVARS.get(option.type, name))


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
    keywords: dict[str, Any] = {"help": text.replace("%", "%%")}
    if not option.is_argument:
        keywords |= {"dest": option.key, "required": option.required}
    if option.type is bool:
        return {**keywords, "action": "store_true"}
    if option.nargs == "append":
        keywords["action"] = "append"
    elif option.nargs:
        keywords["nargs"] = option.nargs
    if isinstance(option.type, tuple):
        keywords["choices"] = option.type
        keywords |= {"const": option.type[0]} if option.nargs == "?" else {}
    else:
        keywords["type"] = option.type
    return {**keywords, "metavar": _metavar(option)}


def _suggest_section(words: Sequence[str], verb: Verb, command: str) -> None:
    """Refuse `--lr` (a setting without its section) and `--learning-rate` (one of another trainer)
    with the setting's name here."""
    own = {name for option in verb.options for name in option.name.split()}
    for word, after in zip(words, [*words[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag not in own:
            from foundling.config.load import suggest_setting

            name, value = flag[2:].replace("-", "_"), value if equals else after
            if suggestion := suggest_setting("", name, value, "--"):
                raise ConfigError(f"{flag} is no option of {command}; {suggestion}")


def _refuse_blank(argv: Sequence[str], verb: Verb) -> None:
    """Refuse a word that a blank has cut off from the value of a setting before it."""
    for key, value, word in zip(argv, argv[1:], argv[2:], strict=False):
        is_setting = key.startswith("--") and "." in key and "=" not in key
        if verb.takes_settings and is_setting and not word.startswith("-"):
            raise ConfigError(
                f"{word} stands alone after {key} {value}; quote values with blanks:"
                f' {key} "{value} {word}".'
            )


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


def _refuse_unused(verb: Verb, options: Options) -> None:
    """Refuse what was typed and has no effect with, or without, another option."""
    by_key = {option.key: option for option in verb.options}
    typed = [option for option in verb.options if option.key in options.given]
    for option in typed:
        if option.requires and option.requires not in options.given:
            name = by_key[option.requires].label
            raise ConfigError(f"{option.label} has no effect without {name}; give {name} too.")
    for option in (option for option in typed if option.only_with is not None):
        takes = (*(option.only_with or ()), option.key)
        others = [one for one in typed if not one.is_mandatory and one.requires != option.key]
        idle = [_typed(one, options) for one in others if one.key not in takes]
        idle += [f"--{name}" for name in options.settings if "settings" not in takes]
        if idle:
            raise ConfigError(
                f"{idle[0]} has no effect with {option.label}; leave one of them out."
            )


def _typed(option: Option, options: Options) -> str:
    """The name of an option, or the name and the text of an argument."""
    value = getattr(options, option.key)
    first = value[0] if isinstance(value, list) else value
    return f"{option.label} {first}" if option.is_argument else option.label
