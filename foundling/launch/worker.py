"""One rank: `python -m foundling.launch.worker`, started by torchrun on what the launcher left.

Before anything heavy is imported it ties its life to torchrun's, leaves its number for the launcher
and sends its output to a file of its own. When the module is done it says how it ended and leaves
without python's finalisation: torch may abort in a destructor and exit with -6 after a good
run.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from foundling.launch.environment import AGENT, COMMAND, NODE, node_name
from foundling.launch.logs import log_name, pid_name, ranks_file
from foundling.runtime.exits import OUTCOMES, Exit, read_outcomes, write_outcome
from foundling.runtime.processes import die_with_parent


def main() -> None:
    """Run a module as one rank of the job."""
    folder = Path(os.environ[OUTCOMES])
    if AGENT in os.environ:
        die_with_parent(int(os.environ[AGENT]))
    rank = int(os.environ["RANK"])
    _redirect(folder / log_name(rank))
    pid_file = folder / pid_name(rank)
    pid_file.write_text(str(os.getpid()))
    _enroll(
        ranks_file(folder, int(os.environ.get(NODE, "0"))), f"{rank} {os.getpid()} {node_name()}\n"
    )
    sys.argv = json.loads(os.environ[COMMAND])
    code = _run(sys.argv[0])
    # A run that got a stop signal has ended on every rank by agreement. torchrun would take 75 for
    # a failure and kill the ranks that are still closing their files.
    _leave(0 if code == Exit.REQUEUE else code)


def _run(module: str) -> int:
    code: int = Exit.CRASH
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = Exit.OK
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else Exit.OK if end.code is None else 1
    except BaseException as error:
        traceback.print_exc()
        write_outcome(Exit.CRASH, f"{type(error).__name__}: {error}"[:300])
        return code
    rank = int(os.environ["RANK"])
    if rank not in read_outcomes(Path(os.environ[OUTCOMES]), [rank]):
        write_outcome(code, "")
    return code


def _enroll(path: Path, line: str) -> None:
    """One short append: the ranks of a node write to the same file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def _redirect(log: Path) -> None:
    """Everything that this process writes, from C too, goes to its own file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
