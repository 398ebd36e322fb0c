"""`foundling rehearse`: stages of a roll-out trained, killed, resumed and compared with the plan;
and proofs on the run's own config (resume_proof.py)."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Literal

import torch

from foundling.checkpoint.folders import step_of
from foundling.checkpoint.paths import find_checkpoint
from foundling.config.errors import ConfigError, UserError
from foundling.config.load import dump_yaml, load_run_config
from foundling.config.model import ModelConfig
from foundling.config.parallel import ParallelConfig
from foundling.config.run import RunConfig, check_resolved
from foundling.doctor.resume_proof import (
    Finding,
    check_steps,
    data_findings,
    prove_resume,
    rehearsal,
)
from foundling.plan.forecast import first_loss
from foundling.plan.hardware import Gpu, find_gpu
from foundling.plan.horizon import batch_tokens
from foundling.plan.layout import lay_out
from foundling.plan.memory import plan_memory
from foundling.plan.params import flops_per_token
from foundling.plan.supply import known_sizes
from foundling.plan.workload import works_of
from foundling.profiling.plan_check import gpu_at_hand
from foundling.profiling.probe import probe
from foundling.runtime.console import size
from foundling.runtime.device import choose_device, memory_free
from foundling.runtime.processes import run_child, tie_to_parent
from foundling.runtime.run_dir import RunDir
from foundling.runtime.run_reader import step_lines
from foundling.train.autotune.harness import matmul_peak

# Memory of one process against the plan: `python -m foundling.doctor.rehearse CONFIG` prints both.
#
# Tensors that live at the same time, counted on a CPU as a GPU's allocator would count them. In a
# process of its own, because what does not fit ends it.


def main() -> None:
    """Plan first, then take two steps and weigh them."""
    tie_to_parent()
    config, _ = known_sizes(load_run_config(Path(sys.argv[1])))
    config = config.replace(eval={"every": 0, "prompts": ()}, parallel={"replicate": 0})
    planned = planned_bytes(config, 1, find_gpu("cpu"))
    measured = probe(config, steps=1, warmup=1).peak_bytes
    print(json.dumps({"planned": planned, "measured": measured}), flush=True)


# What a rehearsal consists of: one account's roll-out in four stages, as far as a machine goes.
#
# tiny on a CPU      the same fields at toy size: settings, data and bookkeeping
# one process        the real model on one device
# two processes      the real model, two devices that must agree
# the full mesh      the layout that the run will have
#
# A stage that cannot be run here says why, and is never counted as passed.

STEPS = 24
TINY_HEAD, TINY_FFN, TINY_SEQ, TINY_ROWS = 16, 64, 128, 4
TINY_LR = 3e-3
MICRO_STEPS = 2
"""Micro-steps of a rehearsed step at most: the second finds gradients, as all later ones do."""
CPU_PROCESSES = 8
"""More on one machine prove nothing that fewer do not."""
RUNS = 2.5
"""Trainings of a stage: one whole, one killed, one gone on."""


@dataclass(frozen=True)
class RehearsalMachine:
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
class RehearsalStage:
    """One rehearsal of some size."""

    name: str
    config: RunConfig
    processes: int
    obstacle: str = ""
    """Why it cannot be run here."""
    same_as: str = ""
    """Another stage that is the same thing."""


ALONE = {"replicate": 1, "shard": 1, "tensor": 1}


def stages_of(config: RunConfig, bench: RehearsalMachine, limit_s: float) -> list[RehearsalStage]:
    """The four stages of a config; what each lacks here is written into it."""
    real = _here(config, bench)
    mesh = mesh_size(config.parallel, bench)
    alone = real.replace(parallel=ALONE)
    # Two processes in the way that the run's own layout is spread.
    asked = real.parallel
    axis = "shard" if asked.shard > 1 else "tensor" if asked.tensor > 1 else "replicate"
    pair = real.replace(parallel={**ALONE, axis: 2})
    unit = "GPU" if bench.is_cuda else "process"
    found = [
        RehearsalStage("tiny on a CPU", cut(tiny(config), 1), 1),
        RehearsalStage(f"one {unit}", cut(alone, 1), 1),
        RehearsalStage(f"two {unit}{'s' if unit == 'GPU' else 'es'}", cut(pair, 2), 2),
        RehearsalStage("the full mesh", cut(real, mesh), mesh),
    ]
    found[1:] = [replace(stage, obstacle=_obstacle(stage, bench, limit_s)) for stage in found[1:]]
    if config.train.device == "cuda" and not bench.is_cuda:
        missing = "train.device is cuda and torch finds no GPU here"
        return [found[0], *(replace(stage, obstacle=missing) for stage in found[1:])]
    twin = next((one for one in found[1:3] if _degrees(one) == _degrees(found[3])), None)
    if twin is not None:
        found[3] = replace(found[3], obstacle="", same_as=twin.name)
    return found


def _here(config: RunConfig, bench: RehearsalMachine) -> RunConfig:
    """The config as this machine can train it: on a CPU in fp32, and a branch as what it is made
    of, its parent's weights, because a few steps end before the parent's last one."""
    train = config.train.replace(threads=0, device="cuda" if bench.is_cuda else "cpu")
    if not bench.is_cuda:
        train = train.replace(dtype="fp32")
    if train.is_branch:
        train = train.replace(start_with="weights")
    return config.replace(train=train)


def mesh_size(parallel: ParallelConfig, bench: RehearsalMachine) -> int:
    """Processes of the real run: what its degrees say, or every GPU that is here."""
    inner = parallel.shard * parallel.tensor
    replicas = parallel.replicate or max(1, bench.gpus // inner)
    return replicas * inner


def _degrees(stage: RehearsalStage) -> tuple[int, int, int]:
    return stage.processes, stage.config.parallel.shard, stage.config.parallel.tensor


def tiny(config: RunConfig) -> RunConfig:
    """The same kind of model at toy size, on the CPU: every field that is not a size stays."""
    model = config.model
    groups = min(2, model.heads // model.num_kv_heads)
    kv_heads = min(2, model.num_kv_heads)
    layers = min(model.layers, max(2, len(model.windows)))
    small: ModelConfig = model.replace(
        layers=layers,
        heads=groups * kv_heads,
        kv_heads=kv_heads,
        head_dim=TINY_HEAD,
        dim=groups * kv_heads * TINY_HEAD,
        ffn_dim=TINY_FFN,
    )
    train = config.train.replace(
        device="cpu",
        dtype="fp32",
        compile="off",
        start="",
        seq_len=min(config.train.seq_len, TINY_SEQ),
        batch_size=TINY_ROWS,
        threads=0,
    )
    optim = {"lr": max(config.optim.lr, TINY_LR)}
    return config.replace(model=small, train=train, parallel=ParallelConfig(), optim=optim)


def cut(config: RunConfig, processes: int) -> RunConfig:
    """The same run with a global batch that so many processes get through in a moment."""
    parallel, train = config.parallel, config.train
    ranks = max(1, processes // parallel.tensor)
    most = MICRO_STEPS * ranks * train.batch_size * train.seq_len
    whole = batch_tokens(config, ranks)
    return config.replace(train=train.replace(global_batch_tokens=min(whole, most)))


def _obstacle(stage: RehearsalStage, bench: RehearsalMachine, limit_s: float) -> str:
    if stage.processes > bench.most:
        what = f"{bench.gpus} GPUs" if bench.is_cuda else f"a CPU ({CPU_PROCESSES} processes)"
        return f"it needs {stage.processes} processes and this machine has {what}"
    config, _ = known_sizes(stage.config)
    held = planned_bytes(config, stage.processes, bench.gpu)
    free = bench.memory if bench.is_cuda else bench.memory // stage.processes
    if held > free:
        return f"a process needs {size(held)} and {size(free)} are free"
    # Roughly: products at half of the measured rate, processes on a CPU one after the other.
    tokens = config.train.global_batch_tokens * STEPS * RUNS
    rate = 0.5 * bench.flops * (stage.processes if bench.is_cuda else 1)
    seconds = tokens * flops_per_token(config.model, config.train.seq_len) / rate
    if seconds > limit_s:
        return f"it would take about {seconds / 60:,.0f} minutes here; raise --limit to run it"
    return ""


def planned_bytes(config: RunConfig, processes: int, gpu: Gpu) -> int:
    """The plan's peak of one process."""
    layout = lay_out(config.parallel, processes, max(processes, config.parallel.tensor))
    return max(plan_memory(work, gpu).peak for work in works_of(config, layout, gpu))


