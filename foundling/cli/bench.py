"""`foundling bench ...`: speed and memory of a model on this machine."""

import argparse
from collections.abc import Callable, Iterable
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
    from foundling.runtime.console import warn

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
        _say(f"{result.layout}: {told}")
    if options.json:
        print_json(
            {
                "processes": processes,
                "method": METHOD,
                "layouts": [result.to_json() for result in results],
            }
        )
    else:
        print("\n".join(describe_parallel(results, processes, "cuda" if gpus else "cpu")))
    if all(result.refusal for result in results):
        raise ConfigError("no layout could be measured; the lines above say what each needs.")
    if differing := same_losses(results):
        warn(differing)
        raise SystemExit(1)


PARTS = ("attention", "loss", "optimizer")


def _kernel_options(parser: argparse.ArgumentParser) -> None:
    _options(parser)
    parser.add_argument(
        "--only", help="some parts, or kinds of one: loss,attention:flash (default: all of them)"
    )
    parser.add_argument("--seconds", type=above_zero, default=0.3, help="of each measurement")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="preset, YAML file, or run directory")
    parser.add_argument("--batch", type=positive, help="rows (default: the config's)")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _asked_parts(only: str | None) -> dict[str, tuple[str, ...]]:
    """The kinds of each part that --only names; none is all of its kinds."""
    words = [word.partition(":") for word in listed(only) or PARTS]
    for part, colon, kind in words:
        if part not in PARTS or (colon and not kind):
            raise ConfigError(
                f"--only {part}{colon}{kind} is unknown here; there are {', '.join(PARTS)}, and"
                " kinds of them as attention:flash."
            )
    whole = {part for part, _, kind in words if not kind}
    kinds = {
        part: () if part in whole else [k for p, _, k in words if p == part] for part, _, _ in words
    }
    return {part: tuple(named) for part, named in kinds.items()}


def _tell(part: str, rows: Iterable[Any]) -> list[Any]:
    """Collect, and say how far it has come."""
    found: list[Any] = []
    fields = ("mask", "kernel", "refusal") if part == "attention" else ("name", "refusal")
    for row in rows:
        found.append(row)
        _say(" ".join(str(getattr(row, field)) for field in fields).strip())
    return found


def _say(text: str) -> None:
    from foundling.runtime.console import console

    console(stderr=True).print(text, markup=False)


def _kernels(options: Options, settings: Settings) -> None:
    from foundling.bench import kernels
    from foundling.runtime.console import warn

    parts = _asked_parts(options.only)
    if "attention" in parts:
        own = ("train.attention", "train.attention_masked")
        because = "where every kernel is launched (--only attention:NAME takes one)"
        _refuse_set(settings, own, because)
    if "loss" in parts:
        because = "where every loss is computed (--only loss:NAME takes one)"
        _refuse_set(settings, ["train.loss"], because)
    if options.batch and set(parts) == {"optimizer"}:
        raise ConfigError(
            "--batch has no effect on an optimizer, which sees no rows; leave it out."
        )
    config = sized(options.target, settings, str(options.batch or ""))
    # All of them are called, and so have refused what they must, before the first is measured.
    begun = {
        part: getattr(kernels, f"bench_{part}")(config, only=kinds, seconds=options.seconds)
        for part, kinds in parts.items()
    }
    found = {part: _tell(part, rows) for part, rows in begun.items()}
    if options.json:
        print_json({part: [row.to_json() for row in rows] for part, rows in found.items()})
    else:
        for part, rows in found.items():
            print("\n".join(getattr(kernels, f"describe_{part}")(rows, config)))
    failed = [part for part, rows in found.items() if all(row.refusal for row in rows)]
    for part in failed:
        warn(f"no {part} could be measured; the lines above say why.")
    if failed:
        raise SystemExit(1)


def _memory_options(parser: argparse.ArgumentParser) -> None:
    _options(parser)
    parser.add_argument(
        "--snapshot", type=Path, help="write the allocator's own account here (CUDA)"
    )


def _memory(options: Options, settings: Settings) -> None:
    from foundling.bench.profile import bench_memory, describe_memory

    config = sized(options.target, settings, str(options.batch or ""))
    found = bench_memory(config, options.snapshot, _say)
    print_json(found.to_json()) if options.json else print("\n".join(describe_memory(found)))


def _refuse_set(settings: Settings, own: Iterable[str], because: str) -> None:
    """Settings that a bench sets by itself."""
    from foundling.bench.step_runner import refuse_idle

    given = {name.replace("-", "_"): name for name in settings}
    refuse_idle({f"--{name}": given.get(name) for name in own}, because)


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
    bench = measure(config, _asked(options), _say)
    held = baselines.held_to(bench.ours.tokens_per_s, wanted) if wanted is not None else None
    _report(bench, str(line), held, None if options.json else describe(bench))
    if options.record:
        kept = {**bench.figure(), "meaning": baselines.meaning_of(config, line)}
        baselines.record(options.record, line, kept)
        _say(f"recorded in {options.record}")


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
        print("\n".join(table))
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

    config = sized(options.target, settings, str(options.batch or ""))
    found = bench_profile(
        config,
        options.trace,
        steps=options.steps,
        profiled=options.profiled,
        quick=options.quick,
        tell=_say,
    )
    print_json(found.to_json()) if options.json else print("\n".join(describe_profile(found)))


VERBS = {
    "bench parallel": Verb(
        "speed, memory and communication of each layout",
        _parallel_options,
        _parallel,
        takes_settings=True,
        lasts=lambda o: f"a minute a layout, and {o.limit:g} s at most",
    ),
    "bench kernels": Verb(
        "attention kernels, ways to compute the loss and optimizers, at a model's shapes",
        _kernel_options,
        _kernels,
        True,
        lasts=lambda o: f"{o.seconds:g} s for each kind, mask and direction; a few to compile",
    ),
    "bench memory": Verb(
        "what a step holds, layer by layer",
        _memory_options,
        _memory,
        True,
        lasts="a start and two steps, half a minute",
    ),
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
