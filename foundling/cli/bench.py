"""`foundling bench ...`: speed and memory of a model on this machine."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.cli.options import (
    DEVICES,
    Options,
    Settings,
    Verb,
    above_zero,
    count,
    listed,
    positive,
    print_json,
    refuse_given,
    resolved,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.bench.baselines import Held
    from foundling.bench.kernels import KernelTiming
    from foundling.bench.train import BenchOptions, TrainBench
    from foundling.config.run import RunConfig
    from foundling.profiling.step_runner import Tell


def _layouts(options: Options, settings: Settings) -> None:
    from foundling.bench.layouts import (
        METHOD,
        bench_parallel,
        chosen,
        describe_parallel,
        same_losses,
    )
    from foundling.launch.environment import refuse_crowd, surroundings, visible_gpus
    from foundling.runtime.console import warn

    layouts = chosen([] if options.layouts == "all" else listed(options.layouts))
    if surroundings().kind != "alone":
        raise ConfigError(
            "bench train --layouts starts its own processes; run it outside of a job."
        )
    config = resolved(options.target, settings)
    gpus = visible_gpus() if config.train.device in ("auto", "cuda") else 0
    processes = options.nproc or gpus or 4
    refuse_crowd(processes, uses_gpus=bool(gpus))
    results = []
    for result in bench_parallel(
        config, layouts, processes, steps=options.steps or STEPS, limit_s=options.limit or LIMIT_S
    ):
        results.append(result)
        text = result.refusal or f"{result.tokens_per_s:,.0f} tokens/s"
        _say(f"{result.layout}: {text}")
    if options.json:
        print_json(
            {
                "processes": processes,
                "method": METHOD,
                "layouts": [asdict(result) for result in results],
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
    parser.add_argument("target", help="preset, YAML file, or run directory")
    parser.add_argument("--batch", type=positive, help="rows (default: the config's)")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument(
        "--only", help="some parts, or kinds of one: loss,attention:flash (default: all of them)"
    )
    parser.add_argument("--seconds", type=above_zero, default=0.3, help="of each measurement")


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


def _collect(rows: "Iterable[KernelTiming]") -> "list[KernelTiming]":
    """Collect, and say how far it has come."""
    found = []
    for row in rows:
        found.append(row)
        _say(f"{row.name} {row.refusal}".rstrip())
    return found


def _say(text: str) -> None:
    from foundling.runtime.console import console

    console(stderr=True).print(text, markup=False)


def _kernels(options: Options, settings: Settings) -> None:
    from foundling.bench import kernels
    from foundling.runtime.console import warn

    parts = _asked_parts(options.only)
    if "attention" in parts:
        own = ("train.kernels.attention", "train.kernels.attention_masked")
        because = "where every kernel is launched (--only attention:NAME takes one)"
        _refuse_set(settings, own, because)
    if "loss" in parts:
        because = "where every loss is computed (--only loss:NAME takes one)"
        _refuse_set(settings, ["train.kernels.loss"], because)
    if options.batch and set(parts) == {"optimizer"}:
        raise ConfigError(
            "--batch has no effect on an optimizer, which sees no rows; leave it out."
        )
    config = sized(options.target, settings, str(options.batch or ""))
    # All of them are called, and so have refused what they must, before the first is measured.
    begun = {
        part: kernels.BENCHES[part](config, only=kinds, seconds=options.seconds)
        for part, kinds in parts.items()
    }
    found = {part: _collect(rows) for part, rows in begun.items()}
    if options.json:
        print_json({part: [row.to_json() for row in rows] for part, rows in found.items()})
    else:
        for part, rows in found.items():
            print("\n".join(kernels.describe_kernels(part, rows, config)))
    failed = [part for part, rows in found.items() if all(row.refusal for row in rows)]
    for part in failed:
        warn(f"no {part} could be measured; the lines above say why.")
    if failed:
        raise SystemExit(1)


def _memory(options: Options, settings: Settings) -> None:
    from foundling.bench.profile import bench_memory, describe_memory

    config = sized(options.target, settings, str(options.batch or ""))
    found = bench_memory(config, options.snapshot, _say)
    print_json(found.to_json()) if options.json else print("\n".join(describe_memory(found)))


def _refuse_set(settings: Settings, own: Iterable[str], because: str) -> None:
    """Settings that a bench sets by itself."""
    from foundling.bench.batch_size import refuse_unused

    given = {name.replace("-", "_"): name for name in settings}
    refuse_unused({f"--{name}": given.get(name) for name in own}, because)


STEPS, CHECK_STEPS, LIMIT_S = 10, 50, 600.0
OTHER_MEASUREMENTS = {
    "profile": ("batch", "steps", "trace", "profiled", "quick"),
    "memory": ("batch", "snapshot"),
    "layouts": ("steps", "nproc", "limit"),
}
"""What else `bench train` measures, and the options of each measurement."""


def _train_options(parser: argparse.ArgumentParser) -> None:
    train_options(parser)
    add = parser.add_argument
    add("--profile", action="store_true", help="where a step's time goes, against its ceilings")
    add("--trace", type=Path, help="--profile: chrome trace to write (default: trace.json.gz)")
    add("--profiled", type=positive, help="--profile: steps that are profiled (default: 2)")
    add("--quick", action="store_true", help="--profile: measure fewer ceilings")
    add("--memory", action="store_true", help="what a step holds, layer by layer")
    add("--snapshot", type=Path, help="--memory: write the allocator's own account (CUDA)")
    add("--layouts", help="speed, memory and communication of ddp,fsdp2 or all layouts")
    add("--nproc", type=positive, help="--layouts: processes (default: one a GPU, or 4)")
    add("--limit", type=above_zero, help=f"--layouts: seconds of each (default: {LIMIT_S:g})")


def _other_measurement(options: Options) -> str:
    """profile, memory, layouts, or "" for the training itself; options of another measurement are
    refused."""
    asked = [use for use in OTHER_MEASUREMENTS if getattr(options, use)]
    if len(asked) > 1:
        raise ConfigError(f"--{asked[0]} and --{asked[1]} exclude each other; give one of them.")
    use = asked[0] if asked else ""
    theirs = {name for names in OTHER_MEASUREMENTS.values() for name in names} - {"batch", "steps"}
    ours = {"target", "json", *OTHER_MEASUREMENTS} | set(OTHER_MEASUREMENTS.get(use, ()))
    idle = sorted(set(vars(options)) - ours) if use else sorted(theirs)
    refuse_given(options, idle, f"with --{use}" if use else "on the training itself")
    if use and options.batch == "best":
        raise ConfigError(f"--batch best has no effect with --{use}; give a number of rows.")
    return use


def train_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench train`."""
    parser.add_argument("target", help="preset, YAML file, or run directory")
    parser.add_argument("--steps", type=positive, help=f"steps that are timed (default: {STEPS})")
    parser.add_argument("--batch", type=_batch, help="rows, or best to look for the fastest")
    parser.add_argument(
        "--micro-steps", type=count, help="of a step (default: 1); 0: as the config's global batch"
    )
    parser.add_argument("--data", type=Path, help="built data set (default: random tokens)")
    parser.add_argument(
        "--check-steps", type=count, help="steps of the loss check (default: 50); 0: none"
    )
    parser.add_argument(
        "--check-rows", type=count, help="rows of its later steps (default: 4); 0: as timed"
    )
    parser.add_argument(
        "--check-data", type=Path, help="data set it reads (default: --data's, or the hamlet)"
    )
    parser.add_argument("--reference", type=Path, help="file that keeps the reference's losses")
    parser.add_argument("--tolerance", type=above_zero, help="of its loss (default: by dtype)")
    parser.add_argument("--limit-gb", type=above_zero, help="memory to use: a smaller card")
    parser.add_argument("--against", type=Path, help="fail below 97%% of this file's figure")
    parser.add_argument("--record", type=Path, help="add the figure to this file, or replace it")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _batch(text: str) -> str:
    if text != "best" and text[:1].isalpha():
        raise ConfigError(f"{text} is neither a number of rows such as 16 nor best.")
    return text if text == "best" else str(positive(text))


