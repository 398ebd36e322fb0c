"""Pitfalls of a plan: warnings, and what would be enough for a run that does not fit."""

from collections.abc import Iterator
from dataclasses import replace

from foundling.config.data import phase_mixtures
from foundling.config.run import RunConfig
from foundling.plan.horizon import Horizon, micro_rows
from foundling.plan.layout import Machine, MeshLayout, layouts_of
from foundling.plan.memory import attention_kernel
from foundling.plan.resolve import LARGEST_BATCH, TENSOR_DEGREES, PlannedConfig, fits, policies_of
from foundling.plan.speed import plan_speed
from foundling.plan.supply import Saving
from foundling.plan.workload import Workload, dtype_on, work_of
from foundling.runtime.console import duration

# A run that does not fit: what alone would be enough, in words.
#
# Tried in the order in which they change the run least: another policy, a smaller batch, another
# layout of the same GPUs, more GPUs. Only memory is planned, so it takes some milliseconds.

MOST_GPUS = 16_384


def remedies(choice: PlannedConfig, machine: Machine) -> list[str]:
    """What would make a choice fit, each by itself."""
    config, layout = choice.config, choice.layout
    best = largest_batch(config, machine, layout)
    found = [
        f"the largest that does is {best} (train.batch_size auto picks)"
        if best
        else "no batch does on this layout"
    ]
    policies = ((p, config.replace(parallel={"recompute": p})) for p in policies_of(config.model))
    policy = next((p for p, tried in policies if fits(tried, machine, layout)), "")
    if policy:
        found.append(f"parallel.recompute {policy} would do")
    other = _layout(config, machine)
    if other is not None:
        found.append(f"{other} would do")
    if not (best or policy or other):
        found.append(_more_gpus(config, machine))
    return found


