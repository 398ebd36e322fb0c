"""`foundling tokenizer ...`: learn a vocabulary, look at it, compare it, let it grow."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.cli.data import reading_options
from foundling.cli.options import (
    Options,
    Settings,
    Verb,
    free_text,
    positive,
    print_json,
    refuse_given,
)
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from foundling.data.readers.source import ReadOptions
    from foundling.tokenizer.bpe_trainer import Measure

Measures = dict[str, dict[str, "Measure"]]
"""By source, then by tokenizer."""

ALL = "all sources"
BYTES = 4_000_000
"""Text of each source that vocabularies are measured on."""
ROUND_TO = 64
"""Widths that matrix products like."""


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", help="whatever `data build` reads; several take turns")
    parser.add_argument("-o", "--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--vocab-size", type=positive, default=32768, help="tokens, special ones included"
    )
    parser.add_argument("--bytes", type=positive, default=100_000_000, help="text to learn from")
    parser.add_argument("--seed", type=int, default=1, help="seed of Hamlet")
    reading_options(parser)


def _train(options: Options, settings: Settings) -> None:
    from foundling.data.open_source import training_texts
    from foundling.runtime.console import say
    from foundling.tokenizer.bpe_trainer import train_tokenizer

    _refuse_occupied(options.output)
    read = 0

    def counted(texts: Iterator[str]) -> Iterator[str]:
        nonlocal read
        for text in texts:
            read += len(text.encode())
            yield text

    texts = training_texts(
        options.source, max_bytes=options.bytes, seed=options.seed, options=_reading(options)
    )
    tokenizer = train_tokenizer(counted(texts), options.vocab_size)
    tokenizer.save(options.output)
    mark = tokenizer.fingerprint[:12]
    say(
        f"{options.output}: {tokenizer.vocab_size:,} tokens from {read:,} bytes, fingerprint {mark}"
    )


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tokenizer", nargs="+", help="folders or files; GPT-2's and Llama 3's own files will do"
    )
    parser.add_argument("--encode", type=free_text, metavar="TEXT", help="show how a text is cut")
    parser.add_argument("--chat", action="store_true", help="--encode: it is a user's message")
    parser.add_argument(
        "--source", nargs="+", metavar="SPEC", help="text to measure on (default: hamlet)"
    )
    parser.add_argument("--bytes", type=positive, help=f"text of each source (default: {BYTES:,})")
    parser.add_argument("--seed", type=int, help="seed of Hamlet (default: 1)")
    reading_options(parser)
    parser.add_argument("--json", action="store_true", help="print what is measured as JSON")


def _inspect(options: Options, settings: Settings) -> None:
    if options.encode is None:
        refuse_given(options, ["chat"], "without --encode")
        return _measure(options)
    names = ("source", "bytes", "seed", "text", "template", "where", "stream", "json")
    refuse_given(options, (*names, "allow_broken_files"), "with --encode")
    return _encode(options)


def _encode(options: Options) -> None:
    """How each tokenizer cuts one text."""
    from foundling.tokenizer.tokenizer import Tokenizer

    for path in options.tokenizer:
        tokenizer = Tokenizer.load(path)
        message = {"role": "user", "content": options.encode}
        ids = tokenizer.prompt([message]) if options.chat else tokenizer.encode(options.encode)
        for identity in ids:
            print(f"{identity:>8}  {tokenizer.piece(identity)}")
        print(f"{path}: {len(ids)} tokens, {len(options.encode.encode())} bytes")


def _measure(options: Options) -> None:
    """How well each tokenizer fits the sources."""
    from foundling.data.open_source import labelled_texts
    from foundling.tokenizer.bpe_trainer import measure
    from foundling.tokenizer.tokenizer import Tokenizer

    names = _short(options.tokenizer)
    tokenizers = {names[path]: Tokenizer.load(path) for path in options.tokenizer}
    texts: dict[str, list[str]] = {}
    for spec, short in _short(options.source or ["hamlet"]).items():
        by_label = labelled_texts(
            spec,
            max_bytes=options.bytes or BYTES,
            seed=1 if options.seed is None else options.seed,
            options=_reading(options),
        )
        texts |= {f"{short} {label}".strip(): held for label, held in by_label.items()}
    found: Measures = {
        source: {name: measure(tokenizer, held) for name, tokenizer in tokenizers.items()}
        for source, held in texts.items()
    }
    if len(found) > 1:
        found[ALL] = {name: _summed(found, name) for name in tokenizers}
    if options.json:
        sizes = {
            name: {"vocab_size": t.vocab_size, "fast": t.fast, "why_slow": t.why_slow}
            for name, t in tokenizers.items()
        }
        rows = {
            source: {name: one.to_json() for name, one in by_name.items()}
            for source, by_name in found.items()
        }
        return print_json({"tokenizers": sizes, "sources": rows})
    return _print_measures(found, {name: t.vocab_size for name, t in tokenizers.items()})


def _short(paths: list[str]) -> dict[str, str]:
    """Each path's last part, where that is unique; else the whole path."""
    last = {path: path.rstrip("/").rsplit("/", 1)[-1] for path in paths}
    return last if len(set(last.values())) == len(last) else {path: path for path in paths}


