"""`foundling plan TARGET --probe`: the plan of a step on this device against a few real ones.

The device's ceilings are measured and stored first, the prediction is made from them alone, and
only then are the steps taken, so that the error is an error of prediction.
"""

import json
from dataclasses import replace
from typing import Any

import torch

from foundling.config.errors import ConfigError
from foundling.config.parallel import AUTO
from foundling.config.run import RunConfig
from foundling.plan.hardware import TABLE, Gpu, find_gpu, name_of_device, save_ceilings
from foundling.plan.horizon import Pace, plan_horizon
from foundling.plan.layout import Machine
from foundling.plan.resolve import PlannedConfig, resolve
from foundling.plan.supply import known_sizes
from foundling.profiling.ceilings import measure_ceilings
from foundling.profiling.probe import MICRO_STEPS, STEPS_TAKEN, Probe, probe
from foundling.runtime.console import console, duration, say, size, table
from foundling.runtime.device import choose_device, device_name

MOMENTS = {
    "forward": ("forward",),
    "backward": ("loss", "backward", "backward's end"),
    "step": ("step",),
}
"""The probe's moments, and the plan's that lie between it and the one before."""
Row = tuple[str, float, float]


def check_plan(config: RunConfig, *, as_json: bool = False, minutes: float = 5.0) -> None:
    """Measure the device, predict, probe, print predicted against measured."""
    config, _ = known_sizes(config)
    if not config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size is 0 and a probe has no tokenizer to ask; give it or data.sources."
        )
    choice = choose_device(config.train.device, config.train.dtype)
    # Once with what is known beforehand, so that nothing is measured in vain, and once with what
    # was measured.
    _foretold(config, choice.device, minutes)
    tell("measuring what the device can do: less than a minute")
    path = save_ceilings(measure_ceilings(choice.device))
    settled = _foretold(config, choice.device, minutes)
    measured = probe(settled.config, tell=tell)
    rows = compared(settled, measured)
    if as_json:
        print(json.dumps(to_json(settled, measured, rows), indent=2))
        return
    say(f"ceilings of {device_name(choice.device)} are in {path}")
    for reason in settled.reasons:
        say(reason)
    for line in lines(rows):
        print(line)
    text = run_time(config, measured)
    if text:
        print(text)


def tell(text: str) -> None:
    """Progress; on stderr, because stdout may be JSON."""
    console(stderr=True).print(text, markup=False)


def _foretold(config: RunConfig, device: torch.device, minutes: float) -> PlannedConfig:
    """The plan of the probe's step; refuses steps that would take too long."""
    machine = Machine(gpu=gpu_at_hand(device), per_node=1, nodes=1)
    settled = resolve(probed(config), machine)
    step_s = settled.speed.step_s
    if step_s * STEPS_TAKEN > minutes * 60:
        raise ConfigError(
            f"a probe takes {STEPS_TAKEN} steps, which are planned to last"
            f" {duration(step_s * STEPS_TAKEN / 3600)} here at train.batch_size"
            f" {settled.config.train.batch_size}; lower it, or give --probe-minutes (it is"
            f" {minutes:g})."
        )
    return settled


def run_time(config: RunConfig, measured: Probe) -> str:
    """How long the whole run would take at the measured pace, on this device alone."""
    if not config.train.horizon or not config.train.batch_size:
        return ""
    config, sizes = known_sizes(config)
    step_s = measured.planned_step_s
    steps = plan_horizon(config, 1, sizes, Pace(step_s, None, "this device")).steps
    return f"{steps:,} steps x {step_s:.4f} s = {duration(steps * step_s / 3600)}"


def gpu_at_hand(device: torch.device) -> Gpu:
    """The table's entry for this device, or one made of what was measured."""
    if device.type != "cuda":
        return find_gpu("cpu")
    name = name_of_device(device_name(device))
    # An unknown card is planned as its nearest relative with its own ceilings and memory.
    return find_gpu(name) if name else replace(TABLE["a40"], name="this GPU")


def probed(config: RunConfig) -> RunConfig:
    """The config as the probe takes it: a step of at most a few micro-steps on one device."""
    train = config.train
    if train.batch_size and train.global_batch_tokens:
        most = MICRO_STEPS * train.batch_size * train.seq_len
        config = config.replace(train={"global_batch_tokens": min(train.global_batch_tokens, most)})
    is_open = not train.batch_size or config.parallel.recompute == AUTO
    return config.replace(
        eval={} if is_open else {"every": 0}, parallel={"replicate": 0, "shard": 1, "tensor": 1}
    )


def compared(settled: PlannedConfig, measured: Probe) -> list[Row]:
    """(what, predicted, measured) for the step's parts and the memory at its moments."""
    speed, memory = settled.speed, settled.memory
    rows: list[Row] = [("step s", speed.step_s, measured.step_s)]
    rows += [
        (f"{part} s", speed.parts.get(part, 0.0), seconds)
        for part, seconds in measured.parts.items()
    ]
    totals = {name: sum(parts.values()) for name, parts in memory.moments.items()}
    for moment, names in MOMENTS.items():
        if moment in measured.memory:
            planned = max(totals[name] for name in names)
            rows.append((f"memory, {moment}", planned, measured.memory[moment]["peak"]))
    rows.append(("memory, peak", max(totals.values()), measured.peak_bytes))
    return rows


def lines(rows: list[Row]) -> list[str]:
    """The table as text."""
    shown = [["", "predicted", "measured", "off by"]]
    for what, planned, found in rows:
        is_memory = what.startswith("memory")
        cells = [size(v) if is_memory else f"{v:.4f}" for v in (planned, found)]
        off = f"{(planned - found) / found:+.1%}" if found else "-"
        shown.append([what, *cells, off])
    return table(shown)


def to_json(settled: PlannedConfig, measured: Probe, rows: list[Row]) -> dict[str, Any]:
    """Everything, for scripts that collect many probes."""
    return {
        "predicted": {"speed": settled.speed.to_json(), "memory": settled.memory.to_json()},
        "measured": measured.to_json(),
        "reasons": list(settled.reasons),
        "rows": [
            {"what": what, "predicted": planned, "measured": found} for what, planned, found in rows
        ],
    }
