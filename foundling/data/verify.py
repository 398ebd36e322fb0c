"""`data verify`: everything about a data set that can be checked.

    the manifest       its own digest, names inside the folder, the tokenizer's fingerprint
    the shards         size and sha256, read again from disk
    the documents      counts, boundaries, BOS and EOS, ids within the vocabulary, the loss mask
    the source         its checksums are those of the recipe (data/resample.py)

A shard is opened only after its checksum was right: Arrow believes what a file says about itself,
and a flipped bit there can end the process.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from foundling.config.errors import DataError
from foundling.config.manifest import Manifest, ShardInfo
from foundling.data.dataset import TOKENIZER_FOLDER
from foundling.data.findings import Findings
from foundling.data.hashes import (
    Progress,
    all_shards,
    each_of,
    note_whole,
    own_tokenizer,
    wrong_shard,
)
from foundling.data.resample import compare_with_source
from foundling.tokenizer import Tokenizer


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
        tokenizer = own_tokenizer(path, manifest)
    except DataError as error:
        found.wrong.append(str(error))
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
        return wrong_shard(folder, info, manifest, tokenizer)

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
