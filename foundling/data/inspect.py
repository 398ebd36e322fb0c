"""What a row looks like to the model: ids, pieces, where documents begin, what the loss counts.

In colour each piece is green where the loss counts it and dim where it does not; without colour the
same is said by brackets: [counted] and plain. A bar stands where a document, or the continuation of
one that was cut, begins.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foundling.config.sections import Packing
from foundling.data.batch import IGNORE, Batch
from foundling.data.dataset import DataSet
from foundling.tokenizer import Message, Tokenizer

COUNTED, SILENT, BOUNDARY = "bold green", "dim", "bold yellow"


@dataclass(frozen=True)
class Token:
    """One token of a row."""

    id: int
    piece: str
    document: int
    """Number of the document in the row; negative: padding."""
    counted: bool
    """Whether the loss counts the prediction of this token."""


def row_tokens(batch: Batch, row: int, tokenizer: Tokenizer) -> list[Token]:
    """The tokens of a row; a token is counted where the position before it has it as target."""
    inputs, documents = batch.inputs[row].tolist(), batch.documents[row].tolist()
    counted = [False, *(batch.targets[row] != IGNORE).tolist()]
    return [
        Token(id, tokenizer.piece(id) if document >= 0 else "", document, is_counted)
        for id, document, is_counted in zip(inputs, documents, counted, strict=False)
    ]


def chat_tokens(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Token]:
    """The tokens of a conversation as it would be trained on."""
    rendered = tokenizer.render(messages)
    return [
        Token(id, tokenizer.piece(id), 0, counted)
        for id, counted in zip(rendered.ids, rendered.mask, strict=True)
    ]


def text_tokens(text: str, tokenizer: Tokenizer) -> list[Token]:
    """The tokens of a document as it would be trained on."""
    ids = tokenizer.document(text)
    return [Token(id, tokenizer.piece(id), 0, place > 0) for place, id in enumerate(ids)]


def plain_lines(tokens: Sequence[Token], width: int = 100) -> list[str]:
    """Pieces without colour: counted ones in brackets, a bar where a document begins."""
    words = [
        ("| " if begins else "") + (f"[{token.piece}]" if token.counted else token.piece)
        for token, begins in _with_beginnings(tokens)
        if token.document >= 0
    ]
    padding = sum(token.document < 0 for token in tokens)
    if padding:
        words.append(f"({padding} padding)")
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def coloured(tokens: Sequence[Token]) -> Text:
    """Pieces as running text, coloured by whether the loss counts them."""
    text = Text()
    for token, begins in _with_beginnings(tokens):
        if token.document < 0:
            continue
        if begins:
            text.append("▌", style=BOUNDARY)
        text.append(token.piece, style=COUNTED if token.counted else SILENT)
    padding = sum(token.document < 0 for token in tokens)
    if padding:
        text.append(f" ({padding} padding)", style=SILENT)
    return text


def token_table(tokens: Sequence[Token]) -> Table:
    """One line a token: place, id, piece, document, whether the loss counts it."""
    table = Table("place", "id", "piece", "document", "loss", box=None, pad_edge=False)
    for place, (token, begins) in enumerate(_with_beginnings(tokens)):
        if token.document < 0:
            continue
        table.add_row(
            str(place),
            str(token.id),
            Text(token.piece),
            Text(f"▌{token.document}" if begins else str(token.document), style=BOUNDARY),
            Text("yes" if token.counted else "-"),
            style=COUNTED if token.counted else SILENT,
        )
    return table


def inspect_rows(
    dataset: DataSet,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    packing: Packing,
    units: Iterable[int],
    ids: bool = False,
    colour: bool = True,
) -> list[RenderableType]:
    """Rows of a data set, ready to print; `ids` adds a table with every id."""
    shown: list[RenderableType] = []
    for unit in units:
        batch = dataset.row(unit, seq_len, packing)
        counts = batch.counts
        tokens = row_tokens(batch, 0, tokenizer)
        title = (
            f"row {unit}: {counts.tokens} tokens of {counts.positions} positions,"
            f" {counts.targets} counted, {1 + max(token.document for token in tokens)} documents"
        )
        body: list[RenderableType] = [Text(title, style="bold")]
        body.append(coloured(tokens) if colour else Text("\n".join(plain_lines(tokens))))
        if ids:
            body.append(token_table(tokens))
        shown.append(Group(*body))
    return shown


def _with_beginnings(tokens: Sequence[Token]) -> list[tuple[Token, bool]]:
    before = [-1, *(token.document for token in tokens)]
    return [
        (token, token.document != previous) for token, previous in zip(tokens, before, strict=False)
    ]
