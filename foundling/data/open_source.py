"""From a spec on the command line to a Source, and plain texts out of any source."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

from foundling.config.errors import ConfigError, DataError
from foundling.data.readers.file_formats import local_files
from foundling.data.readers.files import FileSource
from foundling.data.readers.hamlet import HamletSource
from foundling.data.readers.source import (
    DEFAULTS,
    VAL_SHARE,
    ReadOptions,
    Row,
    Source,
    is_held_out,
    unusable,
)
from foundling.tokenizer.chat import role_and_content

# Where rows come from:
#
#   hamlet, hamlet:chat   documents of the village, with the floor of each; talks of its villagers
#   PATH                  a file, folder or pattern such as 'logs/*.jsonl.gz': text, JSON, tables
#   hf://..., s3://...    a data set of a hub, or files elsewhere
#   NAME                  a recipe such as fineweb-edu; write ./NAME for the folder
#
# A source can be read again from the start, piece by piece and by any number of processes, and
# gives the same rows; its recipe says what it was, so that a restarted build knows it again.

VILLAGE = ("hamlet", "hamlet:chat")
"""Sources that are everywhere and never end."""


def open_source(
    spec: str,
    *,
    seed: int = 1,
    documents: int | None = None,
    val_share: float = VAL_SHARE,
    options: ReadOptions = DEFAULTS,
) -> Source:
    """Rows of what `spec` names.

    `seed` is the village's, `documents` limits the rows for training (None: no limit; the village
    never ends by itself), and `val_share` is how much of the village is written for val besides;
    files leave that to the build. `options` say how files are read. What cannot be opened, or holds
    neither text nor conversations, is refused here, before anything is built.
    """
    if spec in VILLAGE:
        if options.changed():
            raise ConfigError(
                f"{spec} has no columns, so {', '.join(options.changed())} would have no effect;"
                " leave it out."
            )
        return HamletSource(spec == "hamlet:chat", seed, documents, val_share)
    from foundling.data.hub.opening import open_remote
    from foundling.data.hub.recipes import RECIPES, is_remote

    if is_remote(spec):
        return open_remote(spec, options, documents=documents)
    name, files = local_files(spec, names=tuple(RECIPES))
    # Files that are here are read where they are: nothing is kept of them anyway.
    source = FileSource(name, files, documents, replace(options, stream=False))
    _ = source.layouts  # refuses now what could only fail later
    return source


@dataclass(frozen=True, kw_only=True)
class Specs:
    """The sources of a build as the user names them."""

    specs: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    """Of ReadOptions."""
    seed: int = 1
    documents: int | None = None
    val_share: float = VAL_SHARE

    def open(self) -> list[Source]:
        """All of them, in order."""
        where = tuple(self.options.get("where", ()))
        options = ReadOptions(**{**self.options, "where": where})
        return [
            open_source(
                spec,
                seed=self.seed,
                documents=self.documents,
                val_share=self.val_share,
                options=options,
            )
            for spec in self.specs
        ]


# Plain texts of sources, as much as asked for: what a tokenizer learns from or is measured on.
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
