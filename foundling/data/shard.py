"""One shard: an Arrow IPC file with one row a document, and its checksums."""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foundling.config.data_manifest import Manifest, ShardInfo, shard_problem
from foundling.config.errors import DataError
from foundling.runtime.files import fsync_dir, sha256_file, write_text_atomic
from foundling.tokenizer.tokenizer import Tokenizer

# One Arrow IPC file, one row a document: written whole, read through a memory map without a copy.
#
# Arrow because any reader can open it, and because a large_list column keeps all tokens of the
# shard in one contiguous buffer with the document boundaries in another column, so that a row of
# `concat` packing is a slice. Rejected: a private binary layout (one more format to explain) and
# Parquet (compressed pages cannot be mapped).

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
    """Bits the best possible model needs for each document; NaN where unknown."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def targets(self) -> int:
        """Tokens a loss would count: all but each document's first, or the assistant's."""
        if self.mask is not None:
            return int(np.count_nonzero(self.mask))
        return len(self.tokens) - len(self)


def write_arrow(path: Path, batch: pa.RecordBatch, *, durable: bool = True) -> str:
    """Write one record batch under a temporary name and rename it; not `durable`, it may be torn
    after a power cut. The sha256 of what was handed to the disk: read back, it would bless what a
    bad disk has made of it."""
    temporary = path.with_name(f"{path.name}.tmp-{socket.gethostname()}-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            sink = _HashingFile(file)
            with pa.ipc.new_file(pa.PythonFile(sink, "w"), batch.schema) as writer:
                writer.write_batch(batch)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        fsync_dir(path.parent)
    return sink.digest.hexdigest()


class _HashingFile:
    """A file being written, and the sha256 of all that was."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Left to who opened it."""


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


def column(values: NDArray[np.generic], valid: NDArray[np.bool_] | None = None) -> pa.Array:
    """A column over a flat buffer, without a copy; `valid` says where there is a value.

    Not pa.array: where pandas is installed, that imports it first, which takes half a second.
    """
    values = np.ascontiguousarray(values)
    size, nulls, bitmap = len(values), 0, None
    if valid is not None and not valid.all():
        nulls = size - int(np.count_nonzero(valid))
        bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, size, [bitmap, pa.py_buffer(values)], nulls)


def ragged(offsets: NDArray[np.int64], values: NDArray[np.generic]) -> pa.LargeListArray:
    """A list column over a flat buffer."""
    return pa.LargeListArray.from_arrays(column(offsets), column(values))


def _words(names: Sequence[str]) -> pa.Array:
    """A column of strings, likewise."""
    texts = [name.encode() for name in names]
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.string(), len(names), buffers, 0)


def shard_to_batch(shard: Shard) -> pa.RecordBatch:
    """The columns of the file, in their fixed order."""
    columns = {"tokens": ragged(shard.offsets, shard.tokens)}
    if shard.mask is not None:
        columns["mask"] = ragged(shard.offsets, shard.mask)
    columns["text_bytes"] = column(shard.text_bytes)
    columns["kind"] = pa.DictionaryArray.from_arrays(
        column(shard.kind_codes), _words(shard.kind_names)
    )
    columns["floor_bits"] = column(shard.floor_bits, ~np.isnan(shard.floor_bits))
    return pa.RecordBatch.from_pydict(columns)


def shard_from_batch(batch: pa.RecordBatch, path: Path) -> Shard:
    """Views of a mapped file; columns that do not fit together are refused by name."""
    try:
        tokens = batch.column("tokens")
        kinds = batch.column("kind")
        mask = numbers(batch.column("mask").values) if "mask" in batch.schema.names else None
        shard = Shard(
            offsets=numbers(tokens.offsets),
            tokens=numbers(tokens.values),
            mask=mask,
            text_bytes=numbers(batch.column("text_bytes")),
            kind_codes=numbers(kinds.indices),
            kind_names=tuple(kinds.dictionary.to_pylist()),
            floor_bits=numbers(batch.column("floor_bits"), nulls=True),
        )
    except (KeyError, AttributeError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"{path} lacks a column ({error}); build the data set again.") from None
    why = _misfit(shard, batch)
    if why:
        raise DataError(f"{path} has columns that do not fit together ({why}); build it again.")
    return shard


