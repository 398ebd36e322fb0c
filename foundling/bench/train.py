"""`foundling bench train`: tokens a second through the product's own path, believed only with a
loss check.

Order of a run: the first step at the timed shape on text (it is the time to first step, and
its gradients are compared), the other steps of the check, the timed ones on random tokens, and when
that model is gone the plain reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from foundling.bench.batch import fastest
from foundling.bench.check import (
    Check,
    Course,
    Portion,
    course,
    gaps,
    kept_reference,
    read_reference,
    refuse_other_model,
)
from foundling.bench.early import refuse_unwritable
from foundling.bench.rows import Rows, random_rows, text_rows
from foundling.bench.steps import (
    Runner,
    Tell,
    Timed,
    alone,
    cap_memory,
    free,
    lift_cap,
    tell_chosen,
    try_sizes,
)
from foundling.bench.train_table import Bench, Meter, how_it_ran
from foundling.config.errors import RunError
from foundling.config.sections import RunConfig
from foundling.plan import batch_tokens, count_params
from foundling.runtime.device import Choice, prepare
from foundling.runtime.files import cache_folder
from foundling.runtime.pulse import process_age
from foundling.runtime.shortage import shortage_by_name
from foundling.train.ceilings import device_name
from foundling.train.litter import paced
from foundling.train.oom import snapshot_on_oom, taken_note
from foundling.train.probe import matmul_peak

AT_ONCE = 2
"""Micro-batches of a step of the check, where the timed one has more: two accumulate as eight do,
and the reference is slow."""


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
    """GB that we may use, as if on a smaller card; the reference is not held to it. 0: all there
    is."""

    def micro_steps_of(self, config: RunConfig, rows: int) -> int:
        """Of a step in micro-batches of so many rows."""
        if self.micro_steps:
            return self.micro_steps
        sized = replace(config, train=replace(config.train, batch_size=rows))
        return max(1, -(-batch_tokens(sized, 1) // (rows * config.train.seq_len)))

    def portions(self, rows: int, micro_steps: int) -> list[Portion]:
        """What each step of the check eats: the first has the timed shape."""
        batches = min(micro_steps, AT_ONCE)
        first = later = Portion(batches, rows)
        if self.check_rows:
            later = Portion(batches, max(1, min(self.check_rows, first.total) // batches))
        return ([first] + [later] * (self.check_steps - 1)) if self.check_steps else []


def bench_train(config: RunConfig, asked: Asked, tell: Tell = lambda _: None) -> Bench:
    """Measure and check."""
    choice = prepare(config.train)
    _refuse_early(config, asked)
    cap_memory(choice.device, asked.memory)
    config, tried, age = _with_best(config, choice, asked, tell)
    rows = config.train.batch_size
    micro_steps = asked.micro_steps_of(config, rows)
    portions = asked.portions(rows, micro_steps)
    text = checked_text(config, asked, portions)
    if text is not None and asked.reference:
        read_reference(asked.reference, config, text, portions)  # another's is refused now
    timed, ours, since_start, how = _ours(config, choice, asked, micro_steps, text, tell)
    tell(f"foundling: {timed.tokens_per_s:,.0f} tokens/s at {timed.rows} rows")
    meter = Meter(config, choice, matmul_peak(choice.device, choice.dtype))
    free(choice.device)
    result = meter.result("foundling", how, timed, age or since_start, tried)
    check = None
    if text is not None and ours is not None:
        tell(f"loss check: {asked.check_steps} steps of the plain reference")
        check = _check(config, asked, choice, text, portions, ours)
    return Bench(
        device=device_name(choice.device),
        torch=torch.__version__,
        seq_len=config.train.seq_len,
        data=timed_rows(config, asked).name,
        steps=asked.steps,
        flops_per_token=meter.per_token,
        params=count_params(config.model).no_positions,
        sheet_flops=meter.sheet,
        sheet=meter.source,
        matmul_flops=meter.matmul,
        results=(result,),
        check=check,
    )


def checked_text(config: RunConfig, asked: Asked, portions: Sequence[Portion]) -> Rows | None:
    """The text of the loss check; None where there is none."""
    if not portions:
        return None
    eaten = sum(portion.total for portion in portions)
    return text_rows(config, asked.check_data or asked.data, eaten)


def _refuse_early(config: RunConfig, asked: Asked) -> None:
    """What would be found out only after minutes of timing."""
    alone(config)
    if asked.check_data is not None:
        text_rows(config, asked.check_data, 0)
    if asked.reference is not None:
        refuse_other_model(asked.reference, config)
        if not asked.reference.is_file():  # one that is there is only read
            refuse_unwritable(asked.reference, "--reference")


def _check(
    config: RunConfig,
    asked: Asked,
    choice: Choice,
    text: Rows,
    portions: list[Portion],
    ours: Course,
) -> Check:
    """Our steps beside the reference's."""
    plain, source = _reference(config, asked, choice, text, portions)
    loss_gap, grad_gap = gaps(config, choice.dtype, asked.tolerance)
    return Check(
        text=text.name + (", without dropout" if config.model.dropout else ""),
        rows=(portions[0], portions[-1]),
        ours=ours,
        reference=plain,
        loss_gap=loss_gap,
        grad_gap=grad_gap,
        source=source,
    )


