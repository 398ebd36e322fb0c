"""Sources to shards, shards to rows, and the order in which every step reads them.

What only some callers need is imported when it is asked for: a worker of a build starts this
package too, and everything that it does not import is time to work.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foundling.data.build import build
from foundling.data.rows import Row
from foundling.data.sources import ReadOptions, Source, open_source

if TYPE_CHECKING:
    from foundling.data.batch import IGNORE, Batch, Bounds, Counts
    from foundling.data.dataset import TOKENIZER_FOLDER, DataSet, HeldOutDoc, held_out
    from foundling.data.inspect import (
        Token,
        chat_tokens,
        coloured,
        inspect_rows,
        inspect_source,
        plain_lines,
        text_tokens,
        token_table,
    )
    from foundling.data.loader import Loader
    from foundling.data.order import Order, UnitRef
    from foundling.data.packing import pack
    from foundling.data.phases import open_order, reopen_order
    from foundling.data.segment import Segment
    from foundling.data.texts import labelled_texts, training_texts

_HOMES = {
    "batch": ("IGNORE", "Batch", "Bounds", "Counts"),
    "dataset": ("TOKENIZER_FOLDER", "DataSet", "HeldOutDoc", "held_out"),
    "inspect": (
        "Token",
        "chat_tokens",
        "coloured",
        "inspect_rows",
        "inspect_source",
        "plain_lines",
        "text_tokens",
        "token_table",
    ),
    "loader": ("Loader",),
    "order": ("Order", "UnitRef"),
    "packing": ("pack",),
    "phases": ("open_order", "reopen_order"),
    "segment": ("Segment",),
    "texts": ("labelled_texts", "training_texts"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


__all__ = [
    "IGNORE",
    "TOKENIZER_FOLDER",
    "Batch",
    "Bounds",
    "Counts",
    "DataSet",
    "HeldOutDoc",
    "Loader",
    "Order",
    "ReadOptions",
    "Row",
    "Segment",
    "Source",
    "Token",
    "UnitRef",
    "build",
    "chat_tokens",
    "coloured",
    "held_out",
    "inspect_rows",
    "inspect_source",
    "labelled_texts",
    "open_order",
    "open_source",
    "pack",
    "plain_lines",
    "reopen_order",
    "text_tokens",
    "token_table",
    "training_texts",
]