def sized(target: str, settings: Settings, batch: str) -> "RunConfig":
    """The config, its vocabulary known from the data and its rows from --batch."""

    from foundling.config.load import load_config
    from foundling.plan.supply import known_sizes
    from foundling.runtime.console import warn

    if batch and {"train.batch_size", "train.batch-size"} & set(settings):
        raise ConfigError("--batch and --train.batch-size both give the rows; give one.")
    config, _ = known_sizes(load_config(target, settings, tell=warn))
    rows = 8 if batch == "best" else int(batch or config.train.batch_size)
    return config.replace(train={"batch_size": rows})


def _refuse_unused(options: Options) -> None:
    """Refuse options that have no effect with the others."""
    from foundling.bench.batch_size import refuse_unused

    if options.check_steps == 0:
        names = ("check_data", "reference", "tolerance", "check_rows")
        given = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
        refuse_unused(given, "with --check-steps 0")


def _train(options: Options, settings: Settings) -> None:
    from foundling.bench.train import bench_train, describe_train

    if use := _other_measurement(options):
        return {"profile": _profile, "memory": _memory, "layouts": _layouts}[use](options, settings)
    return measure_and_report(options, settings, bench_train, describe_train)


def measure_and_report(
    options: Options,
    settings: Settings,
    measure: "Callable[[RunConfig, BenchOptions, Tell], TrainBench]",
    describe: "Callable[[TrainBench], list[str]]",
) -> None:
    """What `bench train` does around the measuring: what is refused before it, the table, and the
    recorded figures."""
    from foundling.bench import baselines
    from foundling.bench.batch_size import refuse_unwritable
    from foundling.runtime.device import choose_device, device_name

    _refuse_unused(options)
    for name, default in {"steps": STEPS, "micro_steps": 1, "check_steps": CHECK_STEPS}.items():
        setattr(
            options, name, default if getattr(options, name) is None else getattr(options, name)
        )
    config = sized(options.target, settings, options.batch or "")
    device = choose_device(config.train.device, config.train.dtype).device
    line = baselines.line_of(
        options.target,
        settings,
        device=device_name(device),
        batch=options.batch or "",
        micro_steps=options.micro_steps,
        memory=options.limit_gb or 0.0,
        data=str(options.data or ""),
    )
    wanted = baselines.recorded(options.against, line) if options.against else None
    if wanted is not None:
        baselines.refuse_changed(wanted, line, config)
        baselines.refuse_unlike(wanted, options.check_steps)
    if options.record:
        refuse_unwritable(options.record, "--record")
        baselines.read_figures(options.record)  # one that is none: refused before minutes of work
    bench = measure(config, _bench_options(options), _say)
    held = baselines.held_to(bench.ours.tokens_per_s, wanted) if wanted is not None else None
    _report(bench, str(line), held, None if options.json else describe(bench))
    if options.record:
        kept = {**bench.figure(), "meaning": baselines.meaning_of(config, line)}
        baselines.record(options.record, line, kept)
        _say(f"recorded in {options.record}")


