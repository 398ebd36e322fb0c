"""Where rows come from: the built-in village, files, or a hub.

    hamlet            documents of the village, with the floor of each
    hamlet:chat       conversations of its villagers
    PATH              a file, a folder or a pattern such as 'logs/*.jsonl.gz': plain text (documents
                      separated by blank lines), JSONL, JSON, CSV, TSV, Parquet or Arrow
    hf://..., s3://   a data set of a hub, or files elsewhere
    NAME              a recipe, such as fineweb-edu

A source can be read again from the start and gives the same rows; its recipe says what it was, so
that a restarted build knows whether it is the same one. It is read piece by piece, in any order and
by any number of processes. A name is a recipe before it is a folder: write ./NAME for the folder.
"""

from dataclasses import replace

from foundling.config.errors import ConfigError
from foundling.data.sources.base import FILTERED, REJECTED, File, Kind, Piece, Source
from foundling.data.sources.files import FilePiece, FileSource
from foundling.data.sources.hamlet import HamletPiece, HamletSource
from foundling.data.sources.listing import local_files
from foundling.data.sources.opening import LocalFile
from foundling.data.sources.options import DEFAULTS, SCHEMAS, ReadOptions

__all__ = [
    "FILTERED",
    "REJECTED",
    "SCHEMAS",
    "File",
    "FilePiece",
    "FileSource",
    "HamletPiece",
    "HamletSource",
    "Kind",
    "LocalFile",
    "Piece",
    "ReadOptions",
    "Source",
    "open_source",
]


def open_source(
    spec: str,
    *,
    seed: int = 1,
    documents: int | None = None,
    val_share: float = 0.02,
    options: ReadOptions = DEFAULTS,
) -> Source:
    """Rows of what `spec` names.

    `seed` is the village's, `documents` limits the rows for training (None: no limit; the village
    never ends by itself), and `val_share` is how much of the village is written for val besides;
    files leave that to the build. `options` say how files are read. What cannot be opened, or holds
    neither text nor conversations, is refused here, before anything is built.
    """
    if spec in ("hamlet", "hamlet:chat"):
        if options.changed():
            raise ConfigError(
                f"{spec} has no columns, so {', '.join(options.changed())} would have no effect;"
                " leave it out."
            )
        return HamletSource(spec == "hamlet:chat", seed, documents, val_share)
    from foundling.data.hub import RECIPES, is_remote, open_remote

    if is_remote(spec):
        return open_remote(spec, options, documents=documents)
    name, files = local_files(spec, names=tuple(RECIPES))
    # Files that are here are read where they are: nothing is kept of them anyway.
    source = FileSource(name, files, documents, replace(options, stream=False))
    _ = source.layouts  # refuses now what could only fail later
    return source
