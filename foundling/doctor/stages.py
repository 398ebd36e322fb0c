"""What a rehearsal consists of: one account's roll-out in four stages, as far as a machine goes.

tiny on a CPU      the same fields at toy size: settings, data and bookkeeping
one process        the real model on one device
two processes      the real model, two devices that must agree
the full mesh      the layout that the run will have

A stage that cannot be run here says why, and is never counted as passed.
"""

from dataclasses import dataclass, replace

from foundling.config.sections import ModelConfig, ParallelConfig, RunConfig
from foundling.plan import batch_tokens, count_params, flops_per_token, known_sizes
from foundling.plan.hardware import Gpu
from foundling.plan.layout import lay_out
from foundling.plan.memory import plan_memory
from foundling.plan.words import size
from foundling.plan.work import works_of

STEPS = 24
TINY_HEAD, TINY_FFN, TINY_SEQ, TINY_ROWS = 16, 64, 128, 4
TINY_LR = 3e-3
OF_SHARDS = ("fsdp1", "reshard", "prefetch", "gather_dtype", "offload")
"""Settings of a layout with shards."""
MICRO_STEPS = 2
"""Micro-steps of a rehearsed step at most: the second finds gradients, as all later ones do."""
CPU_PROCESSES = 8
"""More on one machine prove nothing that fewer do not."""
RUNS = 2.5
"""Trainings of a stage: one whole, one killed, one gone on."""


@dataclass(frozen=True)
class Bench:
    """What this machine has for a rehearsal."""

    gpus: int
    gpu: Gpu
    """The table's entry for its device; the CPU's where there is no GPU."""
    flops: float
    """Measured, of a matrix product on one device."""
    memory: int
    """Free bytes of a device."""

    @property
    def is_cuda(self) -> bool:
        return self.gpus > 0

    @property
    def most(self) -> int:
        """Processes that it can run."""
        return self.gpus or CPU_PROCESSES


@dataclass(frozen=True)
class Stage:
    """One rehearsal of some size."""

    name: str
    config: RunConfig
    processes: int
    obstacle: str = ""
    """Why it cannot be run here."""
    same_as: str = ""
    """Another stage that is the same thing."""


def stages_of(config: RunConfig, bench: Bench, limit_s: float) -> list[Stage]:
    """The four stages of a config; what each lacks here is written into it."""
    real = _here(config, bench)
    mesh = mesh_size(config.parallel, bench)
    alone = replace(real, parallel=_laid_out(real.parallel, 1, 1, 1))
    pair = replace(real, parallel=_pair(real.parallel))
    unit = "GPU" if bench.is_cuda else "process"
    found = [
        Stage("tiny on a CPU", cut(tiny(config), 1), 1, _no_toy(config)),
        _possible(Stage(f"one {unit}", cut(alone, 1), 1), bench, limit_s),
        _possible(
            Stage(f"two {unit}{'s' if unit == 'GPU' else 'es'}", cut(pair, 2), 2), bench, limit_s
        ),
        _possible(Stage("the full mesh", cut(real, mesh), mesh), bench, limit_s),
    ]
    if config.train.device == "cuda" and not bench.is_cuda:
        missing = "train.device is cuda and torch finds no GPU here"
        return [found[0], *(replace(stage, obstacle=missing) for stage in found[1:])]
    twin = next((one for one in found[1:3] if _is_same(one, found[3])), None)
    if twin is not None:
        found[3] = replace(found[3], obstacle="", same_as=twin.name)
    return found


def _here(config: RunConfig, bench: Bench) -> RunConfig:
    """The config as this machine can train it: on a CPU in fp32, and a branch as what it is made
    of, its parent's weights, because a few steps end before the parent's last one."""
    train = replace(config.train, threads=0, device="cuda" if bench.is_cuda else "cpu")
    if not bench.is_cuda:
        train = replace(train, dtype="fp32")
    if train.branch:
        train = replace(train, init=train.branch, branch="")
    return replace(config, train=train)


def _no_toy(config: RunConfig) -> str:
    if config.train.stage != "finetune":
        return ""
    return "a fine-tuning starts from another run's weights, and a toy has other shapes"


