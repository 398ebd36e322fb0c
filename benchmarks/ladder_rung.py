"""One rung of `benchmarks.ladder`: read what to do from stdin, print what it took."""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from foundling.bench.batch_size import cap_memory
from foundling.config.run import RunConfig
from foundling.parallel.losses import LossModule, plain_loss
from foundling.profiling.step_runner import StepRunner, Timed, random_rows
from foundling.runtime.device import prepare_device
from foundling.runtime.processes import tie_to_parent


def main() -> None:
    """Their batch first, then the largest that fits."""
    tie_to_parent()
    asked = json.loads(sys.stdin.read())
    config = RunConfig.model_validate_json(asked["config"])
    choice = prepare_device(config.train)
    cap_memory(choice.device, asked["memory_gb"])
    dtype = str(choice.dtype).removeprefix("torch.")
    found: dict[str, Any] = {"same": None, "largest": None, "chosen": [], "dtype": dtype}
    # Not even the weights may fit: that is an answer too.
    with contextlib.suppress(torch.OutOfMemoryError):
        runner = StepRunner(config, choice)
        if not asked["fused"]:
            unfuse(runner)
        if config.train.compiles:
            compile_loss(runner.state.module)
        found |= {"chosen": runner.chosen, **climb(runner, asked)}
    print(json.dumps(found), flush=True)


def climb(runner: StepRunner, asked: dict[str, Any]) -> dict[str, Any]:
    """What their batch took and what the largest took; None where it does not fit."""
    rows = random_rows(runner.config)

    def timed(size: int, steps: int, warmup: int) -> Timed | None:
        found = None
        runner.recover()  # what another size has left in the pool
        with contextlib.suppress(torch.OutOfMemoryError):
            found = runner.timed(rows, steps, size=size, warmup=warmup)
        return found

    def peak(size: int) -> int | None:
        found = timed(size, 1, 1)
        return found.reserved if found else None

    same = timed(asked["batch"], asked["steps"], 2)
    known = {asked["batch"]: same.reserved if same else None}
    best = largest_batch(peak, most=asked["most"], room=_room(runner.device), known=known)
    largest = same
    if best != asked["batch"]:
        largest = timed(best, asked["steps"], 2) if best else None
    return {"same": _plain(same), "largest": _plain(largest)}


def largest_batch(
    peak: Callable[[int], int | None],
    *,
    most: int,
    room: int = 0,
    known: Mapping[int, int | None] | None = None,
) -> int:
    """The largest size that fits, to the row; 0 where none does.

    `peak` takes a step of so many rows and gives its bytes, or None if it does not fit. Bytes grow
    in a straight line with rows, so two sizes that fit foretell where `room` ends, and a try or two
    around that place settles it; where the line deceives, the interval is halved.
    """
    found = dict(known or {})
    while True:
        fits = {rows: held for rows, held in found.items() if held is not None}
        low = max(fits, default=0)
        high = min((rows for rows in found if rows > low and rows not in fits), default=most + 1)
        if high - low <= 1:
            return low
        rows = _foretold(fits, room) if len(fits) > 1 and room else 2 * low or 1
        if rows <= low:  # the end is foretold here: see whether one more fits
            rows = low + 1
        elif rows >= high:
            rows = (low + high) // 2
        found[rows] = peak(rows)


def _foretold(fits: Mapping[int, int], room: int) -> int:
    """Where the line through the smallest and the largest size meets the end of the memory."""
    few, many = min(fits), max(fits)
    slope = (fits[many] - fits[few]) / (many - few)
    return many + int((room - fits[many]) / slope) if slope > 0 else 2 * many


def unfuse(runner: StepRunner) -> None:
    """torch's own default, as one gets it without asking."""
    optimizer = runner.state.optimizer
    for group in (*optimizer.param_groups, optimizer.defaults):
        group["fused"], group["foreach"] = False, None


def compile_loss(module: torch.nn.Module) -> None:
    """As their whole model was, so that logits are kept as the product leaves them. Eagerly they
    are there three times over in fp32: 10 rows fitted into 80 GB, where they had 16 in 79."""
    assert isinstance(module, LossModule)
    module.of_logits = torch.compile(plain_loss, dynamic=False)


def _room(device: torch.device) -> int:
    """Bytes that this process may use, cap or card; 0 where nobody counts them."""
    if device.type != "cuda":
        return 0
    share = torch.cuda.get_per_process_memory_fraction(device)
    return int(share * torch.cuda.get_device_properties(device).total_memory)


def _plain(timed: Timed | None) -> dict[str, Any] | None:
    if timed is None:
        return None
    return {
        "rows": timed.rows,
        "step_s": timed.seconds,
        "allocated": timed.allocated,
        "reserved": timed.reserved,
        "tokens_per_s": timed.tokens_per_s,
    }


if __name__ == "__main__":
    main()
