"""`data inspect --stats`: what a data set holds, counted from its shards one at a time.

Counts that the manifest has come from there; lengths and kinds are added up shard by shard, so that
memory does not grow with the data. Lengths are kept in bins an eighth of a doubling wide: enough
for a histogram and for quantiles to within a tenth, which are therefore said with "about".
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from foundling.config.data import packing_spec_of
from foundling.config.data_manifest import Manifest, ShardInfo
from foundling.config.errors import DataError
from foundling.config.packing_spec import Packing
from foundling.data.dataset import open_shard
from foundling.data.packing import StreamPlan, pack
from foundling.data.shard import Progress, each_of
from foundling.runtime.console import counted

BINS = 8 * 40
"""Eight bins a doubling, up to documents of 2^40 tokens."""
REASONS = 50
"""Reasons of quarantine that are counted apart; further ones together."""


@dataclass
class Tally:
    """What is added up over the shards of a split."""

    documents: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    shortest: int = 0
    longest: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    kind_tokens: Counter[str] = field(default_factory=Counter)
    packed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By packing and by what: units, positions, documents that are cut."""

    def add(self, other: "Tally") -> None:
        """Add another shard's."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.shortest = min(filter(None, (self.shortest, other.shortest)), default=0)
        self.longest = max(self.longest, other.longest)
        self.kinds.update(other.kinds)
        self.kind_tokens.update(other.kind_tokens)
        self.packed.update(other.packed)


def stats(
    folder: str | Path,
    *,
    seq_len: int = 0,
    workers: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Everything there is to count; `seq_len` above 0 adds what each packing would cut and pad."""
    folder = Path(folder)
    manifest = Manifest.load(folder)
    result = dict(manifest.recipe.get("result", {}))
    splits = {
        name: _split(folder, manifest, infos, seq_len, workers, progress)
        for name, infos in (("train", manifest.train), ("val", manifest.val))
    }
    packings = {name: split.pop("packings") for name, split in splits.items()}
    rows = sum(split["documents"] for split in splits.values())
    return {
        "folder": str(folder),
        "name": manifest.name,
        "kind": manifest.kind,
        "digest": manifest.digest,
        "complete": manifest.complete,
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        **splits,
        "val_share": splits["val"]["documents"] / rows if rows else 0.0,
        "sources": _sources(result.pop("sources", []), splits["train"]["tokens"]),
        "build": result,
        "quarantine": quarantine_reasons(folder),
        "seq_len": seq_len,
        "packings": packings["train"],
    }


