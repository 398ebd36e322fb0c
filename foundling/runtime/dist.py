"""Ranks and process groups: sums, and results or errors of rank 0 shared with all."""

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from foundling.config.errors import UserError
from foundling.runtime.exits import StoppingError
from foundling.runtime.progress import collective

# A job of one process never starts a process group, so the laptop's path has no distributed code in
# it. Under torchrun the environment says who we are and we join.

FLIGHT_ENTRIES = "2000"
"""Collectives that torch's flight recorder remembers."""


@dataclass(frozen=True)
class World:
    """Rank and size of the job, as this process has them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_from_environment() -> World:
    """What torchrun says, or a world of one."""
    if "RANK" not in os.environ:
        return World()
    return World(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


@contextlib.contextmanager
def process_group(world: World, device: torch.device, timeout_s: int = 1800) -> Iterator[None]:
    """Be part of the process group, with a time limit, so that a lost rank cannot hang a job.

    The end is in order: a barrier, so that no rank pulls the store away under another. After an
    error there is none: the other ranks are in some other collective and would wait for ours.
    """
    if world.size == 1 or dist.is_initialized():
        yield
        return
    limit = timedelta(seconds=timeout_s)
    # The recorder is off by default, and only looks here when the group begins.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_ENTRIES)
    if device.type == "cuda":
        # Object collectives use the current device, which would be cuda:0 on every rank.
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=limit)
    yield
    barrier("the end")
    dist.destroy_process_group()


def sum_over_ranks(tensor: torch.Tensor, name: str = "sum") -> torch.Tensor:
    """Add `tensor` over all ranks, in place; a world of one returns it as it is. `name` is what the
    watchdog calls it."""
    if dist.is_initialized():
        with collective(name):
            dist.all_reduce(tensor)
    return tensor


def barrier(name: str = "barrier") -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        with collective(name):
            dist.barrier()


def flight_record() -> dict[str, bytes]:
    """What torch's flight recorder remembers of the last collectives, by the name of a file to keep
    it in: JSON for people, and NCCL's own form for torch's analyser (torchfrtrace)."""
    from torch._C import _distributed_c10d as c10d  # nothing public gives the recorder away

    found: dict[str, bytes] = {}
    for name, function in (
        ("gloo.json", "_dump_fr_trace_json"),
        ("nccl.json", "_dump_nccl_trace_json"),
        ("nccl.trace", "_dump_nccl_trace"),
    ):
        dump = getattr(c10d, function, None)  # which ones there are differs from build to build
        if dump is not None:
            with contextlib.suppress(Exception):
                data = dump()
                found[name] = data.encode() if isinstance(data, str) else bytes(data)
    return {name: data for name, data in found.items() if _has_entries(name, data)}


def _has_entries(name: str, data: bytes) -> bool:
    if not name.endswith(".json"):
        return bool(data)
    try:
        return bool(json.loads(data).get("entries"))
    except ValueError:
        return False


# Joint work of several ranks: a failure of one is raised on all, and none waits alone.
#
# `group` is the process group to use: None is the job's own. A background save has its own
# group, because collectives of one group must not come from two threads.

T = TypeVar("T")
R = TypeVar("R")
Group = dist.ProcessGroup | None


class LostRankError(RuntimeError):
    """A collective failed: the group is unusable from now on, and each rank's progress is
    unknown."""


def has_ranks() -> bool:
    """Whether a process group was started."""
    return dist.is_available() and dist.is_initialized()


def is_main() -> bool:
    """Whether this process is the one that names and deletes folders."""
    return not has_ranks() or dist.get_rank() == 0


def rank_and_size() -> tuple[int, int]:
    """This rank's number and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if has_ranks() else (0, 1)


def new_gloo_group(limit_s: float) -> Group:
    """A gloo group of all ranks with a time limit of its own; every rank must ask for it."""
    if not has_ranks():
        return None
    limit = datetime.timedelta(seconds=limit_s)
    with collective("a new group"):
        return cast(Group, dist.new_group(backend="gloo", timeout=limit))


def max_over_ranks(value: int, group: Group = None, name: str = "how every rank stands") -> int:
    """The largest of all ranks' numbers; `name` is what the watchdog calls it."""
    if not has_ranks():
        return value
    on_gpu = "nccl" in dist.get_backend_config(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    number = torch.tensor(value, device=device)
    with collective(name):
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return int(number)


def on_main(work: Callable[[], T], group: Group = None) -> T:
    """Do `work` on rank 0; its result or exception is every rank's, so that none waits alone."""
    if not has_ranks():
        return work()
    outcome = _attempt(work) if dist.get_rank() == 0 else (None, None)
    return cast(T, _heard(outcome, group))


def combine_on_main(work: Callable[[], T], then: Callable[[list[T]], R], group: Group = None) -> R:
    """Every rank works, rank 0 combines all results, and all get what it returns.

    An exception anywhere is raised everywhere, after every rank has done working: what is then
    cleaned up is not written to any more.
    """
    if not has_ranks():
        return then([work()])
    mine = _attempt(work)
    is_first = dist.get_rank() == 0
    theirs: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    sent = (mine[0], _portable(mine[1]))
    _talk("results for rank 0", lambda: dist.gather_object(sent, theirs, dst=0, group=group))
    outcome: tuple[Any, BaseException | None] = (None, None)
    if theirs is not None:
        failed = next((error for _, error in theirs if error is not None), None)
        outcome = (None, failed) if failed else _attempt(lambda: then([r for r, _ in theirs]))
    result = _heard(outcome, group, own=mine[1])
    return cast(R, result)


def scatter_from_main(cards: Callable[[], list[T]], group: Group = None) -> T:
    """Rank 0 makes a list with something for every rank; each gets its own."""
    if not has_ranks():
        return cards()[0]
    made: tuple[list[T] | None, BaseException | None] = (None, None)
    dealt: list[Any] | None = None
    if dist.get_rank() == 0:
        made = _attempt(cards)
        failure = _portable(made[1])
        dealt = [(card, None) for card in made[0]] if made[0] is not None else None
        dealt = dealt or [(None, failure)] * dist.get_world_size()
    card: list[Any] = [None]
    _talk("parts from rank 0", lambda: dist.scatter_object_list(card, dealt, src=0, group=group))
    got, error = card[0]
    if error is not None:
        raise made[1] or error
    return cast(T, got)


def _heard(
    outcome: tuple[Any, BaseException | None], group: Group, own: BaseException | None = None
) -> Any:
    """Rank 0's outcome on every rank; where it is this rank's own failure, that one is raised."""
    message = [(outcome[0], _portable(outcome[1]))]
    _talk("word from rank 0", lambda: dist.broadcast_object_list(message, src=0, group=group))
    result, error = message[0]
    if error is not None:
        raise own or outcome[1] or error
    return result


def _talk(name: str, exchange: Callable[[], None]) -> None:
    try:
        with collective(name):
            exchange()
    except Exception as error:  # a time limit, a closed connection: torch has many names for it
        # "[file.cc:129] Timed out waiting ... . Advice ...": the part in the middle is the news.
        news = str(error).partition("] ")[2].partition(". ")[0] or str(error)
        raise LostRankError(
            f"the ranks could not talk to each other ({news.strip('. ')})"
        ) from error


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # also a Ctrl-C: the others must get it before it is raised
        return None, error


def _portable(error: BaseException | None) -> BaseException | None:
    """The exception as it travels: those with odd constructors do not survive pickling."""
    if (
        error is None
        or isinstance(error, OSError | UserError | StoppingError)
        or type(error) is RuntimeError
    ):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
