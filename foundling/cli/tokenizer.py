"""`foundling tokenizer ...`: learn a vocabulary, look at it, compare it, let it grow."""

from collections.abc import Iterator
from pathlib import Path

from foundling.cli.data import READING, read_options
from foundling.cli.options import (
    JSON,
    Option,
    Options,
    Verb,
    free_text,
    output_option,
    positive,
    print_json,
)
from foundling.config.errors import ConfigError

_ROUND_TO = 64
"""Widths that matrix products like."""
_FOLDER = output_option("folder to write", metavar="DIR", required=True)
_SEED = Option("--seed", "seed of Hamlet", int, 1)
_TRAIN_OPTIONS = (
    Option("source", "whatever `data build` reads; several take turns", nargs="+"),
    _FOLDER,
    Option("--vocab-size", "tokens, special ones included", positive, 32768),
    Option("--bytes", "text to learn from", positive, "100M"),
    _SEED,
    *READING,
)


def _train(options: Options) -> None:
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
        options.source, max_bytes=options.bytes, seed=options.seed, options=read_options(options)
    )
    tokenizer = train_tokenizer(counted(texts), options.vocab_size)
    tokenizer.save(options.output)
    mark = tokenizer.fingerprint[:12]
    say(
        f"{options.output}: {tokenizer.vocab_size:,} tokens from {read:,} bytes, fingerprint {mark}"
    )


_INSPECT_OPTIONS = (
    Option("tokenizer", "folders or files; GPT-2's and Llama 3's own files will do", nargs="+"),
    Option("--encode", "show how a text is cut", free_text, only_with=()),
    Option("--chat", "it is a user's message", bool, requires="encode"),
    Option("--source", "text to measure on (default: hamlet)", nargs="+", metavar="SPEC"),
    Option("--bytes", "text of each source", positive, "4M"),
    JSON,
    _SEED,
    *READING,
)


def _inspect(options: Options) -> None:
    return _measure(options) if options.encode is None else _encode(options)


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
    from foundling.runtime.console import console
    from foundling.tokenizer.bpe_trainer import measure_sources, measures_table
    from foundling.tokenizer.tokenizer import Tokenizer

    names = _short(options.tokenizer)
    tokenizers = {names[path]: Tokenizer.load(path) for path in options.tokenizer}
    texts: dict[str, list[str]] = {}
    for spec, short in _short(options.source or ["hamlet"]).items():
        by_label = labelled_texts(
            spec,
            max_bytes=options.bytes,
            seed=options.seed,
            options=read_options(options),
        )
        texts |= {f"{short} {label}".strip(): held for label, held in by_label.items()}
    found = measure_sources(tokenizers, texts)
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
    return console().print(measures_table(found, tokenizers), soft_wrap=False)


def _short(paths: list[str]) -> dict[str, str]:
    """Each path's last part, where that is unique; else the whole path."""
    last = {path: path.rstrip("/").rsplit("/", 1)[-1] for path in paths}
    return last if len(set(last.values())) == len(last) else {path: path for path in paths}


_ADD_OPTIONS = (
    Option("tokenizer", "folder or tokenizer.json", Path),
    Option("token", "special tokens to append, such as '<|think|>'", nargs="+"),
    _FOLDER,
)


def _add(options: Options) -> None:
    from foundling.runtime.console import say
    from foundling.tokenizer.tokenizer import Tokenizer

    _refuse_occupied(options.output)
    larger = Tokenizer.load(options.tokenizer).grown(options.token)
    larger.save(options.output)
    for token in options.token:
        say(f"{larger.extra_ids[token]:>8}  {token}")
    size = larger.vocab_size
    rounded = -(-size // _ROUND_TO) * _ROUND_TO
    say(
        f"{options.output}: {size:,} tokens, fingerprint {larger.fingerprint[:12]}. An assistant's"
        " messages may spell the new ones. Build data with it, and train --start of a run that"
        f" had the old one: its embeddings grow (--model.vocab-size 0, or {rounded} for a multiple"
        f" of {_ROUND_TO})."
    )


def _refuse_occupied(folder: Path) -> None:
    from foundling.runtime.files import refuse_file

    refuse_file(folder)
    if (folder / "tokenizer.json").exists():
        raise ConfigError(f"{folder} holds a tokenizer already; give another folder.")


VERBS = {
    "tokenizer train": Verb(
        "learn a vocabulary from text",
        _TRAIN_OPTIONS,
        _train,
        duration_hint=lambda o: (
            f"about {1 + o.bytes / 4e6:,.0f} s for {o.bytes / 1e6:,.1f} MB of text on two cores"
        ),
    ),
    "tokenizer inspect": Verb(
        "compare vocabularies on text, or show how one text is cut",
        _INSPECT_OPTIONS,
        _inspect,
        duration_hint=lambda o: (
            f"about a second for {o.bytes / 1e6:,.1f} MB, each vocabulary and source"
            if o.encode is None
            else ""
        ),
    ),
    "tokenizer add": Verb("append special tokens", _ADD_OPTIONS, _add),
}
