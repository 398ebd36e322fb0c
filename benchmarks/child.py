"""One measurement of `benchmarks.data`: read from stdin what to do, print what came of it.

prepare   seconds to turn the texts into what the contender reads
load      tokens a second from the page cache
middle    untimed: the corpus many times over, read to the middle; the state there is saved, and
          the batch that follows it
resume    seconds from opening to the first batch at that state, in a process that has read none
          of the data before, and whether it was the right batch; imports are not counted
"""

import contextlib
import importlib
import json
import pickle
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from benchmarks.contender import Contender, Job, Settings, contender

WARM_UP = 10
"""Batches before the clock starts: worker processes and first pages are not the steady state."""


def prepare(who: Contender, job: Job) -> dict[str, Any]:
    """Build, or make ready."""
    began, worked = time.perf_counter(), _cpu()
    who.prepare(job)
    return {"seconds": time.perf_counter() - began, "cpu_seconds": _cpu() - worked}


def load(who: Contender, job: Job, settings: Settings, seconds: float) -> dict[str, Any]:
    """Deliver batches for a while."""
    stream = who.open(job, settings, None)
    batches = _endless(stream)
    for inputs, targets in islice(batches, WARM_UP):
        _check(inputs, targets, job)
    count = 0
    began, worked = time.perf_counter(), _cpu()
    while (spent := time.perf_counter() - began) < seconds:
        next(batches)
        count += 1
    tokens = count * job.rows * job.seq_len
    return {"tokens_per_second": tokens / spent, "per_cpu_second": tokens / (_cpu() - worked)}


def save_middle(
    who: Contender, job: Job, long: Job, settings: Settings, times: int
) -> dict[str, Any]:
    """Go to the middle of an epoch, save the state, and keep the batch that comes next."""
    who.repeat(job, long, times)
    job = long
    stream = who.open(job, settings, None)
    batches = iter(stream)
    for _ in range(max(1, stream.batches // 2)):
        next(batches)
    state = stream.state()
    inputs, _ = next(batches)
    _middle(job).write_bytes(pickle.dumps((state, inputs.clone())))
    return {"batches": stream.batches}


def resume(who: Contender, job: Job, settings: Settings) -> dict[str, Any]:
    """From nothing to the next batch."""
    state, expected = pickle.loads(_middle(job).read_bytes())
    for module in who.NEEDS:
        importlib.import_module(module)
    began, worked = time.perf_counter(), _cpu()
    inputs, _ = next(iter(who.open(job, settings, state)))
    seconds, cpu = time.perf_counter() - began, _cpu() - worked
    return {"seconds": seconds, "cpu_seconds": cpu, "same": torch.equal(inputs, expected)}


def _cpu() -> float:
    """Processor time of this process and of its children that have ended: what a busy machine does
    not change. Loader processes are not among them, so it flatters who has some."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _middle(job: Job) -> Any:
    return job.folder / "middle.pickle"


def _endless(stream: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield from stream


def _check(inputs: torch.Tensor, targets: torch.Tensor, job: Job) -> None:
    """Everybody delivers the same: ids, and the next ids beside them."""
    for batch in (inputs, targets):
        assert batch.shape == (job.rows, job.seq_len), batch.shape
        assert batch.dtype == torch.int64, batch.dtype
    counted = targets[:, :-1] >= 0
    assert torch.equal(inputs[:, 1:][counted], targets[:, :-1][counted])


def work(asked: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked."""
    job, who = Job.from_json(asked["job"]), contender(asked["contender"])
    long = replace(job, work=str(job.folder / "long"))
    long.folder.mkdir(exist_ok=True)
    tasks = {
        "prepare": lambda: prepare(who, job),
        "load": lambda: load(who, job, asked["settings"], asked["seconds"]),
        "middle": lambda: save_middle(who, job, long, asked["settings"], asked["times"]),
        "resume": lambda: resume(who, long, asked["settings"]),
    }
    return tasks[asked["task"]]()


def main() -> None:
    """Work in silence; the last line is the result."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        result = work(json.load(sys.stdin))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
