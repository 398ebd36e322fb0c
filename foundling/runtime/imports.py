"""Whether optional libraries are installed, told without importing them."""

import importlib.util
from functools import lru_cache


@lru_cache
def triton_is_here() -> bool:
    """Whether kernels of our own can be compiled."""
    return importlib.util.find_spec("triton") is not None
