"""`foundling tokenizer ...`: learn a vocabulary and look at it."""

import argparse
from pathlib import Path

from foundling.config.errors import ConfigError
from foundling.verbs.base import Options, Settings, Verb, positive


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", help="hamlet, hamlet:chat, or files")
    parser.add_argument("-o", "--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--vocab-size", type=positive, default=32768, help="tokens, special ones included"
    )
    parser.add_argument("--bytes", type=positive, default=100_000_000, help="text to learn from")
    parser.add_argument("--seed", type=int, default=1, help="seed of Hamlet")


def _train(options: Options, settings: Settings) -> None:
    from foundling.data import training_texts
    from foundling.runtime.log import say
    from foundling.tokenizer import train_tokenizer

    if (options.output / "tokenizer.json").exists():
        raise ConfigError(f"{options.output} holds a tokenizer already; give another folder.")
    texts = training_texts(options.source, max_bytes=options.bytes, seed=options.seed)
    tokenizer = train_tokenizer(texts, options.vocab_size)
    tokenizer.save(options.output)
    mark = tokenizer.fingerprint[:12]
    say(f"{options.output}: {tokenizer.vocab_size:,} tokens, fingerprint {mark}")


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tokenizer", type=Path, help="folder or tokenizer.json")
    parser.add_argument("text", help="what to encode")
    parser.add_argument("--chat", action="store_true", help="treat the text as a user's message")


def _inspect(options: Options, settings: Settings) -> None:
    from foundling.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(options.tokenizer)
    message = {"role": "user", "content": options.text}
    ids = tokenizer.prompt([message]) if options.chat else tokenizer.encode(options.text)
    for identity in ids:
        print(f"{identity:>8}  {tokenizer.piece(identity)}")
    print(f"{len(ids)} tokens, {len(options.text.encode())} bytes")


VERBS = {
    "tokenizer train": Verb("learn a vocabulary from text", _train_options, _train),
    "tokenizer inspect": Verb("show how a text is cut", _inspect_options, _inspect),
}
