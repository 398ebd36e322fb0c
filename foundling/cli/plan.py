"""`foundling plan`: what a run would be, before it is one, and its config as a file."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.cli.options import (
    FORCE,
    JSON,
    TARGET,
    WEIGHTS,
    Option,
    Options,
    Verb,
    comma_list,
    config_of,
    output_option,
    positive,
    positive_float,
    positive_ints,
    print_json,
    print_lines,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.plan.serving import Precision
    from foundling.plan.summary import PlanRequest

_SUFFIXES = (".yaml", ".yml")
_PLAN_OPTIONS = (
    TARGET,
    Option("--gpu", "hardware to plan for, such as h200; several: h100,h200", comma_list, ""),
    Option("--nodes", "nodes; several are compared: 1,8,64,640", positive_ints),
    Option("--gpus", "GPUs of a node (default: the usual number)", positive),
    output_option("write the config with its choices made, as commented YAML"),
    FORCE,
    Option("--what-if", "compare values", nargs="append", metavar="NAME=A,B"),
    Option("--price", "dollars an hour for one GPU", positive_float),
    JSON,
    Option("--probe", "compare with a few real steps here", bool, only_with=("settings", "json")),
    Option("--probe-minutes", "longest that they may take", positive_float, 5.0, requires="probe"),
    Option("--serve", "requests that fit when served", bool, only_with=("settings", "gpu")),
    replace(WEIGHTS, requires="serve"),
)


def _plan(options: Options) -> None:
    from foundling.config.load import dump_commented
    from foundling.plan.summary import answer, answer_json, decide
    from foundling.runtime.files import write_text_atomic

    if options.probe:
        return _probe(options)
    if options.serve:
        return _serving(options)
    _check_output(options)
    request = _request(options)
    text = dump_commented(*decide(request)) if options.output else ""
    found = answer_json(request) if options.json else list(answer(request))
    if options.output:
        write_text_atomic(options.output, text)
    return print_json(found) if options.json else print_lines(found)


def _serving(options: Options) -> None:
    from foundling.plan.hardware import find_gpu
    from foundling.plan.summary import describe_serving

    config = config_of(options.target, options.settings)
    here = {"this machine": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    gpus = {name: find_gpu(name).memory for name in options.gpu}
    precision: Precision = options.weights or ("bf16" if gpus else "fp32")
    print_lines(describe_serving(config.model, gpus or here, precision))


def _probe(options: Options) -> None:
    from foundling.runtime.console import warn

    config = config_of(options.target, options.settings, tell=warn)
    from foundling.profiling.plan_check import check_plan

    check_plan(config, as_json=options.json, minutes=options.probe_minutes)


def _request(options: Options) -> "PlanRequest":
    from foundling.launch.launcher import fingerprint_of
    from foundling.plan.forecast import PlanOptions
    from foundling.plan.summary import PlanRequest
    from foundling.runtime.console import warn

    once = cache(warn)  # a request resolves its target several times
    return PlanRequest(
        resolved=lambda changes: config_of(
            options.target, {**options.settings, **changes}, tell=once
        ),
        gpus=tuple(options.gpu),
        asked=PlanOptions(gpus=options.gpus, price=options.price),
        fingerprint=fingerprint_of,
        nodes=options.nodes or (),
        what_if=tuple(options.what_if),
    )


def _check_output(options: Options) -> None:
    """Refuse what has no one config, and what would write over something or somewhere new."""
    from foundling.runtime.files import refuse_existing

    path: Path | None = options.output
    if path is None:
        return
    if len(options.gpu) > 1:
        names = ",".join(options.gpu)
        raise ConfigError(f"--gpu {names} names several; a config is written for one.")
    if len(options.nodes or ()) > 1:
        raise ConfigError(f"--nodes {options.nodes} are several; a config is written for one.")
    if path.exists() and path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path} exists and is no YAML file; give another name.")
    if not options.force:
        refuse_existing(path)
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder; make it first or give another name.")


def _duration_hint(options: Options) -> str:
    """A plan alone is quick."""
    minutes = f"{options.probe_minutes:g} at most"
    text = f"its ceilings are measured in a minute or two, then steps for {minutes}"
    return text if options.probe else ""


VERBS = {
    "plan": Verb(
        "what a run is, needs, takes and costs",
        _PLAN_OPTIONS,
        _plan,
        takes_settings=True,
        duration_hint=_duration_hint,
    ),
}
