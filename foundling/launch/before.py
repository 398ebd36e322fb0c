"""What a launcher can see before it starts anything: what the ranks would refuse, in one place.

A refusal here costs a second and leaves nothing behind; the same one by the ranks costs the start
of all of them, and under --detach nobody would be there to read it. Imports no torch.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foundling.config.checks import check_trainable, check_world
from foundling.config.errors import ConfigError, RunError, UserError
from foundling.config.manifest import Manifest
from foundling.config.phases import every_source
from foundling.config.sections import RunConfig
from foundling.plan.horizon import plan_horizon
from foundling.plan.layout import lay_out
from foundling.plan.supply import check_enough_data, epochs_needed, known_sizes
from foundling.runtime.exits import EndOfRun, Exit
from foundling.runtime.lock import is_locked, read_holder
from foundling.runtime.rundir import RunDir

ESTIMATE = 2.0
"""How far an estimated size of packed data is trusted before the ranks have counted."""


def check_start(config: RunConfig, run: Path, processes: int, nodes: int = 1) -> None:
    """Refuse what would be refused by every rank."""
    check_trainable(config)
    check_folder(run)
    lay_out(config.parallel, nodes * processes, processes)
    if not RunDir(run).exists:
        check_world(config, nodes * processes)
    check_data(config)


def check_folder(run: Path) -> None:
    """A finished run is never overwritten, and neither is a folder that is no run."""
    directory = RunDir(run)
    directory.refuse_other_files()
    if directory.exists and directory.read_info()["status"] == "finished":
        raise RunError(f"{run} is finished; give another --run to train again.")


def refuse_held(run: Path) -> None:
    """Somebody else's run is attached to and not started."""
    if is_locked(run):
        raise RunError(f"{run} is in use by {read_holder(run) or 'another process'}; attach to it.")


def require_sources(config: RunConfig) -> tuple[str, ...]:
    """The data sets that are named; a run without any is refused."""
    if not config.data.sources:
        raise ConfigError("data.sources is empty; name a built data set, such as '{data/mine: 1}'.")
    return every_source(config.data)


def check_data(config: RunConfig) -> None:
    """See that the data sets and the tokenizer are there and fit; a build that is followed may not
    have begun yet."""
    names = require_sources(config)
    if config.data.follow:
        return
    from foundling.tokenizer import Tokenizer

    fingerprint = Tokenizer.load(config.tokenizer.path or Path(names[0]) / "tokenizer").fingerprint
    for name in names:
        manifest = Manifest.load(Path(name))
        if manifest.tokenizer != fingerprint:
            raise ConfigError(
                f"{name} was built with another tokenizer than the run's; build it with the same."
            )


def check_supply(config: RunConfig, data_ranks: int) -> None:
    """See that the data last for the horizon, of a run that has not begun. Where the size of a
    packing is only estimated the ranks decide, unless it is off by a factor."""
    if config.data.follow:
        return
    config, sizes = known_sizes(config)
    if sizes is None:
        return
    is_exact = all(size.is_exact for mix in sizes for size in mix.values())
    allowed = max(config.data.allow_repeat, config.train.epochs) * (1 if is_exact else ESTIMATE)
    epochs = epochs_needed(plan_horizon(config, data_ranks, sizes), sizes)
    check_enough_data({name: n for name, n in epochs.items() if n > allowed}, config)


@contextmanager
def leaving_nothing(run: Path) -> Iterator[None]:
    """Remove the folder of a run that was refused or stopped before it began, if it was made here:
    it would only be in the way of the next command."""
    was_there = run.exists()
    try:
        yield
    except (UserError, EndOfRun) as end:
        code = end.exit_code if isinstance(end, UserError) else end.code
        if code in (Exit.USER, Exit.REQUEUE, Exit.INTERRUPTED) and not was_there:
            clear_unbegun(run)
        raise


def clear_unbegun(run: Path, *, is_held: bool = False) -> None:
    """Remove the folder of a run that has written nothing but locks and logs; with anything else in
    it, it stays as it is, and the lock says that a start of ours was here. `is_held`: by this
    process itself."""
    names = {path.name for path in run.iterdir()} if run.is_dir() else {"no folder"}
    if not names <= {"lock", "lock.rank0", "logs"} or (not is_held and is_locked(run)):
        return
    for name in ("lock", "lock.rank0"):
        (run / name).unlink(missing_ok=True)
    shutil.rmtree(run / "logs", ignore_errors=True)
    with suppress(OSError):  # somebody else's things by now
        run.rmdir()
