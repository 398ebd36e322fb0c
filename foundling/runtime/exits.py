"""How a run ends, in one number that scripts, SLURM and our own launcher can act on.

docs/exits.md has the same table for readers. Below 64 a code says who was wrong; from 64 on the
numbers are those of sysexits.h where one fits, because batch systems know 75 as "try again later".

    raise EndOfRun(Exit.REQUEUE, "saved at step 300 after SIGTERM")

ends the command with that code and sentence. Rejected: torchrun's own code, which is 1 after a
clean save as after a crash.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

from foundling.runtime.files import write_text_atomic

OUTCOMES = "FOUNDLING_OUTCOMES"
"""Variable that our launcher sets: the folder in which each rank says how it ended."""


class Exit(IntEnum):
    """Every code that a command of ours ends with."""

    OK = 0
    """Done; of `train`: the horizon is reached and the last checkpoint verifies."""
    CRASH = 1
    """An unforeseen error; the traceback is in the log. The launcher starts again."""
    USER = 2
    """A mistake that the user can repair, in one sentence. Not started again."""
    DATA = 65
    """Data or checkpoints that the run needs are lost or damaged. Not started again."""
    NONFINITE = 70
    """The guard gave up: the loss stays non-finite or spikes after every rollback."""
    NODE = 71
    """A machine failed its preflight, or the run fails on it; its name is in RUN/bad_nodes."""
    UNSAVED = 74
    """The last checkpoint could not be written or does not verify; no room for a file."""
    REQUEUE = 75
    """Saved after a signal or before a time limit: the same command goes on from there."""
    WATCHDOG = 76
    """No progress within the limit; stacks are in the log. Started again by the launcher."""
    KILLED = 77
    """Did not end within its grace time and was killed; the last completed save stands."""
    INTERRUPTED = 130
    """Interrupted by Ctrl-C before the first step, or by a second one, without a save."""


RESTARTABLE = frozenset({Exit.CRASH, Exit.WATCHDOG})
"""What another try may cure without anyone's doing: a lost peer, a hang, a flaky driver."""


GOOD = frozenset({Exit.OK, Exit.REQUEUE})
"""Everything up to here is safe on disk."""


class EndOfRun(Exception):  # noqa: N818 - an end is no error
    """The command ends here with a code and, for a person, a sentence."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = Exit(code)


class StoppingError(Exception):
    """The job is to stop, and this work is left to the next start."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended, as it said itself."""

    rank: int
    code: int
    sentence: str
    host: str
    pid: int
    time: float = 0.0

    @property
    def is_final(self) -> bool:
        """Whether another try would end the same."""
        return self.code not in RESTARTABLE


def write_outcome(code: int, sentence: str) -> None:
    """Write this rank's outcome for our launcher; without one nothing is written. On a full disk
    the outcome is missing, and the launcher sees that disk too."""
    folder = os.environ.get(OUTCOMES)
    if not folder:
        return
    rank = int(os.environ.get("RANK", "0"))
    host, pid = os.uname().nodename, os.getpid()
    outcome = RankOutcome(rank, int(code), sentence, host, pid, time.time())
    with contextlib.suppress(OSError):
        path = Path(folder) / _outcome_name(rank)
        write_text_atomic(path, json.dumps(asdict(outcome)) + "\n")


def _outcome_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def read_outcomes(folder: Path, ranks: Iterable[int] | None = None) -> dict[int, RankOutcome]:
    """What the ranks of one try have said so far, by rank: those of `ranks`, or all of them, which
    lists a folder of thousands of files in a large job."""
    found: dict[int, RankOutcome] = {}
    some = None if ranks is None else [folder / _outcome_name(rank) for rank in ranks]
    for path in folder.glob("rank-*.json") if some is None else some:
        try:
            outcome = RankOutcome(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        found[outcome.rank] = outcome
    return found


def verdict(outcomes: dict[int, RankOutcome]) -> RankOutcome | None:
    """The outcome that decides for the job, or None while it is open.

    Rank 0 says "done" or "saved" only after the last checkpoint was verified, so its word stands
    even if another falls over while closing; the others' alone do not count. Of failures, one that
    no other try would change comes first, and then the one that came first: the others followed
    from it.
    """
    main = outcomes.get(0)
    if main is not None and main.code in GOOD:
        return main
    failed = [outcome for outcome in outcomes.values() if outcome.code not in GOOD]
    return min(failed, key=lambda o: (not o.is_final, o.time, o.rank), default=None)
