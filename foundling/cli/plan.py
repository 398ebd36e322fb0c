"""`foundling plan`: what a run would be, before it is one, and its config as a file."""

import argparse
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.cli.options import (
    Options,
    Settings,
    Verb,
    above_zero,
    check_force,
    file_options,
    listed,
    positive,
    positives,
    print_json,
    refuse_given,
    resolved,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.plan.serving import Precision
    from foundling.plan.summary import PlanRequest

SUFFIXES = (".yaml", ".yml")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="preset, YAML file, or run directory")
    parser.add_argument("--gpu", help="hardware to plan for, such as h200; several: h100,h200")
    parser.add_argument("--gpus", type=positive, help="GPUs of a node (default: the usual number)")
    parser.add_argument("--price", type=above_zero, help="dollars an hour for one GPU")
    parser.add_argument("--nodes", type=positives, help="nodes; several are compared: 1,8,64,640")
    parser.add_argument(
        "--what-if", action="append", default=[], metavar="NAME=A,B", help="compare values"
    )
    parser.add_argument(
        "--probe", action="store_true", help="take a few real steps here and compare"
    )
    parser.add_argument(
        "--probe-minutes", type=above_zero, help="longest that the steps may take (default: 5)"
    )
    parser.add_argument(
        "--serve", action="store_true", help="how many requests of which length fit when served"
    )
    parser.add_argument(
        "--weights",
        choices=("fp32", "bf16", "int8"),
        help="--serve: precision (default: bf16 on GPUs)",
    )
    file_options(parser, "write the config with its choices made, as commented YAML")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def _plan(options: Options, settings: Settings) -> None:
    from foundling.config.load import dump_commented
    from foundling.plan.summary import answer, answer_json, decide
    from foundling.runtime.files import write_text_atomic

    if options.probe and options.serve:
        raise ConfigError("--probe and --serve are two questions; give one.")
    if options.probe:
        return _probe(options, settings)
    if options.serve:
        return _serving(options, settings)
    if options.weights:
        raise ConfigError("--weights has no effect without --serve; give both or none.")
    if options.probe_minutes:
        raise ConfigError("--probe-minutes has no effect without --probe; give both or none.")
    _check_output(options)
    question = _question(options, settings)
    text = dump_commented(*decide(question)) if options.output else ""
    output = answer_json(question) if options.json else list(answer(question))
    if options.output:
        write_text_atomic(options.output, text)
    return print_json(output) if options.json else print("\n".join(output))


def _serving(options: Options, settings: Settings) -> None:
    others = ("gpus", "nodes", "price", "what_if", "output", "json")
    refuse_given(options, (*others, "probe_minutes"), "with --serve")
    from foundling.plan.hardware import find_gpu
    from foundling.plan.summary import describe_serving

    config = resolved(options.target, settings)
    here = {"this machine": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    gpus = {name: find_gpu(name).memory for name in listed(options.gpu)}
    precision: Precision = options.weights or ("bf16" if gpus else "fp32")
    print("\n".join(describe_serving(config.model, gpus or here, precision)))


def _probe(options: Options, settings: Settings) -> None:
    for name in ("gpu", "gpus", "nodes", "price", "what_if", "output"):
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --probe, which takes the run's own"
                " steps on the device at hand; leave one of them out."
            )
    from foundling.runtime.console import warn

    config = resolved(options.target, settings, tell=warn)
    from foundling.profiling.plan_check import check_plan

    check_plan(config, as_json=options.json, minutes=options.probe_minutes or 5.0)


def _question(options: Options, settings: Settings) -> "PlanRequest":
    from foundling.launch.launcher import fingerprint_of
    from foundling.plan.forecast import PlanOptions
    from foundling.plan.summary import PlanRequest
    from foundling.runtime.console import warn

    once = cache(warn)  # a question resolves its target several times
    return PlanRequest(
        resolved=lambda changes: resolved(options.target, {**settings, **changes}, tell=once),
        gpus=tuple(listed(options.gpu)),
        asked=PlanOptions(gpus=options.gpus, price=options.price),
        fingerprint=fingerprint_of,
        nodes=options.nodes or (),
        what_if=tuple(options.what_if),
    )


def _check_output(options: Options) -> None:
    """Refuse what has no one config, and what would write over something or somewhere new."""
    from foundling.runtime.files import refuse_existing

    check_force(options)
    path: Path | None = options.output
    if path is None:
        return
    if len(listed(options.gpu)) > 1:
        raise ConfigError(f"--gpu {options.gpu} names several; a config is written for one.")
    if len(options.nodes or ()) > 1:
        raise ConfigError(f"--nodes {options.nodes} are several; a config is written for one.")
    if path.exists() and path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} exists and is no YAML file; give another name.")
    if not options.force:
        refuse_existing(path)
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder; make it first or give another name.")


def _duration_hint(options: Options) -> str:
    """A plan alone is quick."""
    if not options.probe:
        return ""
    minutes = options.probe_minutes or 5
    return f"its ceilings are measured in a minute or two, then steps for {minutes:g} at most"


VERBS = {
    "plan": Verb(
        "what a run is, needs, takes and costs",
        _plan_options,
        _plan,
        True,
        duration_hint=_duration_hint,
    ),
}
