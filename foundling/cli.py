"""One table of verbs. Each imports its room when it runs, so that `--help` and `plan` are instant.

    foundling VERB TARGET [--section.field value ...]

Options of a verb are argparse's; everything with a dot is a setting and goes to config/resolve.py.
A user's mistake ends as one sentence on stderr and exit code 2.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from foundling.config.errors import ConfigError, UserError
from foundling.verbs import FILE_VERBS
from foundling.verbs.base import (
    Options,
    Settings,
    Verb,
    above_zero,
    listed,
    positive,
    positives,
    print_json,
)

if TYPE_CHECKING:
    from foundling.plan.report import Question

SUFFIXES = (".yaml", ".yml")


class _Parser(argparse.ArgumentParser):
    """argparse that complains in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`.")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Our own types complain in sentences that begin with the value: put the flag before it."""
        try:
            return super()._get_value(action, arg_string)
        except ConfigError as error:
            name = action.option_strings[-1] if action.option_strings else action.dest
            raise ConfigError(f"{name} {error}") from None


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="preset, YAML file, or run directory")


def _hardware_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", help="hardware to plan for, such as h200; several: h100,h200")
    parser.add_argument("--gpus", type=positive, help="GPUs of a node (default: the usual number)")
    parser.add_argument("--price", type=above_zero, help="dollars an hour for one GPU")
    parser.add_argument("--provider", help="take this one's prices, of providers in hardware.yaml")
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "adamw-8bit", "muon"),
        help="whose state and time to plan (default: adamw, which training has)",
    )


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    _hardware_options(parser)
    parser.add_argument("--nodes", type=positives, help="nodes; several are compared: 1,8,64,640")
    parser.add_argument(
        "--what-if", action="append", default=[], metavar="NAME=A,B", help="compare values"
    )
    parser.add_argument(
        "--probe", action="store_true", help="take a few real steps here and compare"
    )
    parser.add_argument(
        "--probe-minutes", type=above_zero, help="longest that the steps may take (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def _plan(options: Options, settings: Settings) -> None:
    from foundling.plan.report import answer, answer_json

    if options.probe:
        return _probe(options, settings)
    if options.probe_minutes:
        raise ConfigError("--probe-minutes has no effect without --probe; give both or none.")
    question = _question(
        options, settings, nodes=options.nodes or (), what_if=tuple(options.what_if)
    )
    if options.json:
        return print_json(answer_json(question))
    for line in answer(question):
        print(line)
    return None


def _probe(options: Options, settings: Settings) -> None:
    from foundling.config.resolve import resolve

    for name in ("gpu", "gpus", "nodes", "price", "provider", "optimizer", "what_if"):
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --probe, which takes AdamW's steps"
                " on the device at hand; leave one of them out."
            )
    config = resolve(options.target, settings)
    from foundling.train.check_plan import check_plan

    check_plan(config, as_json=options.json, minutes=options.probe_minutes or 5.0)


def _question(options: Options, settings: Settings, **more: Any) -> "Question":
    """What plan and config ask alike."""
    from foundling.config.resolve import resolve
    from foundling.plan.report import Question

    return Question(
        resolved=lambda changes: resolve(options.target, {**settings, **changes}),
        gpus=tuple(listed(options.gpu)),
        per_node=options.gpus,
        price=options.price,
        provider=options.provider or "",
        optimizer=options.optimizer or "adamw",
        fingerprint=_fingerprint,
        **more,
    )


def _fingerprint(folder: Path) -> str:
    from foundling.tokenizer import Tokenizer

    return Tokenizer.load(folder).fingerprint


def _config_options(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    _hardware_options(parser)
    parser.add_argument("--nodes", type=positive, help="nodes")
    parser.add_argument("-o", "--output", type=Path, help="file to write; the screen if left out")
    parser.add_argument("--force", action="store_true", help="-o: overwrite a file that is there")


def _config(options: Options, settings: Settings) -> None:
    from foundling.config.commented import dump_commented
    from foundling.plan.report import decide
    from foundling.runtime.files import write_text_atomic

    _check_config_options(options)
    nodes = (options.nodes,) if options.nodes else ()
    config, notes = decide(_question(options, settings, nodes=nodes))
    text = dump_commented(config, notes)
    if options.output:
        return write_text_atomic(options.output, text)
    print(text, end="")
    return None


def _check_config_options(options: Options) -> None:
    """Refuse what has no effect, and what would write over something or somewhere new."""
    if len(listed(options.gpu)) > 1:
        raise ConfigError(f"--gpu {options.gpu} names several; a config is written for one.")
    if options.optimizer and not options.gpu:
        raise ConfigError("--optimizer has no effect without hardware; give --gpu NAME too.")
    path: Path | None = options.output
    if path is None:
        if options.force:
            raise ConfigError("--force has no effect without -o; give -o FILE too.")
    elif path.exists() and path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} exists and is no YAML file; give another name.")
    elif path.exists() and not options.force:
        raise ConfigError(f"{path} exists; give another name, or --force to overwrite it.")
    elif not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder; make it first or give another name.")


def _train_options(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    # The second name is for torchrun, which takes --run for an abbreviation of its own --run-path.
    parser.add_argument(
        "--run", "--run-dir", type=Path, help="run directory (default: runs/TARGET)"
    )
    parser.add_argument("--dev", type=int, metavar="N", help="rehearse N steps at a small batch")


def _train(options: Options, settings: Settings) -> None:
    from foundling.config.resolve import resolve, shrink
    from foundling.runtime.log import say
    from foundling.runtime.rundir import RunDir
    from foundling.train.loop import train

    config = resolve(options.target, settings)
    folder = options.run or _default_run(options.target)
    if options.dev is not None:
        config, said = shrink(config, options.dev)
        folder = options.run or folder.with_name(folder.name + "-dev")
        say(f"--dev {options.dev}: {said}")
    train(config, RunDir(folder))


def _default_run(target: str) -> Path:
    path = Path(target)
    home = path if path.is_dir() else path.parent
    return home if (home / "run.json").is_file() else Path("runs") / path.stem


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="tiny: a minute")
    parser.add_argument("--seed", type=int, default=1, help="seed of the village and the training")
    parser.add_argument("--folder", type=Path, help="where (default: runs/demo-[tiny-]SEED)")


def _demo(options: Options, settings: Settings) -> None:
    from foundling.demo import walk

    name = f"demo-{options.seed}" if options.scale == "full" else f"demo-tiny-{options.seed}"
    walk(options.folder or Path("runs") / name, options.scale, options.seed, run_verb)


VERBS: dict[str, Verb] = {
    "demo": Verb("raise a small model through its whole life", _demo_options, _demo),
    "plan": Verb("what a run is, needs, takes and costs", _plan_options, _plan, True),
    "config": Verb("write the resolved config as YAML", _config_options, _config, True),
    "train": Verb("pretrain or fine-tune; continues a run", _train_options, _train, True),
    **FILE_VERBS,
}


def main() -> None:
    """The entry point: exit code 0, or 2 and one sentence."""
    # Read by OpenMP when torch is loaded. Threads that spin while they wait starve each other as
    # soon as anything else runs: 600 tokens/s instead of 6,900 beside one busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        sys.exit(run_verb(sys.argv[1:]))
    except UserError as error:
        print(f"foundling: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; python must not complain while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"foundling: {error.filename}: {error.strerror}.", file=sys.stderr)
        sys.exit(UserError.exit_code)
    except KeyboardInterrupt:
        print(
            "\nfoundling: interrupted; train, demo and data build go on from here.", file=sys.stderr
        )
        sys.exit(130)


def run_verb(argv: Sequence[str]) -> int:
    """Run one command line; also how the demo runs its steps."""
    name, rest = _find_verb(argv)
    if name is None:
        _print_verbs()
        return 0
    verb = VERBS[name]
    words, settings = _split_settings(rest, name, verb)
    parser = _Parser(
        prog=f"foundling {name}",
        description=verb.help,
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    verb.add_options(parser)
    if verb.takes_settings:
        _suggest_section(words, parser)
        if {"-h", "--help"} & set(words):
            from foundling.config.settings_help import settings_help

            parser.epilog = settings_help()
    verb.run(parser.parse_args(words), settings)
    return 0


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults beside the options, and our table of settings left as it is."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """No default is none to tell."""
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def _suggest_section(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """`--lr` is a setting without its section: say which."""
    from dataclasses import fields

    from foundling.config.sections import RunConfig

    own = {flag for action in parser._actions for flag in action.option_strings}
    for word in words:
        flag = word.partition("=")[0]
        if not flag.startswith("--") or flag in own:
            continue
        for section in fields(RunConfig):
            if flag[2:].replace("-", "_") in {f.name for f in fields(section.type)}:  # type: ignore[arg-type]
                raise ConfigError(f"{flag} is a setting; write --{section.name}.{flag[2:]}.")


def _find_verb(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    if not argv or argv[0] in ("-h", "--help", "help"):
        return None, []
    if argv[0] == "--version":
        import foundling

        print(foundling.__version__)
        sys.exit(0)
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in VERBS:
            return name, argv[length:]
    family = [name for name in VERBS if name.startswith(argv[0] + " ")]
    if family and {"-h", "--help"} & set(argv[1:2]):
        _print_verbs(family)
        sys.exit(0)
    if family:
        raise ConfigError(f"{argv[0]} needs one of: {', '.join(family)}.")
    firsts = {name.split()[0]: name for name in VERBS}
    close = difflib.get_close_matches(argv[0], firsts, n=1, cutoff=0.6)
    hint = f"did you mean `foundling {close[0]}`?" if close else "`foundling --help` lists them."
    raise ConfigError(f"unknown verb {argv[0]}; {hint}")


def _split_settings(argv: Sequence[str], name: str, verb: Verb) -> tuple[list[str], dict[str, str]]:
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
            raise ConfigError(f"`foundling {name}` takes no settings, and {key} is one.")
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
    print("foundling raises a language model from nothing.\n\nusage: foundling VERB [options]\n")
    for name in names or VERBS:
        print(f"  {name:<18} {VERBS[name].help}")
    print("\n`foundling VERB --help` says more.")


if __name__ == "__main__":
    main()
