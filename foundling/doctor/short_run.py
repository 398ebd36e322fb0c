"""A few steps of the target at a small batch: the last question before a run, and the best one.

On random tokens the loss of the first step is known beforehand; a model that is built, initialised,
wrapped or multiplied wrongly does not hit it. Under a job all ranks take the step together.
"""

import contextlib
import math
from collections.abc import Iterator

import torch

from foundling.config.run import RunConfig, check_resolved
from foundling.doctor.checks import CheckResult, DoctorRequest, Notes, failed, passed, warned
from foundling.doctor.rehearse import is_planned, planned_bytes
from foundling.parallel.mesh import make_mesh
from foundling.plan.forecast import first_loss
from foundling.plan.params import flops_per_token
from foundling.plan.supply import known_sizes
from foundling.profiling.plan_check import gpu_at_hand
from foundling.profiling.step_runner import StepRunner, Timed, random_rows
from foundling.runtime.console import size
from foundling.runtime.device import DeviceChoice, memory_free, prepare_device
from foundling.runtime.dist import process_group, world_from_environment
from foundling.train.autotune.harness import matmul_peak

ROWS, STEPS = 2, 3


def check(asked: DoctorRequest, notes: Notes) -> Iterator[CheckResult]:
    """Build the target as training would, and take a few steps."""
    config = asked.run_config()
    if config is None or not notes.begins("building and stepping the target"):
        return
    check_resolved(config)
    config, _ = known_sizes(config)
    if not config.model.vocab_size:
        yield warned("trial step", "not taken: model.vocab_size is 0 and no data says it; give it.")
        return
    small = cut(config)
    world = world_from_environment()
    choice = prepare_device(config.train, world.local_rank)
    if too_much := _too_much(small, choice, world.size, asked):
        yield warned("trial step", f"not taken: {too_much}")
        return
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                process_group(world, choice.device, timeout_s=int(asked.limit_s) or 1)
            )
            mesh = make_mesh(small.parallel, world, choice.device)
            runner, rows = StepRunner(small, choice, mesh), random_rows(small)
            first, later = (
                runner.timed(rows, count, size=small.train.batch_size, warmup=0)
                for count in (1, STEPS)
            )
    except torch.OutOfMemoryError:
        yield failed(
            "trial step",
            f"{small.train.batch_size} rows of {small.train.seq_len} tokens do not fit into the"
            " memory of a device; shard the model (parallel.shard), lower train.seq_len, or set"
            " parallel.recompute.",
        )
        return
    line = step_line(first, later, small, world.size)
    if world.is_main or line.level != "pass":  # the others would only say the same
        yield line


def _too_much(config: RunConfig, choice: DeviceChoice, ranks: int, asked: DoctorRequest) -> str:
    """Why a step should not even be tried here: a process that takes all of a machine's memory
    takes others with it."""
    free = memory_free(choice.device)
    free //= 1 if choice.device.type == "cuda" else asked.neighbours
    held = planned_bytes(config, ranks, gpu_at_hand(choice.device))
    if held > free:
        return (
            f"a process would hold {size(held)} and {size(free)} are free; take more devices"
            " (parallel.shard, as a job), or a smaller model."
        )
    flops = 3 * flops_per_token(config.model, config.train.seq_len) * config.train.batch_size
    seconds = STEPS * flops * config.train.seq_len / matmul_peak(choice.device, choice.dtype)
    if seconds > asked.limit_s:
        return f"it would take about {seconds:,.0f} s here; raise --limit to take it."
    return ""


def cut(config: RunConfig) -> RunConfig:
    """The target with a small batch; alone it has to be one process."""
    alone = {"replicate": 0, "shard": 1, "tensor": 1, "fsdp1": False}
    return config.replace(
        train={"batch_size": min(config.train.batch_size, ROWS), "global_batch_tokens": 0},
        parallel=alone if world_from_environment().size == 1 else {},
    )


def step_line(first: Timed, later: Timed, config: RunConfig, ranks: int) -> CheckResult:
    """What the steps said."""
    loss, planned, step_s = first.losses[0], first_loss(config.model), min(later.step_s)
    assert planned is not None
    together = f"{ranks} ranks together, " if ranks > 1 else ""
    text = (
        f"{together}{config.train.batch_size} rows of {config.train.seq_len}:"
        f" {step_s:.3f} s a step (the first {first.seconds:.1f} s),"
        f" {size(later.memory)} held, first loss {loss:.3f}"
    )
    facts = {"step_s": step_s, "memory": later.memory, "loss": loss, "planned": planned}
    if not all(map(math.isfinite, (*first.losses, *later.losses))):
        return failed("trial step", f"{text}: not finite; lower optim.lr, or use fp32.", facts)
    if not is_planned(loss, planned):
        return failed(
            "trial step",
            f"{text}, and {planned:.3f} was planned; the model does not compute what it should:"
            " try train.compile off, train.dtype fp32 and another device, and compare.",
            facts,
        )
    return passed("trial step", f"{text} (planned {planned:.3f})", facts)
