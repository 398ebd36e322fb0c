"""Which device and which arithmetic, chosen once and with a stated reason."""

import os
from dataclasses import dataclass

import torch

from foundling.config.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """A device or dtype and the reason it was taken."""

    device: torch.device
    dtype: torch.dtype
    reason: str


def choose(device_name: str, dtype_name: str, local_rank: int = 0) -> Choice:
    """Resolve `train.device` and `train.dtype`; what was asked for and is not there is an error."""
    device, why_device = _choose_device(device_name, local_rank)
    dtype, why_dtype = _choose_dtype(dtype_name, device)
    return Choice(device, dtype, f"{device} ({why_device}), {dtype} ({why_dtype})")


def _choose_device(name: str, local_rank: int) -> tuple[torch.device, str]:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank), "found"
        return torch.device("cpu"), "no CUDA device found"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda was asked for and torch finds no CUDA device; use auto or cpu."
        )
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device mps was asked for and torch finds none; use auto or cpu.")
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name), "asked for"


def _choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    if name == "auto":
        if device.type == "cuda" and torch.cuda.is_bf16_supported():
            return torch.bfloat16, "the GPU supports it"
        return torch.float32, "the safe choice on this device"
    if name == "bf16" and device.type == "cpu":
        # With AMX inside a virtual machine a bf16 product can die with SIGILL, which no handler
        # can turn into a sentence; and without AMX it is slower than fp32.
        raise ConfigError("train.dtype bf16 is not offered on CPU; use fp32 or auto.")
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name], "asked for"


def set_threads(threads: int) -> int:
    """Give torch its CPU threads; 0 shares this machine's cores among the job's processes here."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = threads or max(1, len(os.sched_getaffinity(0)) // here)
    torch.set_num_threads(count)
    return count


def set_deterministic(wanted: bool) -> None:
    """Make torch refuse kernels whose result can differ between two identical runs."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
