"""Files of a checkpoint that were written while torch was imported, if they are what is wanted."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from foundling.checkpoint.convert.dcp_layout import Streamed, indexed
from foundling.checkpoint.convert.mapping import lies
from foundling.checkpoint.convert.safetensors_io import kind_name
from foundling.checkpoint.convert.writing import Plan
from foundling.checkpoint.index_form import Chunk, Entry, Sizes, Spot
from foundling.checkpoint.seal import FileSeal
from foundling.checkpoint.tensor_index import TensorSpec
from foundling.runtime.kernel_copy import Span


def take_packed(
    folder: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor], plan: Plan
) -> Streamed | None:
    """Move them into a folder and index them by these names; None, and the folder as it was, unless
    they hold the very bytes of all these tensors and nothing else."""
    if plan.packing is None:
        return None
    spans: dict[str, Span] = {}
    for name in specs:
        span = lies(read(name))
        if span is None:
            plan.packing.drop()
            return None
        spans[name] = span
    wanted = {spans[name]: (kind_name(spec.dtype), spec.shape) for name, spec in specs.items()}
    if not plan.packing.take(wanted, folder):
        return None
    entries: dict[str, Entry] = {}
    spots: dict[tuple[str, Sizes], Spot] = {}
    for name, spec in specs.items():
        size, origin = tuple(spec.shape), (0,) * len(spec.shape)
        entries[name] = Entry(size, spec.dtype, (Chunk(origin, size),))
        archive = plan.packing.archive(spans[name])
        spots[name, origin] = Spot(archive.file, archive.start, archive.length)
    for file in sorted({spot.file for spot in spots.values()}):
        with open(folder / file, "rb") as written:
            plan.disk.finish(written)
    seals = {file: FileSeal(*found) for file, found in plan.packing.hashed().items()}
    return indexed(folder, entries, spots, seals)
