"""Is the device itself well: memory that is free, errors it has counted, and how fast it multiplies
against what such a device should reach.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from foundling.doctor.asked import Asked
from foundling.doctor.lines import Line, failed, passed, warned
from foundling.doctor.task import Notes
from foundling.plan.hardware import Gpu, find_gpu, name_of_device
from foundling.plan.words import size
from foundling.runtime.ceilings import device_slug, known_ceilings
from foundling.runtime.device import choose
from foundling.train.ceilings import device_name
from foundling.train.probe import matmul_peak

FREE_SHARE = 0.9
"""Of a GPU's memory; less means that somebody else is on it."""
GOOD_SHARE, BAD_SHARE = 0.55, 0.35
"""Of the table's dense peak: a square product reaches about 0.8 on a healthy card."""
OWN_SHARE = 0.75
"""Of what this very device was measured to reach before."""
SMI_S = 20.0
COUNTED = {
    "ecc.errors.uncorrected.volatile.total": "uncorrected memory errors since the last reboot",
    "remapped_rows.failure": "memory rows that could not be remapped",
}
SLOWED = {
    "clocks_throttle_reasons.hw_thermal_slowdown": "too hot",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "its power supply brakes it",
}


def check(asked: Asked, notes: Notes) -> Iterator[Line]:
    """Memory, counters and rate of the device that this process would train on."""
    choice = choose(asked.device, asked.dtype, asked.local_rank)
    if notes.begins("memory"):
        yield _memory(choice.device)
    if choice.device.type == "cuda" and notes.begins("nvidia-smi"):
        yield from smi_lines(_ask_smi(choice.device), str(choice.device))
    if notes.begins("matmul rate"):
        rate = matmul_peak(choice.device, choice.dtype)
        dtype = "bf16" if choice.dtype == torch.bfloat16 else "fp32"
        name = device_name(choice.device)
        yield rate_line(rate, name, dtype, choice.device.type, alone=asked.neighbours == 1)


def _memory(device: torch.device) -> Line:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        told = f"{size(free)} of {size(total)} are free on {device}"
        if free < FREE_SHARE * total:
            return warned(
                "memory",
                f"{told}; nvidia-smi names the processes that hold the rest.",
                {"free": free},
            )
        return passed("memory", told, {"free": free})
    free, total = host_memory()
    told = f"{size(free)} of {size(total)} are free in the host's memory"
    if free < 0.1 * total:
        return warned("memory", f"{told}; end what else is running.", {"free": free})
    return passed("memory", told, {"free": free})


def host_memory() -> tuple[int, int]:
    """Bytes of the host that are free to be used, and all of them."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total, total
    named = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(named["MemAvailable"].split()[0]) * 1024, total


def _ask_smi(device: torch.device) -> dict[str, str]:
    """What nvidia-smi knows of the device, by field; a field that this version does not know, or a
    machine without it, gives nothing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    # Its numbers are the driver's, which CUDA_VISIBLE_DEVICES does not change: ask by identity.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    found = {}
    for field in (*COUNTED, *SLOWED, "temperature.gpu"):
        words = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        words += ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=SMI_S)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            found[field] = done.stdout.strip()
    return found


def smi_lines(told: Mapping[str, str], device: str) -> Iterator[Line]:
    """What the driver's counters mean; [N/A] is a card without them."""
    wrong = False
    for field, about in COUNTED.items():
        value = told.get(field, "0")
        if value not in ("0", "No") and not value.startswith("["):
            wrong = True
            yield failed(
                "health",
                f"{device} has {about}: {value}; reset it (nvidia-smi -r) or leave the node out.",
                of_node=True,
            )
    for field, about in SLOWED.items():
        if told.get(field) == "Active":
            wrong = True
            heat = told.get("temperature.gpu", "?")
            yield warned(
                "health",
                f"{device} is slowed down, {about} ({heat} degrees); look after its cooling and"
                " power.",
            )
    if told and not wrong:
        heat = told.get("temperature.gpu", "?")
        yield passed("health", f"{device}: no memory errors, not slowed down, {heat} degrees")
    if not told:
        yield passed("health", f"{device}: nvidia-smi is not there, its counters were not read")


def rate_line(rate: float, name: str, dtype: str, kind: str, *, alone: bool) -> Line:
    """A measured product against what the same device did before, or what the table promises."""
    told = f"{rate / 1e12:,.2f} TFLOP/s in {dtype} on {name}"
    before = known_ceilings().get(device_slug(name))
    if before and alone and (best := before.matmul_peak(dtype)):
        if rate < OWN_SHARE * best:
            return warned(
                "matmul rate",
                f"{told}, and {best / 1e12:,.2f} were measured on it before; see what else runs"
                " here, or whether it is slowed down.",
                {"flops": rate, "expected": best},
            )
        return passed(
            "matmul rate", f"{told}, {rate / best:.0%} of what it did before", {"flops": rate}
        )
    gpu = _of_table(name) if kind == "cuda" else None
    if gpu is None or dtype not in gpu.peaks:
        return passed("matmul rate", f"{told} (nothing to compare it with)", {"flops": rate})
    peak = gpu.peaks[dtype] * gpu.reach
    share = f"{told}, {rate / peak:.0%} of {gpu.name}'s peak"
    if rate < BAD_SHARE * peak:
        return failed(
            "matmul rate",
            f"{share}; such a card reaches 80%: leave the node out, or see what else runs on it.",
            {"flops": rate, "expected": peak},
            of_node=True,
        )
    if rate < GOOD_SHARE * peak:
        return warned(
            "matmul rate",
            f"{share}; see what else runs on it, its clocks and its heat.",
            {"flops": rate},
        )
    return passed("matmul rate", share, {"flops": rate})


def _of_table(name: str) -> Gpu | None:
    entry = name_of_device(name)
    return find_gpu(entry) if entry else None
