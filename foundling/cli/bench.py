"""`foundling bench ...`: speed and memory of a model on this machine."""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.cli.options import (
    Options,
    Settings,
    Verb,
    above_zero,
    count,
    listed,
    positive,
    print_json,
    resolved,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.bench.baselines import Held
    from foundling.bench.step_runner import Tell
    from foundling.bench.train import BenchOptions, TrainBench
    from foundling.config.run import RunConfig

# `foundling bench parallel`: layouts side by side on this machine.


def _parallel_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="preset, YAML file, or run directory")
    parser.add_argument("--layouts", help="such as ddp,fsdp2 (default: ddp,fsdp1,fsdp2,hsdp)")
    parser.add_argument("--nproc", type=positive, help="processes (default: one a GPU, or 4)")
    parser.add_argument("--steps", type=positive, default=10, help="steps that are timed")
    parser.add_argument(
        "--limit", type=above_zero, default=600.0, help="seconds that a layout may take"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _parallel(options: Options, settings: Settings) -> None:
    from foundling.bench.layouts import (
        METHOD,
        bench_parallel,
        chosen,
        describe_parallel,
        same_losses,
    )
    from foundling.launch.environment import refuse_crowd, surroundings, visible_gpus
    from foundling.runtime.console import console, warn

    layouts = chosen(listed(options.layouts))
    if surroundings().kind != "alone":
        raise ConfigError("bench parallel starts its own processes; run it outside of a job.")
    config = resolved(options.target, settings)
    gpus = visible_gpus() if config.train.device in ("auto", "cuda") else 0
    processes = options.nproc or gpus or 4
    refuse_crowd(processes, uses_gpus=bool(gpus))
    results = []
    for result in bench_parallel(
        config, layouts, processes, steps=options.steps, limit_s=options.limit
    ):
        results.append(result)
        told = result.refusal or f"{result.tokens_per_s:,.0f} tokens/s"
        console(stderr=True).print(f"{result.layout}: {told}", markup=False)
    if options.json:
        print_json(
            {
                "processes": processes,
                "method": METHOD,
                "layouts": [result.to_json() for result in results],
            }
        )
    else:
        for line in describe_parallel(results, processes, "cuda" if gpus else "cpu"):
            print(line)
    if all(result.refusal for result in results):
        raise ConfigError("no layout could be measured; the lines above say what each needs.")
    if differing := same_losses(results):
        warn(differing)
        raise SystemExit(1)


BENCH_VERBS = {
    "bench parallel": Verb(
        "speed, memory and communication of each layout",
        _parallel_options,
        _parallel,
        takes_settings=True,
        lasts=lambda o: f"a minute a layout, and {o.limit:g} s at most",
    ),
}


# `foundling bench attention | loss | optimizer | memory`: the parts of a step alone.


def _options(parser: argparse.ArgumentParser, *, rows: bool = True) -> None:
    parser.add_argument("target", help="preset, YAML file, or run directory")
    if rows:
        parser.add_argument("--batch", type=positive, help="rows (default: the config's)")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _timed_options(parser: argparse.ArgumentParser, *, example: str, rows: bool = True) -> None:
    _options(parser, rows=rows)
    parser.add_argument("--only", help=f"some of them, such as {example}")
    parser.add_argument("--seconds", type=above_zero, default=0.3, help="of each measurement")


def _tell(rows: Iterable[Any], name: str) -> list[Any]:
    """Collect, and say how far it has come."""
    found: list[Any] = []
    for row in rows:
        found.append(row)
        _say(" ".join(str(getattr(row, field)) for field in (*name.split(), "refusal")).strip())
    return found


def _say(text: str) -> None:
    from foundling.runtime.console import console

    console(stderr=True).print(text, markup=False)


def _print(rows: list[Any], lines: list[str], as_json: bool) -> None:
    if as_json:
        return print_json([row.to_json() for row in rows])
    for line in lines:
        print(line)
    return None


def _fail_if_none(rows: list[Any], told: str) -> None:
    from foundling.runtime.console import warn

    if all(row.refusal for row in rows):
        warn(f"{told}; the lines above say why.")
        raise SystemExit(1)


def _attention(options: Options, settings: Settings) -> None:
    from foundling.bench.kernels import bench_attention, describe_attention

    own = ("train.attention", "train.attention_masked")
    _refuse_set(settings, own, "where every kernel is launched (--only NAME takes one)")
    config = sized(options.target, settings, str(options.batch or ""))
    only = tuple(listed(options.only))
    rows = _tell(bench_attention(config, only=only, seconds=options.seconds), "mask kernel")
    _print(rows, describe_attention(rows, config), options.json)
    _fail_if_none(rows, "no kernel could be launched")


def _loss(options: Options, settings: Settings) -> None:
    from foundling.bench.kernels import bench_loss, describe_loss

    _refuse_set(settings, ["train.loss"], "where every loss is computed (--only NAME takes one)")
    config = sized(options.target, settings, str(options.batch or ""))
    only = tuple(listed(options.only))
    rows = _tell(bench_loss(config, only=only, seconds=options.seconds), "name")
    _print(rows, describe_loss(rows, config), options.json)
    _fail_if_none(rows, "no loss could be measured")


def _optimizer(options: Options, settings: Settings) -> None:
    from foundling.bench.kernels import bench_optimizer, describe_optimizer

    config = sized(options.target, settings, "")
    only = tuple(listed(options.only))
    rows = _tell(bench_optimizer(config, only=only, seconds=options.seconds), "name")
    _print(rows, describe_optimizer(rows, config), options.json)
    _fail_if_none(rows, "no optimizer could be measured")


def _memory_options(parser: argparse.ArgumentParser) -> None:
    _options(parser)
    parser.add_argument(
        "--snapshot", type=Path, help="write the allocator's own account here (CUDA)"
    )


def _memory(options: Options, settings: Settings) -> None:
    from foundling.bench.profile import bench_memory, describe_memory

    config = sized(options.target, settings, str(options.batch or ""))
    found = bench_memory(config, options.snapshot, _say)
    if options.json:
        return print_json(found.to_json())
    for line in describe_memory(found):
        print(line)
    return None


def _refuse_set(settings: Settings, own: Iterable[str], because: str) -> None:
    """Settings that a bench sets by itself."""
    from foundling.bench.step_runner import refuse_idle

    given = {name.replace("-", "_"): name for name in settings}
    refuse_idle({f"--{name}": given.get(name) for name in own}, because)


PART_VERBS = {
    "bench attention": Verb(
        "every attention kernel at a model's shapes",
        partial(_timed_options, example="flash,math"),
        _attention,
        True,
        lasts=lambda o: (
            f"{o.seconds:g} s for each kernel, mask and direction, and a few to compile"
        ),
    ),
    "bench loss": Verb(
        "ways to compute the head's loss",
        partial(_timed_options, example="plain,fused"),
        _loss,
        True,
        lasts=lambda o: f"{o.seconds:g} s for each way, and a few to compile",
    ),
    "bench optimizer": Verb(
        "updates of a model's parameters",
        partial(_timed_options, example="fused,muon", rows=False),
        _optimizer,
        True,
        lasts=lambda o: f"{o.seconds:g} s for each optimizer, and a few to compile",
    ),
    "bench memory": Verb(
        "what a step holds, layer by layer",
        _memory_options,
        _memory,
        True,
        lasts="a start and two steps, half a minute",
    ),
}


# `foundling bench train` and `bench profile`: how fast a model trains, and what takes the time.


def train_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench train`."""
    parser.add_argument("target", help="preset, YAML file, or run directory")
    parser.add_argument("--steps", type=positive, default=10, help="steps that are timed")
    parser.add_argument("--batch", type=_batch, help="rows, or best to look for the fastest")
    parser.add_argument(
        "--micro-steps", type=count, default=1, help="of a step; 0: as the config's global batch"
    )
    parser.add_argument("--data", type=Path, help="built data set (default: random tokens)")
    parser.add_argument(
        "--check-steps", type=count, default=50, help="steps of the loss check; 0: none"
    )
    parser.add_argument(
        "--check-rows", type=count, help="rows of its later steps (default: 4); 0: as timed"
    )
    parser.add_argument(
        "--check-data", type=Path, help="data set it reads (default: --data's, or the hamlet)"
    )
    parser.add_argument("--reference", type=Path, help="file that keeps the reference's losses")
    parser.add_argument("--tolerance", type=above_zero, help="of its loss (default: by dtype)")
    parser.add_argument("--memory", type=above_zero, help="GB to use at most: a smaller card")
    parser.add_argument("--against", type=Path, help="fail below 97%% of this file's figure")
    parser.add_argument("--record", type=Path, help="add the figure to this file, or replace it")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _batch(text: str) -> str:
    if text != "best" and text[:1].isalpha():
        raise ConfigError(f"{text} is neither a number of rows such as 16 nor best.")
    return text if text == "best" else str(positive(text))


def sized(target: str, settings: Settings, batch: str) -> "RunConfig":
    """The config, its vocabulary known from the data and its rows from --batch."""
    from dataclasses import replace

    from foundling.config.load import load_config
    from foundling.plan.supply import known_sizes
    from foundling.runtime.console import warn

    if batch and {"train.batch_size", "train.batch-size"} & set(settings):
        raise ConfigError("--batch and --train.batch-size both give the rows; give one.")
    config, _ = known_sizes(load_config(target, settings, tell=warn))
    rows = 8 if batch == "best" else int(batch or config.train.batch_size)
    return replace(config, train=replace(config.train, batch_size=rows))


def _refuse_idle(options: Options) -> None:
    """Options that change nothing beside the others."""
    from foundling.bench.step_runner import refuse_idle

    if not options.check_steps:
        names = ("check_data", "reference", "tolerance", "check_rows")
        given = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
        refuse_idle(given, "with --check-steps 0")


def _train(options: Options, settings: Settings) -> None:
    from foundling.bench.train import bench_train, describe_train

    measure_and_report(options, settings, bench_train, describe_train)


def measure_and_report(
    options: Options,
    settings: Settings,
    measure: "Callable[[RunConfig, BenchOptions, Tell], TrainBench]",
    describe: "Callable[[TrainBench], list[str]]",
) -> None:
    """What `bench train` does around the measuring: what is refused before it, the table, and the
    recorded figures."""
    from foundling.bench import baselines
    from foundling.bench.step_runner import refuse_unwritable
    from foundling.runtime.console import console
    from foundling.runtime.device import choose, device_name

    _refuse_idle(options)
    config = sized(options.target, settings, options.batch or "")
    device = choose(config.train.device, config.train.dtype).device
    line = baselines.line_of(
        options.target,
        settings,
        device=device_name(device),
        batch=options.batch or "",
        micro_steps=options.micro_steps,
        memory=options.memory or 0.0,
        data=str(options.data or ""),
    )
    wanted = baselines.recorded(options.against, line) if options.against else None
    if wanted is not None:
        baselines.refuse_changed(wanted, line, config)
        baselines.refuse_unlike(wanted, options.check_steps)
    if options.record:
        refuse_unwritable(options.record, "--record")
        baselines.read_figures(options.record)  # one that is none: refused before minutes of work
    tell = partial(console(stderr=True).print, markup=False)
    bench = measure(config, _asked(options), tell)
    held = baselines.held_to(bench.ours.tokens_per_s, wanted) if wanted is not None else None
    _report(bench, str(line), held, None if options.json else describe(bench))
    if options.record:
        kept = {**bench.figure(), "meaning": baselines.meaning_of(config, line)}
        baselines.record(options.record, line, kept)
        tell(f"recorded in {options.record}")


def _asked(options: Options) -> "BenchOptions":
    from foundling.bench.train import BenchOptions

    return BenchOptions(
        steps=options.steps,
        best=options.batch == "best",
        micro_steps=options.micro_steps,
        data=options.data,
        check_data=options.check_data,
        check_steps=options.check_steps,
        check_rows=4 if options.check_rows is None else options.check_rows,
        tolerance=options.tolerance,
        reference=options.reference,
        memory=options.memory or 0.0,
    )


def _report(bench: "TrainBench", line: str, held: "Held | None", table: list[str] | None) -> None:
    """The table (None: JSON), and whether it is to be believed: exit code 1 where the losses or the
    recorded figure are not reached."""
    from foundling.runtime.console import warn

    if table is None:
        print_json({"line": line, **bench.to_json(), "against": held.to_json() if held else None})
    else:
        for text in table:
            print(text)
        if held and held.is_reached:
            print(held.told)
    problems = list(bench.check.problems) if bench.check else []
    if held and not held.is_reached:
        problems.append(held.told)
    for problem in problems:
        warn(problem)
    if problems:
        raise SystemExit(1)


def _profile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="preset, YAML file, or run directory")
    parser.add_argument("--batch", type=positive, help="rows (default: the config's)")
    parser.add_argument("--steps", type=positive, default=5, help="steps that are timed")
    parser.add_argument("--profiled", type=positive, default=2, help="steps that are profiled")
    parser.add_argument(
        "--trace", type=Path, default=Path("trace.json.gz"), help="chrome trace to write"
    )
    parser.add_argument("--quick", action="store_true", help="measure fewer ceilings")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _profile(options: Options, settings: Settings) -> None:
    from foundling.bench.profile import bench_profile, describe_profile
    from foundling.runtime.console import console

    config = sized(options.target, settings, str(options.batch or ""))
    found = bench_profile(
        config,
        options.trace,
        steps=options.steps,
        profiled=options.profiled,
        quick=options.quick,
        tell=lambda text: console(stderr=True).print(text, markup=False),
    )
    if options.json:
        return print_json(found.to_json())
    for line in describe_profile(found):
        print(line)
    return None


TRAIN_VERBS = {
    "bench train": Verb(
        "tokens/s of a model's training here, with a loss check",
        train_options,
        _train,
        takes_settings=True,
        lasts=lambda o: (
            f"a start and {o.steps} steps, half a minute on a GPU; the loss check takes"
            f" {o.check_steps} steps twice"
        ),
    ),
    "bench profile": Verb(
        "where a step's time goes, and how near each part is to its ceiling",
        _profile_options,
        _profile,
        takes_settings=True,
        lasts=lambda o: f"ceilings for a minute, then {o.steps + o.profiled} steps",
    ),
}
