"""`foundling bench train` and `bench profile`: how fast a model trains, and what takes the time."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.config.errors import ConfigError
from foundling.verbs.base import (
    Options,
    Settings,
    Verb,
    above_zero,
    count,
    positive,
    print_json,
)

if TYPE_CHECKING:
    from foundling.bench.figures import Held
    from foundling.bench.steps import Tell
    from foundling.bench.train import Asked
    from foundling.bench.train_table import Bench
    from foundling.config.sections import RunConfig


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

    from foundling.config.resolve import resolve
    from foundling.plan import known_sizes
    from foundling.runtime.log import warn

    if batch and {"train.batch_size", "train.batch-size"} & set(settings):
        raise ConfigError("--batch and --train.batch-size both give the rows; give one.")
    config, _ = known_sizes(resolve(target, settings, tell=warn))
    rows = 8 if batch == "best" else int(batch or config.train.batch_size)
    return replace(config, train=replace(config.train, batch_size=rows))


def _refuse_idle(options: Options) -> None:
    """Options that change nothing beside the others."""
    from foundling.bench.early import refuse_idle

    if not options.check_steps:
        names = ("check_data", "reference", "tolerance", "check_rows")
        given = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
        refuse_idle(given, "with --check-steps 0")


def _train(options: Options, settings: Settings) -> None:
    from foundling.bench.train import bench_train
    from foundling.bench.train_table import describe_train

    measure_and_report(options, settings, bench_train, describe_train)


def measure_and_report(
    options: Options,
    settings: Settings,
    measure: "Callable[[RunConfig, Asked, Tell], Bench]",
    describe: "Callable[[Bench], list[str]]",
) -> None:
    """What `bench train` does around the measuring: what is refused before it, the table, and the
    recorded figures."""
    from foundling.bench import figures
    from foundling.bench.early import refuse_unwritable
    from foundling.runtime.device import choose
    from foundling.runtime.log import console
    from foundling.train.ceilings import device_name

    _refuse_idle(options)
    config = sized(options.target, settings, options.batch or "")
    device = choose(config.train.device, config.train.dtype).device
    line = figures.line_of(
        options.target,
        settings,
        device=device_name(device),
        batch=options.batch or "",
        micro_steps=options.micro_steps,
        memory=options.memory or 0.0,
        data=str(options.data or ""),
    )
    wanted = figures.recorded(options.against, line) if options.against else None
    if wanted is not None:
        figures.refuse_changed(wanted, line, config)
        figures.refuse_unlike(wanted, options.check_steps)
    if options.record:
        refuse_unwritable(options.record, "--record")
        figures.read_figures(options.record)  # one that is none: refused before minutes of work
    tell = partial(console(stderr=True).print, markup=False)
    bench = measure(config, _asked(options), tell)
    held = figures.held_to(bench.ours.tokens_per_s, wanted) if wanted is not None else None
    _report(bench, str(line), held, None if options.json else describe(bench))
    if options.record:
        kept = {**bench.figure(), "meaning": figures.meaning_of(config, line)}
        figures.record(options.record, line, kept)
        tell(f"recorded in {options.record}")


def _asked(options: Options) -> "Asked":
    from foundling.bench.train import Asked

    return Asked(
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


def _report(bench: "Bench", line: str, held: "Held | None", table: list[str] | None) -> None:
    """The table (None: JSON), and whether it is to be believed: exit code 1 where the losses or the
    recorded figure are not reached."""
    from foundling.runtime.log import warn

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
    from foundling.runtime.log import console

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


VERBS = {
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
