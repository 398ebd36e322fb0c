"""`foundling bench parallel`: layouts side by side on this machine."""

import argparse

from foundling.config.errors import ConfigError
from foundling.verbs.base import (
    Options,
    Settings,
    Verb,
    above_zero,
    listed,
    positive,
    print_json,
    resolved,
)


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
    from foundling.bench.parallel import (
        METHOD,
        bench_parallel,
        chosen,
        describe_parallel,
        same_losses,
    )
    from foundling.launch.place import refuse_crowd, surroundings, visible_gpus
    from foundling.runtime.log import console, warn

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


VERBS = {
    "bench parallel": Verb(
        "speed, memory and communication of each layout",
        _parallel_options,
        _parallel,
        takes_settings=True,
        lasts=lambda o: f"a minute a layout, and {o.limit:g} s at most",
    ),
}