# `foundling rehearse`: each stage below trained, killed, resumed and held against the plan.
#
# Every training is an ordinary `foundling train` in child processes, so what is proved is what will
# be launched. A point is go, no-go or not proved, and nothing that was not run is a go.

State = Literal["go", "no-go", "not proved"]
Say = Callable[[str], None]
FIRST_SHARE = 0.03
"""Of the planned first loss, that the real one may be off; at least 0.1 nats."""
RISE = 0.05
"""How much the loss of a model that starts from another's weights may rise in a few steps."""
WORDS = ("tiny", "one", "two", "mesh")
"""The stages on the command line."""
PROOFS = ("resume", "data")
"""What is proved on the config as it is, and only when it is asked for."""
WORLDS = (2, 3, 8)
"""Numbers of processes whose batches are compared with those of one."""
OVER = 0.15
"""More memory than planned by this share is a no-go."""


@dataclass(frozen=True)
class Point:
    """One thing that a stage proves, or does not."""

    stage: str
    what: str
    state: State
    detail: str

    def __str__(self) -> str:
        return f"{self.state:<10}  {self.stage}: {self.what}, {self.detail}"


def bench_here(config: RunConfig) -> RehearsalMachine:
    """What this machine has for the config."""
    cuda = torch.cuda.is_available() and config.train.device in ("auto", "cuda")
    wanted = choose_device("cuda", config.train.dtype) if cuda else choose_device("cpu", "fp32")
    return RehearsalMachine(
        gpus=torch.cuda.device_count() if cuda else 0,
        gpu=gpu_at_hand(wanted.device) if cuda else find_gpu("cpu"),
        flops=matmul_peak(wanted.device, wanted.dtype),
        memory=memory_free(wanted.device),
    )


