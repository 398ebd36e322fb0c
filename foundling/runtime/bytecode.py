"""Bytecode of the libraries, kept for later starts where Python keeps none.

An image that was made by uv, or one whose packages the user cannot write to, has torch's sources
and no bytecode of them; under PYTHONDONTWRITEBYTECODE it stays so. There every process, and every
helper of the compiler, compiles two thousand files while it imports: more than half of the time
that imports take. So it is kept in a folder of ours, below $FOUNDLING_HOME or ~/.cache/foundling,
with nothing written beside the sources; and the first process of a machine has it made ahead of its
imports, on cores that it leaves idle.

Where Python does keep bytecode, or PYTHONPYCACHEPREFIX says where, nothing is changed.
"""

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from foundling.runtime.files import cache_folder

PACKAGES = ("torch", "torchao", "triton", "sympy", "mpmath", "networkx")
"""What a run imports most of; the rest is kept as it is imported."""
LEFT_OUT = r"/tests?/|/torch/(testing|onnx|_vendor)/"
"""Of them, as a pattern of paths."""
FEWEST_CORES, MOST_HELPERS = 4, 12


def keep_bytecode() -> None:
    """Have Python read and write bytecode in our folder if it keeps none of torch's; to be called
    before the large imports."""
    torch = find_spec("torch")
    if sys.pycache_prefix is not None or torch is None or torch.origin is None:
        return
    may_write = not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK)
    if may_write or Path(cache_from_source(torch.origin)).exists():
        return
    from importlib.metadata import version  # this and subprocess: only where they are needed

    folder = cache_folder("bytecode")
    made = folder / f"{sys.implementation.cache_tag}-torch-{version('torch')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_first = not made.exists()
        if is_first:
            made.open("x").close()  # of several ranks one has it made
    except FileExistsError:
        is_first = False
    except OSError:
        return  # nowhere to keep it
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)  # for the processes that this one starts
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if is_first:
        _make_ahead()


def _make_ahead() -> None:
    """Start processes that compile what is about to be imported. Each file appears whole or not at
    all, so that nobody has to wait for them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if cores < FEWEST_CORES:
        return
    import subprocess

    found = filter(None, map(find_spec, PACKAGES))
    places = [place for spec in found for place in spec.submodule_search_locations or ()]
    helpers = str(min(cores - 1, MOST_HELPERS))
    subprocess.Popen(
        [sys.executable, "-m", "compileall", "-qq", "-j", helpers, "-x", LEFT_OUT, *places],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt is not meant for it
    )
