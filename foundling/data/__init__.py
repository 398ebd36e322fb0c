"""Sources to shards, shards to rows, and the order in which every step reads them."""

from foundling.data.batch import IGNORE, Batch, Bounds, Counts
from foundling.data.build import build
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
from foundling.data.rows import Row
from foundling.data.segment import Segment
from foundling.data.sources import ReadOptions, Source, open_source
from foundling.data.texts import labelled_texts, training_texts

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
