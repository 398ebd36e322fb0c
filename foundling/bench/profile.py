"""Where a step's time and memory go: a profile by part, and the peak by layer."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foundling.bench.batch_size import alone, refuse_unwritable
from foundling.bench.kernels import best_attention
from foundling.config.errors import ConfigError
from foundling.config.run import RunConfig
from foundling.plan.hardware import Ceilings
from foundling.plan.params import keys_seen, sizes_of
from foundling.plan.speed import UPDATE_BYTES
from foundling.profiling.ceilings import measure_ceilings
from foundling.profiling.probe import memory_meter
from foundling.profiling.step_runner import StepRunner, Tell, random_rows, tell_chosen
from foundling.profiling.trace import PARTS, pieces, taken_apart, watched
from foundling.runtime.console import size, table
from foundling.runtime.device import DeviceChoice, device_name, free_cached_memory, prepare_device
from foundling.runtime.files import cache_folder
from foundling.train.oom import dump_snapshot, record_history, refuse_on_oom, snapshot_on_oom
from foundling.train.state import TrainState
from foundling.train.step import manual_gc

# Steps are timed first and profiled after that, because a profiler slows the clock: kernels on a
# GPU run as fast as without it, so their seconds are kept and what they leave of the timed step is
# idle. On a CPU the parts are taken as shares. Work is counted from the config: what must be
# computed or moved once. A part that does more (a recompute, an extra pass over memory) shows as a
# lower rate.

ORDER = (*(part for part in PARTS if part != "other"), "communication", "idle")
TOP = 15
"""Kernels that are named."""
MUCH_IDLE = 0.1
"""Of a step, beyond which it is said what helps."""
NORM_BYTES, CLIP_BYTES = 4, 8
"""A parameter's, in addition to the update's: its gradient is read, and where it is clipped
scaled."""


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """One part of the step."""

    name: str
    seconds: float
    share: float
    """Of the step."""
    rate: float | None
    """FLOP/s or bytes/s of the work that must be done; None where none is counted."""
    ceiling: float | None
    """None where none was measured."""
    unit: str
    note: str = ""
    """Why there is no rate or no ceiling, or what helps."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """A step taken apart."""

    device: str
    rows: int
    seq_len: int
    step_s: float
    tokens_per_s: float
    parts: tuple[StepPart, ...]
    kernels: tuple[tuple[str, str, float, int], ...]
    """Part, name, seconds a step and launches a step of those that took longest."""
    launches: int
    """Kernels (on a CPU: operators) of a step."""
    data: str
    """What the rows were."""
    products: str
    """Arithmetic of the products that the ceiling is of."""
    trace: str


def bench_profile(
    config: RunConfig,
    trace: Path,
    *,
    steps: int = 5,
    profiled: int = 2,
    quick: bool = False,
    tell: Tell = lambda _: None,
) -> StepProfile:
    """Time some steps, profile a few, write the trace for chrome://tracing or perfetto."""
    choice = prepare_device(config.train)
    alone(config)
    refuse_unwritable(trace, "--trace")
    rows = random_rows(config)
    size, cuda = config.train.batch_size, choice.device.type == "cuda"
    with (
        refuse_on_oom(config.train, "give a smaller --batch"),
        snapshot_on_oom(cache_folder("oom")),
    ):
        runner = StepRunner(config, choice)
        tell_chosen(runner.chosen, tell)
        config = runner.config  # with what was chosen
        with manual_gc() as gc_control:  # as in a run
            runner.timed(rows, 1, size=size, warmup=0)
            gc_control.step()
            timed = runner.timed(rows, steps, size=size)
        tell(f"a step takes {timed.seconds:.4f} s; profiling {profiled} more")
        batches = [runner.batches(rows, number, size, 1) for number in range(profiled)]
        work = [partial(runner.step, each, runner.timed_lr) for each in batches]
        found, events = taken_apart(runner.state, work, timed.seconds, trace)
    found["idle"] = found.pop("other")
    found.setdefault("communication", 0.0)  # one process has no communication
    kernels, launches = _kernels(events, cuda, profiled)
    del runner, work, events
    free_cached_memory()
    tell("measuring the ceilings")
    # The runner has set how fp32 products are made: those of a tf32 run are measured in tf32.
    ceilings = measure_ceilings(choice.device, quick=quick)
    documents = rows.batch(0, size).documents if config.data.document_mask else None
    return StepProfile(
        device=device_name(choice.device),
        rows=size,
        seq_len=config.train.seq_len,
        step_s=timed.seconds,
        tokens_per_s=timed.tokens_per_s,
        parts=tuple(_parts(config, choice, found, ceilings, documents)),
        kernels=kernels,
        launches=launches,
        data=rows.name,
        products="bf16" if choice.dtype != torch.float32 else choice.name,
        trace=str(trace),
    )


