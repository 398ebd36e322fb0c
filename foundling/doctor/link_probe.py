"""One rank of a small job that measures collectives: `python -m foundling.doctor.link_probe
BACKEND MEGABYTES LIMIT_S`. Prints one line of JSON; whoever started it kills it if it hangs."""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from foundling.runtime.children import tie_to_parent

ROUNDS = 5


def measure(megabytes: float, device: torch.device) -> dict[str, float]:
    """Bus bandwidth in bytes a second: what every link carries, whatever the number of ranks (as
    NCCL's own tests count it). The sums are checked, because a fast wrong sum is worse."""
    world, rank = dist.get_world_size(), dist.get_rank()
    count = max(world, int(megabytes * 1e6 / 4) // world * world)
    whole = torch.full((count,), float(rank + 1), device=device)
    dist.all_reduce(whole)
    wanted = world * (world + 1) / 2
    if not bool((whole == wanted).all()):
        raise RuntimeError(f"an all-reduce gave {float(whole[0])} and not {wanted}")
    part = torch.full((count // world,), float(rank), device=device)
    dist.all_gather_into_tensor(whole, part)
    if [float(piece[0]) for piece in whole.view(world, -1)] != list(map(float, range(world))):
        raise RuntimeError("an all-gather gave the ranks' parts in another order")
    share = (world - 1) / world
    reduce_s = _best(lambda: dist.all_reduce(whole), device)
    gather_s = _best(lambda: dist.all_gather_into_tensor(whole, part), device)
    return {
        "all_reduce": 2 * share * count * 4 / reduce_s,
        "all_gather": share * count * 4 / gather_s,
        "ranks": world,
    }


def _best(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    """Join, measure, say."""
    tie_to_parent()
    backend, megabytes, limit_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=limit_s),
        device_id=device if backend == "nccl" else None,
    )
    found = measure(megabytes, device)
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
