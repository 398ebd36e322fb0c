"""Activation offload: what blocks keep for the backward pass waits in the host's memory.

Autograd asks a hook for every tensor it saves. Those of a block that are large and belong to the
rows at hand are copied to pinned memory on a stream of their own while the next blocks compute; a
block's device memory is given up two blocks later, so that what is on its way stays bounded where
the bus is slower than the work. In the backward pass a block that begins asks for the one before
it. The last block keeps its own: its backward pass follows at once.

Whole storages travel, once each however many views are saved, and come back with the offsets and
strides that a compiled backward pass insists on. Weights never travel. The hooks lie around the
block's call, in the place where Module.compile puts it, so a compiled block is one call with one
set of saved tensors, and a recomputed one saves its input. Rejected: torch's save_on_cpu (it waits
for every copy), and record_stream (memory comes back at moments that nobody can plan).
"""

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from foundling.config.errors import RunError

SMALLEST = 1 << 20
"""Bytes below which a tensor stays: a copy has a price of its own."""
BEHIND = 2
"""Blocks after which a block's device memory is given up, copied or waited for."""


def apply_offload(blocks: nn.ModuleList, device: torch.device, smallest: int = SMALLEST) -> None:
    """Let the blocks' saved tensors wait on the host; on a CPU the copies are made at once, which
    is of use to tests only. After compilation, before anything that hooks the blocks."""
    lines = _Lines(device)
    last = len(blocks) - 1
    for index, block in enumerate(blocks):
        block._compiled_call_impl = _offloaded(block, index, lines, smallest, keep=index == last)


def _offloaded(
    block: Any, index: int, lines: "_Lines", smallest: int, *, keep: bool
) -> Callable[..., Tensor]:
    inner = block._compiled_call_impl or block._call_impl

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return inner(x, *args, **kwargs)  # type: ignore[no-any-return]
        shelf = Shelf(lines, index, smallest, keep=keep)
        shelf.open_for(block, x, (*args, *kwargs.values()))
        try:
            with saved_tensors_hooks(shelf.pack, shelf.unpack):
                out: Tensor = inner(x, *args, **kwargs)
            shelf.close()
        except BaseException:
            lines.abandon()
            raise
        return out

    return call


class _Lines:
    """The two ways between device and host, and the host's buffers."""

    def __init__(self, device: torch.device) -> None:
        self._under_way: list[_Trip] = []
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.out = torch.cuda.Stream(device) if self.is_cuda else None  # type: ignore[no-untyped-call]
        self.back = torch.cuda.Stream(device) if self.is_cuda else None  # type: ignore[no-untyped-call]
        self.latest: Shelf | None = None
        """Of the forward pass that is going on."""
        self._free: dict[int, list[Tensor]] = {}

    def __del__(self) -> None:
        if self._under_way:  # a backward pass broke off, and the model with it
            self.abandon()

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any) -> "_Trip":
        """Copy (target, source) pairs; both ends are held until somebody waits for them."""
        held = list(pairs)
        trip = _Trip(self.copy(held, stream), held)
        self._under_way.append(trip)
        return trip

    def arrive(self, trip: "_Trip | None") -> None:
        """Let the work that is launched from now on wait for copies."""
        if trip is not None:
            self.wait(trip.event)
            self._under_way = [other for other in self._under_way if other is not trip]

    def abandon(self) -> None:
        """A pass broke off: nobody will ask for its copies, and before they are made the device's
        memory at their ends must not be used for anything else."""
        self.latest = None
        for trip in self._under_way:
            self.wait(trip.event)
        self._under_way = []

    def take(self, size: int) -> Tensor:
        """A host buffer of at least `size` bytes; a power of two, as torch rounds pinned ones."""
        rounded = 1 << max(0, size - 1).bit_length()
        waiting = self._free.setdefault(rounded, [])
        if waiting:
            return waiting.pop()
        try:
            return torch.empty(rounded, dtype=torch.uint8, pin_memory=self.is_cuda)
        except RuntimeError as error:
            raise RunError(
                f"the host has no {rounded / 1e9:.2f} GB more of pinned memory for activations;"
                " lower train.batch_size, or use parallel.recompute instead of"
                " parallel.offload_activations."
            ) from error

    def give(self, buffer: Tensor) -> None:
        """A buffer that nobody will read again."""
        self._free[buffer.numel()].append(buffer)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any) -> Any:
        """Copy (target, source) pairs on a stream, behind all work so far; the event of the end."""
        if stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return event

    def wait(self, event: Any) -> None:
        """Let the work that is launched from now on wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class _Trip(NamedTuple):
    """Copies that may not be made yet."""

    event: Any
    ends: list[tuple[Tensor, Tensor]]


class _Parked:
    """One storage that waits on the host."""

    def __init__(self, source: Tensor, host: Tensor) -> None:
        self.source: Tensor | None = source
        """The device's own, until its copy is known to be made."""
        self.host = host
        self.size = source.numel()
        self.fetched: Tensor | None = None
        self.views = 0
        """Saved tensors that have not been asked for yet."""

    @property
    def here(self) -> Tensor | None:
        """On the device."""
        return self.source if self.source is not None else self.fetched


