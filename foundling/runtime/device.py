"""The device and its arithmetic; memory in use, its peak, and errors that mean it ran out."""

import contextlib
import gc
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from foundling.config.errors import ConfigError
from foundling.config.train import TrainConfig
from foundling.runtime.console import warn

DtypeName = Literal["fp32", "tf32", "bf16", "fp16"]
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
BF16_TRIAL = """
import torch
x = torch.randn(2, 64, 256, requires_grad=True)
layer = torch.nn.Linear(256, 256)
with torch.autocast("cpu", torch.bfloat16):
    y = layer(x).view(2, 64, 4, 64).transpose(1, 2)
    z = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
z.float().square().sum().backward()
assert bool(layer.weight.grad.isfinite().all())
"""
"""What a step does: a product and attention, forward and backward."""
BF16_TRIAL_S = 120.0


@dataclass(frozen=True)
class DeviceChoice:
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


def prepare_device(train: TrainConfig, local_rank: int = 0) -> DeviceChoice:
    """What every run, trial and bench begins with: the device and the arithmetic, and torch set to
    the threads, the repeatability and the fp32 products that were asked for."""
    choice = choose_device(train.device, train.dtype, local_rank)
    set_threads(train.threads)
    set_deterministic(train.deterministic)
    set_precision(choice.name)
    return choice


def choose_device(device_name: str, dtype_name: str, local_rank: int = 0) -> DeviceChoice:
    """Resolve `train.device` and `train.dtype`; what was asked for and is not there is an error."""
    set_allocator()
    device, why_device = _choose_device(device_name, local_rank)
    dtype, why_dtype = _choose_dtype(dtype_name, device)
    name = dtype_name if dtype_name == "tf32" else dtype
    return DeviceChoice(device, dtype, f"{device} ({why_device}), {name} ({why_dtype})", dtype_name)


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
        if death := bf16_failure():
            raise ConfigError(
                f"train.dtype bf16 was asked for, and a process that tried bf16 products on this"
                f" CPU {death}; use fp32 or auto."
            )
        return torch.bfloat16, "asked for, and a child process lived through it"
    if name in ("fp16", "tf32") and device.type != "cuda":
        raise ConfigError(f"train.dtype {name} needs a CUDA device; use fp32 or auto.")
    return DTYPES[name], "asked for"


@lru_cache
def bf16_failure() -> str:
    """How a child process ends that computes in bf16 on this CPU; empty where it lives.

    With AMX inside a virtual machine such a product can die with SIGILL, which no handler can turn
    into a sentence. Asked for only: without AMX bf16 is slower than fp32.
    """
    try:
        child = subprocess.run(
            [sys.executable, "-c", BF16_TRIAL], capture_output=True, timeout=BF16_TRIAL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"could not be waited for ({type(error).__name__})"
    if child.returncode < 0:
        return f"died of {signal.Signals(-child.returncode).name}"
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        return f"failed ({lines[-1] if lines else child.returncode})"
    return ""


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
    cores = len(os.sched_getaffinity(0))
    count = threads or max(1, cores // here)
    if count * here > 2 * cores:
        warn(
            f"train.threads is {count} in each of {here} processes here and there are {cores}"
            " cores: threads that wait for each other cost most of the speed; lower it, or leave"
            " it at 0."
        )
    torch.set_num_threads(count)
    return count


def set_deterministic(wanted: bool) -> None:
    """Make torch refuse kernels whose result can differ between two identical runs."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


# How much memory this process holds, and held at most: the device's, or on a CPU its own.


def memory_usage(device: torch.device, *, graphs: bool = False) -> dict[str, int]:
    """Bytes in use and their peaks: the allocator's on CUDA (`memory_peak` of what tensors held,
    `memory_peak_reserved` of what was taken from the device), the process's on CPU.

    CUDA graphs work in memory of their own, which the allocator takes for free while they run: with
    them only what is reserved is known, training's and evaluation's together (a model that holds
    11.9 GB would be reported as 2.3)."""
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


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak, so that training's and evaluation's are measured apart."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # Linux: resets this process's high-water mark


def _process_memory() -> tuple[int, int]:
    """Resident bytes and their high-water mark."""
    resident, peak = (proc_bytes("self/status", name) for name in ("VmRSS", "VmHWM"))
    if not resident or not peak:
        unit = 1 if sys.platform == "darwin" else 1024
        resident = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return resident, max(resident, peak)


def proc_bytes(file: str, field: str) -> int:
    """Bytes that a field of /proc/FILE states in kB; 0 where it is not there."""
    try:
        with open(f"/proc/{file}", encoding="utf-8") as lines:
            return (
                int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) << 10
            )
    except (OSError, StopIteration, ValueError):
        return 0


# Whether it was memory that ran out: of a GPU's torch has an exception, of the rest words.

_WORDS = (
    "not enough memory",
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA out of memory",  # in the message of another rank
    "CUBLAS_STATUS_ALLOC_FAILED",  # the allocator has taken all, and the library finds nothing
)
"""What is said where there is no exception of that name."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    named = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return named or any(words in str(error) for words in _WORDS)


@contextmanager
def translate_out_of_memory() -> Iterator[None]:
    """Raise torch.OutOfMemoryError for any library's out-of-memory error inside."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def memory_free(device: torch.device) -> int:
    """Bytes that can be allocated now: on the device, or of the machine's memory."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if available := proc_bytes("meminfo", "MemAvailable"):
        return available
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # no /proc: not Linux


def free_cached_memory() -> None:
    """Give back what is not in use."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Whether optional libraries and compilers are installed, without importing or running them.


@lru_cache
def has_triton() -> bool:
    """Whether kernels of our own can be compiled."""
    return importlib.util.find_spec("triton") is not None


def missing_for_compile(kind: str) -> str:
    """What compiled blocks need on such a device and this machine lacks, as far as a look tells."""
    is_cuda = kind == "cuda"
    if is_cuda and importlib.util.find_spec("triton") is None:
        return "triton, which is not installed"
    # triton compiles its launchers in C, Inductor a CPU's blocks in C++; each has its own habits.
    named = os.environ.get("CC" if is_cuda else "CXX")
    usual = ("gcc", "clang") if is_cuda else ("clang++",) if sys.platform == "darwin" else ("g++",)
    if not any(map(shutil.which, [named] if named else usual)):
        return f"a compiler ({named or ', '.join(usual)}), which is not installed"
    return ""


def device_name(device: torch.device) -> str:
    """What the device is called: the GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return device.type


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
