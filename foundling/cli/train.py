"""`foundling train`: its options, and which config and run folder they make."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.cli.options import Options, Settings, above_zero, count, positive, resolved, run_name
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.config.run import RunConfig


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", nargs="?", help="preset, YAML file, or run directory (with --from: the parent)"
    )
    # The second name is for torchrun, which takes --run for an abbreviation of its own --run-path.
    parser.add_argument(
        "--run", "--run-dir", type=Path, help="run directory (default: runs/TARGET)"
    )
    parser.add_argument("--dev", type=int, metavar="N", help="rehearse N steps at a small batch")
    parser.add_argument(
        "--from",
        dest="branch",
        metavar="RUN@STEP",
        help="go on from there as a new run with changed settings",
    )
    parser.add_argument(
        "--start",
        metavar="SRC",
        help="start from the weights of a run, a checkpoint or a model from elsewhere, and take its"
        " shape",
    )
    parser.add_argument(
        "--nproc", type=positive, help="processes on this machine (default: one a GPU)"
    )
    parser.add_argument(
        "--detach", action="store_true", help="go on in the background; see `runs logs`"
    )
    parser.add_argument(
        "--restarts", type=count, help="tries after a crash without a new checkpoint (default: 3)"
    )
    parser.add_argument(
        "--grace",
        type=above_zero,
        help="seconds for the last save after a stop signal (default: 600)",
    )


def _train(options: Options, settings: Settings) -> None:
    from foundling.launch.train_job import job_of
    from foundling.runtime.run_dir import RunDir

    config, folder = _what_to_train(options, settings)
    names = ("nproc", "detach", "restarts", "grace")
    with job_of(config, folder, **{name: getattr(options, name) for name in names}) as trains_here:
        if trains_here:
            from foundling.train.loop import train

            train(config, RunDir(folder))


def _what_to_train(options: Options, settings: Settings) -> "tuple[RunConfig, Path]":
    """The config and the run directory that the words on the command line amount to."""
    from foundling.config.load import shrink
    from foundling.launch.train_job import branch_of
    from foundling.runtime.console import say, warn

    parent = branch_of(options.branch) if options.branch else None
    target = options.target or (str(parent.run) if parent else None)
    if target is None:
        raise ConfigError("train needs a preset, a YAML file, a run directory, or --from RUN@STEP.")
    if options.start is not None:
        settings = {"train.start": options.start, **settings}
    config = resolved(target, settings, tell=warn)
    folder = options.run or (parent.child if parent else _default_run(target))
    if parent:
        config = parent.settings_of_child(config)
    if options.dev is not None:
        config, said = shrink(config, options.dev)
        folder = options.run or folder.with_name(folder.name + "-dev")
        say(f"--dev {options.dev}: {said}")
    return config, folder


def _default_run(target: str) -> Path:
    path = Path(target)
    home = path if path.is_dir() else path.parent
    return home if (home / "run.json").is_file() else Path("runs") / run_name(target)
