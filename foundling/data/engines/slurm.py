"""On a SLURM cluster: one job array, each of whose tasks takes its share of the pieces.

A plain batch script handed to sbatch, and not datatrove's SLURM executor: that one pickles a
pipeline of its own steps, keeps a second record of what is finished beside our part files, and asks
every node for an extra package. What it would add (starting failed tasks again) follows from tasks
that can be run again at any time.

The data set's folder and the sources must be visible on the nodes. Set SBATCH_PARTITION,
SBATCH_ACCOUNT, SBATCH_TIMELIMIT and the like as sbatch itself reads them.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from foundling.config.errors import ConfigError, DataError, UserError
from foundling.data.board import Board, Task
from foundling.data.engines.base import Specs
from foundling.data.tasks import Job, one_thread, run_alone

POLL_S = 2.0
PIECES_A_ROUND = 4096
"""Pieces in an array. With a budget, the first array has a piece a task and each further one twice
as many, because nobody knows how many pieces the budget takes, and a village never ends."""

SCRIPT = """#!/bin/sh
#SBATCH --job-name=foundling-data
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --output={log}
cd {cwd} && exec {python} -m foundling.data.engines.slurm {round}
"""


class SlurmArray:
    """Arrays of tasks, one array after another until there is enough."""

    def __init__(
        self, job: Job, work: Path, *, workers: int, specs: Specs, budget: bool = False
    ) -> None:
        if shutil.which("sbatch") is None:
            raise ConfigError("the engine slurm needs sbatch, which is not on this machine's path.")
        self._job = job
        self._folder = (work / "slurm").resolve()
        self._workers = workers
        self._specs = specs
        self._round = workers if budget else PIECES_A_ROUND
        self._array: subprocess.Popen[bytes] | None = None
        self._tasks: list[Task] = []

    def run(self, board: Board, enough: Callable[[], bool]) -> None:
        """Submit, wait, look at the disk."""
        while not enough():
            if self._array is None and not self._submit(board):
                return
            assert self._array is not None
            code = self._array.poll()
            for task in self._tasks:
                if not task.done:
                    task.scan()
            if code is None:
                time.sleep(POLL_S)
                continue
            self._check(code)
            self._array, self._tasks = None, []

    def _submit(self, board: Board) -> bool:
        """Hand the next pieces to sbatch; False if there are none."""
        self._tasks = list(islice(iter(board.open_task, None), self._round))
        self._round = min(2 * self._round, PIECES_A_ROUND)
        if not self._tasks:
            return False
        tasks = min(self._workers, len(self._tasks))
        self._folder.mkdir(parents=True, exist_ok=True)
        pieces = [[str(task.folder.resolve()), task.piece.name] for task in self._tasks]
        order = {
            "job": self._job.to_json(),
            "sources": self._specs.to_json(),
            "pieces": pieces,
            "tasks": tasks,
        }
        round_file = self._folder / "round.json"
        round_file.write_text(json.dumps(order, indent=2) + "\n")
        script = self._folder / "array.sh"
        script.write_text(
            SCRIPT.format(
                log=self._folder / "task-%a.log",
                cwd=_quoted(os.getcwd()),
                python=_quoted(sys.executable),
                round=_quoted(str(round_file)),
            )
        )
        command = ["sbatch", "--wait", "--parsable", f"--array=0-{tasks - 1}", str(script)]
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path}
        with open(self._said, "wb") as said:
            self._array = subprocess.Popen(
                command, env=environment, stdout=said, stderr=subprocess.STDOUT
            )
        return True

    @property
    def _said(self) -> Path:
        """What sbatch printed: the job's number, or why it refused."""
        return self._folder / "sbatch.log"

    def _check(self, code: int) -> None:
        """A task that failed left its sentence in its log."""
        left = [task for task in self._tasks if not task.done]
        if code == 0 and not left:
            return
        logs = [self._said, *sorted(self._folder.glob("task-*.log"), key=os.path.getmtime)]
        lines = [line for log in logs for line in log.read_text().splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit code {code}"
        raise DataError(
            f"{len(left)} of {len(self._tasks)} pieces were not finished by the array ({last});"
            f" see {self._folder} and start again to go on."
        )

    def close(self) -> None:
        """Cancel the array; should we be killed instead, what it finishes is used the next time."""
        if self._array is not None:
            number = self._said.read_text().strip().partition(";")[0]
            if number.isdecimal() and shutil.which("scancel"):
                subprocess.run(["scancel", number], check=False, capture_output=True)
            self._array.terminate()
            self._array.wait()
            self._array = None


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def run_share(round_file: Path, number: int) -> None:
    """One task of the array: every so many-th piece, from the `number`-th on."""
    order: dict[str, Any] = json.loads(round_file.read_text())
    one_thread()
    encoder = Job(**order["job"]).open()
    folders = {
        (Path(folder).name.partition("-")[0], name): Path(folder)
        for folder, name in order["pieces"][number :: order["tasks"]]
    }
    for lane, piece in _pieces(Specs(**order["sources"]), folders):
        folder = folders.pop((lane, piece.name))
        if encoder.job.mark(piece.identity()) != folder.name.rpartition("-")[2]:
            raise DataError(f"{piece.name} is not what it was when the build began.")
        run_alone(encoder, piece, folder)
    if folders:
        raise DataError(f"{next(iter(folders))[1]} is not to be found from here.")


def _pieces(specs: Specs, wanted: dict[tuple[str, str], Path]) -> Iterator[tuple[str, Any]]:
    """The wanted pieces of the sources, opened again here."""
    for number, source in enumerate(specs.open()):
        lane = str(number)
        left = sum(key[0] == lane for key in wanted)
        pieces = source.pieces()
        while left:
            piece = next(pieces, None)
            if piece is None:
                break
            if (lane, piece.name) in wanted:
                left -= 1
                yield lane, piece


def main(words: Sequence[str]) -> int:
    """What the batch script runs."""
    try:
        run_share(Path(words[0]), int(os.environ["SLURM_ARRAY_TASK_ID"]))
    except UserError as error:
        print(error, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
