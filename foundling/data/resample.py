"""A sample of the source, read and tokenised again, looked for among the stored documents.

The build shuffled them, so a document is found by what it holds: its length, a few of its tokens,
then all of them. A row that should be there and is not, or is there with another loss mask, is a
finding. Rows that the build left out are not missed: bad ones, and those past its budget. How much
is read again is bounded, and said.
"""

import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import UserError
from foundling.config.manifest import Manifest, ShardInfo
from foundling.data import tasks
from foundling.data.build import CHARS_A_TOKEN
from foundling.data.findings import Findings
from foundling.data.hashes import each_of
from foundling.data.rows import Row, flat, is_held_out, text_bytes, unusable
from foundling.data.shard import Shard, read_shard
from foundling.data.sources import Piece, ReadOptions, Source, open_source
from foundling.tokenizer import Tokenizer

READ_CHARS = 100_000_000
"""At most about this much text is read again: under a minute, whatever the size of the source."""
VILLAGE = ("hamlet", "hamlet:chat")
"""Sources that are everywhere."""
PROBES = 4
"""Tokens compared before whole documents are."""


@dataclass(frozen=True)
class Sampled:
    """A row as it should be stored."""

    where: str
    tokens: NDArray[np.int64]
    mask: NDArray[np.uint8] | None
    text_bytes: int
    held_out: bool


def compare_with_source(
    folder: Path,
    manifest: Manifest,
    tokenizer: Tokenizer,
    found: Findings,
    specs: Sequence[str],
    *,
    sample: int,
    seed: int,
) -> None:
    """Add to `found` what a sample of the source says."""
    sources = _opened(folder, manifest, specs, found)
    if not sources:
        return
    rows, read = _sample(sources, manifest, sample, seed)
    good = [row for row in rows if unusable(row, manifest.kind == "chat") is None]
    wanted = _encoded(good, manifest, tokenizer)
    missing, differing = _look(folder, manifest, wanted)
    taken = int(manifest.recipe["result"]["rows"])
    found.checked.append(
        f"{len(rows)} rows drawn from {read:,} of the {taken:,} that the build took were tokenised"
        f" again: {len(wanted) - len(missing)} are stored, {len(rows) - len(good)} belong in"
        " quarantine"
    )
    found.wrong += [
        f"{folder} holds {one.where} with another loss mask or size; build it again."
        for one in differing
    ]
    overlapping = int(manifest.recipe["result"].get("overlapping", 0))
    if missing and overlapping:
        found.unchecked.append(
            f"{len(missing)} rows of the sample ({missing[0].where} the first), which are not"
            f" stored; the build left out {overlapping:,} that overlap evaluation sets, maybe these"
        )
    elif missing:
        found.wrong.append(
            f"{folder} lacks {missing[0].where} of its source"
            + (f" and {len(missing) - 1} more rows of the sample" if len(missing) > 1 else "")
            + "; build it again."
        )


def recipes_of(manifest: Manifest) -> list[dict[str, Any]]:
    """What each source of a data set was."""
    recipe = manifest.recipe.get("source", {})
    parts = recipe if isinstance(recipe, list) else recipe.get("sources", [recipe])
    return [part for part in parts if isinstance(part, dict) and part]


def _opened(
    folder: Path, manifest: Manifest, specs: Sequence[str], found: Findings
) -> list[Source] | None:
    """The sources, if all are there and are what the recipe says."""
    recipes = recipes_of(manifest)
    if not recipes or not {"build", "result"} <= set(manifest.recipe):
        found.unchecked.append("the source, because the manifest does not say what it was")
        return None
    if specs and len(specs) != len(recipes):
        names = ", ".join(str(recipe.get("source")) for recipe in recipes)
        found.wrong.append(
            f"{folder} was built from {len(recipes)} sources ({names}) and --source names"
            f" {len(specs)}; name each once, in this order."
        )
        return None
    sources = []
    for number, recipe in enumerate(recipes):
        spec = specs[number] if specs else str(recipe.get("source"))
        asked = bool(specs) or spec in VILLAGE
        source, why = _as_before(spec, recipe) if asked or Path(spec).exists() else (None, "")
        if source is not None:
            sources.append(source)
        elif asked:
            found.wrong.append(f"{folder} {why}")
            return None
        else:
            # A file of that name may be here by chance; only a named source can be wrong.
            found.unchecked.append(
                f"the source, because {spec} is not here; say with --source where it is"
            )
            return None
    return sources


def _as_before(spec: str, recipe: dict[str, Any]) -> tuple[Source | None, str]:
    """A source that is what the recipe says, or how the sentence about it ends."""
    try:
        source = _open(spec, recipe)
        now = json.loads(json.dumps(source.recipe))
    except UserError as error:
        return None, f"has a source that cannot be read again: {error}"
    if now == recipe:
        return source, ""
    return None, (
        f"was built from something else than {spec} holds now ({_difference(now, recipe)});"
        " bring the old source back or build the data set again."
    )


def _open(spec: str, recipe: dict[str, Any]) -> Source:
    """As the build opened it."""
    known = {field.name for field in fields(ReadOptions)}
    read = {key: value for key, value in recipe.get("read", {}).items() if key in known}
    if "where" in read:
        read["where"] = tuple(read["where"])
    given = {key: recipe[key] for key in ("seed", "val_share") if key in recipe}
    return open_source(
        spec, documents=recipe.get("documents"), options=ReadOptions(**read), **given
    )


