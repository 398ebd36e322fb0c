"""`foundling data build`: text or conversations into a data set."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundling.config.errors import ConfigError
from foundling.verbs.base import Options, Settings, Verb, positive, share

if TYPE_CHECKING:
    from foundling.config.manifest import Manifest
    from foundling.data.engines import Specs

VILLAGE = ("hamlet", "hamlet:chat")
RECIPE_TOKENIZER = "hf://openai-community/gpt2"
"""What a recipe is tokenised with unless told otherwise: the vocabulary most accounts use."""
SCHEMAS = ("auto", "text", "messages", "sharegpt", "alpaca", "prompt-completion", "preference")
FILTERS = ("gopher-quality", "gopher-repetition", "c4-quality", "fineweb-quality", "minhash")


def _build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="+",
        help="hamlet, hamlet:chat, files, folders or patterns of text, JSONL, JSON, CSV, Parquet or"
        " Arrow (.gz, .zst, .xz, .bz2 too), hf://datasets/OWNER/NAME[@config][:split], or a recipe",
    )
    parser.add_argument(
        "--tokenizer", help=f"folder, or hf://OWNER/NAME (for a recipe: {RECIPE_TOKENIZER})"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="folder to write (for a recipe: data/NAME)"
    )
    parser.add_argument("--tokens", type=positive, help="stop after this many tokens for training")
    parser.add_argument("--documents", type=positive, help="read only so many rows of each source")
    parser.add_argument("--val-share", type=share, default=0.02, help="share of rows held out")
    parser.add_argument("--seed", type=int, default=1, help="seed of Hamlet and of the shuffle")
    reading_options(parser)
    parser.add_argument(
        "--keep-duplicates", action="store_true", help="keep documents that came before"
    )
    parser.add_argument(
        "--decontaminate",
        nargs="+",
        default=[],
        metavar="PATH",
        help="evaluation sets: a document that shares 13 words in a row with one is left out",
    )
    parser.add_argument(
        "--filter",
        action="append",
        choices=FILTERS,
        default=[],
        help="quality filter or removal of near-duplicates by datatrove, before the build",
    )
    parser.add_argument(
        "--max-bad", type=share, default=0.05, help="share of unusable rows that stops the build"
    )
    parser.add_argument(
        "--shard-tokens", type=positive, default=100_000_000, help="tokens of a shard at most"
    )
    parser.add_argument(
        "--follow", action="store_true", help="write shards in waves, for training that follows"
    )
    parser.add_argument("--workers", type=positive, help="processes (default: one a core)")
    parser.add_argument(
        "--engine",
        choices=("local", "ray", "slurm"),
        default="local",
        help="where the work is done; ray and slurm need a folder that every machine sees",
    )


def reading_options(parser: argparse.ArgumentParser) -> None:
    """What a user may say about the rows of a source."""
    parser.add_argument("--text", default="", metavar="COLUMN", help="column of the text")
    parser.add_argument(
        "--template", default="", help=r"text built from columns, such as '{title}\n\n{body}'"
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="EXPR",
        help="keep rows for which this holds: score>=3, language=en, source!=x, title~regex",
    )
    parser.add_argument("--schema", choices=SCHEMAS, default="auto", help="form of the rows")
    parser.add_argument(
        "--max-chars", type=positive, default=10_000_000, help="longer rows go to quarantine"
    )
    parser.add_argument(
        "--stream", action="store_true", help="store nothing of a remote source on the way"
    )
    parser.add_argument(
        "--allow-broken-files",
        action="store_true",
        help="use what comes before the place where a file breaks off (default: refuse the file)",
    )


def _build(options: Options, settings: Settings) -> None:
    from foundling.data import build
    from foundling.data.progress import Meter
    from foundling.runtime.files import naming_full_disk
    from foundling.runtime.log import say, warn
    from foundling.tokenizer import Tokenizer

    output, folder = _output(options), _tokenizer(options)
    if set(options.source) & set(VILLAGE) and options.tokens is None and options.documents is None:
        raise ConfigError("hamlet never ends by itself; say how much with --tokens.")
    specs = _specs(options)
    tokenizer = Tokenizer.load(folder)
    sources: Sequence[Any] = specs.open()
    if options.filter:
        from foundling.data.quality import filtered

        if options.engine == "slurm":
            raise ConfigError(
                "--filter works on this machine and --engine slurm on others; use ray."
            )
        sources = filtered(sources, options.filter, output, _workers(options))
    with Meter() as meter, naming_full_disk(output):
        manifest = build(
            sources,
            tokenizer,
            output,
            max_tokens=options.tokens,
            val_share=options.val_share,
            seed=options.seed,
            shard_tokens=options.shard_tokens,
            keep_duplicates=options.keep_duplicates,
            decontaminate=options.decontaminate,
            follow=options.follow,
            max_bad=options.max_bad,
            allow_broken_files=options.allow_broken_files,
            workers=_workers(options),
            engine=options.engine,
            specs=specs,
            progress=meter.show,
        )
    if options.tokens is not None and manifest.train_tokens < options.tokens:
        warn(
            f"{output} has {manifest.train_tokens:,} tokens where --tokens asks for"
            f" {options.tokens:,}: the source holds no more; add sources, or plan for repeats."
        )
    if unknown := manifest.recipe.get("result", {}).get("unknown_tokens"):
        warn(
            f"{unknown:,} tokens of {output} are the tokenizer's unknown token, and the text that"
            " they stand for is lost; give a tokenizer that has tokens for it."
        )
    if not manifest.val:
        warn(f"{output} holds nothing out, so no run on it will have a held-out score.")
    say(_told(output, manifest))


def _output(options: Options) -> Path:
    """Where to write: as told, or under the name of a recipe."""
    if options.output is not None:
        return Path(options.output)
    from foundling.data.hub import recipe_of

    if len(options.source) == 1 and recipe_of(options.source[0]) is not None:
        return Path("data") / str(options.source[0]).replace(":", "-").replace("@", "-")
    raise ConfigError("say where to write with -o FOLDER.")


def _tokenizer(options: Options) -> Path:
    """The folder of the tokenizer, fetched where it is not on this machine."""
    from foundling.data.hub import recipe_of

    name: str | None = options.tokenizer
    if name is None and all(recipe_of(spec) is not None for spec in options.source):
        name = RECIPE_TOKENIZER
    if name is None:
        raise ConfigError(
            "name a tokenizer with --tokenizer; `foundling tokenizer train` makes one."
        )
    if not name.startswith("hf://"):
        return Path(name)
    from foundling.data.hub.ahead import fetch_tokenizer

    folder, _ = fetch_tokenizer(name, None)
    return folder


def _specs(options: Options) -> "Specs":
    from foundling.data.engines import Specs
    from foundling.data.hub import is_remote

    if options.stream and not any(is_remote(spec) for spec in options.source):
        raise ConfigError("--stream has no effect on files of this machine; leave it out.")
    names = ("text", "template", "schema", "max_chars", "stream")
    reading = {name: getattr(options, name) for name in names}
    return Specs(
        specs=tuple(options.source),
        options={**reading, "where": tuple(options.where)},
        seed=options.seed,
        documents=options.documents,
        val_share=options.val_share,
    )


def _workers(options: Options) -> int:
    import os

    if options.workers:
        most = 4 * max(os.cpu_count() or 1, 16)
        if options.engine == "local" and options.workers > most:
            raise ConfigError(
                f"--workers {options.workers} is more than this machine can use; give at most"
                f" {most}, best one a core."
            )
        return int(options.workers)
    if hasattr(os, "sched_getaffinity"):  # what a container or a job may use, not what there is
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _told(output: Path, manifest: "Manifest") -> str:
    """One line about a finished data set."""
    held_out = sum(shard.tokens for shard in manifest.val)
    result = manifest.recipe.get("result", {})
    text = (
        f"{output}: {manifest.train_tokens:,} tokens in {len(manifest.train)} shards,"
        f" {held_out:,} held out, {result.get('quarantined', 0):,} rows in quarantine"
    )
    for count, words in (
        ("duplicates", "duplicates dropped"),
        ("overlapping", "left out for overlap with evaluation sets"),
        ("filtered", "filtered out"),
        ("rejected", "rejected answers left out"),
        ("lost", "rows lost where files break off"),
    ):
        if result.get(count):
            text += f", {result[count]:,} {words}"
    return text


VERBS = {
    "data build": Verb(
        "turn text or chats into shards",
        _build_options,
        _build,
        lasts="its speed, and the time left where the end is known, are shown every 10 s",
    )
}
