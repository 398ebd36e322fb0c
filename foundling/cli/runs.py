"""`foundling runs ...`, `launch slurm` and `report`: what is done with run directories."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.cli.options import (
    FORCE,
    JSON,
    TARGET,
    Option,
    Options,
    Verb,
    comma_list,
    config_of,
    count,
    free_text,
    output_option,
    positive,
    positive_float,
    print_json,
    print_lines,
    refuse_given,
    run_name,
)
from foundling.config.errors import CheckpointError, ConfigError, RunError, UserError

if TYPE_CHECKING:
    from foundling.checkpoint.paths import CheckpointEntry
    from foundling.report.svg_chart import BinWidth
    from foundling.runtime.run_dir import RunDir

RUN = Option("run", "run directory", Path)


def _bin_widths(text: str) -> "list[BinWidth]":
    """100k,10M (tokens) or 100steps,15000steps."""
    from foundling.report.svg_chart import BinWidth

    found = []
    for word in comma_list(text):
        size = word.removesuffix("steps")
        found.append(BinWidth(positive(size), "tokens" if size == word else "steps"))
    return found


_REPORT_OPTIONS = (
    Option("run", "run directories", Path, nargs="+"),
    output_option("file (default: RUN/report.html, which is always replaced)"),
    FORCE,
    Option(
        "--bins",
        "tokens or steps that a point of the loss stands for, one chart each: 100k,10M,15000steps",
        _bin_widths,
        metavar="WIDTHS",
    ),
    Option("--csv", "the steps as a table, to -o or printed", bool, only_with=("output", "force")),
    Option("--parquet", "the same as Parquet, to -o", bool, only_with=("output", "force")),
)


def _report(options: Options) -> None:
    from foundling.report.page import write_report
    from foundling.runtime.run_dir import RunDir

    runs = [RunDir(path).require() for path in options.run]
    if options.csv or options.parquet:
        _table(options, runs)
    else:
        print(write_report(runs, options.output, options.bins or (), force=options.force))


def _table(options: Options, runs: "Sequence[RunDir]") -> None:
    from foundling.report.runs import print_csv, write_table

    if options.output is not None:
        write_table(runs, options.output, parquet=options.parquet, force=options.force)
        print(options.output)
    elif options.parquet:
        raise ConfigError("--parquet is not printed; give -o FILE too.")
    else:
        print_csv(runs, sys.stdout)


_LIST_OPTIONS = (
    Option("folder", "where to look", Path, "runs", nargs="?"),
    Option("--tree", "which run came from which, and how", bool),
    JSON,
)


def _folder(options: Options) -> Path:
    """The folder that was named; one that does not exist is refused, not shown as empty."""
    folder: Path = options.folder
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; give the one that holds your runs.")
    return folder


def _list(options: Options) -> None:
    from foundling.report.runs import draw_tree, lineage, list_runs

    runs = (lineage if options.tree else list_runs)(_folder(options))
    if options.json:
        return print_json(runs)
    if not runs:
        return print(f"no runs in {options.folder}")
    rows = (f"{r['status']:<10} {r['stage']:<9} step {r['step']:<8} {r['path']}" for r in runs)
    return print_lines(draw_tree(runs) if options.tree else rows)


_SHOW_OPTIONS = (
    Option("run", "run directory, or a folder or address of checkpoints"),
    JSON,
)


def _show(options: Options) -> None:
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


_STOP_OPTIONS = (
    RUN,
    Option("--wait", "seconds to wait for it", positive_float, 600.0),
    Option("--kill", "end it without a save if it does not stop by then", bool),
)


def _stop(options: Options) -> None:
    from foundling.launch.detach import stop

    print(stop(options.run, options.wait, options.kill))


_LOGS_OPTIONS = (
    RUN,
    Option("--follow", "from its last lines on, until the run ends, with its exit code", bool),
    Option("--rank", "whose output", count, 0),
)


def _logs(options: Options) -> None:
    from foundling.launch.detach import follow_log, show_log

    (follow_log if options.follow else show_log)(options.run, options.rank)


_COPY_OPTIONS = (
    Option("source", "run directory, here or HOST:RUN"),
    Option("destination", "folder that it keeps its name in, HOST:FOLDER or here"),
)


def _copy(options: Options) -> None:
    from foundling.launch.run_files import copy_run

    print(copy_run(options.source, options.destination))


_RM_OPTIONS = (
    Option("run", "run directories; --restore: also names, trash folders", Path, nargs="*"),
    Option("--restore", "bring them back from the trash", bool, only_with=("run", "folder")),
    Option("--list", "what is in the trash", bool, only_with=("folder",)),
    Option("--empty", "delete older ones for good: 30d, 12h", metavar="AGE", only_with=("folder",)),
    Option("--finished", "finished runs too", bool, requires="empty"),
    Option("--folder", "whose trash (default: runs; --restore: beside the run)", Path),
)


def _rm(options: Options) -> None:
    if options.list or options.empty is not None:
        options.folder = options.folder or Path("runs")
        return _list_trash(options) if options.list else _empty_trash(options)
    if not options.run:
        raise ConfigError("`runs rm` needs a run; name one, or give --list or --empty AGE.")
    if options.restore:
        return _restore(options)
    refuse_given(options, ["folder"], "here: a run goes to the trash beside it")
    return _move_to_trash(options)


def _move_to_trash(options: Options) -> None:
    from foundling.launch.run_files import move_to_trash

    for run in options.run:
        where = shlex.quote(os.path.abspath(run))
        print(
            f"{run} is in {move_to_trash(run)}; `foundling runs rm --restore {where}` restores it"
        )


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
    from foundling.launch.run_files import empty_trash, parse_age

    deleted, kept = empty_trash(
        _folder(options), parse_age(options.empty), finished=options.finished
    )
    print_lines(f"deleted {entry.path}" for entry in deleted)
    print_lines(f"kept {entry.path}: it is finished; --finished deletes it too" for entry in kept)


# Checkpoints of a run: whether they are whole, which stay.


_VERIFY_OPTIONS = (
    Option("checkpoint", "run directory, RUN@STEP or one checkpoint"),
    Option("--all", "every checkpoint of the run", bool),
    JSON,
)


def _verify(options: Options) -> None:
    from foundling.checkpoint.paths import check_target

    seen: list[CheckpointEntry] = []
    for entry in check_target(options.checkpoint, all_of_them=options.all):
        seen.append(entry)
        if not options.json:
            print(_line(entry), flush=True)
    if options.json:
        print_json([_fields(entry) for entry in seen])
    damaged = [entry for entry in seen if entry.state == "damaged"]
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(seen)} checkpoints of {options.checkpoint} cannot be used"
            f" (step {', '.join(str(entry.step) for entry in damaged)}); `train` goes on from the"
            " newest whole one."
        )


_PIN_OPTIONS = (
    Option("checkpoint", "RUN@STEP or RUN/checkpoints/step-N"),
    Option("--off", "let checkpoint.keep decide again", bool),
)


def _pin(options: Options) -> None:
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


# `foundling launch ...`: a run as a job of a cluster.

_SLURM_OPTIONS = (
    replace(TARGET, nargs="?"),
    Option("--nodes", "nodes", positive),
    Option("--time", "limit of one life of the job", metavar="HH:MM:SS"),
    Option("--run", "run directory (default: runs/TARGET)", Path),
    Option("--profile", "kind of machine", default="plain"),
    Option("--partition", "SLURM's partition", free_text, "", metavar="NAME"),
    Option("--account", "whom to charge", free_text, "", metavar="NAME"),
    Option("--dry-run", "print the script, submit nothing", bool),
    Option("--gpus-per-node", "GPUs of a node (default: profile's)", count),
    Option("--nproc", "processes a node (default: one a GPU)", positive),
    Option("--container", "image: an apptainer .sif, or pyxis' name", free_text, ""),
    Option("--interface", "network interface, such as hsn0", free_text, "", metavar="NAME"),
    Option("--env", "export this", nargs="append", metavar="K=V"),
    Option("--setup", "run before", nargs="append", metavar="LINE"),
    Option("--sbatch", "a further option of sbatch", nargs="append", metavar="NAME=V"),
    Option("--python", "interpreter on the nodes (default: this one)", free_text, ""),
    Option("--grace", "seconds before the limit", positive, 300),
    Option("--max-restarts", "tries after a crash, within one life", count, 9),
    Option("--no-preflight", "do not try the nodes first", bool),
    Option("--profiles", "list the kinds of machines known", bool, only_with=()),
)


def _slurm(options: Options) -> None:
    from foundling.launch.slurm import SlurmJob, check_job, find_profile, render, submit, variables
    from foundling.runtime.console import warn

    if options.profiles:
        return _list_profiles()
    needed = {"TARGET": options.target, "--nodes": options.nodes, "--time": options.time}
    if missing := [name for name, value in needed.items() if value is None]:
        raise ConfigError(f"`launch slurm` needs {' and '.join(missing)} too.")
    config = config_of(options.target, options.settings, tell=warn)
    run = options.run or Path("runs") / run_name(options.target)
    job = SlurmJob(
        **{
            **options.fields_of(SlurmJob),
            "run": run,
            "profile": find_profile(options.profile),
            "env": variables(options.env),
            "setup": tuple(options.setup),
            "sbatch": tuple(options.sbatch),
        },
        name=run_name(options.target),
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


VERBS = {
    "report": Verb(
        "write one HTML page about runs, or their steps as a table", _REPORT_OPTIONS, _report
    ),
    "runs list": Verb("list the runs in a folder", _LIST_OPTIONS, _list),
    "runs show": Verb("show one run and its checkpoints", _SHOW_OPTIONS, _show),
    "runs verify": Verb(
        "read checkpoints and compare checksums",
        _VERIFY_OPTIONS,
        _verify,
        duration_hint="every byte is read once, about a second for a gigabyte",
    ),
    "runs pin": Verb("keep a checkpoint for good", _PIN_OPTIONS, _pin),
    "runs logs": Verb("print what a rank has said, or follow it", _LOGS_OPTIONS, _logs),
    "runs stop": Verb("tell a run to save and end", _STOP_OPTIONS, _stop),
    "runs copy": Verb(
        "copy a run to or from another machine, verified",
        _COPY_OPTIONS,
        _copy,
        duration_hint="as long as the network takes for its files, and a second a gigabyte to"
        " verify them",
    ),
    "runs rm": Verb("move runs to the trash, or back", _RM_OPTIONS, _rm),
    "launch slurm": Verb(
        "submit a run that saves, requeues and resumes", _SLURM_OPTIONS, _slurm, takes_settings=True
    ),
}