def _sources(counts: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """What each of several sources gave for training, as the build counted it."""
    return [
        {
            "source": one["source"],
            "documents": one.get("train_documents", 0),
            "tokens": one.get("train_tokens", 0),
            "share": one.get("train_tokens", 0) / tokens,
        }
        for one in counts
    ]


def _split(
    folder: Path,
    manifest: Manifest,
    infos: Sequence[ShardInfo],
    seq_len: int,
    workers: int,
    progress: Progress | None,
) -> dict[str, Any]:
    total = Tally()
    work = partial(_tally, folder, seq_len if infos is manifest.train else 0)
    for tally in each_of(infos, work, workers=workers, progress=progress):
        total.add(tally)
    documents = sum(info.documents for info in infos)
    tokens = sum(info.tokens for info in infos)
    targets = sum(info.targets for info in infos)
    text_bytes = sum(info.text_bytes for info in infos)
    # A chat's bytes are what the assistant says, so they are divided by what the loss counts;
    # a text's tokens are counted without BOS and EOS, which stand for no byte.
    over = targets if manifest.kind == "chat" else tokens - 2 * documents
    return {
        "shards": len(infos),
        "file_bytes": sum(info.file_bytes for info in infos),
        "largest_shard_bytes": max((info.file_bytes for info in infos), default=0),
        "documents": documents,
        "tokens": tokens,
        "targets": targets,
        "text_bytes": text_bytes,
        "bytes_per_token": text_bytes / over if over > 0 else 0.0,
        "lengths": _lengths(total, documents, tokens),
        "kinds": {
            kind: {
                "documents": count,
                "tokens": total.kind_tokens[kind],
                "share": total.kind_tokens[kind] / tokens,
            }
            for kind, count in total.kinds.most_common()
        },
        "packings": _packings(total, documents, tokens),
    }


def _tally(folder: Path, seq_len: int, info: ShardInfo) -> Tally:
    """One shard's lengths and kinds: a pass over its documents, none over its tokens."""
    shard = open_shard(folder, info)
    lengths = np.diff(shard.offsets)
    if not len(lengths):
        return Tally()
    bins = bin_of(lengths)
    kinds = np.bincount(shard.kind_codes, minlength=len(shard.kind_names)).tolist()
    weights = np.bincount(shard.kind_codes, lengths, len(shard.kind_names)).astype(np.int64)
    named = zip(shard.kind_names, kinds, weights.tolist(), strict=True)
    there = [(name, count, tokens) for name, count, tokens in named if count]
    return Tally(
        documents=np.bincount(bins, minlength=BINS),
        tokens=np.bincount(bins, lengths, BINS).astype(np.int64),
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        kinds=Counter({name: count for name, count, _ in there}),
        kind_tokens=Counter({name: tokens for name, _, tokens in there}),
        packed=_packed(shard.offsets, seq_len) if seq_len else Counter(),
    )


def _packed(offsets: NDArray[np.int64], seq_len: int) -> Counter[tuple[str, str]]:
    """What every packing makes of a shard; the plans are not kept."""
    counts: Counter[tuple[str, str]] = Counter()
    for name in get_args(Packing):
        spec = packing_spec_of(seq_len, name)
        if spec.packing == "bucket" and seq_len > spec.unit_tokens:
            continue  # no unit would hold a row
        plan = pack(offsets, spec)
        if isinstance(plan, StreamPlan):
            units, positions = plan.units, plan.units * seq_len
            # The only one that cuts documents which would fit into a row.
            broken = offsets[:-1] // seq_len != (offsets[1:] - 1) // seq_len
        else:
            units, positions = plan.units, plan.positions
            broken = np.diff(offsets) > seq_len
        counts[name, "units"] = units
        counts[name, "positions"] = positions
        counts[name, "documents_cut"] = int(np.count_nonzero(broken))
    return counts


def _packings(total: Tally, documents: int, tokens: int) -> dict[str, dict[str, float]]:
    names = dict.fromkeys(name for name, _ in total.packed)
    return {
        name: {
            "units": total.packed[name, "units"],
            "padded_share": 1 - tokens / total.packed[name, "positions"],
            "cut_share": total.packed[name, "documents_cut"] / documents,
        }
        for name in names
    }


def bin_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bin of each length; bin b ends at 2^(b/8), so that powers of two are ends of bins."""
    exact = np.ceil(8 * np.log2(np.maximum(lengths, 1)) - 1e-9)
    return np.minimum(exact.astype(np.int64), BINS - 1)


def _lengths(total: Tally, documents: int, tokens: int) -> dict[str, Any]:
    """Histogram by doublings, and quantiles from the finer bins."""
    if not documents:
        return {"mean": 0.0, "shortest": 0, "longest": 0, "quantiles": {}, "histogram": []}
    reached = np.cumsum(total.documents)
    quantiles = {
        name: min(total.longest, round(2 ** (int(reached.searchsorted(share * documents)) / 8)))
        for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }
    histogram = []
    for power in range(BINS // 8):
        part = slice(max(0, 8 * (power - 1) + 1), 8 * power + 1)
        count = int(total.documents[part].sum())
        if count:
            end = {"up_to": 2**power, "documents": count, "tokens": int(total.tokens[part].sum())}
            histogram.append(end)
    return {
        "mean": tokens / documents,
        "shortest": total.shortest,
        "longest": total.longest,
        "quantiles": quantiles,
        "histogram": histogram,
    }


def quarantine_reasons(folder: Path) -> dict[str, int]:
    """How many rows were refused for each reason, read a line at a time."""
    reasons: Counter[str] = Counter()
    try:
        with open(folder / "quarantine.jsonl", encoding="utf-8") as file:
            for line in file:
                reason = str(json.loads(line)["reason"])
                known = reason in reasons or len(reasons) < REASONS
                reasons[reason if known else "other reasons"] += 1
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(
            f"{folder / 'quarantine.jsonl'} cannot be read; the shards do not need it, so move it"
            " away to go on without."
        ) from None
    return dict(reasons.most_common())


def describe_stats(found: dict[str, Any]) -> list[str]:
    """The same as lines for a person."""
    state = "" if found["complete"] else ", still being built"
    lines = [
        f"{found['folder']}: {found['name']} ({found['kind']}), digest {found['digest'][:12]}"
        + state,
        f"tokenizer {found['tokenizer'][:12]}, vocabulary {found['vocab_size']:,}",
    ]
    for name in ("train", "val"):
        lines += _describe_split(name, found[name], found["kind"])
    lines.append(f"held out: {found['val_share']:.2%} of the documents")
    build = {key: value for key, value in found["build"].items() if isinstance(value, int)}
    if build:
        lines.append("build: " + ", ".join(f"{key} {value:,}" for key, value in build.items()))
    for reason, count in found["quarantine"].items():
        lines.append(f"  in quarantine {count:>10,}  {reason}")
    for one in found["sources"]:
        lines.append(
            f"  from {one['source']}: {one['documents']:,} documents, {one['tokens']:,} tokens"
            f" ({one['share']:.1%})"
        )
    for name, cost in found["packings"].items():
        lines.append(
            f"  {name:<8} at {found['seq_len']}: {cost['units']:,} units,"
            f" {cost['padded_share']:.2%} padding, {cost['cut_share']:.2%} of the documents cut"
        )
    return lines


def _describe_split(name: str, split: dict[str, Any], kind: str) -> list[str]:
    if not split["documents"]:
        return [f"{name}: nothing"]
    lengths = split["lengths"]
    of_what = "bytes a counted token" if kind == "chat" else "bytes a token"
    about = ", ".join(f"{key} {value:,}" for key, value in lengths["quantiles"].items())
    lines = [
        f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens,"
        f" {split['targets']:,} targets, {split['text_bytes']:,} bytes of text"
        f" ({split['bytes_per_token']:.3f} {of_what}), {counted(split['shards'], 'shard')} of at"
        f" most {split['largest_shard_bytes']:,} bytes",
        f"  tokens a document: mean {lengths['mean']:,.1f}, {lengths['shortest']:,} to"
        f" {lengths['longest']:,}, about {about}",
    ]
    most = max(part["documents"] for part in lengths["histogram"])
    for part in lengths["histogram"]:
        bar = "#" * -(-40 * part["documents"] // most)
        lines.append(f"  up to {part['up_to']:>10,} {part['documents']:>12,}  {bar}")
    for kind_name, part in split["kinds"].items():
        lines.append(
            f"  kind {kind_name}: {part['documents']:,} documents,"
            f" {part['share']:.1%} of the tokens"
        )
    return lines