def _bench_options(options: Options) -> "BenchOptions":
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
        memory=options.limit_gb or 0.0,
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
            print(held.sentence)
    problems = list(bench.check.problems) if bench.check else []
    if held and not held.is_reached:
        problems.append(held.sentence)
    for problem in problems:
        warn(problem)
    if problems:
        raise SystemExit(1)


def _profile(options: Options, settings: Settings) -> None:
    from foundling.bench.profile import bench_profile, describe_profile

    config = sized(options.target, settings, str(options.batch or ""))
    found = bench_profile(
        config,
        options.trace or Path("trace.json.gz"),
        steps=options.steps or 5,
        profiled=options.profiled or 2,
        quick=options.quick,
        tell=_say,
    )
    print_json(asdict(found)) if options.json else print("\n".join(describe_profile(found)))


def duration_hint(options: Options) -> str:
    """How long `bench train` takes."""
    check = CHECK_STEPS if options.check_steps is None else options.check_steps
    return (
        f"a start and {options.steps or STEPS} steps, half a minute on a GPU; the loss check takes"
        f" {check} steps twice"
    )


def _duration_hint(options: Options) -> str:
    hints = {
        "layouts": f"a minute a layout, and {options.limit or LIMIT_S:g} s at most",
        "memory": "a start and two steps, half a minute",
        "profile": "ceilings for a minute, then some steps",
    }
    return next((hints[use] for use in hints if getattr(options, use)), duration_hint(options))


