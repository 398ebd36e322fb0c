"""`foundling data ...`: build, fetch, inspect and verify data sets."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from foundling.cli.options import Options, Settings, Verb, count, positive, print_json, share
from foundling.config.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foundling.config.data_manifest import Manifest
    from foundling.data.build.executor import Specs

# `foundling data build`: text or conversations into a data set.

SCHEMAS = ("auto", "text", "messages", "sharegpt", "alpaca", "prompt-completion", "preference")
FILTERS = ("gopher-quality", "gopher-repetition", "c4-quality", "fineweb-quality", "minhash")


def _build_options(parser: argparse.ArgumentParser) -> None:
    from foundling.data.hub.recipes import RECIPE_TOKENIZER

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
    from foundling.data.build.build import build_from_specs
    from foundling.runtime.console import say

    output = _output(options)
    manifest = build_from_specs(
        _specs(options),
        options.tokenizer,
        output,
        filters=options.filter,
        max_tokens=options.tokens,
        shard_tokens=options.shard_tokens,
        keep_duplicates=options.keep_duplicates,
        decontaminate=options.decontaminate,
        follow=options.follow,
        max_bad=options.max_bad,
        allow_broken_files=options.allow_broken_files,
        workers=options.workers,
        engine=options.engine,
    )
    say(_told(output, manifest))


def _output(options: Options) -> Path:
    """Where to write: as told, or under the name of a recipe."""
    if options.output is not None:
        return Path(options.output)
    from foundling.data.hub.recipes import recipe_of

    if len(options.source) == 1 and recipe_of(options.source[0]) is not None:
        return Path("data") / str(options.source[0]).replace(":", "-").replace("@", "-")
    raise ConfigError("say where to write with -o FOLDER.")


def _specs(options: Options) -> "Specs":
    from foundling.data.build.executor import Specs

    names = ("text", "template", "schema", "max_chars", "stream")
    reading = {name: getattr(options, name) for name in names}
    return Specs(
        specs=tuple(options.source),
        options={**reading, "where": tuple(options.where)},
        seed=options.seed,
        documents=options.documents,
        val_share=options.val_share,
    )


def _told(output: Path, manifest: "Manifest") -> str:
    """One line about a finished data set."""
    held_out = sum(shard.tokens for shard in manifest.val)
    result = manifest.recipe.get("result", {})
    text = (
        f"{output}: {manifest.train_tokens:,} tokens in {len(manifest.train)} shards,"
        f" {held_out:,} held out, {result.get('quarantined', 0):,} rows in quarantine"
    )
    for counted, words in (
        ("duplicates", "duplicates dropped"),
        ("overlapping", "left out for overlap with evaluation sets"),
        ("filtered", "filtered out"),
        ("rejected", "rejected answers left out"),
        ("lost", "rows lost where files break off"),
    ):
        if result.get(counted):
            text += f", {result[counted]:,} {words}"
    return text


DATA_VERBS = {
    "data build": Verb(
        "turn text or chats into shards",
        _build_options,
        _build,
        lasts="its speed, and the time left where the end is known, are shown every 10 s",
    )
}


# `foundling data fetch`, `data recipes` and `tokenizer fetch`: from the hub, ahead of time.


def _fetch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a recipe, or hf://datasets/OWNER/NAME[@config][:split]")
    parser.add_argument("--shards", type=positive, help="only the first so many files")
    parser.add_argument("--tokens", type=positive, help="about so many tokens, and a tenth more")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="FILTER",
        help="of source code by ids: only files that pass, such as language=Python",
    )
    parser.add_argument("--workers", type=positive, default=8, help="files on their way at once")


def _fetch(options: Options, settings: Settings) -> None:
    from foundling.data.hub.opening import fetch_ahead, fetch_blobs, plan_fetch
    from foundling.runtime.console import say

    if options.where and not _has_blobs(options.source):
        raise ConfigError(
            f"{options.source} is fetched by whole files, so --where has no effect here; give it to"
            " `data build`."
        )
    plan = plan_fetch(options.source, shards=options.shards, tokens=options.tokens)
    held = "" if plan.recipe and plan.recipe.blobs else f", about {_short(plan.tokens)} tokens"
    say(
        f"{plan.spec}: {len(plan.files):,} of {plan.of:,} files, {plan.size / 1e9:,.2f} GB{held}"
        + (f" ({plan.recipe.licence})" if plan.recipe else "")
    )
    with _progress(plan.size, plan.spec) as progress:
        folder = fetch_ahead(plan, workers=options.workers, progress=progress)
    if plan.recipe and plan.recipe.blobs:

        def told(name: str, documents: int, tokens: float) -> None:
            say(f"{name}: {documents:,} documents, about {_short(tokens)} tokens so far")

        held = f", about {_short(fetch_blobs(plan, told, tuple(options.where)))} tokens"
    say(f"fetched and checked: {len(plan.files):,} files{held} in {folder}")


def _has_blobs(spec: str) -> bool:
    from foundling.data.hub.recipes import recipe_of

    known = recipe_of(spec)
    return known is not None and known[0].blobs


def _recipes_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixtures", action="store_true", help="published mixtures, as configs")


def _recipes(options: Options, settings: Settings) -> None:
    from foundling.data.hub.recipes import MIXTURES, RECIPES, mixture_text
    from foundling.runtime.console import say

    if options.mixtures:
        for name in MIXTURES:
            say(f"# {name}\n{mixture_text(name)}")
        return
    for recipe in RECIPES.values():
        say(f"{recipe.name:<18}{recipe.kind}  {recipe.size}")
        for line in (recipe.about, f"{recipe.uri}  ({recipe.licence})"):
            say(f"    {line}")


def _tokenizer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="hf://OWNER/NAME[#revision] of a model")
    parser.add_argument("-o", "--output", type=Path, help="folder to write (default: hub's cache)")


def _fetch_tokenizer(options: Options, settings: Settings) -> None:
    from foundling.data.hub.opening import fetch_tokenizer
    from foundling.runtime.console import say

    folder, names = fetch_tokenizer(options.source, options.output)
    say(f"{folder}: {', '.join(names)}")


def _short(tokens: float) -> str:
    """A number as people say it."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return f"{tokens:.0f}"


