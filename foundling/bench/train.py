"""`foundling bench train`: tokens a second through the product's own path, believed only with a
loss check, beside transformers in the same process.

Order of a run: the first step at the timed shape on text (it is the time to first step, and
its gradients are compared), the other steps of the check, the timed ones on random tokens, and when
that model is gone the plain reference and the contenders, one after the other on the same device.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foundling.bench.batch import fastest
from foundling.bench.check import Check, Course, course, gaps, kept_reference
from foundling.bench.figures import commit
from foundling.bench.rows import RandomRows, Rows, text_rows
from foundling.bench.steps import (
    WARM_UP,
    Runner,
    Tell,
    Timed,
    cap_memory,
    free,
    lift_cap,
    process_age,
    try_sizes,
)
from foundling.config.errors import ConfigError, RunError
from foundling.config.sections import RunConfig
from foundling.plan import batch_tokens, count_params, flops_per_token
from foundling.plan.hardware import find_gpu, name_of_device
from foundling.plan.words import size, table
from foundling.runtime.device import Choice, choose, set_deterministic, set_threads
from foundling.runtime.files import cache_folder
from foundling.train.ceilings import device_name
from foundling.train.oom import snapshot_on_oom, taken_note
from foundling.train.probe import matmul_peak


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to measure, besides the config."""

    steps: int = 10
    best: bool = False
    """Look for the fastest batch size first."""
    micro_steps: int = 1
    """0: as many as the config's global batch takes."""
    data: Path | None = None
    """Built data set to time with; None: random tokens."""
    check_data: Path | None = None
    """Built data set that the loss check reads; None: `data`, or else the hamlet."""
    check_steps: int = 50
    check_rows: int = 4
    tolerance: float | None = None
    reference: Path | None = None
    """File that keeps the reference's steps for the next bench of the same model and text."""
    memory: float = 0.0
    """GB that we and contenders may use, as if on a smaller card; the reference is not held to it.
    0: all there is."""
    compare: Sequence[str] = ()
    compare_rows: int = 0
    """Of a contender's batch; 0: as ours, its own best where ours was looked for."""

    def check_sizes(self, rows: int) -> list[int]:
        """Rows of each step of the check: the first is as large as the timed ones."""
        later = min(self.check_rows or rows, rows)
        return ([rows] + [later] * (self.check_steps - 1)) if self.check_steps else []