def _reference(
    config: RunConfig, asked: Asked, choice: Choice, text: Rows, portions: list[Portion]
) -> tuple[Course, str]:
    """The plain trainer's steps. It keeps every number in fp32, so it may have the whole device."""
    lift_cap(choice.device)
    try:
        with shortage_by_name():
            return kept_reference(asked.reference, config, text, portions)
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the loss check's fp32 reference does not fit into the device's memory; give a"
            " --reference FILE made on a larger one, or --check-steps 0."
        ) from error
    finally:
        free(choice.device)
        cap_memory(choice.device, asked.memory)


def _ours(
    config: RunConfig,
    choice: Choice,
    asked: Asked,
    micro_steps: int,
    text: Rows | None,
    tell: Tell,
) -> tuple[Timed, Course | None, float, str]:
    """The timed steps, the check's, the process's age after its first step, and what ran."""
    rows, first, ours = timed_rows(config, asked), config.train.batch_size, None
    runner = None
    try:
        with snapshot_on_oom(cache_folder("oom")):
            runner = Runner(config, choice)
            tell_chosen(runner.chosen, tell)
            with paced() as litter:
                if text is None:
                    runner.timed(rows, 1, size=first, warmup=0)
                    age = process_age()
                    litter.step()
                else:
                    portions = asked.portions(first, micro_steps)
                    runner.state.model.train(not config.model.dropout)  # as the reference
                    ours = course(runner, text, portions[:1])
                    age = process_age()
                    litter.step()
                    later = course(runner, text, portions[1:], taken=1, at=portions[0].total)
                    ours.losses += later.losses
                    runner.state.model.train()
                timed = runner.timed(rows, asked.steps, size=first, micro_steps=micro_steps)
        return timed, ours, age, how_it_ran(runner.config, choice, runner.chosen)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"a step of {first} rows of {config.train.seq_len} tokens does not fit into the memory;"
            " give --batch best, a smaller --batch, or set parallel.recompute"
            f"{taken_note(error) or '.'}"
        ) from error
    finally:
        del runner
        free(choice.device)


def timed_rows(config: RunConfig, asked: Asked) -> Rows:
    """The rows that steps are timed with."""
    return random_rows(config) if asked.data is None else text_rows(config, asked.data, 0)


def _with_best(
    config: RunConfig, choice: Choice, asked: Asked, tell: Tell
) -> tuple[RunConfig, dict[int, float | None], float]:
    """The config with the fastest batch size, what was tried, and the process's age after its first
    step (0 where nothing was tried)."""
    if not asked.best:
        return config, {}, 0.0
    rows, runner = timed_rows(config, asked), None
    tried: dict[int, float | None] = {}
    age = 0.0
    try:
        with shortage_by_name():
            runner = Runner(config, choice)
        tell_chosen(runner.chosen, tell)
        tried, age = try_sizes(runner, rows, partial(asked.micro_steps_of, config), tell)
    except torch.OutOfMemoryError:
        pass  # not even the weights fit
    finally:
        del runner
        free(choice.device)
    best = fastest(tried)
    if not best:
        raise RunError("not even one row fits into the device's memory; see `foundling plan`.")
    return replace(config, train=replace(config.train, batch_size=best)), tried, age
