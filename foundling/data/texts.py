"""Plain texts of sources, as much as asked for: what a tokenizer learns from."""

from collections.abc import Iterator, Sequence
from itertools import cycle

from foundling.config.errors import DataError
from foundling.data.rows import VAL_SHARE, Row, is_held_out, unusable
from foundling.data.sources import open_source
from foundling.tokenizer.chat import role_and_content


def training_texts(specs: Sequence[str], *, max_bytes: int, seed: int = 1) -> Iterator[str]:
    """Texts of several sources in turn until `max_bytes`; held-out rows and bad ones left out."""
    names = ", ".join(specs)
    left = {number: iter(open_source(spec, seed=seed)) for number, spec in enumerate(specs)}
    read = 0
    for number in cycle(range(len(specs))):
        row = next(left[number], None) if number in left else None
        if row is None:
            left.pop(number, None)
            if left:
                continue
            if not read:
                raise DataError(f"{names} holds no text to learn from; give another source.")
            return
        if unusable(row, chat=row.messages is not None) or is_held_out(row, VAL_SHARE):
            continue
        for text in _texts(row):
            yield text
            read += len(text.encode())
        if read >= max_bytes:
            return


def _texts(row: Row) -> list[str]:
    if row.text is not None:
        return [row.text]
    return [content for _, content in map(role_and_content, row.messages or ())]
