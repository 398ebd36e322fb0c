"""Which device and which arithmetic, chosen once and with a stated reason."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from foundling.config.errors import ConfigError

DtypeName = Literal["fp32", "tf32", "bf16", "fp16"]
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Choice:
    """A device or dtype and the reason it was taken."""

    device: torch.device
    dtype: torch.dtype
    reason: str
    asked: str = "auto"
    """`train.dtype` as it was asked for."""

    @property
    def name(self) -> DtypeName:
        """The arithmetic as `train.dtype` calls it: tf32 is fp32 to torch."""
        if self.asked == "tf32":
            return "tf32"
        names: dict[torch.dtype, DtypeName] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        return names.get(self.dtype, "fp32")


def choose(device_name: str, dtype_name: str, local_rank: int = 0) -> Choice:
    """Resolve `train.device` and `train.dtype`; what was asked for and is not there is an error."""
    set_allocator()
    device, why_device = _choose_device(device_name, local_rank)
    dtype, why_dtype = _choose_dtype(dtype_name, device)
    told = dtype_name if dtype_name == "tf32" else dtype
    return Choice(device, dtype, f"{device} ({why_device}), {told} ({why_dtype})", dtype_name)


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
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU supports it"
        if device.type == "cuda":
            return torch.float16, "the GPU has no bf16"
        return torch.float32, "the safe choice on this device"
    if name == "bf16" and device.type == "cpu":
        # With AMX inside a virtual machine a bf16 product can die with SIGILL, which no handler
        # can turn into a sentence; and without AMX it is slower than fp32.
        raise ConfigError("train.dtype bf16 is not offered on CPU; use fp32 or auto.")
    if name in ("fp16", "tf32") and device.type != "cuda":
        raise ConfigError(f"train.dtype {name} needs a CUDA device; use fp32 or auto.")
    return DTYPES[name], "asked for"


def set_precision(dtype_name: str) -> None:
    """How fp32 products are made: exactly, or with tf32's ten bits where that was asked for."""
    torch.set_float32_matmul_precision("high" if dtype_name == "tf32" else "highest")


def set_allocator() -> None:
    """Let segments of GPU memory grow, before the first is made: fixed ones leave memory in pieces
    that no tensor fits into. What the user has set stands."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if os.environ.get(name):
            return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


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
