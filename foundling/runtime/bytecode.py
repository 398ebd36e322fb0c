"""Bytecode of the libraries, kept for later starts where Python keeps none.

An image that was made by uv, or one whose packages the user cannot write to, has torch's sources
and no bytecode of them; under PYTHONDONTWRITEBYTECODE it stays so. There every process, and every
helper of the compiler, compiles two thousand files while it imports: more than half of the time
that imports take. So it is kept in a folder of ours, below $FOUNDLING_HOME or ~/.cache/foundling,
with nothing written beside the sources; and the first process has it made ahead of its imports, on
cores that it leaves idle.

Where Python does keep bytecode, or PYTHONPYCACHEPREFIX says where, nothing is changed.
"""

import os
import re
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.runtime.files import cache_folder

if TYPE_CHECKING:
    import subprocess

PLACE, FORBIDDEN = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"
FLASH4 = ("flash_attn", "cutlass", "quack", "tvm_ffi")
PACKAGES = ("torch", "torchao", "triton", "sympy", "mpmath", "networkx", *FLASH4)
"""What a run imports most of, where it is installed; the rest is kept as it is imported."""
LEFT_OUT = "tests?|testing"
"""Folders of theirs that no run imports much of."""
FEWEST_CORES, MOST_HELPERS = 4, 12
LEAST_ROOM = 10**9
"""Bytes that must be free: on a full disk Python leaves half a file, and fails to read it."""
_set_here: dict[str, str | None] = {}
"""What this process has changed in its environment, and what was there."""
_making: "subprocess.Popen[bytes] | None" = None
"""Kept, because python complains of a process that nobody holds any more."""


def keep_bytecode() -> None:
    """Have Python read and write bytecode in our folder if it keeps none of torch's; to be called
    before the large imports. Whatever stands in the way, imports work without it."""
    try:
        torch = find_spec("torch")
        if sys.pycache_prefix is None and torch is not None and _is_missing(torch):
            _keep_in(_folder_of(torch))
    except (OSError, RuntimeError, ImportError, ValueError):
        return


def elsewhere(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment as it was before: for a job that begins on another machine, or in a container
    whose packages may have their bytecode."""
    changed = {**environ, **_set_here}
    return {name: value for name, value in changed.items() if value is not None}


def _is_missing(package: ModuleSpec) -> bool:
    """Whether its bytecode is not there and will not be."""
    if package.origin is None or Path(cache_from_source(package.origin)).exists():
        return False
    return sys.dont_write_bytecode or not os.access(Path(package.origin).parent, os.W_OK)


def _folder_of(torch: ModuleSpec) -> Path:
    """One for each torch: Python compares times and sizes of sources alone, which two images under
    one home may have in common."""
    import hashlib
    from importlib.metadata import version

    place = hashlib.sha256(str(torch.origin).encode()).hexdigest()[:8]
    name = f"{sys.implementation.cache_tag}-torch-{version('torch')}-{place}"
    return cache_folder("bytecode").absolute() / name


def _keep_in(folder: Path) -> None:
    import shutil

    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < LEAST_ROOM:
        return
    try:
        folder.mkdir(mode=0o700)
        is_first = True
    except FileExistsError:
        is_first = False
        if not folder.is_dir() or folder.stat().st_uid != os.getuid():
            return  # bytecode is run: nobody else's
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    _set_here.update({name: os.environ.get(name) for name in (PLACE, FORBIDDEN)})
    os.environ[PLACE] = str(folder)  # for the processes that this one starts
    os.environ.pop(FORBIDDEN, None)
    if is_first:
        _make_ahead()


def _make_ahead() -> None:
    """Start processes that compile what is about to be imported. Each file appears whole or not at
    all, so that nobody has to wait for them."""
    import subprocess

    global _making
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if cores < FEWEST_CORES:
        return
    found = filter(None, map(find_spec, PACKAGES))
    places = [place for spec in found for place in spec.submodule_search_locations or ()]
    left_out = rf"^({'|'.join(map(re.escape, places))})/(.*/)?({LEFT_OUT})/"
    words = ["-qq", "-j", str(min(cores - 1, MOST_HELPERS)), "-x", left_out, *places]
    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    _making = subprocess.Popen(
        [sys.executable, "-m", "compileall", *words],
        start_new_session=True,  # an interrupt is not meant for it
        **silent,
    )
