"""`foundling runs ...` and `report`: what run directories say."""

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.config.errors import RunError
from foundling.verbs.base import (
    Options,
    Settings,
    Verb,
    above_zero,
    check_force,
    count,
    file_options,
    listed,
    positive,
    print_json,
)

if TYPE_CHECKING:
    from foundling.report import BinWidth


def _bin_widths(text: str) -> "list[BinWidth]":
    """100k,10M (tokens) or 100steps,15000steps."""
    from foundling.report import BinWidth

    found = []
    for word in listed(text):
        size = word.removesuffix("steps")
        found.append(BinWidth(positive(size), "tokens" if size == word else "steps"))
    return found


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", type=Path, help="run directories")
    file_options(parser, "file (default: RUN/report.html, which is always replaced)")
    parser.add_argument(
        "--bins",
        type=_bin_widths,
        default=(),
        metavar="WIDTHS",
        help="tokens or steps that a point of the loss stands for, one chart each:"
        " 100k,10M,15000steps",
    )


def _report(options: Options, settings: Settings) -> None:
    from foundling.report import write_report
    from foundling.runtime.rundir import RunDir

    check_force(options)
    runs = [RunDir(path).require() for path in options.run]
    print(write_report(runs, options.output, options.bins, force=options.force))


def _list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="where to look")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _folder(options: Options) -> Path:
    """The folder that was named; a slip in its name is not an empty one."""
    folder: Path = options.folder
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; give the one that holds your runs.")
    return folder


def _list(options: Options, settings: Settings) -> None:
    from foundling.report import list_runs

    runs = list_runs(_folder(options))
    if options.json:
        return print_json(runs)
    if not runs:
        print(f"no runs in {options.folder}")
    for run in runs:
        print(f"{run['status']:<10} {run['stage']:<9} step {run['step']:<8} {run['path']}")
    return None


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _show(options: Options, settings: Settings) -> None:
    from foundling.report import describe_run, show_run
    from foundling.runtime.rundir import RunDir

    shown = show_run(RunDir(options.run).require())
    if options.json:
        return print_json(shown)
    for line in describe_run(shown):
        print(line)
    return None


def _tree(options: Options, settings: Settings) -> None:
    from foundling.report import draw_tree, lineage

    runs = lineage(_folder(options))
    if options.json:
        return print_json(runs)
    if not runs:
        print(f"no runs in {options.folder}")
    for line in draw_tree(runs):
        print(line)
    return None


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", type=Path, help="run directories, two or more")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _compare(options: Options, settings: Settings) -> None:
    from foundling.report import compare_runs, describe_comparison

    found = compare_runs(options.run)
    if options.json:
        return print_json(found)
    for line in describe_comparison(found):
        print(line)
    return None


def _attach_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory")


def _attach(options: Options, settings: Settings) -> None:
    from foundling.launch.detach import attach

    attach(options.run)


def _stop_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--wait", type=above_zero, default=600.0, help="seconds to wait for it")
    parser.add_argument(
        "--kill", action="store_true", help="end it without a save if it does not stop by then"
    )


def _stop(options: Options, settings: Settings) -> None:
    from foundling.launch.detach import stop

    print(stop(options.run, options.wait, options.kill))


def _logs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--rank", type=count, default=0, help="whose output")
    parser.add_argument("--follow", action="store_true", help="and what is added to it")


def _logs(options: Options, settings: Settings) -> None:
    from foundling.launch.detach import show_log

    show_log(options.run, options.rank, options.follow)


def _pull_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="HOST:RUN")
    parser.add_argument("folder", nargs="?", type=Path, help="where to (default: runs)")


def _pull(options: Options, settings: Settings) -> None:
    from foundling.launch.transfer import parse_remote, pull

    print(pull(parse_remote(options.source), options.folder))


def _push_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("target", help="HOST:FOLDER; the run keeps its name in it")


def _push(options: Options, settings: Settings) -> None:
    from foundling.launch.transfer import parse_remote, push

    print(push(options.run, parse_remote(options.target)))


def _rm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", type=Path, help="run directories")


def _rm(options: Options, settings: Settings) -> None:
    from foundling.launch.trash import throw_away

    for run in options.run:
        where = shlex.quote(os.path.abspath(run))
        print(f"{run} is in {throw_away(run)}; `foundling runs restore {where}` brings it back")


def _restore_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="where the run was, its name, or its trash folder")
    parser.add_argument("--folder", type=Path, help="where the trash is (default: beside the run)")


def _restore(options: Options, settings: Settings) -> None:
    from foundling.launch.trash import TRASH, restore

    beside = options.run.parent
    if beside == Path(".") and not any(Path(TRASH).glob(f"{options.run.name}--*")):
        beside = Path("runs")  # a name alone
    print(restore(options.run, options.folder or beside))


def _trash_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=("list", "empty"), default="list", help="what to do"
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="whose trash")
    parser.add_argument("--older-than", metavar="AGE", help="empty: such as 30d, 12h")
    parser.add_argument("--finished", action="store_true", help="empty: finished runs too")


def _trash(options: Options, settings: Settings) -> None:
    from foundling.launch.trash import age, empty_trash, list_trash

    if options.action == "list":
        entries = list_trash(options.folder)
        for entry in entries:
            print(f"{entry.status:<10} {entry.origin}  (in {entry.path})")
        if not entries:
            print(f"nothing is in the trash of {options.folder}")
        return
    if options.older_than is None:
        raise RunError("trash empty deletes for good; say --older-than 30d, or another age.")
    deleted, kept = empty_trash(
        _folder(options), age(options.older_than), finished=options.finished
    )
    for entry in deleted:
        print(f"deleted {entry.path}")
    for entry in kept:
        print(f"kept {entry.path}: it is finished; --finished deletes it too")


COPY_LASTS = "as long as the network takes for its files, and a second a gigabyte to verify them"

VERBS = {
    "report": Verb("write one HTML page about runs", _report_options, _report),
    "runs list": Verb("list the runs in a folder", _list_options, _list),
    "runs show": Verb("show one run", _show_options, _show),
    "runs tree": Verb("show which run came from which", _list_options, _tree),
    "runs compare": Verb(
        "settings that differ, then curves and scores", _compare_options, _compare
    ),
    "runs attach": Verb("follow what a run says", _attach_options, _attach),
    "runs stop": Verb("tell a run to save and end", _stop_options, _stop),
    "runs logs": Verb("print what a rank has said", _logs_options, _logs),
    "runs pull": Verb(
        "copy a run from another machine, verified",
        _pull_options,
        _pull,
        lasts=COPY_LASTS,
    ),
    "runs push": Verb(
        "copy a run to another machine, verified",
        _push_options,
        _push,
        lasts=COPY_LASTS,
    ),
    "runs rm": Verb("move runs to the trash", _rm_options, _rm),
    "runs restore": Verb("bring a run back from the trash", _restore_options, _restore),
    "runs trash": Verb("list the trash, or empty it", _trash_options, _trash),
}