@dataclass(frozen=True, kw_only=True)
class Result:
    """One contender's figures."""

    who: str
    how: str
    """What exactly ran."""
    rows: int
    micro_steps: int
    step_s: float
    tokens_per_s: float
    mfu: float
    allocated: int
    reserved: int
    first_step_s: float
    """Ours: from the start of the process; a contender's: from the start of its building."""
    loss: float
    """Of the last timed step, on random tokens."""
    tried: dict[int, float | None]
    """Tokens a second by batch size, where the best was looked for."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Everything that one `bench train` found."""

    device: str
    torch: str
    seq_len: int
    data: str
    steps: int
    flops_per_token: int
    params: int
    peak_flops: float
    peak_source: str
    results: tuple[Result, ...]
    check: Check | None

    @property
    def ours(self) -> Result:
        """The first is foundling."""
        return self.results[0]

    @property
    def mfu_definition(self) -> str:
        """In words and numbers."""
        return (
            f"MFU: (6 N + 12 L D T) x tokens/s over {self.peak_flops / 1e12:,.1f} TFLOP/s"
            f" ({self.peak_source}); N {self.params:,}, {self.flops_per_token:,} FLOP a token at"
            f" T {self.seq_len}, causality not counted"
        )

    def figure(self) -> dict[str, Any]:
        """What is kept of it, to be held to later."""
        ours, check = self.ours, self.check
        names = ("tokens_per_s", "mfu", "rows", "step_s", "allocated", "reserved", "first_step_s")
        return {
            **{name: getattr(ours, name) for name in names},
            "how": ours.how,
            "checked_steps": len(check.ours.losses) if check else 0,
            "loss_off": check.loss_off if check else None,
            "torch": self.torch,
            "commit": commit(),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        check = None if self.check is None else self.check.to_json()
        tree = asdict(replace(self, check=None))
        return {**tree, "check": check, "mfu_definition": self.mfu_definition}


class Meter:
    """What tokens a second amount to on a device."""

    def __init__(self, config: RunConfig, choice: Choice) -> None:
        self.model, self.seq_len = config.model, config.train.seq_len
        self.per_token = flops_per_token(config.model, config.train.seq_len)
        self.peak, self.source = _peak(choice)

    def result(
        self, who: str, how: str, timed: Timed, first_s: float, tried: dict[int, float | None]
    ) -> Result:
        """A contender's line."""
        return Result(
            who=who,
            how=how,
            rows=timed.rows,
            micro_steps=timed.micro_steps,
            step_s=timed.seconds,
            tokens_per_s=timed.tokens_per_s,
            mfu=timed.tokens_per_s * self.per_token / self.peak,
            allocated=timed.allocated,
            reserved=timed.reserved,
            first_step_s=first_s,
            loss=timed.losses[-1],
            tried=tried,
        )


def _peak(choice: Choice) -> tuple[float, str]:
    """Dense peak of the device's table entry, bf16's for all 16 and 8 bit arithmetic."""
    kind = "fp32" if choice.dtype == torch.float32 else "bf16"
    if choice.device.type == "cuda" and (name := name_of_device(device_name(choice.device))):
        return find_gpu(name).peak(kind), f"{name}, dense {kind} of its data sheet"
    return matmul_peak(choice.device, choice.dtype), "the best square product measured here"


def bench_train(config: RunConfig, asked: Asked, tell: Tell = lambda _: None) -> Bench:
    """Measure, check, compare."""
    choice = choose(config.train.device, config.train.dtype)
    set_threads(config.train.threads)
    set_deterministic(config.train.deterministic)
    cap_memory(choice.device, asked.memory)
    micro_steps = asked.micro_steps
    if not micro_steps:
        at_a_time = config.train.batch_size * config.train.seq_len
        micro_steps = max(1, -(-batch_tokens(config, 1) // at_a_time))
    config, tried, age = _with_best(config, choice, asked, micro_steps, tell)
    sizes = asked.check_sizes(config.train.batch_size)
    text = text_rows(config, asked.check_data or asked.data, sum(sizes)) if sizes else None
    timed, ours, since_start, chosen = _ours(config, choice, asked, micro_steps, text)
    tell(f"foundling: {timed.tokens_per_s:,.0f} tokens/s at {timed.rows} rows")
    meter = Meter(config, choice)
    results = [meter.result("foundling", _how(chosen, choice), timed, age or since_start, tried)]
    check = None
    if text is not None and ours is not None:
        tell(f"loss check: {asked.check_steps} steps of the plain reference")
        plain, source = _reference(config, asked, choice, text, sizes)
        loss_gap, grad_gap = gaps(config, choice.dtype, asked.tolerance)
        check = Check(
            text=text.name + (", without dropout" if config.model.dropout else ""),
            rows=(sizes[0], sizes[-1]),
            ours=ours,
            reference=plain,
            loss_gap=loss_gap,
            grad_gap=grad_gap,
            source=source,
        )
    results += [
        _contender(name, config, choice, asked, micro_steps, meter, tell) for name in asked.compare
    ]
    return Bench(
        device=device_name(choice.device),
        torch=torch.__version__,
        seq_len=config.train.seq_len,
        data=_timed_rows(config, asked).name,
        steps=asked.steps,
        flops_per_token=meter.per_token,
        params=count_params(config.model).no_positions,
        peak_flops=meter.peak,
        peak_source=meter.source,
        results=tuple(results),
        check=check,
    )


def _reference(
    config: RunConfig, asked: Asked, choice: Choice, text: Rows, sizes: list[int]
) -> tuple[Course, str]:
    """The plain trainer's steps. It keeps every number in fp32, so it may have the whole device."""
    lift_cap(choice.device)
    try:
        return kept_reference(asked.reference, config, text, sizes)
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the loss check's fp32 reference does not fit into the device's memory; give a"
            " --reference FILE made on a larger one, or --check-steps 0."
        ) from error
    finally:
        free(choice.device)
        cap_memory(choice.device, asked.memory)


def _ours(
    config: RunConfig, choice: Choice, asked: Asked, micro_steps: int, text: Rows | None
) -> tuple[Timed, Course | None, float, RunConfig]:
    """The timed steps, the check's, the process's age after its first step, and the config with
    what was chosen on this device."""
    rows, first, ours = _timed_rows(config, asked), config.train.batch_size, None
    runner = None
    try:
        with snapshot_on_oom(cache_folder("oom"), tell=False):
            runner = Runner(config, choice)
            if text is None:
                runner.timed(rows, 1, size=first, warmup=0)
                age = process_age()
            else:
                sizes = asked.check_sizes(first)
                runner.state.model.train(not config.model.dropout)  # as the reference
                ours = course(runner, text, sizes[:1], micro=first)
                age = process_age()
                later = course(runner, text, sizes[1:], micro=first, taken=1, at=first)
                ours.losses += later.losses
                runner.state.model.train()
            timed = runner.timed(rows, asked.steps, size=first, micro_steps=micro_steps)
            chosen = runner.config
        return timed, ours, age, chosen
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"a step of {first} rows of {config.train.seq_len} tokens does not fit into the memory;"
            " give --batch best, a smaller --batch, or set parallel.recompute"
            f"{taken_note(error) or '.'}"
        ) from error
    finally:
        del runner
        free(choice.device)


def _timed_rows(config: RunConfig, asked: Asked) -> Rows:
    if asked.data is not None:
        return text_rows(config, asked.data, 0)
    return RandomRows(config.model.vocab_size, config.train.seq_len, config.train.seed)


def _with_best(
    config: RunConfig, choice: Choice, asked: Asked, micro_steps: int, tell: Tell
) -> tuple[RunConfig, dict[int, float | None], float]:
    """The config with the fastest batch size, what was tried, and the process's age after its first
    step (0 where nothing was tried)."""
    if not asked.best:
        return config, {}, 0.0
    rows, runner = _timed_rows(config, asked), Runner(config, choice)
    tried, age = try_sizes(runner, rows, micro_steps, tell)
    del runner
    free(choice.device)
    best = fastest(tried)
    if not best:
        raise RunError("not even one row fits into the device's memory; see `foundling plan`.")
    return replace(config, train=replace(config.train, batch_size=best)), tried, age


def _contender(
    name: str,
    config: RunConfig,
    choice: Choice,
    asked: Asked,
    micro_steps: int,
    meter: Meter,
    tell: Tell,
) -> Result:
    """Somebody else's trainer on the same rows, at its own best batch where ours is at its."""
    from foundling.bench.with_transformers import Contender

    began = process_age()
    rows, contender = _timed_rows(config, asked), Contender(name, config, choice)
    size = asked.compare_rows or config.train.batch_size
    tried: dict[int, float | None] = {}
    try:
        if asked.best and not asked.compare_rows:
            tried, age = try_sizes(contender, rows, micro_steps, lambda t: tell(f"{name}, {t}"))
            size = fastest(tried)
        else:
            contender.timed(rows, 1, size=size, warmup=0)
            age = process_age()
        timed = contender.timed(rows, asked.steps, size=size, micro_steps=micro_steps)
    except torch.OutOfMemoryError as error:
        raise RunError(f"{name} does not fit at {size} rows; give --batch best.") from error
    how = contender.how
    del contender
    free(choice.device)
    tell(f"{name}: {timed.tokens_per_s:,.0f} tokens/s at {size} rows")
    return meter.result(name, how, timed, age - began, tried)


def _how(config: RunConfig, choice: Choice) -> str:
    train = config.train
    dtype = "fp32" if choice.dtype == torch.float32 else f"fp32 weights, {choice.dtype} products"
    said = [
        dtype.replace("torch.", "").replace("bfloat16", "bf16"),
        {"off": "eager", "model": "compiled whole"}.get(str(train.compile), "blocks compiled"),
        f"{train.loss} loss",
        f"attention {train.attention}",
        *(["feed-forward fused"] if train.feed_forward == "fused" else []),
        *([f"float8 {train.float8}"] if train.float8 != "none" else []),
        f"recompute {config.parallel.recompute}",
        *(["activations offloaded"] if config.parallel.offload_activations else []),
        str(getattr(config.optim, "name", "adamw")),
    ]
    return ", ".join(said)


def describe_train(bench: Bench) -> list[str]:
    """The table and what is behind it."""
    head = ["", "rows", "tokens/s", "MFU", "step s", "allocated", "reserved", "first step s"]
    rows = [head]
    for one in bench.results:
        micro = f"{one.rows} x {one.micro_steps}" if one.micro_steps > 1 else str(one.rows)
        numbers = [micro, f"{one.tokens_per_s:,.0f}", f"{one.mfu:.1%}", f"{one.step_s:.4f}"]
        memory = [size(one.allocated), size(one.reserved), f"{one.first_step_s:.1f}"]
        rows.append([one.who, *numbers, *memory])
    lines = [
        f"{bench.device}, torch {bench.torch}; rows of {bench.seq_len}, {bench.data}; median of"
        f" {bench.steps} steps after {WARM_UP}",
        *table(rows),
    ]
    lines += [f"{one.who}: {one.how}" for one in bench.results]
    for one in bench.results[1:]:
        ratio = bench.ours.tokens_per_s / one.tokens_per_s
        lines.append(f"foundling is {ratio:.3f} times as fast as {one.who}")
    lines += ["first step: from the start of the process (a contender's: of its building)"]
    lines.append(bench.mfu_definition)
    return lines + (bench.check.lines() if bench.check else ["no loss check: believe no speed"])


def checked_names(names: Sequence[str]) -> tuple[str, ...]:
    """Contenders by name."""
    known = ("hf", "hf-bf16")
    for name in names:
        if name not in known:
            raise ConfigError(f"--compare {name} is unknown; there are {', '.join(known)}.")
    return tuple(names)