class Shelf:
    """What one block saved in one forward pass."""

    def __init__(self, lines: _Lines, index: int, smallest: int, *, keep: bool) -> None:
        self.lines, self.index, self.smallest, self.keep = lines, index, smallest, keep
        self.before: Shelf | None = None
        self.parked: dict[int, _Parked] = {}
        """By the address of the storage, which is held and so not used twice."""
        self._copied: _Trip | None = None
        self._fetched: _Trip | None = None
        self._stays: set[int] = set()
        self._rows: tuple[int, int] = (0, 0)
        self._weights: Callable[[], Iterable[Tensor]] = tuple

    def open_for(self, block: nn.Module, x: Tensor, others: Iterable[Any]) -> None:
        """Take the place behind the block before, and give up what is far enough behind."""
        lines = self.lines
        if not self.index:
            lines.abandon()  # of a backward pass that broke off; else there is nothing
        if self.index and lines.latest is not None and lines.latest.index == self.index - 1:
            self.before = lines.latest
        lines.latest = self
        behind: Shelf | None = self
        for _ in range(BEHIND):
            behind = behind.before if behind is not None else None
        if behind is not None:
            behind.release()
        self._rows = (x.shape[0], x.shape[1])
        # What every block is given (positions, masks, the first stream) would travel with each.
        self._stays = set(_addresses(others))
        self._weights = lambda: (*block.parameters(), *block.buffers())

    def close(self) -> None:
        """The block is done: its copies start, and after the last block nobody's are left."""
        self._weights = tuple
        if self.parked:
            parked = self.parked.values()
            pairs = [(p.host[: p.size], p.source) for p in parked if p.source is not None]
            self._copied = self.lines.start(pairs, self.lines.out)
        if not self.keep:
            return
        self.lines.latest = None
        behind = self.before
        while behind is not None:
            behind.release()
            behind = behind.before

    def release(self) -> None:
        """Give the device's memory up, once the copies are made."""
        if any(parked.source is not None for parked in self.parked.values()):
            self.lines.arrive(self._copied)
            self._copied = None  # a trip holds both of its ends
            for parked in self.parked.values():
                parked.source = None

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in the place of a saved tensor."""
        if self.keep or not self._travels(tensor):
            return tensor
        storage = tensor.untyped_storage()
        parked = self.parked.get(storage.data_ptr())
        if parked is None:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            parked = _Parked(source, self.lines.take(source.numel()))
            weakref.finalize(parked, self.lines.give, parked.host)
            self.parked[storage.data_ptr()] = parked
        parked.views += 1
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return parked, tensor.dtype, place

    def unpack(self, saved: Any) -> Tensor:
        """The saved tensor again, and the block before sets out."""
        self._begin_backward()
        if isinstance(saved, Tensor):
            return saved
        parked, dtype, place = saved
        flat = parked.here
        if flat is None:  # asked for once more than saved: a graph that is kept
            flat = self._empty(parked.size)
            flat.copy_(parked.host[: parked.size])
        parked.views -= 1
        if parked.views <= 0:  # the graph frees its tensors as it goes, and so must we
            parked.source = parked.fetched = None
        return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), *place)

    def _begin_backward(self) -> None:
        self.fetch()
        self.lines.arrive(self._fetched)
        self._fetched = None
        if self.before is not None:
            self.before.fetch()
            self.before = None

    def fetch(self) -> None:
        """Begin to bring everything back that is not there and was not asked for yet."""
        away = [p for p in self.parked.values() if p.here is None and p.views > 0]
        if not away:
            return
        for parked in away:
            parked.fetched = self._empty(parked.size)
        pairs = [(p.fetched, p.host[: p.size]) for p in away if p.fetched is not None]
        self._fetched = self.lines.start(pairs, self.lines.back)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.lines.device)

    def _travels(self, tensor: Tensor) -> bool:
        """Whether it is large, of these rows, and neither a weight nor everybody's."""
        if type(tensor) is not Tensor or tensor.device.type != self.lines.device.type:
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.smallest or not _has_rows(tensor.shape, *self._rows):
            return False
        # Looked up when they are needed: shards are gathered inside of the block's call.
        self._stays.update(_addresses(self._weights()))
        self._weights = tuple
        return storage.data_ptr() not in self._stays


def _has_rows(shape: torch.Size, rows: int, width: int) -> bool:
    """Whether a tensor's sides are those of [rows, width, ...], in any order or laid end to end."""
    if rows * width in shape:
        return True
    if rows == 1:
        return width in shape
    return rows in shape and width in shape and math.prod(shape) % (rows * width) == 0


def _addresses(values: Iterable[Any]) -> Iterable[int]:
    """Of the storages of plain tensors, also inside of tuples."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _addresses(value)
        elif type(value) in (Tensor, nn.Parameter):
            yield value.untyped_storage().data_ptr()