def _kernels(
    events: Any, cuda: bool, profiled: int
) -> tuple[tuple[tuple[str, str, float, int], ...], int]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for part, name, took in pieces(events, cuda=cuda):
        seconds[part, name] += took / profiled
        counts[part, name] += 1
    longest = sorted(seconds, key=lambda key: -seconds[key])[:TOP]
    shown = tuple((*key, seconds[key], counts[key] // profiled) for key in longest)
    return shown, sum(counts.values()) // profiled


def _parts(
    config: RunConfig,
    choice: DeviceChoice,
    seconds: dict[str, float],
    ceilings: Ceilings,
    documents: NDArray[np.int32] | None,
) -> Iterator[StepPart]:
    lengths = () if documents is None else document_lengths(documents)
    work = needed_work(config, choice.dtype, lengths)
    products = ceilings.matmul_peak("fp32" if choice.dtype == torch.float32 else "bf16")
    tops = {
        "matrix": products,
        "attention": best_attention(
            config, choice, documents=None if documents is None else documents[0]
        ),
        "loss": products,
        "elementwise": ceilings.copy_bytes_per_s,
        "optimizer": ceilings.copy_bytes_per_s,
    }
    notes = {}
    if config.train.float8 != "none":
        eight, unknown = ceilings.matmul_peak("fp8"), "no ceiling of float8 products was measured"
        tops["matrix"] = eight
        notes["matrix"] = "" if eight else unknown
        if config.train.head_float8:  # one of its three products
            tops["loss"] = 3 / (2 / products + 1 / eight) if eight else 0.0
            notes["loss"] = "" if eight else unknown
    if "optimizer" not in work:
        notes["optimizer"] = "no rate: most of Muon's work is products, and not bytes moved"
    whole = sum(seconds.values())
    if choice.device.type == "cuda" and seconds.get("idle", 0.0) > MUCH_IDLE * whole:
        notes["idle"] = f"the device waits for the host; {_helps_an_idle_device(config)}"
    for name in (part for part in ORDER if part in seconds):
        took = seconds[name]
        amount = work.get(name)
        yield StepPart(
            name=name,
            seconds=took,
            share=took / whole,
            rate=amount / took if amount and took > 0 else None,
            ceiling=tops.get(name) or None,
            unit="TB/s" if name in ("elementwise", "optimizer") else "TFLOP/s",
            note=notes.get(name, ""),
        )


def _helps_an_idle_device(config: RunConfig) -> str:
    """What makes launches fewer or longer."""
    larger = "larger micro-batches give it longer kernels"
    if config.train.compile == "off":
        return f"{larger}, and --train.compile blocks fewer of them"
    if config.train.compile == "blocks":
        return f"{larger}, and with --train.compile graphs a block is launched at once"
    return larger


def document_lengths(documents: NDArray[np.int32]) -> list[int]:
    """Of every document of the rows [B, T]."""
    return [int(n) for row in documents for n in np.unique(row, return_counts=True)[1]]


def needed_work(
    config: RunConfig, dtype: torch.dtype, lengths: Sequence[int] = ()
) -> dict[str, float]:
    """FLOPs (matrix, attention, loss) and bytes (elementwise, optimizer) of one step of one
    micro-batch, when nothing is done twice; `lengths` are those of documents that attention keeps
    apart.

    Attention: two products forward and five backward over the keys that causality leaves.
    Elementwise: each chain between two products read once and written once (norm and residual,
    rotation, activation; backward the same and its inputs again), and weights cast to the products'
    dtype and their gradients back.
    """
    model, train = config.model, config.train
    positions = train.batch_size * train.seq_len
    sizes, layers = sizes_of(model), model.layers
    apart = lengths or [train.seq_len]
    keys = sum(
        length * keys_seen(model, layer, length, causal=True)
        for layer in range(layers)
        for length in apart
    ) / sum(apart)
    width = 4 if dtype == torch.float32 else 2  # of the residual stream's numbers, too
    turned = (model.heads + model.num_kv_heads) * model.head_width
    wide = 9 if model.activation == "swiglu" else 6
    chains = width * (20 * model.dim + 4 * turned + wide * model.ffn_dim)
    casts = 0 if width == 4 else 12 * sizes.blocks
    work = {
        "matrix": 6.0 * sizes.blocks * positions,
        "attention": 14.0 * positions * model.heads * model.head_width * keys,
        "loss": 6.0 * positions * model.vocab_size * model.dim,
        "elementwise": float(chains * positions * layers + casts),
    }
    if config.optim.name != "muon":
        moved = UPDATE_BYTES[config.optim.name] + NORM_BYTES + CLIP_BYTES * (config.optim.clip > 0)
        work["optimizer"] = moved * sizes.all
    return work


def describe_profile(found: StepProfile) -> list[str]:
    """The table as text."""
    rows = [["part", "ms", "share", "reached", "ceiling", "of it"]]
    for part in found.parts:
        cells = ["-", "-", "-"]
        if part.rate is not None:
            cells[0] = f"{part.rate / 1e12:,.3g} {part.unit}"
        if part.rate is not None and part.ceiling:
            cells[1:] = [f"{part.ceiling / 1e12:,.3g}", f"{part.rate / part.ceiling:.0%}"]
        rows.append([part.name, f"{part.seconds * 1e3:,.2f}", f"{part.share:.1%}", *cells])
    kernels = [["ms", "times", "part", "kernel"]]
    for part_name, name, seconds, count in found.kernels:
        kernels.append([f"{seconds * 1e3:,.2f}", str(count), part_name, name[:90]])
    return [
        f"{found.device}: {found.rows} rows of {found.seq_len}, {found.data},"
        f" {found.step_s * 1e3:,.1f} ms a step, {found.tokens_per_s:,.0f} tokens/s,"
        f" {found.launches} kernels",
        *table(rows),
        *(f"{part.name}: {part.note}" for part in found.parts if part.note),
        "reached: work that must be done (nothing twice, causal keys only) over the part's time;"
        f" the loss includes the head's products; ceilings were measured just now: the best"
        f" {found.products} product, the best attention kernel at these shapes, a copy",
        *("  ".join([f"{ms:>10}", f"{n:>6}", f"{p:>11}", k]) for ms, n, p, k in kernels),
        f"trace: {found.trace} (open in chrome://tracing or ui.perfetto.dev)",
    ]


# `foundling bench train --memory`: what one step holds after each layer and at each moment.
#
# Weighed in a step of its own after two that warm up, from outside of the blocks, so that they may
# be compiled or recomputed. On CUDA the allocator's count, on a CPU live tensors
# (profiling/probe.py).

Reading = Callable[[], dict[str, int]]
MOMENTS = {
    "loss": "forward, head and loss",
    "clipped": "backward, all; clipped",
    "updated": "optimizer",
}
"""Of a step, in addition to the blocks'."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is held at one moment."""

    name: str
    allocated: int
    peak: int
    """Since the moment before."""


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
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
) -> MemoryTimeline:
    """Weigh one step; with `snapshot`, leave the allocator's own account of it too (CUDA)."""
    choice = prepare_device(config.train)
    alone(config)
    cuda = choice.device.type == "cuda"
    if config.train.compile == "graphs":
        raise ConfigError(
            "train.compile graphs works in memory that cannot be measured from outside; give"
            " --train.compile blocks, or see the reserved memory of `foundling bench train`."
        )
    if snapshot is not None:
        if not cuda:
            raise ConfigError("--snapshot is of CUDA's allocator and this is a CPU; leave it out.")
        refuse_unwritable(snapshot, "--snapshot")
    rows = random_rows(config)
    batch = rows.batch(0, config.train.batch_size)
    moments: list[Moment] = []
    with (
        refuse_on_oom(config.train, "give a smaller --batch"),
        snapshot_on_oom(cache_folder("oom")),
        record_history(choice.device),
    ):
        runner = StepRunner(config, choice)
        tell_chosen(runner.chosen, tell)
        for _ in range(2):
            runner.step([batch], runner.timed_lr)
        with memory_meter(runner.state) as read:
            held = read()["allocated"]
            moments.append(Moment(name="between steps", allocated=held, peak=held))
            with _marked(runner.state, moments, read):
                runner.step([batch], runner.timed_lr)
            _mark(moments, read, "end of step")
        if snapshot is not None:
            snapshot.parent.mkdir(parents=True, exist_ok=True)
            dump_snapshot(snapshot)
    return MemoryTimeline(
        device=device_name(choice.device),
        rows=config.train.batch_size,
        seq_len=config.train.seq_len,
        held=_held(runner.state),
        moments=tuple(moments),
        reserved=torch.cuda.max_memory_reserved(choice.device) if cuda else 0,
        data=rows.name,
        snapshot=str(snapshot or ""),
    )


def _mark(moments: list[Moment], read: Reading, name: str) -> None:
    now = read()
    moments.append(Moment(name=name, allocated=now["allocated"], peak=now["peak"]))


@contextlib.contextmanager
def _marked(state: TrainState, moments: list[Moment], read: Reading) -> Iterator[None]:
    """Weigh after each block's forward and backward, after the loss, and around the update."""

    def mark(name: str) -> Callable[..., None]:
        return lambda *_: _mark(moments, read, name)

    blocks = list(state.model.layers)
    before = [block._compiled_call_impl for block in blocks]
    for index, block in enumerate(blocks):
        above = f"backward, layer {index + 1}" if index + 1 < len(blocks) else "backward, head"
        below = None if index else mark("backward, layer 0")
        block._compiled_call_impl = _weighed(
            block, mark(f"forward, layer {index}"), mark(above), below
        )

    def seen(moment: str) -> None:
        if moment in MOMENTS:
            _mark(moments, read, MOMENTS[moment])

    try:
        with watched(state, seen):
            yield
    finally:
        for block, compiled in zip(blocks, before, strict=True):
            block._compiled_call_impl = compiled


def _weighed(
    block: Any,
    forward: Callable[..., None],
    backward: Callable[..., None],
    below: Callable[..., None] | None,
) -> Any:
    """The block's call, compiled or not, with a mark after it; one where the gradient of its
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


def _held(state: TrainState) -> dict[str, int]:
    weights = [param.detach() for _, param in state.params()] + list(state.model.buffers())
    kept = [v for s in state.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return {"weights": _bytes(weights), "optimizer": _bytes(kept)}


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def describe_memory(found: MemoryTimeline) -> list[str]:
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