def numbers(column: pa.Array, *, nulls: bool = False) -> NDArray[Any]:
    """A view of a column's numbers. Arrow's own to_numpy would do, but loads pandas wherever that
    is installed, which costs a process more than opening a hundred shards.

    With `nulls` it looks past them: of a column that was written from NaN, their bytes are NaN.
    """
    if column.null_count and not nulls:
        raise pa.ArrowInvalid("a column has nulls")
    kind = np.dtype(column.type.to_pandas_dtype())
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.empty(0, kind)
    if (column.offset + len(column)) * kind.itemsize > buffer.size:
        raise pa.ArrowInvalid("a column is cut short")
    return np.frombuffer(buffer, kind, len(column), column.offset * kind.itemsize)


def _misfit(shard: Shard, batch: pa.RecordBatch) -> str | None:
    """What a reader would trip over, in a few words: one pass over the documents, none over the
    tokens (their checksum is `verify`'s business)."""
    offsets, mask, codes = shard.offsets, shard.mask, shard.kind_codes
    if len(shard) != batch.num_rows or offsets[0] != 0 or offsets[-1] != len(shard.tokens):
        return "the documents do not fill the tokens"
    if (offsets[1:] < offsets[:-1]).any():
        return "a document ends before it starts"
    if shard.tokens.dtype not in (np.uint16, np.uint32):
        return f"tokens are {shard.tokens.dtype}"
    if mask is not None and (mask.dtype != np.uint8 or len(mask) != len(shard.tokens)):
        return "the mask is not one byte a token"
    if shard.text_bytes.dtype != np.int64 or shard.floor_bits.dtype != np.float64:
        return "a column has another type"
    known = all(isinstance(name, str) for name in shard.kind_names)
    if not known or (len(codes) and not 0 <= codes.min() <= codes.max() < len(shard.kind_names)):
        return "a document has no kind"
    return None


def write_shard(path: Path, shard: Shard) -> str:
    """Write a shard, whole or not at all; its sha256."""
    return write_arrow(path, shard_to_batch(shard))


def read_shard(path: Path) -> Shard:
    """Open a shard through a memory map."""
    return shard_from_batch(read_arrow(path), path)


# Shards against their manifest, on all cores: their checksums, and what is in those that fit.
#
# A first start and `data verify` read everything: a careful hand can make a checksum fit to tokens
# that no model has. A resume must not wait for terabytes that were hashed yesterday, so what was
# found whole is noted next to the manifest with size and time of change, and `changed_only` reads
# again only what differs from the note. The note says nothing about a disk that decays in silence;
# that is what `data verify` is for.
#
# Threads and not processes: hashing releases the interpreter's lock.

NOTE = ".verified.json"
BLOCK = 1 << 22
"""Tokens or documents looked at together: a shard of any size needs the same memory."""
Progress = Callable[[int], None]
"""Called with the bytes that one more shard had."""
Result = TypeVar("Result")


def all_shards(manifest: Manifest) -> tuple[ShardInfo, ...]:
    """The shards of both splits."""
    return (*manifest.train, *manifest.val)


def wrong_shard(
    folder: Path, info: ShardInfo, manifest: Manifest, tokenizer: Tokenizer | None
) -> list[str]:
    """What is wrong with a shard after reading all of it, a sentence each. It is opened only if its
    checksum is right: Arrow believes what a file says about itself, and a flipped bit there can end
    the process."""
    if problem := shard_problem(folder, info):
        return [problem]
    path = folder / info.name
    try:
        digest = sha256_file(path)
    except OSError as error:
        return [f"{path} cannot be read ({error.strerror}); copy it again."]
    if digest != info.sha256:
        return [
            f"{path} is damaged (its sha256 is not the manifest's); copy it again or build the data"
            " set again."
        ]
    return wrong_content(path, info, manifest, tokenizer)


def damage(
    folder: Path,
    manifest: Manifest,
    tokenizer: Callable[[], Tokenizer | None],
    *,
    changed_only: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> list[str]:
    """A sentence for every finding in shards that are not what the manifest says; notes what was
    whole. `tokenizer` opens the data set's own; without one, BOS and EOS are unknown."""
    noted = _read_note(folder) if changed_only else {}
    doubtful = [
        info for info in all_shards(manifest) if noted.get(info.name) != _mark(folder, info)
    ]
    own = tokenizer() if doubtful else None
    found = each_of(
        doubtful,
        lambda info: wrong_shard(folder, info, manifest, own),
        workers=workers,
        progress=progress,
    )
    sentences = [sentence for wrong in found for sentence in wrong]
    if doubtful and not sentences:
        _note_whole(folder, manifest)
    return sentences


def each_of(
    infos: Iterable[ShardInfo],
    work: Callable[[ShardInfo], Result],
    *,
    workers: int = 0,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """`work` of every shard, some at a time, in the order of the shards."""
    infos = tuple(infos)
    with ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1)) as pool:
        for info, result in zip(infos, pool.map(work, infos), strict=True):
            if progress is not None:
                progress(info.file_bytes)
            yield result