@contextlib.contextmanager
def _progress(size: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; elsewhere a line now and then."""
    import threading
    import time

    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from foundling.runtime.console import console, say

    lock = threading.Lock()
    began = said = time.monotonic()
    arrived = 0
    shown = console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=size)

        def count(here: int) -> None:
            nonlocal arrived, said
            with lock:
                arrived += here
                bar.update(task, completed=arrived)
                now = time.monotonic()
                if not shown.is_terminal and now - said > 10 and size:
                    said = now
                    left = (now - began) * (size - arrived) / max(arrived, 1)
                    say(f"{what}: {arrived / 1e9:,.2f} of {size / 1e9:,.2f} GB, {left:,.0f} s left")

        yield count


FETCH_VERBS = {
    "data fetch": Verb(
        "download a data set ahead, checked",
        _fetch_options,
        _fetch,
        lasts="the time left is shown as files come",
    ),
    "data recipes": Verb("list data sets that have a name", _recipes_options, _recipes),
    "tokenizer fetch": Verb(
        "download a model's tokenizer",
        _tokenizer_options,
        _fetch_tokenizer,
        lasts="some megabytes, seconds on most networks",
    ),
}


# `foundling data verify`, `stats` and `inspect`: whether data can be trusted, and what it is.


@contextmanager
def _bytes_bar(folder: Path, what: str) -> Iterator[Callable[[int], None]]:
    """A bar of bytes for a terminal; nothing elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from foundling.config.data_manifest import Manifest
    from foundling.runtime.console import console

    manifest = Manifest.load(folder)
    total = sum(shard.file_bytes for shard in (*manifest.train, *manifest.val))
    screen = console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda size: bar.update(task, advance=size)


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, help="folder of a built data set")
    parser.add_argument(
        "--source", nargs="+", default=[], metavar="SPEC", help="what it was built from, in order"
    )
    parser.add_argument("--workers", type=count, default=0, help="threads; 0: all cores")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _verify(options: Options, settings: Settings) -> None:
    from foundling.data.verify import verify

    with _bytes_bar(options.data, "hashing") as progress:
        found = verify(
            options.data,
            specs=options.source,
            workers=options.workers,
            progress=progress,
        )
    if options.json:
        print_json(found.to_json())
    else:
        for words, sentences in (
            ("checked", found.checked),
            ("not checked", found.unchecked),
            ("WRONG", found.wrong),
        ):
            for sentence in sentences:
                print(f"{words:>12}  {sentence}")
    found.refuse()


