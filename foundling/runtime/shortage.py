"""Whether it was memory that ran out: of a GPU's torch has an exception, of the rest words."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORDS = (
    "not enough memory",
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA out of memory",  # as another rank tells it
    "CUBLAS_STATUS_ALLOC_FAILED",  # the allocator has taken all, and the library finds nothing
)
"""What is said where there is no exception of that name."""


def ran_out(error: BaseException) -> bool:
    """Whether memory was the trouble."""
    named = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return named or any(words in str(error) for words in _WORDS)


@contextmanager
def shortage_by_name() -> Iterator[None]:
    """Whoever runs out of memory in here, torch.OutOfMemoryError comes out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error
