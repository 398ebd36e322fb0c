"""`foundling train`: its options, and which config and run folder they make."""

from pathlib import Path
from typing import TYPE_CHECKING

from foundling.cli.options import (
    Option,
    Options,
    Verb,
    config_of,
    count,
    default_run,
    positive,
    positive_float,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.config.run import RunConfig


_TRAIN_OPTIONS = (
    Option("target", "preset, YAML file, or run directory (with --from: the parent)", nargs="?"),
    # The second name is for torchrun, which takes --run for an abbreviation of its own --run-path.
    Option("--run --run-dir", "run directory (default: runs/TARGET)", Path, dest="run"),
    Option(
        "--start",
        "start from the weights of a run, a checkpoint or a model from elsewhere; takes its shape",
        metavar="SRC",
    ),
    Option("--from", "go on from there as a new run with other settings", metavar="RUN@STEP"),
    Option("--nproc", "processes on this machine (default: one a GPU)", positive),
    Option("--dev", "try N steps at a small batch", int, metavar="N"),
    Option("--detach", "go on in the background; see `runs logs`", bool),
    Option("--restarts", "tries after a crash without a new checkpoint (default: 3)", count),
    Option("--grace", "seconds for a last save after a stop signal (default: 600)", positive_float),
)


def _train(options: Options) -> None:
    from foundling.launch.train_job import job_of
    from foundling.runtime.run_dir import RunDir

    config, folder = _what_to_train(options)
    names = ("nproc", "detach", "restarts", "grace")
    with job_of(config, folder, **{name: getattr(options, name) for name in names}) as trains_here:
        if trains_here:
            from foundling.train.loop import train

            train(config, RunDir(folder))


def _what_to_train(options: Options) -> "tuple[RunConfig, Path]":
    """The config and the run directory that the words on the command line amount to."""
    from foundling.config.load import dev_config
    from foundling.launch.train_job import branch_of
    from foundling.runtime.console import say, warn

    origin = getattr(options, "from")
    parent = branch_of(origin) if origin else None
    target = options.target or (str(parent.run) if parent else None)
    if target is None:
        raise ConfigError("train needs a preset, a YAML file, a run directory, or --from RUN@STEP.")
    start = {} if options.start is None else {"train.start": options.start}
    config = config_of(target, {**start, **options.settings}, tell=warn)
    folder = options.run or (parent.child if parent else default_run(target))
    if parent:
        config = parent.settings_of_child(config)
    if options.dev is not None:
        config, said = dev_config(config, options.dev)
        folder = options.run or folder.with_name(folder.name + "-dev")
        say(f"--dev {options.dev}: {said}")
    return config, folder


VERBS = {
    "train": Verb(
        "pretrain or fine-tune; continues a run",
        _TRAIN_OPTIONS,
        _train,
        takes_settings=True,
        duration_hint="setting up, 5 to 60 s",
    ),
}