def _stats_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, help="folder of a built data set")
    parser.add_argument(
        "--seq-len", type=count, default=2048, help="what each packing cuts and pads; 0: leave out"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def _stats(options: Options, settings: Settings) -> None:
    from foundling.data.statistics import describe_stats, stats

    with _bytes_bar(options.data, "counting") as progress:
        found = stats(options.data, seq_len=options.seq_len, progress=progress)
    if options.json:
        return print_json(found)
    for line in describe_stats(found):
        print(line)
    return None


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", help="folder of a built data set, or any source")
    parser.add_argument("--rows", type=positive, default=2, help="rows to show")
    parser.add_argument("--first", type=count, default=0, help="first row")
    parser.add_argument("--val", action="store_true", help="show what is held out")
    parser.add_argument("--tokenizer", type=Path, help="for a source: folder of the tokenizer")
    parser.add_argument("--seq-len", type=positive, default=256, help="train.seq_len of the run")
    parser.add_argument(
        "--packing",
        choices=("concat", "bestfit", "pad"),
        default="bestfit",
        help="data.packing of the run",
    )
    parser.add_argument("--ids", action="store_true", help="add a table with every id")


def _inspect(options: Options, settings: Settings) -> None:
    from foundling.config.data_manifest import MANIFEST_NAME
    from foundling.runtime.console import console

    built = (Path(options.data) / MANIFEST_NAME).exists()
    if not built and options.tokenizer is None:
        raise ConfigError(
            f"{options.data} holds no {MANIFEST_NAME}; to see what a source would become, say with"
            " which --tokenizer."
        )
    title, shown = _built(options) if built else _unbuilt(options)
    marks = "bold" if console().is_terminal else "[in brackets]"
    console().print(
        f"{title}: {marks} is what the loss counts, a bar begins a document", markup=False
    )
    for part in shown:
        console().print(part)


def _built(options: Options) -> "tuple[str, list[RenderableType]]":
    """Rows of a data set."""
    from foundling.data.dataset import TOKENIZER_FOLDER, DataSet
    from foundling.data.inspect_rows import inspect_rows
    from foundling.runtime.console import console
    from foundling.tokenizer.tokenizer import Tokenizer

    folder = Path(options.data)
    if options.tokenizer is not None:
        raise ConfigError(f"{folder} has its own tokenizer; leave --tokenizer out.")
    split = "val" if options.val else "train"
    dataset = DataSet(folder, split="val" if options.val else "train")
    tokenizer = Tokenizer.load(folder / TOKENIZER_FOLDER)
    if tokenizer.fingerprint != dataset.manifest.tokenizer:
        raise ConfigError(
            f"{folder / TOKENIZER_FOLDER} is not the tokenizer of the data set; see `foundling data"
            f" verify {folder}`."
        )
    rows = dataset.units(options.seq_len, options.packing)
    if not 0 <= options.first < rows:
        raise ConfigError(
            f"--first {options.first} is outside the {rows} {split} rows of {folder}."
        )
    shown = inspect_rows(
        dataset,
        tokenizer,
        seq_len=options.seq_len,
        packing=options.packing,
        units=range(options.first, min(options.first + options.rows, rows)),
        ids=options.ids,
        colour=console().is_terminal,
    )
    return f"{folder}, {split} split", shown


def _unbuilt(options: Options) -> "tuple[str, list[RenderableType]]":
    """What rows of a source would become."""
    from foundling.data.inspect_rows import inspect_source
    from foundling.data.open_source import open_source
    from foundling.data.readers.source import VAL_SHARE, is_held_out, unusable
    from foundling.runtime.console import console
    from foundling.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(options.tokenizer)
    rows = iter(open_source(options.data))
    if options.val:
        rows = (
            row
            for row in rows
            if unusable(row, row.messages is not None) is None and is_held_out(row, VAL_SHARE)
        )
    shown = inspect_source(
        rows,
        tokenizer,
        first=options.first,
        count=options.rows,
        ids=options.ids,
        colour=console().is_terminal,
    )
    parts = list(shown)
    if not parts:
        raise ConfigError(f"{options.data} has no row {options.first} to show.")
    return str(options.data), parts


TRUST_VERBS = {
    "data verify": Verb(
        "hash, check and re-tokenise a data set",
        _verify_options,
        _verify,
        lasts="every byte is read once, about a second for 500 MB; then the sample",
    ),
    "data stats": Verb(
        "count what a data set holds",
        _stats_options,
        _stats,
        lasts="about a second for five million tokens",
    ),
    "data inspect": Verb(
        "show rows with ids, boundaries and loss mask", _inspect_options, _inspect
    ),
}