def largest_batch(config: RunConfig, machine: Machine, layout: MeshLayout) -> int:
    """The largest micro-batch of a settled config that fits; 0 where none does."""
    found, batch = 0, 1
    while batch <= LARGEST_BATCH:
        tried = config.replace(train={"batch_size": batch})
        if not fits(tried, machine, layout):
            break
        found, batch = batch, batch + max(1, batch // 8)
    return found


def _layout(config: RunConfig, machine: Machine) -> MeshLayout | None:
    layouts = (one for t in TENSOR_DEGREES for one in layouts_of(config.model, machine, t))
    return next((layout for layout in layouts if fits(config, machine, layout)), None)


def _more_gpus(config: RunConfig, machine: Machine) -> str:
    """The fewest GPUs, doubled from those there are, on which one row fits with everything
    recomputed."""
    least = config.replace(train={"batch_size": 1}, parallel={"recompute": "all"})
    tried = replace(machine, per_node=max(machine.per_node, machine.gpu.per_node))
    while tried.world <= MOST_GPUS:
        layout = _layout(least, tried)
        if layout is not None:
            return (
                f"{tried.world} GPUs would do ({layout}, parallel.recompute all,"
                " train.batch_size 1)"
            )
        tried = replace(tried, nodes=2 * tried.nodes)
    return f"{MOST_GPUS:,} GPUs would not do either; take GPUs with more memory"


# Warnings in words: what went wrong for others and shows in a plan before it goes wrong again.
#
# Each names the thing, the value and a remedy. The accounts are those of docs/accounts.md.

SLOW_LINK = 60e9
MANY_NODES = 128
JOB_HOURS = 24


def warnings_of(
    choice: PlannedConfig,
    machine: Machine,
    horizon: Horizon | None,
    hours: float | None,
    saving: Saving,
) -> list[str]:
    """Every trap that this plan would walk into."""
    config = choice.config
    work = work_of(config, choice.layout, machine.gpu)
    found = [
        *_memory(choice, machine),
        *_kernel(work, machine),
        *_arithmetic(work, machine),
        *_batch(config, horizon),
        *_cluster(choice, machine),
    ]
    if not config.eval.every:
        found.append("eval.every is 0: nothing held out is measured, and training loss is no test.")
    if hours is not None and horizon is not None:
        found += _clock(config, saving, hours)
    return found


def _memory(choice: PlannedConfig, machine: Machine) -> Iterator[str]:
    memory, train = choice.memory, choice.config.train
    if not memory.fits:
        yield (
            f"batch {train.batch_size} does not fit: it needs {memory.needed / 1e9:,.1f} GB of"
            f" {memory.capacity / 1e9:,.1f}; {'; '.join(remedies(choice, machine))}."
        )
    elif memory.needed > 0.95 * memory.capacity:
        share = memory.needed / memory.capacity
        yield f"memory would be {share:.0%} full; a longer row or an evaluation may not fit."
    if memory.moment == "evaluation":
        yield "evaluation needs more memory than training; lower train.batch_size to be safe."


def _kernel(work: Workload, machine: Machine) -> Iterator[str]:
    kernels = [attention_kernel(work, machine.gpu, n) for n in range(work.model.layers)]
    if "math" in kernels:
        why = "fp32" if work.dtype == "fp32" else "a mask"
        pairs = work.width * work.batch * work.model.heads * work.seq_len**2 * kernels.count("math")
        yield (
            f"attention with {why} and grouped heads takes torch's math path, which keeps every"
            f" pair of positions ({pairs / 1e9:,.1f} GB); {_other_kernel(work, machine)}."
        )
    elif "efficient" in kernels:
        yield "attention cannot take the flash kernel (fp32, a mask or a window); it is slower."


def _other_kernel(work: Workload, machine: Machine) -> str:
    """What keeps attention off the math path on this GPU."""
    if machine.gpu.name == "cpu":
        return "set model.dropout 0"
    ways = []
    if work.dtype == "fp32":
        if "bf16" not in machine.gpu.peaks:
            return (
                f"{machine.gpu.name} has no bf16, so only as many model.kv_heads as model.heads"
                " avoid it, or another GPU"
            )
        ways.append("use bf16")
    if work.document_mask:
        ways.append("set data.document_mask off")
    if any(work.model.windows):
        ways.append("set model.windows []")
    return " and ".join(ways)


def _arithmetic(work: Workload, machine: Machine) -> Iterator[str]:
    gpu = machine.gpu
    if work.dtype == "fp32" and gpu.name != "cpu" and dtype_on("auto", gpu) == "bf16":
        faster = replace(work, dtype="bf16")
        gain = plan_speed(work, gpu).step_s / plan_speed(faster, gpu).step_s
        yield f"train.dtype fp32 on a GPU with bf16 units is {gain:.1f} times slower; use bf16."
    if not work.compile and gpu.name != "cpu" and work.layout.tensor == 1:
        gain = plan_speed(work, gpu).step_s / plan_speed(replace(work, compile=True), gpu).step_s
        if gain > 1.05:
            yield f"train.compile is off, and blocks compiled would be {gain - 1:.0%} faster."


def _batch(config: RunConfig, horizon: Horizon | None) -> Iterator[str]:
    if horizon is None:
        return
    _, spec = phase_mixtures(config.data, config.train.seq_len)[0]
    at_a_time = micro_rows(config.train, spec)
    slots = horizon.accumulation * at_a_time * horizon.data_ranks
    if slots != horizon.rows_per_step:
        idle = 1 - horizon.rows_per_step / slots
        yield (
            f"{horizon.rows_per_step} rows over {horizon.data_ranks} ranks x"
            f" {horizon.accumulation} micro-steps x {at_a_time} leave {idle:.0%} of"
            " the slots empty; choose a batch that divides them."
        )
    if (
        config.train.horizon_in("steps")
        and horizon.data_ranks > 1
        and not config.train.global_batch_tokens
    ):
        yield (
            f"the horizon is in steps and the batch grows with the GPUs: {horizon.data_ranks}"
            f" data-parallel ranks read {horizon.tokens:,} tokens; give it in tokens, or"
            " train.global_batch_tokens, to keep it."
        )


def _cluster(choice: PlannedConfig, machine: Machine) -> Iterator[str]:
    gpu = machine.gpu
    # NVIDIA's only: an MI250X has a link of 50 GB/s too, but it is Infinity Fabric and no PCIe.
    if machine.per_node > 1 and gpu.link < SLOW_LINK and gpu.capability:
        yield (
            f"{gpu.name} has {gpu.link / 1e9:,.0f} GB/s between GPUs (no NVLink);"
            f" {choice.speed.talk_share:.0%} of a step would wait for it, and NCCL may need"
            " NCCL_P2P_DISABLE=1 on such pods."
        )
    elif choice.speed.talk_share > 0.15:
        yield f"{choice.speed.talk_share:.0%} of a step waits for communication."
    if machine.nodes >= MANY_NODES:
        yield (
            f"{machine.nodes} nodes: others saw 4 or 5 launches of 10 succeed at 640; keep spare"
            " nodes and short checkpoint intervals."
        )


def _clock(config: RunConfig, saving: Saving, hours: float) -> Iterator[str]:
    interval = saving.interval_s
    if hours > JOB_HOURS:
        yield (
            f"{hours:,.0f} hours are longer than a usual job of {JOB_HOURS}; the run is saved every"
            f" {duration(interval / 3600)} and continues from there."
        )
    if saving.share > 0.02:
        yield (
            f"a checkpoint every {config.checkpoint.every} steps stops training for"
            f" {saving.stall_s:,.1f} s each {interval:,.1f} s; raise checkpoint.every."
        )
    if saving.write_s > interval:
        yield (
            f"a checkpoint takes about {saving.write_s:,.0f} s to write and the next is due after"
            f" {interval:,.0f} s, so training will wait for the disk; raise checkpoint.every."
        )
