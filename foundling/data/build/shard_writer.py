"""Phase 3 of a build: shards shuffled, cut and written; published while the build grows."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foundling.config.data_manifest import ShardInfo
from foundling.config.errors import DataError
from foundling.data.build.part_files import PartInfo, read_part
from foundling.data.build.scheduler import PlacedPart
from foundling.data.build.select import Decided, Selection
from foundling.data.build.shuffle import IN_MEMORY, Placed, chosen, in_order
from foundling.data.dataset import Split
from foundling.data.permutation import round_keys, unpermute
from foundling.data.readers.source import broken_off
from foundling.data.shard import Shard, write_shard
from foundling.runtime.files import fsync_dir, write_text_atomic

# A shard that is written is noted in the work folder, so that a build that is killed here goes on
# after the last one. The checksum is taken from the bytes as they go to disk.


@dataclass(frozen=True, kw_only=True)
class ShardWriter:
    """Where shards go and how they are cut."""

    folder: Path
    """The data set's."""
    work: Path
    """For boxes, notes and what is not finished."""
    seed: int
    shard_tokens: int

    def write(
        self,
        split: Split,
        selection: Selection,
        parts: Sequence[Decided],
        before: Sequence[ShardInfo] = (),
        wave: int | None = None,
    ) -> tuple[ShardInfo, ...]:
        """Shuffle a split of `parts` as a whole and write its shards, numbered after `before`."""
        count = sum(part.train if split == "train" else part.val for part in parts)
        if not count:
            return ()
        names = ("build", split, self.seed) if wave is None else ("build", split, self.seed, wave)
        keys = round_keys(*names)
        kinds = tuple(sorted({kind for part in parts for kind in part.kinds}))
        infos = self._noted(split, len(before), count)
        done = sum(info.documents for info in infos)
        tokens = sum(part.train_tokens if split == "train" else part.val_tokens for part in parts)
        tokens -= sum(info.tokens for info in infos)
        if done == count:
            return tuple(infos)
        placed = self._placed(split, selection, parts, kinds, keys, count, done)
        boxes = self.work / "boxes" / split
        boxes.parent.mkdir(exist_ok=True)
        in_memory = min(IN_MEMORY, self.shard_tokens)
        (self.folder / split).mkdir(exist_ok=True)
        ordered = in_order(placed, done, count, tokens, boxes, in_memory)
        for shard in cut(ordered, self.shard_tokens, kinds):
            name = f"{split}/shard-{len(before) + len(infos):05d}.arrow"
            infos.append(self._write(name, shard))
        fsync_dir(self.folder / split)  # one for all: until then no manifest names them
        return tuple(infos)

    def _placed(
        self,
        split: Split,
        selection: Selection,
        parts: Sequence[Decided],
        kinds: tuple[str, ...],
        keys: NDArray[np.uint64],
        count: int,
        done: int,
    ) -> Iterator[Placed]:
        """What stays of each part, one part open at a time, with its places in the shuffle."""
        number = 0
        for decided in parts:
            size = decided.train if split == "train" else decided.val
            if not size:
                continue
            part = read_part(decided.info.path)
            stay = selection.keep(decided, part) & (part.held_out == (split == "val"))
            place = unpermute(np.arange(number, number + size), count, keys)
            number += size
            missing = place >= done
            # A kind of which nothing stays has no code, and no document asks for it.
            known = [kinds.index(k) if k in kinds else -1 for k in part.documents.kind_names]
            codes = np.array(known, np.int32)[part.documents.kind_codes]
            documents = replace(part.documents, kind_codes=codes, kind_names=kinds)
            yield chosen(documents, np.flatnonzero(stay)[missing], place[missing])

    def _note(self, name: str) -> Path:
        return self.work / "shards" / (name.replace("/", "-") + ".json")

    def _noted(self, split: Split, first: int, count: int) -> list[ShardInfo]:
        """Shards from number `first` on, up to `count` documents, that are there already."""
        infos: list[ShardInfo] = []
        while sum(info.documents for info in infos) < count:
            note = self._note(f"{split}/shard-{first + len(infos):05d}.arrow")
            try:
                info = ShardInfo(**json.loads(note.read_text()))
            except (FileNotFoundError, ValueError, TypeError):
                break  # not there, or torn by a power cut
            path = self.folder / info.name
            if not path.is_file() or path.stat().st_size != info.file_bytes:
                break
            infos.append(info)
        return infos

    def _write(self, name: str, shard: Shard) -> ShardInfo:
        """Write a shard in the work folder and move it into place, so that no torn name is left."""
        path = self.folder / name
        temporary = self.work / "shard.arrow"
        digest = write_shard(temporary, shard)
        size = temporary.stat().st_size
        os.replace(temporary, path)
        info = ShardInfo(
            name=name,
            documents=len(shard),
            tokens=len(shard.tokens),
            targets=shard.targets,
            text_bytes=int(shard.text_bytes.sum()),
            file_bytes=size,
            sha256=digest,
        )
        write_text_atomic(self._note(name), json.dumps(asdict(info)) + "\n", durable=False)
        return info


def cut(ordered: Iterator[Shard], shard_tokens: int, kinds: tuple[str, ...]) -> Iterator[Shard]:
    """Documents in shards of at most `shard_tokens`, each with one document at least."""
    lots: list[Shard] = []
    filled = 0
    for block in ordered:
        start = 0
        while start < len(block):
            room = block.offsets[start] + shard_tokens - filled
            stop = int(block.offsets.searchsorted(room, side="right")) - 1
            if stop <= start and lots:
                yield _joined(lots, kinds)
                lots, filled = [], 0
                continue
            lots.append(_slice(block, start, max(stop, start + 1)))
            filled += len(lots[-1].tokens)
            start += len(lots[-1])
    if lots:
        yield _joined(lots, kinds)


