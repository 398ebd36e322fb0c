"""Data sets whose every token is unique, so that each can be followed through packing and order.

A module and not the conftest, because each folder of tests may have a conftest of its own.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foundling.config.data_manifest import Manifest, ShardInfo
from foundling.data.dataset import DataSet
from foundling.data.shard import Shard, write_shard
from foundling.runtime.files import sha256_file


def make_shard(lengths: Sequence[int], first_id: int, mask_seed: int | None) -> Shard:
    """Tokens first_id, first_id + 1, ...; with a seed, a random chat mask (never on a first)."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(first_id, first_id + offsets[-1]).astype(np.uint32)
    mask = None
    if mask_seed is not None:
        mask = np.random.default_rng(mask_seed).integers(0, 2, len(tokens)).astype(np.uint8)
        mask[offsets[:-1]] = 0
    size = len(lengths)
    return Shard(
        offsets=offsets,
        tokens=tokens,
        mask=mask,
        text_bytes=np.asarray(lengths, np.int64) * 3,
        kind_codes=(np.arange(size) % 2).astype(np.int32),
        kind_names=("letter", "story"),
        floor_bits=np.where(np.arange(size) % 3 == 0, np.nan, np.arange(size) + 0.5),
    )


def write_data(
    folder: Path,
    train: Sequence[Sequence[int]],
    *,
    name: str = "unique",
    first_id: int = 0,
    mask_seed: int | None = None,
    val: Sequence[Sequence[int]] = (),
) -> DataSet:
    """A data set with one shard for each list of document lengths."""
    infos: dict[str, list[ShardInfo]] = {"train": [], "val": []}
    for split, shards in (("train", train), ("val", val)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number, lengths in enumerate(shards):
            shard = make_shard(lengths, first_id, mask_seed)
            path = folder / split / f"shard-{number:05d}.arrow"
            write_shard(path, shard)
            infos[split].append(
                ShardInfo(
                    name=f"{split}/{path.name}",
                    documents=len(shard),
                    tokens=len(shard.tokens),
                    targets=shard.targets,
                    text_bytes=int(shard.text_bytes.sum()),
                    file_bytes=path.stat().st_size,
                    sha256=sha256_file(path),
                )
            )
            first_id += len(shard.tokens)
    Manifest(
        name=name,
        kind="text" if mask_seed is None else "chat",
        tokenizer="f" * 64,
        vocab_size=1 << 20,
        token_dtype="uint32",
        train=tuple(infos["train"]),
        val=tuple(infos["val"]),
    ).save(folder)
    return DataSet(folder)
