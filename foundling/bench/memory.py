"""`foundling bench memory`: what one step holds after each layer and at each moment.

Weighed in a step of its own after two that warm up, from outside of the blocks, so that they may be
compiled or recomputed. On CUDA the allocator's count, on a CPU live tensors (train/live_bytes.py).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundling.bench.early import refuse_unwritable
from foundling.bench.rows import random_rows
from foundling.bench.steps import Runner, Tell, alone, tell_chosen
from foundling.config.errors import ConfigError, RunError
from foundling.config.sections import RunConfig
from foundling.plan.words import size, table
from foundling.runtime.device import prepare
from foundling.runtime.files import cache_folder
from foundling.train.ceilings import device_name
from foundling.train.live_bytes import LiveBytes
from foundling.train.oom import dump_snapshot, recorded_history, snapshot_on_oom, taken_note
from foundling.train.state import TrainState

Weigh = Callable[[], tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is held at one moment."""

    name: str
    allocated: int
    peak: int
    """Since the moment before."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A step, weighed."""

    device: str
    rows: int
    seq_len: int
    held: dict[str, int]
    """Bytes between steps: weights and buffers, optimizer's state."""
    moments: tuple[Moment, ...]
    reserved: int
    """The most that torch asked of the device; 0 on a CPU."""
    data: str
    """What the rows were."""
    snapshot: str
    """File for pytorch.org/memory_viz; empty: none."""

    @property
    def peak(self) -> int:
        """The most at once."""
        return max(moment.peak for moment in self.moments)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "peak": self.peak}


def bench_memory(
    config: RunConfig, snapshot: Path | None = None, tell: Tell = lambda _: None
) -> Memory:
    """Weigh one step; with `snapshot`, leave the allocator's own account of it too (CUDA)."""
    choice = prepare(config.train)
    alone(config)
    cuda = choice.device.type == "cuda"
    if config.train.compile == "graphs":
        raise ConfigError(
            "train.compile graphs works in memory that nobody can weigh from outside; give"
            " --train.compile blocks, or see the reserved memory of `foundling bench train`."
        )
    if snapshot is not None:
        if not cuda:
            raise ConfigError("--snapshot is of CUDA's allocator and this is a CPU; leave it out.")
        refuse_unwritable(snapshot, "--snapshot")
    rows = random_rows(config)
    batch = rows.batch(0, config.train.batch_size)
    moments: list[Moment] = []
    try:
        with snapshot_on_oom(cache_folder("oom")), recorded_history(choice.device):
            runner = Runner(config, choice)
            tell_chosen(runner.chosen, tell)
            for _ in range(2):
                runner.step([batch], runner.timed_lr)
            with _scales(runner.state) as weigh:
                moments.append(
                    Moment(name="between steps", allocated=(now := weigh())[0], peak=now[0])
                )
                with _marked(runner.state, moments, weigh):
                    runner.step([batch], runner.timed_lr)
                _mark(moments, weigh, "end of step")
            if snapshot is not None:
                snapshot.parent.mkdir(parents=True, exist_ok=True)
                dump_snapshot(snapshot)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"a step of {config.train.batch_size} rows does not fit into the memory; give a smaller"
            f" --batch{taken_note(error) or '.'}"
        ) from error
    return Memory(
        device=device_name(choice.device),
        rows=config.train.batch_size,
        seq_len=config.train.seq_len,
        held=_held(runner.state),
        moments=tuple(moments),
        reserved=torch.cuda.max_memory_reserved(choice.device) if cuda else 0,
        data=rows.name,
        snapshot=str(snapshot or ""),
    )


def _mark(moments: list[Moment], weigh: Weigh, name: str) -> None:
    allocated, peak = weigh()
    moments.append(Moment(name=name, allocated=allocated, peak=peak))


@contextlib.contextmanager
def _marked(state: TrainState, moments: list[Moment], weigh: Weigh) -> Iterator[None]:
    """Weigh after each block's forward and backward, after the loss, and around the update."""

    def mark(name: str) -> Callable[..., None]:
        return lambda *_: _mark(moments, weigh, name)

    blocks = list(state.model.layers)
    before = [block._compiled_call_impl for block in blocks]
    for index, block in enumerate(blocks):
        above = f"backward, layer {index + 1}" if index + 1 < len(blocks) else "backward, head"
        below = None if index else mark("backward, layer 0")
        block._compiled_call_impl = _weighed(
            block, mark(f"forward, layer {index}"), mark(above), below
        )
    handles = [
        state.module.register_forward_hook(mark("forward, head and loss")),
        state.optimizer.register_step_pre_hook(mark("backward, all; clipped")),
        state.optimizer.register_step_post_hook(mark("optimizer")),
    ]
    try:
        yield
    finally:
        for block, compiled in zip(blocks, before, strict=True):
            block._compiled_call_impl = compiled
        for handle in handles:
            handle.remove()


def _weighed(
    block: Any,
    forward: Callable[..., None],
    backward: Callable[..., None],
    below: Callable[..., None] | None,
) -> Any:
    """The block's call, compiled or not, with a mark behind it; one where the gradient of its
    result is complete, which is when the block above has done its backward pass; and `below` where
    that of its input is. In the place where Module.compile puts its call, because hooks would be
    compiled into the block."""
    inner = block._compiled_call_impl or block._call_impl

    def call(*args: Any, **kwargs: Any) -> Tensor:
        if below is not None and args[0].requires_grad:
            args[0].register_hook(lambda _: below())
        out: Tensor = inner(*args, **kwargs)
        forward()
        if out.requires_grad:
            out.register_hook(lambda _: backward())  # type: ignore[no-untyped-call]
        return out

    return call


@contextlib.contextmanager
def _scales(state: TrainState) -> Iterator[Weigh]:
    """A function that gives the bytes held now and their peak since it was last called."""
    device = state.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

        def weigh_cuda() -> tuple[int, int]:
            found = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            return found

        yield weigh_cuda
        return
    with LiveBytes(_tensors(state)) as live:

        def weigh() -> tuple[int, int]:
            found = live.now, live.peak
            live.forget_peak()
            return found

        yield weigh


def _tensors(state: TrainState) -> Iterator[Tensor]:
    yield from (param.detach() for _, param in state.params())
    yield from state.model.buffers()
    for moments in state.optimizer.state.values():
        yield from (value for value in moments.values() if isinstance(value, Tensor))


def _held(state: TrainState) -> dict[str, int]:
    weights = [param.detach() for _, param in state.params()] + list(state.model.buffers())
    kept = [v for s in state.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return {"weights": _bytes(weights), "optimizer": _bytes(kept)}


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def describe_memory(found: Memory) -> list[str]:
    """The table as text."""
    rows = [["moment", "held", "change", "peak on the way"]]
    last = found.moments[0].allocated
    for moment in found.moments:
        change = moment.allocated - last
        sign = "-" if change < 0 else "+"
        rows.append(
            [moment.name, size(moment.allocated), sign + size(abs(change)), size(moment.peak)]
        )
        last = moment.allocated
    held = ", ".join(f"{name} {size(count)}" for name, count in found.held.items())
    lines = [
        f"{found.device}: one step of {found.rows} rows of {found.seq_len}, {found.data}",
        *table(rows),
        f"held between steps: {held}",
        f"peak {size(found.peak)}"
        + (f", reserved {size(found.reserved)}" if found.reserved else ""),
    ]
    if found.snapshot:
        lines.append(f"snapshot: {found.snapshot} (pytorch.org/memory_viz)")
    return lines