def mesh_size(parallel: ParallelConfig, bench: Bench) -> int:
    """Processes of the real run: what its degrees say, or every GPU that is here."""
    inner = parallel.shard * parallel.tensor
    replicas = parallel.replicate or max(1, bench.gpus // inner)
    return replicas * inner


def _laid_out(parallel: ParallelConfig, replicate: int, shard: int, tensor: int) -> ParallelConfig:
    plain = ParallelConfig()
    if shard == 1:  # what only shards can use would be refused
        kept = {name: getattr(plain, name) for name in OF_SHARDS}
        parallel = replace(parallel, **kept)
    return replace(parallel, replicate=replicate, shard=shard, tensor=tensor)


def _pair(parallel: ParallelConfig) -> ParallelConfig:
    """Two processes in the way that the run's own layout is spread."""
    if parallel.shard > 1:
        return _laid_out(parallel, 1, 2, 1)
    if parallel.tensor > 1:
        return _laid_out(parallel, 1, 1, 2)
    return _laid_out(parallel, 2, 1, 1)


def _is_same(one: Stage, other: Stage) -> bool:
    degrees = [
        (s.processes, s.config.parallel.shard, s.config.parallel.tensor) for s in (one, other)
    ]
    return degrees[0] == degrees[1]


def tiny(config: RunConfig) -> RunConfig:
    """The same kind of model at toy size, on the CPU: every field that is not a size stays."""
    model = config.model
    groups = min(2, model.heads // model.num_kv_heads)
    kv_heads = min(2, model.num_kv_heads)
    layers = min(model.layers, max(2, len(model.window_pattern) if model.window else 2))
    small: ModelConfig = replace(
        model,
        layers=layers,
        heads=groups * kv_heads,
        kv_heads=kv_heads,
        head_dim=TINY_HEAD,
        dim=groups * kv_heads * TINY_HEAD,
        ffn_dim=TINY_FFN,
    )
    train = replace(
        config.train,
        device="cpu",
        dtype="fp32",
        compile=False,
        init="",
        branch="",
        stage="pretrain",
        seq_len=min(config.train.seq_len, TINY_SEQ),
        batch_size=TINY_ROWS,
        threads=0,
    )
    parallel = replace(ParallelConfig(), recompute="none")
    optim = replace(config.optim, lr=max(config.optim.lr, TINY_LR))
    return replace(config, model=small, train=train, parallel=parallel, optim=optim)


def cut(config: RunConfig, processes: int) -> RunConfig:
    """The same run with a global batch that so many processes get through in a moment."""
    parallel, train = config.parallel, config.train
    ranks = max(1, processes // parallel.tensor)
    most = MICRO_STEPS * ranks * train.batch_size * train.seq_len
    whole = batch_tokens(config, ranks)
    return replace(config, train=replace(train, global_batch_tokens=min(whole, most)))


def _possible(stage: Stage, bench: Bench, limit_s: float) -> Stage:
    """The stage, with what stands in its way here."""
    return replace(stage, obstacle=_obstacle(stage, bench, limit_s))


def _obstacle(stage: Stage, bench: Bench, limit_s: float) -> str:
    if stage.processes > bench.most:
        what = f"{bench.gpus} GPUs" if bench.is_cuda else f"a CPU ({CPU_PROCESSES} processes)"
        return f"it needs {stage.processes} processes and this machine has {what}"
    config, _ = known_sizes(stage.config)
    held = planned_bytes(config, stage.processes, bench.gpu)
    free = bench.memory if bench.is_cuda else bench.memory // stage.processes
    if held > free:
        return f"a process needs {size(held)} and {size(free)} are free"
    seconds = estimated_seconds(config, stage.processes, bench)
    if seconds > limit_s:
        return f"it would take about {seconds / 60:,.0f} minutes here; raise --limit to run it"
    return ""


def planned_bytes(config: RunConfig, processes: int, gpu: Gpu) -> int:
    """The plan's peak of one process."""
    layout = lay_out(config.parallel, processes, max(processes, config.parallel.tensor))
    return max(plan_memory(work, gpu).peak for work in works_of(config, layout, gpu))


def estimated_seconds(config: RunConfig, processes: int, bench: Bench) -> float:
    """Roughly: products at half of the measured rate, processes on a CPU one after the other."""
    assert count_params(config.model).all > 0
    tokens = config.train.global_batch_tokens * STEPS * RUNS
    work = tokens * flops_per_token(config.model, config.train.seq_len)
    devices = processes if bench.is_cuda else 1
    return work / (0.5 * bench.flops * devices)
