"""Products with matrices that lie in files, in fp32, on every core that is free.

A matrix is used some rows at a time: a whole one in fp32 goes through main memory three times,
which takes longer than the arithmetic. Several threads take such pieces from one pile. Rejected:
torch's own threads, which divide every operation evenly and wait for the last of them each time;
beside a thread that writes or compares, that one is late, and a conversion took a tenth longer.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

BLOCK = 1 << 19
"""Numbers of a matrix that are made fp32 and used at once: they stay in the processor's cache."""
MOST_HANDS = 8
"""Threads of one product; more of them wait for main memory."""


class Scratch:
    """Memory for weights in fp32, a piece for each thread, used again and again: fresh memory costs
    a page fault every four kilobytes, which together take longer than the arithmetic."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._helpers = min(MOST_HANDS, _cores()) - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers))

    def float(self, weight: Tensor) -> Tensor:
        """The weight in fp32; good until this thread asks for the next one."""
        if weight.dtype == torch.float32:
            return weight
        memory: Tensor | None = getattr(self._own, "memory", None)
        if memory is None or weight.numel() > memory.numel():
            memory = self._own.memory = torch.empty(weight.numel())
        return memory[: weight.numel()].view(weight.shape).copy_(weight)

    def each(self, length: int, step: int, work: Callable[[int, int], None]) -> None:
        """Do `work` for start and end of each piece of a length, by this thread and its helpers."""
        pile = iter(range(0, length, step))

        def share() -> None:
            with torch.inference_mode():  # known to one thread only
                for start in pile:
                    work(start, min(start + step, length))

        helpers = min(self._helpers, (length - 1) // step)
        jobs = [self._pool.submit(share) for _ in range(helpers)]
        share()
        for job in jobs:
            if not job.cancel():  # one that was never begun has nothing left to do
                job.result()


def by_rows(x: Tensor, weight: Tensor, scratch: Scratch) -> Tensor:
    """x @ weight.T in fp32."""
    # The large matrix first: so the library packs the small one.
    turned = x.flatten(0, -2).T.contiguous()
    product = torch.empty(len(weight), turned.shape[1])

    def rows(start: int, end: int) -> None:
        torch.mm(scratch.float(weight[start:end]), turned, out=product[start:end])

    scratch.each(len(weight), max(1, BLOCK // weight.shape[1]), rows)
    return product.T.contiguous().view(*x.shape[:-1], -1)


def by_columns(x: Tensor, weight: Tensor, scratch: Scratch) -> Tensor:
    """x [T, D] @ weight in fp32."""
    product = torch.empty(len(x), weight.shape[1])

    def strip(start: int, end: int) -> None:
        product[:, start:end] = x @ scratch.float(weight[:, start:end])

    scratch.each(weight.shape[1], max(1, BLOCK // len(weight)), strip)
    return product


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Leave each of torch's operations to the thread that asks for it: the threads of a conversion
    are enough for the cores."""
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(kept)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # what a container or a job may use, not what there is
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
