"""Sources to shards, shards to rows, and the order in which every step reads them."""

from foundling.data.batch import IGNORE, Batch, Counts
from foundling.data.build import build
from foundling.data.dataset import TOKENIZER_FOLDER, DataSet, HeldOutDoc, held_out
from foundling.data.inspect import (
    Token,
    chat_tokens,
    coloured,
    inspect_rows,
    plain_lines,
    text_tokens,
    token_table,
)
from foundling.data.loader import Loader, open_order, segment_of
from foundling.data.order import Order, Segment, UnitRef
from foundling.data.packing import pack
from foundling.data.rows import Row
from foundling.data.sources import Source, open_source
from foundling.data.texts import training_texts

__all__ = [
    "IGNORE",
    "TOKENIZER_FOLDER",
    "Batch",
    "Counts",
    "DataSet",
    "HeldOutDoc",
    "Loader",
    "Order",
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
    "open_order",
    "open_source",
    "pack",
    "plain_lines",
    "segment_of",
    "text_tokens",
    "token_table",
    "training_texts",
]