def _summed(found: Measures, name: str) -> "Measure":
    first, *rest = (by_name[name] for by_name in found.values())
    for more in rest:
        first = first + more
    return first


def _print_measures(found: Measures, sizes: dict[str, int]) -> None:
    from rich.table import Table

    from foundling.runtime.console import console

    table = Table(box=None, pad_edge=False)
    for column in ("source", "tokenizer"):
        table.add_column(column, overflow="fold")
    for column in ("vocabulary", "bytes/token", "tokens/word", "1-byte", "round trip", "MB/s"):
        table.add_column(column, justify="right")
    for source, by_name in found.items():
        for number, (name, one) in enumerate(by_name.items()):
            table.add_row(
                source if number == 0 else "",
                name,
                f"{sizes[name]:,}",
                f"{one.bytes_per_token:.3f}",
                f"{one.fertility:.3f}",
                f"{one.single_share:.1%}",
                "exact" if not one.changed else f"{one.changed:,} of {one.texts:,} changed",
                f"{one.mb_per_s:.1f}",
                end_section=number == len(by_name) - 1,
            )
    console().print(table, soft_wrap=False)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tokenizer", type=Path, help="folder or tokenizer.json")
    parser.add_argument("token", nargs="+", help="special tokens to append, such as '<|think|>'")
    parser.add_argument("-o", "--output", required=True, type=Path, help="folder to write")


def _add(options: Options, settings: Settings) -> None:
    from foundling.runtime.console import say
    from foundling.tokenizer.tokenizer import Tokenizer

    _refuse_occupied(options.output)
    larger = Tokenizer.load(options.tokenizer).grown(options.token)
    larger.save(options.output)
    for token in options.token:
        say(f"{larger.extra_ids[token]:>8}  {token}")
    size = larger.vocab_size
    rounded = -(-size // ROUND_TO) * ROUND_TO
    say(
        f"{options.output}: {size:,} tokens, fingerprint {larger.fingerprint[:12]}. An assistant's"
        " messages may spell the new ones. Build data with it, and train --start of a run that"
        f" had the old one: its embeddings grow (--model.vocab-size 0, or {rounded} for a multiple"
        f" of {ROUND_TO})."
    )


def _reading(options: Options) -> "ReadOptions":
    from foundling.data.readers.source import ReadOptions

    names = ("text", "template", "schema", "max_chars", "stream", "allow_broken_files")
    return ReadOptions(
        where=tuple(options.where), **{name: getattr(options, name) for name in names}
    )


def _refuse_occupied(folder: Path) -> None:
    from foundling.runtime.files import refuse_file

    refuse_file(folder)
    if (folder / "tokenizer.json").exists():
        raise ConfigError(f"{folder} holds a tokenizer already; give another folder.")


VERBS = {
    "tokenizer train": Verb(
        "learn a vocabulary from text",
        _train_options,
        _train,
        duration_hint=lambda o: (
            f"about {1 + o.bytes / 4e6:,.0f} s for {o.bytes / 1e6:,.1f} MB of text on two cores"
        ),
    ),
    "tokenizer inspect": Verb(
        "compare vocabularies on text, or show how one text is cut",
        _inspect_options,
        _inspect,
        duration_hint=lambda o: (
            f"about a second for {(o.bytes or BYTES) / 1e6:,.1f} MB, each vocabulary and source"
            if o.encode is None
            else ""
        ),
    ),
    "tokenizer add": Verb("append special tokens", _add_options, _add),
}
