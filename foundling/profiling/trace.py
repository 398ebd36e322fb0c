"""Where a step's time went: torch's profiler, each piece of work put into one named part.

Work is put where it was asked for: the loss and the optimizer by ranges that are opened around
them (a backward node belongs to the loss when the operation that made it did); all
else by the name of the kernel or operator. So the head's products count as loss, fused or plain.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from foundling.runtime.device import synchronise
from foundling.train import step
from foundling.train.state import TrainState

PARTS = ("matrix", "attention", "loss", "elementwise", "optimizer", "data", "other")
RANGE = "part of a step: "
"""Prefix of the ranges' names; what follows is the part."""

QUEUE_FULL = "Command Buffer Full"
"""A wait for room in the launch queue; it lists again the kernel that its operator lists."""

_BACKWARD = 1  # at::RecordScope::BACKWARD_FUNCTION
_ATTENTION = re.compile(
    r"scaled_dot_product|flash_attention|sdpa|fmha|flash_(fwd|bwd)|flash::|FlashAttn|flex_attent"
)
# What is known by its kernel whatever operator launched it: clipping's sums and updates, copies,
# talk.
_BY_KERNEL = {
    "optimizer": re.compile(r".*multi_tensor_apply"),
    "data": re.compile(r"Memcpy HtoD"),
    "communication": re.compile(r"nccl|ncclDev", re.I),
}
_MATRIX_OP = re.compile(r"aten::(_scaled_)?(mm|addmm|bmm|baddbmm|matmul|linear|einsum)\b")
# Inductor's own kernels are triton_*, its matrix products among them triton_tem_*; ours with an end
# (model/kernels/triton_kernels.py) is _product.
_MATRIX_KERNEL = re.compile(
    r"(?!triton_).*(gemm|nvjet|cutlass|xmma|splitk|cublas)|triton_tem|_product$", re.I
)
_OPERATORS = ("aten::", "torch::", "## Call CompiledFxGraph")
"""What counts on a CPU: operators, and between them what the compiler has made of the others."""
# A range shows up on the GPU's own line too, as long as its kernels: it is none.
_ANNOTATION = re.compile(
    rf"{RANGE}|Optimizer\.|ProfilerStep|## |Torch-Compiled|autograd::|CompiledF"
)


@contextlib.contextmanager
def watched(state: TrainState, seen: Callable[[str], object]) -> Iterator[None]:
    """Call `seen` with the name of each moment of a step as it passes: begin (of a micro-step),
    hidden (the final norm is done), loss, clip, clipped, update, updated.

    Not a hook of the norm's, which would be compiled with it; and clipping is no module.
    """
    model, room = state.model, cast("Any", step)
    hidden, patched, clip = model.hidden, vars(model).get("hidden"), room.clip_

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        states = hidden(*args, **kwargs)
        seen("hidden")
        return states

    def clipped(*given: Any) -> Tensor:
        seen("clip")
        norm: Tensor = clip(*given)
        seen("clipped")
        return norm

    def at(moment: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            seen(moment)

        return hook

    handles = [
        state.module.register_forward_pre_hook(at("begin")),
        state.module.register_forward_hook(at("loss")),
        state.optimizer.register_step_pre_hook(at("update")),
        state.optimizer.register_step_post_hook(at("updated")),
    ]
    model.hidden = noted  # type: ignore[method-assign]
    room.clip_ = clipped
    try:
        yield
    finally:
        room.clip_ = clip
        del model.hidden  # the class has its own
        if patched is not None:
            model.hidden = patched  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def ranges(state: TrainState) -> Iterator[Callable[[], None]]:
    """Name the loss (from the final norm's end to the loss's), clipping and the update in the
    trace; what it gives is called at the end of a step."""
    with contextlib.ExitStack() as stack:

        def seen(moment: str) -> None:
            if moment in ("clipped", "update", "updated"):
                return  # norms and update ratios lie between them: all of it is the optimizer's
            stack.close()
            if part := {"hidden": "loss", "clip": "optimizer"}.get(moment):
                stack.enter_context(record_function(RANGE + part))

        with watched(state, seen):
            yield stack.close


def taken_apart(
    state: TrainState,
    work: Sequence[Callable[[], object]],
    step_s: float,
    file: Path | None = None,
) -> tuple[dict[str, float], Sequence[Any]]:
    """Seconds by part of a step that takes `step_s` seconds, and the profiler's events; `work` are
    the steps that are profiled, after one more of the first; `file` is written for chrome://tracing
    or perfetto."""
    cuda = state.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with ranges(state) as end_of_step, silent_stderr():
        work[0]()  # the ranges' own first time
        end_of_step()
        synchronise(state.device)
        with profile(activities=activities) as found:
            began = time.perf_counter()
            for take in work:
                take()
                end_of_step()
            synchronise(state.device)
            profiled_s = (time.perf_counter() - began) / len(work)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(file))
    events: Sequence[Any] = found.events() or []
    parts = {part: seconds / len(work) for part, seconds in split(events, cuda=cuda).items()}
    return fill_up(parts, step_s if cuda else profiled_s, step_s), events


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Kineto greets on the C level when it starts and stops, and no setting keeps it from it."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def split(events: Sequence[Any], *, cuda: bool) -> dict[str, float]:
    """Seconds by part: of kernels on CUDA, of operators' own time on a CPU. `other` is left to the
    caller, who knows how long the step was; `communication` is there where there was any."""
    parts = dict.fromkeys(PARTS, 0.0)
    for part, _, seconds in pieces(events, cuda=cuda):
        parts[part] = parts.get(part, 0.0) + seconds
    parts["other"] = 0.0
    return parts


