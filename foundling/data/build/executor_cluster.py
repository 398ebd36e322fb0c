"""Executors of a build on a cluster: Ray tasks and a SLURM array."""

import hashlib
import importlib
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.config.errors import ConfigError, DataError, UserError
from foundling.data.build.encode import EncodeJob, PieceEncoder, one_thread, run_alone
from foundling.data.build.scheduler import BuildTask, Scheduler
from foundling.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foundling.data.readers.source import Piece

# On a Ray cluster: one task a piece, on whichever machine has a core free.
#
# The data set's folder must be one that every machine sees. Plain tasks and not Ray Data: a piece
# already is a task with its own result on disk, and a pipeline of blocks would only carry text
# about. A task that its machine takes with it is started elsewhere by Ray and finds its finished
# parts.

AHEAD = 2
"""Tasks in flight for every core of the cluster: one at work and one to follow."""
PATIENCE_S = 1.0


class RayTasks:
    """Tasks on a cluster that is there, or on one started here for the purpose."""

    def __init__(self, job: EncodeJob, tokenizer: Tokenizer) -> None:
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError:
            raise ConfigError(
                "the engine ray needs Ray; install it with `pip install 'foundling[ray]'`."
            ) from None
        self._ray = ray
        self._job = job
        self._ours = not ray.is_initialized()
        if self._ours:
            # RAY_ADDRESS names a cluster; without one, Ray starts its own on this machine.
            address = os.environ.get("RAY_ADDRESS")
            local = {} if address else {"include_dashboard": False}
            ray.init(address=address, log_to_driver=False, configure_logging=False, **local)
        _ = tokenizer.fast  # made and compared once, and travels with it
        self._tokenizer = ray.put(tokenizer)
        self._remote = ray.remote(num_cpus=1, max_retries=3)(encode_piece)
        self._flying: dict[Any, BuildTask] = {}

    def run(self, scheduler: Scheduler, enough: Callable[[], bool]) -> None:
        """Keep the cluster busy until there is enough."""
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        more = True
        while not enough():
            while more and len(self._flying) < AHEAD * cores:
                task = scheduler.open_task()
                more = task is not None
                if task is not None:
                    reference = self._remote.remote(
                        self._job, self._tokenizer, task.piece, str(task.folder)
                    )
                    self._flying[reference] = task
            if not self._flying:
                return
            ready, _ = self._ray.wait(list(self._flying), timeout=PATIENCE_S)
            for reference in ready:
                self._land(reference)
            for task in self._flying.values():  # a long piece shows its parts as they come
                task.scan()

    def _land(self, reference: Any) -> None:
        task = self._flying.pop(reference)
        try:
            refused = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise DataError(
                f"the task of {task.piece.name} failed on the cluster ({reason}); start again to"
                " go on."
            ) from None
        if refused:
            raise DataError(refused)
        task.scan()

    def close(self) -> None:
        """Cancel what is left; a cluster that was there before stays."""
        for reference in self._flying:
            self._ray.cancel(reference, force=True)
        self._flying.clear()
        if self._ours:
            self._ray.shutdown()


_open: dict[EncodeJob, PieceEncoder] = {}


def encode_piece(job: EncodeJob, tokenizer: Tokenizer, piece: "Piece", folder: str) -> str:
    """What runs on the cluster; returns the sentence of a refusal, or nothing."""
    one_thread()
    if job not in _open:  # a Ray worker lives on: the tokenizer is loaded once
        _open.clear()
        _open[job] = job.open(tokenizer)
    try:
        run_alone(_open[job], piece, Path(folder))
    except UserError as error:
        return str(error)
    return ""


# On a SLURM cluster: one job array, each of whose tasks takes its share of the pieces.
#
# A plain batch script handed to sbatch, and not datatrove's SLURM executor: that one pickles a
# pipeline of its own steps, keeps a second record of what is finished beside our part files, and
# asks every node for an extra package. What it would add (starting failed tasks again) follows from
# tasks that can be run again at any time.
#
# The data set's folder and the sources must be visible on the nodes. Set SBATCH_PARTITION,
# SBATCH_ACCOUNT, SBATCH_TIMELIMIT and the like as sbatch itself reads them.

POLL_S = 2.0
PIECES_A_ROUND = 4096
"""Pieces in an array. With a budget, the first array has a piece a task and each further one twice
as many, because it is unknown how many pieces the budget takes, and a village never ends."""

SCRIPT = """#!/bin/sh
#SBATCH --job-name=foundling-data
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --output={log}
cd {cwd} && exec {python} -m foundling.data.build.executor_cluster {round} {digest}
"""


class SlurmArray:
    """Arrays of tasks, one array after another until there is enough."""

    def __init__(self, job: EncodeJob, work: Path, *, workers: int, budget: bool = False) -> None:
        if shutil.which("sbatch") is None:
            raise ConfigError("the engine slurm needs sbatch, which is not on this machine's path.")
        self._job = job
        self._folder = (work / "slurm").resolve()
        self._workers = workers
        self._round = workers if budget else PIECES_A_ROUND
        self._array: subprocess.Popen[bytes] | None = None
        self._tasks: list[BuildTask] = []

    def run(self, scheduler: Scheduler, enough: Callable[[], bool]) -> None:
        """Submit, wait, look at the disk."""
        while not enough():
            if self._array is None and not self._submit(scheduler):
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

    def _submit(self, scheduler: Scheduler) -> bool:
        """Hand the next pieces to sbatch; False if there are none."""
        self._tasks = list(islice(iter(scheduler.open_task, None), self._round))
        self._round = min(2 * self._round, PIECES_A_ROUND)
        if not self._tasks:
            return False
        tasks = min(self._workers, len(self._tasks))
        self._folder.mkdir(parents=True, exist_ok=True)
        pieces = [(task.piece, task.folder.resolve()) for task in self._tasks]
        round_file = self._folder / "round.pickle"
        try:
            order = pickle.dumps((self._job, pieces, tasks))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"SLURM's tasks cannot be given these sources ({error}); give files, folders or"
                " hf:// names, or build with engine='local'."
            ) from None
        round_file.write_bytes(order)
        script = self._folder / "array.sh"
        script.write_text(
            SCRIPT.format(
                log=self._folder / "task-%a.log",
                cwd=shlex.quote(os.getcwd()),
                python=shlex.quote(sys.executable),
                round=shlex.quote(str(round_file)),
                digest=hashlib.sha256(order).hexdigest(),
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


def run_share(round_file: Path, digest: str, number: int) -> None:
    """One task of the array: every so many-th piece, from the `number`-th on. The batch script, of
    which SLURM keeps a copy, says the digest: nothing is unpickled that another has written."""
    order = round_file.read_bytes()
    if hashlib.sha256(order).hexdigest() != digest:
        raise DataError(f"{round_file} is not what the build wrote; start it again to go on.")
    job, pieces, tasks = pickle.loads(order)
    one_thread()
    encoder = job.open()
    for piece, folder in pieces[number::tasks]:
        if not folder.name.endswith(job.mark(piece.identity())):
            raise DataError(f"{piece.name} is not what it was when the build began.")
        run_alone(encoder, piece, folder)


def main(words: Sequence[str]) -> int:
    """What the batch script runs."""
    try:
        run_share(Path(words[0]), words[1], int(os.environ["SLURM_ARRAY_TASK_ID"]))
    except UserError as error:
        print(error, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