def _note_whole(folder: Path, manifest: Manifest) -> None:
    """Note that every shard was found whole; a folder that cannot be written to goes without."""
    shards = {info.name: _mark(folder, info) for info in all_shards(manifest)}
    with suppress(OSError):
        write_text_atomic(folder / NOTE, json.dumps(shards) + "\n")


def _mark(folder: Path, info: ShardInfo) -> list[object]:
    """What hardly stays the same if a file is written to; the checksum ties it to the manifest,
    which grows while a build goes on."""
    try:
        stat = (folder / info.name).stat()
    except OSError:
        return []
    return [info.sha256, stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _read_note(folder: Path) -> dict[str, list[object]]:
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def own_tokenizer(path: Path, manifest: Manifest) -> Tokenizer:
    """The data set's own tokenizer, which must be the one that its tokens were made with."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.fingerprint != manifest.tokenizer:
        raise DataError(
            f"{path} has the fingerprint {tokenizer.fingerprint[:12]} and the data set was built"
            f" with {manifest.tokenizer[:12]}; copy the right tokenizer back."
        )
    if tokenizer.vocab_size != manifest.vocab_size:
        raise DataError(
            f"{path} has {tokenizer.vocab_size} tokens and the manifest says"
            f" {manifest.vocab_size}; copy the right tokenizer back."
        )
    return tokenizer


def wrong_content(
    path: Path, info: ShardInfo, manifest: Manifest, tokenizer: Tokenizer | None
) -> list[str]:
    """What is wrong inside a shard whose checksum is right: a fault of the build, or an edit."""
    try:
        shard = read_shard(path)
    except DataError as error:
        return [str(error)]
    stated = (info.documents, info.tokens, info.targets, info.text_bytes)
    held = (len(shard), len(shard.tokens), shard.targets, int(shard.text_bytes.sum()))
    wrong = [
        f"{path} holds {was:,} {what} where the manifest says {said:,}; build the data set again."
        for what, was, said in zip(
            ("documents", "tokens", "targets", "bytes of text"), held, stated, strict=True
        )
        if was != said
    ]
    if shard.tokens.dtype != manifest.token_dtype:
        wrong.append(f"{path} holds {shard.tokens.dtype} tokens, not {manifest.token_dtype}.")
    if (shard.mask is not None) != (manifest.kind == "chat"):
        wrong.append(f"{path} is not of the kind {manifest.kind} that the manifest says.")
    wrong += [f"{path}: {what}; build the data set again." for what in _odd(shard, manifest)]
    if tokenizer is not None:
        last = tokenizer.end_id if manifest.kind == "chat" else tokenizer.eos_id
        wrong += [
            f"{path}: {what}; build the data set again."
            for what in _open_ends(shard, tokenizer.bos_id, last)
        ]
    return wrong


def _odd(shard: Shard, manifest: Manifest) -> Iterator[str]:
    """Tokens that cannot be: outside the vocabulary, or counted where nothing comes before."""
    for start in range(0, len(shard.tokens), BLOCK):
        block = shard.tokens[start : start + BLOCK]
        if int(block.max()) >= manifest.vocab_size:
            yield (
                f"token {int(block.argmax()) + start:,} is {int(block.max())} and the vocabulary"
                f" has {manifest.vocab_size}"
            )
            break
        if shard.mask is not None and int(shard.mask[start : start + BLOCK].max()) > 1:
            yield "the loss mask holds more than 0 and 1"
            break
    if (shard.text_bytes < 0).any():
        yield "a document has fewer than no bytes"


def _open_ends(shard: Shard, first: int, last: int) -> Iterator[str]:
    """Documents that do not begin with `first` and end with `last`."""
    for start in range(0, len(shard), BLOCK):
        offsets = shard.offsets[start : start + BLOCK + 1]
        begins, ends = offsets[:-1], offsets[1:] - 1
        if (ends <= begins).any():
            yield f"document {start + int((ends <= begins).argmax()):,} is empty"
            return
        if shard.mask is not None and shard.mask[begins].any():
            yield "the loss mask counts a document's first token"
            return
        for what, places, mark in (("BOS", begins, first), ("its end marker", ends, last)):
            bare = np.flatnonzero(shard.tokens[places] != mark)
            if len(bare):
                edge = "begin with" if what == "BOS" else "end with"
                yield f"document {start + int(bare[0]):,} does not {edge} {what}"
                return