def _generate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", help="preset, YAML file, or run directory: the model's shape")
    add("--batch", default="1,8", help="requests at a time (default: 1,8)")
    add("--prompt", type=positive, default=512, help="tokens of their prompts")
    add("--new", type=positive, default=128, help="new tokens of each")
    add("--sampling", default="greedy,temperature", help="greedy, temperature, top-p: any of them")
    add("--first", default="2048", help="lengths of prompts whose first token is timed")
    add("--weights", choices=("fp32", "bf16", "int8"), help="(default: bf16 on CUDA, else fp32)")
    add("--rounds", type=positive, default=3, help="of which the median counts")
    add("--device", choices=DEVICES, default="auto", help="where to compute")
    add("--no-compile", action="store_true", help="leave small operations unfused (CUDA)")
    add("--json", action="store_true", help="print as JSON")


def _generate(options: Options, settings: Settings) -> None:
    from foundling.bench.generate import SAMPLINGS, bench_generate, describe_generate
    from foundling.profiling.ceilings import measure_ceilings
    from foundling.runtime.console import warn
    from foundling.runtime.device import choose_device

    samplings = listed(options.sampling)
    if unknown := [name for name in samplings if name not in SAMPLINGS]:
        raise ConfigError(f"--sampling {unknown[0]} is none of {', '.join(SAMPLINGS)}.")
    config = sized(options.target, settings, "")
    device = choose_device(options.device, "fp32").device
    found = bench_generate(
        config.model,
        device,
        batches=[positive(word) for word in listed(options.batch)],
        prompt=options.prompt,
        new=options.new,
        samplings=samplings,
        weights=options.weights,
        first=[positive(word) for word in listed(options.first)],
        rounds=options.rounds,
        ceilings=measure_ceilings(device, quick=True),
        compiled=False if options.no_compile else None,
        tell=_say,
    )
    print_json(asdict(found)) if options.json else print("\n".join(describe_generate(found)))
    if found.wrong:
        warn(f"{found.wrong} of {found.checked} tokens are not the plain decoder's: no figure here")
        raise SystemExit(1)


VERBS = {
    "bench generate": Verb(
        "tokens/s of decoding and seconds to the first token, with a check of the tokens",
        _generate_options,
        _generate,
        takes_settings=True,
        duration_hint="a start, then some seconds for each batch size and sampling",
    ),
    "bench train": Verb(
        "tokens/s of a model's training here, with a loss check; or where its time or memory goes",
        _train_options,
        _train,
        takes_settings=True,
        duration_hint=_duration_hint,
    ),
    "bench kernels": Verb(
        "attention kernels, ways to compute the loss and optimizers, at a model's shapes",
        _kernel_options,
        _kernels,
        takes_settings=True,
        duration_hint=lambda o: (
            f"{o.seconds:g} s for each kind, mask and direction; a few to compile"
        ),
    ),
}