def _difference(now: dict[str, Any], then: dict[str, Any]) -> str:
    """The first thing that differs between two recipes, in a few words."""
    files, before = now.get("files"), then.get("files")
    if isinstance(files, dict) and isinstance(before, dict) and files != before:
        if len(files) != len(before):
            return f"{len(files)} files, not {len(before)}"
        for number, stated in before.items():
            if list(files.get(number, ())) != list(stated):
                return f"{stated[0]} has changed"
    keys = (key for key in {**then, **now} if now.get(key) != then.get(key))
    return f"{next(keys, 'something')} differs"


def _sample(
    sources: Sequence[Source], manifest: Manifest, size: int, seed: int
) -> tuple[list[Row], int]:
    """A sample of the rows that the build took, and how many were read for it.

    Where a budget ended the build only the first rows were taken, so the source is read from its
    beginning; otherwise its pieces are read in a seeded order until enough was read.
    """
    chance = random.Random(seed)
    taken = int(manifest.recipe["result"]["rows"])
    budget = manifest.recipe["build"].get("max_tokens") is not None
    kept: list[Row] = []
    read = chars = 0
    for row in islice(_rows(sources, manifest, None if budget else chance), taken):
        chars += len(row.text) if isinstance(row.text, str) else 1000
        read += 1
        place = chance.randrange(read)
        if len(kept) < size:
            kept.append(row)
        elif place < size:
            kept[place] = row
        if chars > READ_CHARS:
            break
    return kept, read


def _rows(
    sources: Sequence[Source], manifest: Manifest, chance: random.Random | None
) -> Iterator[Row]:
    """Rows in the order in which the build took them, or, with `chance`, in any order of pieces."""
    if chance is None:
        yield from _as_built(sources, manifest)
        return
    pieces = [piece for source in sources for piece in source.pieces()]
    chance.shuffle(pieces)
    for piece in pieces:
        yield from piece.rows()


def _parts(piece: Piece, budget: int) -> Iterator[list[Row]]:
    """The rows of a piece as the build cuts them into parts."""
    job = tasks.Job(
        tokenizer="",
        chat=False,
        val_share=0.0,
        wide=False,
        part_rows=tasks.PART_ROWS,
        part_chars=min(tasks.PART_CHARS, CHARS_A_TOKEN * budget),
    )
    return (list(flat(lots)) for lots, _ in tasks.chunks(piece, job))


def _as_built(sources: Sequence[Source], manifest: Manifest) -> Iterator[Row]:
    """A part of each source in turn: only that says which rows come before the end of a budget."""
    budget = manifest.recipe["build"]["max_tokens"]
    lanes = deque(
        chain.from_iterable(_parts(piece, budget) for piece in source.pieces())
        for source in sources
    )
    while lanes:
        lane = lanes.popleft()
        rows = next(lane, None)
        if rows is not None:
            lanes.append(lane)
            yield from rows


def _encoded(rows: Sequence[Row], manifest: Manifest, tokenizer: Tokenizer) -> list[Sampled]:
    """The rows as the build should have stored them, by the slow and certain path."""
    share = float(manifest.recipe["build"]["val_share"])
    wanted = []
    for row in rows:
        mask: NDArray[np.uint8] | None = None
        if manifest.kind == "chat":
            rendered = tokenizer.render(row.messages or ())
            ids, mask = rendered.ids, np.array(rendered.mask, np.uint8)
        else:
            ids = tokenizer.document(row.text or "")
        tokens = np.array(ids, np.int64)
        wanted.append(Sampled(row.where, tokens, mask, text_bytes(row), is_held_out(row, share)))
    return wanted


def _look(
    folder: Path, manifest: Manifest, wanted: Sequence[Sampled]
) -> tuple[list[Sampled], list[Sampled]]:
    """Those of the sample that are nowhere, and those that are there but not the same."""
    equal: set[int] = set()
    alike: set[int] = set()
    for held_out, infos in ((False, manifest.train), (True, manifest.val)):
        here = {n: one for n, one in enumerate(wanted) if one.held_out == held_out}

        def work(info: ShardInfo, here: dict[int, Sampled] = here) -> tuple[set[int], set[int]]:
            return _in_shard(read_shard(folder / info.name), here)

        for same, like in each_of(infos, work):
            equal |= same
            alike |= like
    missing = [one for n, one in enumerate(wanted) if n not in equal | alike]
    return missing, [wanted[n] for n in sorted(alike - equal)]


def _in_shard(shard: Shard, wanted: dict[int, Sampled]) -> tuple[set[int], set[int]]:
    """Which are in the shard, and which only with other notes beside the same tokens."""
    lengths = np.diff(shard.offsets)
    sizes = np.unique([len(one.tokens) for one in wanted.values()])
    candidates = np.flatnonzero(np.isin(lengths, sizes))
    equal: set[int] = set()
    alike: set[int] = set()
    for number, one in wanted.items():
        size = len(one.tokens)
        places = candidates[lengths[candidates] == size]
        for probe in np.linspace(1, size - 2, PROBES).astype(np.int64).tolist():
            probed = shard.tokens[shard.offsets[places] + probe]
            places = places[probed == one.tokens[probe]]
        for place in places.tolist():
            part = slice(int(shard.offsets[place]), int(shard.offsets[place + 1]))
            if not np.array_equal(shard.tokens[part], one.tokens):
                continue
            same = int(shard.text_bytes[place]) == one.text_bytes
            if shard.mask is not None and one.mask is not None:
                same = same and np.array_equal(shard.mask[part], one.mask)
            (equal if same else alike).add(number)
            if same:
                break
    return equal, alike