def pieces(events: Sequence[Any], *, cuda: bool) -> Iterator[tuple[str, str, float]]:
    """(part, name, seconds) of every kernel on CUDA, of every operator itself on a CPU."""
    of_loss = _loss_nodes(events)
    for event in events:
        if cuda:
            if event.name == QUEUE_FULL:
                continue
            for kernel in event.kernels:
                if not _ANNOTATION.match(kernel.name):
                    part = _part(event, of_loss, kernel.name)
                    yield part, kernel.name, kernel.duration / 1e6
        elif event.name.startswith(_OPERATORS) or _ranges(event):
            yield _part(event, of_loss), event.name, event.self_cpu_time_total / 1e6


def fill_up(parts: dict[str, float], measured: float, step: float) -> dict[str, float]:
    """Parts of a profiled step of `measured` seconds as parts of a step of `step` seconds.

    What no part claims is `other`: Python, launches, waiting. Profiling slows a CPU's step down, so
    its parts are taken as shares; kernels on a GPU run as fast as without, so they are kept and
    `measured` is `step`.
    """
    claimed = sum(parts.values())
    whole = max(measured, claimed)
    scale = step / whole
    full = {name: seconds * scale for name, seconds in parts.items()}
    full["other"] = max(0.0, step - sum(full[name] for name in PARTS if name != "other"))
    return full


def _loss_nodes(events: Sequence[Any]) -> set[tuple[int, int]]:
    """(thread, sequence number) of every operation that was asked for inside the loss's range;
    autograd gives a backward node the numbers of the operation that made it."""
    return {
        (event.thread, event.sequence_nr)
        for event in events
        if event.sequence_nr >= 0 and event.scope != _BACKWARD and "loss" in _ranges(event)
    }


def _part(event: Any, of_loss: set[tuple[int, int]], kernel: str = "") -> str:
    for parent in _lineage(event):
        if parent.name.startswith(RANGE):
            return str(parent.name.removeprefix(RANGE))
        if parent.scope == _BACKWARD and (parent.fwd_thread, parent.sequence_nr) in of_loss:
            return "loss"
    for part, pattern in _BY_KERNEL.items():
        if kernel and pattern.match(kernel):
            return part
    names = [parent.name for parent in _lineage(event)]
    if _ATTENTION.search(kernel) or any(_ATTENTION.search(name) for name in names):
        return "attention"
    if kernel:
        return "matrix" if _MATRIX_KERNEL.match(kernel) else "elementwise"
    return "matrix" if any(_MATRIX_OP.match(name) for name in names) else "elementwise"


def _lineage(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _ranges(event: Any) -> list[str]:
    return [
        parent.name.removeprefix(RANGE)
        for parent in _lineage(event)
        if parent.name.startswith(RANGE)
    ]
