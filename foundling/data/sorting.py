"""The rows of a part, sorted into what can be encoded and what cannot, as columns.

Nearly all rows are plain documents of a table, which come together (`Texts`) and are looked at
together: a Python object for each would cost a tenth of a build. Whatever is special goes the long
way, by the functions that say what a row must be.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundling.data.rows import (
    Row,
    Texts,
    excerpt,
    fall_into_val,
    flat,
    is_held_out,
    text_bytes,
    unusable,
)

Lot = Row | Texts


@dataclass
class Sorted:
    """Rows that can be used, column by column, and those that cannot."""

    contents: list[Any] = field(default_factory=list)
    """A text, or the messages of a conversation."""
    kinds: list[str] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Number of each row within the part."""
    sizes: list[int] = field(default_factory=list)
    held_out: list[NDArray[np.bool_]] = field(default_factory=list)
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    rows: int = 0
    """Of both sorts."""


def parts_of(lots: Iterable[Lot], most_rows: int, most_chars: int) -> Iterator[list[Lot]]:
    """Lots in runs: one ends with the row that reaches either limit, however the rows came
    together; the last may be empty."""
    run: list[Lot] = []
    count = chars = 0
    for lot in lots:
        while isinstance(lot, Texts) and lot.texts:
            reached = list(accumulate(map(len, lot.texts)))
            # Rows until one of the limits is reached; more than there are where none is.
            cut = min(bisect_left(reached, most_chars - chars) + 1, most_rows - count)
            run.append(lot.upto(cut))
            if cut > len(reached):
                count, chars = count + len(reached), chars + reached[-1]
                break
            yield run
            run, count, chars = [], 0, 0
            lot = lot.after(cut)
        if isinstance(lot, Row):
            run.append(lot)
            count, chars = count + 1, chars + _size(lot)
            if count >= most_rows or chars >= most_chars:
                yield run
                run, count, chars = [], 0, 0
    yield run


def _size(row: Row) -> int:
    """Characters, roughly: what a file holds may be anything."""
    if isinstance(row.text, str):
        return len(row.text)
    if isinstance(row.messages, Sequence):
        # Every value counts, so that the part stays bounded whatever the messages turn out to be.
        return sum(len(str(message)) for message in row.messages)
    return 200


def sort(lots: Iterable[Lot], *, chat: bool, val_share: float) -> Sorted:
    """What can be encoded, and the rest with its reasons."""
    found = Sorted()
    for lot in lots:
        if not chat and isinstance(lot, Texts) and _take_together(lot, val_share, found):
            continue
        for row in flat([lot]):
            _take(row, chat, val_share, found)
    return found


def _take_together(lot: Texts, val_share: float, found: Sorted) -> bool:
    """Take documents of which none is special; False where one is."""
    texts = lot.texts
    try:
        contents = [text.encode() for text in texts]
    except UnicodeEncodeError:
        return False
    if any(not content or b"\x00" in content for content in contents):
        return False
    if any(text.isspace() for text in texts):
        return False
    found.contents += texts
    found.kinds += ["text"] * len(texts)
    found.floors += [np.nan] * len(texts)
    found.places += range(found.rows, found.rows + len(texts))
    found.sizes += map(len, contents)
    found.held_out.append(fall_into_val(contents, val_share))
    found.rows += len(texts)
    return True


def _take(row: Row, chat: bool, val_share: float, found: Sorted) -> None:
    reason = unusable(row, chat)
    place, found.rows = found.rows, found.rows + 1
    if reason is not None:
        note = {"row": place, "source": row.source, "where": row.where, "reason": reason}
        note |= {} if row.lost is None else {"lost": row.lost}
        found.quarantine.append({**note, "excerpt": excerpt(row)})
        return
    found.contents.append(row.messages or () if chat else row.text)
    found.kinds.append(row.kind)
    found.floors.append(np.nan if row.floor_bits is None else row.floor_bits)
    found.places.append(place)
    found.sizes.append(text_bytes(row))
    found.held_out.append(np.array([is_held_out(row, val_share)]))
