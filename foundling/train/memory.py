"""How much memory this process holds, and held at most: the device's, or on a CPU its own."""

import contextlib
import resource
import sys

import torch


def memory_now(device: torch.device, *, graphs: bool = False) -> dict[str, int]:
    """Bytes in use and their peaks: the allocator's on CUDA (`memory_peak` of what tensors held,
    `memory_peak_reserved` of what was taken from the device), the process's on CPU.

    CUDA graphs work in memory of their own, which the allocator takes for free while they run: with
    them only what is reserved is known, training's and evaluation's together (a model that holds
    11.9 GB would be told as 2.3)."""
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device)
        return {
            "memory_allocated": torch.cuda.memory_allocated(device),
            "memory_reserved": torch.cuda.memory_reserved(device),
            "memory_peak": reserved if graphs else torch.cuda.max_memory_allocated(device),
            "memory_peak_reserved": reserved,
        }
    resident, peak = _process_memory()
    return {
        "memory_allocated": resident,
        "memory_reserved": resident,
        "memory_peak": peak,
        "memory_peak_reserved": peak,
    }


def forget_peak(device: torch.device) -> None:
    """Start a new peak, so that training's and evaluation's are told apart."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # Linux: resets this process's high-water mark


def _process_memory() -> tuple[int, int]:
    """Resident bytes and their high-water mark."""
    try:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        resident, peak = (int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    except (OSError, KeyError):
        unit = 1 if sys.platform == "darwin" else 1024
        resident = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return resident, max(resident, peak)
