"""`foundling runs ...` and `report`: what run directories say."""

import argparse
from pathlib import Path

from foundling.config.errors import RunError
from foundling.verbs.base import Options, Settings, Verb, print_json


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", type=Path, help="run directories")
    parser.add_argument("-o", "--output", type=Path, help="file (default: RUN/report.html)")


def _report(options: Options, settings: Settings) -> None:
    from foundling.report import write_report
    from foundling.runtime.rundir import RunDir

    print(write_report([RunDir(path).require() for path in options.run], options.output))


def _list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="where to look")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _list(options: Options, settings: Settings) -> None:
    from foundling.report import list_runs

    if not options.folder.is_dir():
        raise RunError(f"{options.folder} is not a folder; give the one that holds your runs.")
    runs = list_runs(options.folder)
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


VERBS = {
    "report": Verb("write one HTML page about runs", _report_options, _report),
    "runs list": Verb("list the runs in a folder", _list_options, _list),
    "runs show": Verb("show one run", _show_options, _show),
}
