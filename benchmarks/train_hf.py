"""`python -m benchmarks.train_hf`: `bench train`, and transformers' trainer in the same process.

Everything of `foundling bench train` comes first, with its loss check. When that model is gone each
contender (with_transformers.py) is built, one after the other on the same device. It takes the
check's steps too before it is timed: a device at its power limit was faster after them
(docs/performance.md), on weights as a run has them after its first minute.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from foundling.cli.bench import MEASURING, measure_and_report, training_duration
from foundling.cli.main import main_of
from foundling.cli.options import Option, Options, Verb, comma_list, positive
from foundling.config.errors import ConfigError, RunError

if TYPE_CHECKING:
    from foundling.bench.train import BenchOptions, ThroughputMeter, TrainBench, TrainTiming
    from foundling.config.run import RunConfig
    from foundling.profiling.step_runner import Tell
    from foundling.runtime.device import DeviceChoice

NAMES = ("hf", "hf-plain", "hf-bf16")


def compare(
    names: Sequence[str],
    compare_rows: int,
    config: "RunConfig",
    asked: "BenchOptions",
    tell: "Tell",
) -> "TrainBench":
    """Ours and then theirs, of `compare_rows` rows (0: as ours, their own best where ours was
    looked for)."""
    # Not at the top: what imports torch comes after the command has said how long it takes.
    from benchmarks.with_transformers import refuse_contender
    from foundling.bench.train import ThroughputMeter, bench_train
    from foundling.runtime.device import prepare_device

    choice = prepare_device(config.train)
    for name in names:
        refuse_contender(name, config, choice)
    bench = bench_train(config, asked, tell)
    config = config.replace(train={"batch_size": bench.ours.rows})
    meter = ThroughputMeter(config, choice, bench.matmul_flops)
    theirs = [_timed(name, config, choice, asked, meter, compare_rows, tell) for name in names]
    return replace(bench, results=(bench.ours, *theirs))


def _timed(
    name: str,
    config: "RunConfig",
    choice: "DeviceChoice",
    asked: "BenchOptions",
    meter: "ThroughputMeter",
    compare_rows: int,
    tell: "Tell",
) -> "TrainTiming":
    """Somebody else's trainer on the same rows, after as many steps on text, at its own best batch
    where ours is at its."""
    import torch

    from benchmarks.with_transformers import HfTrainer
    from foundling.bench.batch_size import fastest, try_sizes
    from foundling.bench.train import checked_text, timed_rows
    from foundling.runtime.device import free_cached_memory
    from foundling.runtime.progress import process_age
    from foundling.train.step import manual_gc

    portions = asked.portions(
        config.train.batch_size, asked.micro_steps_of(config, config.train.batch_size)
    )
    text = checked_text(config, asked, portions)
    began = process_age()
    rows, contender = timed_rows(config, asked), None
    size = compare_rows or config.train.batch_size
    micro_steps = partial(asked.micro_steps_of, config)
    tried: dict[int, float | None] = {}
    try:
        contender = HfTrainer(name, config, choice)
        if asked.best and not compare_rows:
            tried, age = try_sizes(contender, rows, micro_steps, lambda t: tell(f"{name}, {t}"))
            size = fastest(tried)
            if not size:
                raise RunError(f"{name} does not fit at any batch size; leave it out of --compare.")
        with manual_gc() as gc_control:  # as ours
            if not tried:
                contender.timed(rows, 1, size=size, warmup=0)
                age = process_age()
            gc_control.step()
            if text is not None:
                most = min(size, config.train.batch_size)
                contender.learn(text, asked.portions(most, micro_steps(most)))
            timed = contender.timed(rows, asked.steps, size=size, micro_steps=micro_steps(size))
        how = contender.how
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"{name} does not fit at {size} rows; give it fewer with --compare-batch, or leave it"
            " out of --compare."
        ) from error
    finally:
        del contender
        free_cached_memory()
    tell(f"{name}: {timed.tokens_per_s:,.0f} tokens/s at {size} rows")
    return meter.result(name, how, timed, age - began, tried)


def describe(bench: "TrainBench") -> list[str]:
    """The table of `bench train`, and how many times as fast we are."""
    from foundling.bench.train import describe_train

    ratios = [
        f"foundling is {bench.ours.tokens_per_s / one.tokens_per_s:.3f} times as fast as {one.who}"
        for one in bench.results[1:]
    ]
    return [
        *describe_train(bench),
        *ratios,
        "first step of a contender: from the start of its building",
    ]


def checked_names(names: Sequence[str]) -> tuple[str, ...]:
    """Contenders by name."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"--compare {name} is unknown; there are {', '.join(NAMES)}.")
    if len(set(names)) < len(names):
        raise ConfigError("--compare names somebody twice; leave one out.")
    return tuple(names)


OPTIONS = (
    *MEASURING,
    Option("--compare", "some of hf, hf-plain, hf-bf16", comma_list, "hf"),
    Option("--compare-batch", "their rows (default: as ours, or their best)", positive),
)


def _run(options: Options) -> None:
    names = checked_names(options.compare)
    if not names:
        raise ConfigError("--compare names nobody; give hf, or leave it out.")
    measure = partial(compare, names, options.compare_batch or 0)
    measure_and_report(options, measure, describe)


PROGRAM = Verb(
    "tokens/s of a model's training here, beside transformers in the same process",
    OPTIONS,
    _run,
    True,
    duration_hint=lambda o: f"per trainer {training_duration(o)}",
)


if __name__ == "__main__":
    main_of("benchmarks.train_hf", PROGRAM)
