"""Plain texts of sources, as much as asked for: what a tokenizer learns from or is measured on."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle

from foundling.config.errors import ConfigError, DataError
from foundling.data.rows import VAL_SHARE, Row, is_held_out, unusable
from foundling.data.sources import ReadOptions, Source, open_source
from foundling.tokenizer.chat import role_and_content

DEFAULTS = ReadOptions()
LABEL = "source"
"""The column that says where a row of a mixed corpus came from."""


def training_texts(
    specs: Sequence[str], *, max_bytes: int, seed: int = 1, options: ReadOptions = DEFAULTS
) -> Iterator[str]:
    """Texts of several sources in turn until `max_bytes`; held-out rows and bad ones left out.

    The last text is read whole if that keeps the budget to within a hundredth, and cut at the
    budget if not: one long document must not be many times the text that was asked for.
    """
    names = ", ".join(specs)
    left = {
        number: iter(open_source(spec, seed=seed, options=options))
        for number, spec in enumerate(specs)
    }
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
            whole = text.encode()
            size = len(whole)
            if read + size > max_bytes + max_bytes // 100:
                size = max(max_bytes - read, 0)
            if size:
                yield whole[:size].decode(errors="ignore")
            read += size
        if read >= max_bytes:
            return


def labelled_texts(
    spec: str, *, max_bytes: int, seed: int = 1, options: ReadOptions = DEFAULTS
) -> dict[str, list[str]]:
    """About `max_bytes` of a source's texts by its column `source`; by "" if it has none."""
    labelled, source = _open(spec, seed, options)
    found: dict[str, list[str]] = {}
    read = 0
    for row in source:
        if unusable(row, chat=row.messages is not None):
            continue
        for text in _texts(row):
            label, text = text.split("\n", 1) if labelled else ("", text)
            found.setdefault(label, []).append(text)
            read += len(text.encode())
        if read >= max_bytes:
            break
    if not found:
        raise DataError(f"{spec} holds no text to measure on; give another source.")
    return dict(sorted(found.items()))


def _open(spec: str, seed: int, options: ReadOptions) -> tuple[bool, Source]:
    """A source whose texts begin with a line that holds their label, if it has labels."""
    text = options.template or f"{{{options.text or 'text'}}}"
    template = f"{{{LABEL}}}\n{text}"
    try:
        with_label = replace(options, text="", template=template)
        return True, open_source(spec, seed=seed, options=with_label)
    except (ConfigError, DataError):  # no such columns, or none at all
        return False, open_source(spec, seed=seed, options=options)


def _texts(row: Row) -> list[str]:
    if row.text is not None:
        return [row.text]
    return [content for _, content in map(role_and_content, row.messages or ())]