def rehearse(
    config: RunConfig,
    folder: Path,
    say: Say,
    *,
    limit_s: float,
    steps: int = STEPS,
    only: Sequence[str] = (),
    processes: int | None = None,
    worlds: Sequence[int] = WORLDS,
) -> Iterator[Point]:
    """Every point of every stage and of the proofs among `only`, as it is proved. A stage that
    fails does not stop the next: each says something of its own. `processes` and `worlds` are for
    the proofs."""
    check_resolved(config)
    if not config.data.sources:
        raise ConfigError("data.sources is empty; a rehearsal trains on your own data: name it.")
    check_steps(steps)
    if unknown := [word for word in only if word not in WORDS + PROOFS]:
        there = ", ".join(WORDS + PROOFS)
        raise ConfigError(f"--only {unknown[0]} is no stage or proof; there are {there}.")
    if "resume" in only:
        home = folder / "resume"
        home.mkdir()
        findings = prove_resume(
            rehearsal(config, steps), home, say, processes=processes, limit_s=max(limit_s, 60.0)
        )
        yield from _proved("resume", findings)
    if "data" in only:
        yield from _proved("data", data_findings(config, worlds=worlds, steps=steps))
    if only and set(only) <= set(PROOFS):
        return
    states: dict[str, set[State]] = {}
    stages = stages_of(config, bench_here(config), limit_s)
    for word, stage in zip(WORDS, stages, strict=True):
        if only and word not in only:
            stage = replace(stage, obstacle="not asked for", same_as="")
        for point in _points(stage, states, folder / word, say, limit_s, steps):
            states.setdefault(stage.name, set()).add(point.state)
            yield point


def _proved(name: str, findings: Sequence[Finding], prefix: str = "") -> Iterator[Point]:
    for finding in findings:
        state: State = "go" if finding.same else "no-go"
        yield Point(name, prefix + finding.what, state, finding.detail)


def _points(
    stage: RehearsalStage,
    states: dict[str, set[State]],
    folder: Path,
    say: Say,
    limit_s: float,
    steps: int,
) -> Iterator[Point]:
    """Train, kill, resume and compare one stage."""
    if stage.same_as:
        before = states.get(stage.same_as, set())
        worst: State = "no-go" if "no-go" in before else "go" if "go" in before else "not proved"
        yield Point(stage.name, "everything", worst, f"it is {stage.same_as}, which see")
        return
    if stage.obstacle:
        yield Point(stage.name, "everything", "not proved", f"not run: {stage.obstacle}")
        return
    say(f"{stage.name}: {stage.processes} process(es), {steps} steps")
    folder.mkdir(parents=True)
    try:
        findings = prove_resume(
            rehearsal(stage.config, steps),
            folder,
            lambda text: say(f"  {text}"),
            processes=stage.processes,
            limit_s=max(limit_s, 60.0),
        )
    except UserError as error:
        yield Point(stage.name, "training", "no-go", str(error))
        return
    whole = RunDir(folder / "whole")
    trained = load_run_config(whole.config_path)
    losses = [line["loss"] for line in step_lines(whole)]
    yield first_point(stage.name, losses[0], trained)
    yield falling_point(stage.name, losses, is_fresh=not trained.train.start)
    yield _saved(stage.name, whole)
    yield from _proved(stage.name, findings, "killed and resumed: ")
    yield _memory(stage, whole, folder, limit_s)


