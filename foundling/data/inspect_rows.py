"""What a row looks like to the model: ids, pieces, where documents begin, what the loss counts.

In colour each piece is green where the loss counts it and dim where it does not; without colour the
same is said by brackets: [counted] and plain. A bar stands where a document, or the continuation of
one that was cut, begins; conversations are shown turn by turn. Rows of a source that was never
built are shown as what they would become, bad ones with the reason why they would not.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foundling.config.errors import ConfigError
from foundling.config.packing_spec import Packing
from foundling.data.batch import IGNORE, Batch
from foundling.data.dataset import DataSet
from foundling.data.readers.source import VAL_SHARE, Row, excerpt, is_held_out, unusable
from foundling.tokenizer.chat import ROLES, Message
from foundling.tokenizer.tokenizer import Tokenizer

COUNTED, SILENT, BOUNDARY = "bold green", "dim", "bold yellow"
CUT, PADDING = "(goes on)", ""
"""Names in place of a role: a row that begins within a turn, and text outside of turns."""


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


def plain_lines(tokens: Sequence[Token], width: int = 100, before: int = -1) -> list[str]:
    """Pieces without colour: counted ones in brackets, a bar where a document begins; `before` is
    the document of what comes before."""
    words = [
        ("| " if begins else "") + (f"[{token.piece}]" if token.counted else token.piece)
        for token, begins in _with_beginnings(tokens, before)
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


def coloured(tokens: Sequence[Token], before: int = -1) -> Text:
    """Pieces as running text, coloured by whether the loss counts them."""
    text = Text()
    for token, begins in _with_beginnings(tokens, before):
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


def turns(tokens: Sequence[Token], tokenizer: Tokenizer) -> list[tuple[str, list[Token]]]:
    """A row of conversations in turns, each with who speaks; BOS belongs to the first turn.

    A row may begin in the middle of a turn that was cut; who speaks there is not in the row.
    """
    role_of = {tokenizer.special_ids[role]: role for role in ROLES}
    parts: list[tuple[str, list[Token]]] = []
    for token, begins in _with_beginnings(tokens):
        role = role_of.get(token.id) if token.document >= 0 else None
        opened = bool(parts) and parts[-1][0] == "" and not begins
        if role is not None and opened:  # BOS is waiting for its turn
            parts[-1] = (role, parts[-1][1])
        elif role is not None or begins:
            starts = token.document >= 0 and token.id == tokenizer.bos_id
            parts.append((role or ("" if starts else CUT if token.document >= 0 else PADDING), []))
        parts[-1][1].append(token)
    return parts


def shown(
    title: str,
    tokens: Sequence[Token],
    tokenizer: Tokenizer,
    *,
    chat: bool,
    ids: bool,
    colour: bool,
) -> RenderableType:
    """One row, ready to print."""
    body: list[RenderableType] = [Text(title, style="bold")]
    if chat:
        body += _turn_lines(turns(tokens, tokenizer), colour)
    else:
        body.append(coloured(tokens) if colour else Text("\n".join(plain_lines(tokens))))
    if ids:
        body.append(token_table(tokens))
    return Group(*body)


def _turn_lines(parts: Sequence[tuple[str, list[Token]]], colour: bool) -> Iterator[Text]:
    width = max(map(len, (*ROLES, CUT)))
    before = -1
    for role, part in parts:
        label = f"{role:>{width}}  "
        if colour:
            yield Text.assemble((label, BOUNDARY), coloured(part, before))
        else:
            first, *more = plain_lines(part, before=before)
            yield Text("\n".join([label + first, *(" " * len(label) + line for line in more)]))
        before = part[-1].document


def inspect_rows(
    dataset: DataSet,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    packing: Packing,
    first: int = 0,
    count: int = 2,
    ids: bool = False,
    colour: bool = True,
) -> list[RenderableType]:
    """Rows of a data set, ready to print; `ids` adds a table with every id."""
    rows = dataset.units(seq_len, packing)
    if not 0 <= first < rows:
        raise ConfigError(
            f"--first {first} is outside the {rows} {dataset.split} rows of {dataset.folder}."
        )
    chat = dataset.manifest.kind == "chat"
    out: list[RenderableType] = []
    for unit in range(first, min(first + count, rows)):
        batch = dataset.row(unit, seq_len, packing)
        counts = batch.counts
        tokens = row_tokens(batch, 0, tokenizer)
        title = (
            f"row {unit}: {counts.tokens} tokens of {counts.positions} positions,"
            f" {counts.targets} counted, {1 + max(token.document for token in tokens)} documents"
        )
        out.append(shown(title, tokens, tokenizer, chat=chat, ids=ids, colour=colour))
    return out


def inspect_source(
    rows: Iterable[Row],
    tokenizer: Tokenizer,
    *,
    first: int = 0,
    count: int = 2,
    only_held_out: bool = False,
    ids: bool = False,
    colour: bool = True,
) -> Iterator[RenderableType]:
    """What the rows of a source would become, ready to print."""
    if only_held_out:
        rows = (
            row
            for row in rows
            if unusable(row, row.messages is not None) is None and is_held_out(row, VAL_SHARE)
        )
    for number, row in enumerate(islice(rows, first, first + count), first):
        chat = row.messages is not None
        name = f"row {number} ({row.where or row.source})"
        reason = unusable(row, chat)
        if reason is not None:
            yield Text(f"{name}: to quarantine, {reason}\n{excerpt(row)!r}")
            continue
        messages = row.messages or ()
        tokens = (
            chat_tokens(messages, tokenizer) if chat else text_tokens(row.text or "", tokenizer)
        )
        counted = sum(token.counted for token in tokens)
        side = "held out" if is_held_out(row, VAL_SHARE) else "for training"
        title = f"{name}: {len(tokens)} tokens, {counted} counted, kind {row.kind}, {side}"
        yield shown(title, tokens, tokenizer, chat=chat, ids=ids, colour=colour)


def _with_beginnings(tokens: Sequence[Token], before: int = -1) -> list[tuple[Token, bool]]:
    previous = [before, *(token.document for token in tokens)]
    return [
        (token, token.document != document)
        for token, document in zip(tokens, previous, strict=False)
    ]
