"""`foundling bench ...`: speed and memory of a model on this machine."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.cli.options import (
    DEVICE,
    JSON,
    TARGET,
    WEIGHTS,
    Option,
    Options,
    Verb,
    comma_list,
    config_of,
    count,
    positive,
    positive_float,
    positive_ints,
    print_json,
    print_lines,
    refuse_given,
    say_on_stderr,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.bench.baselines import Held
    from foundling.bench.kernels import KernelTiming
    from foundling.bench.train import BenchOptions, TrainBench
    from foundling.config.run import RunConfig
    from foundling.profiling.step_runner import Tell


def _rows_or_best(text: str) -> str:
    if text != "best" and text[:1].isalpha():
        raise ConfigError(f"{text} is neither a number of rows such as 16 nor best.")
    return text if text == "best" else str(positive(text))


MEASURING = (
    TARGET,
    Option("--batch", "rows, or best to look for the fastest", _rows_or_best, metavar="N"),
    Option("--steps", "steps that are timed (default: 10; with --profile 5)", positive),
    Option("--micro-steps", "of a step; 0: as the config's global batch", count, 1),
    Option("--data", "built data set (default: random tokens)", Path),
    JSON,
    Option("--check-steps", "steps of the loss check; 0: none", count, 50),
    Option("--check-rows", "rows of its later steps; 0: as timed", count, 4),
    Option("--check-data", "data set it reads (default: --data's, or the hamlet)", Path),
    Option("--reference", "file that keeps the reference's losses", Path),
    Option("--tolerance", "of its loss (default: by dtype)", positive_float),
    Option("--limit-gb", "memory to use: a smaller card", positive_float),
    Option("--against", "fail below 97% of this file's figure", Path),
    Option("--record", "add the figure to this file, or replace it", Path),
)
"""What `bench train` takes to time training, and `benchmarks.train_hf` too."""
_TRAIN_OPTIONS = (
    *MEASURING,
    Option(
        "--profile",
        "where a step's time goes, against its ceilings",
        bool,
        only_with=("settings", "batch", "steps", "json"),
    ),
    Option("--trace", "chrome trace to write", Path, "trace.json.gz", requires="profile"),
    Option("--profiled", "steps that are profiled", positive, 2, requires="profile"),
    Option("--quick", "measure fewer ceilings", bool, requires="profile"),
    Option(
        "--memory",
        "what a step holds, layer by layer",
        bool,
        only_with=("settings", "batch", "json"),
    ),
    Option("--snapshot", "write the allocator's own account (CUDA)", Path, requires="memory"),
    Option(
        "--layouts",
        "speed, memory and communication of ddp,fsdp2 or all layouts",
        only_with=("settings", "steps", "json"),
        metavar="A,B",
    ),
    Option("--nproc", "processes (default: one a GPU, or 4)", positive, requires="layouts"),
    Option("--limit", "seconds of each", positive_float, 600.0, requires="layouts"),
)


def _layouts(options: Options) -> None:
    from foundling.bench.layouts import (
        METHOD,
        bench_parallel,
        chosen,
        describe_parallel,
        same_losses,
    )
    from foundling.launch.environment import check_nproc, detect_environment, visible_gpus
    from foundling.runtime.console import warn

    layouts = chosen([] if options.layouts == "all" else comma_list(options.layouts))
    if detect_environment().kind != "alone":
        raise ConfigError(
            "bench train --layouts starts its own processes; run it outside of a job."
        )
    config = config_of(options.target, options.settings)
    gpus = visible_gpus() if config.train.device in ("auto", "cuda") else 0
    processes = options.nproc or gpus or 4
    check_nproc(processes, uses_gpus=bool(gpus))
    results = []
    for result in bench_parallel(
        config, layouts, processes, steps=options.steps or 10, limit_s=options.limit
    ):
        results.append(result)
        text = result.refusal or f"{result.tokens_per_s:,.0f} tokens/s"
        say_on_stderr(f"{result.layout}: {text}")
    if options.json:
        rows = [asdict(result) for result in results]
        print_json({"processes": processes, "method": METHOD, "layouts": rows})
    else:
        print_lines(describe_parallel(results, processes, "cuda" if gpus else "cpu"))
    if all(result.refusal for result in results):
        raise ConfigError("no layout could be measured; the lines above say what each needs.")
    if differing := same_losses(results):
        warn(differing)
        raise SystemExit(1)


_PARTS = ("attention", "loss", "optimizer")
_KERNEL_OPTIONS = (
    TARGET,
    Option(
        "--only",
        "parts, or kinds of one, as loss,attention:flash",
        comma_list,
        metavar="PARTS",
    ),
    Option("--batch", "rows (default: the config's)", positive),
    Option("--seconds", "of each measurement", positive_float, 0.3),
    JSON,
)


def _kinds_by_part(only: list[str] | None) -> dict[str, tuple[str, ...]]:
    """The kinds of each part that --only names; none is all of its kinds."""
    asked: dict[str, list[str]] = {}
    for part, colon, kind in (word.partition(":") for word in only or _PARTS):
        if part not in _PARTS or (colon and not kind):
            raise ConfigError(
                f"--only {part}{colon}{kind} is unknown here; there are {', '.join(_PARTS)}, and"
                " kinds of them as attention:flash."
            )
        asked.setdefault(part, []).append(kind)
    return {part: () if "" in kinds else tuple(kinds) for part, kinds in asked.items()}


def _collect(rows: "Iterable[KernelTiming]") -> "list[KernelTiming]":
    """Collect, and say how far it has come."""
    found = []
    for row in rows:
        found.append(row)
        say_on_stderr(f"{row.name} {row.refusal}".rstrip())
    return found


def _kernels(options: Options) -> None:
    from foundling.bench import kernels
    from foundling.runtime.console import warn

    parts = _kinds_by_part(options.only)
    if "attention" in parts:
        own = ("train.kernels.attention", "train.kernels.attention_masked")
        because = "where every kernel is launched (--only attention:NAME takes one)"
        refuse_given(options, own, because)
    if "loss" in parts:
        because = "where every loss is computed (--only loss:NAME takes one)"
        refuse_given(options, ["train.kernels.loss"], because)
    if options.batch and set(parts) == {"optimizer"}:
        raise ConfigError(
            "--batch has no effect on an optimizer, which sees no rows; leave it out."
        )
    config = sized_config(options, options.batch)
    # All of them are called, and so have refused what they must, before the first is measured.
    begun = {
        part: getattr(kernels, f"bench_{part}")(config, only=kinds, seconds=options.seconds)
        for part, kinds in parts.items()
    }
    found = {part: _collect(rows) for part, rows in begun.items()}
    if options.json:
        print_json({part: [row.to_json() for row in rows] for part, rows in found.items()})
    else:
        for part, rows in found.items():
            print_lines(kernels.describe_kernels(part, rows, config))
    failed = [part for part, rows in found.items() if all(row.refusal for row in rows)]
    for part in failed:
        warn(f"no {part} could be measured; the lines above say why.")
    if failed:
        raise SystemExit(1)


def _memory(options: Options) -> None:
    from foundling.bench.profile import bench_memory, describe_memory

    found = bench_memory(sized_config(options, options.batch), options.snapshot, say_on_stderr)
    print_json(found.to_json()) if options.json else print_lines(describe_memory(found))


def sized_config(options: Options, batch: str | int | None = None) -> "RunConfig":
    """The config, its vocabulary known from the data and its rows from --batch."""
    from foundling.plan.supply import known_sizes
    from foundling.runtime.console import warn

    if batch and {"train.batch_size", "train.batch-size"} & set(options.settings):
        raise ConfigError("--batch and --train.batch-size both give the rows; give one.")
    config, _ = known_sizes(config_of(options.target, options.settings, tell=warn))
    rows = 8 if batch == "best" else int(batch or config.train.batch_size)
    return config.replace(train={"batch_size": rows})


def _train(options: Options) -> None:
    uses = {"profile": _profile, "memory": _memory, "layouts": _layouts}
    for use in (use for use in uses if getattr(options, use)):
        if options.batch == "best":
            raise ConfigError(f"--batch best has no effect with --{use}; give a number of rows.")
        return uses[use](options)
    from foundling.bench.train import bench_train, describe_train

    return measure_and_report(options, bench_train, describe_train)


def measure_and_report(
    options: Options,
    measure: "Callable[[RunConfig, BenchOptions, Tell], TrainBench]",
    describe: "Callable[[TrainBench], list[str]]",
) -> None:
    """What `bench train` does around the measuring: what is refused before it, the table, and the
    recorded figures."""
    from foundling.bench import baselines
    from foundling.bench.batch_size import refuse_unwritable
    from foundling.bench.train import BenchOptions
    from foundling.runtime.device import choose_device, device_name

    if not options.check_steps:
        check = ("check_data", "reference", "tolerance", "check_rows")
        refuse_given(options, check, "with --check-steps 0")
    config = sized_config(options, options.batch)
    device = choose_device(config.train.device, config.train.dtype).device
    memory = options.limit_gb or 0.0
    line = baselines.line_of(
        options.target,
        options.settings,
        device=device_name(device),
        batch=options.batch or "",
        micro_steps=options.micro_steps,
        memory=memory,
        data=str(options.data or ""),
    )
    wanted = baselines.recorded(options.against, line) if options.against else None
    if wanted is not None:
        baselines.refuse_changed(wanted, line, config)
        baselines.refuse_unlike(wanted, options.check_steps)
    if options.record:
        refuse_unwritable(options.record, "--record")
        baselines.read_figures(options.record)  # one that is none: refused before minutes of work
    given = {**options.fields_of(BenchOptions), "steps": options.steps or 10, "memory": memory}
    bench = measure(config, BenchOptions(**given, best=options.batch == "best"), say_on_stderr)
    held = baselines.held_to(bench.ours.tokens_per_s, wanted) if wanted is not None else None
    _report(bench, str(line), held, None if options.json else describe(bench))
    if options.record:
        kept = {**bench.figure(), "meaning": baselines.meaning_of(config, line)}
        baselines.record(options.record, line, kept)
        say_on_stderr(f"recorded in {options.record}")


def _report(bench: "TrainBench", line: str, held: "Held | None", table: list[str] | None) -> None:
    """The table (None: JSON), and whether it is to be believed: exit code 1 where the losses or the
    recorded figure are not reached."""
    from foundling.runtime.console import warn

    if table is None:
        print_json({"line": line, **bench.to_json(), "against": held.to_json() if held else None})
    else:
        print_lines(table)
        if held and held.is_reached:
            print(held.sentence)
    problems = list(bench.check.problems) if bench.check else []
    if held and not held.is_reached:
        problems.append(held.sentence)
    for problem in problems:
        warn(problem)
    if problems:
        raise SystemExit(1)


def _profile(options: Options) -> None:
    from foundling.bench.profile import bench_profile, describe_profile

    found = bench_profile(
        sized_config(options, options.batch),
        options.trace,
        steps=options.steps or 5,
        profiled=options.profiled,
        quick=options.quick,
        tell=say_on_stderr,
    )
    print_json(asdict(found)) if options.json else print_lines(describe_profile(found))


def training_duration(options: Options) -> str:
    """How long it takes to time training."""
    return (
        f"a start and {options.steps or 10} steps, half a minute on a GPU; check:"
        f" {options.check_steps} steps twice"
    )


def _duration_hint(options: Options) -> str:
    hints = {
        "layouts": f"a minute a layout, and {options.limit:g} s at most",
        "memory": "a start and two steps, half a minute",
        "profile": "ceilings for a minute, then some steps",
    }
    return next((hints[use] for use in hints if getattr(options, use)), training_duration(options))


_GENERATE_OPTIONS = (
    Option("target", "preset, YAML file, or run directory: the model's shape"),
    Option("--batch", "requests at a time", positive_ints, "1,8"),
    Option("--prompt", "tokens of their prompts", positive, 512),
    Option("--new", "new tokens of each", positive, 128),
    Option("--sampling", "some of greedy,temperature,top-p", comma_list, "greedy,temperature"),
    Option("--first", "lengths of prompts whose first token is timed", positive_ints, "2048"),
    Option("--rounds", "of which the median counts", positive, 3),
    WEIGHTS,
    DEVICE,
    Option("--no-compile", "leave small operations unfused (CUDA)", bool),
    JSON,
)


def _generate(options: Options) -> None:
    from foundling.bench.generate import SAMPLINGS, bench_generate, describe_generate
    from foundling.profiling.ceilings import measure_ceilings
    from foundling.runtime.console import warn
    from foundling.runtime.device import choose_device

    if unknown := [name for name in options.sampling if name not in SAMPLINGS]:
        raise ConfigError(f"--sampling {unknown[0]} is none of {', '.join(SAMPLINGS)}.")
    config = sized_config(options)
    device = choose_device(options.device, "fp32").device
    found = bench_generate(
        config.model,
        device,
        batches=options.batch,
        prompt=options.prompt,
        new=options.new,
        samplings=options.sampling,
        weights=options.weights,
        first=options.first,
        rounds=options.rounds,
        ceilings=measure_ceilings(device, quick=True),
        compiled=False if options.no_compile else None,
        tell=say_on_stderr,
    )
    print_json(asdict(found)) if options.json else print_lines(describe_generate(found))
    if found.wrong:
        warn(f"{found.wrong} of {found.checked} tokens are not the plain decoder's: no figure here")
        raise SystemExit(1)


VERBS = {
    "bench generate": Verb(
        "tokens/s of decoding and seconds to the first token, with a check of the tokens",
        _GENERATE_OPTIONS,
        _generate,
        takes_settings=True,
        duration_hint="a start, then some seconds for each batch size and sampling",
    ),
    "bench train": Verb(
        "tokens/s of training here, with a loss check; or where time or memory goes",
        _TRAIN_OPTIONS,
        _train,
        takes_settings=True,
        duration_hint=_duration_hint,
    ),
    "bench kernels": Verb(
        "attention kernels, ways to compute the loss and optimizers, at a model's shapes",
        _KERNEL_OPTIONS,
        _kernels,
        takes_settings=True,
        duration_hint=lambda o: (
            f"{o.seconds:g} s for each kind, mask and direction; a few to compile"
        ),
    ),
}
