"""A Row: one document or conversation on its way into a data set, and what makes one unusable."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import DataError
from foundling.tokenizer.chat import Message, is_learned, role_and_content

_HELD_OUT = hashlib.blake2b(digest_size=8, person=b"held-out")
MOST_64 = 2**64 - 1
VAL_SHARE = 0.02
"""Share of rows that is held out unless a build says otherwise."""


class Row(NamedTuple):
    """What a source yields; exactly one of `text` and `messages` is expected.

    A tuple, because nothing else that cannot be changed is made as quickly, and there are as many
    as there are documents.
    """

    text: str | None = None
    messages: Sequence[Message] | None = None
    source: str = ""
    """What it came from, as the user named it."""
    where: str = ""
    """Its place there: a file and a line, an index."""
    kind: str = "text"
    """Kind of document, by which scores are told apart."""
    floor_bits: float | None = None
    """Bits that the best possible model needs for it, where known."""
    split: str | None = None
    """train or val where the source decides; None leaves it to a hash of the content."""
    problem: str | None = None
    """Why the reader could not make sense of it; such a row goes to quarantine, and what is in
    `text` is only a sample of it."""
    lost: int | None = None
    """Of the row at which its file breaks off: rows after it that are lost, as far as that can be
    told. None of every other row."""


class Texts(NamedTuple):
    """Documents of one file that were read together: as good as a Row each, and far quicker to
    hand on than so many."""

    texts: list[str]
    source: str
    file: str
    places: Sequence[int]

    def row(self, number: int) -> Row:
        """One of them by itself."""
        where = f"{self.file}:{self.places[number]}"
        return Row(text=self.texts[number], source=self.source, where=where)

    def upto(self, count: int) -> "Texts":
        """The first so many."""
        return self._replace(texts=self.texts[:count], places=self.places[:count])

    def after(self, count: int) -> "Texts":
        """All but the first so many."""
        return self._replace(texts=self.texts[count:], places=self.places[count:])


def flat(lots: "Iterable[Row | Texts]") -> Iterator[Row]:
    """Rows one by one."""
    for lot in lots:
        if isinstance(lot, Texts):
            yield from map(lot.row, range(len(lot.texts)))
        else:
            yield lot


def broken_off(where: str, reason: str) -> str:
    """What is said of a file that breaks off, to whoever has not allowed it."""
    return (
        f"{where}: {reason}; fetch the file again, or use what comes before with"
        " --allow-broken-files."
    )


def unusable(row: Row, chat: bool) -> str | None:
    """Why a row cannot become tokens, in a few words; None if it can."""
    if row.problem is not None:
        return row.problem
    if row.split not in (None, "train", "val"):
        return f"split is {row.split!r}"
    if not chat:
        return _bad_text(row.text)
    messages: Any = row.messages  # what a file holds may be anything
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return "no messages"
    try:
        turns = [role_and_content(message) for message in messages]
    except DataError as error:
        return str(error)[:200]
    except RecursionError:  # the error shows the content, which may be nested without end
        return "a message is nested too deeply"
    if all(role != "assistant" for role, _ in turns):
        return "no assistant turn"
    if not any(map(is_learned, messages)):
        return "no assistant turn to learn: each has the weight 0"
    return next((bad for _, content in turns if (bad := _bad_text(content))), None)


def _bad_text(text: object) -> str | None:
    if text is None:
        return "no text"
    if not isinstance(text, str):
        return f"text is {type(text).__name__}"
    if not text or text.isspace():
        return "empty"
    if "\x00" in text:
        return "NUL"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "lone surrogate"
    return None


def text_bytes(row: Row) -> int:
    """UTF-8 bytes that a score in bits per byte divides by: the text, or what a chat teaches."""
    if row.text is not None:
        return len(row.text.encode())
    turns = map(role_and_content, filter(is_learned, row.messages or ()))
    return sum(len(content.encode()) for _, content in turns)


def is_held_out(row: Row, val_share: float) -> bool:
    """Whether a row belongs to val: as its source says, else by a hash of its content.

    The hash depends on nothing but the content, so a row is on the same side in every build for
    ever, and so are its exact duplicates.
    """
    if row.split is not None:
        return row.split == "val"
    if row.text is not None:
        content = row.text
    else:
        content = json.dumps([role_and_content(message) for message in row.messages or ()])
    return falls_into_val(content.encode(), val_share)


def falls_into_val(content: bytes, val_share: float) -> bool:
    """The hash's verdict on a content."""
    return bool(fall_into_val([content], val_share)[0])


def fall_into_val(contents: Sequence[bytes], val_share: float) -> NDArray[np.bool_]:
    """The same for many."""
    digests = []
    for content in contents:
        state = _HELD_OUT.copy()
        state.update(content)
        digests.append(state.digest())
    limit = math.ceil(val_share * 2**64)
    found = np.frombuffer(b"".join(digests), ">u8")
    if limit > MOST_64:
        return np.ones(len(found), np.bool_)
    below: NDArray[np.bool_] = found < np.uint64(limit)
    return below


def excerpt(row: Row, length: int = 200) -> str:
    """The beginning of a row, as quarantine shows it."""
    if row.messages is not None:
        return shortened(row.messages, length)
    return row.text[:length] if isinstance(row.text, str) else shortened(row.text, length)


def shortened(value: object, length: int = 200) -> str:
    """The beginning of a value, which may be anything at all."""
    try:
        return json.dumps(value, default=repr)[:length]
    except (ValueError, TypeError, RecursionError):
        return f"({type(value).__name__} that cannot be shown)"
