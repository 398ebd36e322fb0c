"""Files of a result that were written while torch was imported, if they are what is wanted."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from foundling.checkpoint.convert.dcp_layout import Streamed, indexed
from foundling.checkpoint.convert.mapping import lies
from foundling.checkpoint.convert.safetensors_io import header_of, kind_name
from foundling.checkpoint.convert.writing import Laid, Plan
from foundling.checkpoint.index_form import Chunk, Entry, Sizes, Spot
from foundling.checkpoint.seal import FileSeal
from foundling.checkpoint.tensor_index import TensorSpec
from foundling.runtime.kernel_copy import Span
from foundling.runtime.packing import Packed, Packing


def take_packed(
    folder: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor], plan: Plan
) -> Streamed | None:
    """Move a checkpoint's files into a folder and index them by these names; None, and the folder
    as it was, unless they hold the very bytes of all these tensors and nothing else."""
    if plan.packing is None:
        return None
    placed = _taken(folder, specs, read, plan.packing)
    if placed is None:
        return None
    entries: dict[str, Entry] = {}
    spots: dict[tuple[str, Sizes], Spot] = {}
    for name, spec in specs.items():
        size, origin = tuple(spec.shape), (0,) * len(spec.shape)
        entries[name] = Entry(size, spec.dtype, (Chunk(origin, size),))
        spots[name, origin] = Spot(placed[name].file, placed[name].start, placed[name].length)
    for file in sorted({spot.file for spot in spots.values()}):
        with open(folder / file, "rb") as written:
            plan.disk.finish(written)
    seals = {file: FileSeal(*found) for file, found in plan.packing.hashed().items()}
    return indexed(folder, entries, spots, seals)


def take_shards(folder: Path, laid: Laid, plan: Plan) -> dict[str, dict[str, TensorSpec]] | None:
    """Move safetensors files into a folder, put their headers into the room that was left, and say
    which tensors each of them holds; None as `take_packed`."""
    if plan.packing is None:
        return None
    specs = laid.specs
    placed = _taken(folder, specs, laid.read, plan.packing)
    if placed is None:
        return None
    shards: dict[str, dict[str, TensorSpec]] = {}
    rooms: dict[str, int] = {}
    for name in sorted(placed, key=lambda name: placed[name][:2]):
        file, start = placed[name][:2]
        rooms.setdefault(file, start)
        shards.setdefault(file, {})[name] = specs[name]
    for file, held in shards.items():
        with open(folder / file, "r+b") as written:
            written.write(header_of(held, rooms[file]))
            plan.disk.finish(written)
    return shards


def _taken(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], Tensor],
    packing: Packing,
) -> dict[str, Packed] | None:
    """Where each tensor is in the files, which are moved into a folder."""
    spans: dict[str, Span] = {}
    for name in specs:
        span = lies(read(name))
        if span is None:
            packing.drop()
            return None
        spans[name] = span
    wanted = {spans[name]: (kind_name(spec.dtype), spec.shape) for name, spec in specs.items()}
    if not packing.take(wanted, folder):
        return None
    return {name: packing.place(span) for name, span in spans.items()}
