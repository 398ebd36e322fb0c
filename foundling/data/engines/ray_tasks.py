"""On a Ray cluster: one task a piece, on whichever machine has a core free.

The data set's folder must be one that every machine sees. Plain tasks and not Ray Data: a piece
already is a task with its own result on disk, and a pipeline of blocks would only carry text about.
A task that its machine takes with it is started elsewhere by Ray and finds its finished parts.
"""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.config.errors import ConfigError, DataError, UserError
from foundling.data.board import Board, Task
from foundling.data.tasks import Encoder, Job, one_thread, run_alone
from foundling.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foundling.data.sources.base import Piece

AHEAD = 2
"""Tasks in flight for every core of the cluster: one at work and one to follow."""
PATIENCE_S = 1.0


class RayTasks:
    """Tasks on a cluster that is there, or on one started here for the purpose."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
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
        self._flying: dict[Any, Task] = {}

    def run(self, board: Board, enough: Callable[[], bool]) -> None:
        """Keep the cluster busy until there is enough."""
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        more = True
        while not enough():
            while more and len(self._flying) < AHEAD * cores:
                task = board.open_task()
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


_open: dict[Job, Encoder] = {}


def encode_piece(job: Job, tokenizer: Tokenizer, piece: "Piece", folder: str) -> str:
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
