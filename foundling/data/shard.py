"""One Arrow IPC file, one row a document: written whole, read through a memory map without a copy.

Arrow because any reader can open it, and because a large_list column keeps all tokens of the shard
in one contiguous buffer with the document boundaries beside it, so that a row of `concat` packing
is a slice. Rejected: a private binary layout (one more format to explain) and Parquet (compressed
pages cannot be mapped).
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.runtime.files import fsync_dir

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True)
class Shard:
    """Documents as flat arrays; those of an opened file are views of the memory map."""

    offsets: NDArray[np.int64]
    """Where each document starts in `tokens`, and the end of the last."""
    tokens: Tokens
    mask: NDArray[np.uint8] | None
    """Chats only, aligned with `tokens`: 1 on what the assistant must produce."""
    text_bytes: NDArray[np.int64]
    """UTF-8 bytes of each text; of a chat, of what the assistant says."""
    kind_codes: NDArray[np.int32]
    kind_names: tuple[str, ...]
    floor_bits: NDArray[np.float64]
    """Bits the best possible model needs for each document; NaN where nobody knows."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def targets(self) -> int:
        """Tokens a loss would count: all but each document's first, or the assistant's."""
        if self.mask is not None:
            return int(np.count_nonzero(self.mask))
        return len(self.tokens) - len(self)


def write_arrow(path: Path, batch: pa.RecordBatch) -> None:
    """Write one record batch under a temporary name, flush it to disk, rename."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def read_arrow(path: Path) -> pa.RecordBatch:
    """Map a file of one record batch; a file that is something else is refused by name."""
    try:
        whole = pa.memory_map(str(path)).read_buffer()
        reader = pa.ipc.open_file(pa.BufferReader(whole))
        if reader.num_record_batches != 1:
            raise pa.ArrowInvalid(f"{reader.num_record_batches} record batches, not one")
        batch = reader.get_batch(0)
        batch.validate()
        _check_buffers(batch, whole)
        return batch
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else "damaged"
        raise DataError(
            f"{path} cannot be read as an Arrow file ({reason}); build the data set again."
        ) from None


def _check_buffers(batch: pa.RecordBatch, whole: pa.Buffer) -> None:
    """See that every buffer lies inside the file.

    Arrow believes the file's own metadata: one flipped bit there and reading a column ends the
    process with a bus error instead of an exception.
    """
    low, high = whole.address, whole.address + whole.size
    for column in batch.columns:
        buffers = column.buffers()
        if isinstance(column, pa.DictionaryArray):
            column.dictionary.validate(full=True)
            buffers += column.dictionary.buffers()
        for buffer in buffers:
            if buffer is None or not buffer.size:
                continue
            if buffer.address < low or buffer.address + buffer.size > high:
                raise pa.ArrowInvalid("a column lies outside the file")


def ragged(offsets: NDArray[np.int64], values: NDArray[np.generic]) -> pa.LargeListArray:
    """A list column over a flat buffer."""
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def shard_to_batch(shard: Shard) -> pa.RecordBatch:
    """The columns of the file, in their fixed order."""
    columns = {"tokens": ragged(shard.offsets, shard.tokens)}
    if shard.mask is not None:
        columns["mask"] = ragged(shard.offsets, shard.mask)
    columns["text_bytes"] = pa.array(shard.text_bytes)
    columns["kind"] = pa.DictionaryArray.from_arrays(
        pa.array(shard.kind_codes), pa.array(shard.kind_names, pa.string())
    )
    columns["floor_bits"] = pa.array(shard.floor_bits, from_pandas=True)  # NaN becomes null
    return pa.RecordBatch.from_pydict(columns)


def shard_from_batch(batch: pa.RecordBatch, path: Path) -> Shard:
    """Views of a mapped file; columns that do not fit together are refused by name."""
    try:
        tokens = batch.column("tokens")
        kinds = batch.column("kind")
        mask = batch.column("mask").values.to_numpy() if "mask" in batch.schema.names else None
        shard = Shard(
            offsets=tokens.offsets.to_numpy(),
            tokens=tokens.values.to_numpy(),
            mask=mask,
            text_bytes=batch.column("text_bytes").to_numpy(),
            kind_codes=kinds.indices.to_numpy(),
            kind_names=tuple(kinds.dictionary.to_pylist()),
            floor_bits=batch.column("floor_bits").to_numpy(zero_copy_only=False),
        )
    except (KeyError, AttributeError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{path} lacks a column ({error}); build the data set again.") from None
    ends_meet = len(shard) >= 0 and shard.offsets[0] == 0 and shard.offsets[-1] == len(shard.tokens)
    masks_meet = mask is None or len(mask) == len(shard.tokens)
    if not (ends_meet and masks_meet and shard.tokens.dtype in (np.uint16, np.uint32)):
        raise DataError(f"{path} has columns that do not fit together; build the data set again.")
    return shard


def write_shard(path: Path, shard: Shard) -> None:
    """Write a shard, whole or not at all."""
    write_arrow(path, shard_to_batch(shard))


def read_shard(path: Path) -> Shard:
    """Open a shard through a memory map."""
    return shard_from_batch(read_arrow(path), path)
