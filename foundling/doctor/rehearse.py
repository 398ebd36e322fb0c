"""`foundling rehearse`: each stage of stages.py trained, killed, resumed and held against the plan.

Every training is an ordinary `foundling train` in child processes, so what is proved is what will
be launched. A point is go, no-go or not proved, and nothing that was not run is a go.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch

from foundling.checkpoint import find_checkpoint, step_of
from foundling.config.checks import check_trainable
from foundling.config.errors import ConfigError, UserError
from foundling.config.resolve import dump_yaml, load_run_config
from foundling.config.sections import RunConfig
from foundling.doctor.health import host_memory
from foundling.doctor.resume import check_steps, prove_resume, rehearsal
from foundling.doctor.stages import STEPS, Bench, Stage, stages_of
from foundling.plan import first_loss
from foundling.plan.hardware import find_gpu
from foundling.plan.words import size
from foundling.runtime.children import run_child
from foundling.runtime.device import choose
from foundling.runtime.rundir import RunDir, read_lines
from foundling.train.check_plan import gpu_at_hand
from foundling.train.probe import matmul_peak

State = Literal["go", "no-go", "not proved"]
Say = Callable[[str], None]
FIRST_SHARE = 0.03
"""Of the planned first loss, that the real one may be off; at least 0.1 nats."""
RISE = 0.05
"""How much the loss of a model that starts from another's weights may rise in a few steps."""
WORDS = ("tiny", "one", "two", "mesh")
"""The stages on the command line."""
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

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def bench_here(config: RunConfig) -> Bench:
    """What this machine has for the config."""
    cuda = torch.cuda.is_available() and config.train.device in ("auto", "cuda")
    wanted = choose("cuda", config.train.dtype) if cuda else choose("cpu", "fp32")
    return Bench(
        gpus=torch.cuda.device_count() if cuda else 0,
        gpu=gpu_at_hand(wanted.device) if cuda else find_gpu("cpu"),
        flops=matmul_peak(wanted.device, wanted.dtype),
        memory=torch.cuda.mem_get_info(wanted.device)[0] if cuda else host_memory()[0],
    )


def rehearse(
    config: RunConfig,
    folder: Path,
    say: Say,
    *,
    limit_s: float,
    steps: int = STEPS,
    only: Sequence[str] = (),
    bench: Bench | None = None,
) -> Iterator[Point]:
    """Every point of every stage, as it is proved. A stage that fails does not stop the next: each
    says something of its own."""
    check_trainable(config)
    if not config.data.sources:
        raise ConfigError("data.sources is empty; a rehearsal trains on your own data: name it.")
    check_steps(steps)
    states: dict[str, set[State]] = {}
    stages = stages_of(config, bench or bench_here(config), limit_s)
    for number, stage in enumerate(asked_for(stages, only)):
        points = _points(stage, states, folder / str(number), say, limit_s, steps)
        for point in points:
            states.setdefault(stage.name, set()).add(point.state)
            yield point


def asked_for(stages: Sequence[Stage], only: Sequence[str]) -> list[Stage]:
    """The stages, those that are not among `only` marked as not to be run."""
    for word in only:
        if word not in WORDS:
            raise ConfigError(f"--only {word} is no stage; there are {', '.join(WORDS)}.")
    return [
        replace(stage, obstacle="not asked for", same_as="") if only and word not in only else stage
        for word, stage in zip(WORDS, stages, strict=True)
    ]


def _points(
    stage: Stage,
    states: dict[str, set[State]],
    folder: Path,
    say: Say,
    limit_s: float,
    steps: int,
) -> Iterator[Point]:
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
    yield from run_stage(stage, folder, lambda text: say(f"  {text}"), limit_s, steps)


def run_stage(stage: Stage, folder: Path, say: Say, limit_s: float, steps: int) -> Iterator[Point]:
    """Train, kill, resume and compare one stage."""
    try:
        short = rehearsal(stage.config, steps)
        findings = prove_resume(
            short, folder, say, processes=stage.processes, limit_s=max(limit_s, 60.0)
        )
    except UserError as error:
        yield Point(stage.name, "training", "no-go", str(error))
        return
    whole = RunDir(folder / "whole")
    lines = read_lines(whole.metrics_path)
    trained = load_run_config(whole.config_path)
    losses = [line["loss"] for line in lines]
    yield first_point(stage.name, losses[0], trained)
    yield falling_point(stage.name, losses, is_fresh=not _has_parent(trained))
    yield _saved(stage.name, whole)
    for finding in findings:
        state: State = "go" if finding.same else "no-go"
        yield Point(stage.name, f"killed and resumed: {finding.what}", state, finding.detail)
    yield _memory(stage, whole, folder, limit_s)


def _has_parent(config: RunConfig) -> bool:
    return bool(config.train.init or config.train.branch)


def first_point(stage: str, loss: float, config: RunConfig) -> Point:
    """The first loss against what such a model must pay before it has learned anything."""
    planned = first_loss(config.model)
    what = "first loss"
    if _has_parent(config) or planned is None:
        return Point(stage, what, "not proved", f"{loss:.3f}; it starts from another's weights")
    told = f"{loss:.3f}, planned {planned:.3f}"
    fits = abs(loss - planned) <= max(0.1, FIRST_SHARE * planned)
    return Point(stage, what, "go" if fits else "no-go", told)


def falling_point(stage: str, losses: Sequence[float], *, is_fresh: bool) -> Point:
    """Whether the loss falls: the last third of the steps against the first third."""
    third = max(1, len(losses) // 3)
    early, late = mean(losses[:third]), mean(losses[-third:])
    falls = late < early if is_fresh else late <= early * (1 + RISE)
    told = f"from {early:.3f} to {late:.3f} in {len(losses)} steps"
    return Point(stage, "falling loss", "go" if falls else "no-go", told)


def _saved(stage: str, run: RunDir) -> Point:
    try:
        _, checkpoint = find_checkpoint(run.path)
    except UserError as error:
        return Point(stage, "save", "no-go", str(error))
    return Point(stage, "save", "go", f"the checkpoint of step {step_of(checkpoint)} verifies")


def _memory(stage: Stage, run: RunDir, folder: Path, limit_s: float) -> Point:
    """Memory against the plan: the run's own on CUDA; on a CPU, tensors counted in one process."""
    plan = run.read_info()["plan"]
    planned, found = (plan[key].get("memory_peak") for key in ("predicted", "measured"))
    if planned and found:
        return memory_point(stage.name, planned, found)
    if stage.processes > 1:
        told = "a rank's memory is compared with the plan on CUDA only"
        return Point(stage.name, "memory", "not proved", told)
    file = folder / "weigh.yaml"
    file.write_text(dump_yaml(stage.config))
    ended = run_child(["-m", "foundling.doctor.weigh", str(file)], limit_s=limit_s)
    if not ended.is_good:
        return Point(stage.name, "memory", "not proved", f"it was not weighed: {ended.reason}")
    weighed = json.loads(ended.out.splitlines()[-1])
    return memory_point(stage.name, weighed["planned"], weighed["measured"])


def memory_point(stage: str, planned: float, found: float) -> Point:
    """More than planned does not fit where the plan said it would; less is only told."""
    told = f"{size(found)} at the peak, planned {size(planned)} ({found / planned - 1:+.0%})"
    return Point(stage, "memory", "no-go" if found > planned * (1 + OVER) else "go", told)


def verdict(points: Sequence[Point], *, strict: bool) -> tuple[bool, str]:
    """Whether to go, and the last line: what failed, and what nobody has proved."""
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
