"""`data verify`: everything about a data set that can be checked.

    the manifest       its own digest, names inside the folder, the tokenizer's fingerprint
    the shards         size and sha256, read again from disk
    the documents      counts, boundaries, BOS and EOS, ids within the vocabulary, the loss mask
    the source         its checksums are those of the recipe (data/resample.py)

A shard is opened only after its checksum was right: Arrow believes what a file says about itself,
and a flipped bit there can end the process.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from foundling.config.errors import DataError
from foundling.config.manifest import Manifest, ShardInfo
from foundling.data.dataset import TOKENIZER_FOLDER
from foundling.data.findings import Findings
from foundling.data.hashes import Progress, all_shards, each_of, note_whole, wrong_hash
from foundling.data.resample import compare_with_source
from foundling.data.shard import Shard, read_shard
from foundling.tokenizer import Tokenizer

BLOCK = 1 << 22
"""Tokens or documents looked at together: a shard of any size needs the same memory."""


def verify(
    folder: str | Path,
    *,
    specs: Sequence[str] = (),
    workers: int = 0,
    progress: Progress | None = None,
) -> Findings:
    """Check a data set; `specs` are its sources where the recipe does not say where they are.

    A manifest that cannot be believed is refused at once: without it there is nothing to compare
    with.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    found = Findings(checked=["the manifest agrees with its digest"])
    found.wrong += misnamed(folder, manifest)
    if found.wrong:
        found.unchecked.append("shards and source, because the manifest names other files")
        return found
    tokenizer = _tokenizer(folder, manifest, found)
    whole = _shards(folder, manifest, tokenizer, found, workers, progress)
    if tokenizer is None or not whole:
        found.unchecked.append("the source, because what was made of it is not whole")
    elif not manifest.complete:
        found.unchecked.append("the source, because the build has not reached its end")
    else:
        compare_with_source(folder, manifest, found, specs)
    return found


def misnamed(folder: Path, manifest: Manifest) -> list[str]:
    """A sentence for every shard name that is twice there or leads out of the folder."""
    wrong = []
    seen: set[str] = set()
    for info in all_shards(manifest):
        path = PurePosixPath(info.name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            wrong.append(f"{folder} has a manifest that names {info.name}, outside the data set.")
        elif info.name in seen:
            wrong.append(f"{folder} has a manifest that names {info.name} twice.")
        seen.add(info.name)
    return wrong


def _tokenizer(folder: Path, manifest: Manifest, found: Findings) -> Tokenizer | None:
    """The data set's own tokenizer, if it is the one its tokens were made with."""
    path = folder / TOKENIZER_FOLDER
    try:
        tokenizer = Tokenizer.load(path)
    except DataError as error:
        found.wrong.append(str(error))
        return None
    if tokenizer.fingerprint != manifest.tokenizer:
        found.wrong.append(
            f"{path} has the fingerprint {tokenizer.fingerprint[:12]} and the data set was built"
            f" with {manifest.tokenizer[:12]}; copy the right tokenizer back."
        )
        return None
    if tokenizer.vocab_size != manifest.vocab_size:
        found.wrong.append(
            f"{path} has {tokenizer.vocab_size} tokens and the manifest says"
            f" {manifest.vocab_size}; copy the right tokenizer back."
        )
        return None
    found.checked.append(f"the tokenizer is {manifest.tokenizer[:12]}, as the manifest says")
    return tokenizer


def _shards(
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    found: Findings,
    workers: int,
    progress: Progress | None,
) -> bool:
    """Hash and look through every shard, some at a time; True if all are whole."""

    def look(info: ShardInfo) -> list[str]:
        damaged = wrong_hash(folder, info)
        return [damaged] if damaged else _shard(folder / info.name, info, manifest, tokenizer)

    infos = all_shards(manifest)
    wrong = [
        sentence
        for sentences in each_of(infos, look, workers=workers, progress=progress)
        for sentence in sentences
    ]
    found.wrong += wrong
    count, documents = len(infos), sum(info.documents for info in infos)
    size = sum(info.file_bytes for info in infos)
    found.checked.append(f"{count} shards hashed ({size:,} bytes), {documents:,} documents in them")
    unlisted = _unlisted(folder, manifest)
    if unlisted:
        found.unchecked.append(f"{len(unlisted)} shards that the manifest does not name")
    if tokenizer is None:
        found.unchecked.append("BOS and EOS, because the tokenizer is not the manifest's")
    if not wrong:
        note_whole(folder, manifest)
    return not wrong


def _unlisted(folder: Path, manifest: Manifest) -> list[Path]:
    """Shards beside those of the manifest: left by a build that goes on, or by somebody."""
    listed = {folder / info.name for info in all_shards(manifest)}
    there = (path for split in ("train", "val") for path in (folder / split).glob("*.arrow"))
    return sorted(path for path in there if path not in listed)


def _shard(
    path: Path, info: ShardInfo, manifest: Manifest, tokenizer: Tokenizer | None
) -> list[str]:
    """What is wrong inside a shard whose checksum is right: the build, or somebody's hand."""
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
