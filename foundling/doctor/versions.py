"""Which software this process runs on, and whether all ranks of a job run on the same.

Two builds of torch in one job meet in the first collective, which then hangs or adds nonsense.
"""

import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import foundling
from foundling.doctor.lines import Line, failed, passed, warned

Versions = Mapping[str, str]
LEAST_TORCH = (2, 10)
"""Below it weights_only has had ways around it."""
SMI_S = 20.0


def own_versions() -> dict[str, str]:
    """By name; what is not there is left out."""
    found = {
        "foundling": foundling.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or ""),
        "rocm": str(getattr(torch.version, "hip", None) or ""),
        "nccl": _nccl(),
        "driver": _driver(),
    }
    return {name: value for name, value in found.items() if value}


def _nccl() -> str:
    if not torch.cuda.is_available():
        return ""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return ""


def _driver() -> str:
    """NVIDIA's or AMD's kernel driver; a file tells it even where nvidia-smi is not installed."""
    for file in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            return Path(file).read_text().strip()
        except OSError:
            continue
    if shutil.which("nvidia-smi") is None:
        return ""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def own_line(versions: Versions) -> Line:
    """This process's versions; a driver without a torch that can use it is the common mistake."""
    told = ", ".join(f"{name} {value}" for name, value in versions.items())
    if "driver" in versions and not torch.cuda.is_available():
        built = "without CUDA" if "cuda" not in versions else f"for CUDA {versions['cuda']}"
        return failed(
            "versions",
            f"{told}: there is a GPU driver and torch, built {built}, finds no GPU; install the"
            " torch wheel that matches the driver (nvidia-smi names the newest CUDA it knows).",
            versions,
        )
    major, minor = (int(part) for part in versions["torch"].split(".")[:2])
    if (major, minor) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return warned("versions", f"{told}: torch is older than {least}; upgrade it.", versions)
    return passed("versions", told, versions)


def compare_versions(by_rank: Sequence[tuple[str, Versions]]) -> list[Line]:
    """A failure for each thing that ranks have in different versions, naming the odd ones out."""
    lines = []
    names = dict.fromkeys(name for _, versions in by_rank for name in versions)
    for name in names:
        whose: dict[str, list[str]] = {}
        for rank, versions in by_rank:
            whose.setdefault(versions.get(name, "none"), []).append(rank)
        if len(whose) == 1:
            continue
        usual = max(whose, key=lambda value: len(whose[value]))
        odd = "; ".join(
            f"{', '.join(ranks[:4])}{' and more' if len(ranks) > 4 else ''} with {value}"
            for value, ranks in whose.items()
            if value != usual
        )
        lines.append(
            failed(
                "versions",
                f"{name} is {usual} on {len(whose[usual])} of {len(by_rank)} ranks, but {odd};"
                " install the same environment on every node.",
            )
        )
    if not lines and len(by_rank) > 1:
        lines.append(passed("versions", f"the same on all {len(by_rank)} ranks"))
    return lines