def _slice(block: Shard, start: int, stop: int) -> Shard:
    """Documents `start` to `stop`, without a copy."""
    low, high = int(block.offsets[start]), int(block.offsets[stop])
    return replace(
        block,
        offsets=block.offsets[start : stop + 1] - low,
        tokens=block.tokens[low:high],
        mask=None if block.mask is None else block.mask[low:high],
        text_bytes=block.text_bytes[start:stop],
        kind_codes=block.kind_codes[start:stop],
        floor_bits=block.floor_bits[start:stop],
    )


def _joined(lots: list[Shard], kinds: tuple[str, ...]) -> Shard:
    lengths = np.concatenate([np.diff(lot.offsets) for lot in lots])
    masks = [lot.mask for lot in lots if lot.mask is not None]
    return Shard(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=np.concatenate([lot.tokens for lot in lots]),
        mask=np.concatenate(masks) if masks else None,
        text_bytes=np.concatenate([lot.text_bytes for lot in lots]),
        kind_codes=np.concatenate([lot.kind_codes for lot in lots]),
        kind_names=kinds,
        floor_bits=np.concatenate([lot.floor_bits for lot in lots]),
    )


# Where a wave ends, what is said of bad rows, and when a build has seen too many of them.

MOST_SHARDS = 16
"""Shards of a wave at most."""
FIRST_ROWS = 1000
"""Rows before a share means anything."""


def wave_end(wave: int, shard_tokens: int) -> int:
    """Tokens for training at which a wave (0, 1, ...) ends.

    The first is one shard, so that training starts early; each further one is as large as all
    before it, up to 16 shards, because documents are shuffled within their wave.
    """
    end = 1
    for _ in range(wave):
        end += min(end, MOST_SHARDS)
    return end * shard_tokens


class BadRows:
    """Stops a build whose source is not what its owner thinks it is.

    Counted in the order of the parts and only where the budget certainly reaches, so that a build
    stops or does not stop whatever the number of workers.
    """

    def __init__(self, most: float, max_tokens: int | None, allow_broken_files: bool) -> None:
        self.most = most
        self._allow_broken_files = allow_broken_files
        self._max_tokens = max_tokens
        self._seen = 0
        self._rows = 0
        self._bad = 0
        self._tokens = 0

    def check(self, reached: Sequence[PlacedPart]) -> None:
        """Look at the parts that are new."""
        for part in reached[self._seen :]:
            if self._max_tokens is not None and self._tokens >= self._max_tokens:
                return
            self._seen += 1
            _refuse_unknown(part.info)
            self._rows += part.info.rows + part.info.lost
            self._bad += part.info.bad + part.info.lost
            self._tokens += part.info.train_tokens
            if self._max_tokens is None or self._tokens < self._max_tokens:
                self._refuse_broken(part.info, part.info.rows)
            if self._rows >= FIRST_ROWS:
                self._judge(self._rows, self._bad, [p.info for p in reached[: self._seen]])

    def check_all(self, result: Mapping[str, int], parts: Sequence[Decided]) -> None:
        """Judge a build that has come to its end."""
        for part in parts:
            self._refuse_broken(part.info, part.rows)
        lost = result.get("lost", 0)
        bad = result["quarantined"] + lost
        self._judge(result["rows"] + lost, bad, [part.info for part in parts])

    def _refuse_broken(self, part: PartInfo, rows: int) -> None:
        """Refuse a file that breaks off in the first `rows` of a part: most of it may be lost."""
        if self._allow_broken_files or not part.broken:
            return
        for entry in read_part(part.path).quarantine:
            if "lost" in entry and entry["row"] < rows:
                raise DataError(broken_off(entry["where"], entry["reason"]))

    def _judge(self, rows: int, bad: int, parts: Sequence[PartInfo]) -> None:
        if bad <= self.most * rows:
            return
        raise DataError(
            f"{bad:,} of {rows:,} rows cannot be used ({bad / rows:.1%}; more than"
            f" {self.most:.1%}), {reason_of(parts)}; look at the source, or allow more with"
            " --max-bad."
        )


def _refuse_unknown(part: PartInfo) -> None:
    """Refuse a tokenizer that has no tokens for this text: a model would learn nothing from it."""
    inside = part.tokens - 2 * part.documents  # without BOS and EOS
    if part.unknown > inside / 2:
        raise DataError(
            f"the tokenizer has no token for most of the text: {part.unknown:,} of {inside:,}"
            " tokens are its unknown token; give a tokenizer that was made for such text."
        )


def write_quarantine(path: Path, parts: Sequence[Decided]) -> None:
    """A line for every unusable row, with its number among all; flushed to disk."""
    with open(path, "w", encoding="utf-8") as file:
        for part in parts:
            for entry in read_part(part.info.path).quarantine if part.info.bad else ():
                if entry["row"] < part.rows:
                    number = part.first_row + entry["row"]
                    file.write(json.dumps({**entry, "row": number}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def reason_of(parts: Sequence[PartInfo]) -> str:
    """Why rows were bad, at the end of a sentence: what the last part with any says most often."""
    last = next(part for part in reversed(parts) if part.bad)
    entries = read_part(last.path).quarantine
    reason, _ = Counter(entry["reason"] for entry in entries).most_common(1)[0]
    where = next(entry["where"] for entry in entries if entry["reason"] == reason)
    return f"most lately because of {reason!r} at {where or 'no known place'}"
