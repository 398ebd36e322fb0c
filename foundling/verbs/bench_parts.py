"""`foundling bench attention | loss | optimizer | memory`: the parts of a step alone."""

import argparse
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from foundling.verbs.base import (
    Options,
    Settings,
    Verb,
    above_zero,
    listed,
    positive,
    print_json,
)
from foundling.verbs.bench_train import sized


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
    from foundling.runtime.log import console

    console(stderr=True).print(text, markup=False)


def _print(rows: list[Any], lines: list[str], as_json: bool) -> None:
    if as_json:
        return print_json([row.to_json() for row in rows])
    for line in lines:
        print(line)
    return None


def _fail_if_none(rows: list[Any], told: str) -> None:
    from foundling.runtime.log import warn

    if all(row.refusal for row in rows):
        warn(f"{told}; the lines above say why.")
        raise SystemExit(1)


def _attention(options: Options, settings: Settings) -> None:
    from foundling.bench.attention import bench_attention, describe_attention

    own = ("train.attention", "train.attention_masked")
    _refuse_set(settings, own, "where every kernel is launched (--only NAME takes one)")
    config = sized(options.target, settings, str(options.batch or ""))
    only = tuple(listed(options.only))
    rows = _tell(bench_attention(config, only=only, seconds=options.seconds), "mask kernel")
    _print(rows, describe_attention(rows, config), options.json)
    _fail_if_none(rows, "no kernel could be launched")


def _loss(options: Options, settings: Settings) -> None:
    from foundling.bench.loss import bench_loss, describe_loss

    _refuse_set(settings, ["train.loss"], "where every loss is computed (--only NAME takes one)")
    config = sized(options.target, settings, str(options.batch or ""))
    only = tuple(listed(options.only))
    rows = _tell(bench_loss(config, only=only, seconds=options.seconds), "name")
    _print(rows, describe_loss(rows, config), options.json)
    _fail_if_none(rows, "no loss could be measured")


def _optimizer(options: Options, settings: Settings) -> None:
    from foundling.bench.optimizer import bench_optimizer, describe_optimizer

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
    from foundling.bench.memory import bench_memory, describe_memory

    config = sized(options.target, settings, str(options.batch or ""))
    found = bench_memory(config, options.snapshot, _say)
    if options.json:
        return print_json(found.to_json())
    for line in describe_memory(found):
        print(line)
    return None


def _refuse_set(settings: Settings, own: Iterable[str], because: str) -> None:
    """Settings that a bench sets by itself."""
    from foundling.bench.early import refuse_idle

    given = {name.replace("-", "_"): name for name in settings}
    refuse_idle({f"--{name}": given.get(name) for name in own}, because)


VERBS = {
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