def first_point(stage: str, loss: float, config: RunConfig) -> Point:
    """The first loss against what such a model must pay before it has learned anything."""
    planned = first_loss(config.model)
    what = "first loss"
    if config.train.start or planned is None:
        return Point(stage, what, "not proved", f"{loss:.3f}; it starts from another's weights")
    figures = f"{loss:.3f}, planned {planned:.3f}"
    return Point(stage, what, "go" if is_planned(loss, planned) else "no-go", figures)


def is_planned(loss: float, planned: float) -> bool:
    """Whether a fresh model pays what it must."""
    return abs(loss - planned) <= max(0.1, FIRST_SHARE * planned)


def falling_point(stage: str, losses: Sequence[float], *, is_fresh: bool) -> Point:
    """Whether the loss falls: the last third of the steps against the first third."""
    third = max(1, len(losses) // 3)
    early, late = mean(losses[:third]), mean(losses[-third:])
    falls = late < early if is_fresh else late <= early * (1 + RISE)
    figures = f"from {early:.3f} to {late:.3f} in {len(losses)} steps"
    return Point(stage, "falling loss", "go" if falls else "no-go", figures)


def _saved(stage: str, run: RunDir) -> Point:
    try:
        _, checkpoint = find_checkpoint(run.path)
    except UserError as error:
        return Point(stage, "save", "no-go", str(error))
    return Point(stage, "save", "go", f"the checkpoint of step {step_of(checkpoint)} verifies")


def _memory(stage: RehearsalStage, run: RunDir, folder: Path, limit_s: float) -> Point:
    """Memory against the plan: the run's own on CUDA; on a CPU, tensors counted in one process."""
    plan = run.read_info()["plan"]
    planned, found = (plan[key].get("memory_peak") for key in ("predicted", "measured"))
    if planned and found:
        return memory_point(stage.name, planned, found)
    if stage.processes > 1:
        figures = "a rank's memory is compared with the plan on CUDA only"
        return Point(stage.name, "memory", "not proved", figures)
    file = folder / "weigh.yaml"
    file.write_text(dump_yaml(stage.config))
    ended = run_child(["-m", "foundling.doctor.rehearse", str(file)], limit_s=limit_s)
    if not ended.is_good:
        return Point(stage.name, "memory", "not proved", f"it was not weighed: {ended.reason}")
    weighed = json.loads(ended.out.splitlines()[-1])
    return memory_point(stage.name, weighed["planned"], weighed["measured"])


def memory_point(stage: str, planned: float, found: float) -> Point:
    """More than planned does not fit where the plan said it would; less is only figures."""
    figures = f"{size(found)} at the peak, planned {size(planned)} ({found / planned - 1:+.0%})"
    return Point(stage, "memory", "no-go" if found > planned * (1 + OVER) else "go", figures)


def verdict(points: Sequence[Point], *, strict: bool) -> tuple[bool, str]:
    """Whether to go, and the last line: what failed, and what was not proved."""
    failed = [point for point in points if point.state == "no-go"]
    open_ = [point for point in points if point.state == "not proved"]
    proved = len(points) - len(failed) - len(open_)
    unproved = "; ".join(f"{point.stage} ({point.what})" for point in open_)
    if failed:
        names = "; ".join(f"{point.stage} ({point.what})" for point in failed)
        return False, f"NO-GO: {names}"
    if open_ and (strict or not proved):
        return False, f"NO-GO: not everything is proved: {unproved}"
    if open_:
        return True, f"GO as far as this machine can tell; not proved here: {unproved}"
    return True, f"GO: all {proved} points are proved"


if __name__ == "__main__":
    main()
