"""Data sets that are large on paper: ten thousand sparse shards, or one to measure speed with."""

import os
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from foundling.config.data_manifest import Manifest, ShardInfo
from foundling.data.shard import Shard, shard_to_batch, write_shard


class _Sparse:
    """A file whose long stretches of zeros are holes."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")
        self.closed = False

    def write(self, data: bytes) -> int:
        if len(data) >= 1 << 16 and not np.frombuffer(data, np.uint8).any():
            self._file.seek(len(data), os.SEEK_CUR)
        else:
            self._file.write(data)
        return len(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self._file.truncate(self._file.tell())
            self._file.close()
        self.closed = True

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def _shard(lengths: np.ndarray, tokens: np.ndarray, mask: np.ndarray | None = None) -> Shard:
    return Shard(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=tokens,
        mask=mask,
        text_bytes=lengths.astype(np.int64),
        kind_codes=np.zeros(len(lengths), np.int32),
        kind_names=("page",),
        floor_bits=np.full(len(lengths), np.nan),
    )


def _manifest(folder: Path, shards: list[ShardInfo], kind: str) -> None:
    Manifest(
        name="stand-in",
        kind=kind,  # type: ignore[arg-type]
        tokenizer="f" * 64,
        vocab_size=50_000,
        token_dtype="uint16",
        train=tuple(shards),
        val=(),
    ).save(folder)


def _info(name: str, shard: Shard, file_bytes: int, sha256: str) -> ShardInfo:
    return ShardInfo(
        name=name,
        documents=len(shard),
        tokens=len(shard.tokens),
        targets=shard.targets,
        text_bytes=int(shard.text_bytes.sum()),
        file_bytes=file_bytes,
        sha256=sha256,
    )


def write_sparse(folder: Path, *, shards: int, documents: int, length: int) -> None:
    """Shards of zeros that are all one file of holes, each under a checksum of its own."""
    (folder / "train").mkdir(parents=True)
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 2, length * 3 // 2, documents)
    shard = _shard(lengths, np.zeros(int(lengths.sum()), np.uint16))
    file, batch = folder / "train" / "shard-00000.arrow", shard_to_batch(shard)
    sink = _Sparse(file)
    with pa.PythonFile(sink, mode="w") as out, pa.ipc.new_file(out, batch.schema) as writer:
        writer.write_batch(batch)
    sink.close()
    infos = []
    for number in range(shards):
        name = f"train/shard-{number:05d}.arrow"
        if number:
            os.link(file, folder / name)
        infos.append(_info(name, shard, file.stat().st_size, f"{number:064x}"[::-1]))
    _manifest(folder, infos, "text")


def write_random(
    folder: Path, *, shards: int, documents: int, chat: bool, log_length: float = 6.2
) -> None:
    """Shards of random tokens in documents of log-normal length, as web pages have it."""
    (folder / "train").mkdir(parents=True)
    rng = np.random.default_rng(0)
    infos = []
    for number in range(shards):
        lengths = np.clip(rng.lognormal(log_length, 1.0, documents).astype(np.int64), 2, 20_000)
        total = int(lengths.sum())
        # Turns of about a hundred tokens; a document's first is never the assistant's.
        mask = (np.arange(total) // 100 % 2).astype(np.uint8) if chat else None
        if mask is not None:
            mask[np.cumsum(lengths) - lengths] = 0
        shard = _shard(lengths, rng.integers(0, 50_000, total).astype(np.uint16), mask)
        path = folder / "train" / f"shard-{number:05d}.arrow"
        write_shard(path, shard)
        infos.append(
            _info(f"train/{path.name}", shard, path.stat().st_size, f"{number:064x}"[::-1])
        )
    _manifest(folder, infos, "chat" if chat else "text")
