"""`foundling runs ...`, `launch slurm` and `report`: what is done with run directories."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.cli.options import (
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
    resolved,
    run_name,
)
from foundling.config.errors import CheckpointError, ConfigError, RunError, UserError

if TYPE_CHECKING:
    from foundling.checkpoint.paths import CheckpointEntry
    from foundling.report.svg_chart import BinWidth
    from foundling.runtime.run_dir import RunDir


def _bin_widths(text: str) -> "list[BinWidth]":
    """100k,10M (tokens) or 100steps,15000steps."""
    from foundling.report.svg_chart import BinWidth

    found = []
    for word in listed(text):
        size = word.removesuffix("steps")
        found.append(BinWidth(positive(size), "tokens" if size == word else "steps"))
    return found


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", type=Path, help="run directories")
    file_options(parser, "file (default: RUN/report.html, which is always replaced)")
    table = parser.add_mutually_exclusive_group()
    table.add_argument(
        "--csv", action="store_true", help="the steps as a table, to -o or printed, and no page"
    )
    table.add_argument("--parquet", action="store_true", help="the same as Parquet, to -o")
    parser.add_argument(
        "--bins",
        type=_bin_widths,
        default=(),
        metavar="WIDTHS",
        help="tokens or steps that a point of the loss stands for, one chart each:"
        " 100k,10M,15000steps",
    )


def _report(options: Options, settings: Settings) -> None:
    from foundling.report.page import write_report
    from foundling.runtime.run_dir import RunDir

    check_force(options)
    runs = [RunDir(path).require() for path in options.run]
    if options.csv or options.parquet:
        _table(options, runs)
    else:
        print(write_report(runs, options.output, options.bins, force=options.force))


def _table(options: Options, runs: "Sequence[RunDir]") -> None:
    from foundling.report.runs import print_csv, write_table

    if options.bins:
        raise ConfigError("--bins has no effect on a table of steps; leave it out.")
    if options.output is not None:
        write_table(runs, options.output, parquet=options.parquet, force=options.force)
        print(options.output)
    elif options.parquet:
        raise ConfigError("--parquet is not printed; give -o FILE too.")
    else:
        print_csv(runs, sys.stdout)


def _list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="where to look")
    parser.add_argument("--tree", action="store_true", help="which run came from which, and how")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _folder(options: Options) -> Path:
    """The folder that was named; one that does not exist is refused, not shown as empty."""
    folder: Path = options.folder
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; give the one that holds your runs.")
    return folder


def _list(options: Options, settings: Settings) -> None:
    from foundling.report.runs import draw_tree, lineage, list_runs

    runs = (lineage if options.tree else list_runs)(_folder(options))
    if options.json:
        return print_json(runs)
    if not runs:
        print(f"no runs in {options.folder}")
    rows = (f"{r['status']:<10} {r['stage']:<9} step {r['step']:<8} {r['path']}" for r in runs)
    for line in draw_tree(runs) if options.tree else rows:
        print(line)
    return None


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run directory, or a folder or address of checkpoints")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _show(options: Options, settings: Settings) -> None:
    from foundling.checkpoint.paths import checkpoint_root_of_target, list_entries
    from foundling.report.runs import describe_run, show_run
    from foundling.runtime.run_dir import RunDir

    run = RunDir(options.run)
    shown = show_run(run) if run.exists else {"path": options.run}
    entries: list[CheckpointEntry] = []
    try:
        entries = list(list_entries(checkpoint_root_of_target(options.run)))
        heading = "checkpoints:" if entries else "no checkpoints yet"
    except (UserError, OSError) as error:
        if not run.exists:
            raise
        heading = f"its checkpoints cannot be listed: {error}"  # and the rest is shown all the same
    if options.json:
        return print_json({**shown, "checkpoints": [_fields(entry) for entry in entries]})
    if run.exists:
        print("\n".join([*describe_run(shown), f"  {heading}"]))
    elif not entries:
        print(f"{options.run}: {heading}")
    for entry in entries:
        print(f"    {_line(entry)}" if run.exists else _line(entry))
    return None


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
    parser.add_argument(
        "--follow",
        action="store_true",
        help="from its last lines on, until the run ends; with the run's exit code",
    )


def _logs(options: Options, settings: Settings) -> None:
    from foundling.launch.detach import follow_log, show_log

    (follow_log if options.follow else show_log)(options.run, options.rank)


def _copy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="run directory, here or HOST:RUN")
    parser.add_argument("target", help="folder that it keeps its name in, HOST:FOLDER or here")


def _copy(options: Options, settings: Settings) -> None:
    from foundling.launch.run_files import copy_run

    print(copy_run(options.source, options.target))


def _rm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="*", type=Path, help="run directories; --restore: also names, trash folders"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--restore", action="store_true", help="bring them back from the trash")
    action.add_argument("--list", action="store_true", help="what is in the trash")
    action.add_argument("--empty", metavar="AGE", help="delete for good what is older: 30d, 12h")
    parser.add_argument("--finished", action="store_true", help="--empty: finished runs too")
    parser.add_argument(
        "--folder", type=Path, help="whose trash (default: runs; --restore: beside the run)"
    )


def _rm(options: Options, settings: Settings) -> None:
    if options.finished and options.empty is None:
        raise ConfigError("--finished has no effect without --empty AGE; give --empty 30d too.")
    if options.list or options.empty is not None:
        if options.run:
            raise ConfigError(
                f"--list and --empty are about a whole trash, not {options.run[0]}; name its"
                " folder with --folder."
            )
        options.folder = options.folder or Path("runs")
        return _list_trash(options) if options.list else _empty_trash(options)
    if not options.run:
        raise ConfigError("`runs rm` needs a run; name one, or give --list or --empty AGE.")
    if options.restore:
        return _restore(options)
    if options.folder:
        raise ConfigError("--folder has no effect here; a run goes to the trash beside it.")
    return _throw_away(options)


def _throw_away(options: Options) -> None:
    from foundling.launch.run_files import throw_away

    for run in options.run:
        where = shlex.quote(os.path.abspath(run))
        print(f"{run} is in {throw_away(run)}; `foundling runs rm --restore {where}` restores it")


def _restore(options: Options) -> None:
    from foundling.launch.run_files import TRASH, restore

    for run in options.run:
        beside = run.parent
        if beside == Path(".") and not any(Path(TRASH).glob(f"{run.name}--*")):
            beside = Path("runs")  # a name alone
        print(restore(run, options.folder or beside))


def _list_trash(options: Options) -> None:
    from foundling.launch.run_files import list_trash

    entries = list_trash(options.folder)
    for entry in entries:
        print(f"{entry.status:<10} {entry.origin}  (in {entry.path})")
    if not entries:
        print(f"nothing is in the trash of {options.folder}")


def _empty_trash(options: Options) -> None:
    from foundling.launch.run_files import age, empty_trash

    deleted, kept = empty_trash(_folder(options), age(options.empty), finished=options.finished)
    for entry in deleted:
        print(f"deleted {entry.path}")
    for entry in kept:
        print(f"kept {entry.path}: it is finished; --finished deletes it too")


# Checkpoints of a run: whether they are whole, which stay.


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="run directory, RUN@STEP or one checkpoint")
    parser.add_argument("--all", action="store_true", help="every checkpoint of the run")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _verify(options: Options, settings: Settings) -> None:
    from foundling.checkpoint.paths import check_target

    seen: list[CheckpointEntry] = []
    for entry in check_target(options.target, all_of_them=options.all):
        seen.append(entry)
        if not options.json:
            print(_line(entry), flush=True)
    if options.json:
        print_json([_fields(entry) for entry in seen])
    damaged = [entry for entry in seen if entry.state == "damaged"]
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(seen)} checkpoints of {options.target} cannot be used (step"
            f" {', '.join(str(entry.step) for entry in damaged)}); `train` goes on from the"
            " newest whole one."
        )


def _pin_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="RUN@STEP or RUN/checkpoints/step-N")
    parser.add_argument("--off", action="store_true", help="let checkpoint.keep decide again")


def _pin(options: Options, settings: Settings) -> None:
    from foundling.checkpoint.paths import named_checkpoint
    from foundling.checkpoint.retention import pin, pinned, unpin

    root, step = named_checkpoint(options.checkpoint)
    if not options.off:
        pin(root, step)
        print(f"step {step} of {root} stays, whatever checkpoint.keep says")
        return
    if step not in pinned(root):
        raise CheckpointError(f"step {step} of {root} is not pinned.")
    unpin(root, step)
    print(f"step {step} of {root} goes when checkpoint.keep says so")


def _fields(entry: "CheckpointEntry") -> dict[str, Any]:
    return {**vars(entry), "path": str(entry.path)}


def _line(entry: "CheckpointEntry") -> str:
    from foundling.runtime.console import size

    stored = size(entry.bytes) if entry.bytes else ""
    notes = ["pinned"] if entry.pinned else []
    notes += [f"score {entry.score:g}"] if entry.score is not None else []
    notes += [entry.reason] if entry.reason else [str(entry.path)]
    return f"step {entry.step:<9} {entry.state:<10} {stored:>9}  {', '.join(notes)}"


COPY_TIME = "as long as the network takes for its files, and a second a gigabyte to verify them"

RUNS_VERBS = {
    "report": Verb(
        "write one HTML page about runs, or their steps as a table", _report_options, _report
    ),
    "runs list": Verb("list the runs in a folder", _list_options, _list),
    "runs show": Verb("show one run and its checkpoints", _show_options, _show),
    "runs verify": Verb(
        "read checkpoints and compare checksums",
        _verify_options,
        _verify,
        duration_hint="every byte is read once, about a second for a gigabyte",
    ),
    "runs pin": Verb("never delete a checkpoint", _pin_options, _pin),
    "runs logs": Verb("print what a rank has said, or follow it", _logs_options, _logs),
    "runs stop": Verb("tell a run to save and end", _stop_options, _stop),
    "runs copy": Verb(
        "copy a run to or from another machine, verified",
        _copy_options,
        _copy,
        duration_hint=COPY_TIME,
    ),
    "runs rm": Verb("move runs to the trash, or back", _rm_options, _rm),
}

# `foundling launch ...`: a run as a job of a cluster.


def _slurm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", help="preset, YAML file, or run directory")
    parser.add_argument("--nodes", type=positive, help="nodes")
    parser.add_argument("--time", help="limit of one life of the job, HH:MM:SS")
    parser.add_argument("--run", type=Path, help="run directory (default: runs/TARGET)")
    parser.add_argument("--profile", default="plain", help="kind of machine")
    parser.add_argument("--profiles", action="store_true", help="list the kinds of machines known")
    parser.add_argument("--gpus-per-node", type=count, help="GPUs of a node (default: profile's)")
    parser.add_argument("--nproc", type=positive, help="processes a node (default: one a GPU)")
    parser.add_argument("--partition", default="", help="SLURM's partition")
    parser.add_argument("--account", default="", help="whom to charge")
    parser.add_argument("--container", default="", help="image: an apptainer .sif, or pyxis' name")
    parser.add_argument("--interface", default="", help="network interface, such as hsn0")
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="export this")
    parser.add_argument("--setup", action="append", default=[], metavar="LINE", help="run before")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="NAME=V", help="a further option of sbatch"
    )
    parser.add_argument("--python", default="", help="interpreter on the nodes (default: this one)")
    parser.add_argument("--grace", type=positive, default=300, help="seconds before the limit")
    parser.add_argument(
        "--max-restarts", type=count, default=9, help="tries after a crash, within one life"
    )
    parser.add_argument("--no-preflight", action="store_true", help="do not try the nodes first")
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")


def _slurm(options: Options, settings: Settings) -> None:
    from foundling.launch.slurm import SlurmJob, check_job, find_profile, render, submit, variables
    from foundling.runtime.console import warn

    if options.profiles:
        return _list_profiles()
    needed = {"TARGET": options.target, "--nodes": options.nodes, "--time": options.time}
    if missing := [name for name, value in needed.items() if value is None]:
        raise ConfigError(f"`launch slurm` needs {' and '.join(missing)} too.")
    config = resolved(options.target, settings, tell=warn)
    run = options.run or Path("runs") / run_name(options.target)
    job = SlurmJob(
        name=run_name(options.target),
        run=run,
        nodes=options.nodes,
        time=options.time,
        profile=find_profile(options.profile),
        gpus_per_node=options.gpus_per_node,
        nproc=options.nproc,
        partition=options.partition,
        account=options.account,
        container=options.container,
        interface=options.interface,
        env=variables(options.env),
        setup=tuple(options.setup),
        sbatch=tuple(options.sbatch),
        python=options.python,
        grace_s=options.grace,
        restarts=options.max_restarts,
        preflight=not options.no_preflight,
    )
    check_job(job, config)
    if options.dry_run:
        print(render(job), end="")
        return None
    number = submit(job, config)
    print(f"submitted job {number}: {run}; `foundling runs logs {run} --follow` shows it")
    return None


def _list_profiles() -> None:
    from foundling.launch.slurm import PROFILES, environment

    for name, profile in PROFILES.items():
        print(f"{name}: {profile.about}")
        for key, value in environment(profile, "", {}).items():
            print(f"    {key}={value}")


LAUNCH_VERBS = {
    "launch slurm": Verb(
        "submit a run that saves, requeues and resumes", _slurm_options, _slurm, True
    ),
}
