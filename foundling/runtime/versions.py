"""Versions of foundling, its commit, and the libraries it runs on."""

import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

# Two builds of torch in one job meet in the first collective, which then hangs or adds nonsense.

Versions = Mapping[str, str]
LEAST_TORCH = (2, 10)
"""Below it weights_only has had ways around it."""
SMI_S = 20.0


def own_versions() -> dict[str, str]:
    """Versions of the libraries by name; a missing one is left out."""
    import torch  # not at the top: what only asks for the version needs none

    found = {
        "foundling": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or ""),
        "rocm": str(getattr(torch.version, "hip", None) or ""),
        "nccl": _nccl(),
        "driver": _driver(),
    }
    return {name: value for name, value in found.items() if value}


def _nccl() -> str:
    import torch

    if not torch.cuda.is_available():
        return ""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return ""


def _driver() -> str:
    """NVIDIA's or AMD's kernel driver, read from a file that is there even without nvidia-smi."""
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


__version__ = "0.1.0"


def commit() -> str:
    """Of the checkout that this package is in, marked where it was changed since; the version of
    the package where it is in none."""
    folder = Path(__file__).parents[1]
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        # A package inside of another project's checkout is not of its commits.
        tracked = ["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"]
        subprocess.run(tracked, capture_output=True, check=True, timeout=10)
        found = subprocess.run(words, capture_output=True, check=True, timeout=10, text=True)
    except (OSError, subprocess.SubprocessError):
        return f"foundling {__version__}"
    return found.stdout.strip()
