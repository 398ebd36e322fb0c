"""A small built Hamlet that many tests train on, and the settings of a run of a second."""

from pathlib import Path
from typing import NamedTuple


class Village(NamedTuple):
    """A built data set of documents, one of conversations, and their tokenizer."""

    tokenizer: Path
    text: Path
    chat: Path


def build_village(home: Path) -> Village:
    """40,000 tokens of documents and 12,000 of conversations."""
    from foundling.data.build.build import build
    from foundling.data.open_source import open_source, training_texts
    from foundling.tokenizer.bpe_trainer import train_tokenizer

    tokenizer = train_tokenizer(training_texts(["hamlet", "hamlet:chat"], max_bytes=100_000), 400)
    tokenizer.save(home / "tokenizer")
    for spec, tokens in (("hamlet", 40_000), ("hamlet:chat", 12_000)):
        source = open_source(spec, val_share=0.05)
        folder = home / spec.replace("hamlet:", "").replace("hamlet", "text")
        build(source, tokenizer, folder, name=source.name, kind=source.kind, max_tokens=tokens)
    return Village(home / "tokenizer", home / "text", home / "chat")


TINY = {
    "model.vocab-size": "0",
    "model.dim": "32",
    "model.layers": "2",
    "model.heads": "2",
    "model.ffn-dim": "64",
    "train.seq-len": "64",
    "train.batch-size": "4",
    "train.horizon": "8",
    "train.threads": "1",
    "checkpoint.every": "3",
    "eval.every": "4",
    "eval.tokens": "1000",
    "log.every": "2",
    "log.tensorboard": "false",
}
