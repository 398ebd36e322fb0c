"""A function that is compiled on CUDA and runs as it is elsewhere."""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from foundling.runtime.log import first_line, warn

P = ParamSpec("P")
R = TypeVar("R")
MOST_GRAPHS = 64
"""Shapes that may be compiled; a model has a handful."""


class OnCuda(Generic[P, R]):
    """Compiled at the first call with a CUDA tensor, one graph a shape.

    Where the compiler fails (no Triton, no C compiler), the function itself does the work from then
    on, and the user hears of it once.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._plain = function
        self._fast: Callable[P, R] | None = None
        self._failed = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._failed or not _on_cuda(args):
            return self._plain(*args, **kwargs)
        try:
            return self._compiled()(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Before anything was written: the compiler runs ahead of the first kernel.
            if not _is_compilers(error):
                raise
            self._failed = True
            warn(
                f"{self._plain.__name__} of the optimizer could not be compiled"
                f" ({first_line(error)}); it runs uncompiled, slower and"
                " with more memory."
            )
            return self._plain(*args, **kwargs)

    def _compiled(self) -> Callable[P, R]:
        if self._fast is None:
            import torch._dynamo  # seconds, which a run on a CPU does not pay

            settings = torch._dynamo.config
            settings.recompile_limit = max(settings.recompile_limit, MOST_GRAPHS)
            self._fast = torch.compile(self._plain, dynamic=False, fullgraph=True)
        return self._fast


def _on_cuda(args: tuple[Any, ...]) -> bool:
    return any(isinstance(one, Tensor) and one.is_cuda for one in args)


def _is_compilers(error: Exception) -> bool:
    """Whether an error is of torch.compile itself, and not of what it compiled."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
