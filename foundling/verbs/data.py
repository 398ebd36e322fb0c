"""`foundling data ...`: build data sets and look at them."""

import argparse
from pathlib import Path

from foundling.config.errors import ConfigError
from foundling.verbs.base import Options, Settings, Verb, positive, share


def _build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="hamlet, hamlet:chat, or .txt/.jsonl/.parquet or a folder")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder of the tokenizer")
    parser.add_argument("-o", "--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--tokens", type=positive, help="stop after this many tokens for training")
    parser.add_argument("--val-share", type=share, default=0.02, help="share of rows held out")
    parser.add_argument("--seed", type=int, default=1, help="seed of Hamlet and of the shuffle")


def _build(options: Options, settings: Settings) -> None:
    from foundling.data import build, open_source
    from foundling.runtime.log import say, warn
    from foundling.tokenizer import Tokenizer

    if options.source in ("hamlet", "hamlet:chat") and options.tokens is None:
        raise ConfigError("hamlet never ends by itself; say how much with --tokens.")
    tokenizer = Tokenizer.load(options.tokenizer)
    source = open_source(options.source, seed=options.seed, val_share=options.val_share)
    manifest = build(
        source,
        tokenizer,
        options.output,
        name=source.name,
        kind=source.kind,
        max_tokens=options.tokens,
        val_share=options.val_share,
        seed=options.seed,
    )
    held_out = sum(shard.tokens for shard in manifest.val)
    bad = manifest.recipe["result"]["quarantined"]
    if not held_out:
        warn(f"{options.output} holds nothing out, so no run on it will have a held-out score.")
    say(
        f"{options.output}: {manifest.train_tokens:,} tokens in {len(manifest.train)} shards,"
        f" {held_out:,} held out, {bad} rows in quarantine"
    )


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, help="folder of a built data set")
    parser.add_argument("--rows", type=positive, default=2, help="rows to show")
    parser.add_argument("--first", type=int, default=0, help="first row")
    parser.add_argument("--seq-len", type=positive, default=256, help="train.seq_len of the run")
    parser.add_argument(
        "--packing",
        choices=("concat", "bestfit"),
        default="bestfit",
        help="data.packing of the run",
    )
    parser.add_argument("--ids", action="store_true", help="add a table with every id")


def _inspect(options: Options, settings: Settings) -> None:
    from foundling.data import TOKENIZER_FOLDER, DataSet, inspect_rows
    from foundling.runtime.log import console
    from foundling.tokenizer import Tokenizer

    dataset = DataSet(options.data)
    tokenizer = Tokenizer.load(options.data / TOKENIZER_FOLDER)
    rows = dataset.units(options.seq_len, options.packing)
    if not 0 <= options.first < rows:
        raise ConfigError(f"--first {options.first} is outside the {rows} rows of {options.data}.")
    shown = inspect_rows(
        dataset,
        tokenizer,
        seq_len=options.seq_len,
        packing=options.packing,
        units=range(options.first, min(options.first + options.rows, rows)),
        ids=options.ids,
        colour=console().is_terminal,
    )
    marks = "bold" if console().is_terminal else "[in brackets]"
    console().print(
        f"{options.data}, train split: {marks} is what the loss counts, a bar begins a document",
        markup=False,
    )
    for part in shown:
        console().print(part)


VERBS = {
    "data build": Verb("turn text or chats into shards", _build_options, _build),
    "data inspect": Verb(
        "show rows with ids, boundaries and loss mask", _inspect_options, _inspect
    ),
}
