"""`foundling bench ...`: measure this machine, beside what others offer."""

import argparse
import tempfile
from pathlib import Path

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


def _data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", default="hamlet", help="text to measure with")
    parser.add_argument("--bytes", type=positive, default=20_000_000, help="how much of it")
    parser.add_argument("--tokenizer", type=Path, help="folder (default: one is trained)")
    parser.add_argument("--only", help="contenders besides foundling, such as grain,litdata")
    parser.add_argument("--workers", type=positive, help="processes to build (default: all cores)")
    parser.add_argument("--seq-len", type=positive, default=2048, help="tokens of a row")
    parser.add_argument("--rows", type=positive, default=16, help="rows of a batch")
    parser.add_argument("--rounds", type=positive, default=3, help="repeats; the median counts")
    parser.add_argument("--seconds", type=above_zero, default=2.0, help="time of a load")
    parser.add_argument(
        "--times", type=positive, default=16, help="repeats of the text before a resume"
    )
    parser.add_argument("--work", type=Path, help="folder to work in and leave (default: none)")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _data(options: Options, settings: Settings) -> None:
    from foundling.bench.corpus import make_corpus
    from foundling.bench.data import Shape, bench_data, chosen, describe_bench
    from foundling.runtime.log import console

    only = listed(options.only)
    chosen(only)  # a misspelt name is refused before minutes of work
    with tempfile.TemporaryDirectory(prefix="foundling-bench-") as scratch:
        folder = options.work or Path(scratch)
        corpus = make_corpus(options.source, options.bytes, options.tokenizer, folder)
        result = bench_data(
            corpus,
            folder,
            Shape(
                workers=options.workers or 0,
                seq_len=options.seq_len,
                rows=options.rows,
                rounds=options.rounds,
                seconds=options.seconds,
                times=options.times,
            ),
            only=only,
            say=lambda text: console(stderr=True).print(text, markup=False),
        )
    if options.json:
        return print_json(result)
    for line in describe_bench(result):
        print(line)
    return None


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
    "bench data": Verb(
        "build and load beside other libraries",
        _data_options,
        _data,
        lasts=lambda o: (
            f"{o.rounds} rounds of building {o.bytes / 1e6:,.0f} MB and loading it, some minutes a"
            " library"
        ),
    ),
    "bench parallel": Verb(
        "speed, memory and communication of each layout",
        _parallel_options,
        _parallel,
        takes_settings=True,
        lasts=lambda o: f"a minute a layout, and {o.limit:g} s at most",
    ),
}
